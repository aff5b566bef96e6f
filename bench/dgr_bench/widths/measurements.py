"""The units of ``dgr-bench widths``: one layer at growing contexts, a range whole and cut in two, the machine's limits."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dgr import LayerRange
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.engine.llama import estimate_memory
from dgr.errors import EngineError
from dgr.gguf.reader import aligned
from dgr.selftest.chain import pieces, some_tokens
from dgr.testing.native_measurements import MeasuredEngine, Roof, measure_roof
from dgr.v4.state_map import ContextShape, expected_state, state_map
from dgr_bench.subjects import resident_bytes
from dgr_bench.widths.parts import by_part
from dgr_bench.widths.plan import PROFILED, WARM, WidthsJob, WidthsPlan

#: Seconds after which a file's digests are kept: a change right after another would show no other time.
_SETTLED = 2.5
#: Seconds for which a call is under way before it is aborted.
_UNDER_WAY = 0.5
#: Bytes that tensors are aligned to in memory (``TENSOR_ALIGNMENT``).
_ALIGNMENT = 32
#: Bytes of a file from which on it is worth waiting for that.
_COSTLY = 1 << 30


# --- the file and the machine ----------------------------------------------------------------------------------------


def run_file(job: WidthsJob) -> dict[str, Any]:
    """Write the model unless it is there, and read it once for its identity."""
    began = time.perf_counter()
    there = job.path.exists()
    if not there:
        job.write()
    written = time.perf_counter()
    artifact = job.artifact()
    if artifact.file_bytes >= _COSTLY:
        time.sleep(max(0.0, _SETTLED - (time.time() - job.path.stat().st_ctime)))
    forget(job.path)
    reading = time.perf_counter()
    identity = artifact.verify_weights(artifact.layers)
    return {
        "bytes": artifact.file_bytes,
        "write_s": None if there else written - began,
        "digest_s": time.perf_counter() - reading,
        "identity": identity,
    }


def run_roofs(job: WidthsJob) -> dict[str, Any]:
    """The machine's limits, with as many threads as the stages have."""
    plan = job.plan
    return {kind.value: measure_roof(kind, plan.threads, plan.roof_s, plan.roof_bytes) for kind in Roof}


def forget(path: Path) -> None:
    """Ask the system to drop what it keeps of a file."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _begin_peak() -> None:
    """From now on the peak of resident memory counts anew, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return None


# --- one layer -------------------------------------------------------------------------------------------------------


class Layer:
    """A stage of one layer, loaded when it is first asked for."""

    def __init__(self, job: WidthsJob, layer: int) -> None:
        self.job = job
        self.layers = LayerRange(layer, layer + 1)
        self._engine: MeasuredEngine | None = None

    @property
    def engine(self) -> MeasuredEngine:
        if self._engine is None:
            self._engine = self.job.load(self.layers)
        return self._engine

    def stop(self) -> None:
        """Release it; it is loaded again when it is asked for."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def timed_load(self) -> float:
        """Load it anew; seconds."""
        self.stop()
        began = time.perf_counter()
        self._engine = self.job.load(self.layers)
        return time.perf_counter() - began


def _inputs(engine: MeasuredEngine, count: int, seed: int) -> Iterator[tuple[list[int], bytes | None]]:
    """Token ids, and the residual of a size that a layer gets; endless."""
    about = engine.describe()
    numbers = np.random.default_rng(seed)
    while True:
        tokens = numbers.integers(0, about.n_vocab, count).tolist()
        residual = numbers.standard_normal((count, about.width_in), np.float32).tobytes() if about.width_in else None
        yield tokens, residual


def _seconds(threads: int, body: Callable[[], object]) -> float:
    """CPU time of one thread, which other work on the machine disturbs least; of several, the clock on the wall."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    began = clock()
    body()
    return clock() - began


def _run(engine: MeasuredEngine, tokens: Sequence[int], residual: bytes | None, logits: LogitsWanted) -> None:
    output = engine.run([Work(0, engine.position(0), tokens, residual, logits)])[0]
    if not output.finite:
        raise EngineError(f"the output of layers {engine.describe().layers} is not finite")


