"""Ways to damage the files of a model: bits, numbers, keys, tensor tables, tokenizers, parts, slices and manifests.

Each takes a source of chance, a folder with the whole files and a folder for the damaged ones, and returns the path to open.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import encode_manifest
from dgr.artifact.slice_metadata import MANIFEST_KEY
from dgr.artifact.slicing import write_slice
from dgr.core.route import LayerRange
from dgr.gguf.reader import MetaArray, MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import u32
from dgr.selftest.fixture.edit import edit_gguf, write_in_parts
from dgr.selftest.fixture.metadata import strings
from dgr.selftest.fixture.writer import write_fixture

__all__ = ["DIRECTED", "KINDS", "Mutation", "damaged_files", "write_whole_files"]

_LAYERS = 5

#: Numbers that counts, sizes and ids break on.
_NUMBERS = (0, 1, 2, 3, 7, 8, 127, 255, 256, 511, 512, 1024, 65535, 2**31 - 1, 2**31, 2**32 - 1)
_WIDE = (*_NUMBERS, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)

Mutation = Callable[[random.Random, Path, Path], Path]


def _header_bytes(model: Path) -> int:
    return read_gguf(model).data_offset


def _flip_bits(drawn: random.Random, base: Path, folder: Path) -> Path:
    """One to three bits of the header."""
    data = bytearray((base / "model.gguf").read_bytes())
    for _ in range(drawn.randint(1, 3)):
        data[drawn.randrange(_header_bytes(base / "model.gguf"))] ^= 1 << drawn.randrange(8)
    return _written(folder / "model.gguf", data)


def _overwrite(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A number anywhere in the header."""
    data = bytearray((base / "model.gguf").read_bytes())
    at = drawn.randrange(_header_bytes(base / "model.gguf"))
    new = struct.pack("<Q", drawn.choice(_WIDE)) if drawn.random() < 0.5 else struct.pack("<I", drawn.choice(_NUMBERS))
    data[at : at + len(new)] = new
    return _written(folder / "model.gguf", data)


def _cut(drawn: random.Random, base: Path, folder: Path) -> Path:
    data = (base / "model.gguf").read_bytes()
    end = _header_bytes(base / "model.gguf") if drawn.random() < 0.6 else len(data)
    return _written(folder / "model.gguf", data[: drawn.randrange(end)])


