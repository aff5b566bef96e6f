"""The closed union of messages on a link.

Every request of a session carries ``seq``, a number that grows over the session's life, and its answer carries it back.
One union, one decoder; unknown tags, extra fields and values out of range are refused. No member has a field that could
carry cache contents: between stages the payload of a :class:`Boundary` is the mHC residual of its own tokens, and
nothing else is a payload but the logits a caller asked the tail for.

New fields go last and with defaults; a new or changed member changes :data:`SCHEMA_VERSION`.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "SCHEMA_HASH",
    "SCHEMA_VERSION",
    "Advanced",
    "Boundary",
    "CacheMiss",
    "Cancel",
    "Cancelled",
    "Close",
    "Closed",
    "ComponentState",
    "Expectation",
    "Fence",
    "Fenced",
    "Frame",
    "Frontier",
    "Key",
    "Logits",
    "Miss",
    "Open",
    "Opened",
    "Probe",
    "Refusal",
    "Refused",
    "Sampling",
    "StaleEpoch",
    "Token",
    "Tokens",
    "decode",
    "encode_message",
]

#: Grows with every change of the union.
SCHEMA_VERSION = 1

_U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
_RouteId = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Text = Annotated[str, Meta(max_length=4096)]
_Address = Annotated[str, Meta(max_length=256)]
#: Token ids of one frame; the negotiated n_batch is the tighter limit.
_TokenIds = Annotated[tuple[_TokenId, ...], Meta(min_length=1, max_length=2**20)]


class Miss(enum.IntEnum):
    """Why a shard does not hold the state a frame expects."""

    #: No such session here: it was never opened, or the stage was restarted.
    UNKNOWN = 0
    #: The session holds another number of tokens.
    POSITION = 1
    #: The session holds other tokens.
    DIGEST = 2
    #: An idle session made room for another one.
    EVICTED = 3
    #: The session was idle for longer than its time to live.
    EXPIRED = 4
    #: Native code failed on this session, or its values were not finite.
    POISONED = 5
    #: The shard is between two epochs.
    FENCING = 6


class Refusal(enum.IntEnum):
    """Why a shard refuses a request that is not a cache miss."""

    #: No free sequence slot and no idle session to evict.
    OVERLOADED = 0
    #: A value broke a stated limit (token id, context, payload); nothing was changed.
    INPUT = 1
    #: NaN or Inf in a residual or in logits; the session is lost.
    NON_FINITE = 2
    #: Native code failed; the session is lost.
    ENGINE = 3
    #: The next stage cannot be reached.
    SUCCESSOR = 4
    #: The request makes no sense in this state.
    PROTOCOL = 5


class _Plain(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a message."""


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member of the union."""


class Key(_Plain, frozen=True):
    """Whose state a frame speaks of: (route session, epoch, session)."""

    route: _RouteId
    epoch: _U63
    session: _U63


class Expectation(_Plain, frozen=True):
    """What a shard must hold before it may run a frame: tokens committed, and the digest of exactly those tokens."""

    position: _U32
    digest: _Digest


class Sampling(_Plain, frozen=True):
    """How the tail draws the next token; see :class:`dgr.engine.base.SamplingParams`."""

    temperature: float
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    seed: _U63
    choice: _U32
    top_logprobs: Annotated[int, Meta(ge=0, le=64)]


class ComponentState(_Plain, frozen=True):
    """One state component of a session: counts and a digest, never rows."""

    name: Annotated[str, Meta(max_length=64)]
    n_layers: _U32
    capacity: _U32
    rows_min: _U32
    rows_max: _U32
    digest: Annotated[str, Meta(max_length=64)]


# --- pipeline to stage -----------------------------------------------------------------------------------------------


class Fence(_Message, frozen=True, tag=1):
    """Raise the epoch of a route session: drop all state of older epochs, then push boundaries to ``successor``.

    ``successor`` is the address of the next stage, empty on a tail.
    """

    route: _RouteId
    epoch: _U63
    successor: _Address


class Open(_Message, frozen=True, tag=2):
    """Lease a sequence slot for a session. Work frames below ``seq`` belong to an earlier life and are dropped."""

    key: Key
    seq: _U63


class Close(_Message, frozen=True, tag=3):
    """Drop a session's state."""

    key: Key
    seq: _U63


