"""dgr inside an asyncio program: the same pipeline, sessions and tokens, awaited from asyncio.

A trio loop runs in a thread of its own, one for each pipeline (:mod:`dgr.serving.bridge`). Results, errors and cancellation
cross both ways: a cancelled ``await`` cancels the work on the other side and returns when that has ended, so that the
session is ready for its next turn. Nothing is lost on the way: a token that was drawn as its wait was cancelled is in the
transcript, and the next ``__anext__`` returns it.

    async with embed.open_pipeline("model.gguf", "0:15,15:29,29:43") as pipeline:
        async with pipeline.session() as session:
            async for token in await session.generate("Hello", max_tokens=32):
                print(token.text, end="")

Many requests over one pipeline, with a bounded line and deadlines, as an asyncio server has them:

    async with pipeline.serving(ServingLimits(max_waiting=16)) as serving:
        async with serving.admit(Job(await serving.encode("Hello"), max_tokens=32)) as answer:
            async for token in answer:
                print(token.text, end="")

Leaving the pipeline's block always returns, whatever is still open in it: from then on everything of it raises
:class:`~dgr.errors.ClosedError`, and leaving a session's block is harmless. Everything of a pipeline belongs to the asyncio
loop that opened it; from another loop it raises :class:`~dgr.errors.InputError`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from dgr.client.events import KEPT_EVENTS, Event
from dgr.client.generation import GeneratedToken, Generation
from dgr.client.pipeline import Pipeline, PipelineStatistics
from dgr.client.session import ClientSession
from dgr.cluster.local import open_pipeline as open_trio_pipeline
from dgr.core.load import StageLoad
from dgr.core.route import LayerRange, Route
from dgr.core.values import SamplingParams
from dgr.errors import ClosedError, InputError, SessionBusy
from dgr.serving.bridge import Bridge, Hold
from dgr.serving.engine import Answer, Job, Phase, ServingEngine, ServingLimits, Usage, open_serving
from dgr.wire.nurseries import open_nursery

__all__ = [
    "EmbeddedAnswer",
    "EmbeddedEvents",
    "EmbeddedGeneration",
    "EmbeddedPipeline",
    "EmbeddedServing",
    "EmbeddedSession",
    "embed_pipeline",
    "open_pipeline",
]


class _EmbeddedTokens:
    """Tokens that are drawn on the trio side, one wait at a time; none is lost when a wait is cancelled."""

    def __init__(self, bridge: Bridge, tokens: AsyncIterator[GeneratedToken]) -> None:
        self._bridge = bridge
        self._tokens = tokens
        #: Drawn, and its wait was cancelled before it could be handed over.
        self._kept: deque[GeneratedToken] = deque()
        self._waited_for = False

    async def __anext__(self) -> GeneratedToken:
        self._bridge.check()
        if self._kept:
            return self._kept.popleft()
        if self._waited_for:  # a second wait must not overtake the first, which may have a token to keep
            raise SessionBusy("this answer is being waited for already; let that wait end first")
        self._waited_for = True
        try:
            token = await self._bridge.call(_next, self._tokens, keep=self._keep)
        finally:
            self._waited_for = False
        if token is None:
            raise StopAsyncIteration
        return token

    def _keep(self, token: GeneratedToken | None) -> None:
        if token is not None:
            self._kept.append(token)


async def _next(tokens: AsyncIterator[GeneratedToken]) -> GeneratedToken | None:
    return await anext(tokens, None)


class EmbeddedGeneration(_EmbeddedTokens):
    """The tokens of one answer; see :class:`~dgr.client.generation.Generation`.

    Dropping it, or cancelling a wait in it, keeps the session; iterating goes on without a gap. After another turn has
    begun it still has the token that was drawn as a wait was cancelled, if there was one, and then raises
    :class:`~dgr.errors.SessionBusy`.
    """

    def __init__(self, session: EmbeddedSession, generation: Generation) -> None:
        super().__init__(session._bridge, generation)
        self._owner = session
        self._generation = generation

    @property
    def finish_reason(self) -> str | None:
        return self._generation.finish_reason

    @property
    def tail(self) -> str:
        """Text that no token carried, at the end; see :class:`~dgr.client.generation.Generation`."""
        return self._generation.tail

    def __aiter__(self) -> EmbeddedGeneration:
        return self


class EmbeddedSession:
    """A conversation; see :class:`~dgr.client.session.ClientSession`."""

    def __init__(self, pipeline: EmbeddedPipeline, block: object, session: ClientSession) -> None:
        self._owner = pipeline, block
        self._bridge = pipeline._bridge
        self._session = session

    @property
    def transcript(self) -> list[int]:
        """A copy of every token of the conversation."""
        return list(self._session.transcript)

    @property
    def committed(self) -> int:
        """Tokens that every stage has committed."""
        return self._session.committed

    async def generate(
        self,
        prompt: str | Sequence[int] = (),
        *,
        transcript: Sequence[int] | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[int] | None = None,
        ahead: int | None = None,
    ) -> EmbeddedGeneration:
        """Take a turn; await this, then iterate over the answer's tokens.

        Once awaited the turn is taken, as under trio, where taking one does not wait: when this is cancelled the
        prompt is in the transcript, just as when a wait for the first token is.
        """

        async def begin() -> Generation:
            return self._session.generate(
                prompt, transcript=transcript, max_tokens=max_tokens, sampling=sampling, stop=stop, ahead=ahead
            )

        return EmbeddedGeneration(self, await self._bridge.call(begin))

    async def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` and commit them on every stage, without an answer.

        When this is cancelled the tokens are in the transcript; the next use commits what is not committed yet.
        """
        await self._bridge.call(self._session.prefill, tokens)

    def fork(self) -> AbstractAsyncContextManager[EmbeddedSession]:
        """Another session with a copy of this one's state; it is dropped when the block ends."""
        return Hold(self._bridge, self._fork, partial(EmbeddedSession, self._owner[0]))

    def _fork(self) -> AbstractAsyncContextManager[ClientSession]:
        return self._session.fork()


