"""Where the time of a request went comes out as it was: known delays, known speeds, clocks that are set wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import trio
from attrs import evolve
from far_stages import SPEEDS, Distances, put_far_away
from msgspec.structs import replace
from trio.testing import MockClock

from dgr.client.pipeline import Pipeline
from dgr.client.tracing import RequestTrace, Trace
from dgr.core.trace import WorkRecord
from dgr.core.values import ContextParams
from dgr.serving.tracing.account import account_of
from dgr.serving.tracing.spans import CLIENT, Part, lives_of
from dgr.stage import tracing as stage_tracing
from dgr.stage.tracing import TraceBuffer
from dgr.testing.offline import open_fake_pipeline
from dgr.wire.clocks import ClockOffset

SPLIT = "0:2,2:4,4:6"
LAYERS = dict(zip(("stage-0", "stage-1", "stage-2"), SPLIT.split(","), strict=True))
CONTEXT = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=4)
FAR = Distances(
    control={"stage-0": (0.005, 0.005), "stage-1": (0.002, 0.002), "stage-2": (0.007, 0.007)},
    boundary={"stage-0": 0.003, "stage-1": 0.011},
    clocks={"stage-0": 1000.0, "stage-1": 3.25, "stage-2": 0.0},
)
#: Ways there and back that differ: nobody can tell from outside.
CROOKED = evolve(FAR, control={"stage-0": (0.009, 0.001), "stage-1": (0.0, 0.004), "stage-2": (0.002, 0.012)})
PROMPT = [1, 2, 3, 4, 5, 6, 7]

Parts = Mapping[tuple[str, Part], float]


def known(distances: Distances, tokens: int) -> dict[tuple[str, Part], float]:
    """What one work frame of so many tokens takes, stage by stage."""
    parts = {
        ("stage-0", Part.WIRE): distances.control["stage-0"][0],
        ("stage-1", Part.WIRE): distances.boundary["stage-0"],
        ("stage-2", Part.WIRE): distances.boundary["stage-1"],
        (CLIENT, Part.WIRE): distances.control["stage-2"][1],
    }
    for stage, layers in LAYERS.items():
        fixed, each = SPEEDS[layers]
        parts |= {(stage, Part.COMPUTE): fixed + each * tokens}
        parts |= {(stage, part): 0.0 for part in (Part.QUEUE, Part.WAIT, Part.RESULT)}
    return parts


async def traced(pipeline: Pipeline, tokens: int = 5, think: float = 0.0) -> Trace:
    """An answer, between whose tokens its reader thinks."""
    trace = pipeline.tracer.begin()
    async with pipeline.session() as session:
        with trace.of(session):
            async for _ in session.generate(PROMPT, max_tokens=tokens, stop=()):
                await trio.sleep(think)
        return await pipeline.tracer.finish(trace)


def differences(parts: Parts, wanted: Parts) -> list[str]:
    return [
        f"{where} {part}: {parts.get((where, part), 0.0)}, not {seconds}"
        for (where, part), seconds in wanted.items()
        if parts.get((where, part), 0.0) != pytest.approx(seconds, abs=1e-9)
    ]


def problems(trace: Trace, distances: Distances = FAR, think: float = 0.0) -> list[str]:
    """How a trace of one request differs from what happened."""
    prefill, decode = account_of(trace)
    steps = len(trace.works) - 1
    wanted = {key: steps * seconds for key, seconds in known(distances, 1).items()} | {
        (CLIENT, Part.CLIENT): steps * think
    }
    found = differences(decode.parts, wanted) + differences(prefill.parts, known(distances, len(PROMPT)))
    if (prefill.incomplete, decode.incomplete) != (0, 0):
        found.append(f"{prefill.incomplete} and {decode.incomplete} frames are incomplete")
    if abs(decode.unexplained) > 1e-9:
        found.append(f"{decode.unexplained} s unexplained")
    for life in lives_of(trace):
        for record in life.records.values():
            if (record.position, record.tokens) != (life.work.position, life.work.tokens):
                found.append(f"the record of {record.position} is not of {life.work.position}")
    return found


async def test_times_come_out_exactly_whatever_clocks_say(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        trace = await traced(offline.pipeline, think=0.25)
        assert problems(trace, think=0.25) == []
        for stage in trace.stages:
            assert stage.clock is not None
            assert stage.clock.offset == pytest.approx(FAR.clocks[stage.address])
            assert stage.clock.error == pytest.approx(FAR.control[stage.address][0])
        assert [stage.dropped for stage in trace.stages] == [0, 0, 0]
        assert [work.reply for work in trace.works] == ["Token"] * 5


async def test_a_crooked_way_is_told_within_its_bound_and_sums_stay_exact(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_far_away(monkeypatch, CROOKED)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        trace = await traced(offline.pipeline)
    assert problems(trace, CROOKED) != []  # the wires, and nothing else:
    _, decode = account_of(trace)
    wanted, bounds = known(CROOKED, 1), {CLIENT: 0.0}
    for stage in trace.stages:
        assert stage.clock is not None
        assert abs(stage.clock.offset - CROOKED.clocks[stage.address]) <= stage.clock.error
        bounds[stage.address] = stage.clock.error
    for before, after in itertools.pairwise([CLIENT, *LAYERS, CLIENT]):
        wire = decode.parts[after, Part.WIRE] / decode.frames
        assert abs(wire - wanted[after, Part.WIRE]) <= bounds[before] + bounds[after] + 1e-9
    others = {key: decode.frames * seconds for key, seconds in wanted.items() if key[1] is not Part.WIRE}
    assert differences(decode.parts, others) == []
    assert decode.unexplained == pytest.approx(0, abs=1e-9)
    assert decode.measured == pytest.approx(decode.frames * sum(wanted.values()))


def _as_if_it_were_behind(self: ClockOffset, there: float) -> float:
    return there + self.offset


async def test_an_offset_of_the_wrong_sign_would_be_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        trace = await traced(offline.pipeline)
    monkeypatch.setattr(ClockOffset, "here", _as_if_it_were_behind)
    assert any("wire" in problem for problem in problems(trace))


async def test_swapped_stages_would_be_seen(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        trace = await traced(offline.pipeline)
    head, middle, tail = trace.stages
    first = evolve(head, records=middle.records, clock=middle.clock)
    second = evolve(middle, records=head.records, clock=head.clock)
    swapped = [first, second, tail]
    assert any("compute" in problem for problem in problems(evolve(trace, stages=swapped)))


async def many(pipeline: Pipeline, sessions: int = 3, trace_id: bytes | None = None) -> list[Trace]:
    """Requests side by side, each traced; prompts of different lengths."""
    found: dict[int, Trace] = {}

    async def go(index: int) -> None:
        trace = pipeline.tracer.begin(trace_id)
        async with pipeline.session() as session:
            with trace.of(session):
                async for _ in session.generate([1 + index] * (5 + index), max_tokens=12, stop=()):
                    pass
        found[index] = await pipeline.tracer.finish(trace)

    async with trio.open_nursery() as nursery:
        for index in range(sessions):
            nursery.start_soon(go, index)
    return [found[index] for index in range(sessions)]


def mixed_up(traces: list[Trace]) -> list[str]:
    """What in traces of requests side by side is another one's, or missing."""
    found = []
    for index, trace in enumerate(traces):
        prefill, decode = account_of(trace)
        if prefill.incomplete or decode.incomplete or abs(decode.unexplained) > 1e-9:
            found.append(f"{index}: incomplete")
        works = {(work.epoch, work.session, work.seq): (work.position, work.tokens) for work in trace.works}
        for stage in trace.stages:
            told = {(one.epoch, one.session, one.seq): (one.position, one.tokens) for one in stage.records}
            if told != works:
                found.append(f"{index}: {stage.address} tells of other work")
            if any(one.batch_tokens < one.tokens or not one.batch_items for one in stage.records):
                found.append(f"{index}: {stage.address} tells of a batch that cannot be")
    return found


