"""What the native loader is given to open: the artifact's own file, or stand-ins where the loader asks for too much.

The loader opens every part of a multi-part model, counts their tensors and looks at their shapes, though a stage reads
only its own. Where parts are elsewhere, it gets a folder with links to the parts that are here and, for the others, headers
that declare their tensors over a hole. It skips them unread: that no tensor of the range is among them was made sure by
:meth:`~dgr.model.artifact.Artifact.check`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dgr.model.artifact import Artifact
from dgr.model.gguf import MetaValue, ValueType
from dgr.model.gguf_write import TensorForm, lay_out, u16
from dgr.model.outputs import removed_on_signals
from dgr.model.parts import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS, part_name

__all__ = ["native_path"]


@contextmanager
def native_path(artifact: Artifact, *, sizes_only: bool = False) -> Iterator[Path]:
    """A path for the native loader, good while the block lasts; the loader keeps no file open.

    ``sizes_only``: for a load that allocates and reads nothing; the file then has every tensor of the whole model, those
    that are elsewhere as a hole.
    """
    if artifact.is_whole or not (sizes_only or artifact.parts.missing):
        yield artifact.file.path
        return
    with tempfile.TemporaryDirectory(prefix="dgr-") as folder, removed_on_signals(Path(folder)):
        yield _hollow_model(artifact, Path(folder)) if sizes_only else _folder_of_parts(artifact, Path(folder))


def _write(path: Path, metadata: dict[str, MetaValue], tensors: Sequence[TensorForm]) -> None:
    """A header, and a hole for the data."""
    layout = lay_out(metadata, tensors)
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.file_bytes)


def _hollow_model(artifact: Artifact, folder: Path) -> Path:
    metadata = {
        key: value
        for key, value in artifact.file.metadata.items()
        if not key.startswith("split.") and ".dgr." not in key
    }
    path = folder / "hollow.gguf"
    _write(path, metadata, list(artifact.tensors.values()))
    return path


def _folder_of_parts(artifact: Artifact, folder: Path) -> Path:
    parts = artifact.parts
    if artifact.given is None:
        artifact.manifest()  # raises: the tensors of the other parts are not known
    absent = [tensor for name, tensor in artifact.tensors.items() if name not in artifact.located]
    count = len(parts.paths)
    for index, file in enumerate(parts.files):
        link = folder / part_name("part", index, count)
        if file is not None:
            link.symlink_to(file.path.absolute())
            continue
        split = {
            SPLIT_NO: u16(index),
            SPLIT_COUNT: u16(count),
            SPLIT_TENSORS: MetaValue(ValueType.INT32, parts.n_tensors),
        }
        _write(link, split, absent)
        absent = []  # the first of them declares all
    return folder / part_name("part", 0, count)
