"""Calls into deepseek-recipe: native code that reads what strangers wrote, and must not end the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dgr.errors import DgrError

__all__ = ["no_panic"]


@contextmanager
def no_panic(what: str) -> Iterator[None]:
    """A panic of the native code, or a stream it gives up, ends one request.

    A panic arrives as a ``BaseException`` of no importable type, which nothing else would stop.
    """
    try:
        yield
    except RuntimeError as error:
        raise DgrError(f"deepseek-recipe gave up {what}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DgrError(f"deepseek-recipe failed in {what}: {error}") from error
