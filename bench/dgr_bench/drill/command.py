"""``dgr-bench drill``: stages are killed, cut off, frozen and slowed down; the text must go on as if nothing had been.

Every case has stage processes of its own (``dgr up`` on loopback, one thread each) and a cable before each stage. A fault
(``kill``: SIGKILL; ``cut``: a TCP reset of what the cable carries; ``stall``: SIGSTOP until the loss is noticed; ``slow``: a
delay in the cable) strikes one stage at one moment (while the prompt is prefilled; while the token after the first, or
after the n-th, is under way; as that token is cancelled, and another turn follows; twice, the second time while the loss
is being made good). ``slow`` also measures the time per token over a delayed ring (:mod:`dgr_bench.drill.ring`).

Units:

``undisturbed``
    ``answer`` and ``next_answer``: token ids of the whole model in this process.
``FAULT/STAGE/MOMENT``
    :class:`dgr_bench.drill.fault_injection.Outcome`.
``ring/N``
    :class:`dgr_bench.drill.ring.RingRound`.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from dgr.errors import InputError
from dgr.selftest.fixture.cached import cached_fixture
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command
from dgr_bench.drill import report
from dgr_bench.drill.fault_injection import FAULTS, HEARTBEAT, Fault, Scenario, run_case, undisturbed
from dgr_bench.drill.metrics import DrillPlan, checks, metrics, outcomes, plan, points
from dgr_bench.drill.ring import run_round
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import asked_split, whole_model
from dgr_bench.verdicts import Check


@frozen
class Drill:
    """The benchmark."""

    plan: DrillPlan
    model: Path
    artifact: str
    kind: ClassVar[Kind] = "drill"
    title: ClassVar[str] = "Drill"

    def subject(self) -> dict[str, Any]:
        return {"artifact": self.artifact, "model": self.model.name, "split": ",".join(self.plan.scenario.split)}

    def units(self, _: Store) -> Iterator[Group]:
        plan, model, scenario = self.plan, self.model, self.plan.scenario

        def unit(name: str, one: Callable[[], Awaitable[Any]], is_finding: bool = True) -> Unit:
            return Unit(name, lambda _opened: one(), error_is_finding=is_finding)

        yield Group([unit("undisturbed", partial(undisturbed, model, scenario), is_finding=False)])
        yield Group([unit(case.name(scenario), partial(run_case, case, model, scenario)) for case in plan.cases])
        if (ring := plan.ring) is not None:
            rounds = range(ring.rounds)
            yield Group(
                [unit(f"ring/{number}", partial(run_round, model, scenario, ring, number)) for number in rounds]
            )

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return metrics(self.plan, units)

    def checks(self, units: Units) -> list[Check]:
        return checks(self.plan, units)

    def tables(self, result: Result) -> list[Section]:
        found = outcomes(self.plan, result.units)
        return report.tables(result, found, points(self.plan, result.units), self.plan.scenario)

    def plots(self, result: Result) -> list[Plot]:
        found = outcomes(self.plan, result.units)
        return report.plots(found, points(self.plan, result.units), self.plan.scenario)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: a fixture of 43 layers, of 7 with --quick")
    parser.add_argument("--split", metavar="A:B,…", help="layer ranges of the stages (default: three even ones)")
    parser.add_argument("--acts", default=",".join(FAULTS), metavar="ACT,…", help="which faults (default: %(default)s)")
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=HEARTBEAT,
        metavar="S",
        help="seconds after which an idle link shows a sign of life; three make silence a loss (default: %(default)s)",
    )


def _faults(text: str) -> list[Fault]:
    names = text.split(",")
    for name in names:
        if name not in FAULTS:
            raise InputError(f"--acts names {name!r}; an act is one of {', '.join(FAULTS)}")
    return [fault for fault in FAULTS if fault in names]


def _drill(args: argparse.Namespace) -> Drill:
    faults = _faults(args.acts)
    if not 0.05 <= args.heartbeat <= 10:
        raise InputError(
            f"--heartbeat is {args.heartbeat:g} s; give 0.05 to 10, as a loss is awaited for three of them"
        )
    model = args.model or (cached_fixture(layers=7) if args.quick else cached_fixture("mixed"))
    artifact = whole_model(model)
    split = tuple(map(str, asked_split(args.split, artifact.hp.n_layers)))
    scenario = Scenario(split=split, n_vocab=artifact.hp.n_vocab, heartbeat=args.heartbeat)
    return Drill(plan(scenario, faults, args.quick), model, artifact.identity)


COMMAND = benchmark_command(
    "drill",
    "kill, cut off, freeze and slow down stages",
    "Disturb a pipeline over stage processes on this machine, one fault at a time, and check that the text is the undisturbed"
    " one, that every loss is reported and made good, and that nothing is left.",
    _add_arguments,
    _drill,
)
