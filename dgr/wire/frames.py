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
    "AwaitReady",
    "Boundary",
    "CacheMiss",
    "Cancel",
    "Cancelled",
    "Close",
    "Closed",
    "ComponentState",
    "Context",
    "Credit",
    "Denied",
    "Expectation",
    "Fence",
    "Fenced",
    "Frame",
    "Frontier",
    "Hello",
    "Identity",
    "Key",
    "Logits",
    "Miss",
    "Open",
    "Opened",
    "Ping",
    "Pong",
    "Probe",
    "Ready",
    "Refusal",
    "Refused",
    "Role",
    "Sampling",
    "StaleEpoch",
    "Token",
    "Tokens",
    "Welcome",
    "decode",
    "encode_message",
]

#: Grows with every change of the union.
SCHEMA_VERSION = 1

#: Largest finite float32: the sampler computes in that type. NaN and the infinities are outside the range.
_FLOAT_MAX = 3.4028234663852886e38

_U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
_Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
_RouteId = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Text = Annotated[str, Meta(max_length=4096)]
_Address = Annotated[str, Meta(max_length=256)]
_Name = Annotated[str, Meta(max_length=128)]
#: Top log-probabilities beside one token.
_TOP_MAX = 64
#: State components of one session; a stage of V4 owns at most seven.
_COMPONENTS_MAX = 16
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

    temperature: _Finite
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    top_p: _Finite
    min_p: _Finite
    repeat_penalty: _Finite
    frequency_penalty: _Finite
    presence_penalty: _Finite
    penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    seed: _U63
    choice: _U32
    top_logprobs: Annotated[int, Meta(ge=0, le=_TOP_MAX)]


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

    Addresses as the route names them: of this stage, of the one before it (empty on a head; boundaries are taken from no
    one else), of the one after it (empty on a tail).
    """

    route: _RouteId
    epoch: _U63
    stage: _Address
    predecessor: _Address
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


class AwaitReady(_Message, frozen=True, tag=9):
    """From a stage to the one behind it: answer Ready once you admit this epoch."""

    route: _RouteId
    epoch: _U63


class Ready(_Message, frozen=True, tag=8):
    """The answer to AwaitReady: this stage and all behind it admit the epoch. Flows from the tail to the head."""

    route: _RouteId
    epoch: _U63


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
    top: Annotated[tuple[tuple[_TokenId, float], ...], Meta(max_length=_TOP_MAX)] = ()


class Logits(_Message, frozen=True, tag=21):
    """Rows of logits. The payload is ``n_rows * n_vocab`` little-endian float32, for the last ``n_rows`` positions."""

    key: Key
    seq: _U63
    position: _U32
    n_rows: Annotated[int, Meta(ge=1, le=2**32 - 1)]
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
    components: Annotated[tuple[ComponentState, ...], Meta(max_length=_COMPONENTS_MAX)]


# --- every link ------------------------------------------------------------------------------------------------------


class Role(enum.IntEnum):
    """Who opens a link, and so what the link is for."""

    #: A client: a control link.
    PIPELINE = 0
    #: The previous stage: a boundary link.
    STAGE = 1


class Context(_Plain, frozen=True):
    """Context parameters; see :class:`dgr.engine.base.ContextParams`."""

    n_ctx: _U32
    n_batch: _U32
    n_ubatch: _U32
    n_seq_max: _U32
    type_k: _Name
    flash_attn: bool
    numerics: _Name


class Identity(_Plain, frozen=True):
    """What a stage is, to the last bit that matters for its numbers."""

    adapter: _Name
    architecture: _Name
    artifact: _Name
    runtime: _Name
    layer_begin: _U32
    layer_end: _U32
    n_layers: _U32
    n_vocab: _U32
    width_in: _U32
    width_out: _U32
    token_sideband: bool
    kernel_fingerprint: _Name
    wire_dtype: _Name
    context: Context
    components: Annotated[tuple[_Name, ...], Meta(max_length=64)]
    capabilities: Annotated[tuple[tuple[_Name, _Name], ...], Meta(max_length=64)]


class Hello(_Message, frozen=True, tag=32):
    """The first frame of a link, from whoever opened it.

    ``name``: the address under which the route knows a stage; any name for a client. ``identity``: what a stage is.
    ``wants``: capabilities the opener would use.
    """

    role: Role
    name: _Address
    identity: Identity | None
    wants: Annotated[tuple[_Name, ...], Meta(max_length=64)] = ()


class Welcome(_Message, frozen=True, tag=33):
    """The answer to a Hello that fits; ``credit`` payload bytes may be sent before the first :class:`Credit`."""

    identity: Identity
    credit: _U63


class Denied(_Message, frozen=True, tag=34):
    """The answer to a Hello that does not fit, naming both values; the link is closed."""

    message: _Text


class Credit(_Message, frozen=True, tag=35):
    """``bytes`` of payload were consumed and may be sent again."""

    bytes: _U63


class Ping(_Message, frozen=True, tag=36):
    """A sign of life; with a ``nonce`` other than 0 it asks for a :class:`Pong`. ``zeros`` fill a link to measure it.

    The framer refuses any other byte in ``zeros``: nothing can be carried there.
    """

    nonce: _U63
    zeros: Annotated[bytes, Meta(max_length=60_000)] = b""


class Pong(_Message, frozen=True, tag=37):
    """The answer to a Ping with this nonce."""

    nonce: _U63


Frame = (
    Fence
    | Open
    | Close
    | Cancel
    | Probe
    | Tokens
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
    | Cancelled
    | Frontier
    | Hello
    | Welcome
    | Denied
    | Credit
    | Ping
    | Pong
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_message(frame: Frame) -> bytes:
    """The msgpack bytes of a frame, without its payload."""
    return _encoder.encode(frame)


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """Read one frame. Raises :class:`msgspec.ValidationError` or :class:`msgspec.DecodeError`."""
    return _decoder.decode(data)


def _describe(schema: Any) -> Any:
    """A type as plain lists: names, order, tags, bounds and defaults, but no prose.

    Docstrings stay out (and so does msgspec's own JSON schema, which has them): two hosts that differ in a comment, in
    ``-OO`` or in how their Python indents docstrings still speak the same schema.
    """
    match schema:
        case msgspec.inspect.StructType():
            settings = [schema.cls.__name__, schema.tag, schema.array_like, schema.forbid_unknown_fields]
            return [*settings, [[field.name, _describe(field.type), repr(field.default)] for field in schema.fields]]
        case msgspec.inspect.EnumType():
            return [schema.cls.__name__, [[member.name, member.value] for member in schema.cls]]
        case msgspec.inspect.Type():
            return [type(schema).__name__, _describe(msgspec.structs.asdict(schema))]
        case dict():
            return [[name, _describe(value)] for name, value in sorted(schema.items()) if value is not None]
        case tuple():
            return [_describe(item) for item in schema]
        case _:
            return repr(schema)


#: Digest of the union's schema, compared at the handshake, hex.
SCHEMA_HASH = hashlib.blake2b(
    msgspec.json.encode(_describe(msgspec.inspect.type_info(Frame))), digest_size=16
).hexdigest()
