"""Towards one peer, who may be gone or hostile: what becomes of it concerns nobody else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from dgr.errors import WireError
from dgr.wire import frames
from dgr.wire.links import Link

__all__ = ["close", "confined", "grant", "say_ready"]

_log = logging.getLogger("dgr.shard")


def say_ready(link: Link, route: bytes, epoch: int) -> None:
    """Tell the stage before, if it is still there, that an epoch is admitted."""
    try:
        link.send_nowait(frames.Ready(route, epoch))
    except WireError:
        # The stage before is gone; its pipeline fences anew, and it asks again then.
        return


def grant(link: Link, size: int) -> None:
    """Give credit back to a sender, if it is still there."""
    try:
        link.grant(size)
    except WireError:
        # The sender is gone or does not read; its link ends, and the session that took the payload lives on.
        return


@contextmanager
def confined(what: str) -> Iterator[None]:
    """A defect of ours ends what serves one peer, and nothing else."""
    try:
        yield
    except Exception:
        _log.exception("%s ends by a defect; everything else goes on. Please report this", what)


async def close(link: Link) -> None:
    """Nobody reads the link any more: the other side must not wait for what will never come."""
    with trio.CancelScope(shield=True):
        await link.aclose()
