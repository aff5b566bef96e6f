"""``dgr-bench quality``: what numerics, threads, types, wires and changes of state cost in what a trained model says.

The model is the learned fixture: it knows English letter by letter, and recalls what was stated thousands of tokens before,
which it can only where the compressed, indexed and ring states are right. Held-out text and questions at growing distances
are put to it in every way to run: exact numerics in other chunks, on other thread counts and split into stages (their bits
must be equal), native numerics, devices, K and weights of other types, rounded wires. Then the state is changed between
statement and question (a fork, another route, an eviction and the re-prefill after it), where the bits must be equal too; and
damaged, one component at a time, where recall must be lost.

Units:

``quality/WAY``
    :class:`~dgr_bench.quality.measurements.Quality`.
``change/CHANGE``
    :class:`~dgr_bench.quality.measurements.Changed`.
``damage/COMPONENT``
    :class:`~dgr_bench.quality.damage.Damaged`.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import trio
from attrs import frozen

from dgr.core.values import Wire
from dgr.engine.devices import find_devices
from dgr.errors import InputError
from dgr.selftest.chain import cut_at
from dgr.selftest.learned.cached import cached_learned
from dgr.selftest.learned.model import KEPT
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command
from dgr_bench.plots import Plot
from dgr_bench.quality import report
from dgr_bench.quality.damage import DAMAGES, Damage, Damaged, damaged
from dgr_bench.quality.measurements import (
    CHANGES,
    Changed,
    Model,
    Quality,
    Rows,
    changed,
    quality_of,
    say,
    text_tokens,
)
from dgr_bench.quality.ways import REFERENCE, QualityPlan, Way, ways
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import asked_split, whole_model
from dgr_bench.verdicts import Check

_FULL: dict[str, Any] = {
    "text_tokens": 4096,
    "distances": (8, 24, 104, 296, 1000, 3000, 8008, 16008),
    "recitals": 2,
    "changed_at": 1000,
    "changed_recitals": 3,
    "type_k": ("f16", "q8_0"),
    "weights": ("bf16", "f16", "q8_0", "mixed", "q4_0"),
    "wires": (Wire.F32_ZSTD, Wire.BF16, Wire.F16, Wire.Q8),
}
_QUICK: dict[str, Any] = {
    "text_tokens": 256,
    "distances": (8, 296),
    "recitals": 1,
    "changed_at": 296,
    "changed_recitals": 1,
    "type_k": ("f16",),
    "weights": ("mixed",),
    "wires": (Wire.F32_ZSTD, Wire.BF16),
}
_CHUNK = 128
_THREADS = (2,)


@frozen
class Learned:
    """The benchmark."""

    plan: QualityPlan
    model: Model
    artifact: str
    #: Whether recall was learned: a fixture of random weights has none to lose, but its bits tell all the same.
    recalls: bool = True
    kind: ClassVar[Kind] = "quality"
    title: ClassVar[str] = "Quality"

    def subject(self) -> dict[str, Any]:
        return {"artifact": self.artifact, "split": self.plan.split}

    def _ways(self) -> list[Way]:
        names = [device.name for device in find_devices()]
        return list(ways(self.plan, names))

    def units(self, _: Store) -> Iterator[Group]:
        weight = self.plan.text_tokens + sum(self.plan.distances) * self.plan.recitals
        yield Group(
            [Unit(f"quality/{way.name}", partial(self._measure, way), weight) for way in self._ways()], self._reference
        )
        share = self.plan.changed_at * self.plan.changed_recitals
        yield Group([Unit(f"change/{change}", partial(self._change, change), 2 * share) for change in CHANGES])
        yield Group([Unit(f"damage/{damage.name}", partial(self._damage, damage), 3 * share) for damage in DAMAGES])

    @asynccontextmanager
    async def _reference(self) -> AsyncIterator[Rows]:
        rows, _, _ = await say(self.plan, Way(name=REFERENCE, chunk=self.plan.chunk), self.model, recite=False)
        yield rows

    async def _measure(self, way: Way, reference: Rows) -> Quality:
        rows, found, seconds = await say(self.plan, way, self.model)
        return quality_of(way, rows, reference, found, text_tokens(self.plan), seconds)

    async def _change(self, change: str, _: object) -> Changed:
        return await changed(self.plan, change, self.model)

    async def _damage(self, damage: Damage, _: object) -> Damaged:
        return await trio.to_thread.run_sync(lambda: damaged(self.plan, damage, self.model("f32")))

    # --- what follows ---

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return report.metrics(units)

    def checks(self, units: Units) -> list[Check]:
        equals = {way.name: way.equals for way in self._ways() if way.equals}
        return report.checks(units, equals, self.recalls)

    def tables(self, result: Result) -> list[Section]:
        return report.sections(result.metrics)

    def plots(self, result: Result) -> list[Plot]:
        return report.plots(result)


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        metavar="M",
        help="a GGUF that tools/train_fixture wrote (default: the learned fixture that is kept)",
    )
    parser.add_argument("--split", metavar="RANGES", help="layer ranges of the stages (default: three even ones)")
    parser.add_argument(
        "--distances",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="each 8 more than a multiple of 16 (default: 8 … 16008)",
    )


def plan_of(n_layers: int, *, quick: bool, split: str | None = None, **changes: Any) -> QualityPlan:
    """The plan of a model of so many layers."""
    ranges = (
        asked_split(split, n_layers) if split else cut_at(n_layers, sorted({n_layers // 3, 2 * n_layers // 3} - {0}))
    )
    settings = {"chunk": _CHUNK, "threads": _THREADS, **(_QUICK if quick else _FULL), **changes}
    return QualityPlan(
        name="quality, quick" if quick else "quality",
        split=",".join(map(str, ranges)),
        **settings,
    )


def _quality(args: argparse.Namespace) -> Learned:
    for distance in args.distances or ():
        if distance < 8 or distance % 16 != 8:
            raise InputError(f"--distances {distance}: give 8 more than a multiple of 16, such as 8, 296 or 1000")
    artifact = whole_model(args.model or KEPT)
    changes = {"distances": tuple(sorted(set(args.distances)))} if args.distances else {}
    plan = plan_of(artifact.hp.n_layers, quick=args.quick, split=args.split, **changes)
    return Learned(plan, partial(cached_learned, source=args.model or KEPT), artifact.identity)


_HELP = "perplexity, agreement and recall of a trained model: numerics, types, wires, changed and damaged state"
COMMAND = benchmark_command("quality", _HELP, __doc__ or "", _add_arguments, _quality)
