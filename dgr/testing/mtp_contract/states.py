"""The state machines of the MTP contract, as flat tables (:mod:`dgr.core.state_machine`).

A pair of state and event is either in its table or out of order: a stage answers it with a refusal that names the reason,
a pipeline never makes it. ``docs/mtp-contract.md`` shows the tables, drawn from here by ``docs/draw_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from dgr.core.state_machine import Table

__all__ = [
    "DRAFTER",
    "MACHINES",
    "ROUND",
    "TRUNK",
    "DrafterEvent",
    "DrafterState",
    "RoundEvent",
    "RoundState",
    "TrunkEvent",
    "TrunkState",
]


class TrunkState(Enum):
    """A session's main layers on one stage."""

    #: P = 0; nothing to go back to.
    EMPTY = "empty"
    #: The last ubatch can be rolled back, as far as there are planes.
    SETTLED = "settled"
    #: A rollback is accepted; the next decode takes the plane, before it computes.
    PENDING = "pending"
    #: Holds tokens, but no plane belongs to them: restored or copied.
    PLANELESS = "planeless"


class TrunkEvent(Enum):
    #: A work message was run.
    DECODE = "decode"
    #: A rollback within the budget.
    ROLL_BACK = "roll back"
    #: The whole sequence was removed.
    CLEAR = "clear"
    #: Rows came from elsewhere: a restored state or a copied sequence. dgr does neither.
    REPLACE = "replace"


class DrafterState(Enum):
    """A session's MTP block on the tail."""

    #: Its own cache holds nothing of the session; it can only begin with position 0.
    COLD = "cold"
    #: Its own cache and the trunk hold the same positions, and the row before the next position is at hand.
    READY = "ready"
    #: Its own cache is ahead of what is certain, by guesses.
    DRAFTING = "drafting"


class DrafterEvent(Enum):
    #: The trunk ran tokens, and the block the same ones with the trunk's rows.
    CATCH_UP = "catch up"
    #: The block ran its own guess.
    DRAFT = "draft"
    #: What is behind a position was removed from its own cache.
    TRUNCATE = "truncate"
    #: The session's state is gone: closed, evicted or fenced.
    DROP = "drop"


class RoundState(Enum):
    """A session's speculation as its pipeline sees it."""

    #: Every stage stands at the same position and nothing is in flight.
    READY = "ready"
    #: Work is in flight.
    VERIFYING = "verifying"
    #: A rollback is in flight, and nothing behind it.
    ROLLING = "rolling"
    #: Work is in flight behind a rollback.
    BEHIND = "behind"
    #: Cancelled: the work in flight drains, and its candidates will be rolled back.
    DRAINING = "draining"
    #: Cancelled likewise, with a rollback before the work.
    DRAINING_BEHIND = "draining_behind"
    #: State is lost on at least one stage; it is dropped on all before anything else.
    LOST = "lost"
    #: Closed by its owner.
    CLOSED = "closed"


class RoundEvent(Enum):
    #: Work was sent.
    WORK = "work"
    #: The last work in flight was answered, and every stage stands where the answer says.
    KEPT = "kept"
    #: It was answered, and some candidates are to be forgotten: the rollback was sent at once.
    REJECTED = "rejected"
    #: Every stage rolled back.
    ROLLED_BACK = "rolled back"
    #: The caller gave up on the answer.
    CANCEL = "cancel"
    #: The head had not started the work and dropped it.
    SKIPPED = "skipped"
    #: A refusal, an eviction, a dead link or a new epoch.
    LOSE = "lose"
    #: Every stage dropped what it held; the transcript is prefilled anew from token 0.
    RESET = "reset"
    #: The owner is done.
    CLOSE = "close"


