"""Flags that several commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from dgr_bench.results import Result

__all__ = ["add_run_arguments", "add_subject_arguments", "exit_code", "say"]


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


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--split`` and ``--route``."""
    parser.add_argument(
        "--model", metavar="GGUF", help="the model (default: the route's, or the small one of dgr fixture)"
    )
    parser.add_argument("--split", metavar="A:B,...", help="layer ranges of the stages (default: 0:15,15:29,29:43)")
    parser.add_argument("--route", metavar="TOML", help="stages in other processes, instead of --split")


def say(result: Result, folder: Path, as_json: bool) -> None:
    """Print the verdicts, and where the rest is."""
    if as_json:
        checks = [
            {"name": check.name, "passed": check.passed, "cases": check.cases, "detail": check.detail}
            for check in result.checks
        ]
        answer = {"passed": result.passed, "out": str(folder), "checks": checks, "figures": result.metrics}
        print(msgspec.json.encode(answer).decode())
        return
    for check in result.checks:
        mark = "pass" if check.passed else "FAIL"
        print(f"{mark}  {check.name} ({check.cases} cases): {check.detail}")
    print(f"{'PASSED' if result.passed else 'NOT PASSED'}: {folder / 'report.md'}, {folder / 'result.json'}")
    sys.stdout.flush()


def exit_code(result: Result) -> int:
    """0 when every check passed."""
    return 0 if result.passed else 1
