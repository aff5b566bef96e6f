"""``dgr selftest numerics``: find out which types are exact on this machine, and record it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dgr.engine.budget import available_cpus
from dgr.engine.numerics import load_certificate, record_certificate
from dgr.testing.invariance import Report, Verdict, certificate, run_suite

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
        " promise to be alike, compare the bits, and record under the kernel fingerprint which types are exact. Exit"
        " code 1 when f32 weights or the f16 K cache are not.",
    )
    numerics.add_argument(
        "--types", metavar="T,…", help="test these types only, and keep the verdict on the others (default: all)"
    )
    numerics.add_argument("--no-record", action="store_true", help="only tell; do not record the verdict")
    numerics.add_argument(
        "--if-missing", action="store_true", help="do nothing when a whole verdict is recorded already"
    )
    numerics.add_argument("--json", action="store_true", help="print one JSON object")
    numerics.set_defaults(run=run)


def _line(verdict: Verdict) -> str:
    case = verdict.case
    what = "weights" if case.kind == "weights" else "K cache"
    threads = ",".join(str(count) for count in (1, *verdict.threads))
    found = "exact" if verdict.exact else "; ".join(verdict.differences)
    return f"{what:8} {case.label:8} {verdict.seconds:6.1f} s  threads {threads:6} {found}"


def _object(report: Report, path: str | None) -> dict[str, Any]:
    return {
        "fingerprint": report.fingerprint,
        "passed": report.passed,
        "verdicts": [
            {
                "kind": verdict.case.kind,
                "type": verdict.case.label,
                "exact": verdict.exact,
                "differences": verdict.differences,
                "threads": [1, *verdict.threads],
                "seconds": round(verdict.seconds, 3),
            }
            for verdict in report.verdicts
        ],
        "notes": report.notes,
        "seconds": round(report.seconds, 3),
        "record": path,
    }


def run(args: argparse.Namespace) -> int:
    found = load_certificate()
    if args.if_missing and found is not None and not (found.notes and available_cpus() > 1):
        print(json.dumps({"recorded": True}) if args.json else "the verdict for these kernels is recorded already")
        return 0
    types = None if args.types is None else [name.strip() for name in args.types.split(",") if name.strip()]
    finished = None if args.json else lambda verdict: print(_line(verdict), flush=True)
    if not args.json and sys.stdout.isatty():
        print("running; about half a minute", file=sys.stderr)
    report = run_suite(types, finished=finished)
    path = None
    if not args.no_record:
        path = str(record_certificate(certificate(report, load_certificate(report.fingerprint))))
    if args.json:
        print(json.dumps(_object(report, path)))
    else:
        for note in report.notes:
            print(f"note: {note}")
        recorded = "not recorded" if path is None else f"recorded in {path}"
        print(f"kernel fingerprint {report.fingerprint}, {report.seconds:.1f} s; {recorded}")
    return 0 if report.passed else 1
