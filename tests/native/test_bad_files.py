"""Files that would make llama.cpp abort, or read out of bounds, are refused with a reason; the process lives."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from dgr.engine._native import ffi, lib
from dgr.gguf.reader import read_gguf

Edit = Callable[[bytearray], None]


def open_stage(path: Path, begin: int = 0, end: int = 0, *, check_tensors: bool = False) -> tuple[int, str]:
    """Status and message of an attempt to open layers of a file."""
    params = ffi.new("dgr_stage_params *", lib.dgr_stage_params_default())
    params.layer_begin, params.layer_end, params.n_ctx = begin, end, 256
    params.check_tensors = check_tensors
    stage = ffi.new("dgr_stage **")
    status = lib.dgr_stage_open(str(path).encode(), params, stage)
    lib.dgr_stage_close(stage[0])
    return status, ffi.string(lib.dgr_last_error()).decode()


def open_vocab(path: Path) -> tuple[int, str]:
    vocab = ffi.new("dgr_vocab **")
    status = lib.dgr_vocab_open(str(path).encode(), vocab)
    lib.dgr_vocab_close(vocab[0])
    return status, ffi.string(lib.dgr_last_error()).decode()


def value_offset(data: bytearray, key: str) -> int:
    """Offset of the value behind a metadata key (after its type)."""
    name = key.encode()
    at = data.index(struct.pack("<Q", len(name)) + name)
    return at + 8 + len(name) + 4


def integer(key: str, value: int) -> Edit:
    """Overwrite the 32-bit integer of a key."""

    def edit(data: bytearray) -> None:
        struct.pack_into("<I", data, value_offset(data, f"deepseek4.{key}"), value)

    return edit


def element(key: str, index: int, value: int) -> Edit:
    """Overwrite one element of an array of 32-bit integers."""

    def edit(data: bytearray) -> None:
        struct.pack_into("<I", data, value_offset(data, f"deepseek4.{key}") + 12 + 4 * index, value)

    return edit


def text(key: str, old: bytes, new: bytes) -> Edit:
    """Overwrite a string by another of equal length."""

    def edit(data: bytearray) -> None:
        at = value_offset(data, key) + 8
        assert data[at : at + len(old)] == old
        assert len(old) == len(new)
        data[at : at + len(new)] = new

    return edit


@pytest.fixture
def changed(five_layers: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    def change(edit: Edit) -> Path:
        data = bytearray(five_layers.read_bytes())
        edit(data)
        path = tmp_path / "changed.gguf"
        path.write_bytes(data)
        return path

    return change


def test_the_unchanged_file_opens(five_layers: Path) -> None:
    assert open_stage(five_layers)[0] == lib.DGR_OK
    assert open_stage(five_layers, 2, 3)[0] == lib.DGR_OK
    assert open_vocab(five_layers)[0] == lib.DGR_OK


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (integer("block_count", 0), "block_count is 0"),
        (integer("block_count", 600), "block_count is 600, must be in 1..512"),
        (integer("hash_layer_count", 99), "hash_layer_count is 99"),
        (integer("expert_count", 0), "expert_count is 0"),
        (integer("expert_count", 5000), "expert_count is 5000, must be in 1..1024"),
        (integer("expert_used_count", 0), "expert_used_count is 0"),
        (integer("expert_used_count", 99), "expert_used_count is 99"),
        (integer("attention.head_count", 0), "head_count is 0"),
        (integer("attention.head_count_kv", 2), "head_count_kv is 2, must be in 1..1"),
        (integer("attention.output_group_count", 0), "output_group_count is 0"),
        (integer("attention.output_group_count", 3), "multiple of attention.output_group_count (3)"),
        (integer("attention.indexer.key_length", 32), "indexer.key_length is 32, must be a multiple"),
        (integer("attention.indexer.top_k", 0), "indexer.top_k is 0"),
        (integer("attention.sliding_window", 0), "sliding_window is 0"),
        (integer("rope.dimension_count", 7), "rope.dimension_count is 7, must be a multiple of 2"),
        (integer("rope.dimension_count", 4096), "rope.dimension_count is 4096"),
        (integer("hyper_connection.count", 3), "hyper_connection.count is 3"),
        (integer("hyper_connection.sinkhorn_iterations", 0), "sinkhorn_iterations is 0"),
        (element("attention.compress_ratios", 2, 7), "compress_ratios[2] is 7, must be 0, 4 or 128"),
        (element("attention.compress_ratios", 2, 2**32 - 4), "compress_ratios[2]"),
        (text("general.architecture", b"deepseek4", b"deepseek2"), "architecture is deepseek2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata(changed: Callable[[Edit], Path], edit: Edit, message: str) -> None:
    path = changed(edit)
    for status, found in (open_stage(path), open_stage(path, 1, 2), open_vocab(path)):
        assert status == lib.DGR_ERR_LOAD
        assert message in found


def test_a_tokenizer_of_no_type(changed: Callable[[Edit], Path]) -> None:
    path = changed(text("tokenizer.ggml.model", b"gpt2", b"none"))
    status, message = open_vocab(path)
    assert status == lib.DGR_ERR_LOAD
    assert "has no tokenizer" in message


@pytest.mark.parametrize("expert", [8, -1, 2**31 - 1])
def test_hash_routing_to_an_expert_that_is_not_there(five_layers: Path, tmp_path: Path, expert: int) -> None:
    path = tmp_path / "routing.gguf"
    shutil.copy(five_layers, path)
    table = read_gguf(path).tensors["blk.1.ffn_gate_tid2eid.weight"]
    with path.open("r+b") as file:
        file.seek(table.offset + 4 * 77)
        file.write(struct.pack("<i", expert))
    status, message = open_stage(path)
    assert status == lib.DGR_ERR_LOAD
    assert f"blk.1.ffn_gate_tid2eid names expert {expert}" in message
    assert open_stage(path, 2, 5)[0] == lib.DGR_OK  # not its table


def test_weights_that_are_not_finite(five_layers: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    shutil.copy(five_layers, path)
    with path.open("r+b") as file:
        file.seek(read_gguf(path).tensors["blk.3.attn_norm.weight"].offset)
        file.write(struct.pack("<f", float("nan")))
    status, message = open_stage(path, check_tensors=True)
    assert status == lib.DGR_ERR_LOAD
    assert "blk.3.attn_norm.weight" in message
    assert open_stage(path, 0, 3, check_tensors=True)[0] == lib.DGR_OK  # not its layer


@pytest.mark.parametrize("kept", [0, 3, 24, 1000, 0.5, 0.99])
def test_truncation(five_layers: Path, tmp_path: Path, kept: float) -> None:
    data = five_layers.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    status, message = open_stage(path)
    assert status == lib.DGR_ERR_LOAD
    assert str(path) in message


def test_a_missing_tensor_is_named(changed: Callable[[Edit], Path]) -> None:
    def rename(data: bytearray) -> None:
        at = data.index(b"blk.3.attn_norm.weight")
        data[at : at + 22] = b"blk.3.xttn_norm.weight"

    path = changed(rename)
    status, message = open_stage(path)
    assert status == lib.DGR_ERR_LOAD
    assert "blk.3.attn_norm.weight" in message


@pytest.mark.parametrize("layers", [(0, 6), (5, 6), (5, 0), (3, 3), (4, 2), (-1, 2), (0, -1)])
def test_ranges(five_layers: Path, layers: tuple[int, int]) -> None:
    status, message = open_stage(five_layers, *layers)
    assert status == lib.DGR_ERR_ARGUMENT
    assert "layers {}:{}".format(*layers) in message


@pytest.mark.parametrize(
    "data", [b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe6\xbc", b"a\x80", b"\x00"]
)
def test_bytes_that_are_no_text(five_layers: Path, data: bytes) -> None:
    """Python's text never has them; the C interface takes any bytes, and says so where llama.cpp cannot."""
    vocab = ffi.new("dgr_vocab **")
    assert lib.dgr_vocab_open(str(five_layers).encode(), vocab) == lib.DGR_OK
    for text in (data, data * 20_000, data + b"a" * 50_000, b"a" * 50_000 + data):
        n = ffi.new("int32_t *")
        status = lib.dgr_vocab_tokenize(vocab[0], text, len(text), False, False, ffi.NULL, 0, n)
        assert (status == lib.DGR_OK and n[0] > 0) or "invalid codepoint" in ffi.string(lib.dgr_last_error()).decode()
    lib.dgr_vocab_close(vocab[0])
