"""Damaged files at every door that reads one: refused with an error of dgr's, or loaded. Nothing else.

Every case is a function of a seed and its number. They run one after another in a child process whose address space is
bounded, so that what ends a process, hangs in it or takes gigabytes is a finding, and the next child goes on behind it.

    python -m dgr.testing.file_fuzz --seed 1 --cases 1000              # models; --kind names others, or `all`
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from attrs import field, frozen

from dgr.cli.children import python_module
from dgr.core.files import inputs
from dgr.errors import DgrError
from dgr.testing.hostile_files.kind import FileKind, Mutation

__all__ = ["FuzzFinding", "FuzzReport", "cases_of", "fuzz", "kind_named"]

#: Seconds that one file may take; then the child is taken for hung.
_PATIENCE = 30
#: Seconds for which a pipe is waited for, in the child.
_SILENCE = 0.05
#: Bytes of resident memory that no small file may make the process take.
_MAX_RESIDENT = 1 << 30
#: Bytes of address space beyond what the child has at its start. Engines are opened in it, and threads have stacks.
_MORE_SPACE = 2 << 30
#: Where kinds are looked for that name no module: a mapping of this name in each.
_OWN_KINDS = "dgr.testing.hostile_files.kinds"


@frozen
class FuzzFinding:
    """A case that neither loaded nor was refused as it should."""

    case: str
    what: str


@frozen
class FuzzReport:
    """What became of all cases."""

    kind: str
    #: Files that were damaged.
    cases: int
    #: Doors passed, and doors that refused.
    loaded: int
    refused: int
    findings: tuple[FuzzFinding, ...]
    #: Files by the damage that was done.
    damages: Mapping[str, int] = field(factory=dict)

    def __str__(self) -> str:
        said = f"{self.kind}: {self.cases} files, {self.loaded} doors passed, {self.refused} refused"
        said += f", {len(self.findings)} findings"
        each = ", ".join(f"{name} {count}" for name, count in self.damages.items())
        return f"{said} ({each})"


def kind_named(name: str) -> FileKind:
    """A kind of :mod:`.kinds`, or of another module, as ``module:name``."""
    module, _, own = name.rpartition(":")
    kinds: Mapping[str, FileKind] = importlib.import_module(module or _OWN_KINDS).KINDS
    return kinds[own]


def cases_of(kind: FileKind, seed: int, n_cases: int) -> Iterator[tuple[str, Mutation]]:
    """Name and change of every case: the directed ones, then those that are drawn."""
    yield from kind.directed.items()
    damages = list(kind.damages.items())
    for index in range(n_cases):
        name, change = damages[index % len(damages)]
        yield f"{name} {seed}:{index}", change


# --- the child --------------------------------------------------------------------------------------------------------


def _verdict(kind: FileKind, path: Path) -> tuple[int, int]:
    """How many doors a file passed, and how many refused it; raises what is not an error of dgr's."""
    loaded = refused = 0
    for name, enter in kind.doors.items():
        try:
            enter(path)
            loaded += 1
        except DgrError:
            refused += 1
        except Exception as wrong:
            wrong.add_note(f"at the door {name!r}")
            raise
    return loaded, refused


def _told(wrong: Exception) -> str:
    return f"{type(wrong).__name__} {' '.join(getattr(wrong, '__notes__', ()))}: {wrong}"[:300]


def _bound() -> None:
    """No gigabytes for a lie, and no waiting for a pipe."""
    space = psutil.Process().memory_info().vms + _MORE_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setattr(inputs, "_PATIENCE", _SILENCE)  # noqa: B010 (a constant of a module)


