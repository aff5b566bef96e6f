"""The values inside messages: bounded scalar types, keys, expectations, identities."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

__all__ = [
    "COMPONENTS_MAX",
    "TOP_MAX",
    "U32",
    "U63",
    "Address",
    "ComponentState",
    "Context",
    "Digest",
    "Expectation",
    "Finite",
    "Identity",
    "Key",
    "Miss",
    "Name",
    "Refusal",
    "Role",
    "RouteId",
    "Sampling",
    "Text",
    "TokenId",
    "TokenIds",
]

#: Largest finite float32: the sampler computes in that type. NaN and the infinities are outside the range.
_FLOAT_MAX = 3.4028234663852886e38

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
RouteId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(max_length=128)]
#: Top log-probabilities beside one token.
TOP_MAX = 64
#: State components of one session; a stage of V4 owns at most seven.
COMPONENTS_MAX = 16
#: Token ids of one frame; the negotiated n_batch is the tighter limit.
TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=2**20)]


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


class Key(_Plain, frozen=True):
    """Whose state a frame speaks of: (route session, epoch, session)."""

    route: RouteId
    epoch: U63
    session: U63


class Expectation(_Plain, frozen=True):
    """What a shard must hold before it may run a frame: tokens committed, and the digest of exactly those tokens."""

    position: U32
    digest: Digest


class Sampling(_Plain, frozen=True):
    """How the tail draws the next token; see :class:`dgr.engine.base.SamplingParams`."""

    temperature: Finite
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    top_p: Finite
    min_p: Finite
    repeat_penalty: Finite
    frequency_penalty: Finite
    presence_penalty: Finite
    penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    seed: U63
    choice: U32
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_MAX)]


class ComponentState(_Plain, frozen=True):
    """One state component of a session: counts and a digest, never rows."""

    name: Annotated[str, Meta(max_length=64)]
    n_layers: U32
    capacity: U32
    rows_min: U32
    rows_max: U32
    digest: Annotated[str, Meta(max_length=64)]


class Role(enum.IntEnum):
    """Who opens a link, and so what the link is for."""

    #: A client: a control link.
    PIPELINE = 0
    #: The previous stage: a boundary link.
    STAGE = 1


class Context(_Plain, frozen=True):
    """Context parameters; see :class:`dgr.engine.base.ContextParams`."""

    n_ctx: U32
    n_batch: U32
    n_ubatch: U32
    n_seq_max: U32
    type_k: Name
    flash_attn: bool
    numerics: Name


class Identity(_Plain, frozen=True):
    """What a stage is, to the last bit that matters for its numbers."""

    adapter: Name
    architecture: Name
    artifact: Name
    runtime: Name
    layer_begin: U32
    layer_end: U32
    n_layers: U32
    n_vocab: U32
    width_in: U32
    width_out: U32
    token_sideband: bool
    kernel_fingerprint: Name
    wire_dtype: Name
    context: Context
    components: Annotated[tuple[Name, ...], Meta(max_length=64)]
    capabilities: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)]
    #: For people: two stages may compute on different devices.
    devices: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
