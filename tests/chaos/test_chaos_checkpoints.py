"""Every public call, cancelled at every step: afterwards its session and its pipeline go on, and nothing is held.

The calls are found by introspection (:mod:`chaos.public_api`); one without a case here fails. A step is one that any task takes
while the call lasts, stages and links included: more than the checkpoints of the call itself. The default suite looks at some
of the steps, ``make test-chaos`` at all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from cancel_at import cancelled_at
from chaos.public_api import MODULES, waiting_calls
from cluster.remote_stages import Hosts, open_hosts
from conversations import reference, take
from serving.interrupts import CONTEXT, GUARD, PROMPT, SPLIT, Fake, trio_threads

import dgr
from dgr.client.pipeline import Pipeline, open_pipeline_on
from dgr.client.session import ClientSession
from dgr.core.route import LayerRange
from dgr.serving import embed
from dgr.serving.engine import Job, ServingEngine, ServingLimits, open_serving
from dgr.stage.ledger import Lease, Ledger
from dgr.testing.engines.fake import FakeEngine
from dgr.testing.offline import Offline, open_fake_pipeline
from dgr.testing.waits import until

#: Steps between two that are tried, in the default suite.
STRIDE = 29
JOB = Job(tuple(PROMPT), 2)

#: A call, made in a session that has committed PROMPT.
Call = Callable[[Offline, ClientSession], Awaitable[object]]


# --- the calls, under trio ---


async def _enter(block: AbstractAsyncContextManager[object]) -> None:
    async with block:
        pass


async def generate(_: Offline, session: ClientSession) -> None:
    await take(session.generate([7], max_tokens=2, stop=()))


async def generate_ahead(_: Offline, session: ClientSession) -> None:
    await take(session.generate([7], max_tokens=6, stop=(), ahead=4))


async def logits(_: Offline, session: ClientSession) -> None:
    await session.logits([7, 8], lambda _position, _values: None)


async def prefill(_: Offline, session: ClientSession) -> None:
    await session.prefill(list(range(40)))


async def fork(_: Offline, session: ClientSession) -> None:
    async with session.fork() as other:
        await take(other.generate([7], max_tokens=1, stop=()))


async def fork_target(offline: Offline, session: ClientSession) -> None:
    async with offline.pipeline.fork_target() as other:
        await other.begin_as(session)
        await take(other.generate([7], max_tokens=1, stop=()))


async def state_summaries(_: Offline, session: ClientSession) -> None:
    await session.state_summaries()


async def session_block(offline: Offline, _: ClientSession) -> None:
    async with offline.pipeline.session() as session:
        await take(session.generate([7], max_tokens=1, stop=()))


async def aclose(offline: Offline, _: ClientSession) -> None:
    async with offline.pipeline.session() as session:
        await session.prefill([7])
        await session.aclose()


async def change_route(offline: Offline, _: ClientSession) -> None:
    await offline.pipeline.change_route(offline.route)


async def wait_live(offline: Offline, _: ClientSession) -> None:
    with trio.CancelScope(shield=True):  # the stage comes back, whoever waits for it
        await offline.restart("stage-1")
    await trio.testing.wait_all_tasks_blocked()
    await offline.pipeline.wait_live()


async def load(offline: Offline, _: ClientSession) -> None:
    await offline.pipeline.load()


async def finish(offline: Offline, session: ClientSession) -> None:
    tracer = offline.pipeline.tracer
    trace = tracer.begin()
    try:
        with trace.of(session):
            await take(session.generate([7], max_tokens=1, stop=()))
        await tracer.finish(trace)
    finally:
        tracer.drop(trace)


async def collect(offline: Offline, _: ClientSession) -> None:
    await offline.pipeline.tracer.collect()


async def another_pipeline(offline: Offline, _: ClientSession) -> None:
    async with (
        open_pipeline_on(offline.cluster.connect, offline.route) as pipeline,
        pipeline.session() as session,
    ):
        await take(session.generate([7], max_tokens=1, stop=()))


async def connect(offline: Offline, _: ClientSession) -> None:
    await _enter(offline.cluster.connect("stage-0"))


async def start(offline: Offline, _: ClientSession) -> None:
    try:
        await offline.start("another", LayerRange(0, 3))
    finally:
        if "another" in offline.cluster.shards:
            offline.cluster.stop("another")


async def another_cluster(_: Offline, _session: ClientSession) -> None:
    async with dgr.open_cluster() as cluster:
        await cluster.start("one", FakeEngine(LayerRange(0, 6), CONTEXT))


async def serve(offline: Offline, _: ClientSession) -> None:
    async with open_serving(offline.pipeline) as engine, engine.admit(JOB) as answer:
        assert [token.id async for token in answer] == reference(PROMPT, 2)


async def drained(offline: Offline, _: ClientSession) -> None:
    async with open_serving(offline.pipeline) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(_answered, engine)
        await trio.testing.wait_all_tasks_blocked()
        await engine.drain(5)


async def _answered(engine: ServingEngine) -> None:
    async with engine.admit(JOB) as answer:
        async for _ in answer:
            pass


CALLS: dict[str, Call] = {
    "dgr.ClientSession.aclose": aclose,
    "dgr.ClientSession.fork": fork,
    "dgr.ClientSession.generate": generate,
    "dgr.ClientSession.logits": logits,
    "dgr.ClientSession.prefill": prefill,
    "dgr.ClientSession.state_summaries": state_summaries,
    "dgr.Generation.__anext__": generate_ahead,
    "dgr.LocalCluster.connect": connect,
    "dgr.LocalCluster.start": start,
    "dgr.Pipeline.change_route": change_route,
    "dgr.Pipeline.fork_target": fork_target,
    "dgr.Pipeline.load": load,
    "dgr.Pipeline.session": session_block,
    "dgr.Pipeline.wait_live": wait_live,
    "dgr.client.tracing.Tracer.collect": collect,
    "dgr.client.tracing.Tracer.finish": finish,
    "dgr.open_cluster": another_cluster,
    "dgr.open_pipeline_on": another_pipeline,
    "dgr.serving.engine.Answer.__anext__": serve,
    "dgr.serving.engine.ServingEngine.admit": serve,
    "dgr.serving.engine.ServingEngine.drain": drained,
    "dgr.serving.engine.open_serving": serve,
}
#: What needs stages behind sockets, or a model: below.
APART = {"dgr.open_route", "dgr.open_pipeline"}


async def settled(offline: Offline) -> None:
    """The stages are at their idle bytes."""
    await trio.testing.wait_all_tasks_blocked()
    for name, shard in offline.cluster.shards.items():
        seen = shard.statistics()
        assert (seen.routes, seen.sessions, seen.leased_bytes) == (1, 0, 0), f"{name}: {seen}"
        assert all(offline.engines[name].position(slot) == 0 for slot in range(CONTEXT.n_seq_max))
    assert offline.pipeline.statistics().sessions == 0
    assert len(offline.pipeline._client._links.replies) == 0
    assert offline.pipeline.tracer._open == []


async def at_every_step(call: Call, stride: int, first: int = 1) -> int:
    """Make a call, cancelled at one step after the other, until one is not reached; gives that."""
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        step, reached = first, True
        while reached:
            async with offline.pipeline.session() as session:
                await session.prefill(PROMPT)
                with cancelled_at(step) as killer:
                    await call(offline, session)
                reached = killer.reached
                said = await take(session.generate(transcript=[*PROMPT, 9], max_tokens=2, stop=()))
                assert said == reference([*PROMPT, 9], 2), f"cancelled at step {step}"
            await settled(offline)
            step += stride
        return step


def test_every_public_call_has_a_case() -> None:
    assert waiting_calls() == {*CALLS, *APART, *EMBEDDED, *EMBEDDED_APART}


def test_a_public_call_without_a_case_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(_: Pipeline) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Pipeline, "pause", pause, raising=False)
    assert waiting_calls(*MODULES) - {*CALLS, *APART, *EMBEDDED, *EMBEDDED_APART} == {"dgr.Pipeline.pause"}


BY_CASE = {call: name for name, call in CALLS.items()}


@pytest.mark.parametrize("call", BY_CASE, ids=BY_CASE.get)
async def test_a_call_is_cancelled_at_some_steps(autojump_clock: trio.abc.Clock, call: Call) -> None:
    assert await at_every_step(call, STRIDE, 7) > 7


@pytest.mark.chaos
@pytest.mark.parametrize("call", BY_CASE, ids=BY_CASE.get)
async def test_a_call_is_cancelled_at_every_step(autojump_clock: trio.abc.Clock, call: Call) -> None:
    assert await at_every_step(call, 1) > 3


async def test_a_slot_that_a_cancelled_call_keeps_is_found(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a fork that is given up while it is made keeps its lease on one stage."""
    release, kept = Ledger.release, list[Lease]()

    def forgetful(ledger: Ledger, lease: Lease) -> None:
        if len(ledger.leases) > 1 and not kept:
            kept.append(lease)
        else:
            release(ledger, lease)

    monkeypatch.setattr(Ledger, "release", forgetful)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await at_every_step(fork, STRIDE)


