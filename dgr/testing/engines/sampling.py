"""How the fake engine draws a token: llama.cpp's sampler chain in a few lines of Python, with other random numbers."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

from dgr.core.values import SamplingParams, TopLogprob
from dgr.errors import InputError

__all__ = ["check_sampling", "draw", "top_logprobs"]


def check_sampling(params: SamplingParams, n_vocab: int) -> None:
    """Refuse what the native sampler refuses."""
    floats = ("temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
    for name in floats:
        if not math.isfinite(getattr(params, name)):
            raise InputError(f"{name} is not finite")
    if params.top_p <= 0:
        raise InputError(f"top_p is {params.top_p:g}, must be above 0 (1 turns it off)")
    if params.min_p > 1:
        raise InputError(f"min_p is {params.min_p:g}, must be at most 1 (0 turns it off)")
    if params.repeat_penalty <= 0:
        raise InputError(f"repeat_penalty is {params.repeat_penalty:g}, must be above 0 (1 turns it off)")
    if params.penalty_last_n < -1:
        raise InputError(f"penalty_last_n is {params.penalty_last_n}, must be >= -1 (-1: the whole history)")
    if not 0 <= params.top_logprobs <= min(64, n_vocab):
        raise InputError(f"top_logprobs is {params.top_logprobs}, must be in 0..{min(64, n_vocab)}")


def _penalised(row: Sequence[float], history: Sequence[int], params: SamplingParams) -> list[float]:
    values = list(row)
    recent = (
        history if params.penalty_last_n < 0 else history[len(history) - min(params.penalty_last_n, len(history)) :]
    )
    for token in set(recent):
        value = values[token]
        value = value / params.repeat_penalty if value > 0 else value * params.repeat_penalty
        values[token] = value - list(recent).count(token) * params.frequency_penalty - params.presence_penalty
    return values


def draw(row: Sequence[float], history: Sequence[int], params: SamplingParams) -> int:
    """The next token: greedy, or by a number that depends on (seed, position, choice) alone."""
    values = _penalised(row, history, params)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature <= 0:
        return order[0]
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp((values[token] - values[order[0]]) / params.temperature) for token in order]
    if params.min_p > 0:
        weights = [weight for weight in weights if weight >= params.min_p]
    if params.top_p < 1:
        mass = list(itertools.accumulate(weights))
        weights = weights[: 1 + sum(part < params.top_p * mass[-1] for part in mass[:-1])]
    text = f"{params.seed}:{len(history)}:{params.choice}".encode()
    share = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64 * sum(weights)
    for token, mass_so_far in zip(order, itertools.accumulate(weights), strict=False):
        if share < mass_so_far:
            return token
    return order[len(weights) - 1]


def top_logprobs(row: Sequence[float], count: int) -> tuple[TopLogprob, ...]:
    """The likeliest tokens by the raw logits, as the native sampler reports them."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    largest = max(row)
    total = math.log(sum(math.exp(value - largest) for value in row))
    return tuple(TopLogprob(token, row[token] - largest - total) for token in order)