class EmbeddedEvents:
    """What happens to a pipeline, from the subscription on: iterate over it. Made by :meth:`EmbeddedPipeline.events`.

    It ends with the pipeline; what came before can still be read then. Cancelling a wait in it loses nothing. A subscriber
    that does not read loses events, and never holds the pipeline.
    """

    def __init__(self, pipeline: EmbeddedPipeline, block: object, queue: asyncio.Queue[Event | None]) -> None:
        self._owner = pipeline, block
        self._bridge = pipeline._bridge
        self._queue = queue

    def __aiter__(self) -> EmbeddedEvents:
        return self

    async def __anext__(self) -> Event:
        self._bridge.check_here()
        event = await self._queue.get()
        if event is None:
            self._queue.put_nowait(None)  # for the next who asks
            raise StopAsyncIteration
        return event


@asynccontextmanager
async def _subscribe(bridge: Bridge, pipeline: Pipeline) -> AsyncIterator[asyncio.Queue[Event | None]]:
    """On the trio side: hand over what happens, until the block or the pipeline ends; None ends it."""
    queue: asyncio.Queue[Event | None] = asyncio.Queue()

    def put(event: Event) -> None:
        if queue.qsize() < KEPT_EVENTS:
            queue.put_nowait(event)

    async def hand_over(events: trio.MemoryReceiveChannel[Event]) -> None:
        try:
            async for event in events:
                bridge.tell(put, event)
        finally:
            bridge.tell(queue.put_nowait, None)

    with pipeline.events() as events:
        async with open_nursery() as nursery:
            nursery.start_soon(hand_over, events)
            yield queue
            nursery.cancel_scope.cancel()


