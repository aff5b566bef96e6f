"""The first bytes of a link between processes: which schema the other side speaks.

Before any frame both sides send a fixed preamble: a magic word, the schema version and the schema's hash. Two builds that
would misread each other's frames thus part with both values named, and a stranger (a plain HTTP client, a TLS client on a
plain port) is told apart from a broken stage.
"""

from __future__ import annotations

import ssl
import struct

import trio

from dgr.errors import DeadlineExceeded, FrameError, LinkBroken, SchemaMismatch
from dgr.text import reason_of
from dgr.wire.frames import SCHEMA_HASH, SCHEMA_VERSION
from dgr.wire.framing import Limits

__all__ = ["HANDSHAKE_LIMITS", "exchange_preamble"]

#: What a link carries until both sides know the stage: Hello, Welcome, Denied.
HANDSHAKE_LIMITS = Limits(n_batch=1, boundary_width=1, n_vocab=1)

_PREAMBLE = struct.Struct("<6sH16s")
_MAGIC = b"dgr\r\n\0"


def _preamble() -> bytes:
    return _PREAMBLE.pack(_MAGIC, SCHEMA_VERSION, bytes.fromhex(SCHEMA_HASH))


async def exchange_preamble(transport: trio.abc.Stream, seconds: float, who: str = "the other side") -> None:
    """Send ours, read theirs, compare. ``who``: what a refusal calls the other side.

    Raises :class:`SchemaMismatch` for another dgr, :class:`FrameError` for none at all, :class:`LinkBroken`,
    :class:`DeadlineExceeded`.
    """
    try:
        with trio.fail_after(seconds):
            await transport.send_all(_preamble())
            theirs = await _receive_exactly(transport, _PREAMBLE.size)
    except trio.TooSlowError:
        raise DeadlineExceeded(f"the other side did not say what it speaks within {seconds:g} s") from None
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ssl.SSLError) and "ALERT_" in (cause.reason or ""):
            # With TLS 1.3 a client has done its part before the other side looks at its certificate.
            reason = cause.reason.rpartition("ALERT_")[2].replace("_", " ").lower()
            raise LinkBroken(
                f"the other side refused our certificate: {reason}; both sides need valid certificates of one CA (`dgr keys`)"
            ) from error
        raise LinkBroken(f"the other side closed the link before it said what it speaks: {reason_of(error)}") from error
    magic, version, schema = _PREAMBLE.unpack(theirs)
    if magic != _MAGIC:
        raise FrameError(f"{who} is not dgr: its first bytes are {theirs[:8]!r}")
    if (version, schema.hex()) != (SCHEMA_VERSION, SCHEMA_HASH):
        raise SchemaMismatch(
            f"{who} speaks schema {version} ({schema.hex()}), this one {SCHEMA_VERSION} ({SCHEMA_HASH}):"
            f" {_older(who, version)}; install the same dgr on both"
        )


def _older(who: str, version: int) -> str:
    if version == SCHEMA_VERSION:
        return "neither is older, they were built of different sources"
    return f"{who if version < SCHEMA_VERSION else 'this side'} is the older one"


async def _receive_exactly(transport: trio.abc.Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await transport.receive_some(size - len(data))
        if not part:
            raise LinkBroken(f"the other side closed the link after {len(data)} bytes, before it said what it speaks")
        data += part
    return data
