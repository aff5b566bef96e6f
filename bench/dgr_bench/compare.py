"""``dgr-bench compare``: two results held against each other, part by part."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dgr.cli.progress import progress_bar
from dgr.errors import InputError
from dgr_bench.benchmark import Command
from dgr_bench.certify.metrics import canary_of
from dgr_bench.certify.profiles import Profile
from dgr_bench.plots import BLUE, GREY, Plot
from dgr_bench.reports import Section, table, write_report
from dgr_bench.results import Result, locked, read_result


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RESULT", help="result.json, or its folder")
    parser.add_argument("second", type=Path, metavar="RESULT", help="the other one")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of a report and plots (default: none is written)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _compare(args: argparse.Namespace) -> int:
    with progress_bar("reading the results"):
        first, second = read_result(args.first), read_result(args.second)
        found = compare(first, second)
    if args.out is not None:
        with locked(args.out), progress_bar("drawing the report"):
            _write(args.out, found, first, second)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(*_lines(found), sep="\n")
    return 0 if found["verdict"] == "alike" or found["kind"] != "certify" else 1


#: What must be the same for digests to be, and how it is said that it is not.
_REASONS = {"plan": "another plan", "artifact": "another artifact", "kernels": "other kernels"}


def compare(first: Result, second: Result) -> dict[str, Any]:
    """What is the same and what is not.

    ``verdict``: ``alike``; ``not alike`` when something differs that must not; ``not comparable`` when nothing says that
    digests must be equal, or no part is in both. Raises :class:`~dgr.errors.InputError` for results of two commands, or
    unfinished ones.
    """
    if first.kind != second.kind:
        raise InputError(f"a result of `{first.kind}` and one of `{second.kind}`; compare takes two of one command")
    for which, result in (("first", first), ("second", second)):
        if not result.complete:
            raise InputError(f"the {which} result is not complete; give its command again, it goes on where it stopped")
    same = {
        "plan": first.plan_digest == second.plan_digest,
        "artifact": first.subject.get("artifact") == second.subject.get("artifact"),
        "split": first.subject.get("split") == second.subject.get("split"),
        "kernels": first.environment.kernel_fingerprint == second.environment.kernel_fingerprint,
        "runtime": first.environment.runtime == second.environment.runtime,
    }
    parts = _canaries(_canary_of(first), _canary_of(second))
    differing = [part for part in parts if not part["same"]]
    exact = all(result.plan.get("numerics", "exact") == "exact" for result in (first, second))
    must = same["plan"] and same["artifact"] and same["kernels"] and exact
    verdict = "not alike" if must and differing else "alike" if must and parts else "not comparable"
    why = [words for name, words in _REASONS.items() if not same[name]]
    why += [] if exact else ["native numerics, which promise equal bits for equal batches alone"]
    why += [] if parts else ["no part is in both"]
    return {
        "kind": first.kind,
        "same": same,
        "passed": [first.passed, second.passed],
        #: Digests must be equal: the same plan and artifact in exact numerics on equal kernels.
        "must_be_equal": must,
        "parts": len(parts),
        "parts_differing": differing,
        "ratios": _ratios(first.metrics, second.metrics),
        "verdict": verdict,
        #: Why nothing says that digests must be equal; empty where something does.
        "not_comparable_because": why if verdict == "not comparable" else [],
    }


def _canary_of(result: Result) -> dict[str, Any]:
    """The digests of a certificate, from its raw units; other results have none."""
    if result.kind != "certify":
        return {}
    try:
        return canary_of(msgspec.convert(result.plan, Profile), result.subject, result.units)
    except (KeyError, TypeError, ValueError) as error:  # msgspec's own are of the last kind
        raise InputError(
            f"a result is not what `dgr-bench certify` writes ({type(error).__name__}: {error}); give its command again"
        ) from error


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
    """second / first of every metric of time that both have, by its path."""
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
    """What a row of metrics is about: its first value, a length or a name."""
    return str(next(iter(row.values()), ""))


_VERDICTS = {
    "alike": "ALIKE",
    "not alike": "NOT ALIKE: the same artifact on equal kernels must give the same state",
    "not comparable": "NOT COMPARABLE bit for bit",
}


def _lines(found: Mapping[str, Any]) -> list[str]:
    same = ", ".join(f"{name} {'equal' if alike else 'DIFFERS'}" for name, alike in found["same"].items())
    lines = [f"  {name}: second / first = {ratio:.3f}" for name, ratio in found["ratios"].items()]
    lines.append(same)
    lines += [
        f"the {which} result has not passed"
        for which, passed in zip(("first", "second"), found["passed"], strict=True)
        if not passed
    ]
    if found["kind"] == "certify":
        lines.append(f"canary: {found['parts'] - len(found['parts_differing'])} of {found['parts']} parts equal")
        for one in found["parts_differing"]:
            lines.append(f"  differs: {one['length']} tokens, stage {one['layers']}, {one['component']}")
        why = found["not_comparable_because"]
        lines.append(_VERDICTS[found["verdict"]] + (f": {'; '.join(why)}" if why else ""))
    return lines


def _write(folder: Path, found: Mapping[str, Any], first: Result, second: Result) -> None:
    names = list(found["ratios"])

    def paint(axes: Any) -> None:
        axes.barh(range(len(names)), [found["ratios"][name] for name in names], color=BLUE, height=0.7)
        axes.axvline(1, color=GREY)
        axes.set_yticks(range(len(names)), names, fontsize=6)
        axes.invert_yaxis()

    same = [line.strip() for line in _lines(found) if "second / first" not in line]
    about = [
        ("runtime", first.environment.runtime, second.environment.runtime),
        ("kernels", first.environment.kernel_fingerprint, second.environment.kernel_fingerprint),
        ("machine", first.environment.cpu, second.environment.cpu),
    ]
    sections = [Section("What is the same", ("\n".join(f"- {line}" for line in same),)), Section("Times")]
    sections.append(Section("What was compared", (table(("what", "first", "second"), about),)))
    differing = [(one["length"], one["layers"], one["component"]) for one in found["parts_differing"]]
    if differing:
        sections.append(Section("Differences", (table(("tokens", "layers", "component"), differing),)))
    size = (8, max(3.0, 0.16 * len(names) + 1))
    plot = Plot("Times", "ratios", f"Times of two runs of {found['kind']}", "second / first", "", paint, size)
    write_report(folder, "Two results", None, sections, [plot] if names else [])


COMMAND = Command(
    "compare",
    "hold two results against each other, part by part",
    "Compare two results of one command. Of certificates: the canary, that is every component of the state at every length and"
    " stage, and the curves over context. Exit code 1 when the states of two certificates differ, or cannot be compared.",
    _add_arguments,
    _compare,
)
