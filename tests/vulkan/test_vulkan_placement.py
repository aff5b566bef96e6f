"""What lies where: bytes by device, several devices, a part of the layers, and what is said of all that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Prompt
from vulkan.lane import NATIVE

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.engine.base import MemoryReport
from dgr.engine.devices import Device, Placement
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.errors import InputError
from dgr.selftest.chain import Chain
from dgr.v4.state_map import ContextShape, state_map

pytestmark = pytest.mark.vulkan

#: A driver rounds up what it allocates for the host: llama.cpp's estimate does not know by how much.
ROUNDING = 4096


def report(model: Path, layers: LayerRange | None = None, gpu_layers: int | None = None) -> MemoryReport:
    return estimate_memory(model, layers, NATIVE, Placement(None, gpu_layers))


@pytest.mark.parametrize("layers", ["0:5", "0:3", "3:5"])
def test_state_and_layers_lie_on_the_device(five: Path, layers: str) -> None:
    """To the byte; the host keeps the embeddings of a head, and what is handed over."""
    owned = LayerRange.parse(layers)
    engine = LlamaEngine(five, owned, NATIVE)
    try:
        memory, estimate = engine.memory(), report(five, owned)
        assert list(memory.devices) == ["Vulkan0"]
        held = memory.devices["Vulkan0"]
        formula = state_map(Artifact.open(five).hp, owned, ContextShape(256, 64, 2)).total_bytes
        assert held.state == sum(memory.state.values()) == formula
        embeddings = 4 * 64 * 512 if owned.begin == 0 else 0
        assert 0 <= memory.weights - held.weights - embeddings < ROUNDING
        assert (estimate.state, estimate.devices) == (memory.state, memory.devices)
        assert 0 <= memory.host - estimate.host < ROUNDING
        assert memory.host == memory.total - held.total
        line = engine.describe().devices[0]
        assert line.startswith("Vulkan0 ")
        assert line.endswith(f": {len(owned)} of {len(owned)} layers")
        assert engine.graph_splits >= 1
    finally:
        engine.stop()


@pytest.mark.parametrize(("layers", "gpu_layers"), [("0:5", 2), ("0:3", 1), ("0:5", 0), ("3:5", 9)])
def test_so_many_layers_as_asked_lie_on_the_device(five: Path, layers: str, gpu_layers: int) -> None:
    owned = LayerRange.parse(layers)
    held = min(gpu_layers, len(owned))
    memory = report(five, owned, gpu_layers)
    last = LayerRange(owned.end - held, owned.end) if held else None
    formula = 0 if last is None else state_map(Artifact.open(five).hp, last, ContextShape(256, 64, 2)).total_bytes
    on_device = memory.devices["Vulkan0"].state if "Vulkan0" in memory.devices else 0
    assert on_device == formula
    engine = LlamaEngine(five, owned, NATIVE, placement=Placement(None, gpu_layers))
    try:
        said = [line for line in engine.describe().devices if line.startswith("Vulkan0 ")]
        assert [line.rpartition(": ")[2] for line in said] == [f"{held} of {len(owned)} layers"]
    finally:
        engine.stop()


def test_a_stage_that_is_partly_on_the_device_computes(five: Path, prompt: Prompt) -> None:
    engine = LlamaEngine(five, None, NATIVE, placement=Placement(("Vulkan0",), 2))
    try:
        chain, tokens = Chain([engine]), prompt(70)
        first = chain.feed(tokens, chunk=32)
        frontier = engine.state_summary(0)
        engine.close(0)
        assert chain.feed(tokens, chunk=32) == first
        assert engine.state_summary(0) == frontier
    finally:
        engine.stop()


TWO_DEVICES = """
    import json, sys
    from dgr.core.route import LayerRange
    from dgr.core.values import ContextParams, Numerics
    from dgr.engine.devices import Placement
    from dgr.engine.llama import LlamaEngine
    from dgr.selftest.chain import Chain, some_tokens

    model, layers = sys.argv[1], LayerRange.parse(sys.argv[2])
    native = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, numerics=Numerics.NATIVE)
    found = {}
    for names in (("Vulkan0",), None):
        engine = LlamaEngine(model, layers, native, placement=Placement(names))
        held = {name: device.weights for name, device in engine.memory().devices.items()}
        rows = Chain([engine]).feed(some_tokens(16, 512, 1), chunk=8).hex() if len(layers) == 5 else ""
        found["one" if names else "two"] = [held, rows, list(engine.describe().devices)]
        engine.stop()
    print(json.dumps(found))
