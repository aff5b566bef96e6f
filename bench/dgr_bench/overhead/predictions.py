"""``dgr-bench plan``: what ``dgr plan`` predicts of routes, against what they do.

This host is measured as ``dgr benchmark`` does, and every cable as ``dgr doctor`` does. From these alone follow, for routes of
two stage processes of one thread each, with several cuts and with delays in every cable: tokens a second of one session and
of several, and the time to a first token. Then the routes do it.

Units:

``speed``
    What ``dgr benchmark`` measures.
``A:B,B:C, D ms, cables``
    ``round_trips`` (seconds) and ``bandwidths`` (bytes a second), of each stage as the client sees it.
``A:B,B:C, D ms, round N``
    ``one_s`` and ``many_s``: seconds in which one session, and all together, drew ``tokens``; ``first_token_s``.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import trio
from attrs import evolve, frozen

from dgr import Artifact, ContextParams, LinkPolicy, Pipeline, open_pipeline_on
from dgr.artifact.pace import HopSpeed, RoutePace
from dgr.artifact.speeds import HostSpeed, layer_kinds
from dgr.cluster.connect import RemoteConnector
from dgr.cluster.doctor import examine
from dgr.cluster.route_file import RouteFile
from dgr.core.route import parse_split
from dgr.engine.budget import available_cpus
from dgr.engine.speeds import SpeedPlan, measure_speed
from dgr.errors import InputError
from dgr.selftest.chain import cut_at
from dgr.testing.network.processes import open_up, write_route
from dgr.testing.network.proxy import open_proxies
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.overhead.sessions import drawn_seconds
from dgr_bench.plots import BLUE, GREY, RED, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import add_model_argument, model_of, whole_model
from dgr_bench.timed import decode_seconds, prefill_seconds
from dgr_bench.verdicts import Check, judge

#: Figures of a route, and what they are of; seconds that are predicted, and measured.
FIGURES = {"one": "one session", "many": "all sessions", "first_token": "first token"}
#: How far a measured median may be from its prediction, as a share of it; and from the fastest cut's, of the cut predicted so.
_OFF, _SLOWER = 0.25, 0.05


class PredictionsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is predicted and measured."""

    name: str
    #: Layer ranges of the two stages, each way.
    splits: tuple[str, ...]
    #: Of every cable, each way.
    delays_ms: tuple[float, ...]
    #: Sessions at once, and their tokens together.
    sessions: int
    tokens: int
    #: Tokens of a prompt, and of its chunks.
    prompt: int
    chunk: int
    rounds: int
    #: Whether anything is asked of the figures.
    judged: bool

    @property
    def context(self) -> ContextParams:
        """Of every stage."""
        n_ctx = max(self.tokens, self.prompt) + 64
        return ContextParams(n_ctx=n_ctx, n_batch=self.chunk, n_ubatch=self.chunk, n_seq_max=self.sessions)

    def routes(self) -> list[tuple[str, float]]:
        """Every cut with every delay."""
        return list(itertools.product(self.splits, self.delays_ms))


# --- measuring -------------------------------------------------------------------------------------------------------


