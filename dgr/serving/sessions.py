"""Sessions kept between requests, found again by the tokens they hold.

A stateless API sends the whole conversation with every request. A kept session serves one whose tokens begin with *all*
that it has committed: V4's state has no way back, so a session that holds one token too many holds nothing for it. This
module is the seam for a store of states on the stages (copies taken at the end of a prompt): :meth:`SessionPool.take` would
then find a copy where it now finds a live session, and nothing above it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum

import msgspec
from attrs import define, frozen

from dgr.client.generation import GeneratedToken
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.core.values import SamplingParams
from dgr.wire.nurseries import open_nursery

__all__ = ["KeptSession", "Miss", "SessionPool", "Turn"]


class Miss(StrEnum):
    """Why a request was prefilled from its first token."""

    #: No kept session begins as the request does, but for a begin-of-text token.
    NEW = "new"
    #: A kept session begins alike and then holds other tokens: other tools, another system text, dropped reasoning.
    DIVERGED = "diverged"
    #: The session that would fit answers another request.
    BUSY = "busy"
    #: A session fitted, but a stage had lost its state.
    LOST = "lost"


@frozen
class Turn:
    """What decides every token of an answer, and those that were drawn.

    A draw depends on the tokens before it, the parameters and the seed alone: the same turn asked for again goes on as it
    would have, token for token.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    #: Whether the client chose the seed; if it did not, any seed answers it.
    seeded: bool
    drawn: list[GeneratedToken]

    def is_asked_again(self, prompt: tuple[int, ...], sampling: SamplingParams, *, seeded: bool) -> bool:
        """Whether a request with these is answered by this turn."""
        any_seed = sampling.temperature <= 0 or not (seeded or self.seeded)
        same = msgspec.structs.replace(self.sampling, seed=sampling.seed) if any_seed else self.sampling
        return same == sampling and self.prompt == prompt


@define(eq=False)
class KeptSession:
    """A session of the pool, and the block that holds it open."""

    session: ClientSession
    _block: AbstractAsyncContextManager[ClientSession]
    in_use: bool = False
    #: The answer that its client left before the end, for the client's next try.
    unfinished: Turn | None = None

    @property
    def held(self) -> Sequence[int]:
        """What every stage has committed of it."""
        return self.session.transcript[: self.session.committed]

    async def aclose(self) -> None:
        """Drop its state on every stage."""
        await self._block.__aexit__(None, None, None)


class SessionPool:
    """At most ``size`` sessions of one pipeline. :meth:`take` is for one caller per slot: there are never more."""

    def __init__(self, pipeline: Pipeline, size: int) -> None:
        self.misses: Counter[Miss] = Counter()
        self.hits = 0
        #: Of the hits, answers that went on where their client had left an earlier try.
        self.resumed = 0
        self._pipeline = pipeline
        self._size = size
        #: Least recently used first.
        self._kept: list[KeptSession] = []

    @property
    def kept(self) -> int:
        """Sessions kept, in use or not."""
        return len(self._kept)

    @property
    def kept_tokens(self) -> int:
        """Tokens committed in them."""
        return sum(kept.session.committed for kept in self._kept)

    async def take(self, prompt: tuple[int, ...], sampling: SamplingParams, *, seeded: bool) -> KeptSession:
        """The idle session in which this very turn was left, else that with the longest part of ``prompt``, else a fresh one.

        The caller gives it back. In the first case, and only then, ``unfinished`` is what can be told again.
        """
        idle = [kept for kept in self._kept if not kept.in_use]
        for kept in idle:
            if kept.unfinished is not None and kept.unfinished.is_asked_again(prompt, sampling, seeded=seeded):
                self.hits += 1
                self.resumed += 1
                kept.in_use = True
                return kept
        tokens = list(prompt)
        fitting = [kept for kept in idle if _fits(kept, tokens)]
        if fitting:
            best = max(fitting, key=lambda kept: kept.session.committed)
            self.hits += 1
            best.in_use, best.unfinished = True, None
            return best
        self.misses[self._why(tokens)] += 1
        return await self._fresh(idle)

    async def _fresh(self, idle: list[KeptSession]) -> KeptSession:
        block = self._pipeline.session()
        made = KeptSession(await block.__aenter__(), block, in_use=True)
        gone: KeptSession | None = None
        if len(self._kept) >= self._size:
            # One that holds nothing costs nobody anything; else the one unused for longest.
            gone = next((kept for kept in idle if not kept.session.committed), idle[0])
            self._kept.remove(gone)
        self._kept.append(made)  # before any wait: nobody else may count on this place
        if gone is not None:
            try:
                await gone.aclose()
            except BaseException:
                self.give_back(made)
                raise
        return made

    def give_back(self, kept: KeptSession) -> None:
        """Keep it for the next request of its conversation."""
        kept.in_use = False
        self._kept.remove(kept)
        self._kept.append(kept)

    def _why(self, prompt: list[int]) -> Miss:
        if any(_fits(kept, prompt) for kept in self._kept):
            return Miss.BUSY
        # More than the begin-of-text token, which every conversation shares.
        return Miss.DIVERGED if any(kept.held[:2] == prompt[:2] for kept in self._kept if kept.held) else Miss.NEW

    async def aclose(self) -> None:
        """Drop all sessions, side by side: a stage that hangs is waited for once."""
        kept, self._kept = self._kept, []
        async with open_nursery() as nursery:
            for each in kept:
                nursery.start_soon(each.aclose)


def _fits(kept: KeptSession, prompt: list[int]) -> bool:
    """Whether all it holds is how ``prompt`` begins."""
    held = kept.held
    return 0 < len(held) <= len(prompt) and prompt[: len(held)] == held
