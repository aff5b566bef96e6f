"""What a stage notes of traced work, until its pipeline asks for it. Work that names no trace leaves nothing here."""

from __future__ import annotations

from collections import deque

from attrs import define

from dgr.core.trace import RECORDS_MAX, WorkRecord
from dgr.wire.frames import Boundary, Tokens

__all__ = ["StepTimes", "TraceBuffer"]

#: Records of all route sessions together; half a kilobyte each.
_KEPT = 16384


@define
class StepTimes:
    """When one work frame came and was run, in trio's time; filled in as it happens."""

    came: float
    ready: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    #: Before the link was given the result; None when there is none.
    sent: float | None = None
    #: 0 when the work never was in a batch.
    batch_items: int = 0
    batch_tokens: int = 0

    def record(self, frame: Tokens | Boundary) -> WorkRecord:
        assert frame.trace is not None
        return WorkRecord(
            trace=frame.trace,
            epoch=frame.key.epoch,
            session=frame.key.session,
            seq=frame.seq,
            position=frame.expect.position,
            tokens=len(frame.tokens),
            came=self.came,
            ready=self.ready,
            began=self.began,
            ended=self.ended,
            sent=self.ended if self.sent is None else self.sent,
            batch_items=self.batch_items,
            batch_tokens=self.batch_tokens,
        )


class TraceBuffer:
    """Records by route session, the oldest dropped first: those of the route session that has most."""

    def __init__(self) -> None:
        self._records: dict[bytes, deque[WorkRecord]] = {}
        self._dropped: dict[bytes, int] = {}
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def add(self, route: bytes, record: WorkRecord) -> None:
        """Keep a record until it is taken."""
        self._records.setdefault(route, deque()).append(record)
        self._held += 1
        if self._held > _KEPT:
            longest = max(self._records, key=lambda one: len(self._records[one]))
            self._records[longest].popleft()
            self._dropped[longest] = self._dropped.get(longest, 0) + 1
            self._held -= 1

    def take(self, route: bytes) -> tuple[tuple[WorkRecord, ...], bool, int]:
        """The oldest records of a route session, whether there are more, and how many were dropped since the last call."""
        held = self._records.get(route, deque())
        taken = tuple(held.popleft() for _ in range(min(len(held), RECORDS_MAX)))
        self._held -= len(taken)
        if not held:
            self._records.pop(route, None)
        return taken, bool(held), self._dropped.pop(route, 0)

    def forget(self, route: bytes) -> None:
        """The route session has ended."""
        self._held -= len(self._records.pop(route, ()))
        self._dropped.pop(route, None)
