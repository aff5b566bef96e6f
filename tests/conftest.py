"""What tests of every floor share: models by kind, the record of exact numerics, and ways to run a model."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from fixture_types import Model, Parallel, PipelineLogits, Prompt

import dgr
from dgr.core.values import ContextParams
from dgr.engine.numerics import ExactnessRecord, load_exactness_record, save_exactness_record
from dgr.selftest.cases import select
from dgr.selftest.chain import some_tokens
from dgr.selftest.fixture import cached_fixture
from dgr.selftest.invariance import exactness_record, run_suite

T = TypeVar("T")

#: Types of the models that tests run, and of their K caches.
_TYPES = ("f32", "f16", "bf16", "q8_0", "mxfp4", "q4_K")

#: What a shell starts in the background ignores interrupts, and so do its children; what dgr makes of them is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def exact_here() -> ExactnessRecord:
    """The record of exact numerics on this machine; the invariance suite runs once when it lacks what tests need."""
    found = load_exactness_record()
    if found is None or not all(found.knows(case.kind, case.label) for case in select(_TYPES)):
        found = exactness_record(run_suite(_TYPES), found)
        save_exactness_record(found)
    return found


@pytest.fixture(scope="session")
def model(exact_here: ExactnessRecord) -> Model:
    """``model(weights, layers=43, mtp=False)``: a fixture model's path, written once per machine. Do not change it."""
    return cached_fixture


@pytest.fixture(scope="session")
def tiny(model: Model) -> Path:
    """All 43 layers, f32 weights; a token takes some milliseconds."""
    return model("f32")


@pytest.fixture(scope="session")
def small(model: Model) -> Path:
    """The first 7 layers (SWA, SWA, CSA, HCA, CSA, HCA, CSA), f32 weights; a token takes a millisecond."""
    return model("f32", layers=7)


@pytest.fixture(scope="session")
def prompt() -> Prompt:
    """``prompt(n, seed=0)``: token ids of the fixtures' vocabulary, without a pattern that a window could repeat."""

    def tokens(n_tokens: int, seed: int = 0) -> list[int]:
        return some_tokens(n_tokens, 512, seed)

    return tokens


@pytest.fixture(scope="session")
def parallel() -> Parallel:
    """Run jobs side by side, one per CPU: native code lets go of the GIL. One thread per engine."""

    def run(jobs: Sequence[Callable[[], T]]) -> list[T]:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return [job.result() for job in [pool.submit(job) for job in jobs]]

    return run


@pytest.fixture(scope="session")
def pipeline_logits() -> PipelineLogits:
    """``await pipeline_logits(model, split, tokens, context=…, chunk=…)``: all rows of logits, through the runtime."""

    async def run(
        path: Path,
        split: str | Sequence[dgr.LayerRange],
        tokens: Sequence[int],
        *,
        context: ContextParams | None = None,
        chunk: int | None = None,
        threads: int = 1,
    ) -> bytes:
        async with (
            dgr.open_pipeline(path, split, context=context, chunk=chunk, threads=threads) as pipeline,
            pipeline.session() as session,
        ):
            row = 4 * pipeline.n_vocab
            rows = bytearray(row * len(tokens))

            def take(position: int, values: memoryview) -> None:
                rows[position * row : position * row + values.nbytes] = values

            await session.logits(tokens, take)
            return bytes(rows)

    return run


def _seconds_of_hashing(workers: int) -> float:
    data = bytes(8 << 20)
    with ThreadPoolExecutor(workers) as pool:
        began = time.perf_counter()
        for job in [pool.submit(hashlib.blake2b, data) for _ in range(workers)]:  # lets go of the GIL
            job.result()
        return time.perf_counter() - began


@pytest.fixture
def two_cpus() -> None:
    """Skip where ggml's threads would have to share a CPU: they spin, and a second's work takes minutes."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one CPU only")
    if _seconds_of_hashing(2) > 1.5 * min(_seconds_of_hashing(1) for _ in range(3)):
        pytest.skip("the CPUs are busy: ggml's spinning threads would take minutes")