TRUNK: Table[TrunkState, TrunkEvent] = Table(
    {
        (TrunkState.EMPTY, TrunkEvent.DECODE): TrunkState.SETTLED,
        (TrunkState.EMPTY, TrunkEvent.CLEAR): TrunkState.EMPTY,
        (TrunkState.EMPTY, TrunkEvent.REPLACE): TrunkState.PLANELESS,
        (TrunkState.SETTLED, TrunkEvent.DECODE): TrunkState.SETTLED,
        (TrunkState.SETTLED, TrunkEvent.ROLL_BACK): TrunkState.PENDING,
        (TrunkState.SETTLED, TrunkEvent.CLEAR): TrunkState.EMPTY,
        (TrunkState.SETTLED, TrunkEvent.REPLACE): TrunkState.PLANELESS,
        (TrunkState.PENDING, TrunkEvent.DECODE): TrunkState.SETTLED,
        (TrunkState.PENDING, TrunkEvent.CLEAR): TrunkState.EMPTY,
        (TrunkState.PENDING, TrunkEvent.REPLACE): TrunkState.PLANELESS,
        (TrunkState.PLANELESS, TrunkEvent.DECODE): TrunkState.SETTLED,
        (TrunkState.PLANELESS, TrunkEvent.CLEAR): TrunkState.EMPTY,
        (TrunkState.PLANELESS, TrunkEvent.REPLACE): TrunkState.PLANELESS,
    },
    TrunkState.EMPTY,
)

DRAFTER: Table[DrafterState, DrafterEvent] = Table(
    {
        (DrafterState.COLD, DrafterEvent.CATCH_UP): DrafterState.READY,
        (DrafterState.COLD, DrafterEvent.DROP): DrafterState.COLD,
        (DrafterState.READY, DrafterEvent.CATCH_UP): DrafterState.READY,
        (DrafterState.READY, DrafterEvent.DRAFT): DrafterState.DRAFTING,
        (DrafterState.READY, DrafterEvent.TRUNCATE): DrafterState.READY,
        (DrafterState.READY, DrafterEvent.DROP): DrafterState.COLD,
        (DrafterState.DRAFTING, DrafterEvent.DRAFT): DrafterState.DRAFTING,
        (DrafterState.DRAFTING, DrafterEvent.TRUNCATE): DrafterState.READY,
        (DrafterState.DRAFTING, DrafterEvent.DROP): DrafterState.COLD,
    },
    DrafterState.COLD,
)

_ROUND: dict[tuple[RoundState, RoundEvent], RoundState] = {
    (RoundState.READY, RoundEvent.WORK): RoundState.VERIFYING,
    (RoundState.READY, RoundEvent.REJECTED): RoundState.ROLLING,
    (RoundState.VERIFYING, RoundEvent.WORK): RoundState.VERIFYING,
    (RoundState.VERIFYING, RoundEvent.KEPT): RoundState.READY,
    (RoundState.VERIFYING, RoundEvent.REJECTED): RoundState.ROLLING,
    (RoundState.VERIFYING, RoundEvent.CANCEL): RoundState.DRAINING,
    (RoundState.ROLLING, RoundEvent.WORK): RoundState.BEHIND,
    (RoundState.ROLLING, RoundEvent.ROLLED_BACK): RoundState.READY,
    (RoundState.BEHIND, RoundEvent.WORK): RoundState.BEHIND,
    (RoundState.BEHIND, RoundEvent.ROLLED_BACK): RoundState.VERIFYING,
    (RoundState.BEHIND, RoundEvent.CANCEL): RoundState.DRAINING_BEHIND,
    (RoundState.DRAINING, RoundEvent.KEPT): RoundState.READY,
    (RoundState.DRAINING, RoundEvent.REJECTED): RoundState.ROLLING,
    (RoundState.DRAINING, RoundEvent.SKIPPED): RoundState.READY,
    (RoundState.DRAINING_BEHIND, RoundEvent.ROLLED_BACK): RoundState.DRAINING,
    (RoundState.DRAINING_BEHIND, RoundEvent.SKIPPED): RoundState.ROLLING,
    (RoundState.LOST, RoundEvent.RESET): RoundState.READY,
}
for _state in RoundState:
    if _state is not RoundState.CLOSED:
        _ROUND[_state, RoundEvent.LOSE] = RoundState.LOST
        _ROUND[_state, RoundEvent.CLOSE] = RoundState.CLOSED

ROUND: Table[RoundState, RoundEvent] = Table(_ROUND, RoundState.READY)

#: By name, for the documentation and the completeness test.
MACHINES: Mapping[str, Table[Any, Any]] = {"trunk": TRUNK, "drafter": DRAFTER, "round": ROUND}
