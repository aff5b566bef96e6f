"""Asking a stage who is on it, and emptying it before it is maintained."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio

from dgr.cluster.connect import LinkPolicy, open_greeted
from dgr.errors import DeadlineExceeded, LinkBroken, WireError
from dgr.wire.frames import Drain, Hello, Occupancy, Role

__all__ = ["Ask", "drain", "open_asking", "take_back"]

#: Seconds between two questions.
_PAUSE = 0.25
#: Seconds for the first answer, where fewer are given.
_FIRST = 1.0

#: Asks a stage, and returns its answer. Raises :class:`~dgr.errors.WireError`.
Ask: TypeAlias = Callable[[Drain], Awaitable[Occupancy]]


@asynccontextmanager
async def open_asking(address: str, policy: LinkPolicy, name: str) -> AsyncIterator[Ask]:
    """A control link to a stage that asks about the stage alone. ``name``: who asks, for the stage's log.

    Raises :class:`~dgr.errors.LinkBroken`, :class:`~dgr.errors.PeerRefused` or :class:`~dgr.errors.DeadlineExceeded` when
    there is none to be had.
    """
    async with open_greeted(address, policy, Hello(Role.PIPELINE, name, None)) as (link, _, _):

        async def ask(question: Drain) -> Occupancy:
            link.send_nowait(question)
            async for received in link:
                if isinstance(received.frame, Occupancy):
                    return received.frame
                raise WireError(f"stage {address} answered {type(received.frame).__name__} to Drain")
            raise LinkBroken(f"stage {address} closed the link")

        yield ask


async def drain(
    address: str,
    policy: LinkPolicy,
    *,
    seconds: float,
    idle: int,
    tell: Callable[[Occupancy], None] = lambda _: None,
) -> Occupancy:
    """Have a stage take nobody new, and wait until no session is left; ``tell`` hears of every change.

    Pipelines that know another stage of its layers move there at once, and prefill again; the others' answers end where they
    are, and a session without work for ``idle`` seconds ends. The stage stays drained, whatever happens here. Raises
    :class:`~dgr.errors.DeadlineExceeded` when sessions are left after ``seconds``, and what :func:`open_asking` raises.
    """
    seen: Occupancy | None = None
    began = trio.current_time()
    with trio.move_on_after(max(seconds, _FIRST)) as patience:
        async with open_asking(address, policy, "dgr drain") as ask:
            question = Drain(True, idle)
            while True:
                now = await ask(question)
                if seen is None or (now.routes, now.sessions) != (seen.routes, seen.sessions):
                    tell(now)
                seen, patience.deadline = now, began + seconds
                if not now.sessions:
                    return now
                question = Drain(None)
                await trio.sleep(_PAUSE)
    if seen is None:
        raise DeadlineExceeded(
            f"stage {address} has not answered within {max(seconds, _FIRST):g} s, and may not have heard that it is to be"
            " drained: see whether it is stopped or still loading"
        )
    raise DeadlineExceeded(
        f"stage {address} still holds {seen.sessions} sessions after {seconds:g} s. It stays drained: wait on (the same"
        " command again), end it all the same (its pipelines prefill again), or take it back (--undo)"
    )


async def take_back(address: str, policy: LinkPolicy) -> Occupancy:
    """Have a stage take sessions again. Raises what :func:`open_asking` raises."""
    async with open_asking(address, policy, "dgr drain") as ask:
        return await ask(Drain(False))