async def test_requests_side_by_side_have_each_their_own(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        traces = await many(offline.pipeline)
        assert mixed_up(traces) == []
        # They shared batches, and a batch is one stretch of time for all of them.
        shared: dict[tuple[str, float], set[float]] = {}
        for trace in traces:
            for stage in trace.stages:
                for record in stage.records:
                    shared.setdefault((stage.address, record.began), set()).add(record.ended)
        assert any(record.batch_items > 1 for trace in traces for stage in trace.stages for record in stage.records)
        assert all(len(ends) == 1 for ends in shared.values())
        assert all(not shard.traces for shard in offline.cluster.shards.values())


async def test_requests_of_one_trace_have_each_their_own_all_the_same(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent asks several times in one trace, at once."""
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        traces = await many(offline.pipeline, trace_id=bytes(range(16)))
        assert {trace.id for trace in traces} == {bytes(range(16))}
        assert mixed_up(traces) == []
        assert offline.pipeline.tracer._open == []


def _of_the_next_session(add: Callable[[TraceBuffer, bytes, WorkRecord], None]) -> Any:
    def wrong(self: TraceBuffer, route: bytes, record: WorkRecord) -> None:
        add(self, route, replace(record, session=record.session % 3 + 1) if record.batch_items > 1 else record)

    return wrong


async def test_a_batch_of_another_session_would_be_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceBuffer, "add", _of_the_next_session(TraceBuffer.add))
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        assert mixed_up(await many(offline.pipeline)) != []


async def test_chunks_of_a_prompt_wait_for_each_other(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four chunks in flight at once: all but the first queue at the head behind the one before."""
    put_far_away(monkeypatch, FAR)
    async with open_fake_pipeline(SPLIT, context=CONTEXT, chunk=10) as offline:
        trace = offline.pipeline.tracer.begin()
        async with offline.pipeline.session() as session:
            with trace.of(session):
                await session.prefill([7] * 40)
            found = await offline.pipeline.tracer.finish(trace)
    prefill, decode = account_of(found)
    fixed, each = SPEEDS["0:2"]
    assert (prefill.frames, decode.frames) == (4, 0)
    assert prefill.parts["stage-0", Part.QUEUE] == pytest.approx((1 + 2 + 3) * (fixed + 10 * each))
    assert prefill.parts["stage-0", Part.COMPUTE] == pytest.approx(4 * (fixed + 10 * each))
    slowest = sum(SPEEDS["2:4"][0] + 10 * SPEEDS["2:4"][1] for _ in range(4))
    assert slowest < prefill.measured < prefill.explained


async def test_a_re_prefill_is_told_as_what_it_is(autojump_clock: MockClock) -> None:
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        trace = offline.pipeline.tracer.begin()
        async with offline.pipeline.session() as session:
            with trace.of(session):
                answer = session.generate(PROMPT, max_tokens=4, stop=())
                await anext(answer)
                await offline.restart("stage-1")
                rest = [token async for token in answer]
        found = await offline.pipeline.tracer.finish(trace)
    assert len(rest) == 3
    assert [(work.epoch, work.position, work.tokens) for work in found.works] == [
        (1, 0, len(PROMPT)),
        (2, 0, len(PROMPT) + 1),
        (2, len(PROMPT) + 1, 1),
        (2, len(PROMPT) + 2, 1),
    ]
    prefill, decode = account_of(found)
    # What the lost stage had noted is gone with it.
    assert (prefill.frames, prefill.incomplete, decode.frames, decode.incomplete) == (2, 1, 2, 0)


async def test_times_that_cannot_be_are_not_told(autojump_clock: MockClock) -> None:
    """A stage may say anything: what is not within the frame's own life is as if it had said nothing."""
    async with open_fake_pipeline("0:6", context=CONTEXT) as offline:
        trace = await traced(offline.pipeline, tokens=3)
    (stage,) = trace.stages
    first = stage.records[0]
    for lie in (
        {"sent": 1e15},
        {"came": 5.0},
        {"began": first.ended + 1},
        {"came": first.came + 9, "ready": first.ready + 9, "began": 9.0, "ended": 9.0, "sent": 9.0},
    ):
        told = evolve(stage, records=(replace(first, **lie), *stage.records[1:]))
        prefill, decode = account_of(evolve(trace, stages=[told]))
        assert (prefill.incomplete, decode.incomplete) == (1, 0), lie


async def test_work_that_names_no_trace_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline, offline.pipeline.session() as session:
        trace = offline.pipeline.tracer.begin()
        async for _ in session.generate(PROMPT, max_tokens=3, stop=()):
            pass
        assert all(not shard.traces for shard in offline.cluster.shards.values())
        with trace.of(session):
            await session.prefill([9])
        await session.prefill([9])
        assert [len(shard.traces) for shard in offline.cluster.shards.values()] == [1, 1, 1]
        found = await offline.pipeline.tracer.finish(trace)
        assert [len(stage.records) for stage in found.stages] == [1, 1, 1]


async def test_what_nobody_asks_for_makes_room_and_is_counted(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_tracing, "_KEPT", 6)
    async with open_fake_pipeline("0:6", context=CONTEXT) as offline:
        trace = await traced(offline.pipeline, tokens=10)
        (stage,) = trace.stages
        assert (len(stage.records), stage.dropped) == (6, 4)
        _, decode = account_of(trace)
        assert (decode.frames, decode.incomplete) == (9, 3)


async def test_a_stage_that_does_not_answer_is_told_of(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_pipeline(SPLIT, context=CONTEXT) as offline:
        trace = offline.pipeline.tracer.begin()
        async with offline.pipeline.session() as session:
            with trace.of(session):
                await session.prefill(PROMPT)
            offline.cluster.stop("stage-1")
            found = await offline.pipeline.tracer.finish(trace)
        assert [stage.problem is None for stage in found.stages] == [True, False, True]
        assert found.stages[1].clock is None
        assert account_of(found)[0].incomplete == 1


async def test_a_trace_that_is_dropped_or_ended_keeps_nothing(autojump_clock: MockClock) -> None:
    async with open_fake_pipeline("0:6", context=CONTEXT) as offline:
        tracer = offline.pipeline.tracer
        dropped = tracer.begin()
        tracer.drop(dropped)
        await traced(offline.pipeline)
        assert tracer._open == []
        ours = tracer.begin(bytes(range(16)))
        assert ours.id == bytes(range(16))
        assert isinstance(ours, RequestTrace)


def test_the_buffer_drops_the_oldest_of_whoever_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_tracing, "_KEPT", 4)
    buffer, quiet, loud = TraceBuffer(), b"q" * 16, b"l" * 16
    record = WorkRecord(bytes(16), 1, 1, 1, 0, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1)
    buffer.add(quiet, record)
    for seq in range(10):
        buffer.add(loud, replace(record, seq=seq))
    assert len(buffer) == 4
    assert buffer.take(quiet) == ((record,), False, 0)
    records, more, dropped = buffer.take(loud)
    assert ([one.seq for one in records], more, dropped) == ([7, 8, 9], False, 7)
    buffer.add(loud, record)
    buffer.forget(loud)
    assert len(buffer) == 0
    assert buffer.take(loud) == ((), False, 0)
