"""What a stage reads from disk and keeps in memory is what its own tensors weigh, in both load modes.

Measured in a process of its own, on a model of 413 MiB: bytes that came from the disk and through ``read`` (by
``/proc/self/io``), and resident memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Model

from dgr.artifact import digests
from dgr.artifact.artifact import Artifact
from dgr.artifact.slicing import write_slice
from dgr.core.route import LayerRange

MIB = 1 << 20
#: Headers (read by Python and twice by llama.cpp), hash tables, records.
OVERHEAD = 12 * MIB
#: The kernel reads ahead past the end of each tensor.
READ_AHEAD = 24 * MIB

STAGE = """
import json, os, sys
from dgr.engine.base import Work
from dgr.engine.llama import LlamaEngine
from dgr.engine.native import kernel_fingerprint
from dgr.artifact import digests
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams

digests._SETTLED = -1.0  # digests are kept however young the file is

def io():
    found = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return {"disk": int(found["read_bytes"]), "read": int(found["rchar"])}

def resident():
    found = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return 1024 * sum(int(found[key].split()[0]) for key in ("RssAnon", "RssFile"))

def mapped(path):
    # resident bytes of the file's own pages
    found, here = 0, False
    for line in open("/proc/self/smaps"):
        key, _, value = line.partition(":")
        if "-" in key.split()[0]:
            here = line.rstrip().endswith(path)
        elif here and key == "Rss":
            found += 1024 * int(value.split()[0])
    return found

path, layers, mmap, cold = sys.argv[1], LayerRange.parse(sys.argv[2]), sys.argv[3] == "mmap", sys.argv[4:]
kernel_fingerprint()  # libraries and kernels are loaded before counting
for name in cold:
    fd = os.open(name, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
before, resident_before = io(), resident()
engine = LlamaEngine(path, layers, ContextParams(n_ctx=512, n_ubatch=64, n_batch=64), mmap=mmap)
after, resident_after, mapped_after = io(), resident(), mapped(path)
about = engine.describe()
residual = bytes(4 * about.width_in * 8) if about.width_in else None
engine.run([Work(0, 0, list(range(8)), residual=residual)])
memory, after_run = engine.memory(), io()
print(json.dumps({
    "disk": after["disk"] - before["disk"],
    "disk_after_run": after_run["disk"] - before["disk"],
    "read": after["read"] - before["read"],
    "resident": resident_after - resident_before,
    "resident_after_run": resident() - resident_before,
    "mapped": mapped_after,
    "mapped_after_run": mapped(path),
    "weights": memory.weights,
    "rest": memory.total - memory.weights,
    "artifact": about.artifact,
}))
"""


@pytest.fixture(scope="module")
def big(model: Model) -> Artifact:
    """649 M parameters, with the manifest on record, as after the first stage that ran."""
    artifact = Artifact.open(model("mixed", preset="big"))
    assert artifact.file_bytes > 400 * MIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "_SETTLED", -1.0)  # it may have been written just now
        artifact.manifest()
    assert artifact.known_manifest() is not None
    return artifact


def measure(artifact: Artifact, layers: LayerRange, mode: str) -> dict[str, Any]:
    files = [str(file.path) for file in artifact.parts.present]
    command = [sys.executable, "-c", STAGE, str(artifact.file.path), str(layers), mode, *files]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def reads_from_disk(path: Path) -> bool:
    """Whether reads of this file show in ``read_bytes``: they do not on tmpfs, say."""
    script = (
        "import os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\nos.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "os.pread(fd, 1 << 22, 64 << 20)\nprint(open('/proc/self/io').read())"
    )
    said = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True).stdout
    return int(said.split("read_bytes: ")[1].split()[0]) >= 1 << 22


def assert_own(found: dict[str, int], own: int, mode: str, cold: bool) -> None:
    """``own``: bytes of the range's tensors. ``cold``: whether reads from the disk can be counted here."""
    if mode == "read":
        assert own <= found["read"] <= own + OVERHEAD
        assert own <= found["weights"] <= own + MIB
        assert found["mapped"] == 0
    else:
        assert found["read"] <= OVERHEAD
        assert found["weights"] == own  # not the span of the file from the first tensor to the last
        for when in ("mapped", "mapped_after_run"):  # all of the tensors are there at once, and nothing else
            assert own <= found[when] <= own + MIB
    assert 0.95 * own <= found["resident"]
    if cold:
        assert own - OVERHEAD <= found["disk"] <= own + READ_AHEAD
        assert found["disk_after_run"] <= own + READ_AHEAD
    for when in ("resident", "resident_after_run"):
        assert found[when] <= 1.1 * own + found["rest"] + OVERHEAD


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["read", "mmap"])
@pytest.mark.parametrize("layers", ["0:21", "21:43", "20:22", "0:43"])
def test_a_stage_reads_and_keeps_its_own_tensors(big: Artifact, layers: str, mode: str) -> None:
    part = LayerRange.parse(layers)
    found = measure(big, part, mode)
    assert_own(found, big.weight_bytes(part), mode, reads_from_disk(big.file.path))
    assert found["artifact"] == big.identity


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["read", "mmap"])
def test_a_slice_is_held_against_its_manifest_once(
    big: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    part, path = LayerRange(21, 43), tmp_path / "slice.gguf"
    write_slice(big, part, path)
    own = big.weight_bytes(part)
    assert path.stat().st_size <= own + MIB
    cold = reads_from_disk(path)
    first, again = (measure(Artifact.open(path), part, mode) for _ in range(2))
    # The first stage reads its tensors once more, for the digests; the disk does not.
    times = 2 if mode == "read" else 1
    assert times * own <= first["read"] <= times * own + OVERHEAD
    if cold:
        assert first["disk"] <= own + READ_AHEAD
    assert_own(again, own, mode, cold)