def _change_key(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A key that is missing, has another's value, another number, or another type."""
    keys = read_gguf(base / "model.gguf").metadata
    key = drawn.choice(list(keys))
    kind = drawn.choice((ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.FLOAT32, ValueType.BOOL))
    number: float = drawn.choice((0.0, -1.0, float("nan"), float("inf"), 1e30)) if kind is ValueType.FLOAT32 else 0
    if kind in (ValueType.UINT32, ValueType.UINT64):
        number = drawn.choice(_NUMBERS)
    elif kind is ValueType.INT32:
        number = drawn.choice((-1, 0, 1, 2**31 - 1, -(2**31)))
    new: MetaValue | None = drawn.choice((None, keys[drawn.choice(list(keys))], MetaValue(kind, number)))
    if key == "general.alignment":
        new = None  # the writer would follow it
    return edit_gguf(base / "model.gguf", folder / "model.gguf", keys={key: new})


def _change_table(drawn: random.Random, base: Path, folder: Path) -> Path:
    """Type or shape of a tensor."""
    data = bytearray((base / "model.gguf").read_bytes())
    tensor = drawn.choice(list(read_gguf(base / "model.gguf").tensors.values()))
    name = tensor.name.encode()
    at = data.index(struct.pack("<Q", len(name)) + name, 0) + 8 + len(name) + 4
    if drawn.random() < 0.5:
        struct.pack_into("<I", data, at + 8 * len(tensor.ne), drawn.randrange(45))
    else:
        struct.pack_into("<Q", data, at + 8 * drawn.randrange(len(tensor.ne)), drawn.choice(_WIDE))
    return _written(folder / "model.gguf", data)


def _change_weights(drawn: random.Random, base: Path, folder: Path) -> Path:
    data = bytearray((base / "model.gguf").read_bytes())
    tensor = drawn.choice(list(read_gguf(base / "model.gguf").tensors.values()))
    at = tensor.offset + drawn.randrange(tensor.n_bytes // 4) * 4
    data[at : at + 4] = struct.pack("<I", drawn.choice((0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 99, 2**31)))
    return _written(folder / "model.gguf", data)


def _change_tokenizer(drawn: random.Random, base: Path, folder: Path) -> Path:
    """One of the arrays: an element of another's, one more, one less, or one that is not a text at all."""
    keys = read_gguf(base / "model.gguf").metadata
    name = drawn.choice(("tokens", "merges", "token_type"))
    array = keys[f"tokenizer.ggml.{name}"].value
    assert isinstance(array, MetaArray)
    values = list(array.values())
    at = drawn.randrange(len(values))
    if name == "token_type":
        values[at] = drawn.choice((-1, 0, 2, 3, 4, 5, 6, 7, 2**31 - 1))
        changed = MetaValue(
            ValueType.ARRAY, MetaArray(ValueType.INT32, len(values), struct.pack(f"<{len(values)}i", *map(int, values)))
        )
    else:
        words = list(map(str, values))
        odd = ("", " ", "\0", "\udcff\udcfe", "a" * 5000, "漢" * 1000, "<0x0A>", "[EMPTY_7]", "a b c")
        words[at] = drawn.choice((*odd, drawn.choice(words)))
        if drawn.random() < 0.3:
            words = words[:at] if drawn.random() < 0.5 else [*words, "<one more>"]
        changed = strings(words)
    return edit_gguf(base / "model.gguf", folder / "model.gguf", keys={f"tokenizer.ggml.{name}": changed})


def _change_parts(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A part that is missing, another's, cut, or with a flipped bit."""
    paths = [Path(shutil.copy(path, folder)) for path in sorted(base.glob("parts-*.gguf"))]
    chosen, other = drawn.choice(paths), drawn.choice(paths)
    match drawn.randrange(4):
        case 0 if chosen is not paths[0]:
            chosen.unlink()
        case 1:
            shutil.copy(base / other.name, chosen)
        case 2:
            os.truncate(chosen, drawn.randrange(chosen.stat().st_size))
        case _:
            data = bytearray(chosen.read_bytes())
            data[drawn.randrange(min(len(data), _header_bytes(base / chosen.name) + 1))] ^= 1 << drawn.randrange(8)
            chosen.write_bytes(data)
    return paths[0]


def _change_slice(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A slice whose own manifest was forged, or with flipped bits."""
    source, target = base / "slice.gguf", folder / "slice.gguf"
    if drawn.random() < 0.7:
        manifest = Artifact.open(source).stored_manifest
        assert manifest is not None
        text = _forged(drawn, encode_manifest(manifest))
        return edit_gguf(
            source, target, keys={MANIFEST_KEY: MetaValue(ValueType.STRING, text.decode("utf-8", "surrogateescape"))}
        )
    data = bytearray(source.read_bytes())
    data[drawn.randrange(_header_bytes(source))] ^= 1 << drawn.randrange(8)
    return _written(target, data)


def _change_manifest(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A manifest beside the whole model."""
    shutil.copy(base / "model.gguf", folder)
    text = _forged(drawn, (base / "model.manifest.json").read_bytes())
    (folder / "model.manifest.json").write_bytes(text)
    return folder / "model.gguf"


def _forged(drawn: random.Random, text: bytes) -> bytes:
    said = json.loads(text)
    entry = drawn.choice(said["tensors"])
    match drawn.randrange(7):
        case 0:
            entry[2] = [drawn.choice(_WIDE) for _ in range(drawn.randint(0, 5))]
        case 1:
            entry[1] = drawn.choice((-1, 1, 2, 4, 26, 39, 99, 2**40))
        case 2:
            entry[0] = drawn.choice(("", "blk.0.attn_norm.weight", "x" * 70, "a\0b", "no.such.weight", "\ud800"))
        case 3:
            said["tensors"].remove(entry)
        case 4:
            said["tensors"].append(entry)
        case 5:
            said[drawn.choice(list(said))] = drawn.choice((None, -1, "", [], 2**70))
        case _:
            data = bytearray(text)
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
            return bytes(data)
    return json.dumps(said).encode()


def _written(path: Path, data: bytes | bytearray) -> Path:
    path.write_bytes(data)
    return path


#: Kinds of damage, in turn.
KINDS: Mapping[str, Mutation] = {
    "bits": _flip_bits,
    "number": _overwrite,
    "cut": _cut,
    "key": _change_key,
    "table": _change_table,
    "weights": _change_weights,
    "tokenizer": _change_tokenizer,
    "parts": _change_parts,
    "slice": _change_slice,
    "manifest": _change_manifest,
}


def _text(value: str) -> MetaValue:
    return MetaValue(ValueType.STRING, value)


_LLAMA_WORDS = strings([f"w{index}" for index in range(320)])
_FEW = strings(["a", "b", "c"])
_TRUE = MetaValue(ValueType.BOOL, True)

#: Metadata that llama.cpp aborts on or never returns from.
_BAD_KEYS: Mapping[str, Mapping[str, MetaValue | None]] = {
    **{
        f"a tokenizer like {kind}": {"tokenizer.ggml.model": _text(kind)}
        for kind in ("bert", "llama", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace", "test", "none", "")
    },
    **{
        f"{kind} without begin": {
            "tokenizer.ggml.model": _text(kind),
            "tokenizer.ggml.tokens": _FEW,
            "tokenizer.ggml.token_type": None,
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.eos_token_id": None,
            "tokenizer.ggml.add_bos_token": _TRUE,
            "tokenizer.ggml.add_eos_token": _TRUE,
        }
        for kind in ("gpt2", "llama", "bert", "t5", "rwkv", "hybriddna")
    },
    **{
        f"split like {pre}": {"tokenizer.ggml.pre": _text(pre)}
        for pre in ("default", "gpt-2", "llama-bpe", "gemma4", "kimi-k2", "jina-v2-de", "nonsense")
    },
    "equal tokens": {"tokenizer.ggml.tokens": strings(["a", "b", "a"]), "tokenizer.ggml.token_type": None},
    "words for bytes": {"tokenizer.ggml.tokens": _LLAMA_WORDS},
    "tokens cut by a NUL": {"tokenizer.ggml.tokens": strings([f"a\0{index}" for index in range(320)])},
    "named like an empty one": {"tokenizer.ggml.tokens": strings(["", "[EMPTY_0]", *map(str, range(318))])},
    "endless special tokens": {
        "tokenizer.ggml.tokens": strings(["<" * 100_000 + str(index) for index in range(320)]),
    },
    "tokens that spell themselves out": {
        "tokenizer.ggml.tokens": strings(["漢" * 1300 + str(index) for index in range(320)]),
        "tokenizer.ggml.token_type": None,
    },
    "a vocabulary as large as 32 bits": {
        "tokenizer.ggml.model": _text("none"),
        "deepseek4.vocab_size": u32(2**32 - 1),
    },
    "an ending outside": {"tokenizer.ggml.eos_token_id": u32(320)},
    "a name that changes tokens": {"general.name": _text("phi-3")},
}


def _with_keys(keys: Mapping[str, MetaValue | None], _: random.Random, base: Path, folder: Path) -> Path:
    return edit_gguf(base / "model.gguf", folder / "model.gguf", keys=keys)


def _integer_scale(_: random.Random, base: Path, folder: Path) -> Path:
    """A factor of the graph typed as integers of the same size."""
    data, name = bytearray((base / "model.gguf").read_bytes()), b"blk.0.hc_attn_scale.weight"
    struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 8, GgmlType.I32)
    return _written(folder / "model.gguf", data)


#: What once ended the process, or would without a check; the same for every seed.
DIRECTED: Mapping[str, Mutation] = {
    **{name: partial(_with_keys, keys) for name, keys in _BAD_KEYS.items()},
    "a scale of integers": _integer_scale,
}


def write_whole_files(base: Path) -> None:
    """A small model, its manifest, the same in parts, and a slice of it."""
    model = base / "model.gguf"
    write_fixture(model, preset="min", layers=_LAYERS)
    artifact = Artifact.open(model)
    (base / "model.manifest.json").write_bytes(encode_manifest(artifact.manifest()))
    write_in_parts(model, base / "parts", 3)
    write_slice(artifact, LayerRange(1, 3), base / "slice.gguf")


def damaged_files(seed: int, n_cases: int) -> Iterator[tuple[str, Mutation]]:
    """Name and change of every case: the directed ones, then those that are drawn."""
    yield from DIRECTED.items()
    kinds = list(KINDS.items())
    for index in range(n_cases):
        name, change = kinds[index % len(kinds)]
        yield f"{name} {seed}:{index}", change
