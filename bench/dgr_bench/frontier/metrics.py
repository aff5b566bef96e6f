"""What ``dgr-bench frontier`` makes of its units: speeds, lines of decode time over context, verdicts."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dgr import Numerics
from dgr_bench.benchmark import Units
from dgr_bench.quartiles import Line, Times, line_over, median, quartiles_of
from dgr_bench.verdicts import Check, Tally, answers_tell, first_difference, judge

#: Tells the machine's speed; results name it so.
BASELINE = "yardstick"
SUBJECTS = ("one", "whole", "split", BASELINE)
#: Tokens of the baseline's prompt.
_SHORT = 64
#: By this share the decode slope through one stage may differ from the whole model's.
GOAL = 0.03
#: Neighbouring tokens share the weather of the machine: the bootstrap draws blocks of so many.
_BLOCK = 8
_RESAMPLES = 1000


class FrontierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run."""

    name: str
    #: Tokens of the prompts, ascending.
    lengths: tuple[int, ...]
    #: Timed tokens after each prompt.
    decode: int
    #: Tokens of a prefill chunk, and of a native batch.
    chunk: int
    #: Layer ranges of the stages of ``split``.
    split: str
    #: Of :data:`SUBJECTS`; no ``split`` when that is one stage.
    subjects: tuple[str, ...] = SUBJECTS
    numerics: Numerics = Numerics.EXACT
    type_k: str = "f16"
    seed: int = 0
    #: See :data:`GOAL`; None: the slopes are shown, and nothing is asked of them.
    goal: float | None = GOAL
    #: Whether upstream's llama-bench is run too.
    upstream: bool = False

    def prompt(self, subject: str, length: int) -> int:
        """Tokens of a subject's prompt at a length."""
        return _SHORT if subject == BASELINE else length

    @property
    def compared(self) -> tuple[str, ...]:
        """Subjects that are held against the whole model."""
        return tuple(name for name in self.subjects if name not in ("whole", BASELINE))


class SubjectRun(msgspec.Struct, kw_only=True):
    """One subject at one length."""

    #: The token after the prompt, and those drawn in turns.
    tokens: list[int] = []
    #: From the prompt to the first token.
    first_token_s: float = 0.0
    #: From the end of the last chunk but one, in the engine of the last layers, to that of the last.
    last_chunk_s: float = 0.0
    #: Of each token drawn in turns.
    token_s: list[float] = []
    #: Tokens that each stage had committed at the end.
    positions: list[int] = []
    #: Reasons for which the session lost its state.
    lost: list[str] = []


class At(msgspec.Struct, kw_only=True):
    """All subjects at one length."""

    length: int
    #: By subject.
    runs: dict[str, SubjectRun] = {}
    #: Why the measurement ended early; empty when it did not.
    error: str = ""


class BesideUpstream(msgspec.Struct, kw_only=True):
    """A stage and llama-bench at one depth: seconds a token, of blocks of tokens."""

    length: int
    ours_s: list[float] = []
    theirs_s: list[float] = []
    error: str = ""


# --- lines -----------------------------------------------------------------------------------------------------------


def _ratio(ours: Line, theirs: Line) -> float:
    return ours.slope_ms / theirs.slope_ms if theirs.slope_ms else math.inf


def ratio_interval(ours: Times, theirs: Times, seed: int = 0) -> tuple[float, float]:
    """95 % of a block bootstrap of the ratio of both slopes; at each context both sides' tokens are drawn as pairs."""
    dice = random.Random(seed)
    ratios = []
    for _ in range(_RESAMPLES):
        drawn = {context: list(_blocks(dice, len(seconds))) for context, seconds in ours.items()}
        one, other = (
            line_over({context: [side[context][at] for at in places] for context, places in drawn.items()})
            for side in (ours, theirs)
        )
        ratios.append(_ratio(one, other))
    ends = statistics.quantiles(ratios, n=40, method="inclusive")
    return ends[0], ends[-1]


