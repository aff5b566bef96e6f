"""The only door to the native loader: what it is given to open was checked here, whoever asks and whatever for.

It is the artifact's own file, or stand-ins where the loader asks for too much.

The loader opens every part of a multi-part model, counts their tensors and looks at their shapes, though a stage reads
only its own. Where parts are elsewhere, it gets a folder with links to the parts that are here and, for the others, headers
that declare their tensors over a hole. It skips them unread: that no tensor of the range is among them is made sure by
:meth:`~dgr.artifact.artifact.Artifact.check`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dgr.artifact.artifact import Artifact
from dgr.artifact.parts import SPLIT_COUNT, SPLIT_NO, SPLIT_TENSORS, part_name
from dgr.core.files.outputs import removed_on_signals
from dgr.core.route import LayerRange
from dgr.engine.address_space import check_address_space
from dgr.engine.native import Native
from dgr.errors import ArtifactError
from dgr.gguf.reader import MetaValue, ValueType
from dgr.gguf.writer import TensorForm, lay_out, u16
from dgr.v4.tokenizer import has_tokenizer

__all__ = ["open_stage", "open_vocabulary"]

#: ``llama_context::graph_max_nodes`` for V4.
_NODES_PER_TOKEN, _NODES_PER_TENSOR = 40, 32
#: 20 KiB at the pin, rounded up.
_BYTES_PER_NODE = 24 << 10
#: Everything beside: headers, tables, the vocabulary, the stacks of a few threads.
_SMALL_BYTES = 96 << 20


def open_stage(native: Native, artifact: Artifact, layers: LayerRange, params: Any, needs: int = 0) -> Any:
    """A native stage handle, to be closed. ``params``: ``dgr_stage_params``; with ``dry_run`` only headers are needed.

    ``needs``: bytes of weights, state and buffers, to be had beside the bookkeeping where address space is limited. Raises
    :class:`~dgr.errors.ArtifactError` and whatever the native status means.
    """
    if params.dry_run:
        artifact.check_forms(layers)
    else:
        artifact.check(layers)
    check_address_space(needs + _bookkeeping_bytes(artifact, params), f"stage {layers}")
    out = native.ffi.new("dgr_stage **")
    with _native_path(artifact, sizes_only=params.dry_run) as path:
        native.check(native.lib.dgr_stage_open(os.fsencode(path), params, out), f"stage {layers}")
    return out[0]


def open_vocabulary(native: Native, artifact: Artifact) -> Any:
    """A native vocabulary handle, to be closed. What there is to check was checked when the artifact was opened."""
    if not has_tokenizer(artifact.file.metadata):
        raise ArtifactError(f"{artifact.file.path}: the model has no tokenizer (tokenizer.ggml.model); use token ids")
    check_address_space(_SMALL_BYTES, f"the vocabulary of {artifact.file.path}")
    out = native.ffi.new("dgr_vocab **")
    with _native_path(artifact) as path:
        status = native.lib.dgr_vocab_open(os.fsencode(path), out)
        native.check(status, f"vocabulary of {artifact.file.path}")
    return out[0]


def _bookkeeping_bytes(artifact: Artifact, params: Any) -> int:
    """Address space of what llama.cpp allocates without looking whether it succeeded, at most.

    By far the most is the scheduler's (``ggml_backend_sched_new``): for each node that a graph may have
    (``llama_context::graph_max_nodes``), 30 inputs of a split, twice.
    """
    n_tokens = int(min(params.n_ubatch, params.n_batch, params.n_ctx * params.n_seq_max))
    n_nodes = max(_NODES_PER_TOKEN * n_tokens, _NODES_PER_TENSOR * len(artifact.tensors))
    return n_nodes * _BYTES_PER_NODE + _SMALL_BYTES


@contextmanager
def _native_path(artifact: Artifact, *, sizes_only: bool = False) -> Iterator[Path]:
    """A path for the native loader, good while the block lasts; the loader keeps no file open.

    ``sizes_only``: for a load that allocates and reads nothing; the file then has every tensor of the whole model, those
    that are elsewhere as a hole.
    """
    if artifact.is_whole or not (sizes_only or artifact.parts.missing):
        yield artifact.file.path
        return
    with _temporary_folder(artifact) as folder:
        yield _hollow_model(artifact, folder) if sizes_only else _folder_of_parts(artifact, folder)


@contextmanager
def _temporary_folder(artifact: Artifact) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="dgr-") as folder, removed_on_signals(Path(folder)):
            yield Path(folder)
    except OSError as failed:
        raise ArtifactError(
            f"{artifact.file.path}: the headers that stand for what is not here cannot be written to the"
            f" temporary folder: {failed.strerror or failed}; set TMPDIR to another"
        ) from failed


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
    if artifact.stored_manifest is None:
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
