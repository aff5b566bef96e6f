"""What must fail, and always in the same way: cache mismatch, truncated prefix, context limit, wrong epoch, wrong artifact,
wrong chunk width.

Most is said to the stages by hand, frame by frame, because no client of dgr would say it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import msgspec
import trio
from attrs import evolve

from dgr import DgrError, Route, StageRef
from dgr.errors import SessionLost
from dgr.model.prefix import PrefixDigest
from dgr.runtime.shard import Shard, limits_of
from dgr.testing.chain import pieces, some_tokens
from dgr.wire import Limits, Link, frames, memory_transports, open_link
from dgr.wire.frames import Expectation, Key
from dgr_bench.subjects import Stages, StageState

__all__ = ["EXPECTED", "FOREIGN", "REFUSALS_CONTEXT", "REFUSAL_CASES", "Refusal", "RefusalCase", "refusals"]

#: Tokens that the context of the stages holds: so few that its limit is reached in a moment.
REFUSALS_CONTEXT = 256
#: Name of the stage in the cluster that runs another model.
FOREIGN = "foreign"
_SESSION = 7
_PROMPT = 37
_WAIT = 600.0

#: By what is tried: what the stages, or the pipeline, must answer.
EXPECTED = {
    "cache mismatch": "CacheMiss(DIGEST)",
    "truncated prefix": "CacheMiss(POSITION)",
    "prefix from the future": "CacheMiss(POSITION)",
    "unknown session": "CacheMiss(UNKNOWN)",
    "context limit n": "Advanced",
    "context limit n+1": "Refused(INPUT)",
    "context limit n+1, asked of the pipeline": "ContextLimitExceeded",
    "wrong epoch, older": "StaleEpoch",
    "wrong epoch, newer": "StaleEpoch",
    "wrong artifact": "InvalidRoute",
    "wrong chunk width, of the boundary": "the link is closed",
    "wrong chunk width, too many tokens": "the link is closed",
}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """One try."""

    case: str = msgspec.field(name="act")
    #: The answer, or the type of the error.
    answer: str
    #: Its words; numbers that differ from try to try are not among them.
    message: str
    #: Whether every component of the session on every stage is, byte for byte, what it was before.
    state_kept: bool


class _Hand:
    """A client that says what it likes, over control links to every stage of a route."""

    def __init__(self, route: Route, links: Mapping[str, Link]) -> None:
        self.route = route
        self.links = links
        self._id = secrets.token_bytes(16)
        self.epoch = 1
        self.tokens: list[int] = []
        self._seq = 0

    def key(self, epoch: int | None = None, session: int = _SESSION) -> Key:
        return Key(self._id, self.epoch if epoch is None else epoch, session)

    def seq(self) -> int:
        self._seq += 1
        return self._seq

    async def answer(self, address: str) -> frames.Frame:
        with trio.fail_after(_WAIT):
            async for received in self.links[address]:
                return received.frame
        return frames.Denied("the link is closed")

    async def all(self, frame_of: Callable[[int, StageRef], frames.Frame]) -> list[frames.Frame]:
        """Say something to every stage, then hear every one."""
        for index, ref in enumerate(self.route.stages):
            self.links[ref.address].send_nowait(frame_of(index, ref))
        return [await self.answer(ref.address) for ref in self.route.stages]

    async def begin(self) -> None:
        """Fence the first epoch and open the session."""
        route = self.route
        fenced = await self.all(
            lambda index, ref: frames.Fence(
                self._id, self.epoch, ref.address, route.predecessor(index), route.successor(index)
            )
        )
        seq = self.seq()
        opened = await self.all(lambda _index, _ref: frames.Open(self.key(), seq))
        for frame in (*fenced, *opened):
            if not isinstance(frame, frames.Fenced | frames.Opened):
                raise SessionLost(f"a stage answered the beginning with {': '.join(_named(frame))}")

    async def states(self) -> list[StageState]:
        seq = self.seq()
        found = await self.all(lambda _index, _ref: frames.Probe(self.key(), seq))
        return [
            StageState(
                layers=str(ref.layers), position=frame.position, prefix=frame.digest.hex(), components=frame.components
            )
            for ref, frame in zip(self.route.stages, found, strict=True)
            if isinstance(frame, frames.Frontier)
        ]

    def work(
        self, tokens: Sequence[int], *, expect: Expectation | None = None, key: Key | None = None
    ) -> frames.Tokens:
        """Tokens that follow what was sent before, unless ``expect`` says otherwise."""
        right = Expectation(len(self.tokens), PrefixDigest(self.tokens).digest())
        return frames.Tokens(key or self.key(), self.seq(), expect or right, tuple(tokens), 0, None)

    async def say(self, frame: frames.Frame) -> frames.Frame:
        """Say something to the head; the tail answers, or whichever stage refuses."""
        self.links[self.route.stages[0].address].send_nowait(frame)
        heard: list[frames.Frame] = []
        async with trio.open_nursery() as nursery:

            async def hear(address: str) -> None:
                heard.append(await self.answer(address))
                nursery.cancel_scope.cancel()

            for address in self.links:
                nursery.start_soon(hear, address)
        return heard[0]

    async def feed(self, tokens: Sequence[int], chunk: int) -> frames.Frame:
        """Commit tokens; the answer to the last chunk. Raises :class:`SessionLost` when one before it is refused."""
        answer: frames.Frame = frames.Denied("nothing was said")
        for begin, end in pieces(len(tokens), chunk):
            part = tokens[begin:end]
            answer = await self.say(self.work(part))
            if end < len(tokens) and not isinstance(answer, frames.Advanced):
                raise SessionLost(f"tokens {begin} to {end} were answered with {': '.join(_named(answer))}")
            self.tokens += part
        return answer


@asynccontextmanager
async def _open_hand(stages: Stages) -> AsyncIterator[_Hand]:
    assert stages.cluster is not None
    async with AsyncExitStack() as stack:
        links = {}
        for ref in stages.route.stages:
            links[ref.address], _ = await stack.enter_async_context(stages.cluster.connect(ref.address))
        hand = _Hand(stages.route, links)
        await hand.begin()
        yield hand


def _named(frame: frames.Frame) -> tuple[str, str]:
    match frame:
        case frames.CacheMiss():
            return f"CacheMiss({frame.reason.name})", f"the stage holds {frame.position} tokens"
        case frames.Refused():
            return f"Refused({frame.code.name})", re.sub(r"0x[0-9a-f]+", "0x", frame.message)
        case frames.StaleEpoch():
            return "StaleEpoch", f"the epoch is {frame.current}"
        case frames.Denied():
            return frame.message, ""
        case _:
            return type(frame).__name__, ""


# --- the cases, each on a session that holds some tokens ---------------------------------------------------------------


async def _cache_mismatch(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    other = [*hand.tokens[:-1], hand.tokens[-1] ^ 1]
    expect = Expectation(len(other), PrefixDigest(other).digest())
    return _named(await hand.say(hand.work([1], expect=expect)))


async def _truncated(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    short = hand.tokens[:-1]
    return _named(await hand.say(hand.work([1], expect=Expectation(len(short), PrefixDigest(short).digest()))))


async def _future(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    long = [*hand.tokens, 1]
    return _named(await hand.say(hand.work([1], expect=Expectation(len(long), PrefixDigest(long).digest()))))


async def _unknown(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    return _named(await hand.say(hand.work([1], key=hand.key(session=_SESSION + 1))))


async def _older(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    return _named(await hand.say(hand.work([1], key=hand.key(epoch=hand.epoch - 1))))


async def _newer(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    return _named(await hand.say(hand.work([1], key=hand.key(epoch=hand.epoch + 1))))


async def _artifact(_hand: _Hand, stages: Stages) -> tuple[str, str]:
    """A route whose last stage runs another model."""
    *others, last = stages.route.stages
    async with stages.pipeline(32) as pipeline:
        try:
            await pipeline.change_route(Route((*others, StageRef(FOREIGN, last.layers))))
        except DgrError as error:
            return type(error).__name__, str(error)
    return "a live route", ""


@asynccontextmanager
async def _open_stranger(shard: Shard, limits: Limits, predecessor: str | None) -> AsyncIterator[Link]:
    """A link of its own to a stage, on which this side keeps to other limits than the stage does.

    ``predecessor``: the stage that it says to be; None: a pipeline.
    """
    near, far = memory_transports()
    right = limits_of(shard.description)
    granted = None if predecessor is None else right.under_way
    async with open_link(far, right, name="stranger", granted=granted) as arriving, open_link(near, limits) as leaving:
        if predecessor is None:
            shard.start_soon(shard.serve_control, arriving)
        else:
            shard.start_soon(shard.serve_boundary, arriving, predecessor)
        yield leaving


async def _heard(link: Link) -> tuple[str, str]:
    """What comes back on a link: a frame, or its end."""
    with trio.fail_after(_WAIT):
        try:
            async for received in link:
                return _named(received.frame)
        except DgrError:
            pass  # broken or closed, it is the end of it
    return "the link is closed", ""


async def _narrow(hand: _Hand, stages: Stages) -> tuple[str, str]:
    """A boundary of one float too few a token, from somebody who says to be the stage before."""
    first, second = stages.route.stages[:2]
    shard = stages.shard(second.address)
    limits = evolve(limits_of(shard.description), boundary_width=shard.description.width_in - 1)
    right = Expectation(len(hand.tokens), PrefixDigest(hand.tokens).digest())
    payload = bytes(4 * limits.boundary_width)
    frame = frames.Boundary(hand.key(), hand.seq(), right, (1,), 0, None, payload=len(payload))
    async with _open_stranger(shard, limits, first.address) as link:
        await link.send(frame, payload)
        return await _heard(link)


async def _too_many(hand: _Hand, stages: Stages) -> tuple[str, str]:
    """More tokens than n_batch in one frame."""
    shard = stages.shard(stages.route.stages[0].address)
    right = limits_of(shard.description)
    async with _open_stranger(shard, evolve(right, n_batch=right.n_batch + 1), None) as link:
        link.send_nowait(hand.work([1] * (right.n_batch + 1)))
        return await _heard(link)


async def _limit(hand: _Hand, stages: Stages) -> tuple[str, str]:
    """Tokens up to the last that the context holds."""
    more = some_tokens(stages.n_ctx - len(hand.tokens), stages.n_vocab)
    return _named(await hand.feed(more, stages.engines[0].describe().context.n_batch))


async def _beyond(hand: _Hand, _stages: Stages) -> tuple[str, str]:
    """One token more."""
    return _named(await hand.say(hand.work([1])))


async def _beyond_asked(_hand: _Hand, stages: Stages) -> tuple[str, str]:
    """A prompt of one token more than the context holds."""
    async with stages.pipeline(32) as pipeline, stages.conversation(pipeline) as talk:
        try:
            await talk.start(some_tokens(stages.n_ctx + 1, stages.n_vocab))
        except DgrError as error:
            return type(error).__name__, str(error)
    return "an answer", ""


RefusalCase: TypeAlias = Callable[[_Hand, Stages], Awaitable[tuple[str, str]]]

#: In this order on one session: the context is full when its limit has been reached.
REFUSAL_CASES: dict[str, RefusalCase] = {
    "cache mismatch": _cache_mismatch,
    "truncated prefix": _truncated,
    "prefix from the future": _future,
    "unknown session": _unknown,
    "wrong epoch, older": _older,
    "wrong epoch, newer": _newer,
    "wrong artifact": _artifact,
    "wrong chunk width, of the boundary": _narrow,
    "wrong chunk width, too many tokens": _too_many,
    "context limit n+1, asked of the pipeline": _beyond_asked,
    "context limit n": _limit,
    "context limit n+1": _beyond,
}
#: The case that succeeds, and so changes the state.
_SUCCEEDS = "context limit n"


async def refusals(stages: Stages, cases: Mapping[str, RefusalCase] | None = None) -> list[Refusal]:
    """Try everything once, on a session of its own. ``stages`` hold :data:`REFUSALS_CONTEXT` tokens for two sessions."""
    found = []
    async with _open_hand(stages) as hand:
        begun = await hand.feed(some_tokens(_PROMPT, stages.n_vocab), 16)
        if not isinstance(begun, frames.Advanced):
            raise SessionLost(f"the prompt was answered with {': '.join(_named(begun))}")
        before = await hand.states()
        for name, case in (cases or REFUSAL_CASES).items():
            answer, message = await case(hand, stages)
            after = await hand.states()
            kept = len(before) == len(stages.route.stages) and after == before
            if name == _SUCCEEDS:
                kept = all(state.position == stages.n_ctx for state in after)
            found.append(Refusal(case=name, answer=answer, message=message, state_kept=kept))
            before = after
    return found
