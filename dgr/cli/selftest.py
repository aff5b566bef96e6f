"""``dgr selftest numerics``: find out which types are exact on this machine, and record it."""

from __future__ import annotations

import argparse
from typing import Any

from dgr.artifact.artifact import Artifact
from dgr.cli.progress import progress_bar, say_above
from dgr.cli.streams import print_json, tell
from dgr.core.host import available_cpus
from dgr.engine.native import kernel_fingerprint
from dgr.engine.numerics import ExactnessRecord, load_exactness_record, record_target, save_exactness_record
from dgr.errors import InputError
from dgr.selftest.cases import Case, cases_of, select
from dgr.selftest.invariance import THREADS_NOTE, Report, Verdict, exactness_record, run_suite
from dgr.v4.published import PUBLISHED, inexact_types

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "selftest", help="test this machine's kernels", description="Test what dgr promises on this very machine."
    )
    tests = parser.add_subparsers(title="tests", metavar="TEST", required=True)
    numerics = tests.add_parser(
        "numerics",
        help="which weight and K-cache types are exact",
        description="Run small models through every chunking, split, batch and thread count that exact numerics"
        " promise to be alike, compare the bits, and record under the kernel fingerprint which types are exact. What"
        " cannot be run (no disk, no memory) is noted and keeps its old verdict. Exit code 1 when f32 weights or the f16 K"
        " cache are tested and not found exact.",
    )
    some = numerics.add_mutually_exclusive_group()
    some.add_argument(
        "--types", metavar="T,…", help="test these types only, and keep the verdict on the others (default: all)"
    )
    some.add_argument("--model", metavar="GGUF", help="test only the types that exact numerics run this model with")
    numerics.add_argument(
        "--type-k", default="f16", metavar="TYPE", help="with --model: K-cache type, f16, f32, q8_0 (default: f16)"
    )
    numerics.add_argument("--no-record", action="store_true", help="only tell; do not record the verdict")
    numerics.add_argument(
        "--if-missing",
        action="store_true",
        help="test only what no verdict is recorded on, or only half of one; says what that is",
    )
    numerics.add_argument("--json", action="store_true", help="print one JSON object")
    numerics.set_defaults(run=run)


def _line(verdict: Verdict) -> str:
    case = verdict.case
    what = "weights" if case.kind == "weights" else "K cache"
    threads = ",".join(str(count) for count in (1, *verdict.threads))
    found = "exact" if verdict.exact else "; ".join(verdict.differences) or f"not tested: {verdict.untested}"
    return f"{what:8} {case.label:8} {verdict.seconds:6.1f} s  threads {threads:6} {found}"


def _published(record: ExactnessRecord) -> dict[str, tuple[str, ...]]:
    """Published files by their titles, with the types for which they are not exact here."""
    return {published.title: inexact_types(published, record.weight_types) for published in PUBLISHED.values()}


def _published_line(record: ExactnessRecord) -> str:
    exact = [title for title, types in _published(record).items() if not types]
    others = [f"{title} ({', '.join(types)})" for title, types in _published(record).items() if types]
    return f"published files that are exact here: {'; '.join(exact) or 'none'}" + (
        f". Not known to be: {'; '.join(others)}" if others else ""
    )


def _covered_line(record: ExactnessRecord) -> str:
    known = [case for case in select() if record.knows(case.kind, case.label)]
    what = ", ".join(case.name for case in known) or "none"
    return f"types with a verdict: {what}; the other {len(select()) - len(known)}: dgr selftest numerics --if-missing"


def _object(report: Report, record: ExactnessRecord, notes: list[str], path: str | None) -> dict[str, Any]:
    return {
        "fingerprint": report.fingerprint,
        "passed": report.passed,
        "verdicts": [
            {
                "kind": verdict.case.kind,
                "type": verdict.case.label,
                "exact": verdict.exact if verdict.is_known else None,
                "differences": verdict.differences,
                "untested": verdict.untested,
                "threads": [1, *verdict.threads],
                "seconds": round(verdict.seconds, 3),
            }
            for verdict in report.verdicts
        ],
        "published": {title: {"exact": not types, "types": types} for title, types in _published(record).items()},
        "notes": notes,
        "seconds": round(report.seconds, 3),
        "record": path,
    }


def run(args: argparse.Namespace) -> int:
    found = load_exactness_record()
    cases = _cases(args)
    if args.if_missing:
        every, cases = cases, _lacking(cases, found)
        if not cases:
            if args.json:
                print_json({"recorded": True})
            else:
                of = "these kernels" if len(every) == len(select()) else ", ".join(case.name for case in every)
                print(f"the verdict for {of} is recorded already")
            return 0
        if found is not None and not args.json:
            whys = (f"{case.name} ({found.untested.get(case.name, 'not tested yet')})" for case in cases)
            print(f"tested now, for the record lacks it: {', '.join(whys)}", flush=True)
    if not args.no_record:
        record_target(kernel_fingerprint())  # refused now rather than after half a minute
    try:
        with progress_bar(f"testing these kernels: {len(cases)} types") as activity:
            finished = None if args.json else lambda verdict: say_above(activity, _line(verdict))
            report = run_suite(cases, finished=finished)
    except KeyboardInterrupt:
        tell("dgr selftest: interrupted; nothing was recorded")
        raise
    notes, path, kept = list(report.notes), None, True
    record = exactness_record(report, load_exactness_record(report.fingerprint))
    if not args.no_record and any(verdict.is_known for verdict in report.verdicts):
        try:
            path = str(save_exactness_record(record))
        except InputError as failed:
            notes.append(str(failed))
            kept = False
    if args.json:
        print_json(_object(report, record, notes, path))
    else:
        for note in notes:
            print(f"note: {note}")
        print(_published_line(record) if len(report.verdicts) == len(select()) else _covered_line(record))
        recorded = "not recorded" if path is None else f"recorded in {path}"
        print(f"kernel fingerprint {report.fingerprint}, {report.seconds:.1f} s; {recorded}")
    return 0 if report.passed and kept else 1


def _cases(args: argparse.Namespace) -> tuple[Case, ...]:
    """What is to be tested, whatever the record has of it."""
    if args.model is not None:
        return cases_of(Artifact.open(args.model), args.type_k)
    return select(None if args.types is None else [name.strip() for name in args.types.split(",") if name.strip()])


def _lacking(cases: tuple[Case, ...], found: ExactnessRecord | None) -> tuple[Case, ...]:
    """Those on which there is no verdict, or not one on several threads where these could run now."""

    def lacks(case: Case, record: ExactnessRecord) -> bool:
        if (why := record.untested.get(case.name)) is None:
            return not record.knows(case.kind, case.label)
        return available_cpus() > 1 or not why.startswith(THREADS_NOTE)

    return cases if found is None else tuple(case for case in cases if lacks(case, found))
