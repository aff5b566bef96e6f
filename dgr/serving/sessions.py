"""Sessions and copies of them, kept between requests and found again by the tokens they hold.

A stateless API sends the whole conversation with every request. A kept state serves one whose tokens begin with *all*
that it holds and go on: V4's state has no way back, so a state that holds one token too many holds nothing for it. Two
kinds are kept. A *session* stands where its answer ended, and goes on from there. A *prefix* is a copy that was taken on the
way: at the end of a prompt but for its last token (the next turn of a thinking chat drops the reasoning, and differs from
there on), and where a prompt parts from another one (a system text that many share). It is copied again for whoever comes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum

import msgspec
import trio
from attrs import define, frozen

from dgr.client.generation import GeneratedToken
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.core.values import SamplingParams
from dgr.errors import Overloaded
from dgr.wire.nurseries import open_nursery

__all__ = ["WORTH_A_COPY", "KeptSession", "Miss", "SessionPool", "Turn"]

#: Tokens that a copy must spare the next request: fewer are evaluated in less time than it takes to think about them.
WORTH_A_COPY = 128
#: Tokens compared at once.
_BLOCK = 4096


class Miss(StrEnum):
    """Why a request was prefilled from its first token."""

    #: No kept state begins as the request does, but for a begin-of-text token.
    NEW = "new"
    #: A kept state begins alike and then holds other tokens: other tools, another system text, dropped reasoning.
    DIVERGED = "diverged"
    #: The session that would fit answers another request.
    BUSY = "busy"
    #: A state fitted, but a stage had lost it.
    LOST = "lost"
    #: A session holds all of the prompt, and nobody has kept the logits of its last token.
    WHOLE = "whole"


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
    #: It is a prefix: whoever fits gets a copy.
    is_prefix: bool = False
    #: It was one, and was taken itself because there was no room for a copy.
    was_prefix: bool = False
    #: Requests that a prefix has served.
    uses: int = 0
    #: Where the prompt ended that it was taken for, but for the last token; 0 for a prefix.
    prompt_end: int = 0
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
    """At most ``size`` sessions and prefixes of one pipeline. :meth:`take` is for at most ``size - prefixes`` callers at once.

    ``prefixes``: places that prefixes do not have to give to sessions. Places that nobody has taken yet are anybody's. Who
    makes room is, of the kind that has more than its places, the one that was not used for longest. ``nursery`` outlives it.
    """

    def __init__(self, pipeline: Pipeline, size: int, prefixes: int, nursery: trio.Nursery) -> None:
        self.misses: Counter[Miss] = Counter()
        self.hits = 0
        #: Of the hits, answers that went on where their client had left an earlier try.
        self.resumed = 0
        #: Prefixes kept over the pool's life, copies given of them, and copies that stages had no slot for.
        self.stored = self.copied = self.refused = 0
        self._pipeline = pipeline
        self._size = size
        #: Where sessions are closed whose callers have left.
        self._nursery = nursery
        self.places_of_prefixes = prefixes
        #: Least recently used first.
        self._kept: list[KeptSession] = []
        self._given_back = trio.Event()

    @property
    def kept(self) -> int:
        """Sessions and prefixes kept, in use or not."""
        return len(self._kept)

    @property
    def kept_prefixes(self) -> int:
        """Of these, prefixes."""
        return sum(kept.is_prefix for kept in self._kept)

    @property
    def kept_tokens(self) -> int:
        """Tokens committed in them."""
        return sum(kept.session.committed for kept in self._kept)

    def left(self, prompt: tuple[int, ...], sampling: SamplingParams, *, seeded: bool) -> KeptSession | None:
        """The idle session in which this very turn was left, and ``unfinished`` is what can be told again; else None.

        The caller gives it back.
        """
        for kept in self._kept:
            turn = kept.unfinished
            if kept.in_use or turn is None or not turn.is_asked_again(prompt, sampling, seeded=seeded):
                continue
            if turn.drawn or kept.session.committed == len(prompt):  # else its first token was not even asked for
                self.hits += 1
                self.resumed += 1
                return _taken(kept, prompt)
        return None

    async def take(self, prompt: tuple[int, ...]) -> KeptSession:
        """What holds the longest part of ``prompt``, else a fresh session; :meth:`left` is asked before. It is given back."""
        tokens = list(prompt)
        while (best := self._best(tokens)) is not None and best.in_use:
            await self._given_back.wait()  # somebody else has a copy made of it
        if best is None:
            self.misses[self._why(tokens)] += 1
            return _taken(await self._fresh(), prompt)
        best.in_use, best.unfinished = True, None
        if best.is_prefix:
            return _taken(await self._branch(best), prompt)
        self.hits += 1
        return _taken(best, prompt)

    def _best(self, prompt: list[int]) -> KeptSession | None:
        """What holds most of a prompt: an idle session, or a prefix, which may be in use for a moment."""
        fitting = [kept for kept in self._kept if (kept.is_prefix or not kept.in_use) and _fits(kept, prompt)]
        return max(fitting, key=lambda kept: (kept.session.committed, not kept.is_prefix), default=None)

    async def _fresh(self) -> KeptSession:
        block = self._pipeline.session()
        made = KeptSession(await block.__aenter__(), block, in_use=True)
        gone: KeptSession | None = None
        try:
            while len(self._kept) >= self._size and (gone := self._leaving(made)) is None:
                # Copies are under way for others; callers themselves are never so many.
                await self._given_back.wait()
        except BaseException:
            with trio.CancelScope(shield=True):
                await made.aclose()
            raise
        await self._replace(gone, made)
        return made

    async def _replace(self, gone: KeptSession | None, made: KeptSession) -> None:
        """Put one in the place of another, which is dropped; a caller who leaves meanwhile has given it back."""
        if gone is not None:
            self._kept.remove(gone)
        self._kept.append(made)  # before any wait: nobody else may count on this place
        if gone is not None:
            try:
                await self._drop(gone)
            except BaseException:
                self.give_back(made)
                raise

    async def _drop(self, gone: KeptSession) -> None:
        """Have a session closed, and wait for that; when the caller leaves before, at its deadline, it goes on behind it."""
        begun, closed = trio.Event(), trio.Event()

        async def close() -> None:
            begun.set()  # whoever waits for it runs when the stages have been told, so before they are asked for another one
            await gone.aclose()
            closed.set()

        self._nursery.start_soon(close)
        with trio.CancelScope(shield=True):
            await begun.wait()
        await closed.wait()

    # --- prefixes ---

    async def _branch(self, prefix: KeptSession) -> KeptSession:
        """A copy of a prefix; the prefix itself where a copy would cost others more than it spares."""
        gone: KeptSession | None = None
        if len(self._kept) >= self._size:
            # A prefix that served one conversation alone is worth no more than the copy that this one leaves in its turn.
            gone = self._leaving(prefix) if prefix.uses else None
            if gone is None or (gone.is_prefix and gone.uses >= prefix.uses):
                return self._use_up(prefix)
        expected = prefix.session.committed
        try:
            made = await self._copy(prefix, gone)
        except Overloaded:
            self.refused += 1
            return self._use_up(prefix)
        finally:
            if prefix.is_prefix:
                prefix.uses += 1
                self.give_back(prefix)
        self._count_copy(made, expected)
        return made

    def _use_up(self, prefix: KeptSession) -> KeptSession:
        prefix.is_prefix, prefix.was_prefix = False, True
        self.hits += 1
        return prefix

    async def _copy(self, source: KeptSession, gone: KeptSession | None) -> KeptSession:
        """Copy a state into the place of another one, or into one that nobody has. Raises what a fork raises."""
        target = self._pipeline.fork_target()
        place = KeptSession(source.session, target, in_use=True)
        if gone is not None:
            self._kept.remove(gone)
        self._kept.append(place)  # before any wait: nobody else may count on this place
        try:
            if gone is not None:
                await self._drop(gone)
            copy = await target.__aenter__()
            try:
                await copy.begin_as(source.session)
            except BaseException:
                await self._drop(place)
                raise
            place.session = copy
        except BaseException:
            self._forget(place)
            raise
        return place

    async def branch(self, source: KeptSession) -> KeptSession:
        """A copy of ``source``, which is the caller's own, for somebody else with the same prompt, who gives it back.

        Raises what a fork raises.
        """
        gone: KeptSession | None = None
        while len(self._kept) >= self._size and (gone := self._leaving(source)) is None:
            await self._given_back.wait()
        try:
            made = await self._copy(source, gone)
        except Overloaded:
            self.refused += 1
            raise
        self._count_copy(made, source.session.committed)
        made.prompt_end = source.prompt_end
        return made

    def _count_copy(self, made: KeptSession, expected: int) -> None:
        self.copied += 1
        if made.session.committed == expected:
            self.hits += 1
        else:
            self.misses[Miss.LOST] += 1

    def points(self, prompt: tuple[int, ...], kept: KeptSession) -> list[int]:
        """Positions of ``prompt`` at which a copy of ``kept``, which was taken for it, is worth its slot; ascending."""
        if not self._pipeline.copies_sessions:
            return []
        tokens, end, held = list(prompt), len(prompt) - 1, kept.session.committed
        others = [other for other in self._kept if other is not kept]
        # What the next request would find without a copy. The session itself moves on; a prefix that was used up is gone.
        found = max(
            (other.session.committed for other in others if other.is_prefix and _fits(other, tokens)), default=0
        )
        found = found if kept.was_prefix else max(found, held)
        points = []
        parting = max((_parting(other, tokens) for other in others), default=0)
        if parting - max(found, held) >= WORTH_A_COPY:
            points.append(parting)
            found = parting
        if end - found >= WORTH_A_COPY:
            points.append(end)
        return points

    async def store(self, kept: KeptSession, *, shared: bool) -> None:
        """Keep a copy of what a session holds now, if there is room for it. ``shared``: two requests have begun so."""
        gone: KeptSession | None = None
        if len(self._kept) >= self._size and (gone := self._leaving(kept, for_prefix=True)) is None:
            return
        try:
            made = await self._copy(kept, gone)
        except Overloaded:
            self.refused += 1
            return
        made.is_prefix, made.uses = True, int(shared)
        self.stored += 1
        self.give_back(made)

    # --- room ---

    def _leaving(self, spared: KeptSession, *, for_prefix: bool = False) -> KeptSession | None:
        """Who makes room for one more; None when everybody is in use."""
        idle = [kept for kept in self._kept if not kept.in_use and kept is not spared]
        if (empty := next((kept for kept in idle if not kept.session.committed), None)) is not None:
            return empty  # costs nobody anything
        prefix = self.kept_prefixes + for_prefix > self.places_of_prefixes
        first = next((kept for kept in idle if kept.is_prefix == prefix), None)
        return first if first is not None or for_prefix else next(iter(idle), None)

    def give_back(self, kept: KeptSession) -> None:
        """Keep it for the next request of its conversation."""
        kept.in_use = False
        self._kept.remove(kept)
        self._kept.append(kept)
        self._wake()

    def _forget(self, kept: KeptSession) -> None:
        self._kept.remove(kept)
        self._wake()

    def _wake(self) -> None:
        self._given_back.set()
        self._given_back = trio.Event()

    def _why(self, prompt: list[int]) -> Miss:
        if any(_fits(kept, prompt) for kept in self._kept):
            return Miss.BUSY
        if any(kept.held == prompt for kept in self._kept):
            return Miss.WHOLE
        # More than the begin-of-text token, which every conversation shares.
        return Miss.DIVERGED if any(kept.held[:2] == prompt[:2] for kept in self._kept if kept.held) else Miss.NEW

    async def aclose(self) -> None:
        """Drop all sessions, side by side: a stage that hangs is waited for once."""
        kept, self._kept = self._kept, []
        async with open_nursery() as nursery:
            for each in kept:
                nursery.start_soon(each.aclose)


def _taken(kept: KeptSession, prompt: tuple[int, ...]) -> KeptSession:
    kept.in_use, kept.prompt_end = True, len(prompt) - 1
    return kept


def _fits(kept: KeptSession, prompt: list[int]) -> bool:
    """Whether all it holds is how ``prompt`` begins, and at least one token is left to draw the next one from."""
    held = kept.held
    return 0 < len(held) < len(prompt) and prompt[: len(held)] == held


def _parting(kept: KeptSession, prompt: list[int]) -> int:
    """Where ``prompt`` parts from what a session was asked; 0 when it goes on from there, or has nothing of it."""
    asked = kept.session.transcript[: kept.prompt_end]
    common = _common(asked, prompt)
    return common if common < len(asked) else 0


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    at = 0
    while at < len(one) and one[at : at + _BLOCK] == other[at : at + _BLOCK]:
        at += _BLOCK
    ends = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one[at : at + _BLOCK], other[at:], strict=False))
    return min(at, len(one)) + sum(1 for _ in ends)