def _times(
    engine: MeasuredEngine, threads: int, count: int, batch: int, logits: LogitsWanted = LogitsWanted.NONE
) -> list[float]:
    """Seconds of each of ``count`` batches, where the slot stands."""
    inputs = _inputs(engine, batch, engine.position(0))
    found = []
    for _ in range(count):
        tokens, residual = next(inputs)
        found.append(_seconds(threads, lambda: _run(engine, tokens, residual, logits)))  # noqa: B023 (run at once)
    return found


def _place(engine: MeasuredEngine, position: int, computed: bool, chunk: int) -> float:
    """Bring an empty slot to a position; seconds."""
    began = time.perf_counter()
    if not computed:
        engine.fill(position)
    else:
        for begin, end in pieces(position, chunk):
            tokens, residual = next(_inputs(engine, end - begin, begin))
            _run(engine, tokens, residual, LogitsWanted.NONE)
    return time.perf_counter() - began


def _decode(engine: MeasuredEngine, plan: WidthsPlan) -> list[float]:
    """Seconds of each token, after some that are not timed."""
    _times(engine, plan.threads, WARM, 1)
    return _times(engine, plan.threads, plan.decode, 1)


def run_context(context: int, layer: Layer) -> dict[str, Any]:
    """Decode and prefill after so many tokens, whole and operation by operation; then frontier and clearing."""
    engine, plan = layer.engine, layer.job.plan
    position = plan.at(context)
    computed = position <= plan.prefilled
    engine.close(0)
    raw: dict[str, Any] = {"position": position, "computed": computed}
    try:
        if computed and context > plan.chunk:  # the same tokens after a state that is filled
            _place(engine, position, False, plan.chunk)
            raw["filled_decode_s"] = _decode(engine, plan)
            engine.close(0)
        raw["place_s"] = _place(engine, position, computed, plan.chunk)
        raw["decode_s"] = _decode(engine, plan)
        with engine.profile() as operations:
            _times(engine, plan.threads, PROFILED, 1)
        raw["decode_ops"] = by_part(operations, PROFILED)
        raw["prefill_position"] = engine.position(0)
        raw["prefill_s"] = _times(engine, plan.threads, 1, plan.chunk)
        with engine.profile() as operations:
            _times(engine, plan.threads, 1, plan.chunk)
        raw["prefill_ops"] = by_part(operations, 1)
        raw |= _frontier(layer)
        raw["peak"] = _peak_bytes()
    finally:
        began = time.perf_counter()
        engine.close(0)
        raw["clear_s"] = time.perf_counter() - began
    return raw


def _frontier(layer: Layer) -> dict[str, Any]:
    """How long the state takes to be summed up, and whether it has the rows that so many tokens leave."""
    engine = layer.engine
    began = time.perf_counter()
    state = engine.state_summary(0)
    seconds = time.perf_counter() - began
    context, hp = engine.describe().context, layer.job.artifact().hp
    shape = ContextShape(context.n_ctx, context.n_ubatch, context.n_seq_max, context.type_k)
    wanted = {part.component.value: part.rows for part in expected_state(hp, layer.layers, shape, state.position)}
    return {
        "frontier_s": seconds,
        "rows": {part.name: [part.rows_min, part.rows_max] for part in state.components},
        "rows_wanted": wanted,
    }


def run_load(layer: Layer) -> dict[str, Any]:
    """Admission by arithmetic; loading from the disk and from the system's cache; what is allocated and resident."""
    job = layer.job
    artifact = job.artifact()
    layer.stop()
    began = time.perf_counter()
    estimate_memory(artifact, layer.layers, job.context)
    admission = time.perf_counter() - began
    before = resident_bytes()
    forget(job.path)
    cold = layer.timed_load()
    layer.stop()
    _begin_peak()
    warm = layer.timed_load()
    engine = layer.engine
    report, about = engine.memory(), engine.describe()
    shape = ContextShape(about.context.n_ctx, about.context.n_ubatch, about.context.n_seq_max, about.context.type_k)
    wanted = {part.component.value: part.n_bytes for part in state_map(artifact.hp, layer.layers, shape).components}
    return {
        "admission_s": admission,
        "cold_s": cold,
        "warm_s": warm,
        "weights": report.weights,
        "weights_wanted": sum(aligned(tensor.n_bytes, _ALIGNMENT) for tensor in artifact.tensors_of(layer.layers)),
        "state": dict(report.state),
        "state_wanted": wanted,
        "compute": report.compute,
        "resident_before": before,
        "resident_loaded": resident_bytes(),
        "peak_loading": _peak_bytes(),
    }


