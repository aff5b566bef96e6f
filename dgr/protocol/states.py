"""Every state machine of the runtime, as flat tables.

Rule 1: every way in which a state may change is in this file. A pair (state, event) is either in its table or refused with
:class:`~dgr.core.state_machine.InvalidTransition`; the diagrams in ``docs/state-machines.md`` are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from dgr.core.state_machine import Table

__all__ = [
    "CLIENT_SESSION",
    "EPOCH",
    "MACHINES",
    "ROUTE",
    "SESSION",
    "ClientEvent",
    "ClientState",
    "EpochEvent",
    "EpochState",
    "RouteEvent",
    "RouteState",
    "SessionEvent",
    "SessionState",
]


class SessionState(Enum):
    """A session on one shard."""

    #: Holds P tokens and waits for work.
    IDLE = "idle"
    #: A native step of this session is queued or running.
    RUNNING = "running"
    #: Ended; its slot is cleared once no native step is running.
    CLOSING = "closing"
    #: Its values are not to be trusted; nothing but its end is accepted.
    POISONED = "poisoned"
    #: Slot cleared, bytes back.
    CLOSED = "closed"


class SessionEvent(Enum):
    #: A work frame passed every check.
    WORK = "work"
    #: The native step committed its tokens.
    COMMITTED = "committed"
    #: A guard refused the step: nothing was changed.
    REFUSED = "refused"
    #: Native code failed, or values were not finite.
    FAILED = "failed"
    #: Closed by the pipeline, evicted, expired or fenced.
    END = "end"
    #: The slot is cleared.
    CLEARED = "cleared"


class EpochState(Enum):
    """A route session on one shard."""

    #: No epoch yet.
    UNFENCED = "unfenced"
    #: Older sessions are being torn down.
    FENCING = "fencing"
    #: The current epoch admits work.
    LIVE = "live"
    #: The pipeline is gone and so is all state.
    GONE = "gone"


class EpochEvent(Enum):
    #: A fence with a higher epoch came.
    FENCE = "fence"
    #: Every slot of older epochs is cleared and every byte is back.
    DRAINED = "drained"
    #: The successor could not be reached.
    FAILED = "failed"
    #: The pipeline's control link ended.
    LEAVE = "leave"


class ClientState(Enum):
    """A session as its pipeline sees it."""

    #: No stage holds state for it.
    COLD = "cold"
    #: Every stage holds exactly the committed tokens.
    READY = "ready"
    #: Work is in flight.
    WORKING = "working"
    #: A decode run goes on, and nobody waits for its next token.
    AHEAD = "ahead"
    #: Cancelled: what is in flight drains, nothing new starts.
    DRAINING = "draining"
    #: The same, and the transcript was rewritten meanwhile: whether what was sent still counts is known at the end.
    DIVERGING = "diverging"
    #: As READY, and tokens after the last one were drawn for a caller who had gone: they are kept for the next. The stages hold
    #: all of them but the last.
    DRAWN = "drawn"
    #: State is lost on at least one stage; it is dropped on all before anything else.
    LOST = "lost"
    #: Closed by its owner.
    CLOSED = "closed"


class ClientEvent(Enum):
    #: Every stage leased a slot.
    OPENED = "opened"
    #: A chunk was sent.
    SEND = "send"
    #: The last chunk in flight was replied to.
    REPLIED = "replied"
    #: The reply came that was waited for, and the decode run goes on.
    GO_ON = "go on"
    #: The caller gave up on a reply, or does something else in a decode run.
    CANCEL = "cancel"
    #: The transcript was rewritten and no longer begins with what was sent.
    DIVERGE = "diverge"
    #: The last chunk in flight was replied to with a token, after its caller had gone.
    KEPT = "kept"
    #: A caller took the last token that was kept, or waits for the next one of a decode run.
    CLAIM = "claim"
    #: A miss, a refusal, a dead link, a missed deadline or a route change.
    LOSE = "lose"
    #: Every stage dropped what it held.
    DROPPED = "dropped"
    #: The owner is done.
    CLOSE = "close"


class RouteState(Enum):
    """A route as its pipeline sees it."""

    #: Stages are being fenced for a new epoch.
    FENCING = "fencing"
    #: Every stage of the route answered Fenced for the current epoch.
    LIVE = "live"
    #: A stage did not answer in time or its link broke; a new route (or the same again) may be set.
    DOWN = "down"
    #: The pipeline is closed.
    CLOSED = "closed"


class RouteEvent(Enum):
    #: Every stage answered Fenced.
    FENCED = "fenced"
    #: A new epoch begins.
    CHANGE = "change"
    #: A link broke or a deadline passed.
    BREAK = "break"
    #: The pipeline's scope ends.
    CLOSE = "close"


SESSION: Table[SessionState, SessionEvent] = Table(
    {
        (SessionState.IDLE, SessionEvent.WORK): SessionState.RUNNING,
        (SessionState.IDLE, SessionEvent.FAILED): SessionState.POISONED,
        (SessionState.IDLE, SessionEvent.END): SessionState.CLOSING,
        (SessionState.RUNNING, SessionEvent.COMMITTED): SessionState.IDLE,
        (SessionState.RUNNING, SessionEvent.REFUSED): SessionState.IDLE,
        (SessionState.RUNNING, SessionEvent.FAILED): SessionState.POISONED,
        (SessionState.RUNNING, SessionEvent.END): SessionState.CLOSING,
        (SessionState.POISONED, SessionEvent.END): SessionState.CLOSING,
        (SessionState.CLOSING, SessionEvent.CLEARED): SessionState.CLOSED,
    },
    SessionState.IDLE,
)

EPOCH: Table[EpochState, EpochEvent] = Table(
    {
        (EpochState.UNFENCED, EpochEvent.FENCE): EpochState.FENCING,
        (EpochState.UNFENCED, EpochEvent.LEAVE): EpochState.GONE,
        (EpochState.FENCING, EpochEvent.FENCE): EpochState.FENCING,
        (EpochState.FENCING, EpochEvent.DRAINED): EpochState.LIVE,
        (EpochState.FENCING, EpochEvent.FAILED): EpochState.UNFENCED,
        (EpochState.FENCING, EpochEvent.LEAVE): EpochState.GONE,
        (EpochState.LIVE, EpochEvent.FENCE): EpochState.FENCING,
        (EpochState.LIVE, EpochEvent.LEAVE): EpochState.GONE,
    },
    EpochState.UNFENCED,
)

CLIENT_SESSION: Table[ClientState, ClientEvent] = Table(
    {
        (ClientState.COLD, ClientEvent.OPENED): ClientState.READY,
        (ClientState.COLD, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.COLD, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.READY, ClientEvent.SEND): ClientState.WORKING,
        (ClientState.READY, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.READY, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.WORKING, ClientEvent.SEND): ClientState.WORKING,
        (ClientState.WORKING, ClientEvent.REPLIED): ClientState.READY,
        (ClientState.WORKING, ClientEvent.GO_ON): ClientState.AHEAD,
        (ClientState.WORKING, ClientEvent.CANCEL): ClientState.DRAINING,
        (ClientState.WORKING, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.WORKING, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.AHEAD, ClientEvent.CLAIM): ClientState.WORKING,
        (ClientState.AHEAD, ClientEvent.CANCEL): ClientState.DRAINING,
        (ClientState.AHEAD, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.AHEAD, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.DRAINING, ClientEvent.REPLIED): ClientState.READY,
        (ClientState.DRAINING, ClientEvent.KEPT): ClientState.DRAWN,
        (ClientState.DRAINING, ClientEvent.DIVERGE): ClientState.DIVERGING,
        (ClientState.DRAINING, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.DRAINING, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.DIVERGING, ClientEvent.REPLIED): ClientState.READY,
        (ClientState.DIVERGING, ClientEvent.KEPT): ClientState.DRAWN,
        (ClientState.DIVERGING, ClientEvent.DIVERGE): ClientState.DIVERGING,
        (ClientState.DIVERGING, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.DIVERGING, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.DRAWN, ClientEvent.CLAIM): ClientState.READY,
        (ClientState.DRAWN, ClientEvent.SEND): ClientState.WORKING,
        (ClientState.DRAWN, ClientEvent.LOSE): ClientState.LOST,
        (ClientState.DRAWN, ClientEvent.CLOSE): ClientState.CLOSED,
        (ClientState.LOST, ClientEvent.DROPPED): ClientState.COLD,
        (ClientState.LOST, ClientEvent.CLOSE): ClientState.CLOSED,
    },
    ClientState.COLD,
)

ROUTE: Table[RouteState, RouteEvent] = Table(
    {
        (RouteState.FENCING, RouteEvent.FENCED): RouteState.LIVE,
        (RouteState.FENCING, RouteEvent.BREAK): RouteState.DOWN,
        (RouteState.FENCING, RouteEvent.CLOSE): RouteState.CLOSED,
        (RouteState.LIVE, RouteEvent.CHANGE): RouteState.FENCING,
        (RouteState.LIVE, RouteEvent.BREAK): RouteState.DOWN,
        (RouteState.LIVE, RouteEvent.CLOSE): RouteState.CLOSED,
        (RouteState.DOWN, RouteEvent.CHANGE): RouteState.FENCING,
        (RouteState.DOWN, RouteEvent.CLOSE): RouteState.CLOSED,
    },
    RouteState.FENCING,
)

#: By name, for the documentation and the completeness test.
MACHINES: Mapping[str, Table[Any, Any]] = {
    "session": SESSION,
    "epoch": EPOCH,
    "client session": CLIENT_SESSION,
    "route": ROUTE,
}
