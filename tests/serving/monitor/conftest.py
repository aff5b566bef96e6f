"""The server of the tests of HTTP."""

from __future__ import annotations

from serving.http.conftest import serve

__all__ = ["serve"]