# --- a route file, over sockets ---


async def _open_route(file: Path) -> None:
    async with (
        dgr.open_route(file, policy=dgr.LinkPolicy(handshake=5.0)) as pipeline,
        pipeline.session() as session,
    ):
        await take(session.generate(PROMPT, max_tokens=1, stop=()))


@asynccontextmanager
async def _routed(folder: Path) -> AsyncIterator[tuple[Hosts, Path]]:
    async with open_hosts() as hosts:
        stages = await hosts.start_all(("0:2", "2:6"))
        await hosts.assert_serving(stages)
        lines = [f'[[stage]]\naddress = "{stage.address}"\nlayers = "{stage.layers}"\n' for stage in stages]
        file = folder / "route.toml"
        file.write_text("\n".join(lines))
        yield hosts, file


@pytest.mark.parametrize("stride", [199, pytest.param(1, marks=pytest.mark.chaos)])
async def test_open_route_is_cancelled(tmp_path: Path, stride: int) -> None:
    step, reached = 1, True
    while reached:  # a guard against hanging for each of many parts
        async with _routed(tmp_path) as (hosts, file):
            for _ in range(100):
                with cancelled_at(step) as killer:
                    await _open_route(file)
                reached = killer.reached
                await hosts.assert_empty()
                step += stride
                if not reached:
                    break
    assert step > 50


