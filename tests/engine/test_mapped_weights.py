"""Weights where the file is mapped, or locked in memory: the stage's own tensors count, are there, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Model

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, Numerics
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.native import build_info
from dgr.gguf.types import GgmlType

CONTEXT = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64)
#: The pages that two neighbours share, and what the kernel maps around a page that is touched.
SLACK = 1 << 20

STAGE = """
import ctypes, json, resource, sys
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, Numerics
from dgr.engine.llama import LlamaEngine
from dgr.errors import BudgetExceeded

def kilobytes(path, key, name=None):
    found, here = 0, name is None
    for line in open(path):
        field, _, value = line.partition(":")
        if name is not None and "-" in field.split()[0]:
            here = line.rstrip().endswith(name)
        elif here and field == key:
            found += 1024 * int(value.split()[0])
    return found

path, layers, numerics, options, limit = sys.argv[1], *json.loads(sys.argv[2])
if limit is not None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
context = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, numerics=Numerics(numerics))
try:
    engine = LlamaEngine(path, LayerRange.parse(layers), context, **options)
except BudgetExceeded as refused:
    print(json.dumps({"refused": str(refused)}))
else:
    print(json.dumps({
        "weights": engine.memory().weights,
        "mapped": kilobytes("/proc/self/smaps", "Rss", path),
        "locked": kilobytes("/proc/self/status", "VmLck"),
    }))
"""

#: Without the right to lock beyond the limit, which root has: prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK), then a program anew.
UNPRIVILEGED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 14); os.execv(sys.executable, sys.argv[1:])"


def measure(path: Path, layers: str, numerics: str, limit: int | None = None, **options: bool) -> dict[str, Any]:
    stage = [sys.executable, "-c", STAGE, str(path), json.dumps([layers, numerics, options, limit])]
    command = [sys.executable, "-c", UNPRIVILEGED, *stage]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.parametrize("layers", ["0:3", "3:5", "5:7"])
def test_what_is_mapped_counts_as_what_is_read(small: Path, layers: str) -> None:
    """The tail's own tensors lie at both ends of the file: the span between them is all of it."""
    artifact, part = Artifact.open(small), LayerRange.parse(layers)
    engine = LlamaEngine(artifact, part, CONTEXT, mmap=True)
    try:
        assert engine.memory().weights == artifact.weight_bytes(part)
        assert 0 <= estimate_memory(artifact, part, CONTEXT).total - engine.memory().total < 4096  # padding of tensors
    finally:
        engine.stop()


def test_all_of_the_own_tensors_are_there_and_nothing_else(tiny: Path) -> None:
    own = Artifact.open(tiny).weight_bytes(LayerRange(30, 43))
    found = measure(tiny, "30:43", "exact", mmap=True)
    assert found["weights"] == own
    assert own <= found["mapped"] <= own + SLACK
    assert found["locked"] == 0


def test_what_was_repacked_is_not_kept_twice(model: Model) -> None:
    """Native kernels repack Q4_K: those tensors leave the mapped file."""
    if "AVX2" not in build_info()["cpu_features"]:
        pytest.skip("upstream repacks Q4_K on CPUs with AVX2, and on some others")
    artifact, whole = Artifact.open(model("q4_k", layers=7)), LayerRange(0, 7)
    own = artifact.weight_bytes(whole)
    repacked = sum(tensor.n_bytes for tensor in artifact.tensors_of(whole) if tensor.type is GgmlType.Q4_K)
    assert repacked > 4 * SLACK
    found = measure(artifact.file.path, "0:7", Numerics.NATIVE, mmap=True)
    assert found["weights"] == own
    assert own - repacked <= found["mapped"] <= own - repacked + SLACK


@pytest.fixture
def locks() -> None:
    if "-fsanitize=address" in build_info()["flags"]:
        pytest.skip("under AddressSanitizer mlock does nothing")


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_locked_weights_are_locked_whole(small: Path, mmap: bool) -> None:
    own = Artifact.open(small).weight_bytes(LayerRange(5, 7))
    found = measure(small, "5:7", "exact", mmap=mmap, mlock=True)
    assert own <= found["locked"] <= own + SLACK


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_a_limit_refuses_the_lock_by_name(small: Path, mmap: bool) -> None:
    found = measure(small, "5:7", "exact", limit=65536, mmap=mmap, mlock=True)
    assert "weights cannot be locked in memory" in found["refused"]
    assert "the limit of this process is 65536 bytes: raise it (ulimit -l, LimitMEMLOCK=)" in found["refused"]