class _Admitted:
    """On the trio side: an answer whose block may end while a task waits for its next token. That wait ends first."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._scope: trio.CancelScope | None = None
        self._idle = trio.Event()
        self._left = False

    def __aiter__(self) -> _Admitted:
        return self

    async def __anext__(self) -> GeneratedToken:
        if not self._left:
            self._idle = trio.Event()
            try:
                with trio.CancelScope() as self._scope:
                    return await anext(self.answer)
            finally:
                self._scope = None
                self._idle.set()
        raise ClosedError("the block of this answer was left; admit the job again")

    async def leave(self) -> None:
        self._left = True
        if self._scope is not None:
            self._scope.cancel()
            with trio.CancelScope(shield=True):
                await self._idle.wait()


class _Served:
    """On the trio side: a serving whose block may end before those of its answers."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self._admitted: set[_Admitted] = set()

    @asynccontextmanager
    async def admit(self, job: Job, deadline: float | None) -> AsyncIterator[_Admitted]:
        async with self.engine.admit(job, deadline) as answer:
            admitted = _Admitted(answer)
            self._admitted.add(admitted)
            try:
                yield admitted
            finally:
                self._admitted.discard(admitted)
                await admitted.leave()

    async def leave(self) -> None:
        self.engine.end_all()
        for admitted in list(self._admitted):
            await admitted.leave()
            self.engine.release(admitted.answer)


@asynccontextmanager
async def _serve(pipeline: Pipeline, limits: ServingLimits | None) -> AsyncIterator[_Served]:
    async with open_serving(pipeline, limits) as engine:
        served = _Served(engine)
        try:
            yield served
        finally:
            await served.leave()


class EmbeddedAnswer(_EmbeddedTokens):
    """The answer to one job; see :class:`~dgr.serving.engine.Answer`. Made by :meth:`EmbeddedServing.admit`.

    Cancelling a wait in it loses nothing: iterating goes on. After its block it raises :class:`~dgr.errors.ClosedError`.
    """

    def __init__(self, serving: EmbeddedServing, block: object, admitted: _Admitted) -> None:
        super().__init__(serving._bridge, admitted)
        self._owner = serving, block
        self._answer = admitted.answer

    @property
    def phase(self) -> Phase:
        return self._answer.phase

    @property
    def usage(self) -> Usage:
        return self._answer.usage

    @property
    def finish_reason(self) -> str | None:
        """At the end: ``stop`` or ``length``."""
        return self._answer.finish_reason

    def __aiter__(self) -> EmbeddedAnswer:
        return self