async def _speed(model: Path, plan: PredictionsPlan, _: object) -> Any:
    sequences = tuple(2**power for power in range(plan.sessions.bit_length()))
    wanted = SpeedPlan(sequences=sequences, depth=max(1, plan.tokens // 2))
    measured = partial(measure_speed, Artifact.open(model), plan.context, wanted)
    return msgspec.to_builtins(await trio.to_thread.run_sync(measured))


@asynccontextmanager
async def _over_cables(
    model: Path, plan: PredictionsPlan, split: str, delay_ms: float
) -> AsyncIterator[tuple[Pipeline, RouteFile]]:
    """Two stage processes, every cable of which takes a while."""
    context = msgspec.structs.asdict(plan.context) | {"numerics": plan.context.numerics.value}
    with tempfile.TemporaryDirectory() as folder:
        file = write_route(Path(folder) / "route.toml", model, split.split(","), **context)
        async with open_up(file), open_proxies(file.route) as (route, cables):
            for cable in cables:
                cable.delay = delay_ms / 1e3
            async with open_pipeline_on(RemoteConnector(LinkPolicy()), route, chunk=plan.chunk) as pipeline:
                await decode_seconds(pipeline, 4)
                yield pipeline, evolve(file, route=route)


async def _cables(opened: tuple[Pipeline, RouteFile]) -> dict[str, Any]:
    report = await examine(opened[1], LinkPolicy())
    return {
        "round_trips": [stage.round_trip for stage in report.stages],
        "bandwidths": [stage.bandwidth for stage in report.stages],
    }


async def _round(plan: PredictionsPlan, opened: tuple[Pipeline, RouteFile]) -> dict[str, Any]:
    pipeline, _ = opened
    return {
        "one_s": await decode_seconds(pipeline, plan.tokens),
        "many_s": await drawn_seconds(pipeline, plan.sessions, plan.tokens),
        "first_token_s": await prefill_seconds(pipeline, plan.prompt),
    }


# --- predicting ------------------------------------------------------------------------------------------------------


def predicted(
    plan: PredictionsPlan,
    kinds: tuple[str, ...],
    boundary: int,
    speed: Mapping[str, Any],
    cables: Mapping[str, Any],
    split: str,
) -> dict[str, float]:
    """Seconds of each figure, from what was measured of the host and of the cables."""
    trips, rates = cables["round_trips"], cables["bandwidths"]
    # From the client to the head; to each next stage, through the cable before it; and from the tail back to the client.
    hops = [HopSpeed(trip, rate) for trip, rate in [*zip(trips, rates, strict=True), (trips[-1], rates[-1])]]
    cuts = parse_split(split, len(kinds))
    route = RoutePace([msgspec.convert(speed, HostSpeed)] * len(cuts), hops, kinds, boundary)
    return {
        "one": plan.tokens * route.ring(cuts),
        "many": plan.tokens / route.rate(cuts, plan.sessions),
        "first_token": route.first_token(cuts, plan.prompt, plan.chunk),
    }


# --- the benchmark ---------------------------------------------------------------------------------------------------


def _name(split: str, delay_ms: float) -> str:
    return f"{split}, {delay_ms:g} ms"


@frozen
class Predictions:
    """The benchmark."""

    model: Path
    plan: PredictionsPlan
    kinds: tuple[str, ...]
    boundary: int
    about: dict[str, Any]
    kind: ClassVar[Kind] = "plan"
    title: ClassVar[str] = "Predictions of routes"

    def subject(self) -> dict[str, Any]:
        return self.about

    def units(self, _: Store) -> Iterator[Group]:
        yield Group([Unit("speed", partial(_speed, self.model, self.plan), weight=4.0)])
        for split, delay in self.plan.routes():
            name = _name(split, delay)
            units = [Unit(f"{name}, round {number}", partial(_round, self.plan)) for number in range(self.plan.rounds)]
            yield Group(
                [Unit(f"{name}, cables", _cables), *units], partial(_over_cables, self.model, self.plan, split, delay)
            )

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """By route and figure: seconds predicted and measured, and the first over the others."""
        found: dict[str, Any] = {}
        for split, delay in self.plan.routes():
            name = _name(split, delay)
            speed, cables = units.get("speed", {}), units.get(f"{name}, cables", {})
            rounds = [units.get(f"{name}, round {number}", {}) for number in range(self.plan.rounds)]
            rounds = [unit for unit in rounds if "one_s" in unit]
            if not rounds or "decode" not in speed or "round_trips" not in cables:
                continue
            seconds = predicted(self.plan, self.kinds, self.boundary, speed, cables, split)
            found[name] = {
                figure: {
                    "predicted_s": seconds[figure],
                    "measured_s": quartiles_of([unit[f"{figure}_s"] for unit in rounds]),
                    "ratio": quartiles_of([seconds[figure] / unit[f"{figure}_s"] for unit in rounds]),
                }
                for figure in FIGURES
            }
        return found

    def checks(self, units: Units) -> list[Check]:
        """Predictions are near, and the cut that is predicted to be the fastest is."""
        metrics = self.metrics(units)
        found = [no_error(units, "unit")]
        if self.plan.judged:
            found += [self._near(figure, metrics) for figure in FIGURES]
            found += [self._fastest(figure, metrics) for figure in FIGURES]
        return found

    def _near(self, figure: str, metrics: Mapping[str, Any]) -> Check:
        faults = []
        for name, row in metrics.items():
            ratio = msgspec.convert(row[figure]["ratio"], Quartiles).median
            far = not 1 - _OFF <= ratio <= 1 + _OFF
            faults.append((name, f"predicted {ratio:.2f} of what was measured" if far else ""))
        return judge(f"prediction of {FIGURES[figure]}", f"within {_OFF:.0%} of the measured median", faults)

    def _fastest(self, figure: str, metrics: Mapping[str, Any]) -> Check:
        faults = []
        for delay in self.plan.delays_ms:
            rows = {
                split: metrics[_name(split, delay)][figure]
                for split in self.plan.splits
                if _name(split, delay) in metrics
            }
            if not rows:
                continue
            took = {split: msgspec.convert(row["measured_s"], Quartiles).median for split, row in rows.items()}
            chosen = min(rows, key=lambda split: rows[split]["predicted_s"])
            best = min(took, key=took.__getitem__)
            slow = took[chosen] > took[best] * (1 + _SLOWER)
            faults.append(
                (f"{delay:g} ms", f"{chosen} took {took[chosen]:.3f} s, {best} {took[best]:.3f} s" if slow else "")
            )
        what = f"the cut predicted to be the fastest is, within {_SLOWER:.0%}"
        return judge(f"choice by {FIGURES[figure]}", what, faults)

    def tables(self, result: Result) -> list[Section]:
        heads = ("route", "figure", "predicted", "measured", "predicted / measured")
        rows = []
        for name, row in result.metrics.items():
            for figure, words in FIGURES.items():
                seconds, measured = row[figure]["predicted_s"], msgspec.convert(row[figure]["measured_s"], Quartiles)
                ratio = msgspec.convert(row[figure]["ratio"], Quartiles)
                if figure == "first_token":
                    shown = f"{seconds:.3f} s", f"{measured.median:.3f} s"
                else:
                    shown = (
                        f"{self.plan.tokens / seconds:.1f} tokens/s",
                        f"{self.plan.tokens / measured.median:.1f} tokens/s",
                    )
                rows.append((name, words, *shown, ratio))
        said = (
            f"Two stages of one thread; {self.plan.sessions} sessions together; a prompt of {self.plan.prompt} tokens in chunks"
            f" of {self.plan.chunk}. Ratios are of seconds, quartiles in brackets: below 1 a route was slower than predicted."
        )
        return [Section("Predicted and measured", (said, table(heads, rows)))]

    def plots(self, result: Result) -> list[Plot]:
        rows = [
            (f"{name}\n{words}", row[figure]["ratio"])
            for name, row in result.metrics.items()
            for figure, words in FIGURES.items()
        ]

        def paint(axes: Axes) -> None:
            for place, (_, raw) in enumerate(reversed(rows)):
                ratio = msgspec.convert(raw, Quartiles)
                errors = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
                axes.barh(place, ratio.median, 0.6, color=BLUE, xerr=errors, ecolor=GREY, capsize=4)
            axes.axvline(1.0, color=RED, linestyle="--")
            axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])

        return [
            Plot("Predicted and measured", "predictions", "Predicted seconds over measured ones", "ratio", "", paint)
        ]


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)


