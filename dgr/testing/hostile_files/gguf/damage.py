"""Ways to damage the files of a model: bits, numbers, keys, tensor tables, tokenizers, parts, slices, manifests, MTP blocks."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import encode_manifest
from dgr.artifact.parts import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS
from dgr.artifact.slice_metadata import LAYER_BEGIN, LAYER_END, MANIFEST_KEY, PARENT_KEY
from dgr.artifact.slicing import write_slice
from dgr.core.route import LayerRange
from dgr.gguf.reader import MetaArray, MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import u32
from dgr.selftest.fixture.edit import edit_gguf, write_in_parts
from dgr.selftest.fixture.metadata import strings
from dgr.selftest.fixture.writer import write_fixture
from dgr.testing.hostile_files.gguf.bytes import CHANGES, NUMBERS, WIDE, Change
from dgr.testing.hostile_files.gguf.fields import header_fields
from dgr.testing.hostile_files.kind import Mutation
from dgr.testing.hostile_files.places import PLACES, misplaced
from dgr.testing.hostile_files.text_damage import damaged_json, rewritten
from dgr.v4.hyper_parameters import ARCHITECTURE

__all__ = [
    "DIRECTED",
    "MANIFEST_DAMAGES",
    "MODEL_DAMAGES",
    "MTP_DAMAGES",
    "PARTS_DAMAGES",
    "SLICE_DAMAGES",
    "write_a_slice",
    "write_model",
    "write_parts",
    "write_with_manifest",
    "write_with_mtp",
]

_LAYERS = 5


def _of_model(change: Change) -> Mutation:
    return rewritten("model.gguf", change)


def _copied(base: Path, folder: Path) -> Path:
    """The whole files of a folder, and of them the model."""
    for path in base.glob("model*"):
        shutil.copy(path, folder)
    return folder / "model.gguf"


def _change_key(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A key that is missing, has another's value, another number, or another type."""
    keys = read_gguf(base / "model.gguf").metadata
    key = drawn.choice(list(keys))
    kind = drawn.choice((ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.FLOAT32, ValueType.BOOL))
    number: float = drawn.choice((0.0, -1.0, float("nan"), float("inf"), 1e30)) if kind is ValueType.FLOAT32 else 0
    if kind in (ValueType.UINT32, ValueType.UINT64):
        number = drawn.choice(NUMBERS)
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
        struct.pack_into("<Q", data, at + 8 * drawn.randrange(len(tensor.ne)), drawn.choice(WIDE))
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


def _parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("parts-*.gguf"))


def _copied_parts(base: Path, folder: Path) -> list[Path]:
    return [Path(shutil.copy(path, folder)) for path in _parts_of(base)]


