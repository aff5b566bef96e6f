"""Every bad input is a typed error that names the value and the limit; the process lives, and nothing else notices."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from fixture_types import Model, Prompt
from msgspec.structs import replace

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, LogitsWanted, Numerics
from dgr.engine.base import Work
from dgr.engine.llama import LlamaEngine
from dgr.engine.numerics import ExactnessRecord, save_exactness_record
from dgr.errors import (
    ArtifactError,
    ContextLimitExceeded,
    DgrError,
    InputError,
    InvalidLayerRange,
    NonFinite,
    NumericsRefused,
    UnsupportedModel,
)
from dgr.selftest.chain import some_tokens
from dgr.testing.state_inspector import InspectedEngine
from dgr.v4.state_map import Component

#: Writes a changed copy of the model; its path.
Changed = Callable[[Callable[[bytearray], bytearray]], Path]
CONTEXT = ContextParams(n_ctx=256, n_batch=128, n_ubatch=128, n_seq_max=3)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def changed(small: Path, tmp_path: Path) -> Changed:
    """A copy of the model with its bytes changed."""

    def write(change: Callable[[bytearray], bytearray]) -> Path:
        path = tmp_path / "changed.gguf"
        path.write_bytes(change(bytearray(small.read_bytes())))
        return path

    return write


def replaced(data: bytearray, old: bytes, new: bytes, after: bytes = b"") -> bytearray:
    at = data.index(old, data.index(after))
    data[at : at + len(old)] = new
    return data


def with_ratio(data: bytearray, layer: int, ratio: int) -> bytearray:
    """The array of compress ratios with one entry changed: key, type, element type, count, int32 values."""
    key = b"deepseek4.attention.compress_ratios"
    struct.pack_into("<i", data, data.index(key) + len(key) + 16 + 4 * layer, ratio)
    return data


@pytest.mark.parametrize("kept", [0, 3, 20, 1000, 100_000, -5000, -1])
def test_a_truncated_file(changed: Changed, kept: int) -> None:
    path = changed(lambda data: data[:kept])
    with pytest.raises(ArtifactError, match=rf"{re.escape(str(path))}: .*\b\d+ bytes.*fetch it again"):
        LlamaEngine(path, None, CONTEXT)


def test_another_architecture(changed: Changed) -> None:
    path = changed(lambda data: replaced(data, b"deepseek4", b"deepseek2", after=b"general.architecture"))
    with pytest.raises(UnsupportedModel, match=r"'deepseek2'.*'deepseek4'"):
        LlamaEngine(path, None, CONTEXT)


def test_a_missing_tensor(changed: Changed) -> None:
    # The other name is of a tensor that a file may have.
    path = changed(lambda data: replaced(data, b"blk.3.ffn_gate_inp.weight", b"blk.3.exp_probs_b_vl.bias"))
    with pytest.raises(ArtifactError, match=r"'blk\.3\.ffn_gate_inp\.weight' is missing, but layer range 0:7 needs it"):
        LlamaEngine(path, None, CONTEXT)


@pytest.mark.parametrize("ratio", [7, 64, -4, 256])
def test_a_ratio_that_is_none(changed: Changed, ratio: int) -> None:
    path = changed(lambda data: with_ratio(data, 3, ratio))
    with pytest.raises(UnsupportedModel, match=rf"compress_ratios\[3\] is {ratio}; only 0, 4 and 128"):
        LlamaEngine(path, None, CONTEXT)


@pytest.mark.parametrize(("text", "limit"), [("3:3", "empty"), ("5:3", "empty"), ("0:8", "0:7"), ("7:9", "0:7")])
def test_a_range_that_is_none(small: Path, text: str, limit: str) -> None:
    with pytest.raises(InvalidLayerRange, match=rf"{text}.*{limit}"):
        LlamaEngine(small, LayerRange.parse(text), CONTEXT)


# --- exact numerics ---------------------------------------------------------------------------------------------------


def test_exact_refuses_types_that_are_not_exact_here(
    model: Model, exact_here: ExactnessRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, of_f32 = model("mixed", layers=7), model("f32", layers=7)
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    with pytest.raises(NumericsRefused, match=f"{exact_here.fingerprint}.*dgr selftest numerics"):
        LlamaEngine(path, None, CONTEXT)

    failures = {"weights bf16": "3 of 160 rows differ", "K cache f32": "does not run"}
    save_exactness_record(ExactnessRecord(exact_here.fingerprint, ("f32", "q8_0"), ("f16",), failures))
    with pytest.raises(NumericsRefused, match="type bf16 is not exact on this machine; exact are f32, q8_0"):
        LlamaEngine(path, None, CONTEXT)
    with pytest.raises(NumericsRefused, match="type f32 is not exact on this machine; exact are f16"):
        LlamaEngine(of_f32, None, replace(CONTEXT, type_k="f32"))
    save_exactness_record(ExactnessRecord(exact_here.fingerprint, ("f32", "q8_0"), ("f16",)))
    with pytest.raises(
        NumericsRefused,
        match=r"bf16, mxfp4 have not been tested on this machine; exact are f32, q8_0; run.*--types bf16,mxfp4",
    ):
        LlamaEngine(path, None, CONTEXT)
    with pytest.raises(NumericsRefused, match="type f32 has not been tested on this machine; exact are f16"):
        LlamaEngine(of_f32, None, replace(CONTEXT, type_k="f32"))
    LlamaEngine(path, None, replace(CONTEXT, numerics=Numerics.NATIVE)).stop()
    LlamaEngine(of_f32, None, CONTEXT).stop()


def test_a_record_of_other_kernels_does_not_count(
    small: Path, exact_here: ExactnessRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    path = save_exactness_record(ExactnessRecord("0" * 32, exact_here.weight_types, exact_here.k_types))
    path.rename(path.with_name(f"{exact_here.fingerprint}.json"))
    with pytest.raises(NumericsRefused):
        LlamaEngine(small, None, CONTEXT)


# --- context parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", 0),
        ("n_ctx", 2**31),
        ("n_batch", 0),
        ("n_ubatch", 16),
        ("n_ubatch", 129),
        ("n_seq_max", 0),
        ("n_seq_max", 257),
    ],
)
def test_context_parameters_out_of_range(small: Path, name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"{name} is {value}\b.*\d"):
        LlamaEngine(small, None, replace(CONTEXT, **{name: value}))


@pytest.mark.parametrize("threads", [0, -1, 1000, 2**20])
def test_more_threads_than_cpus(small: Path, threads: int) -> None:
    with pytest.raises(InputError, match=rf"threads is {threads}\b"):
        LlamaEngine(small, None, CONTEXT, threads=threads)


# --- work that a guard refuses: nothing is changed --------------------------------------------------------------------


@pytest.fixture
def head(small: Path) -> Iterator[InspectedEngine]:
    engine = InspectedEngine(small, LayerRange(0, 3), CONTEXT)
    yield engine
    engine.stop()


@pytest.fixture
def tail(small: Path) -> Iterator[InspectedEngine]:
    engine = InspectedEngine(small, LayerRange(3, 7), CONTEXT)
    yield engine
    engine.stop()


def images(engine: InspectedEngine) -> list[Mapping[tuple[Component, int], bytes]]:
    return [engine.image(slot) for slot in range(CONTEXT.n_seq_max)]


def good_residual(n_tokens: int, seed: int = 0) -> bytes:
    """A residual as a previous stage might send it: floats of order one."""
    ids = some_tokens(n_tokens * 256, 4096, seed)
    return struct.pack(f"<{len(ids)}f", *(value / 1024 - 2 for value in ids))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ([Work(1, 20, [-1])], InputError, "token id -1 .*0..511"),
        ([Work(1, 20, [512])], InputError, "token id 512 .*0..511"),
        ([Work(1, 20, [0, 2**31])], InputError, "token id 2147483648 "),
        ([Work(1, 20, [2**70])], InputError, f"token id {2**70} "),
        ([Work(1, 20, [])], InputError, "n_tokens is 0, must be in 1..n_batch .128"),
        ([], InputError, "n_tokens is 0, must be in 1..n_batch .128"),
        ([Work(1, 20, [1] * 129)], InputError, "n_tokens is 129, must be in 1..n_batch .128"),
        ([Work(1, 19, [1])], InputError, "position of entry 0 is 19, slot 1 continues at 20"),
        ([Work(1, 21, [1])], InputError, "position of entry 0 is 21, slot 1 continues at 20"),
        ([Work(1, -1, [1])], InputError, "position of entry 0 is -1, slot 1 continues at 20"),
        ([Work(1, 2**40, [1])], InputError, f"position {2**40} "),
        ([Work(2, 5, [1])], InputError, "position of entry 0 is 5, slot 2 continues at 0"),
        ([Work(3, 0, [1])], InputError, "slot is 3, must be in 0..2"),
        ([Work(-1, 0, [1])], InputError, "slot is -1, must be in 0..2"),
        ([Work(1, 20, [1]), Work(0, 250, [1])], InputError, "slot 0 at entry 1 follows slot 1"),
        ([Work(0, 250, [1] * 7)], ContextLimitExceeded, "slot 0 holds 250 tokens and cannot take 7 more: n_ctx is 256"),
        ([Work(0, 250, [1]), Work(1, 20, [600])], InputError, "token id 600 at entry 1"),
        ([Work(1, 20, [1], bytes(1024))], InputError, "residual of 1024 bytes; stage 0:3 takes"),
    ],
)
def test_refused_by_the_head(
    head: InspectedEngine, prompt: Prompt, batch: Sequence[Work], error: type[DgrError], message: str
) -> None:
    for begin, end in ((0, 128), (128, 250)):
        head.run([Work(0, begin, prompt(end)[begin:])])
    head.run([Work(1, 0, prompt(20, seed=1))])
    before = images(head)
    with pytest.raises(error, match=message):
        head.run(batch)
    assert images(head) == before
    assert [head.position(slot) for slot in range(3)] == [250, 20, 0]
    head.run([Work(0, 250, prompt(6)), Work(1, 20, prompt(20))])


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (None, "residual of 0 bytes; stage 3:7 takes 3 x 256 f32 = 3072 bytes"),
        (bytes(2048), "residual of 2048 bytes; stage 3:7 takes 3 x 256 f32 = 3072 bytes"),
        (bytes(4096), "residual of 4096 bytes; stage 3:7 takes 3 x 256 f32 = 3072 bytes"),
        (bytes(3071), "residual of 3071 bytes; stage 3:7 takes 3 x 256 f32 = 3072 bytes"),
    ],
)
def test_a_residual_of_another_size(tail: InspectedEngine, residual: bytes | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tail.run([Work(1, 0, [1, 2, 3], residual)])
    assert not any(any(rows) for key, rows in tail.image(1).items() if key[1] >= 0)


@pytest.mark.parametrize("slot", [-1, 3, 2**40])
def test_a_slot_that_is_none(head: InspectedEngine, slot: int) -> None:
    for call in (head.position, head.close, head.state_summary):
        with pytest.raises(InputError, match=rf"slot is {slot}, must be in 0..2"):
            call(slot)


# --- residuals that are not numbers -----------------------------------------------------------------------------------

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "1e38": 1e38, "-1e38": -1e38}


def bad_residual(value: float, n_tokens: int = 3, row: int = 1) -> bytes:
    residual = bytearray(good_residual(n_tokens))
    struct.pack_into("<f", residual, 4 * (256 * row + 7), value)
    return bytes(residual)


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "in a batch"])
def test_a_bad_residual_is_refused_and_no_session_notices(
    small: Path, tail: InspectedEngine, prompt: Prompt, value: float, beside: bool
) -> None:
    undisturbed = run_two(small, prompt)
    others = [Work(0, 0, prompt(100), good_residual(100))]
    tail.run(others)
    before = images(tail)
    batch = [Work(1, 0, [1, 2, 3], bad_residual(value))]
    if beside:
        batch = [Work(0, 100, prompt(5), good_residual(5)), *batch]
    with pytest.raises(NonFinite, match=r"slot 1 at position 1 holds"):
        tail.run(batch)
    assert images(tail) == before
    assert finish_two(tail, prompt) == undisturbed


def test_an_error_lets_go_of_the_residual(tail: InspectedEngine) -> None:
    """A buffer that lives on in an error's traceback would crash the collector of some CPythons (gh-77894)."""
    view = memoryview(bad_residual(float("nan")))
    with pytest.raises(NonFinite) as caught:
        tail.run([Work(1, 0, [1, 2, 3], view)])
    view.release()  # BufferError when anything still refers to it
    assert caught.value.__traceback__ is not None


