"""A trace as a file that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open: JSON trace events.

One process row for the client and one for each stage, head first; in each a track for every kind of thing that was going on,
and more of the same where two overlap. Arrows lead from batch to batch along the ring. Times are microseconds since the
trace began, on the client's clock; ``otherData`` says how far each stage's clock was off, and within what bound that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from attrs import field, frozen

from dgr.client.tracing import Trace
from dgr.serving.tracing.spans import CLIENT, FrameLife, Part, lives_of

__all__ = ["perfetto_json", "trace_events"]

#: Track of each part on a stage; a stage's wire is what comes in.
_TRACKS = {Part.WIRE: 1, Part.QUEUE: 2, Part.WAIT: 3, Part.COMPUTE: 4, Part.RESULT: 5}
#: Tracks of the client: the request and its phases, work frames, and replies on their way.
_REQUEST, _FRAMES, _REPLIES = 1, 2, 3
_NAMES = {
    Part.WIRE: "wire in",
    Part.QUEUE: "behind its session's frames",
    Part.WAIT: "waits for the engine",
    Part.COMPUTE: "engine",
    Part.RESULT: "result",
}
#: Tracks of one kind.
_LANES = 100


@frozen
class _Rows:
    """Slices of one process, put on tracks where they do not overlap others."""

    pid: int
    events: list[dict[str, Any]]
    began: float
    #: Track -> where the last slice of each of its lanes ended, microseconds.
    lanes: dict[int, list[float]] = field(factory=dict)

    def slice(
        self, track: int, name: str, began: float, ended: float, args: dict[str, Any]
    ) -> tuple[int, float, float]:
        """Returns the thread that the slice is on, and its ends in microseconds."""
        start = round((began - self.began) * 1e6, 3)
        end = max(round((ended - self.began) * 1e6, 3), start)  # an aligned clock may be a little off
        lanes = self.lanes.setdefault(track, [])
        lane = next((index for index, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        tid = track * _LANES + lane
        duration = round(end - start, 3)
        self.events.append(
            {
                "ph": "X",
                "pid": self.pid,
                "tid": tid,
                "name": name,
                "cat": "dgr",
                "ts": start,
                "dur": duration,
                "args": args,
            }
        )
        return tid, start, end

    def name(self, name: str, tracks: dict[int, str]) -> None:
        self._meta("process_name", 0, {"name": name})
        self._meta("process_sort_index", 0, {"sort_index": self.pid})
        for track, lanes in self.lanes.items():
            for lane in range(len(lanes)):
                tid = track * _LANES + lane
                self._meta("thread_name", tid, {"name": tracks[track]})
                self._meta("thread_sort_index", tid, {"sort_index": tid})

    def _meta(self, what: str, tid: int, args: dict[str, Any]) -> None:
        self.events.append({"ph": "M", "pid": self.pid, "tid": tid, "name": what, "args": args})


def trace_events(trace: Trace) -> dict[str, Any]:
    """The content of the file."""
    events: list[dict[str, Any]] = []
    client = _Rows(0, events, trace.began)
    stages = {stage.address: _Rows(pid, events, trace.began) for pid, stage in enumerate(trace.stages, 1)}
    client.slice(_REQUEST, "request", trace.began, trace.ended, {"trace": trace.id.hex()})
    for phase in trace.phases:
        client.slice(_REQUEST, phase.name, phase.began, phase.ended, {})
    for number, life in enumerate(sorted(lives_of(trace), key=lambda life: life.work.sent)):
        _life(life, number, client, stages)
    client.name("client", {_REQUEST: "request", _FRAMES: "work frames", _REPLIES: "reply on its way"})
    for stage in trace.stages:
        stages[stage.address].name(
            f"stage {stage.address} ({stage.layers})", {_TRACKS[part]: name for part, name in _NAMES.items()}
        )
    clocks = {
        stage.address: {
            "offset_seconds": None if stage.clock is None else stage.clock.offset,
            "error_seconds": None if stage.clock is None else stage.clock.error,
            "records_dropped": stage.dropped,
            "problem": stage.problem,
        }
        for stage in trace.stages
    }
    told = {"trace": trace.id.hex(), "frames_not_noted": trace.unnoted, "clocks": clocks}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _life(life: FrameLife, number: int, client: _Rows, stages: dict[str, _Rows]) -> None:
    work = life.work
    args: dict[str, Any] = {"session": work.session, "epoch": work.epoch, "seq": work.seq, "position": work.position}
    args |= {"tokens": work.tokens, "reply": work.reply or "none came"}
    name = (
        f"position {work.position}"
        if work.tokens == 1
        else f"positions {work.position}..{work.position + work.tokens - 1}"
    )
    ended = work.sent if work.came is None else work.came
    ends = [(0, *client.slice(_FRAMES, name, work.sent, ended, args))]
    for span in life.spans:
        if span.where == CLIENT:
            client.slice(_REPLIES, f"reply to {name}", span.began, span.ended, args)
            continue
        rows, record = stages[span.where], life.records[span.where]
        about = args
        if span.part is Part.COMPUTE:
            about = {**args, "batch_sessions": record.batch_items, "batch_tokens": record.batch_tokens}
        placed = rows.slice(_TRACKS[span.part], name, span.began, span.ended, about)
        if span.part is Part.COMPUTE:
            ends.append((rows.pid, *placed))
    if len(ends) > 1:
        _arrows(client.events, number, ends)


def _arrows(events: list[dict[str, Any]], number: int, ends: Sequence[tuple[int, int, float, float]]) -> None:
    """From the frame's slice over its batches."""
    for index, (pid, tid, start, _) in enumerate(ends):
        phase = "s" if index == 0 else "f" if index == len(ends) - 1 else "t"
        arrow = {"ph": phase, "pid": pid, "tid": tid, "name": "ring", "cat": "dgr", "id": number, "ts": start}
        events.append({**arrow, "bp": "e"} if phase == "f" else arrow)


def perfetto_json(trace: Trace) -> bytes:
    """The file's bytes."""
    return msgspec.json.encode(trace_events(trace))
