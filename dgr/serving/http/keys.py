"""API keys: who may ask. Only their hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dgr.core.files.inputs import read_whole
from dgr.errors import InputError
from dgr.serving.api.errors import ApiError, ErrorShape
from dgr.wire.tcp import is_loopback

__all__ = ["ApiKeys", "App", "Gate", "Receive", "Scope", "Send", "send_error"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Shorter keys can be guessed.
_SHORTEST = 16
#: Bytes of a file of keys.
_MOST_BYTES = 1 << 20


class ApiKeys:
    """The keys of a server. ``None`` of them would be a server that is open to anyone."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """One key a line; blank lines and lines that begin with ``#`` do not count. Raises :class:`~dgr.errors.InputError`."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            lines = [line.strip() for line in read_whole(path, _MOST_BYTES, "a file of API keys").decode().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read API keys from {path}: {error}") from error
        if mode & 0o007:
            raise InputError(
                f"{path}: mode {mode:04o} lets every user of this host read or replace the API keys; run chmod 600 on it, and"
                " change the keys where others may have read them"
            )
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise InputError(
                f"{path} does not hold an API key; write one a line, for example the output of `openssl rand -hex 24`"
            )
        for number, key in enumerate(keys, 1):
            if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError(
                    f"{path}: key {number} is not {_SHORTEST} or more printable ASCII characters without spaces"
                )
        return cls(keys)

    def admits(self, key: str) -> bool:
        """Whether it is one of the keys; takes as long whichever it is."""
        given = _hash(key)
        return any([hmac.compare_digest(given, known) for known in self._hashes])  # noqa: C419 (all are compared)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


#: What lets others ask.
_WAY_OUT = "start it with --api-key-file FILE, or --allow-anyone where that is meant"


class Gate:
    """ASGI middleware: who may ask at all. It reads headers alone, so a client's leaving passes.

    401 without one of the ``keys``, except on ``open_paths``. Without keys on loopback (``local_only``) 403 for what a page
    of another site sends from this machine's browser. 505 for HTTP/2.
    """

    def __init__(
        self, app: App, keys: ApiKeys | None, open_paths: frozenset[str], *, local_only: bool, way_out: str = _WAY_OUT
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._local_only = local_only
        self._way_out = way_out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._objection(scope) if scope["type"] == "http" else None
        if error is not None:
            await send_error(send, error, ErrorShape.of(scope["path"]))
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        if scope.get("http_version", "1.1") not in ("1.0", "1.1"):
            return ApiError(505, "this server speaks HTTP/1.1", code="http_version_not_supported")
        if self._keys is not None and scope["path"] not in self._open_paths:
            kind, _, key = _header(scope, b"authorization").partition(" ")
            given = [key.strip()] if kind.lower() == "bearer" else []
            if not any(self._keys.admits(key) for key in (*given, _header(scope, b"x-api-key"))):
                ways = "`Authorization: Bearer KEY` or `x-api-key: KEY`"
                message = f"no valid API key was given; send {ways} with a key of this server"
                return ApiError(401, message, code="invalid_api_key")
        if self._local_only and not _is_local(scope):
            message = f"a server without API keys answers programs and pages of its own address alone; {self._way_out}"
            return ApiError(403, message, code="foreign_origin")
        return None


def _is_local(scope: Scope) -> bool:
    """Whether a request names this machine, and does not come from a page of another site."""
    host, origin = _header(scope, b"host"), _header(scope, b"origin")
    try:
        named, asking = urlsplit(f"//{host}").hostname, urlsplit(origin).netloc
    except ValueError:  # no address at all
        return False
    return is_loopback(named or "") and (not origin or asking == host)


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


async def send_error(send: Send, error: ApiError, shape: ErrorShape) -> None:
    """A whole response that says what was wrong."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body(shape)})
