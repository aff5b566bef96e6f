"""``dgr-bench drill``: stages are killed, cut off, frozen and slowed down; the text must go on as if nothing had been.

Every case has stage processes of its own (``dgr up`` on loopback, one thread each) and a cable before each stage. An act
(``kill``: SIGKILL; ``cut``: a TCP reset of what the cable carries; ``stall``: SIGSTOP until the loss is noticed; ``slow``: a
delay in the cable) strikes one stage at one moment (while the prompt is prefilled; while the token after the first, or
after the n-th, is under way; as that token is cancelled, and another turn follows; twice, the second time while the loss
is being made good). ``slow`` also measures the time per token over a delayed ring (:mod:`dgr_bench.drill.ring`).

Units:

``undisturbed``
    ``answer`` and ``next_answer``: token ids of the whole model in this process.
``ACT/STAGE/MOMENT``
    :class:`dgr_bench.drill.fault_injection.Outcome`.
``ring/N``
    :class:`dgr_bench.drill.ring.RingRound`.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from dgr import Artifact
from dgr.errors import InputError
from dgr.model.route import parse_split
from dgr.testing.chain import cut_at
from dgr.testing.models import cached_fixture
from dgr_bench.drill import report as drill_report
from dgr_bench.drill.fault_injection import (
    FAULTS,
    HEARTBEAT,
    MOMENTS,
    DrillCase,
    Fault,
    Leftovers,
    Outcome,
    Scenario,
    run_case,
    undisturbed,
)
from dgr_bench.drill.ring import Delays, RingPoint, RingRound, points_of, run_round
from dgr_bench.options import add_run_arguments, exit_code, say
from dgr_bench.progress import Progress
from dgr_bench.results import Check, Journal, median

__all__ = ["DrillPlan", "checks", "metrics", "plan", "register", "run"]

#: Seconds within which a loss is told: a connection that ends tells at once; silence is told after three heartbeats.
_TOLD_AT_ONCE = 1.0
_TOLD_LATE = 1.0
#: Share by which time per token may differ from what a slow cable adds, over the few tokens of the cases.
_SLOWNESS = 0.25
#: Share by which a delayed ring may be slower than compute and delays.
RING_GOAL = 0.05


class DrillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run."""

    name: str
    scenario: Scenario = msgspec.field(name="setting")
    cases: tuple[DrillCase, ...]
    #: None: the ring is not measured.
    ring: Delays | None = None


def plan(scenario: Scenario, acts: Sequence[Fault] = FAULTS, quick: bool = False) -> DrillPlan:
    """Every act on every stage at every moment; when quick, every act on every stage, the moments taking turns."""
    stages = range(len(scenario.split))
    every = [(act, stage, moment) for act in acts for stage in stages for moment in MOMENTS]
    if quick:
        every = [(act, stage, MOMENTS[(at + stage) % len(MOMENTS)]) for at, act in enumerate(acts) for stage in stages]
    ring = None
    if "slow" in acts:
        ring = Delays(delays_ms=(0, 10, 40), turns=4, rounds=1) if quick else Delays()
    return DrillPlan(
        name="drill, quick" if quick else "drill",
        scenario=scenario,
        cases=tuple(DrillCase(fault=act, stage=stage, moment=moment) for act, stage, moment in every),
        ring=ring,
    )


# --- metrics and verdicts --------------------------------------------------------------------------------------------


def outcomes(locked: DrillPlan, units: Mapping[str, Any]) -> Iterator[tuple[DrillCase, Outcome]]:
    """The cases that were run."""
    for case in locked.cases:
        if (unit := units.get(case.name(locked.scenario))) is not None:
            yield case, msgspec.convert(unit, Outcome)


def points(locked: DrillPlan, units: Mapping[str, Any]) -> list[RingPoint]:
    """The delayed ring."""
    rounds = [msgspec.convert(unit, RingRound) for name, unit in units.items() if name.startswith("ring/")]
    return [] if locked.ring is None else points_of(rounds, locked.ring, len(locked.scenario.split))


