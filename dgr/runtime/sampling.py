"""Sampling parameters on their way to the tail and back, and what is refused on the way.

A value out of range must be refused before any token is committed: on a link it would be no frame of the schema, and at
the sampler it would come too late.
"""

from __future__ import annotations

import re

import msgspec

from dgr.engine.base import SamplingParams
from dgr.errors import InputError
from dgr.wire import frames

__all__ = ["from_wire", "sampling_problem", "to_wire"]

_FIELD = re.compile(r"\$\[(\d+)\]")


def to_wire(params: SamplingParams, n_vocab: int) -> frames.Sampling:
    """The frame's part. Raises :class:`InputError` for a value that no stage would take."""
    sampling = frames.Sampling(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        params.penalty_last_n,
        params.seed,
        params.choice,
        params.top_logprobs,
    )
    try:
        msgspec.convert(msgspec.structs.astuple(sampling), frames.Sampling)
    except msgspec.ValidationError as error:
        raise InputError(f"sampling parameters are refused: {_named(str(error))}") from error
    if (problem := sampling_problem(sampling, n_vocab)) is not None:
        raise InputError(problem)
    return sampling


def _named(message: str) -> str:
    """msgspec counts the fields of an array-like struct; people know their names."""
    return _FIELD.sub(lambda match: frames.Sampling.__struct_fields__[int(match[1])], message)


def from_wire(sampling: frames.Sampling | None) -> SamplingParams | None:
    """What the engine takes."""
    if sampling is None:
        return None
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repeat_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        penalty_last_n=sampling.penalty_last_n,
        seed=sampling.seed,
        choice=sampling.choice,
        top_logprobs=sampling.top_logprobs,
    )


def sampling_problem(sampling: frames.Sampling, n_vocab: int) -> str | None:
    """What a sampler would refuse of values that the schema lets pass."""
    if sampling.top_p <= 0:
        return f"top_p is {sampling.top_p:g}, must be above 0 (1 turns it off)"
    if sampling.min_p > 1:
        return f"min_p is {sampling.min_p:g}, must be at most 1 (0 turns it off)"
    if sampling.repeat_penalty <= 0:
        return f"repeat_penalty is {sampling.repeat_penalty:g}, must be above 0 (1 turns it off)"
    if sampling.top_logprobs > n_vocab:
        return f"top_logprobs is {sampling.top_logprobs}, must be at most the vocabulary of {n_vocab}"
    return None