def _blocks(dice: random.Random, count: int) -> Iterator[int]:
    """As many places as there are, in blocks of neighbours; the last one's neighbour is the first."""
    for begin in range(0, count, _BLOCK):
        start = dice.randrange(count)
        for at in range(min(_BLOCK, count - begin)):
            yield (start + at) % count


# --- metrics ---------------------------------------------------------------------------------------------------------


def _measured(plan: FrontierPlan, units: Units) -> list[At]:
    """Lengths that were measured to their end."""
    found = (units.get(f"length/{length}") for length in plan.lengths)
    return [msgspec.convert(unit, At) for unit in found if unit is not None and not unit.get("error")]


def _beside(plan: FrontierPlan, units: Units) -> list[BesideUpstream]:
    found = (units.get(f"upstream/{length}") for length in plan.lengths)
    return [msgspec.convert(unit, BesideUpstream) for unit in found if unit is not None and not unit.get("error")]


def metrics(plan: FrontierPlan, units: Units) -> dict[str, Any]:
    """Everything that a report shows. Times are milliseconds; ratios are over the whole model's, pair by pair."""
    measured = _measured(plan, units)
    raw, steady = _raw(plan, measured), _steady(plan, measured)
    return {
        "lengths": [_length(plan, at, steady) for at in measured],
        "decode": {name: {**_growth(name, steady), "raw": _slope_of(name, raw)} for name in ("whole", *plan.compared)},
        "upstream": _upstream(_beside(plan, units)) if plan.upstream else None,
    }


def _raw(plan: FrontierPlan, measured: Sequence[At]) -> dict[str, Times]:
    """Times by subject, as they were measured."""
    return {name: {at.length: at.runs[name].token_s for at in measured} for name in plan.subjects}


def _steady(plan: FrontierPlan, measured: Sequence[At]) -> dict[str, Times]:
    """Times by subject on a machine of one speed: over the baseline's next to them, times the baseline's median."""
    usual = median([seconds for at in measured for seconds in at.runs[BASELINE].token_s])
    return {
        name: {
            at.length: [
                usual * seconds / now
                for seconds, now in zip(at.runs[name].token_s, at.runs[BASELINE].token_s, strict=True)
            ]
            for at in measured
        }
        for name in plan.subjects
    }


def _length(plan: FrontierPlan, at: At, steady: Mapping[str, Times]) -> dict[str, Any]:
    subjects = {}
    for name, run in at.runs.items():
        prompt, ratios = plan.prompt(name, at.length), zip(run.token_s, at.runs["whole"].token_s, strict=True)
        subjects[name] = {
            "first_token_ms": 1e3 * run.first_token_s,
            "prefill_tokens_per_s": prompt / run.first_token_s,
            "last_chunk_tokens_per_s": ((prompt - 1) % plan.chunk + 1) / run.last_chunk_s,
            "token_ms": quartiles_of([1e3 * seconds for seconds in run.token_s]),
            "steady_token_ms": quartiles_of([1e3 * seconds for seconds in steady[name][at.length]]),
            "token_ratio": quartiles_of([ours / whole for ours, whole in ratios]),
        }
    return {"length": at.length, "subjects": subjects}


def _slope_of(name: str, times: Mapping[str, Times]) -> dict[str, Any]:
    """A subject's line, and its slope over the whole model's; None where that does not grow."""
    found, base = line_over(times[name]), line_over(times["whole"])
    result: dict[str, Any] = {"slope_ms_per_1000": found.slope_ms, "base_ms": found.base_ms}
    if name != "whole":
        result["slope_ratio"] = _ratio(found, base) if base.slope_ms > 0 else None
    return result


def _growth(name: str, times: Mapping[str, Times]) -> dict[str, Any]:
    """The same; and a 95 % interval of the ratio, and its range with each context left out in turn."""
    result, ours, whole = _slope_of(name, times), times[name], times["whole"]
    if result.get("slope_ratio") is not None:
        without = [_ratio(_without(ours, left), _without(whole, left)) for left in ours]
        result["slope_ratio_interval"] = ratio_interval(ours, whole)
        result["slope_ratio_leaving_one_out"] = (min(without), max(without)) if len(without) > 2 else None
    return result