def run_two(path: Path, prompt: Prompt) -> list[bytes]:
    """What two sessions give that nobody disturbs: slot 0 goes on after 100 tokens, slot 1 starts."""
    engine = InspectedEngine(path, LayerRange(3, 7), CONTEXT)
    try:
        engine.run([Work(0, 0, prompt(100), good_residual(100))])
        return finish_two(engine, prompt)
    finally:
        engine.stop()


def finish_two(engine: InspectedEngine, prompt: Prompt) -> list[bytes]:
    batch = [Work(slot, at, prompt(40), good_residual(40), LogitsWanted.ALL) for slot, at in ((0, 100), (1, 0))]
    return [bytes(output.logits or b"") for output in engine.run(batch)]


def test_the_worst_that_a_slot_can_hold_stays_in_it(small: Path, tail: InspectedEngine, prompt: Prompt) -> None:
    """Values at the limit, then NaN in every row: the neighbours do not notice, and the cleared slot is as a new one."""
    undisturbed = run_two(small, prompt)
    tail.run([Work(0, 0, prompt(100), good_residual(100))])
    largest = struct.pack("<256f", *[1e15] * 256) * 3
    outputs = tail.run([Work(1, 0, [1, 2, 3], largest), Work(2, 0, prompt(9), good_residual(9))])
    assert all(output.finite for output in outputs)
    for component, layer in tail.owned():  # as the worst that any graph could leave
        nan = b"\xff" * len(tail.rows(component, layer, 1, count=1)[0])
        for row in range(tail.map[component].rows):
            tail.poke(component, layer, row, nan, slot=1)
    beside = tail.run([Work(2, 9, prompt(9), good_residual(9), LogitsWanted.ALL)])
    assert beside[0].finite
    tail.close(1)
    assert not any(any(rows) for key, rows in tail.image(1).items() if key[1] >= 0)
    tail.close(2)
    assert finish_two(tail, prompt) == undisturbed
