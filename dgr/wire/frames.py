"""The closed union of messages on a link.

Every request of a session carries ``seq``, a number that grows over the session's life, and its answer carries it back.
One union, one decoder; unknown tags, extra fields and values out of range are refused. No member has a field that could
carry cache contents: between stages the payload of a :class:`Boundary` is the mHC residual of its own tokens, and
nothing else is a payload but the logits a caller asked the tail for.

New fields go last and with defaults; a new or changed member changes :data:`SCHEMA_VERSION`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dgr.core.load import StageLoad
from dgr.core.scalars import (
    TOP_MAX,
    U32,
    U63,
    Address,
    Digest,
    Name,
    RouteId,
    Seconds,
    Text,
    TokenId,
    TokenIds,
    TraceId,
)
from dgr.core.trace import RECORDS_MAX, WorkRecord
from dgr.core.values import (
    DecodeRun,
    Expectation,
    Key,
    LogitsWanted,
    SamplingParams,
    StageIdentity,
    StateSummary,
    TopLogprob,
)
from dgr.wire.schema import schema_hash
from dgr.wire.values import Miss, Refusal, Role

__all__ = [
    "SCHEMA_HASH",
    "SCHEMA_VERSION",
    "Advanced",
    "AwaitReady",
    "Boundary",
    "CacheMiss",
    "Cancel",
    "Close",
    "Closed",
    "Credit",
    "Denied",
    "Drain",
    "Fence",
    "Fenced",
    "Fork",
    "Frame",
    "Hello",
    "LoadReport",
    "Logits",
    "Miss",
    "Occupancy",
    "Open",
    "Opened",
    "Ping",
    "Pong",
    "QueryLoad",
    "QueryState",
    "QueryTrace",
    "Ready",
    "Refusal",
    "Refused",
    "Role",
    "StaleEpoch",
    "StateReport",
    "Token",
    "Tokens",
    "TraceReport",
    "Welcome",
    "WorkSkipped",
]

#: Grows with every change of the union.
SCHEMA_VERSION = 6


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member of the union."""


# --- pipeline to stage -----------------------------------------------------------------------------------------------


class Fence(_Message, frozen=True, tag=1):
    """Raise the epoch of a route session: drop all state of older epochs, then push boundaries to ``successor``.

    Addresses as the route names them: of this stage, of the one before it (empty on a head; boundaries are taken from no
    one else), of the one after it (empty on a tail).
    """

    route: RouteId
    epoch: U63
    stage: Address
    predecessor: Address
    successor: Address
    #: Stages of the route.
    stages: Annotated[int, Meta(ge=1, le=2**16)] = 1
    #: To the tail: of the head, and to the head: of the tail; empty on a middle stage. A decode run goes on between them.
    ring: Address = ""


class Open(_Message, frozen=True, tag=2):
    """Lease a sequence slot for a session. Work frames below ``seq`` belong to an earlier life and are dropped."""

    key: Key
    seq: U63


class Close(_Message, frozen=True, tag=3):
    """Drop a session's state."""

    key: Key
    seq: U63


class Cancel(_Message, frozen=True, tag=4):
    """To the head: do not start queued work up to ``last_seq``. Work already started drains through every stage."""

    key: Key
    last_seq: U63


class QueryState(_Message, frozen=True, tag=5):
    """Ask a stage where a session stands."""

    key: Key
    seq: U63


class Tokens(_Message, frozen=True, tag=6):
    """Work for the head: ids of positions ``expect.position .. + len(tokens) - 1``. In a decode run it comes from the tail."""

    key: Key
    seq: U63
    expect: Expectation
    tokens: TokenIds
    logits: LogitsWanted
    sampling: SamplingParams | None
    #: Every stage notes when it did what with this work; see :class:`QueryTrace`.
    trace: TraceId | None = None
    #: Further tokens that may be decoded unasked; see :func:`dgr.protocol.runs.next_in_run`.
    run: DecodeRun | None = None


class Fork(_Message, frozen=True, tag=10):
    """Lease a sequence slot for a session and copy into it what session ``source`` holds: exactly ``expect``.

    Answered with Opened once the copy is complete. Work frames of the new session below ``seq`` are dropped, as after Open.
    """

    key: Key
    seq: U63
    source: U63
    expect: Expectation


class Drain(_Message, frozen=True, tag=13):
    """Empty a stage before it is maintained (True), take that back (False), or ask alone (None). Answered with Occupancy.

    A draining stage takes no new route sessions and no new sessions, and ends sessions without work for ``idle`` seconds.
    """

    draining: bool | None
    idle: U32 = 10


class QueryLoad(_Message, frozen=True, tag=11):
    """Ask a stage how much it has to do. ``seq`` is the asker's own, and in the answer."""

    seq: U63


class QueryTrace(_Message, frozen=True, tag=12):
    """Take what a stage noted of a route session's work frames that named a trace; it is told once."""

    route: RouteId
    seq: U63


# --- stage to stage --------------------------------------------------------------------------------------------------


class Boundary(_Message, frozen=True, tag=7):
    """Work for the next stage. The payload is the residual: ``len(tokens)`` rows of the
    stages' width, little-endian float32 or as the context's ``wire`` says; one that has fewer bytes is packed."""

    key: Key
    seq: U63
    expect: Expectation
    tokens: TokenIds
    logits: LogitsWanted
    sampling: SamplingParams | None
    payload: U63
    trace: TraceId | None = None
    run: DecodeRun | None = None


class AwaitReady(_Message, frozen=True, tag=9):
    """From a stage to the one behind it: answer Ready once you admit this epoch."""

    route: RouteId
    epoch: U63


