"""The same given tokens in exact and in other numerics: how far each row of logits is off. Raw metrics only.

Tokens are given, not drawn: after the first that is drawn otherwise, two runs would speak of different texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import trio
from attrs import frozen
from msgspec.structs import replace

from dgr import Artifact, ContextParams, LlamaEngine, Numerics, Placement
from dgr.engine.devices import find_devices
from dgr.errors import EngineError
from dgr.selftest.chain import Chain, some_tokens
from dgr.wire.nurseries import open_nursery
from dgr_bench.benchmark import Group, Unit

#: Rows of logits: [tokens, n_vocab].
Rows: TypeAlias = npt.NDArray[np.float32]

#: The reference against itself, in other chunks: what is not zero there is no distance of numerics.
CONTROL = "exact, other chunks"
_CPU = Placement(("CPU",))
#: A run on several threads that takes this much longer has no core to itself: ggml's threads spin.
_BUSY, _BUSY_SECONDS = 10.0, 20.0


class DistancePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is held against exact numerics."""

    #: Tokens given.
    tokens: int
    #: Fixtures by their weights, beside the model that is certified.
    fixtures: tuple[str, ...] = ()
    #: Layers of the fixtures.
    layers: int = 43
    #: Tokens of a native call, where nothing else is said.
    chunk: int = 64
    #: Thread counts beside one.
    threads: tuple[int, ...] = (2,)
    seed: int = 0


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """How far the rows of one way to run are from those of exact numerics on one thread, in the order of the tokens."""

    model: str
    way: str
    devices: list[str]
    #: Largest difference of a logit in the row.
    difference: list[float]
    #: Kullback-Leibler divergence of the row's distribution from the exact one's, nats.
    divergence: list[float]
    #: Whether the likeliest token is the exact one's.
    same_top: list[bool]
    #: Standard deviation of the exact logits: what a difference compares with.
    deviation: float
    seconds: float


@frozen
class _Way:
    """One way to run."""

    name: str
    numerics: Numerics
    chunk: int
    threads: int = 1
    placement: Placement = _CPU


def _log_softmax(rows: Rows) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def distance_of(exact: Rows, other: Rows) -> tuple[list[float], list[float], list[bool]]:
    """By row: largest difference of a logit, divergence of the distributions (nats), and whether the top is the same."""
    ours, theirs = _log_softmax(exact), _log_softmax(other)
    divergence = np.maximum(0.0, (np.exp(ours) * (ours - theirs)).sum(axis=1))
    difference = np.abs(exact.astype(np.float64) - other).max(axis=1)
    return difference.tolist(), divergence.tolist(), (exact.argmax(axis=1) == other.argmax(axis=1)).tolist()


def ways(plan: DistancePlan, devices: Sequence[str]) -> Iterator[_Way]:
    """Every way that is held against exact numerics on one thread."""
    yield _Way(CONTROL, Numerics.EXACT, max(1, plan.chunk // 3))
    yield _Way("native", Numerics.NATIVE, plan.chunk)
    yield _Way("native, one by one", Numerics.NATIVE, 1)
    for threads in plan.threads:
        yield _Way(f"native, {threads} threads", Numerics.NATIVE, plan.chunk, threads)
    for name in devices:
        yield _Way(f"native on {name}", Numerics.NATIVE, plan.chunk, 1, Placement((name,)))


@contextmanager
def _opened(artifact: Artifact, context: ContextParams, way: _Way) -> Iterator[LlamaEngine]:
    placement = Placement() if way.numerics is Numerics.EXACT else way.placement
    engine = LlamaEngine(
        artifact, None, replace(context, numerics=way.numerics), threads=way.threads, placement=placement
    )
    try:
        yield engine
    finally:
        engine.stop()


async def _feed(engine: LlamaEngine, tokens: Sequence[int], chunk: int, patience: float) -> Rows:
    gave_up = False

    async def lose_patience() -> None:
        nonlocal gave_up
        await trio.sleep(patience)
        gave_up = True
        engine.abort()

    rows = b""
    try:
        async with open_nursery() as nursery:
            nursery.start_soon(lose_patience)
            rows = await trio.to_thread.run_sync(partial(Chain([engine]).feed, tokens, chunk=chunk))
            nursery.cancel_scope.cancel()
    except EngineError as error:
        if gave_up:
            raise EngineError(f"the run took over {patience:.0f} s: the CPUs are busy") from error
        raise
    return np.frombuffer(rows, np.float32).reshape(len(tokens), -1)


@frozen
class _Reference:
    rows: Rows
    seconds: float


def distance_units(plan: DistancePlan, model: str, open_model: Callable[[], Artifact], context: ContextParams) -> Group:
    """Units ``distance/MODEL/WAY`` that share the rows of the reference."""
    context = replace(context, n_ctx=plan.tokens, n_batch=plan.chunk, n_ubatch=max(32, plan.chunk), n_seq_max=1)
    context = replace(context, n_batch=max(context.n_batch, context.n_ubatch))

    async def run(way: _Way, patience: float = math.inf) -> tuple[Rows, list[str], float]:
        artifact = await trio.to_thread.run_sync(open_model)
        tokens = some_tokens(plan.tokens, artifact.hp.n_vocab, plan.seed)
        began = time.monotonic()
        with _opened(artifact, context, way) as engine:
            rows = await _feed(engine, tokens, way.chunk, patience)
            return rows, list(engine.describe().devices), time.monotonic() - began

    @asynccontextmanager
    async def reference() -> AsyncIterator[_Reference]:
        rows, _, seconds = await run(_Way("exact", Numerics.EXACT, plan.chunk))
        yield _Reference(rows, seconds)

    async def measure(way: _Way, exact: _Reference) -> Distance:
        patience = math.inf if way.threads == 1 else _BUSY_SECONDS + _BUSY * exact.seconds
        rows, devices, seconds = await run(way, patience)
        difference, divergence, same_top = distance_of(exact.rows, rows)
        return Distance(
            model=model,
            way=way.name,
            devices=devices,
            difference=difference,
            divergence=divergence,
            same_top=same_top,
            deviation=float(exact.rows.std()),
            seconds=seconds,
        )

    names = [device.name for device in find_devices()]
    units = [
        Unit(f"distance/{model}/{way.name}", partial(measure, way), plan.tokens * (4.0 if way.chunk == 1 else 1.0))
        for way in ways(plan, names)
    ]
    return Group(units, reference)


def open_file(path: Path) -> Artifact:
    """An artifact, where it is needed."""
    return Artifact.open(path)
