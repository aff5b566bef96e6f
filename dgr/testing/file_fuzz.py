"""Damaged files at every door that hands one to native code: refused with an error of dgr's, or loaded. Nothing else.

Every case is a function of a seed and its number. They run one after another in a child process, so that what ends a process
is a finding and the next child goes on behind it.

    python -m dgr.testing.file_fuzz --seed 1 --cases 1000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from attrs import frozen

from dgr.artifact.artifact import Artifact
from dgr.artifact.slicing import write_slice
from dgr.cli.children import python_module
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.base import Work
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import DgrError
from dgr.gguf.reader import MetaArray, MetaValue
from dgr.testing.file_damage import DIRECTED, damaged_files, write_whole_files
from dgr.v4 import metadata

__all__ = ["DOORS", "FuzzFinding", "FuzzReport", "fuzz"]

_CONTEXT = ContextParams(n_ctx=256)
#: Seconds that one file may take; then the child is taken for hung.
_PATIENCE = 30
#: Bytes of resident memory that no small file may make the process take.
_MAX_RESIDENT = 1 << 30


@frozen
class FuzzFinding:
    """A case that neither loaded nor was refused as it should."""

    case: str
    what: str


@frozen
class FuzzReport:
    """What became of all cases."""

    #: Doors passed, and doors that refused.
    loaded: int
    refused: int
    findings: tuple[FuzzFinding, ...]


# --- where they are brought -------------------------------------------------------------------------------------------


def _speak(artifact: Artifact) -> None:
    with LlamaVocabulary(artifact) as vocabulary:
        tokens = vocabulary.encode("The 漢字 <think>\n\n 12345 é\u0301", add_special=True, parse_special=True)
        for token in (*tokens, *range(vocabulary.n_vocab)):
            vocabulary.piece(token)


def _run(artifact: Artifact) -> None:
    engine = LlamaEngine(artifact, None, _CONTEXT, certified_only=False)
    try:
        about = engine.describe()
        residual = bytes(4 * about.width_in * 3) if about.width_in else None
        engine.run([Work(slot=0, position=0, tokens=[1, 2, 3], residual=residual)])
    finally:
        engine.stop()


def _slice(artifact: Artifact) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_slice(artifact, LayerRange(artifact.layers.begin, artifact.layers.begin + 1), Path(folder) / "s.gguf")


#: Every way from a file into native code, or into another file.
DOORS: Mapping[str, Callable[[Artifact], object]] = {
    "estimate": lambda artifact: estimate_memory(artifact, None, _CONTEXT),
    "estimate a part": lambda artifact: estimate_memory(artifact, LayerRange(1, 3), _CONTEXT),
    "vocabulary": _speak,
    "engine": _run,
    "slice": _slice,
}


def _verdict(path: Path) -> tuple[int, int]:
    """How many doors a file passed, and how many refused it; raises what is not an error of dgr's."""
    loaded = refused = 0
    for enter in DOORS.values():
        try:
            enter(Artifact.open(path))  # anew, as another process would
            loaded += 1
        except DgrError:
            refused += 1
    return loaded, refused


# --- child and parent -------------------------------------------------------------------------------------------------


def _uncheck() -> None:
    """A mutant of dgr that hands files to native code as they are."""

    def count(stored: Mapping[str, MetaValue]) -> int:
        tokens = stored["tokenizer.ggml.tokens"].value
        return len(tokens) if isinstance(tokens, MetaArray) else 0

    setattr(metadata, "vocabulary_size", count)  # noqa: B010 (a function of a module)
    setattr(Artifact, "check_forms", lambda *_: None)  # noqa: B010


def _child(base: Path, seed: int, n_cases: int, first: int, only: str | None) -> None:
    """Bring cases to the doors, a line of JSON before and after each."""
    for index, (name, change) in enumerate(damaged_files(seed, n_cases)):
        if index < first or only not in (None, name):
            continue
        print(json.dumps([index, name]), flush=True)
        signal.alarm(_PATIENCE)  # its default action ends the process, in native code too
        with tempfile.TemporaryDirectory(dir=base) as folder:
            try:
                said: object = _verdict(change(random.Random(f"{seed}:{index}"), base, Path(folder)))
            except Exception as wrong:
                said = f"{type(wrong).__name__}: {wrong}"[:300]
        print(json.dumps(said), flush=True)


def fuzz(seed: int, n_cases: int, *, only: str | None = None, unchecked: bool = False) -> FuzzReport:
    """Run the directed cases and ``n_cases`` drawn ones, in children that are started again after one that ended.

    ``only``: the name of the one case to run. ``unchecked``: a mutant of dgr that hands files to native code as they are.
    """
    loaded = refused = 0
    findings: list[FuzzFinding] = []
    with tempfile.TemporaryDirectory(prefix="dgr-fuzz-") as folder:
        environment = os.environ | {"DGR_CACHE_DIR": str(Path(folder) / "cache")}
        command = python_module("dgr.testing.file_fuzz", "--base", folder)
        command += ["--seed", str(seed), "--cases", str(n_cases), *([] if only is None else ["--only", only])]
        command += ["--unchecked"] * unchecked
        write_whole_files(Path(folder))
        first, total = 0, len(DIRECTED) + n_cases
        while first < total:
            done = subprocess.run(
                [*command, "--first", str(first)], env=environment, capture_output=True, text=True, check=False
            )
            lines = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
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
    return FuzzReport(loaded, refused, tuple(findings))


def _main() -> int:
    parser = argparse.ArgumentParser(description="Damaged files at every door that hands one to native code.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--only", help="run the case of this name alone")
    parser.add_argument("--unchecked", action="store_true", help="hand files to native code as they are")
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.base is not None:
        if args.unchecked:
            _uncheck()
        _child(args.base, args.seed, args.cases, args.first, args.only)
        if (used := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) > _MAX_RESIDENT:
            print(f"the files took {used} bytes of memory", file=sys.stderr)
            return 1
        return 0
    report = fuzz(args.seed, args.cases, only=args.only, unchecked=args.unchecked)
    for finding in report.findings:
        print(f"{finding.case}: {finding.what}")
    print(f"{report.loaded} doors passed, {report.refused} refused, {len(report.findings)} findings")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(_main())
