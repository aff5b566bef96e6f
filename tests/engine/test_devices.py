"""Which devices a stage takes, where it is asked to take some: in a build for the CPU too, which has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Model, Prompt
from msgspec.structs import replace

import dgr.engine.native as native
from dgr.core.values import ContextParams, Numerics
from dgr.engine.devices import Placement, find_devices
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.errors import InputError
from dgr.selftest.chain import Chain
from dgr.selftest.llama_chain import open_chain

EXACT = ContextParams(n_ctx=256, n_batch=64, n_ubatch=64)
NATIVE = replace(EXACT, numerics=Numerics.NATIVE)


def test_a_device_that_is_not_there_is_refused_with_those_that_are(small: Path) -> None:
    choice = ", ".join([*(f"{one.name} ({one.description})" for one in find_devices()), "CPU"])
    for names in (("NPU7",), ("CPU", "NPU7")):
        with pytest.raises(InputError) as caught:
            LlamaEngine(small, None, NATIVE, placement=Placement(names))
        assert str(caught.value).endswith(f"there is no device 'NPU7' here; choose from {choice}")


@pytest.mark.parametrize("placement", [Placement(None, 2)], ids=str)
def test_exact_numerics_take_no_device(small: Path, placement: Placement) -> None:
    with pytest.raises(InputError, match="exact numerics runs on the CPU alone: name no device"):
        LlamaEngine(small, None, EXACT, placement=placement)
    engine = LlamaEngine(small, None, EXACT, placement=Placement(("CPU",), 0))
    try:
        assert engine.memory().devices == {}
    finally:
        engine.stop()


def test_the_cpu_alone_can_be_asked_for(small: Path, prompt: Prompt) -> None:
    rows = []
    for placement in (Placement(("CPU",)), Placement(None, 0), Placement(("CPU",), 4)):
        engine = LlamaEngine(small, None, NATIVE, placement=placement)
        try:
            rows.append(Chain([engine]).feed(prompt(40), chunk=20))
            memory = engine.memory()
            assert memory.devices == {}
            assert memory == estimate_memory(small, None, NATIVE, placement)
            assert memory.host == memory.total
        finally:
            engine.stop()
    assert len(set(rows)) == 1


def test_layers_for_devices_need_one(small: Path) -> None:
    for load in (LlamaEngine, estimate_memory):
        with pytest.raises(InputError, match="gpu_layers is 2, and there is no device here but the CPU"):
            load(small, None, NATIVE, placement=Placement(None, 2))


@pytest.mark.parametrize(
    ("devices", "gpu_layers", "message"),
    [
        ((), None, "no device is named"),
        (("",), None, "device '' is no name like CUDA0"),
        (("CUDA0,CUDA1",), None, "is no name like CUDA0"),
        (("a" * 64,), None, "is no name like CUDA0"),
        ((0,), None, "device 0 is no name like CUDA0"),
        (None, -1, "gpu_layers is -1"),
        (None, True, "gpu_layers is True"),
        (None, 2**15 + 1, "gpu_layers is 32769"),
    ],
)
def test_what_is_no_placement_is_refused(devices: Any, gpu_layers: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Placement(devices, gpu_layers)


def test_names_are_given_with_commas() -> None:
    assert Placement.parse("CUDA0, CUDA1", 3) == Placement(("CUDA0", "CUDA1"), 3)
    assert Placement.parse(None) == Placement()
    with pytest.raises(InputError, match="device '' is no name"):
        Placement.parse("CUDA0,")


# --- the fingerprint -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    """The fingerprint is computed anew, before and after."""
    native.kernel_fingerprint.cache_clear()
    yield
    native.kernel_fingerprint.cache_clear()


def fingerprint_with(monkeypatch: pytest.MonkeyPatch, options: str) -> str:
    info = native.build_info()
    with monkeypatch.context() as patch:
        patch.setattr(native, "build_info", lambda: {**info, "ggml_options": f"{info['ggml_options']} {options}"})
        native.kernel_fingerprint.cache_clear()
        return native.kernel_fingerprint()


@pytest.mark.parametrize(
    "options",
    [
        "GGML_VULKAN=ON",
        "GGML_CUDA=ON GGML_CUDA_NCCL=ON",
        "GGML_HIP=ON",
        "GGML_METAL=OFF",
        "GGML_BLAS=ON GGML_BLAS_VENDOR=X",
    ],
)
def test_a_backend_for_devices_is_no_other_kernel(options: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    assert fingerprint_with(monkeypatch, options) == fingerprint_with(monkeypatch, "")


@pytest.mark.parametrize("options", ["GGML_NATIVE=OFF", "GGML_AVX2=OFF", "GGML_LLAMAFILE=OFF", "GGML_CPU_EXACT=OFF"])
def test_an_option_of_the_cpu_s_is_another_kernel(options: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    assert fingerprint_with(monkeypatch, options) != fingerprint_with(monkeypatch, "")


# --- head sizes that devices have kernels for ------------------------------------------------------------------------


def test_published_head_sizes_split_as_the_whole(model: Model, prompt: Prompt) -> None:
    path, tokens = model("f32", layers=5, preset="heads"), prompt(140, seed=1)
    with open_chain(path, None, EXACT) as whole, open_chain(path, "0:2,2:4,4:5", EXACT) as chain:
        assert chain.feed(tokens, chunk=33) == whole.feed(tokens, chunk=64)
