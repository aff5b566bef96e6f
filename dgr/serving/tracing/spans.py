"""A trace as spans on one clock: the life of each work frame, from its client over every stage and back, without a gap.

The spans of a frame touch: what is between two readings of the same clock is exact, and what is between two clocks (the
wire) is as exact as their comparison. Errors of a stage's clock make one wire longer and the next one shorter, so that
the sum over a ring is exact all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from enum import StrEnum

from attrs import frozen

from dgr.client.tracing import StageTrace, Trace, TracedWork
from dgr.core.trace import WorkRecord

__all__ = ["CLIENT", "FrameLife", "Part", "Span", "lives_of"]

#: Where a span is that is of no stage.
CLIENT = "client"


class Part(StrEnum):
    """What a stretch of a work frame's life was spent with."""

    #: From being given to a link until the other side had it whole: encoding, room on the link, the network, reading.
    WIRE = "wire"
    #: Behind earlier frames of its session.
    QUEUE = "queue"
    #: For the engine, and for sessions to share a batch with.
    WAIT = "wait"
    #: In a native batch.
    COMPUTE = "compute"
    #: From the batch's end until the result was given to a link.
    RESULT = "result"
    #: On the client: from a reply to the next work frame.
    CLIENT = "client"


@frozen
class Span:
    """A stretch of time, in trio's seconds of the client's side."""

    part: Part
    #: Address of the stage, or :data:`CLIENT`; of a wire, where it ends.
    where: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@frozen
class FrameLife:
    """One work frame: what its client saw of it, what the stages did, and its spans in order."""

    work: TracedWork
    #: By address; a stage whose record is missing is not there.
    records: Mapping[str, WorkRecord]
    spans: Sequence[Span]
    #: Its native batches, in order.
    batches: Sequence[tuple[str, WorkRecord]]

    @property
    def is_complete(self) -> bool:
        """Whether its spans cover it from end to end."""
        return bool(self.spans)


def lives_of(trace: Trace) -> list[FrameLife]:
    """Every work frame of a trace, as they were sent."""
    found = {
        stage.address: {(record.epoch, record.session, record.seq): record for record in stage.records}
        for stage in trace.stages
    }
    lives = []
    for work in trace.works:
        key = work.epoch, work.session, work.seq
        records = {address: by_key[key] for address, by_key in found.items() if key in by_key}
        batches = [(stage.address, records[stage.address]) for stage in trace.stages if stage.address in records]
        lives.append(FrameLife(work, records, _spans(work, trace.stages, records), batches))
    return lives


def _spans(work: TracedWork, stages: Sequence[StageTrace], records: Mapping[str, WorkRecord]) -> list[Span]:
    """None where anything is missing, or cannot be: what cannot be told apart is not told."""
    if work.came is None:
        return []
    spans: list[Span] = []
    before = work.sent
    for stage in stages:
        record = records.get(stage.address)
        if record is None or stage.clock is None:
            return []
        readings = (record.came, record.ready, record.began, record.ended, record.sent)
        times = [stage.clock.here(reading) for reading in readings]
        slack = stage.clock.error + _DRIFT
        if list(readings) != sorted(readings) or times[0] < work.sent - slack or times[-1] > work.came + slack:
            return []
        spans.append(Span(Part.WIRE, stage.address, before, times[0]))
        for part, (began, ended) in zip(_PARTS, itertools.pairwise(times), strict=True):
            spans.append(Span(part, stage.address, began, ended))
        before = times[-1]
    spans.append(Span(Part.WIRE, CLIENT, before, work.came))
    return spans


#: Seconds by which a clock may run away from another between a request and their comparison: 20 ms in 17 minutes.
_DRIFT = 0.02
#: Between the readings of a record.
_PARTS = (Part.QUEUE, Part.WAIT, Part.COMPUTE, Part.RESULT)
