"""Bounded scalar types of everything that travels: a value outside its bounds is not part of a message."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = [
    "COMPONENTS_MAX",
    "STOP_MAX",
    "TOP_MAX",
    "U32",
    "U63",
    "Address",
    "Digest",
    "Finite",
    "Name",
    "RouteId",
    "Seconds",
    "Text",
    "TokenId",
    "TokenIds",
    "TraceId",
]

#: Largest finite float32: the sampler computes in that type. NaN and the infinities are outside the range.
_FLOAT_MAX = 3.4028234663852886e38

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
RouteId = Annotated[bytes, Meta(min_length=16, max_length=16)]
#: The trace-id of W3C's trace context.
TraceId = Annotated[bytes, Meta(min_length=16, max_length=16)]
#: Of a clock, or between two readings of one: not negative, and neither NaN nor an infinity.
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(max_length=128)]
#: Top log-probabilities beside one token.
TOP_MAX = 64
#: Token ids that end a decode run.
STOP_MAX = 8
#: State components of one session; a stage of V4 owns at most seven.
COMPONENTS_MAX = 16
#: Token ids of one frame; the negotiated n_batch is the tighter limit.
TokenIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=2**20)]
