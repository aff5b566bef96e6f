"""How fast a host computes: seconds by kind of layer, as measured there (``dgr benchmark``), and of any range from them.

A stage's native call takes a fixed time, one for each of its layers by kind, and more on a head (embedding) and on a tail
(output head, sampling). A kind is what makes layers cost alike: their attention, whether experts are picked by token id, and
the types of their matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dgr.artifact.artifact import Artifact
from dgr.core.files.inputs import NOT_JSON, read_whole
from dgr.core.route import LayerRange
from dgr.errors import InputError
from dgr.v4.tensors import block_tensors

__all__ = ["FORMAT", "HostSpeed", "Timing", "layer_kinds", "read_speed", "stage_seconds"]

#: Version of the file.
FORMAT = 1
#: A thousand times what the file of a host takes.
_MOST_BYTES = 1 << 20

Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class Timing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one native call of ``sequences`` times ``tokens`` tokens."""

    sequences: Positive
    tokens: Positive
    #: What every call takes.
    call: Seconds
    #: What each layer takes, by kind.
    layers: dict[str, Seconds]
    #: What the first and the last stage take beside.
    head: Seconds
    tail: Seconds


class HostSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured on one host, and with what."""

    format: int
    host: str
    model: str
    threads: Positive
    numerics: str
    n_ubatch: int
    #: Tokens that a sequence held when a step of decoding was measured.
    depth: int
    #: One token of 1, 2, … sequences, ascending.
    decode: Annotated[tuple[Timing, ...], Meta(min_length=1)]
    #: Chunks of one sequence, ascending.
    prefill: Annotated[tuple[Timing, ...], Meta(min_length=1)]


def read_speed(path: str | Path) -> HostSpeed:
    """Read a file of ``dgr benchmark``. Raises :class:`~dgr.errors.InputError` naming what is wrong in it."""
    try:
        speed = msgspec.json.decode(read_whole(Path(path), _MOST_BYTES, "a host's speeds"), type=HostSpeed)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except NOT_JSON as error:
        raise InputError(f"{path} is not what `dgr benchmark` writes: {error}") from error
    if speed.format != FORMAT:
        raise InputError(f"{path} has format {speed.format}, this dgr reads {FORMAT}: run `dgr benchmark` there again")
    for name, sizes in (
        ("decode", [timing.sequences for timing in speed.decode]),
        ("prefill", [timing.tokens for timing in speed.prefill]),
    ):
        if sizes != sorted({*sizes}):
            raise InputError(f"{path}: the sizes of {name} are {sizes}; they must ascend")
    values = [
        value
        for one in (*speed.decode, *speed.prefill)
        for value in (one.call, one.head, one.tail, *one.layers.values())
    ]
    if not all(map(math.isfinite, values)):
        raise InputError(f"{path} has a time that is not finite")
    return speed


def layer_kinds(artifact: Artifact) -> tuple[str, ...]:
    """The kind of each main layer, such as ``CSA MXFP4+Q8_0``; ``#`` marks experts that are picked by token id."""
    hp, kinds = artifact.hp, []
    for layer in range(hp.n_layers):
        named = (
            spec.name for spec in block_tensors(hp, layer) if spec.kind.is_matrix and spec.name in artifact.tensors
        )
        types = sorted({artifact.tensors[name].type.name for name in named})
        kinds.append(f"{hp.kind(layer)}{'#' * hp.is_hash_routed(layer)} {'+'.join(types)}")
    return tuple(kinds)


def stage_seconds(
    speed: HostSpeed, kinds: Sequence[str], layers: LayerRange, *, sequences: int = 1, tokens: int = 1
) -> float:
    """Seconds of a native call of a stage: a decode step of ``sequences``, or a chunk of ``tokens`` of one sequence.

    Between two sizes that were measured it is interpolated, beyond the largest it goes on as between the last two. A chunk of
    one token is a decode step. Raises :class:`~dgr.errors.InputError` for a kind of layer that was not measured there.
    """
    if tokens == 1:
        points = [(timing.sequences, _total(speed, timing, kinds, layers)) for timing in speed.decode]
        return _at(sequences, points)
    points = [(timing.tokens, _total(speed, timing, kinds, layers)) for timing in (speed.decode[0], *speed.prefill)]
    return _at(tokens, points)


def _total(speed: HostSpeed, timing: Timing, kinds: Sequence[str], layers: LayerRange) -> float:
    try:
        body = sum(timing.layers[kinds[layer]] for layer in layers.layers)
    except KeyError as missing:
        raise InputError(
            f"layers of kind {missing.args[0]} were not measured on {speed.host}; run `dgr benchmark` there with this model"
        ) from missing
    ends = (timing.head if layers.begin == 0 else 0.0) + (timing.tail if layers.end == len(kinds) else 0.0)
    return timing.call + body + ends


def _at(size: int, points: Sequence[tuple[int, float]]) -> float:
    """The value at ``size`` of the line through points that ascend; in proportion beyond a single one."""
    if size <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    after = next((index for index, (at, _) in enumerate(points) if at >= size), len(points) - 1)
    (left, low), (right, high) = points[after - 1], points[after]
    return max(low, low + (high - low) * (size - left) / (right - left)) if right > left else high
