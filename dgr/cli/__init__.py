"""The ``dgr`` command: one module per command group."""

from __future__ import annotations

from dgr.cli.main import main

__all__ = ["main"]