def _without(times: Times, left: int) -> Line:
    return line_over({context: seconds for context, seconds in times.items() if context != left})


def _upstream(beside: Sequence[BesideUpstream]) -> dict[str, Any]:
    """Lines of both sides, and medians at each depth."""
    ours, theirs = ({at.length: getattr(at, side) for at in beside} for side in ("ours_s", "theirs_s"))
    lines = {"ours": line_over(ours), "theirs": line_over(theirs)}
    return {
        **{side: {"slope_ms_per_1000": found.slope_ms, "base_ms": found.base_ms} for side, found in lines.items()},
        "slope_ratio": _ratio(lines["ours"], lines["theirs"]) if lines["theirs"].slope_ms > 0 else None,
        "lengths": [
            {
                "length": at.length,
                "ours_ms": quartiles_of([1e3 * seconds for seconds in at.ours_s]),
                "theirs_ms": quartiles_of([1e3 * seconds for seconds in at.theirs_s]),
            }
            for at in beside
        ],
    }


# --- verdicts --------------------------------------------------------------------------------------------------------


def checks(plan: FrontierPlan, units: Units) -> list[Check]:
    """The verdicts on all units."""
    measured = _measured(plan, units)
    found = [_complete(plan, units)]
    if plan.numerics is Numerics.EXACT:
        answers = {f"after {at.length} tokens": at.runs["whole"].tokens for at in measured}
        found += [answers_tell(answers), _tokens(plan, measured)]
    found.append(_states(plan, measured))
    if plan.goal is not None:
        found.append(_slope(plan, measured, plan.goal))
    return found


def _complete(plan: FrontierPlan, units: Units) -> Check:
    wanted = [f"{what}/{length}" for what in ("length", "upstream")[: 1 + plan.upstream] for length in plan.lengths]
    errors = ((unit, str(units.get(unit, {"error": "not measured"}).get("error") or "")) for unit in wanted)
    return judge("every length is measured", "to the last token", errors)


def _tokens(plan: FrontierPlan, measured: Sequence[At]) -> Check:
    faults = (
        (f"{name} after {at.length} tokens", first_difference(at.runs[name].tokens, at.runs["whole"].tokens))
        for at in measured
        for name in plan.compared
    )
    return judge("stages draw the whole model's tokens", f"{plan.decode + 1} of each answer, bit for bit", faults)


def _states(plan: FrontierPlan, measured: Sequence[At]) -> Check:
    stages = {"split": plan.split.count(",") + 1}
    tally = Tally("no session lost its state", "every stage committed every token once")
    for at in measured:
        for name, run in at.runs.items():
            wanted = [plan.prompt(name, at.length) + plan.decode] * stages.get(name, 1)
            committed = f"{run.positions} tokens committed at the end, not {wanted}"
            fault = run.lost[0] if run.lost else committed if run.positions != wanted else ""
            tally.hold(not fault, f"{name} at {at.length}: {fault}")
    return tally.check()


def _slope(plan: FrontierPlan, measured: Sequence[At], goal: float) -> Check:
    steady = _steady(plan, measured)
    found, base = _growth("one", steady), line_over(steady["whole"])
    ratio, pairs = found["slope_ratio"], sum(map(len, steady["one"].values()))
    if ratio is None:
        detail = f"the whole model's slope is {base.slope_ms:.3f} ms per 1000 tokens: no growth to compare with"
    else:
        low, high = found["slope_ratio_interval"]
        detail = (
            f"{found['slope_ms_per_1000']:.3f} ms per 1000 tokens of context, {base.slope_ms:.3f} in the whole model; ratio"
            f" {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}; goal {1 - goal:g} to {1 + goal:g}"
        )
        if high - low > 2 * goal:
            detail += "; the interval is wider than the goal: draw more tokens (--decode) on a quieter machine"
    return Check(
        name=f"decode through one stage grows as in the whole model, ± {goal:.0%}",
        passed=ratio is not None and abs(ratio - 1) <= goal and len(measured) == len(plan.lengths),
        cases=pairs,
        detail=detail,
    )