def _swap_parts(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A part that is missing, or another's."""
    paths = _copied_parts(base, folder)
    chosen, other = drawn.choice(paths), drawn.choice(paths)
    if drawn.random() < 0.3 and chosen is not paths[0]:
        chosen.unlink()
    else:
        shutil.copy(base / other.name, chosen)
    return paths[0]


def _damage_part(change: Change) -> Mutation:
    def damage(drawn: random.Random, base: Path, folder: Path) -> Path:
        paths = _copied_parts(base, folder)
        chosen = drawn.choice(paths)
        chosen.write_bytes(change(drawn, chosen.read_bytes()))
        return paths[0]

    return damage


def _misplace_part(drawn: random.Random, base: Path, folder: Path) -> Path:
    paths = _copied_parts(base, folder)
    chosen = drawn.choice(paths)
    chosen.unlink()
    PLACES[drawn.choice(list(PLACES))](chosen)
    return paths[0]


def _change_split(drawn: random.Random, base: Path, folder: Path) -> Path:
    """What a part says of its place: another number, another type, or nothing."""
    paths = _copied_parts(base, folder)
    chosen = drawn.choice(paths)
    key = drawn.choice((SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS))
    kind = drawn.choice((ValueType.UINT16, ValueType.INT32, ValueType.UINT64, ValueType.FLOAT32, ValueType.STRING))
    number = drawn.choice((0, 1, 2, 3, 4, 99, 65535))
    value = MetaValue(kind, str(number) if kind is ValueType.STRING else number)
    edit_gguf(base / chosen.name, chosen, keys={key: drawn.choice((None, value, value))})
    return paths[0]


def _forge_slice(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A slice whose own manifest was forged."""
    manifest = Artifact.open(base / "model.gguf").stored_manifest
    assert manifest is not None
    whole = encode_manifest(manifest)
    text = _forged(drawn, whole) if drawn.random() < 0.7 else damaged_json(drawn, whole)
    value = MetaValue(ValueType.STRING, text.decode("utf-8", "surrogateescape"))
    return edit_gguf(base / "model.gguf", folder / "model.gguf", keys={MANIFEST_KEY: value})


def _change_range(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A slice that says it holds other layers, or is of another model."""
    key = drawn.choice((LAYER_BEGIN, LAYER_END, PARENT_KEY))
    kind = drawn.choice((ValueType.UINT32, ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.STRING))
    number = drawn.choice((0, 1, 2, 3, 5, 6, 43, 2**31 - 1))
    value = MetaValue(kind, str(number) if kind is ValueType.STRING else number)
    return edit_gguf(base / "model.gguf", folder / "model.gguf", keys={key: drawn.choice((None, value, value))})


def _change_manifest(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A manifest beside the whole model."""
    model, name = _copied(base, folder), "model.manifest.json"
    text = (base / name).read_bytes()
    (folder / name).write_bytes(_forged(drawn, text) if drawn.random() < 0.5 else damaged_json(drawn, text))
    return model


def _misplace_manifest(drawn: random.Random, base: Path, folder: Path) -> Path:
    model = _copied(base, folder)
    path = folder / "model.manifest.json"
    path.unlink()
    PLACES[drawn.choice(list(PLACES))](path)
    return model


def _change_mtp(drawn: random.Random, base: Path, folder: Path) -> Path:
    """A model whose block for multi-token prediction is said to be another, or is not whole."""
    model = base / "model.gguf"
    block = [name for name in read_gguf(model).tensors if name.startswith(f"blk.{_LAYERS}.")]
    key = f"{ARCHITECTURE}.{drawn.choice(('nextn_predict_layers', 'block_count', 'dgr.mtp', 'dgr.nextn'))}"
    kind = drawn.choice((ValueType.UINT32, ValueType.UINT32, ValueType.INT32, ValueType.BOOL, ValueType.UINT64))
    value = MetaValue(
        kind, drawn.choice((0, 1, 2, _LAYERS, _LAYERS + 1, 2**31 - 1)) if kind is not ValueType.BOOL else True
    )
    gone = drawn.sample(block, drawn.choice((0, 0, 1, len(block))))
    return edit_gguf(model, folder / "model.gguf", keys={key: drawn.choice((value, None))}, drop=gone)


def _mtp_alone(drawn: random.Random, base: Path, folder: Path) -> Path:
    """The block without main layers, or with some of them."""
    model = base / "model.gguf"
    trunk = [
        name for name in read_gguf(model).tensors if name.startswith(tuple(f"blk.{one}." for one in range(_LAYERS)))
    ]
    kept = drawn.choice((0, 0, 1, len(trunk) // 2))
    return edit_gguf(model, folder / "model.gguf", drop=trunk[kept:])


def _forged(drawn: random.Random, text: bytes) -> bytes:
    said = json.loads(text)
    entry = drawn.choice(said["tensors"])
    match drawn.randrange(7):
        case 0:
            entry[2] = [drawn.choice(WIDE) for _ in range(drawn.randint(0, 5))]
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


#: What is done to a file that is one model: its bytes, and its keys, table, weights and tokenizer.
MODEL_DAMAGES: Mapping[str, Mutation] = {
    **{name: _of_model(change) for name, change in CHANGES.items()},
    "key": _change_key,
    "table": _change_table,
    "weights": _change_weights,
    "tokenizer": _change_tokenizer,
    "place": misplaced(_copied),
}
PARTS_DAMAGES: Mapping[str, Mutation] = {
    **{name: _damage_part(change) for name, change in CHANGES.items()},
    "swapped": _swap_parts,
    "split": _change_split,
    "place": _misplace_part,
}
SLICE_DAMAGES: Mapping[str, Mutation] = {**MODEL_DAMAGES, "forged": _forge_slice, "range": _change_range}
MANIFEST_DAMAGES: Mapping[str, Mutation] = {"manifest": _change_manifest, "place": _misplace_manifest}
MTP_DAMAGES: Mapping[str, Mutation] = {**MODEL_DAMAGES, "block": _change_mtp, "alone": _mtp_alone}


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


def _endless_text(_: random.Random, base: Path, folder: Path) -> Path:
    """A value that says it is longer than any file."""
    data = (base / "model.gguf").read_bytes()
    fields = header_fields(data)
    at = next(one.at for before, one in pairwise(fields) if (before.what, one.what) == ("type", "length"))
    return _written(folder / "model.gguf", data[:at] + struct.pack("<Q", 1 << 40) + data[at + 8 :])


#: What once ended the process, or would without a check; the same for every seed.
DIRECTED: Mapping[str, Mutation] = {
    **{name: partial(_with_keys, keys) for name, keys in _BAD_KEYS.items()},
    "a scale of integers": _integer_scale,
    "a text of a tebibyte": _endless_text,
}


def write_model(base: Path) -> None:
    """A small model."""
    write_fixture(base / "model.gguf", preset="min", layers=_LAYERS)


def write_parts(base: Path) -> None:
    """The same in parts, ``parts-00001-of-00003.gguf`` the first."""
    write_model(base)
    write_in_parts(base / "model.gguf", base / "parts", 3)


def write_a_slice(base: Path) -> None:
    """A slice of it, which is ``model.gguf`` then."""
    write_model(base)
    write_slice(Artifact.open(base / "model.gguf"), LayerRange(1, 3), base / "slice.gguf")
    (base / "slice.gguf").replace(base / "model.gguf")


def write_with_manifest(base: Path) -> None:
    """The model and its manifest beside it."""
    write_model(base)
    manifest = Artifact.open(base / "model.gguf").manifest()
    (base / "model.manifest.json").write_bytes(encode_manifest(manifest))


def write_with_mtp(base: Path) -> None:
    """The model with a block for multi-token prediction behind its layers."""
    write_fixture(base / "model.gguf", preset="min", layers=_LAYERS, mtp=True)
