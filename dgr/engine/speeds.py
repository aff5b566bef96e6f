"""Measures how fast this host computes: a few short ranges of a model, one after the other, each on an engine of its own.

No range is longer than four layers, so a host needs the memory of those alone, whatever it will own.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence

from attrs import frozen
from msgspec.structs import replace

from dgr.artifact.artifact import Artifact
from dgr.artifact.speeds import FORMAT, HostSpeed, Timing, layer_kinds
from dgr.core.arguments import check_whole
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, LogitsWanted, SamplingParams
from dgr.engine.base import Output, ShardEngine, Work
from dgr.engine.llama import LlamaEngine
from dgr.errors import InputError
from dgr.text import utf8

__all__ = ["SpeedPlan", "measure_speed"]

#: Most layers of a range.
_MOST_LAYERS = 4
#: Steps and chunks that count, and those before them that do not: caches and clocks warm up.
_STEPS, _CHUNKS, _WARM_UP = 12, 3, 2
#: Tokens of the smaller chunk that is measured.
_SMALL_CHUNK = 64


@frozen
class SpeedPlan:
    """What is measured."""

    threads: int = 1
    #: Sequences of a decode step, ascending.
    sequences: tuple[int, ...] = (1, 2, 4, 8)
    #: Tokens that a sequence holds before its steps are measured.
    depth: int = 512


#: Seconds by (sequences, tokens).
_Times = dict[tuple[int, int], float]


def measure_speed(
    artifact: Artifact,
    context: ContextParams,
    plan: SpeedPlan,
    progress: Callable[[int, int], None] | None = None,
    open_engine: Callable[[Artifact, LayerRange, ContextParams, int], ShardEngine] | None = None,
) -> HostSpeed:
    """Seconds of a decode step and of a chunk by kind of layer, medians of a few.

    ``context`` says numerics, types and n_ubatch; as many tokens and sequences as are needed are taken. ``progress``: told of
    (ranges done, ranges). ``open_engine``: for engines other than llama.cpp's.

    Raises:
        InputError: for numbers out of range.
        ArtifactError: the file lacks a layer that must be measured, as a slice may.
    """
    check_whole("depth", plan.depth, 1)
    if [*plan.sequences] != sorted({*plan.sequences}) or not plan.sequences or plan.sequences[0] != 1:
        raise InputError(f"sequences are {plan.sequences}; they must ascend from 1")
    chunks = sorted({min(_SMALL_CHUNK, context.n_ubatch), context.n_ubatch})
    needed = plan.depth + max(chunks) * (1 + _CHUNKS) + len(plan.sequences) * (_WARM_UP + _STEPS)
    context = replace(
        context,
        n_ctx=needed,
        n_seq_max=max(plan.sequences),
        n_batch=max(context.n_batch, context.n_ubatch, *plan.sequences),
    )
    opened = open_engine or _open
    kinds = layer_kinds(artifact)
    ranges = _ranges(kinds)
    times: dict[LayerRange, _Times] = {}
    for done, layers in enumerate(ranges):
        if progress is not None:
            progress(done, len(ranges))
        engine = opened(artifact, layers, context, plan.threads)
        try:
            times[layers] = _timed(engine, plan, chunks)
        finally:
            engine.stop()
    sizes = [(sequences, 1) for sequences in plan.sequences], [(1, tokens) for tokens in chunks]
    decode, prefill = (tuple(_split(kinds, times, size) for size in some) for some in sizes)
    return HostSpeed(
        format=FORMAT,
        host=utf8(platform.node()) or "this host",
        model=utf8(artifact.file.path.name),
        threads=plan.threads,
        numerics=context.numerics.value,
        n_ubatch=context.n_ubatch,
        depth=plan.depth,
        decode=decode,
        prefill=prefill,
    )


def _open(artifact: Artifact, layers: LayerRange, context: ContextParams, threads: int) -> LlamaEngine:
    return LlamaEngine(artifact, layers, context, threads=threads)


def _ranges(kinds: Sequence[str]) -> list[LayerRange]:
    """A layer of each kind, one long range, the first layer and the last one; inner layers where there are some."""
    n_layers = len(kinds)
    inner = range(1, n_layers - 1) or range(n_layers)
    ones = {kinds[layer]: layer for layer in (0, n_layers - 1, *reversed(inner))}
    long = LayerRange(max(inner.start, inner.stop - _MOST_LAYERS), inner.stop)
    chosen = [
        *(LayerRange(layer, layer + 1) for layer in ones.values()),
        long,
        LayerRange(0, 1),
        LayerRange(n_layers - 1, n_layers),
    ]
    return sorted({*chosen})


def _split(kinds: Sequence[str], times: dict[LayerRange, _Times], size: tuple[int, int]) -> Timing:
    """What a call, each layer, the head and the tail take, from what ranges took."""
    n_layers = len(kinds)
    took = {layers: each[size] for layers, each in times.items()}
    ones = {layers.begin: seconds for layers, seconds in took.items() if len(layers) == 1}
    # An inner layer speaks for its kind; where there is none, one at an end does, with all that it takes.
    by_kind: dict[str, float] = {}
    for layer in sorted(ones, key=lambda layer: layer in (0, n_layers - 1)):
        by_kind.setdefault(kinds[layer], ones[layer])
    long = max(took, key=len)
    alone = sum(by_kind[kinds[layer]] for layer in long.layers)
    call, grown = 0.0, 1.0
    if len(long) > 1 and took[long] <= alone:
        call = min((alone - took[long]) / (len(long) - 1), *by_kind.values())
    elif len(long) > 1:
        grown = took[long] / alone  # a layer alone stays in a cache that is too small for several
    layers = {kind: (seconds - call) * grown for kind, seconds in by_kind.items()}

    def beside(layer: int) -> float:
        return max(0.0, ones[layer] - by_kind[kinds[layer]])

    tail = beside(n_layers - 1) if n_layers > 1 else 0.0
    return Timing(sequences=size[0], tokens=size[1], call=call, layers=layers, head=beside(0), tail=tail)


def _timed(engine: ShardEngine, plan: SpeedPlan, chunks: Sequence[int]) -> _Times:
    """Medians of the steps and chunks of one range."""
    import numpy as np  # not for whoever only asks for help

    about = engine.describe()
    noise = np.random.default_rng(0)
    is_tail = about.layers.end == about.n_layers

    def work(slot: int, position: int, tokens: int) -> Work:
        ids = noise.integers(about.n_vocab, size=tokens).tolist()
        residual = (
            noise.standard_normal(tokens * about.width_in, dtype=np.float32).tobytes() if about.width_in else None
        )
        wanted = LogitsWanted.LAST if is_tail and tokens == 1 else LogitsWanted.NONE
        return Work(slot, position, ids, residual, wanted)

    def seconds(batch: list[Work]) -> float:
        began = time.perf_counter()
        _drawn(engine, engine.run(batch))
        return time.perf_counter() - began

    def fill(slot: int) -> None:
        for begin in range(0, plan.depth, max(chunks)):
            engine.run([work(slot, begin, min(max(chunks), plan.depth - begin))])

    found: _Times = {}
    for tokens in chunks:
        engine.close(0)
        taken = [seconds([work(0, tokens * number, tokens)]) for number in range(1 + _CHUNKS)]
        found[1, tokens] = statistics.median(taken[1:])
    for slot in range(max(plan.sequences)):
        engine.close(slot)
        fill(slot)
    at = dict.fromkeys(range(max(plan.sequences)), plan.depth)
    for sequences in plan.sequences:
        taken = []
        for _ in range(_WARM_UP + _STEPS):
            batch = [work(slot, at[slot], 1) for slot in range(sequences)]
            taken.append(seconds(batch))
            at |= {slot: at[slot] + 1 for slot in range(sequences)}
        found[sequences, 1] = statistics.median(taken[_WARM_UP:])
    return found


def _drawn(engine: ShardEngine, outputs: Sequence[Output]) -> None:
    """Draw from what the tail returns, as a stage does."""
    for output in outputs:
        if output.logits is not None:
            engine.sample(output.logits, (), SamplingParams())
