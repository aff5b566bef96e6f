"""What ``dgr-bench drill`` makes of its units: times of losses and of slow cables, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from dgr_bench.benchmark import Units
from dgr_bench.drill.fault_injection import FAULTS, MOMENTS, DrillCase, Fault, Leftovers, Outcome, Scenario
from dgr_bench.drill.ring import Delays, RingPoint, RingRound, points_of
from dgr_bench.quartiles import median
from dgr_bench.verdicts import Check, answers_tell, first_difference, judge

#: Seconds within which a loss is reported: an end of a connection at once; silence is reported after three heartbeats.
_REPORTED_AT_ONCE = 1.0
_REPORTED_LATE = 1.0
#: Share by which time per token may differ from what a slow cable adds, over the few tokens of the cases.
_SLOWNESS = 0.25
#: Share by which a delayed ring may be slower than compute and delays.
RING_GOAL = 0.05

Found: TypeAlias = list[tuple[DrillCase, Outcome]]


class DrillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run."""

    name: str
    scenario: Scenario = msgspec.field(name="setting")
    cases: tuple[DrillCase, ...]
    #: None: the ring is not measured.
    ring: Delays | None = None


def plan(scenario: Scenario, faults: Sequence[Fault] = FAULTS, quick: bool = False) -> DrillPlan:
    """Every fault on every stage at every moment; when quick, every fault on every stage, the moments taking turns."""
    stages = range(len(scenario.split))
    every = [(fault, stage, moment) for fault in faults for stage in stages for moment in MOMENTS]
    if quick:
        turns = len(MOMENTS)
        every = [(fault, stage, MOMENTS[(at + stage) % turns]) for at, fault in enumerate(faults) for stage in stages]
    ring = None
    if "slow" in faults:
        ring = Delays(delays_ms=(0, 10, 40), turns=4, rounds=1) if quick else Delays()
    return DrillPlan(
        name="drill, quick" if quick else "drill",
        scenario=scenario,
        cases=tuple(DrillCase(fault=fault, stage=stage, moment=moment) for fault, stage, moment in every),
        ring=ring,
    )


def outcomes(plan: DrillPlan, units: Units) -> Found:
    """The cases that were run."""
    names = {case.name(plan.scenario): case for case in plan.cases}
    return [(case, msgspec.convert(units[name], Outcome)) for name, case in names.items() if name in units]


def points(plan: DrillPlan, units: Units) -> list[RingPoint]:
    """The delayed ring."""
    rounds = [msgspec.convert(unit, RingRound) for name, unit in units.items() if name.startswith("ring/")]
    return [] if plan.ring is None else points_of(rounds, plan.ring, len(plan.scenario.split))


def metrics(plan: DrillPlan, units: Units) -> dict[str, Any]:
    """Milliseconds until a loss was reported and until the next token came, and time per token over slow cables."""
    scenario, found = plan.scenario, outcomes(plan, units)
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
            for point in points(plan, units)
        ],
    }


def added_ms(scenario: Scenario, stage: int) -> float:
    """Milliseconds that a token takes longer over that stage's slow cable: the tail's carries it there and back."""
    return scenario.delay_ms * (2 if stage == len(scenario.split) - 1 else 1)


# --- verdicts --------------------------------------------------------------------------------------------------------


def checks(plan: DrillPlan, units: Units) -> list[Check]:
    """The verdicts on all units."""
    scenario, found = plan.scenario, outcomes(plan, units)
    right = {"answer": [], "next_answer": [], **units.get("undisturbed", {})}
    lost = [(case, outcome) for case, outcome in found if case.fault != "slow"]
    kept = [(case, outcome) for case, outcome in found if case.fault == "slow"]

    def verdict(name: str, cases: Found, fault: Callable[[DrillCase, Outcome], str]) -> Iterator[Check]:
        if cases:  # the plan may have none such
            faults = ((case.name(scenario), fault(case, outcome)) for case, outcome in cases)
            yield judge(name, "in every case", faults)

    return [
        answers_tell({"undisturbed": right["answer"]}),
        *verdict("every case ends with its answer", found, lambda _, outcome: outcome.error),
        *verdict("faults strike at their moment", found, partial(_struck_in_time, scenario)),
        *verdict("text is the undisturbed one", found, partial(_text, scenario, right)),
        *verdict("losses are reported in time", lost, partial(_reported, scenario)),
        *verdict("what is lost is re-prefilled whole, and once", lost, partial(_reprefilled, scenario)),
        *verdict("a slow cable loses no session", kept, _kept),
        *_slowness(plan, units),
        _nothing_left(units),
        *_ring(plan, units),
    ]


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
        if different := first_difference(has, wants):
            return f"{which}: {different}"
    return ""