class Ready(_Message, frozen=True, tag=8):
    """The answer to AwaitReady: this stage and all behind it admit the epoch. Flows from the tail to the head."""

    route: RouteId
    epoch: U63


# --- stage to pipeline -----------------------------------------------------------------------------------------------


class Fenced(_Message, frozen=True, tag=16):
    """Every session of older epochs is gone, its bytes are back, and the new epoch is admitted."""

    route: RouteId
    epoch: U63
    sessions_dropped: U32
    bytes_released: U63


class Opened(_Message, frozen=True, tag=17):
    """A slot is leased; ``bytes`` of state are now the session's own."""

    key: Key
    seq: U63
    bytes: U63


class Closed(_Message, frozen=True, tag=18):
    """The session's state is zeroed and its bytes are back (0 when there was none)."""

    key: Key
    seq: U63
    bytes: U63


class Advanced(_Message, frozen=True, tag=19):
    """The tail committed a work frame that wanted no output; ``position`` tokens are committed on every stage."""

    key: Key
    seq: U63
    position: U32


class Token(_Message, frozen=True, tag=20):
    """The token drawn for ``position``; every stage has committed exactly the tokens before it."""

    key: Key
    seq: U63
    position: U32
    token: TokenId
    top: Annotated[tuple[TopLogprob, ...], Meta(max_length=TOP_MAX)] = ()
    #: The tail has given it to the head: another answer follows, to the work of the next ``seq``.
    goes_on: bool = False


class Logits(_Message, frozen=True, tag=21):
    """Rows of logits. The payload is ``n_rows * n_vocab`` little-endian float32, for the last ``n_rows`` positions."""

    key: Key
    seq: U63
    position: U32
    n_rows: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    payload: U63


class CacheMiss(_Message, frozen=True, tag=22):
    """The shard does not hold exactly what the frame expected; it holds ``position`` tokens. Nothing was changed."""

    key: Key
    seq: U63
    reason: Miss
    position: U32


class StaleEpoch(_Message, frozen=True, tag=23):
    """The frame's epoch is not the route session's own, which is ``current``. No state was looked at."""

    key: Key
    seq: U63
    current: U63


class Refused(_Message, frozen=True, tag=24):
    """A request was refused; ``seq`` is the request's own (0 for a fence)."""

    key: Key
    seq: U63
    code: Refusal
    message: Text


class WorkSkipped(_Message, frozen=True, tag=25):
    """A work frame was dropped before it started; the session stands at ``position``."""

    key: Key
    seq: U63
    position: U32


class StateReport(_Message, frozen=True, tag=26):
    """Reply to :class:`QueryState`: where the session stands, and the digest of exactly the tokens that it holds."""

    key: Key
    seq: U63
    digest: Digest
    state: StateSummary


class Occupancy(_Message, frozen=True, tag=29):
    """The answer to Drain; and, unasked, what every control link hears when draining begins or is taken back."""

    draining: bool
    #: Route sessions whose epoch is admitted.
    routes: U32
    sessions: U32
    #: Of these, those whose first answer is yet to come: they are being prefilled.
    prefilling: U32
    #: For how long the native batch under way has been computed, and what the longest one took.
    batch_running_ms: U63
    batch_longest_ms: U63


class LoadReport(_Message, frozen=True, tag=27):
    """The answer to :class:`QueryLoad`."""

    seq: U63
    load: StageLoad


class TraceReport(_Message, frozen=True, tag=28):
    """The answer to :class:`QueryTrace`: the oldest records, whether there are more, and how many were dropped since the last
    report because nobody had asked for them in time."""

    seq: U63
    records: Annotated[tuple[WorkRecord, ...], Meta(max_length=RECORDS_MAX)]
    more: bool
    dropped: U63


# --- every link ------------------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=32):
    """The first frame of a link, from whoever opened it.

    ``name``: the address under which the route knows a stage; any name for a client. ``identity``: what a stage is.
    ``wants``: capabilities the opener would use.
    """

    role: Role
    name: Address
    identity: StageIdentity | None
    wants: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()


class Welcome(_Message, frozen=True, tag=33):
    """The answer to a Hello that fits; ``credit`` payload bytes may be sent before the first :class:`Credit`."""

    identity: StageIdentity
    credit: U63


class Denied(_Message, frozen=True, tag=34):
    """The answer to a Hello that does not fit, naming both values; the link is closed."""

    message: Text


class Credit(_Message, frozen=True, tag=35):
    """``bytes`` of payload were consumed and may be sent again."""

    bytes: U63


class Ping(_Message, frozen=True, tag=36):
    """A sign of life; with a ``nonce`` other than 0 it asks for a :class:`Pong`. ``zeros`` fill a link to measure it.

    The framer refuses any other byte in ``zeros``: nothing can be carried there.
    """

    nonce: U63
    zeros: Annotated[bytes, Meta(max_length=60_000)] = b""


class Pong(_Message, frozen=True, tag=37):
    """The answer to a Ping with this nonce, and what the clock of whoever answers said."""

    nonce: U63
    clock: Seconds = 0.0


Frame = (
    Fence
    | Open
    | Close
    | Cancel
    | QueryState
    | Tokens
    | Fork
    | Drain
    | QueryLoad
    | QueryTrace
    | Boundary
    | AwaitReady
    | Ready
    | Fenced
    | Opened
    | Closed
    | Advanced
    | Token
    | Logits
    | CacheMiss
    | StaleEpoch
    | Refused
    | WorkSkipped
    | StateReport
    | Occupancy
    | LoadReport
    | TraceReport
    | Hello
    | Welcome
    | Denied
    | Credit
    | Ping
    | Pong
)

#: Digest of the union's schema, compared at the handshake, hex.
SCHEMA_HASH = schema_hash(Frame)
