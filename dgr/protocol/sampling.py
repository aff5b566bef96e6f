"""What is refused of sampling parameters, before they go to the tail and when they come there.

A value out of range must be refused before any token is committed: on a link it would not be a frame of the schema, and at
the sampler it would come too late.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from functools import lru_cache
from typing import Any

import msgspec

from dgr.core.arguments import check_instance
from dgr.core.values import SamplingParams
from dgr.errors import InputError

__all__ = ["check_sampling", "sampling_problem"]

_FIELD = re.compile(r"\$\[(\d+)\]")
_FLOATS = frozenset(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if isinstance(msgspec.inspect.type_info(field.type), msgspec.inspect.FloatType)
)
#: Field -> least, whether least itself is refused, most, and the value that turns it off.
_RANGES = {
    "temperature": (0.0, False, math.inf, 0.0),
    "top_p": (0.0, True, 1.0, 1.0),
    "min_p": (0.0, False, 1.0, 0.0),
    "repeat_penalty": (0.0, True, math.inf, 1.0),
}


def check_sampling(params: SamplingParams, n_vocab: int) -> SamplingParams:
    """Return the parameters with Python's own numbers. Raises :class:`InputError` for a value that no stage would take."""
    check_instance("sampling", params, SamplingParams)
    values = {name: _plain(name, getattr(params, name)) for name in SamplingParams.__struct_fields__}
    try:
        sampling = msgspec.convert(tuple(values.values()), SamplingParams)
    except msgspec.ValidationError as error:
        raise InputError(f"sampling parameters are refused: {_named(str(error))}") from error
    if (problem := sampling_problem(sampling, n_vocab)) is not None:
        raise InputError(problem)
    return sampling


def _plain(name: str, value: Any) -> int | float:
    """A number of any type (numpy's too) as Python's own."""
    try:
        if isinstance(value, bool | str | bytes | bytearray):
            raise TypeError
        return float(value) if name in _FLOATS else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        kind = "a number" if name in _FLOATS else "a whole number"
        raise InputError(f"sampling parameters are refused: {name} is {value!r}; give {kind}") from None


def _named(message: str) -> str:
    """msgspec counts the fields of an array-like struct; people know their names."""
    return _FIELD.sub(lambda match: SamplingParams.__struct_fields__[int(match[1])], message)


@lru_cache(maxsize=256)
def sampling_problem(sampling: SamplingParams, n_vocab: int) -> str | None:
    """What a sampler would refuse of values that the schema lets pass. It computes in float32: so they are rounded first."""
    for name, (least, above, most, off) in _RANGES.items():
        value = getattr(sampling, name)
        rounded = struct.unpack("f", struct.pack("f", value))[0]
        if rounded > most or rounded < least or (above and rounded == least):
            limits = f"above {least:g}" if above else f"{least:g} or more"
            limits += "" if most == math.inf else f" and at most {most:g}"
            as_float = "" if rounded == value else f", which is {rounded:g} as a float32"
            return f"{name} is {value:g}{as_float}; it must be {limits} ({off:g} turns it off)"
    if sampling.top_logprobs > n_vocab:
        return f"top_logprobs is {sampling.top_logprobs}, must be at most the vocabulary of {n_vocab}"
    return None