def _reported(scenario: Scenario, case: DrillCase, outcome: Outcome) -> str:
    limit = 3 * scenario.heartbeat + _REPORTED_LATE if case.fault == "stall" else _REPORTED_AT_ONCE
    for injection in outcome.injections:
        if injection.detected is None or injection.detected > limit:
            after = "never" if injection.detected is None else f"after {injection.detected:.3f} s"
            return f"reported {after}, not within {limit:g} s"
    return "" if outcome.injections else "nothing happened"


def _reprefilled(scenario: Scenario, case: DrillCase, outcome: Outcome) -> str:
    tokens = scenario.prompt + case.received(scenario) + (scenario.next_prompt if case.moment == "cancel" else 0)
    return "" if outcome.reprefilled == [tokens] else f"{outcome.reprefilled} tokens re-prefilled, not [{tokens}]"


def _kept(_: DrillCase, outcome: Outcome) -> str:
    lost = outcome.losses or outcome.reprefilled
    return f"{outcome.losses} losses, {outcome.reprefilled} tokens re-prefilled" if lost else ""


def _nothing_left(units: Units) -> Check:
    left = {name: msgspec.convert(unit["remains"], Leftovers) for name, unit in units.items() if "remains" in unit}
    seen = sum(leftovers.seen for leftovers in left.values())
    what = f"{seen} stage processes are gone, and no session was held after its close"
    return judge("nothing is left", what, ((name, _left(leftovers)) for name, leftovers in left.items()))


def _left(leftovers: Leftovers) -> str:
    if leftovers.processes:
        return f"of {leftovers.seen} stage processes {leftovers.processes} were not gone when dgr up had ended"
    if leftovers.sessions or leftovers.bytes:
        return f"stages held {leftovers.bytes} bytes for {leftovers.sessions} sessions after the last was closed"
    if leftovers.exit_code != 0 or not leftovers.seen:
        return f"dgr up ended with {leftovers.exit_code}, {leftovers.seen} stage processes seen"
    return ""


def _slowness(plan: DrillPlan, units: Units) -> Iterator[Check]:
    faults, details = [], []
    for name, times in metrics(plan, units)["slow"].items():
        more, added = times["slow_ms"] - times["usual_ms"], times["added_ms"]
        text = f"{more:.1f} ms for {added:g} ms added"
        details.append(f"{name} {text}")
        faults.append((name, "" if abs(more - added) <= _SLOWNESS * added else text))
    if faults:
        yield judge(f"time per token grows by what a cable adds, ± {_SLOWNESS:.0%}", "; ".join(details), faults)


def _ring(plan: DrillPlan, units: Units) -> Iterator[Check]:
    if plan.ring is None:
        return
    errors = [(name, unit["error"]) for name, unit in units.items() if name.startswith("ring/") and unit["error"]]
    found = {point.delay_ms: point for point in points(plan, units)}
    texts = {ms: f"{point.over_rested:+.1%} ({point.over:+.1%})" for ms, point in found.items() if ms}
    wrong = {ms: "not measured" for ms in plan.ring.delays_ms if ms not in found}
    wrong |= {ms: text for ms, text in texts.items() if not found[ms].over_rested <= RING_GOAL}
    at = ", ".join(f"{ms:g} ms {text}" for ms, text in texts.items())
    yield judge(
        f"a delayed ring takes compute + delays + {RING_GOAL:.0%} at most",
        f"over compute after as much idleness + delays (without idleness): {at}",
        [*errors, *((f"{ms:g} ms", wrong.get(ms, "")) for ms in plan.ring.delays_ms if ms or ms in wrong)],
    )
