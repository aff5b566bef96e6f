"""How much a stage has to do, and room for: what it counts, as one value that is told over links, on pages and as metrics.

Counters grow from the stage's start on; the difference between two loads, over that between their ``seconds``, is a rate.
"""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from dgr.core.scalars import COMPONENTS_MAX, U32, U63, Address, Name, Seconds

__all__ = ["LINKS_MAX", "ROUTES_MAX", "BatchLoad", "Distribution", "LinkLoad", "Side", "StageLoad"]

#: Route sessions and peers that one load tells of; more are counted and not named.
ROUTES_MAX, LINKS_MAX = 256, 64

Bytes = Annotated[dict[Name, U63], Meta(max_length=COMPONENTS_MAX)]


class _Value(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a message."""


class Distribution(_Value, frozen=True):
    """Values seen since the stage started, by size."""

    #: Largest value of each bucket; one more bucket has whatever is larger.
    bounds: Annotated[tuple[Seconds, ...], Meta(max_length=32)]
    #: Values in each bucket alone.
    counts: Annotated[tuple[U63, ...], Meta(max_length=33)]
    #: Sum of the values.
    total: Seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound, then all of them."""
        return list(itertools.accumulate(self.counts))


class BatchLoad(_Value, frozen=True):
    """Native batches of one kind, decode or prefill."""

    #: Tokens of each batch. A decode step has one for each of its sessions.
    tokens: Distribution
    #: Seconds in which the engine computed each batch.
    seconds: Distribution
    #: Seconds from when each item of a batch was ready until its batch began.
    waits: Distribution


class Side(StrEnum):
    """Where a link leads."""

    PIPELINE = "pipeline"
    PREVIOUS = "previous"
    NEXT = "next"


class LinkLoad(_Value, frozen=True):
    """What went over a stage's links to one peer, ended ones included."""

    side: Side
    #: The other stage's address; empty for pipelines, which have none.
    peer: Address
    frames_sent: U63
    frames_received: U63
    bytes_sent: U63
    bytes_received: U63
    #: Payload bytes taken for sending and not written yet.
    bytes_queued: U63
    #: Seconds for which payloads waited for room, all sessions together.
    seconds_waited: Seconds
    #: Seconds from the last heartbeat of an idle link to its answer; 0.0 before the first.
    round_trip: Seconds


class StageLoad(_Value, frozen=True):
    """One stage at one moment. Bytes are as allocated natively."""

    #: Since the stage started.
    seconds: Seconds
    #: Whether it takes new pipelines and sessions: not while it is being drained.
    ready: bool
    #: Route sessions, and the epochs of at most :data:`ROUTES_MAX` of them by the beginning of their ids.
    routes: U32
    epochs: Annotated[dict[Name, U63], Meta(max_length=ROUTES_MAX)]
    #: Sessions of all of them.
    sessions: U32
    slots: U32
    slots_leased: U32
    weights: U63
    compute: U63
    #: State of all slots by component, and of the leased ones.
    state: Bytes
    state_leased: Bytes
    #: Resident memory of the stage's process; stages of one process have the same. 0: it could not be told.
    resident: U63
    #: Sessions ended to make room for others.
    evictions: U63
    #: Frames dropped because their route session is not known.
    unroutable_frames: U63
    decode: BatchLoad
    prefill: BatchLoad
    #: For how long the batch under way has been computed; 0.0 when none is.
    running_seconds: Seconds
    #: To at most :data:`LINKS_MAX` peers: those over whose links most bytes went.
    links: Annotated[tuple[LinkLoad, ...], Meta(max_length=LINKS_MAX)]

    @property
    def computed(self) -> float:
        """Seconds in which the engine computed."""
        return self.decode.seconds.total + self.prefill.seconds.total

    @property
    def busy(self) -> float:
        """Share of the time since the start in which the engine computed."""
        return self.computed / self.seconds if self.seconds > 0 else 0.0
