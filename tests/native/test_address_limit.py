"""Below ``ulimit -v`` or ``-d`` a stage opens or is refused with the arithmetic: llama.cpp aborts where bookkeeping fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

LIMITS = pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
#: Goes through doors with so many MiB of address space left, and says what came of each.
DOORS = """
import resource, sys
from pathlib import Path
from dgr.core.values import ContextParams
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.native import default_native, kernel_fingerprint
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import BudgetExceeded
from dgr.artifact.artifact import Artifact
artifact, context = Artifact.open(sys.argv[1]), ContextParams(n_ctx=256)
artifact.identity
default_native()
doors = {
    "engine": lambda: LlamaEngine(artifact, None, context, certified_only=False).stop(),
    "estimate": lambda: estimate_memory(artifact, None, context),
    "vocabulary": lambda: LlamaVocabulary(artifact).close(),
    "kernels": kernel_fingerprint,
}
kind = getattr(resource, sys.argv[2])
hard = resource.getrlimit(kind)[1]
field = {"RLIMIT_AS": 0, "RLIMIT_DATA": 5}[sys.argv[2]]
for door, left in zip(sys.argv[3::2], map(int, sys.argv[4::2])):
    print(door, left, end=" ", flush=True)
    taken = int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
    resource.setrlimit(kind, (taken + (left << 20), hard))
    try:
        doors[door]()
        said = "opened"
    except BudgetExceeded as refused:
        said = f"refused: {refused}"
    resource.setrlimit(kind, (hard, hard))
    print(said, flush=True)
"""


def through(model: Path, limit: str, *doors: tuple[str, int]) -> list[str]:
    """What a child says of every door, below a limit."""
    asked = [str(part) for door in doors for part in door]
    done = subprocess.run(
        [sys.executable, "-c", DOORS, str(model), limit, *asked], capture_output=True, text=True, check=False
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, f"{said[-1:]}: {done.returncode}: {done.stderr[-300:]}"
    return said


@LIMITS
def test_a_stage_opens_or_is_refused(five_layers: Path, limit: str) -> None:
    little = (("engine", 220), ("engine", 300), ("estimate", 100), ("vocabulary", 40), ("kernels", 30))
    enough = (("vocabulary", 160), ("kernels", 100), ("estimate", 480), ("engine", 480))
    said = through(five_layers, limit, *little, *enough)
    for (door, left), line in zip(little, said, strict=False):
        assert line.startswith(f"{door} {left} refused:")
        assert "of address space, more than is left below the limit of" in line
    assert said[len(little) :] == [f"{door} {left} opened" for door, left in enough]


@pytest.mark.slow
@LIMITS
@pytest.mark.parametrize("door", ["engine", "estimate", "vocabulary", "kernels"])
def test_no_limit_ends_the_process(five_layers: Path, door: str, limit: str) -> None:
    lefts: Iterable[int] = range(0, 520, 5)
    said = through(five_layers, limit, *((door, left) for left in lefts))
    assert len(said) == 104
    assert {line.split()[2] for line in said} == {"opened", "refused:"}