class EmbeddedServing:
    """Admission to one pipeline; see :class:`~dgr.serving.engine.ServingEngine`. Made by :meth:`EmbeddedPipeline.serving`."""

    def __init__(self, pipeline: EmbeddedPipeline, block: object, served: _Served) -> None:
        self._owner = pipeline, block
        self._bridge = pipeline._bridge
        self._served = served

    @property
    def engine(self) -> ServingEngine:
        """The engine itself, to read its counters, line and state; its methods belong to the trio side."""
        return self._served.engine

    async def load(self, seconds: float = 5.0) -> Mapping[str, StageLoad | None]:
        """How much each stage has to do; see :meth:`Pipeline.load`."""
        return await self._bridge.call(self.engine.pipeline.load, seconds)

    def admit(self, job: Job, deadline: float | None = None) -> AbstractAsyncContextManager[EmbeddedAnswer]:
        """A place in the line for ``job``, given back with the block; errors as of :meth:`ServingEngine.admit`."""
        return Hold(self._bridge, partial(self._served.admit, job, deadline), partial(EmbeddedAnswer, self))

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, with the begin-of-text token if the model has one.

        Raises :class:`~dgr.errors.InputError` over a pipeline without a vocabulary.
        """

        async def run() -> tuple[int, ...]:
            vocabulary = self.engine.pipeline.vocabulary
            if vocabulary is None:
                raise InputError("a text prompt needs a vocabulary; give token ids, or open the pipeline with one")
            return tuple(vocabulary.encode(text, add_special=True))

        return await self._bridge.call(run)

    async def drain(self, seconds: float) -> None:
        """Admit nobody from now on; wait for the answers under way, and end those that take longer than ``seconds``."""
        await self._bridge.call(self.engine.drain, seconds)


class EmbeddedPipeline:
    """A pipeline; see :class:`~dgr.client.pipeline.Pipeline`."""

    def __init__(self, bridge: Bridge, block: object, pipeline: Pipeline) -> None:
        self._owner = block
        self._bridge = bridge
        self._pipeline = pipeline

    def session(self) -> AbstractAsyncContextManager[EmbeddedSession]:
        """A conversation; its state is dropped when the block ends."""
        return Hold(self._bridge, self._pipeline.session, partial(EmbeddedSession, self))

    def serving(self, limits: ServingLimits | None = None) -> AbstractAsyncContextManager[EmbeddedServing]:
        """Serve the pipeline to many; leaving the block ends all answers. Raises :class:`~dgr.errors.InputError`."""
        return Hold(self._bridge, partial(_serve, self._pipeline, limits), partial(EmbeddedServing, self))

    def events(self) -> AbstractAsyncContextManager[EmbeddedEvents]:
        """Subscribe to everything that happens from now on, for the length of the block."""
        return Hold(self._bridge, partial(_subscribe, self._bridge, self._pipeline), partial(EmbeddedEvents, self))

    async def change_route(self, route: Route) -> None:
        """Fence a new epoch; sessions re-prefill when they are next used."""
        await self._bridge.call(self._pipeline.change_route, route)

    async def statistics(self) -> PipelineStatistics:
        """A snapshot, taken on the trio side."""

        async def take() -> PipelineStatistics:
            return self._pipeline.statistics()

        return await self._bridge.call(take)

    async def load(self, seconds: float = 5.0) -> Mapping[str, StageLoad | None]:
        """How much each stage has to do: address -> its load, None for one that does not tell; see :meth:`Pipeline.load`."""
        return await self._bridge.call(self._pipeline.load, seconds)


class _Embedding(AbstractAsyncContextManager[EmbeddedPipeline]):
    """The block of a pipeline."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Pipeline]]) -> None:
        self._make = make
        self._open = AsyncExitStack()

    async def __aenter__(self) -> EmbeddedPipeline:
        async with AsyncExitStack() as stack:
            bridge = await stack.enter_async_context(Bridge("dgr-trio"))
            show = partial(EmbeddedPipeline, bridge)
            block: Hold[Pipeline, EmbeddedPipeline] = Hold(bridge, self._make, show, vital=True)
            weakref.finalize(block, bridge.abandon).atexit = False  # at exit the bridge sees to itself
            embedded = await stack.enter_async_context(block)
            stack.callback(bridge.close)  # first of all, nothing new is begun
            self._open = stack.pop_all()
        return embedded

    async def __aexit__(self, *exc: Any) -> None:
        await self._open.__aexit__(*exc)


def embed_pipeline(
    make: Callable[[], AbstractAsyncContextManager[Pipeline]],
) -> AbstractAsyncContextManager[EmbeddedPipeline]:
    """Run the pipeline that ``make`` opens on the trio side, for an asyncio program.

    For pipelines over stages in other processes: ``embed_pipeline(lambda: dgr.open_route("route.toml"))``. Leaving the block
    frees everything and ends the trio thread. So does losing the last reference to the block and to everything of it, when it
    was never left (its loop was closed, say), and so does the end of the interpreter.
    """
    return _Embedding(make)


def open_pipeline(
    model: str | Path | Sequence[str | Path], split: str | Sequence[LayerRange] | None = None, **options: Any
) -> AbstractAsyncContextManager[EmbeddedPipeline]:
    """Run a model as a pipeline in this process, for an asyncio program.

    Arguments and errors as of :func:`dgr.open_pipeline`; the block ends as that of :func:`embed_pipeline`.
    """
    return embed_pipeline(lambda: open_trio_pipeline(model, split, **options))