def _predictions(args: argparse.Namespace) -> Predictions:
    cpus = available_cpus()
    if cpus < 2:
        raise InputError(f"this process may use {cpus} CPU; two stage processes of one thread each need 2")
    model = model_of(args)
    artifact = whole_model(model)
    n_layers = artifact.hp.n_layers
    cuts = [n_layers // 2] if args.quick else [n_layers // 4, n_layers // 2, 3 * n_layers // 4]
    plan = PredictionsPlan(
        name="plan, quick" if args.quick else "plan",
        splits=tuple(",".join(str(layers) for layers in cut_at(n_layers, [cut])) for cut in cuts),
        delays_ms=(2,) if args.quick else (0, 20),
        sessions=2 if args.quick else 4,
        tokens=16 if args.quick else 64,
        prompt=64 if args.quick else 512,
        chunk=32 if args.quick else 128,
        rounds=1 if args.quick else 3,
        judged=not args.quick,
    )
    about = {"model": model.name, "artifact": artifact.identity}
    return Predictions(model, plan, layer_kinds(artifact), 4 * artifact.hp.boundary_width, about)


_HELP = "what dgr plan predicts of routes with several cuts and delays, against what they do"
COMMAND = benchmark_command("plan", _HELP, __doc__ or "", _add_arguments, _predictions)
