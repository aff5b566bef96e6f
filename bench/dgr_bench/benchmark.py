"""What every benchmark is made of, and the one way to run it.

A benchmark says what is locked (its plan) and what is measured (its units); metrics, checks, tables and plots follow from
the units alone. A run measures the units that its folder does not hold yet, so that an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import trio
from attrs import field, frozen
from tqdm import tqdm

from dgr.cli.progress import progress_bar
from dgr.errors import DgrError
from dgr_bench.plots import Plot
from dgr_bench.reports import Section, verdict_line, write_report
from dgr_bench.results import Journal, Kind, Result
from dgr_bench.verdicts import Check, judge

#: Raw measurements by name, as JSON holds them.
Units: TypeAlias = Mapping[str, Mapping[str, Any]]


@frozen
class Unit:
    """Something that is measured once. A :class:`~dgr.errors.DgrError` becomes ``{"error": …}``; the next run tries again."""

    name: str
    #: Given what the group opened; returns what JSON can hold.
    measure: Callable[[Any], Awaitable[Any]]
    #: Its share of the progress bar.
    weight: float = 1.0
    #: Whether an ``error`` in what it returns is a finding, which is not tried again.
    error_is_finding: bool = False


@frozen
class Group:
    """Units that share something slow to open."""

    units: Sequence[Unit]
    open: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext


class Store(Protocol):
    """Where units are kept."""

    @property
    def folder(self) -> Path | None: ...

    @property
    def units(self) -> dict[str, dict[str, Any]]: ...

    def put(self, unit: str, raw: Any) -> None: ...


@frozen
class Scratch:
    """Units kept in memory alone."""

    units: dict[str, dict[str, Any]] = field(factory=dict)
    folder: None = None

    def put(self, unit: str, raw: Any) -> None:
        self.units[unit] = msgspec.json.decode(msgspec.json.encode(raw))


class Benchmark(Protocol):
    """What a command measures, and what it makes of it."""

    @property
    def kind(self) -> Kind: ...

    @property
    def title(self) -> str:
        """Heading of the report."""
        ...

    @property
    def plan(self) -> msgspec.Struct:
        """What is locked before the run, its ``name`` among it. Another plan is another result."""
        ...

    def subject(self) -> dict[str, Any]:
        """What is run: artifact, split, …"""
        ...

    def units(self, store: Store) -> Iterable[Group]:
        """What is measured, in this order."""
        ...

    def metrics(self, units: Units, folder: Path) -> dict[str, Any]:
        """What follows from the units, for people and for ``--json``."""
        ...

    def checks(self, units: Units) -> list[Check]:
        """The verdicts on the units."""
        ...

    def tables(self, result: Result) -> list[Section]:
        """The sections of the report."""
        ...

    def plots(self, result: Result) -> list[Plot]:
        """Its pictures."""
        ...


# --- measuring -------------------------------------------------------------------------------------------------------


def cost_of(length: int) -> float:
    """About what a prompt costs: every token looks at more compressed rows than the one before."""
    return 20 + length * (1 + length / 8192)


def sweep(
    name: str, lengths: Iterable[int], one: Callable[[int, Any], Awaitable[Any]], weight: float = 1.0
) -> list[Unit]:
    """Units ``NAME/LENGTH``. ``one``: given the length and what the group opened."""

    def at(length: int) -> Callable[[Any], Awaitable[Any]]:
        return lambda opened: one(length, opened)

    return [Unit(f"{name}/{length}", at(length), weight * cost_of(length)) for length in lengths]


def _is_done(unit: Unit, store: Store) -> bool:
    raw = store.units.get(unit.name)
    return raw is not None and (unit.error_is_finding or not raw.get("error"))


async def measure(what: str, groups: Iterable[Group], store: Store) -> None:
    """Measure every unit that is not there yet."""
    groups = list(groups)
    with tqdm(
        total=sum(unit.weight for group in groups for unit in group.units),
        desc=what,
        disable=not sys.stderr.isatty(),
        bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}, about {remaining} left",
        leave=False,
    ) as bar:
        for group in groups:
            pending = [unit for unit in group.units if not _is_done(unit, store)]
            bar.update(sum(unit.weight for unit in group.units if unit not in pending))
            if not pending:
                continue
            async with group.open() as opened:
                for unit in pending:
                    bar.set_description_str(f"{what}: {unit.name}")
                    try:
                        raw = await unit.measure(opened)
                    except DgrError as error:
                        raw = {"error": f"{type(error).__name__}: {error}"}
                    store.put(unit.name, raw)
                    bar.update(unit.weight)


async def run(benchmark: Benchmark, journal: Journal) -> Result:
    """Measure what is missing, and judge."""
    if journal.result.complete:
        print(f"{journal.folder} holds the whole result; nothing is measured, --fresh begins anew", file=sys.stderr)
    await measure(f"{benchmark.kind} {journal.result.plan.get('name', '')}", benchmark.units(journal), journal)
    units = journal.result.units
    return journal.finish(benchmark.metrics(units, journal.folder), benchmark.checks(units))


def no_error(units: Units, what: str) -> Check:
    """Every unit was measured to its end."""
    tally = ((name, str(unit.get("error") or "")) for name, unit in units.items())
    return judge(f"every {what} is measured", "none ended in an error", tally)


def _first(group: BaseExceptionGroup[DgrError]) -> DgrError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


# --- commands --------------------------------------------------------------------------------------------------------


@frozen
class Command:
    """A command of ``dgr-bench``."""

    name: str
    summary: str
    #: Several lines stand as they are, one is wrapped.
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    #: Returns the exit code.
    run: Callable[[argparse.Namespace], int]

    def register(self, subparsers: argparse._SubParsersAction[Any]) -> None:
        """Add it to the parser of ``dgr-bench``."""
        style = argparse.RawDescriptionHelpFormatter if "\n" in self.description else argparse.HelpFormatter
        parser = subparsers.add_parser(
            self.name, help=self.summary, description=self.description, formatter_class=style
        )
        self.add_arguments(parser)
        parser.set_defaults(run=self.run)


def add_no_arguments(_: argparse.ArgumentParser) -> None:
    """For commands without flags of their own."""


def add_run_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """``--out``, ``--quick``, ``--fresh`` and ``--json``."""
    parser.set_defaults(default_out=out)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"folder of result, report and plots; an unfinished run there is resumed (default: {out}, {out}-quick)",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, in under a minute: a smoke test")
    parser.add_argument("--fresh", action="store_true", help="begin anew over what is in the folder")
    parser.add_argument("--json", action="store_true", help="print verdicts and metrics as one JSON object")


def benchmark_command(
    name: str,
    summary: str,
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    benchmark: Callable[[argparse.Namespace], Benchmark],
    run: Callable[[argparse.Namespace], int] | None = None,
) -> Command:
    """A command that runs the benchmark which its flags ask for; ``run`` where there is more to it."""

    def add_all(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser)
        add_run_arguments(parser, f"dgr-bench-{name}")

    return Command(name, summary, description, add_all, run or (lambda args: execute(benchmark(args), args)))


def execute(benchmark: Benchmark, args: argparse.Namespace) -> int:
    """Measure, judge, report: 0 when every check passed."""
    subject = benchmark.subject()
    # Set with the flags that name upstream's binaries (dgr_bench.upstream.programs): a run does not go on with others.
    named: Callable[[argparse.Namespace], dict[str, str]] = getattr(args, "named_programs", lambda _: {})
    if programs := named(args):
        subject = {**subject, "programs": programs}
    with Journal.open(
        args.out, benchmark.kind, benchmark.plan, subject, args.command_line, fresh=args.fresh
    ) as journal:
        try:
            result = trio.run(run, benchmark, journal)
        except BaseExceptionGroup as group:  # what a side was opened with has several tasks
            mine, others = group.split(DgrError)
            if mine is None or others is not None:
                raise
            raise _first(mine) from None
        with progress_bar("drawing the report"):
            write_report(args.out, benchmark.title, result, benchmark.tables(result), benchmark.plots(result))
    if args.json:
        answer = {"passed": result.passed, "out": str(args.out), "checks": result.checks, "figures": result.metrics}
        print(msgspec.json.encode(answer).decode())
    else:
        print(*map(verdict_line, result.checks), sep="\n")
        words = "PASSED" if result.passed else "NOT PASSED"
        print(f"{words}: {args.out / 'report.md'}, {args.out / 'result.json'}")
    return 0 if result.passed else 1