# --- through the asyncio embedding ---

#: The same through the bridge.
EmbeddedCall = Callable[[embed.EmbeddedPipeline, embed.EmbeddedSession], Awaitable[object]]


async def e_generate(_: embed.EmbeddedPipeline, session: embed.EmbeddedSession) -> None:
    async for _token in await session.generate([7], max_tokens=2, stop=()):
        pass


async def e_prefill(_: embed.EmbeddedPipeline, session: embed.EmbeddedSession) -> None:
    await session.prefill(list(range(40)))


async def e_fork(_: embed.EmbeddedPipeline, session: embed.EmbeddedSession) -> None:
    async with session.fork() as other:
        await other.prefill([7])


async def e_session(pipeline: embed.EmbeddedPipeline, _: embed.EmbeddedSession) -> None:
    async with pipeline.session() as session:
        await session.prefill([7])


async def e_change_route(pipeline: embed.EmbeddedPipeline, _: embed.EmbeddedSession) -> None:
    await pipeline.change_route(pipeline._pipeline.route)


async def e_statistics(pipeline: embed.EmbeddedPipeline, _: embed.EmbeddedSession) -> None:
    await pipeline.statistics()


async def e_load(pipeline: embed.EmbeddedPipeline, _: embed.EmbeddedSession) -> None:
    await pipeline.load()


async def e_events(pipeline: embed.EmbeddedPipeline, session: embed.EmbeddedSession) -> None:
    async with pipeline.events() as events:
        await session.prefill([7, 8])
        await anext(events)


async def e_serve(pipeline: embed.EmbeddedPipeline, _: embed.EmbeddedSession) -> None:
    async with pipeline.serving(ServingLimits(sessions=2)) as serving:
        await serving.load()
        async with serving.admit(Job(await serving.encode("Hello"), 2)) as answer:
            async for _token in answer:
                pass
        await serving.drain(5)


EMBEDDED: dict[str, EmbeddedCall] = {
    "dgr.serving.embed.EmbeddedAnswer.__anext__": e_serve,
    "dgr.serving.embed.EmbeddedEvents.__anext__": e_events,
    "dgr.serving.embed.EmbeddedGeneration.__anext__": e_generate,
    "dgr.serving.embed.EmbeddedPipeline.change_route": e_change_route,
    "dgr.serving.embed.EmbeddedPipeline.events": e_events,
    "dgr.serving.embed.EmbeddedPipeline.load": e_load,
    "dgr.serving.embed.EmbeddedPipeline.serving": e_serve,
    "dgr.serving.embed.EmbeddedPipeline.session": e_session,
    "dgr.serving.embed.EmbeddedPipeline.statistics": e_statistics,
    "dgr.serving.embed.EmbeddedServing.admit": e_serve,
    "dgr.serving.embed.EmbeddedServing.drain": e_serve,
    "dgr.serving.embed.EmbeddedServing.encode": e_serve,
    "dgr.serving.embed.EmbeddedServing.load": e_serve,
    "dgr.serving.embed.EmbeddedSession.fork": e_fork,
    "dgr.serving.embed.EmbeddedSession.generate": e_generate,
    "dgr.serving.embed.EmbeddedSession.prefill": e_prefill,
}
#: A whole pipeline, and one over a model: below.
EMBEDDED_APART = {"dgr.serving.embed.embed_pipeline", "dgr.serving.embed.open_pipeline"}
BY_EMBEDDED_CASE = {call: name for name, call in EMBEDDED.items()}


