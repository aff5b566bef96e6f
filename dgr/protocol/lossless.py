"""Residuals in fewer bytes with nothing lost: wire type ``f32+zstd``.

What cannot be packed travels as it is; a payload's length alone tells which of the two it is. How it is packed:
:mod:`dgr.protocol.planes`, which is loaded by whoever packs.
"""

from __future__ import annotations

import importlib

import msgspec

from dgr.core.values import Wire
from dgr.errors import InputError
from dgr.protocol.threads import in_thread
from dgr.wire.frames import Boundary
from dgr.wire.links import Link

__all__ = ["push", "require_packer", "unpacked"]

#: Bytes of float32 that are packed or unpacked in less than a millisecond, so without a thread.
_AT_ONCE = 256 * 1024


def require_packer(wire: Wire) -> None:
    """Load what a wire type needs, before there are links: it takes longer than a heartbeat may on a busy machine.

    Raises :class:`InputError` for a library that is not installed.
    """
    if wire.packs:
        try:
            importlib.import_module("dgr.protocol.planes")
        except ModuleNotFoundError as error:
            raise InputError(
                f"wire {wire} needs {error.name}: install dgr with its extra `zstd` (pip install '.[zstd]' in its checkout),"
                " or choose wire f32"
            ) from error


async def push(link: Link, frame: Boundary, payload: bytes | memoryview) -> None:
    """Send a boundary to a next stage, packed where the route has agreed on it and the link leaves this host."""
    if link.limits.wire.packs and not link.within_host:
        from dgr.protocol import planes

        if frame.payload <= _AT_ONCE:
            packed = planes.pack(payload)
        else:
            packed = await in_thread(lambda: planes.pack(payload))
        if packed is not None:
            frame, payload = msgspec.structs.replace(frame, payload=packed.nbytes), packed
    await link.send(frame, payload)


async def unpacked(payload: memoryview, n_bytes: int) -> memoryview:
    """A boundary's payload as ``n_bytes`` for the engine, whichever way it came. Raises :class:`FrameError`."""
    if payload.nbytes == n_bytes:
        return payload
    from dgr.protocol import planes

    if n_bytes <= _AT_ONCE:
        return planes.unpack(payload, n_bytes)
    return await in_thread(lambda: planes.unpack(payload, n_bytes))