class Cancel(_Message, frozen=True, tag=4):
    """To the head: do not start queued work up to ``last_seq``. Work already started drains through every stage."""

    key: Key
    last_seq: _U63


class Probe(_Message, frozen=True, tag=5):
    """Ask a stage for the frontier of a session."""

    key: Key
    seq: _U63


class Tokens(_Message, frozen=True, tag=6):
    """Work for the head: ids of positions ``expect.position .. + len(tokens) - 1``."""

    key: Key
    seq: _U63
    expect: Expectation
    tokens: _TokenIds
    logits: Annotated[int, Meta(ge=0, le=2)]
    sampling: Sampling | None


# --- stage to stage --------------------------------------------------------------------------------------------------


class Boundary(_Message, frozen=True, tag=7):
    """Work for the next stage. The payload is the residual: ``len(tokens) * width`` little-endian float32."""

    key: Key
    seq: _U63
    expect: Expectation
    tokens: _TokenIds
    logits: Annotated[int, Meta(ge=0, le=2)]
    sampling: Sampling | None
    payload: _U63


# --- stage to pipeline -----------------------------------------------------------------------------------------------


class Fenced(_Message, frozen=True, tag=16):
    """Every session of older epochs is gone, its bytes are back, and the new epoch is admitted."""

    route: _RouteId
    epoch: _U63
    sessions_dropped: _U32
    bytes_released: _U63


class Opened(_Message, frozen=True, tag=17):
    """A slot is leased; ``bytes`` of state are now the session's own."""

    key: Key
    seq: _U63
    bytes: _U63


class Closed(_Message, frozen=True, tag=18):
    """The session's state is zeroed and its bytes are back (0 when there was none)."""

    key: Key
    seq: _U63
    bytes: _U63


class Advanced(_Message, frozen=True, tag=19):
    """The tail committed a work frame that wanted no output; ``position`` tokens are committed on every stage."""

    key: Key
    seq: _U63
    position: _U32


class Token(_Message, frozen=True, tag=20):
    """The token drawn for ``position``; every stage has committed exactly the tokens before it."""

    key: Key
    seq: _U63
    position: _U32
    token: _TokenId
    top: tuple[tuple[_TokenId, float], ...] = ()


class Logits(_Message, frozen=True, tag=21):
    """Rows of logits. The payload is ``n_rows * n_vocab`` little-endian float32, for the last ``n_rows`` positions."""

    key: Key
    seq: _U63
    position: _U32
    n_rows: _U32
    payload: _U63


class CacheMiss(_Message, frozen=True, tag=22):
    """The shard does not hold exactly what the frame expected; it holds ``position`` tokens. Nothing was changed."""

    key: Key
    seq: _U63
    reason: Miss
    position: _U32


class StaleEpoch(_Message, frozen=True, tag=23):
    """The frame's epoch is not the route session's own, which is ``current``. No state was looked at."""

    key: Key
    seq: _U63
    current: _U63


class Refused(_Message, frozen=True, tag=24):
    """A request was refused; ``seq`` is the request's own (0 for a fence)."""

    key: Key
    seq: _U63
    code: Refusal
    message: _Text


class Cancelled(_Message, frozen=True, tag=25):
    """A work frame was dropped before it started; the session stands at ``position``."""

    key: Key
    seq: _U63
    position: _U32


class Frontier(_Message, frozen=True, tag=26):
    """Answer to :class:`Probe`."""

    key: Key
    seq: _U63
    position: _U32
    digest: _Digest
    components: tuple[ComponentState, ...]


Frame = (
    Fence
    | Open
    | Close
    | Cancel
    | Probe
    | Tokens
    | Boundary
    | Fenced
    | Opened
    | Closed
    | Advanced
    | Token
    | Logits
    | CacheMiss
    | StaleEpoch
    | Refused
    | Cancelled
    | Frontier
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_message(frame: Frame) -> bytes:
    """The msgpack bytes of a frame, without its payload."""
    return _encoder.encode(frame)


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """Read one frame. Raises :class:`msgspec.ValidationError` or :class:`msgspec.DecodeError`."""
    return _decoder.decode(data)


def _describe(schema: Any) -> str:
    return msgspec.json.encode(msgspec.to_builtins(msgspec.json.schema(schema)), order="deterministic").decode()


#: Digest of the union's schema, compared at the handshake, hex.
SCHEMA_HASH = hashlib.blake2b(_describe(Frame).encode(), digest_size=16).hexdigest()