def metrics(locked: DrillPlan, units: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds until a loss was told and until the next token came, and time per token over slow cables."""
    scenario, found = locked.scenario, list(outcomes(locked, units))
    losses: dict[str, dict[str, list[float]]] = {}
    slow: dict[str, dict[str, Any]] = {}
    for case, outcome in found:
        name = f"{case.fault}/{scenario.stage_name(case.stage)}"
        if case.fault == "slow":
            times = slow.setdefault(name, {"added_ms": added_ms(scenario, case.stage), "usual_ms": [], "slow_ms": []})
            times["usual_ms"] += [1e3 * seconds for seconds in outcome.usual]
            times["slow_ms"] += [1e3 * seconds for seconds in outcome.slow]
        else:
            times = losses.setdefault(name, {"detected_ms": [], "recovered_ms": []})
            times["detected_ms"] += [1e3 * one.detected for one in outcome.injections if one.detected is not None]
            times["recovered_ms"] += [1e3 * one.recovered for one in outcome.injections if one.recovered is not None]
    return {
        "cases": len(found),
        "losses": {
            name: {what: {"median": median(ms), "worst": max(ms)} for what, ms in times.items() if ms}
            for name, times in losses.items()
        },
        "slow": {
            name: {**times, "usual_ms": median(times["usual_ms"]), "slow_ms": median(times["slow_ms"])}
            for name, times in slow.items()
        },
        "ring": [
            {**msgspec.to_builtins(point), "over": point.over, "over_rested": point.over_rested}
            for point in points(locked, units)
        ],
    }


def added_ms(scenario: Scenario, stage: int) -> float:
    """Milliseconds that a token takes longer over that stage's slow cable: the tail's carries it there and back."""
    return scenario.delay_ms * (2 if stage == len(scenario.split) - 1 else 1)


def checks(locked: DrillPlan, units: Mapping[str, Any]) -> list[Check]:
    """The verdicts on all units."""
    scenario, found = locked.scenario, list(outcomes(locked, units))
    right = units.get("undisturbed", {"answer": [], "next_answer": []})
    lost = [(case, outcome) for case, outcome in found if case.fault != "slow"]
    kept = [(case, outcome) for case, outcome in found if case.fault == "slow"]
    verdict = partial(_check, scenario)
    result = [
        _telling(right),
        verdict("every case ends with its answer", found, lambda _, outcome: outcome.error),
        verdict("faults strike at their moment", found, partial(_struck_in_time, scenario)),
        verdict("text is the undisturbed one", found, partial(_text, scenario, right)),
        verdict("losses are reported in time", lost, partial(_reported, scenario)),
        verdict("what is lost is re-prefilled whole, and once", lost, partial(_reprefilled, scenario)),
        verdict("a slow cable loses no session", kept, lambda _, outcome: _kept(outcome)),
        *_slowness(locked, units),
        _nothing_left(units),
        *_ring(locked, units),
    ]
    return [check for check in result if check is not None]


def _check(
    scenario: Scenario, name: str, found: list[tuple[DrillCase, Outcome]], wrong: Callable[[DrillCase, Outcome], str]
) -> Check | None:
    """A verdict over cases; ``wrong`` says what is wrong with one. None: the plan has no such case."""
    faults = [(case.name(scenario), fault) for case, outcome in found if (fault := wrong(case, outcome))]
    detail = f"{len(faults)} cases fail; {faults[0][0]}: {faults[0][1]}" if faults else "in every case"
    return Check(name=name, passed=not faults, cases=len(found), detail=detail) if found else None


def _telling(right: Mapping[str, list[int]]) -> Check:
    kinds = len({*right["answer"]})
    detail = f"{kinds} different token ids among {len(right['answer'])}; a text of one would tell nothing"
    return Check(name="undisturbed text tells", passed=kinds >= 4, cases=1, detail=detail)


def _struck_in_time(scenario: Scenario, case: DrillCase, outcome: Outcome) -> str:
    received, end = case.received(scenario), scenario.prompt + case.received(scenario)
    times = 2 if case.moment == "twice" else 1
    if len(outcome.injections) != times:
        return f"{len(outcome.injections)} injections, not {times}"
    first, last = outcome.injections[0], outcome.injections[-1]
    if first.received != received:
        return f"after {first.received} tokens of the answer, not {received}"
    if case.moment == "prefill" and not 0 < first.committed < end:
        return f"with {first.committed} tokens committed, not amid the {end} of the prompt"
    if case.moment != "prefill" and first.committed != end - 1:
        return f"with {first.committed} tokens committed, not {end - 1}"
    if times == 2 and case.fault != "slow" and not 0 < last.committed < end:
        return f"the second time with {last.committed} tokens committed, not amid the {end} that are re-prefilled"
    return ""


def _text(scenario: Scenario, right: Mapping[str, list[int]], case: DrillCase, outcome: Outcome) -> str:
    is_cancelled = case.moment == "cancel"
    answer = right["answer"][: scenario.late] if is_cancelled else right["answer"]
    following = right["next_answer"] if is_cancelled else []
    for which, has, wants in (("answer", outcome.answer, answer), ("next answer", outcome.next_answer, following)):
        if has != wants:
            at = next((at for at, pair in enumerate(zip(has, wants, strict=False)) if pair[0] != pair[1]), None)
            where = (
                f"of {len(has)} tokens, not {len(wants)}" if at is None else f"token {at} is {has[at]}, not {wants[at]}"
            )
            return f"{which}: {where}"
    return ""


def _reported(scenario: Scenario, case: DrillCase, outcome: Outcome) -> str:
    limit = 3 * scenario.heartbeat + _TOLD_LATE if case.fault == "stall" else _TOLD_AT_ONCE
    for injection in outcome.injections:
        if injection.detected is None or injection.detected > limit:
            after = "never" if injection.detected is None else f"after {injection.detected:.3f} s"
            return f"told {after}, not within {limit:g} s"
    return "" if outcome.injections else "nothing happened"


def _reprefilled(scenario: Scenario, case: DrillCase, outcome: Outcome) -> str:
    tokens = scenario.prompt + case.received(scenario) + (scenario.next_prompt if case.moment == "cancel" else 0)
    return "" if outcome.reprefilled == [tokens] else f"{outcome.reprefilled} tokens re-prefilled, not [{tokens}]"


def _kept(outcome: Outcome) -> str:
    if outcome.losses or outcome.reprefilled:
        return f"{outcome.losses} losses, {outcome.reprefilled} tokens re-prefilled"
    return ""


def _nothing_left(units: Mapping[str, Any]) -> Check:
    left = {name: msgspec.convert(unit["remains"], Leftovers) for name, unit in units.items() if "remains" in unit}
    faults = [f"{name}: {fault}" for name, leftovers in left.items() if (fault := _left(leftovers))]
    seen = sum(leftovers.seen for leftovers in left.values())
    detail = faults[0] if faults else f"{seen} stage processes are gone, and no session was held after its close"
    return Check(name="nothing is left", passed=not faults, cases=len(left), detail=detail)


def _left(leftovers: Leftovers) -> str:
    if leftovers.processes:
        return f"of {leftovers.seen} stage processes {leftovers.processes} were not gone when dgr up had ended"
    if leftovers.sessions or leftovers.bytes:
        return f"stages held {leftovers.bytes} bytes for {leftovers.sessions} sessions after the last was closed"
    if leftovers.exit_code != 0 or not leftovers.seen:
        return f"dgr up ended with {leftovers.exit_code}, {leftovers.seen} stage processes seen"
    return ""


def _slowness(locked: DrillPlan, units: Mapping[str, Any]) -> list[Check]:
    rows = metrics(locked, units)["slow"]
    faults, details = [], []
    for name, times in rows.items():
        more, added = times["slow_ms"] - times["usual_ms"], times["added_ms"]
        text = f"{name} {more:.1f} ms for {added:g} ms added"
        details.append(text)
        if not abs(more - added) <= _SLOWNESS * added:
            faults.append(text)
    if not rows:
        return []
    name = f"time per token grows by what a cable adds, ± {_SLOWNESS:.0%}"
    return [Check(name=name, passed=not faults, cases=len(rows), detail="; ".join(faults or details))]


def _ring(locked: DrillPlan, units: Mapping[str, Any]) -> list[Check]:
    if locked.ring is None:
        return []
    errors = [unit["error"] for name, unit in units.items() if name.startswith("ring/") and unit["error"]]
    found = points(locked, units)
    delayed = [point for point in found if point.delay_ms]
    wrong = [point for point in delayed if not point.over_rested <= RING_GOAL]
    at = ", ".join(f"{point.delay_ms:g} ms {point.over_rested:+.1%} ({point.over:+.1%})" for point in wrong or delayed)
    return [
        Check(
            name=f"a delayed ring takes compute + delays + {RING_GOAL:.0%} at most",
            passed=not wrong and not errors and len(found) == len(locked.ring.delays_ms),
            cases=len(delayed),
            detail=errors[0] if errors else f"over compute after as much idleness + delays (without idleness): {at}",
        )
    ]


# --- the command -----------------------------------------------------------------------------------------------------


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "drill",
        help="kill, cut off, freeze and slow down stages",
        description="Disturb a pipeline over stage processes on this machine, one act at a time, and check that the text"
        " is the undisturbed one, that every loss is told and made good, and that nothing is left.",
    )
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: a fixture of 43 layers, of 7 with --quick")
    parser.add_argument("--split", metavar="A:B,…", help="layer ranges of the stages (default: three even ones)")
    parser.add_argument("--acts", default=",".join(FAULTS), metavar="ACT,…", help="which acts (default: %(default)s)")
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=HEARTBEAT,
        metavar="S",
        help="seconds after which an idle link shows a sign of life; three make silence a loss (default: %(default)s)",
    )
    add_run_arguments(parser, "dgr-bench-drill")
    parser.set_defaults(run=run)


def _acts(text: str) -> list[Fault]:
    names = text.split(",")
    for name in names:
        if name not in FAULTS:
            raise InputError(f"--acts names {name!r}; an act is one of {', '.join(FAULTS)}")
    return [act for act in FAULTS if act in names]


def run(args: argparse.Namespace) -> int:
    acts = _acts(args.acts)
    if not 0.05 <= args.heartbeat <= 10:
        raise InputError(
            f"--heartbeat is {args.heartbeat:g} s; give 0.05 to 10, as a loss is awaited for three of them"
        )
    model = args.model or (cached_fixture(layers=7) if args.quick else cached_fixture("mixed"))
    artifact = Artifact.open(model)
    n_layers = artifact.hp.n_layers
    if args.split is None:
        ranges = cut_at(n_layers, sorted({n_layers // 3, 2 * n_layers // 3} - {0}))
    else:
        ranges = parse_split(args.split, n_layers)
    split = tuple(map(str, ranges))
    locked = plan(Scenario(split=split, n_vocab=artifact.hp.n_vocab, heartbeat=args.heartbeat), acts, args.quick)
    subject = {"artifact": artifact.identity, "model": model.name, "split": ",".join(split)}
    journal = Journal.open(args.out, "drill", msgspec.to_builtins(locked), subject, args.command_line, fresh=args.fresh)
    measure(journal, locked, model)
    units = journal.result.units
    result = journal.finish(metrics(locked, units), checks(locked, units))
    drill_report.write(result, journal.folder, list(outcomes(locked, units)), points(locked, units), locked.scenario)
    say(result, journal.folder, args.json)
    return exit_code(result)


def measure(journal: Journal, locked: DrillPlan, model: Path) -> None:
    """Measure the units of a plan that are missing in the journal."""
    work: dict[str, Callable[[], Awaitable[Any]]] = {"undisturbed": partial(_undisturbed, model, locked.scenario)}
    for case in locked.cases:
        work[case.name(locked.scenario)] = partial(run_case, case, model, locked.scenario)
    if locked.ring is not None:
        for number in range(locked.ring.rounds):
            work[f"ring/{number}"] = partial(run_round, model, locked.scenario, locked.ring, number)
    with Progress("drill", len(work)) as progress:
        for name, one in work.items():
            progress.begin(name)
            if journal.get(name) is None:
                journal.put(name, trio.run(one))
            progress.done()


async def _undisturbed(model: Path, scenario: Scenario) -> dict[str, list[int]]:
    answer, next_answer = await undisturbed(model, scenario)
    return {"answer": answer, "next_answer": next_answer}
