"""dgr inside an asyncio program: the same pipeline, sessions and tokens, awaited from asyncio.

A trio loop runs in a thread of its own behind anyio's blocking portal (extra ``asyncio``). Results, errors and
cancellation cross both ways: a cancelled ``await`` cancels the work on the other side and returns when that has ended, so
that the session is ready for its next turn.

    async with embed.open_pipeline("model.gguf", "0:15,15:29,29:43") as pipeline:
        async with pipeline.session() as session:
            async for token in await session.generate("Hello", max_tokens=32):
                print(token.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dgr.engine.base import SamplingParams
from dgr.model.route import LayerRange, Route
from dgr.runtime.client import ClientSession
from dgr.runtime.generation import GeneratedToken, Generation
from dgr.runtime.local import open_pipeline as open_trio_pipeline
from dgr.runtime.pipeline import Pipeline, PipelineStatistics

__all__ = ["EmbeddedGeneration", "EmbeddedPipeline", "EmbeddedSession", "open_pipeline"]

T = TypeVar("T")


class _Bridge:
    """Calls from one asyncio loop into the trio loop behind a portal."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._loop = asyncio.get_running_loop()

    async def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await ``function(*args)`` on the trio side."""
        ended = asyncio.Event()

        async def run() -> T:
            try:
                return await function(*args)
            finally:
                self._loop.call_soon_threadsafe(ended.set)

        future = self._portal.start_task_soon(run)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await ended.wait()  # the trio side unwinds first: nothing of this call runs on after it returned
            raise

    @asynccontextmanager
    async def enter(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
        """Hold a trio context manager open for the length of the asyncio block, all in one trio task."""
        entered: asyncio.Future[T] = self._loop.create_future()
        leave = await self.call(_make_event)

        def announce(value: T) -> None:
            if not entered.done():
                entered.set_result(value)

        async def hold() -> None:
            async with make() as value:
                self._loop.call_soon_threadsafe(announce, value)
                await leave.wait()

        holder = asyncio.ensure_future(self.call(hold))
        try:
            either: list[asyncio.Future[Any]] = [holder, entered]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not entered.done():
                await holder  # raises what entering raised
            yield entered.result()
        except asyncio.CancelledError:
            holder.cancel()
            raise
        finally:
            if not holder.done():
                await self.call(_set, leave)
            await asyncio.wait([holder])
            if not holder.cancelled() and (error := holder.exception()) is not None and entered.done():
                raise error


async def _make_event() -> trio.Event:
    return trio.Event()


async def _set(event: trio.Event) -> None:
    event.set()


class EmbeddedGeneration:
    """The tokens of one answer; see :class:`~dgr.runtime.client.Generation`."""

    def __init__(self, bridge: _Bridge, generation: Generation) -> None:
        self._bridge = bridge
        self._generation = generation

    @property
    def finish_reason(self) -> str | None:
        return self._generation.finish_reason

    def __aiter__(self) -> EmbeddedGeneration:
        return self

    async def __anext__(self) -> GeneratedToken:
        token = await self._bridge.call(_next, self._generation)
        if token is None:
            raise StopAsyncIteration
        return token


async def _next(generation: Generation) -> GeneratedToken | None:
    async for token in generation:
        return token
    return None


class EmbeddedSession:
    """A conversation; see :class:`~dgr.runtime.client.ClientSession`."""

    def __init__(self, bridge: _Bridge, session: ClientSession) -> None:
        self._bridge = bridge
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
    ) -> EmbeddedGeneration:
        """Take a turn; await this, then iterate over the answer's tokens."""

        async def begin() -> Generation:
            return self._session.generate(
                prompt, transcript=transcript, max_tokens=max_tokens, sampling=sampling, stop=stop
            )

        return EmbeddedGeneration(self._bridge, await self._bridge.call(begin))

    async def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` and commit them on every stage, without an answer."""
        await self._bridge.call(self._session.prefill, tokens)


class EmbeddedPipeline:
    """A pipeline; see :class:`~dgr.runtime.pipeline.Pipeline`."""

    def __init__(self, bridge: _Bridge, pipeline: Pipeline) -> None:
        self._bridge = bridge
        self._pipeline = pipeline

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EmbeddedSession]:
        """A conversation; its state is dropped when the block ends."""
        async with self._bridge.enter(self._pipeline.session) as session:
            yield EmbeddedSession(self._bridge, session)

    async def change_route(self, route: Route) -> None:
        """Fence a new epoch; sessions re-prefill when they are next used."""
        await self._bridge.call(self._pipeline.change_route, route)

    async def statistics(self) -> PipelineStatistics:
        """A snapshot, taken on the trio side."""

        async def take() -> PipelineStatistics:
            return self._pipeline.statistics()

        return await self._bridge.call(take)


@asynccontextmanager
async def open_pipeline(
    model: str | Path | Sequence[str | Path], split: str | Sequence[LayerRange] | None = None, **options: Any
) -> AsyncIterator[EmbeddedPipeline]:
    """Run a model as a pipeline in this process, for an asyncio program.

    Arguments as :func:`dgr.open_pipeline`. Leaving the block frees everything and ends the trio thread.
    """
    async with AsyncExitStack() as stack:
        portal_cm = start_blocking_portal(backend="trio", name="dgr-trio")
        portal = await asyncio.to_thread(portal_cm.__enter__)
        stack.push_async_callback(asyncio.to_thread, portal_cm.__exit__, None, None, None)
        bridge = _Bridge(portal)
        pipeline = await stack.enter_async_context(bridge.enter(lambda: open_trio_pipeline(model, split, **options)))
        yield EmbeddedPipeline(bridge, pipeline)
