"""The frame: a benchmark says its plan, units, metrics, checks, tables and plots; one runner does the rest."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import trio
from attrs import field, frozen

from dgr.errors import InputError, LinkBroken
from dgr_bench import benchmark
from dgr_bench.benchmark import Group, Scratch, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.plots import Plot, curve
from dgr_bench.reports import Section, table
from dgr_bench.results import Journal, Kind, Result, read_result
from dgr_bench.verdicts import Check, Tally, answers_tell, first_difference, judge, n_alike


class SquaresPlan(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "squares"
    numbers: tuple[int, ...] = (1, 2, 3)


@frozen
class Squares:
    """Squares of numbers, by somebody who was opened."""

    plan: SquaresPlan = field(factory=SquaresPlan)
    #: What happened, in its order.
    log: list[str] = field(factory=list)
    #: Number -> what goes wrong with it.
    wrong: dict[int, Exception | str] = field(factory=dict)
    kind: ClassVar[Kind] = "hops"
    title: ClassVar[str] = "Squares"

    def subject(self) -> dict[str, Any]:
        return {"artifact": "numbers"}

    def units(self, _: Store) -> Iterator[Group]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[str]:
            self.log.append("open")
            yield "someone"
            self.log.append("close")

        async def square(number: int, who: str) -> dict[str, Any]:
            self.log.append(f"{who} {number}")
            if isinstance(fault := self.wrong.get(number), Exception):
                raise fault
            return {"number": number, "square": number * number, "error": fault or ""}

        units = [Unit(f"square/{n}", partial(square, n), error_is_finding=n == 3) for n in self.plan.numbers]
        yield Group(units, opened)

    def metrics(self, units: Units, _: Path) -> dict[str, Any]:
        return {"sum": sum(unit.get("square", 0) for unit in units.values())}

    def checks(self, units: Units) -> list[Check]:
        return [no_error(units, "square")]

    def tables(self, result: Result) -> list[Section]:
        return [Section("Sums", (table(("sum",), [(result.metrics["sum"],)]),))]

    def plots(self, result: Result) -> list[Plot]:
        rows = list(result.units.values())
        return [
            Plot("Sums", "sums", "Squares", "n", "n²", lambda axes: curve(axes, rows, "number", "square", 1, "o", "n²"))
        ]


def run(squares: Squares, folder: Path) -> Result:
    with Journal.open(folder, squares.kind, squares.plan, squares.subject(), "") as journal:
        return trio.run(benchmark.run, squares, journal)


def test_what_is_shared_is_opened_once_and_only_when_it_is_needed(tmp_path: Path) -> None:
    squares = Squares()
    result = run(squares, tmp_path)
    assert (result.passed, result.metrics) == (True, {"sum": 14})
    assert squares.log == ["open", "someone 1", "someone 2", "someone 3", "close"]
    squares.log.clear()
    assert run(squares, tmp_path).passed
    assert squares.log == []


def test_an_error_is_written_down_and_tried_again_the_next_time(tmp_path: Path) -> None:
    squares = Squares(wrong={1: LinkBroken("gone"), 2: InputError("two is not a number")})
    result = run(squares, tmp_path)
    assert [check.detail for check in result.checks] == ["2 of 3 fail; square/1: LinkBroken: gone"]
    assert result.units["square/2"] == {"error": "InputError: two is not a number"}
    assert result.metrics == {"sum": 9}
    again = Squares()
    assert run(again, tmp_path).passed
    assert again.log == ["open", "someone 1", "someone 2", "close"]


def test_an_error_that_is_a_finding_is_not_tried_until_it_passes(tmp_path: Path) -> None:
    assert not run(Squares(wrong={3: "a finding"}), tmp_path).passed
    again = Squares()
    assert not run(again, tmp_path).passed
    assert again.log == []


def test_a_mistake_in_the_benchmark_itself_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(Squares(wrong={2: ZeroDivisionError()}), tmp_path)
    assert set(read_result(tmp_path).units) == {"square/1"}


async def test_units_may_be_kept_nowhere() -> None:
    store, squares = Scratch(), Squares()
    await benchmark.measure("squares", squares.units(store), store)
    assert store.units["square/2"] == {"number": 2, "square": 4, "error": ""}


def test_a_command_writes_result_report_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = benchmark_command("squares", "squares", "Squares.", lambda _: None, lambda _: Squares())
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["squares", "--out", str(tmp_path)])
    args.command_line = "dgr-bench squares"
    assert args.default_out == "dgr-bench-squares"
    assert args.run(args) == 0
    assert capsys.readouterr().out == (
        "pass  every square is measured (3 cases): none ended in an error\n"
        f"PASSED: {tmp_path / 'report.md'}, {tmp_path / 'result.json'}\n"
    )
    report = (tmp_path / "report.md").read_text()
    assert "# Squares\n\n**PASSED**" in report
    assert "## Sums\n\n![Squares: n²](plots/sums.png)\n\n| sum |\n|---:|\n| 14 |\n\n## Machine" in report
    assert (tmp_path / "plots" / "sums.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "plots", "report.md", "result.json"}


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_a_check_counts_its_cases_and_names_the_first_that_fails() -> None:
    tally = Tally("sums", "sums of pairs")
    assert (tally.check().passed, tally.check().detail) == (False, "no case")
    tally.same("1 + 1", 2, 2)
    assert tally.check() == Check(name="sums", passed=True, cases=1, detail="sums of pairs")
    tally.same("1 + 2", 4, 3)
    tally.hold(False, "2 + 2")
    assert tally.check() == Check(name="sums", passed=False, cases=3, detail="2 of 3 fail; 1 + 2: 4, not 3")
    assert judge("faults", "well", [("one", ""), ("two", "broken")]).detail == "1 of 2 fail; two: broken"


@pytest.mark.parametrize(
    ("has", "wants", "alike", "says"),
    [
        ([1, 2, 3], [1, 2, 3], 3, ""),
        ([1, 2, 3], [1, 9, 3], 1, "token 1 is 2, not 9"),
        ([1, 2], [1, 2, 3], 2, "2 tokens, not 3"),
        ([1, 2, 3], [1, 2], 2, "3 tokens, not 2"),
        ([], [], 0, ""),
        ([5, 2], [1], 0, "token 0 is 5, not 1"),
    ],
)
def test_where_an_answer_leaves_the_right_one(has: list[int], wants: list[int], alike: int, says: str) -> None:
    assert (n_alike(has, wants), first_difference(has, wants)) == (alike, says)


def test_answers_of_few_token_ids_tell_nothing() -> None:
    assert answers_tell({"long": [1, 2, 3, 4], "longer": [5, 6, 7, 8, 9]}).passed
    check = answers_tell({"long": [1, 2, 3, 4], "dull": [7, 7, 8, 9, 9]})
    assert (check.passed, check.cases, check.detail[:38]) == (False, 2, "1 of 2 fail; dull: 3 different token i")
