"""W3C's trace context (https://www.w3.org/TR/trace-context/): the header ``traceparent`` of whoever asks."""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import frozen

__all__ = ["TraceParent", "trace_parent"]

_HEADER = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


@frozen
class TraceParent:
    """Whose trace a request is part of."""

    trace_id: bytes
    #: Of the span that asks.
    span_id: bytes
    #: Whether whoever asks records the trace.
    sampled: bool


def trace_parent(headers: Iterable[tuple[bytes, bytes]]) -> TraceParent | None:
    """What the headers of a request say, names in lower case; None without a valid one, as the standard has it."""
    values = [value for name, value in headers if name == b"traceparent"]
    found = _HEADER.fullmatch(values[0].decode("latin-1").strip()) if len(values) == 1 else None
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    trace_id, span_id = bytes.fromhex(found["trace"]), bytes.fromhex(found["span"])
    if not any(trace_id) or not any(span_id):
        return None
    return TraceParent(trace_id, span_id, bool(int(found["flags"], 16) & 1))
