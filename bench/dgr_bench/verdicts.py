"""Verdicts: cases counted, the first that fails named; goals for medians."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from attrs import frozen

from dgr_bench.quartiles import Quartiles

#: Fewer different token ids in an answer would not tell a right one from a wrong one.
_TELLING = 4


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict. ``cases``: comparisons behind it; a check of no case is not passed."""

    name: str
    passed: bool
    cases: int
    #: What was compared, or the first case that fails, with both values.
    detail: str


class Tally:
    """Cases of one check under way; the first that fails is what it says."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self.what = what
        self.cases = 0
        self.failure = ""
        self.failures = 0

    def hold(self, ok: bool, case: str) -> None:
        """A case, and what to say when it fails."""
        self.cases += 1
        if not ok:
            self.failures += 1
            self.failure = self.failure or case

    def same(self, case: str, has: object, wants: object) -> None:
        """A case of two values that must be equal."""
        self.hold(has == wants, f"{case}: {has}, not {wants}")

    def check(self) -> Check:
        """The verdict."""
        detail = self.what if self.cases else "no case"
        if self.failures:
            detail = f"{self.failures} of {self.cases} fail; {self.failure}"
        return Check(name=self.name, passed=bool(self.cases) and not self.failures, cases=self.cases, detail=detail)


def judge(name: str, what: str, faults: Iterable[tuple[str, str]]) -> Check:
    """A verdict over cases, each with what is wrong with it; empty when nothing is."""
    tally = Tally(name, what)
    for case, fault in faults:
        tally.hold(not fault, f"{case}: {fault}")
    return tally.check()


@frozen
class Goal:
    """What a median must reach."""

    #: ``at least`` or ``at most``.
    bound: str
    value: float
    #: Of the measurements; empty for a ratio.
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.bound} {self.value:g}{self.unit and ' ' + self.unit}"

    def check(self, name: str, found: Quartiles) -> Check:
        """The verdict on the median."""
        holds = operator.ge if self.bound == "at least" else operator.le
        detail = f"median {found}{self.unit and ' ' + self.unit}, quartiles in brackets; goal {self}"
        return Check(name=name, passed=holds(found.median, self.value), cases=found.count, detail=detail)


def n_alike(has: Sequence[int], wants: Sequence[int]) -> int:
    """Tokens at the beginning that are the same in both answers."""
    pairs = enumerate(zip(has, wants, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(has), len(wants)))


def first_difference(has: Sequence[int], wants: Sequence[int]) -> str:
    """Where an answer leaves the right one; empty when it does not."""
    at = n_alike(has, wants)
    if at < min(len(has), len(wants)):
        return f"token {at} is {has[at]}, not {wants[at]}"
    return "" if len(has) == len(wants) else f"{len(has)} tokens, not {len(wants)}"


def answers_tell(answers: Mapping[str, Sequence[int]]) -> Check:
    """Whether answers have enough different token ids to tell a wrong one from a right one."""
    kinds = {name: len({*answer}) for name, answer in answers.items()}
    what = f"{min(kinds.values(), default=0)} different token ids or more in each answer"
    wrong = "different token ids: too few to tell a wrong answer from a right one"
    return judge("answers tell", what, ((name, f"{n} {wrong}" * (n < _TELLING)) for name, n in kinds.items()))