def run_abort(layer: Layer) -> dict[str, Any]:
    """How long a stage that is told to stop computes on, in the midst of a prefill chunk at the end of the context."""
    engine, plan = layer.engine, layer.job.plan
    engine.close(0)
    _place(engine, plan.at(plan.n_ctx), False, plan.chunk)
    tokens, residual = next(_inputs(engine, plan.chunk, 0))
    ended: list[tuple[float, bool]] = []

    def compute() -> None:
        try:
            _run(engine, tokens, residual, LogitsWanted.NONE)
            ended.append((time.perf_counter(), False))
        except EngineError:
            ended.append((time.perf_counter(), True))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join(_UNDER_WAY)
    told = time.perf_counter()
    engine.abort()
    thread.join()
    layer.stop()
    at, aborted = ended[0]
    return {"abort_s": at - told if aborted else None}


def run_output(layer: Layer) -> dict[str, Any]:
    """A token with its row of logits and without it, in turn."""
    engine, plan = layer.engine, layer.job.plan
    engine.close(0)
    _decode(engine, plan)
    found: dict[str, Any] = {"with_s": [], "without_s": []}
    for _ in range(plan.decode):
        found["with_s"] += _times(engine, plan.threads, 1, 1, LogitsWanted.LAST)
        found["without_s"] += _times(engine, plan.threads, 1, 1)
    engine.close(0)
    return found


# --- a range, whole and cut ------------------------------------------------------------------------------------------


def cut(layers: LayerRange) -> tuple[LayerRange, ...]:
    """A range in two halves."""
    middle = (layers.begin + layers.end) // 2
    return LayerRange(layers.begin, middle), LayerRange(middle, layers.end)


@contextmanager
def _engines(job: WidthsJob, ranges: Sequence[LayerRange]) -> Iterator[list[MeasuredEngine]]:
    with ExitStack() as stack:
        engines = []
        for layers in ranges:
            engine = job.load(layers, job.plan.chunk + job.plan.room)
            stack.callback(engine.stop)
            engines.append(engine)
        yield engines


def run_range(job: WidthsJob, ranges: Sequence[LayerRange]) -> dict[str, Any]:
    """Decode from the start; then, anew, a chunk of a prompt and tokens after it: seconds, and digests of all that comes out.

    Stages run one after the other, the residual of each being the input of the next.
    """
    plan = job.plan
    began = time.perf_counter()
    with _engines(job, ranges) as engines:
        raw: dict[str, Any] = {"load_s": time.perf_counter() - began, "digests": []}
        raw["decode_s"] = [_step(job, engines, 1, at, raw["digests"]) for at in range(WARM + plan.decode)][WARM:]
        for engine in engines:
            engine.close(0)
        raw["prefill_s"] = _step(job, engines, plan.chunk, 0, raw["digests"])
        for at in range(plan.decode):
            _step(job, engines, 1, plan.chunk + at, raw["digests"])
        raw["resident"] = resident_bytes()
    return raw


def _step(job: WidthsJob, engines: Sequence[MeasuredEngine], count: int, position: int, digests: list[str]) -> float:
    """Run tokens through every stage; seconds. What comes out is digested."""
    about, seed = engines[0].describe(), job.plan.seed + position
    tokens = some_tokens(count, about.n_vocab, seed)
    residual: Any = None
    if about.width_in:
        residual = np.random.default_rng(seed).standard_normal((count, about.width_in), np.float32).tobytes()
    seconds = 0.0
    for engine in engines:
        work = [Work(0, position, tokens, residual, LogitsWanted.LAST)]
        outputs: list[Any] = []
        seconds += _seconds(job.plan.threads, lambda: outputs.extend(engine.run(work)))  # noqa: B023 (run at once)
        if not outputs[0].finite:
            raise EngineError(f"the output of layers {engine.describe().layers} at position {position} is not finite")
        residual = outputs[0].residual
    out = residual if residual is not None else outputs[0].logits
    digests.append(hashlib.blake2b(out, digest_size=16).hexdigest())
    return seconds
