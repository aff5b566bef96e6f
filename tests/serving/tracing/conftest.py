"""A server on loopback, as the tests of HTTP have it."""

from serving.http.conftest import serve

__all__ = ["serve"]