async def _interrupted(arm: Callable[[Callable[[], object]], None], work: Callable[[], Awaitable[object]]) -> None:
    async def run() -> None:
        arm(task.cancel)
        await work()

    task = asyncio.ensure_future(run())
    await asyncio.wait([task], timeout=GUARD)
    assert task.done(), "it hangs"
    if not task.cancelled():
        task.result()


async def _embedded_at_every_step(call: EmbeddedCall, stride: int, first: int) -> int:
    side, step, reached = Fake(), first, True
    async with embed.embed_pipeline(side.open) as pipeline:
        while reached:
            async with pipeline.session() as session:
                await session.prefill(PROMPT)
                await _interrupted(partial(side.interrupter.arm, step), partial(call, pipeline, session))
                reached = side.interrupter.disarm()
                answer = await session.generate(transcript=[*PROMPT, 9], max_tokens=2, stop=())
                assert [token.id async for token in answer] == reference([*PROMPT, 9], 2), f"cancelled at step {step}"
            assert side.offline is not None
            await pipeline._bridge.call(settled, side.offline)
            step += stride
    assert not trio_threads()
    return step


@pytest.mark.parametrize("call", BY_EMBEDDED_CASE, ids=BY_EMBEDDED_CASE.get)
def test_a_call_from_asyncio_is_cancelled_at_some_steps(call: EmbeddedCall) -> None:
    assert asyncio.run(_embedded_at_every_step(call, 2 * STRIDE, 7)) > 7


@pytest.mark.chaos
@pytest.mark.parametrize("call", BY_EMBEDDED_CASE, ids=BY_EMBEDDED_CASE.get)
def test_a_call_from_asyncio_is_cancelled_at_every_step(call: EmbeddedCall) -> None:
    assert asyncio.run(_embedded_at_every_step(call, 1, 1)) > 3


async def _whole(open_it: Callable[[], AbstractAsyncContextManager[embed.EmbeddedPipeline]]) -> None:
    async with open_it() as pipeline, pipeline.session() as session:
        async for _token in await session.generate(PROMPT, max_tokens=1, stop=()):
            pass


@pytest.mark.parametrize("stride", [83, pytest.param(1, marks=pytest.mark.chaos)])
def test_a_whole_pipeline_in_asyncio_is_cancelled(stride: int) -> None:
    async def main() -> int:
        step, reached = 1, True
        while reached:
            side = Fake()
            await _interrupted(
                partial(side.interrupter.arm, step), partial(_whole, partial(embed.embed_pipeline, side.open))
            )
            reached = side.interrupter.disarm()
            assert not trio_threads(), f"cancelled at step {step}"
            if side.offline is not None:
                assert not side.offline.cluster.shards
            step += stride
        return step

    assert asyncio.run(main()) > 50


# --- over a model ---


@pytest.mark.chaos
async def test_open_pipeline_is_cancelled(small: Path) -> None:
    context = dgr.ContextParams(n_ctx=128, n_batch=32, n_ubatch=32, n_seq_max=2)
    step, reached = 1, True
    while reached:
        with cancelled_at(step) as killer:
            async with dgr.open_pipeline(small, "0:3,3:7", context=context) as pipeline, pipeline.session() as one:
                await take(one.generate(PROMPT, max_tokens=1, stop=()))
        reached = killer.reached
        await until(lambda: not engine_threads(), what="the end of every engine's thread")
        step += 1
    assert step > 50


@pytest.mark.chaos
def test_open_pipeline_in_asyncio_is_cancelled(small: Path) -> None:
    """By time: its trio run is made inside, so that no instrument of ours is there from its first step on."""
    context = dgr.ContextParams(n_ctx=128, n_batch=32, n_ubatch=32, n_seq_max=2)

    async def main() -> None:
        for number in range(60):
            with suppress(TimeoutError):
                async with asyncio.timeout(number * 0.01):
                    await _whole(lambda: embed.open_pipeline(small, "0:3,3:7", context=context))
            assert not trio_threads()

    asyncio.run(main())


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dgr-engine"]