"""


def shared(held: Mapping[str, int]) -> bool:
    """Whether two devices of equal size hold about as much each."""
    return len(held) == 2 and max(held.values()) < 0.75 * sum(held.values())


@pytest.mark.parametrize("layers", ["0:5", "0:4", "2:5"])
def test_two_devices_share_what_a_stage_owns(five: Path, alone: Callable[..., Any], layers: str) -> None:
    """The same software device twice. Any range, not only the whole model, and with the bits of one device."""
    # With events between its queues, or with submissions one by one, lavapipe waits for ever.
    two = {"GGML_VK_VISIBLE_DEVICES": "0,0", "GGML_VK_DISABLE_ASYNC": "1", "GGML_VK_SERIALIZE_SUBMISSIONS": ""}
    found = alone(TWO_DEVICES, five, layers, **two)
    (held_by_one, rows_of_one, _), (held_by_two, rows_of_two, devices) = found["one"], found["two"]
    assert shared(held_by_two)
    assert not shared(held_by_one)
    assert sum(held_by_two.values()) == sum(held_by_one.values())
    assert rows_of_two == rows_of_one
    n_layers = len(LayerRange.parse(layers))
    counts = [int(line.rpartition(": ")[2].split()[0]) for line in devices if line.startswith("Vulkan")]
    assert sum(counts) == n_layers
    assert min(counts) > 0


SIDE_BY_SIDE = """
    import json, sys, trio
    from dgr.artifact.artifact import Artifact
    from dgr.core.route import parse_split
    from dgr.core.values import ContextParams, Numerics
    from dgr.cluster.local import load_engines

    async def main():
        native = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64, numerics=Numerics.NATIVE)
        engines = await load_engines(sys.argv[1], parse_split("0:2,2:4,4:5", 5), native)
        print(json.dumps([engine.describe().devices[0].split()[0] for engine in engines]))
        for engine in engines:
            engine.stop()

    trio.run(main)
"""


def test_stages_that_open_side_by_side_find_the_device_made(five: Path, alone: Callable[..., Any]) -> None:
    """Each time in a new process: only the first use of a device makes it."""
    for _ in range(3):
        assert alone(SIDE_BY_SIDE, five) == ["Vulkan0"] * 3


def test_a_device_that_is_not_there_is_refused_with_those_that_are(five: Path, device: Device) -> None:
    with pytest.raises(InputError, match=r"no device 'CUDA3' here; choose from Vulkan0 \(.*\), CPU") as refused:
        LlamaEngine(five, None, NATIVE, placement=Placement(("CUDA3",)))
    assert device.description in str(refused.value)
    with pytest.raises(InputError, match="named twice"):
        LlamaEngine(five, None, NATIVE, placement=Placement(("Vulkan0", "Vulkan0")))


def test_a_device_tells_its_memory(device: Device) -> None:
    assert device.name == "Vulkan0"
    assert 0 < device.memory_free <= device.memory_total


def test_a_stage_says_where_it_computes(five: Path) -> None:
    command = [sys.executable, "-m", "dgr", "stage", str(five), "--layers", "0:3", "--listen", "127.0.0.1:0"]
    flags = [
        "--numerics",
        "native",
        "--ctx",
        "256",
        "--batch",
        "64",
        "--ubatch",
        "64",
        "--json",
        "--until-stdin-closes",
    ]
    placed = ["--device", "Vulkan0", "--gpu-layers", "2"]
    with subprocess.Popen([*command, *flags, *placed], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stage:
        assert stage.stdin is not None
        assert stage.stdout is not None
        line = json.loads(stage.stdout.readline())
        stage.stdin.close()
    assert line["devices"][0].endswith(": 2 of 3 layers")
    assert line["device_bytes"].keys() == {"Vulkan0"}
    assert line["graph_splits"] >= 2
    wrong = subprocess.run(
        [*command, *flags, "--device", "Vulkan7"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert wrong.returncode == 2
    assert "no device 'Vulkan7' here; choose from Vulkan0" in wrong.stderr
