"""Changes to a finished fixture: another key, a tensor more or less, the same model in parts."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dgr.errors import InputError
from dgr.model.gguf import GgufFile, MetaArray, MetaValue, ValueType, read_gguf
from dgr.model.gguf_write import TensorForm, lay_out, u16, writing, zero_padding
from dgr.model.parts import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS, part_name

__all__ = ["edit_gguf", "strings", "write_in_parts"]

_STEP = 1 << 20


def strings(values: Sequence[str]) -> MetaValue:
    """A metadata value: an array of strings; surrogates stand for bytes, as they do in what is read."""
    encoded = [value.encode("utf-8", "surrogateescape") for value in values]
    raw = b"".join(struct.pack("<Q", len(value)) + value for value in encoded)
    return MetaValue(ValueType.ARRAY, MetaArray(ValueType.STRING, len(values), raw))


def _write(
    target: Path,
    metadata: Mapping[str, MetaValue],
    source: GgufFile,
    names: Iterable[str],
    added: Mapping[TensorForm, bytes],
    *,
    sparse: bool = False,
) -> None:
    """A file of some tensors of another, and of new ones. ``sparse``: leave the data of the former a hole."""
    kept = [source.tensors[name] for name in names]
    tensors = [*(TensorForm(tensor.name, tensor.ne, tensor.type) for tensor in kept), *added]
    layout = lay_out(metadata, tensors)
    with writing(target) as out, source.path.open("rb") as data:
        out.write(layout.header)
        if sparse:
            out.truncate(layout.file_bytes)
            return
        for tensor in kept:
            data.seek(tensor.offset)
            for begin in range(0, tensor.n_bytes, _STEP):
                out.write(data.read(min(_STEP, tensor.n_bytes - begin)))
            out.write(zero_padding(tensor.n_bytes, layout.alignment))
        for content in added.values():
            out.write(content + zero_padding(len(content), layout.alignment))


def edit_gguf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Mapping[str, MetaValue | None] | None = None,
    drop: Iterable[str] = (),
    add: Mapping[TensorForm, bytes] | None = None,
) -> Path:
    """Copy a file with some keys set (or removed, by None), some tensors left out, and new ones at the end."""
    file, gone = read_gguf(source), set(drop)
    metadata = dict(file.metadata)
    for key, value in (keys or {}).items():
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    if unknown := gone - set(file.tensors):
        raise InputError(f"{file.path} has no tensor {min(unknown)!r}")
    _write(Path(target), metadata, file, [name for name in file.tensors if name not in gone], add or {})
    return Path(target)


def write_in_parts(
    source: str | os.PathLike[str], target: str | os.PathLike[str], n_parts: int, *, sparse: bool = False
) -> list[Path]:
    """Copy a file as ``STEM-00001-of-0000N.gguf`` and so on, ``target`` being ``STEM.gguf``; gives the paths in order.

    As published models come: the first part holds all metadata and no tensor, the others runs of tensors of about equal
    bytes.
    """
    file = read_gguf(source)
    if not 2 <= n_parts <= len(file.tensors) + 1:
        raise InputError(f"{n_parts} parts asked for; {file.path.name} can be written in 2 to {len(file.tensors) + 1}")
    stem = str(target).removesuffix(".gguf")
    paths = [Path(part_name(stem, index, n_parts)) for index in range(n_parts)]
    for index, (path, names) in enumerate(zip(paths, [[], *_runs(file, n_parts - 1)], strict=True)):
        split = {
            SPLIT_NO: u16(index),
            SPLIT_COUNT: u16(n_parts),
            SPLIT_TENSORS: MetaValue(ValueType.INT32, len(file.tensors)),
        }
        _write(path, split if index else {**file.metadata, **split}, file, names, {}, sparse=sparse)
    return paths


def _runs(file: GgufFile, count: int) -> list[Sequence[str]]:
    """The tensors in ``count`` runs, none empty."""
    names, total = list(file.tensors), sum(tensor.n_bytes for tensor in file.tensors.values())
    runs: list[Sequence[str]] = []
    begin = done = 0
    for index in range(1, count + 1):
        end = begin
        while end < len(names) and (
            end == begin or (done < total * index // count and len(names) - end > count - index)
        ):
            done += file.tensors[names[end]].n_bytes
            end += 1
        runs.append(names[begin : len(names) if index == count else end])
        begin = end
    return runs
