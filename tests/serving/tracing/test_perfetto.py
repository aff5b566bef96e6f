"""A trace as a file: one row a stage, the parts on it where they were, arrows along the ring, and nothing that was said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from far_stages import SPEEDS, Distances, put_far_away
from serving.tracing.perfetto_files import faults, processes, slices
from trio.testing import MockClock

from dgr.client.tracing import Trace
from dgr.core.values import ContextParams
from dgr.serving.tracing.perfetto import perfetto_json
from dgr.testing.offline import open_fake_pipeline

SPLIT = "0:2,2:4,4:6"
FAR = Distances(
    control={"stage-0": (0.005, 0.005), "stage-1": (0.002, 0.002), "stage-2": (0.007, 0.007)},
    boundary={"stage-0": 0.003, "stage-1": 0.011},
    clocks={"stage-0": 1000.0, "stage-1": 3.25},
)
SECRET = "xyzzy plugh"


async def traced(chunk: int | None = None) -> Trace:
    context = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=2)
    async with open_fake_pipeline(SPLIT, context=context, chunk=chunk) as offline:
        trace = offline.pipeline.tracer.begin()
        trace.phase("queue", trace.began, trace.began)
        async with offline.pipeline.session() as session:
            with trace.of(session):
                async for _ in session.generate(SECRET, max_tokens=4, stop=()):
                    pass
            return await offline.pipeline.tracer.finish(trace)


async def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    put_far_away(monkeypatch, FAR)
    content: dict[str, Any] = json.loads(perfetto_json(await traced(chunk=4)))
    return content


async def test_the_file_is_what_viewers_read(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await made(monkeypatch)
    assert faults(file) == []
    assert list(processes(file).values()) == [0, 1, 2, 3]
    assert list(processes(file)) == ["client", "stage stage-0 (0:2)", "stage stage-1 (2:4)", "stage stage-2 (4:6)"]
    clock = file["otherData"]["clocks"]["stage-1"]
    assert clock["offset_seconds"] == pytest.approx(3.25)
    assert clock["error_seconds"] == pytest.approx(0.002)


async def test_slices_lie_where_things_happened(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4, 4 and 3 tokens, then three decode steps: when each stage computed follows from the distances."""
    file = await made(monkeypatch)
    tokens = [4, 4, 3, 1, 1, 1]
    for pid, layers in enumerate(SPLIT.split(","), 1):
        engine = [one for one in slices(file, pid) if "batch_tokens" in one["args"]]
        fixed, each = SPEEDS[layers]
        assert [one["args"]["tokens"] for one in engine] == tokens
        assert [one["dur"] for one in engine] == pytest.approx(
            [1e6 * (fixed + each * count) for count in tokens], abs=0.01
        )
        assert [one["args"]["position"] for one in engine] == [0, 4, 8, 11, 12, 13]
    head = next(one for one in slices(file, 1) if "batch_tokens" in one["args"])
    middle = next(one for one in slices(file, 2) if "batch_tokens" in one["args"])
    assert middle["ts"] - head["ts"] - head["dur"] == pytest.approx(3000, abs=0.01)
    assert len([one for one in file["traceEvents"] if one["ph"] == "s"]) == len(tokens)
    names = {one["name"] for one in slices(file, 0)}
    assert {"request", "queue", "positions 0..3", "position 13", "reply to position 13"} <= names


async def test_nothing_that_was_said_is_in_it(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await made(monkeypatch)
    text = json.dumps(file)
    assert SECRET not in text
    assert SECRET.encode().hex() not in text
    for start in range(len(SECRET) - 2):
        assert ", ".join(map(str, SECRET.encode()[start : start + 3])) not in text


def _overlap(file: dict[str, Any]) -> None:
    slices(file, 1)[0]["dur"] += 1e9


def _backwards(file: dict[str, Any]) -> None:
    next(one for one in file["traceEvents"] if one["ph"] == "f")["ts"] = 0.0


def _unbound(file: dict[str, Any]) -> None:
    next(one for one in file["traceEvents"] if one["ph"] == "t")["tid"] = 499


def _nameless(file: dict[str, Any]) -> None:
    file["traceEvents"] = [one for one in file["traceEvents"] if one["name"] != "thread_name" or one["pid"] != 2]


def _endless(file: dict[str, Any]) -> None:
    file["traceEvents"] = [one for one in file["traceEvents"] if one["ph"] != "f"]


def _timeless(file: dict[str, Any]) -> None:
    slices(file, 3)[0]["ts"] = float("nan")


@pytest.mark.parametrize("spoil", [_overlap, _backwards, _unbound, _nameless, _endless, _timeless])
async def test_a_fault_would_be_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[dict[str, Any]], None]
) -> None:
    file = await made(monkeypatch)
    spoil(file)
    assert faults(file) != []