def _child(base: Path, args: argparse.Namespace) -> None:
    """Bring cases to the doors, a line of JSON before and after each."""
    kind = kind_named(args.kind)
    if args.mutant:
        kind.mutants[args.mutant]()
    _bound()
    with open(os.dup(1), "w", encoding="utf-8", buffering=1) as out:  # noqa: PTH123 (a door may write on standard output)
        for index, (name, change) in enumerate(cases_of(kind, args.seed, args.cases)):
            if index < args.first or args.only not in (None, name):
                continue
            out.write(json.dumps([index, name]) + "\n")
            signal.alarm(_PATIENCE)  # its default action ends the process, in native code too
            folder = Path(tempfile.mkdtemp(dir=base.parent))
            try:
                said: object = _verdict(kind, change(random.Random(f"{args.seed}:{index}"), base, folder))
            except Exception as wrong:
                said = _told(wrong)
            shutil.rmtree(folder)
            out.write(json.dumps(said) + "\n")


# --- the parent -------------------------------------------------------------------------------------------------------


def fuzz(
    seed: int, n_cases: int, *, kind: str = "model", only: str | None = None, mutant: str | None = None
) -> FuzzReport:
    """Run the directed cases and ``n_cases`` drawn ones, in children that are started again after one that ended.

    ``only``: the name of the one case to run. ``mutant``: one of the kind's changes of dgr, which the cases must find.
    """
    told = kind_named(kind)
    loaded = refused = 0
    findings: list[FuzzFinding] = []
    damages: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="dgr-fuzz-") as folder:
        base = Path(folder) / "whole"
        base.mkdir()
        environment = os.environ | {"DGR_CACHE_DIR": str(Path(folder) / "cache"), "TMPDIR": folder}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = python_module("dgr.testing.file_fuzz", "--base", str(base), "--kind", kind)
        command += ["--seed", str(seed), "--cases", str(n_cases), *([] if only is None else ["--only", only])]
        command += [] if mutant is None else ["--mutant", mutant]
        told.write(base)
        first, total = 0, len(told.directed) + n_cases
        while first < total:
            done = subprocess.run(
                [*command, "--first", str(first)], env=environment, capture_output=True, text=True, check=False
            )
            lines = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
            for _, name in lines[::2]:
                damage = name.rpartition(" ")[0] if name not in told.directed else "directed"
                damages[damage] = damages.get(damage, 0) + 1
            for (_, name), said in zip(lines[::2], lines[1::2], strict=False):
                if isinstance(said, str):
                    findings.append(FuzzFinding(name, said))
                else:
                    loaded, refused = loaded + said[0], refused + said[1]
            if len(lines) % 2 == 0:
                if done.returncode:
                    findings.append(FuzzFinding("the child", f"exit {done.returncode}: {done.stderr[-300:]}"))
                break
            first, name = lines[-1][0] + 1, lines[-1][1]
            findings.append(FuzzFinding(name, f"ended the process: {done.returncode}: {done.stderr[-300:]}"))
    return FuzzReport(kind, sum(damages.values()), loaded, refused, tuple(findings), damages)


def _kinds(names: Sequence[str]) -> list[str]:
    if list(names) == ["all"]:
        return list(importlib.import_module(_OWN_KINDS).KINDS)
    return list(names)


def _most_resident() -> int:
    """Bytes. Not ``ru_maxrss``, which a process has from whoever started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _main() -> int:
    parser = argparse.ArgumentParser(description="Damaged files at every door that reads one.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--kind", default="model", metavar="NAME", help="the kind of file, MODULE:NAME, or all (default: model)"
    )
    parser.add_argument("--only", help="run the case of this name alone")
    parser.add_argument("--mutant", help="take this check out of dgr")
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.base is not None:
        _child(args.base, args)
        if (used := _most_resident()) > _MAX_RESIDENT:
            print(f"the files took {used} bytes of memory", file=sys.stderr)
            return 1
        return 0
    wrong = 0
    for kind in _kinds([args.kind]):
        report = fuzz(args.seed, args.cases, kind=kind, only=args.only, mutant=args.mutant)
        for finding in report.findings:
            print(f"{finding.case}: {finding.what}")
        print(report, flush=True)
        wrong += len(report.findings)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_main())
