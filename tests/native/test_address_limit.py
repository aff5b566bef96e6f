"""Below ``ulimit -v`` a stage opens or is refused with the arithmetic: llama.cpp aborts where its bookkeeping fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Opens what the second argument names with so many MiB of address space left, and says what came of it.
OPENS = """
import resource, sys
from pathlib import Path
from dgr.engine.base import ContextParams
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.native import default_native, kernel_fingerprint
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import BudgetExceeded
from dgr.model.artifact import Artifact
artifact, context = Artifact.open(sys.argv[1]), ContextParams(n_ctx=256)
artifact.identity
default_native()
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (int(sys.argv[3]) << 20),) * 2)
try:
    if sys.argv[2] == "engine":
        LlamaEngine(artifact, None, context, certified_only=False).stop()
    elif sys.argv[2] == "kernels":
        kernel_fingerprint()
    elif sys.argv[2] == "estimate":
        estimate_memory(artifact, None, context)
    else:
        LlamaVocabulary(artifact).close()
    print("opened")
except BudgetExceeded as refused:
    print("refused:", refused)
"""


def opening(model: Path, what: str, left: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPENS, str(model), what, str(left)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{what} with {left} MiB left: {done.returncode}: {done.stderr[-300:]}"
    return done.stdout


@pytest.mark.parametrize(
    ("what", "left"), [("engine", 300), ("engine", 220), ("estimate", 100), ("vocabulary", 40), ("kernels", 30)]
)
def test_too_little_address_space_is_a_refusal(five_layers, what, left):
    assert "of address space, more than is left below the limit of" in opening(five_layers, what, left)


@pytest.mark.parametrize(("what", "left"), [("engine", 480), ("estimate", 480), ("vocabulary", 160), ("kernels", 100)])
def test_enough_address_space_is_enough(five_layers, what, left):
    assert opening(five_layers, what, left) == "opened\n"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["engine", "estimate", "vocabulary", "kernels"])
def test_no_limit_ends_the_process(five_layers, what):
    for left in range(0, 520, 13):
        assert opening(five_layers, what, left).startswith(("opened", "refused"))
