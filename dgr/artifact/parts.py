"""The files of one artifact: a single GGUF, or the parts ``NAME-00001-of-0000N.gguf``.

Rules of the pinned loader (``llama_model_loader`` in ``src/llama-model-loader.cpp``): the first part is opened, holds all
metadata and perhaps no tensor; the others lie beside it under names that follow from its own; ``split.no`` of each is its
place; the tensors of all are ``split.tensors.count``. It reads ``split.no`` without looking at its type, so another type
would abort the process. A part that is not there is not an error here: whether it is needed depends on the layers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from dgr.errors import ArtifactError
from dgr.gguf.reader import GgufFile, TensorInfo, ValueType, aligned, read_gguf

__all__ = ["SPLIT_COUNT", "SPLIT_NO", "SPLIT_TENSORS", "Parts", "part_name", "read_parts"]

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"
#: Metadata type of each, which llama.cpp compares.
_TYPES = {SPLIT_NO: ValueType.UINT16, SPLIT_COUNT: ValueType.UINT16, SPLIT_TENSORS: ValueType.INT32}
_MAGIC = b"GGUF"
_NAME = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_name(stem: str, index: int, count: int) -> str:
    """File name of a part; ``index`` counts from 0, names count from 1."""
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


@frozen
class Parts:
    """All files of an artifact, in order."""

    paths: tuple[Path, ...]
    #: Headers; None for a part that is not there.
    files: tuple[GgufFile | None, ...]
    #: Path and name without the part's number and suffix: ``models/v4`` for ``models/v4-00001-of-00003.gguf``.
    stem: Path
    #: Tensors of all parts; what a part that is not there holds is among them.
    n_tensors: int

    @property
    def present(self) -> tuple[GgufFile, ...]:
        return tuple(file for file in self.files if file is not None)

    @property
    def missing(self) -> tuple[Path, ...]:
        return tuple(path for path, file in zip(self.paths, self.files, strict=True) if file is None)

    @property
    def first(self) -> GgufFile:
        """The file with the metadata."""
        return self.present[0]

    def located(self) -> dict[str, tuple[GgufFile, TensorInfo]]:
        """Every tensor that is there, by name, with its file."""
        return {name: (file, tensor) for file in self.present for name, tensor in file.tensors.items()}


def read_parts(path: str | os.PathLike[str]) -> Parts:
    """Read the header of a file and of the parts beside it.

    Raises :class:`~dgr.errors.ArtifactError` naming the file that is at fault: not the first part, of another model, in
    another's place, there twice, or with tensors too many or too few.
    """
    first = read_gguf(path)
    count = _split_number(first, SPLIT_COUNT) if SPLIT_COUNT in first.metadata else 1
    if count <= 1:
        alone = first.path.with_name(first.path.name.removesuffix(".gguf"))
        return Parts((first.path,), (first,), alone, len(first.tensors))
    _check_not_joined(first, count)
    stem = _stem(first, count)
    paths = tuple(first.path.with_name(part_name(stem, index, count)) for index in range(count))
    n_tensors = _split_number(first, SPLIT_TENSORS)
    files = {0: first} | {index: read_gguf(paths[index]) for index in range(1, count) if paths[index].exists()}
    for file in files.values():
        _check_not_joined(file, count)
        _check_alike(file, first)
    _check_places(files)
    _check_tensors(files, count, n_tensors)
    return Parts(paths, tuple(map(files.get, range(count))), first.path.with_name(stem), n_tensors)


def _split_number(file: GgufFile, key: str) -> int:
    stored = file.metadata.get(key)
    if stored is None:
        raise ArtifactError(
            f"{file.path}: the key {key} is missing, so it is not part of a split model; fetch it again"
        )
    if stored.type is not _TYPES[key] or not isinstance(stored.value, int) or stored.value < 0:
        raise ArtifactError(
            f"{file.path}: {key} is {stored.value!r} ({stored.type.name}), but llama.cpp takes {_TYPES[key].name} only;"
            " split the model again"
        )
    return stored.value


def _check_not_joined(file: GgufFile, count: int) -> None:
    """Refuse parts that were put together as bytes: behind the tensors of one begins the header of the next."""
    end = max((tensor.offset + tensor.n_bytes for tensor in file.tensors.values()), default=file.data_offset)
    try:
        with file.path.open("rb") as data:
            for begin in (end, aligned(end, file.alignment)):
                data.seek(begin)
                if data.read(len(_MAGIC)) == _MAGIC:
                    raise ArtifactError(
                        f"{file.path}: another GGUF begins at byte {begin}: parts of a model ({count} in all) were joined as"
                        " bytes, as by cat, which does not make a model; cut it again with gguf-split, or fetch the parts"
                    )
    except OSError as failed:
        raise ArtifactError(f"{file.path}: cannot be read: {failed.strerror or failed}; check the path") from failed


def _stem(first: GgufFile, count: int) -> str:
    """Name of the model that the first part is called after."""
    number = _split_number(first, SPLIT_NO)
    match = _NAME.fullmatch(first.path.name)
    if number:
        beside = first.path.with_name(part_name(match["stem"], 0, count)) if match else None
        where = "the file with split.no 0" if beside is None else str(beside)
        absent = "" if beside is None or beside.exists() else " (which is not there: fetch it)"
        raise ArtifactError(
            f"{first.path}: this is part {number + 1} of {count} of a model; open the first part, {where}{absent}"
        )
    if match is None or (int(match["no"]), int(match["count"])) != (1, count):
        raise ArtifactError(
            f"{first.path}: this is part 1 of {count} of a model, so its name must end in"
            f" {part_name('', 0, count)} for the others to be found; rename it"
        )
    return match["stem"]


def _check_alike(file: GgufFile, first: GgufFile) -> None:
    """Refuse a part that says it belongs to another model."""
    keys = {SPLIT_COUNT, SPLIT_TENSORS} | {key for key in file.metadata if key in first.metadata and key != SPLIT_NO}
    for key in sorted(keys):
        theirs, ours = file.metadata.get(key), first.metadata.get(key)
        if theirs is not None and theirs != ours:
            shown = (stored.value if stored is not None else "absent" for stored in (theirs, ours))
            raise ArtifactError(
                f"{file.path}: a part of another model: its {key} is {next(shown)}, but {next(shown)} in"
                f" {first.path.name}; fetch the part that belongs here"
            )
    if file.metadata.get(SPLIT_COUNT) is None:
        raise ArtifactError(
            f"{file.path}: the key {SPLIT_COUNT} is missing, so it is not part of {first.path.name}; fetch it again"
        )


def _check_places(files: Mapping[int, GgufFile]) -> None:
    """Refuse a part that is in another's place."""
    numbers = {index: _split_number(file, SPLIT_NO) for index, file in files.items()}
    for index, number in numbers.items():
        if number == index:
            continue
        if numbers.get(number) == number:
            raise ArtifactError(
                f"{files[index].path}: this is part {number + 1} a second time ({SPLIT_NO} is {number}, as in"
                f" {files[number].path.name}); fetch part {index + 1}"
            )
        raise ArtifactError(
            f"{files[index].path}: this is part {number + 1} ({SPLIT_NO} is {number}) under the name of part {index + 1};"
            " give each part the name of its number"
        )


def _check_tensors(files: Mapping[int, GgufFile], count: int, n_tensors: int) -> None:
    """Refuse a tensor that is in two parts, and parts that do not hold as many as the model has."""
    seen: dict[str, GgufFile] = {}
    for file in files.values():
        for name in file.tensors:
            if name in seen:
                raise ArtifactError(
                    f"{file.path}: holds the tensor {name!r}, which {seen[name].path.name} holds too: one of them is a part"
                    " of another model; fetch them again"
                )
            seen[name] = file
    if len(seen) > n_tensors or (len(files) == count and len(seen) != n_tensors):
        each = ", ".join(f"{file.path.name} {len(file.tensors)}" for file in files.values())
        raise ArtifactError(
            f"{files[0].path}: {SPLIT_TENSORS} is {n_tensors}, but the parts hold {len(seen)} tensors ({each}): one of them"
            " is a part of another model; fetch them again"
        )
