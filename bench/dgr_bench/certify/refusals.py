"""What must fail, and always in the same way: cache mismatch, truncated prefix, context limit, wrong epoch, wrong artifact,
wrong chunk width.

Most is said to the stages by session, frame by frame, because no client of dgr would say it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import msgspec
import trio
from attrs import evolve

from dgr import DgrError, Route, StageRef
from dgr.core.values import LogitsWanted
from dgr.errors import SessionLost
from dgr.protocol.limits import limits_of
from dgr.selftest.chain import pieces, some_tokens
from dgr.stage.shard import Shard
from dgr.testing.raw_client import RawClient, open_raw_client
from dgr.wire import Limits, Link, frames, memory_transports, open_link
from dgr_bench.subjects import Stages, StageState

#: Tokens that the context of the stages holds: so few that its limit is reached in a moment.
REFUSALS_CONTEXT = 256
#: Name of the stage in the cluster that runs another model.
FOREIGN = "foreign"
_SESSION = 7
_PROMPT = 37
_WAIT = 600.0
_ADVANCED, _CLOSED = ("Advanced", ""), ("the link is closed", "")

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


class _Session:
    """A session on every stage of a route, spoken to by hand: what was committed, and what follows."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.tokens: list[int] = []
        self._seq = 1

    def seq(self) -> int:
        self._seq += 1
        return self._seq

    def work(self, tokens: Sequence[int], before: Sequence[int] | None = None, **changes: int) -> frames.Tokens:
        """Tokens that follow what was sent before, unless ``before``, ``epoch`` or ``session`` say otherwise."""
        session = changes.pop("session", _SESSION)
        expected = self.tokens if before is None else before
        return self.client.work(
            session, self.seq(), tokens, expected, logits=LogitsWanted.NONE, sampling=None, **changes
        )

    async def say(self, frame: frames.Frame) -> tuple[str, str]:
        """Say something to the head; the tail answers, or whichever stage refuses."""
        with trio.fail_after(_WAIT):
            return _named(await self.client.ask(frame))

    async def states(self) -> list[StageState]:
        seq = self.seq()
        with trio.fail_after(_WAIT):
            found = await self.client.ask_all(lambda _index, _ref: frames.QueryState(self.client.key(_SESSION), seq))
        both = zip(self.client.route.stages, found, strict=True)
        return [StageState.of(str(ref.layers), frame) for ref, frame in both if isinstance(frame, frames.StateReport)]

    async def feed(self, tokens: Sequence[int], chunk: int) -> tuple[str, str]:
        """Commit tokens; the answer to the last chunk. Raises :class:`SessionLost` when one before it is refused."""
        answer = "nothing was said", ""
        for begin, end in pieces(len(tokens), chunk):
            answer = await self.say(self.work(tokens[begin:end]))
            if end < len(tokens) and answer != _ADVANCED:
                raise SessionLost(f"tokens {begin} to {end} were answered with {': '.join(answer)}")
            self.tokens += tokens[begin:end]
        return answer


@asynccontextmanager
async def _open_session(stages: Stages) -> AsyncIterator[_Session]:
    assert stages.cluster is not None
    async with open_raw_client(stages.cluster.connect, stages.route) as client:
        with trio.fail_after(_WAIT):
            await client.begin(session=_SESSION)
        yield _Session(client)


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


# --- the cases, each on a session that holds some tokens --------------------------------------------------------------


RefusalCase: TypeAlias = Callable[[_Session, Stages], Awaitable[tuple[str, str]]]


def _said(work: Callable[[_Session], frames.Tokens]) -> RefusalCase:
    """A case in which one frame is said to the head."""

    async def case(session: _Session, _: Stages) -> tuple[str, str]:
        return await session.say(work(session))

    return case


async def _artifact(_session: _Session, stages: Stages) -> tuple[str, str]:
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
            return _CLOSED  # broken or closed, it is the end of it
    return _CLOSED


async def _narrow(session: _Session, stages: Stages) -> tuple[str, str]:
    """A boundary of one float too few a token, from somebody who says to be the stage before."""
    first, second = stages.route.stages[:2]
    shard = stages.shard(second.address)
    limits = evolve(limits_of(shard.description), boundary_width=shard.description.width_in - 1)
    payload, right = bytes(4 * limits.boundary_width), session.work([1])
    frame = frames.Boundary(right.key, right.seq, right.expect, (1,), LogitsWanted.NONE, None, payload=len(payload))
    async with _open_stranger(shard, limits, first.address) as link:
        await link.send(frame, payload)
        return await _heard(link)


async def _too_many(session: _Session, stages: Stages) -> tuple[str, str]:
    """More tokens than n_batch in one frame."""
    shard = stages.shard(stages.route.stages[0].address)
    right = limits_of(shard.description)
    async with _open_stranger(shard, evolve(right, n_batch=right.n_batch + 1), None) as link:
        link.send_nowait(session.work([1] * (right.n_batch + 1)))
        return await _heard(link)


async def _limit(session: _Session, stages: Stages) -> tuple[str, str]:
    """Tokens up to the last that the context holds."""
    more = some_tokens(stages.n_ctx - len(session.tokens), stages.n_vocab)
    return await session.feed(more, stages.engines[0].describe().context.n_batch)


async def _beyond_asked(_session: _Session, stages: Stages) -> tuple[str, str]:
    """A prompt of one token more than the context holds."""
    async with stages.pipeline(32) as pipeline, stages.conversation(pipeline) as talk:
        try:
            await talk.start(some_tokens(stages.n_ctx + 1, stages.n_vocab))
        except DgrError as error:
            return type(error).__name__, str(error)
    return "an answer", ""


#: In this order on one session: the context is full when its limit has been reached.
REFUSAL_CASES: dict[str, RefusalCase] = {
    "cache mismatch": _said(lambda said: said.work([1], [*said.tokens[:-1], said.tokens[-1] ^ 1])),
    "truncated prefix": _said(lambda said: said.work([1], said.tokens[:-1])),
    "prefix from the future": _said(lambda said: said.work([1], [*said.tokens, 1])),
    "unknown session": _said(lambda said: said.work([1], session=_SESSION + 1)),
    "wrong epoch, older": _said(lambda said: said.work([1], epoch=0)),
    "wrong epoch, newer": _said(lambda said: said.work([1], epoch=2)),
    "wrong artifact": _artifact,
    "wrong chunk width, of the boundary": _narrow,
    "wrong chunk width, too many tokens": _too_many,
    "context limit n+1, asked of the pipeline": _beyond_asked,
    "context limit n": _limit,
    "context limit n+1": _said(lambda said: said.work([1])),
}
#: The case that succeeds, and so changes the state.
_SUCCEEDS = "context limit n"


async def refusals(stages: Stages, cases: Mapping[str, RefusalCase] | None = None) -> list[Refusal]:
    """Try everything once, on a session of its own. ``stages`` hold :data:`REFUSALS_CONTEXT` tokens for two sessions."""
    found = []
    async with _open_session(stages) as session:
        begun = await session.feed(some_tokens(_PROMPT, stages.n_vocab), 16)
        if begun != _ADVANCED:
            raise SessionLost(f"the prompt was answered with {': '.join(begun)}")
        before = await session.states()
        for name, case in (cases or REFUSAL_CASES).items():
            answer, message = await case(session, stages)
            after = await session.states()
            kept = len(before) == len(stages.route.stages) and after == before
            if name == _SUCCEEDS:
                kept = all(state.position == stages.n_ctx for state in after)
            found.append(Refusal(case=name, answer=answer, message=message, state_kept=kept))
            before = after
    return found
