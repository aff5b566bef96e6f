"""``dgr-bench compare``: two results held against each other, part by part."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.plots import BLUE, GREY, draw
from bench.reports import picture, table, write_report
from bench.results import Result, read_result
from dgr.errors import InputError

__all__ = ["compare", "register"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "compare",
        help="hold two results against each other, part by part",
        description="Compare two results of one command. Of certificates: the canary, that is every component of the state at"
        " every length and stage, and the curves over context. Exit code 1 when digests of the same artifact on equal"
        " kernels differ.",
    )
    parser.add_argument("first", type=Path, metavar="RESULT", help="result.json, or its folder")
    parser.add_argument("second", type=Path, metavar="RESULT", help="the other one")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of a report and plots (default: none is written)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    first, second = read_result(args.first), read_result(args.second)
    found = compare(first, second)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        _write(args.out, found, first, second)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        for line in _lines(found):
            print(line)
    return 0 if found["alike"] else 1


def compare(first: Result, second: Result) -> dict[str, Any]:
    """What is the same and what is not. ``alike`` is False when something differs that must not."""
    if first.kind != second.kind:
        raise InputError(f"a result of `{first.kind}` and one of `{second.kind}`; compare takes two of one command")
    same = {
        "plan": first.plan_digest == second.plan_digest,
        "artifact": first.subject.get("artifact") == second.subject.get("artifact"),
        "split": first.subject.get("split") == second.subject.get("split"),
        "kernels": first.environment.kernel_fingerprint == second.environment.kernel_fingerprint,
        "runtime": first.environment.runtime == second.environment.runtime,
    }
    parts = _canaries(first.figures.get("canary", {}), second.figures.get("canary", {}))
    differing = [part for part in parts if not part["same"]]
    exact = all(result.plan.get("numerics", "exact") == "exact" for result in (first, second))
    must = same["artifact"] and same["kernels"] and exact
    return {
        "kind": first.kind,
        "same": same,
        #: Digests must be equal: the same artifact in exact numerics on equal kernels.
        "must_be_equal": must,
        "parts": len(parts),
        "parts_differing": differing,
        "ratios": _ratios(first.figures, second.figures),
        "alike": not (must and differing),
    }


def _canaries(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every (length, stage, component) that both have."""
    return [
        {
            "length": int(length),
            "layers": layers,
            "component": component,
            "same": digest == second[length][layers][component],
        }
        for length, stages in first.items()
        if length in second
        for layers, components in stages.items()
        if layers in second[length]
        for component, digest in components.items()
        if component in second[length][layers]
    ]


def _ratios(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> dict[str, float]:
    """second / first of every figure of time that both have, by its path."""
    found: dict[str, float] = {}
    for name, value in first.items():
        other, where = second.get(name), f"{path}{name}"
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found |= _ratios(value, other, f"{where}/")
        elif isinstance(value, list) and isinstance(other, list):
            theirs = {_key(row): row for row in other if isinstance(row, Mapping)}
            for row in value:
                if isinstance(row, Mapping) and _key(row) in theirs:
                    found |= _ratios(row, theirs[_key(row)], f"{where}/{_key(row)}/")
        elif name.endswith("_s") and isinstance(value, int | float) and isinstance(other, int | float) and value:
            found[where] = other / value
    return found


def _key(row: Mapping[str, Any]) -> str:
    """What a row of figures is about: its first figure, a length or a name."""
    return str(next(iter(row.values()), ""))


def _lines(found: Mapping[str, Any]) -> list[str]:
    same = ", ".join(f"{name} {'equal' if alike else 'DIFFERS'}" for name, alike in found["same"].items())
    lines = [same, f"canary: {found['parts'] - len(found['parts_differing'])} of {found['parts']} parts equal"]
    lines += [
        f"  differs: {one['length']} tokens, stage {one['layers']}, {one['component']}"
        for one in found["parts_differing"]
    ]
    lines += [f"  {name}: second / first = {ratio:.3f}" for name, ratio in found["ratios"].items()]
    verdict = "ALIKE" if found["alike"] else "NOT ALIKE: the same artifact on equal kernels must give the same state"
    if found["alike"] and found["parts_differing"]:
        verdict = "NOT COMPARABLE bit for bit: another artifact, other kernels, or native numerics"
    return [*lines, verdict]


def _write(folder: Path, found: Mapping[str, Any], first: Result, second: Result) -> None:
    names = list(found["ratios"])

    def paint(axes: Any) -> None:
        axes.barh(range(len(names)), [found["ratios"][name] for name in names], color=BLUE, height=0.7)
        axes.axvline(1, color=GREY)
        axes.set_yticks(range(len(names)), names, fontsize=6)
        axes.invert_yaxis()

    parts = ["# Two results", "\n".join(f"- {line}" for line in _lines(found)[:2]), f"**{_lines(found)[-1]}**"]
    if names:
        height = max(3.0, 0.16 * len(names) + 1)
        title, axis = f"Times of two runs of {found['kind']}", "second / first"
        parts.append(picture(draw(folder, "ratios", title, axis, "", paint, size=(8, height)), "ratios of times"))
    about = [(name, first.environment.runtime, second.environment.runtime) for name in ("runtime",)]
    about += [("kernels", first.environment.kernel_fingerprint, second.environment.kernel_fingerprint)]
    about += [("machine", first.environment.cpu, second.environment.cpu)]
    parts.append(table(("what", "first", "second"), about))
    differing = [(one["length"], one["layers"], one["component"]) for one in found["parts_differing"]]
    if differing:
        parts.append(table(("tokens", "layers", "component that differs"), differing))
    write_report(folder, *parts)
