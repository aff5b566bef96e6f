"""The learned model as a GGUF of any weights, out of the one that is kept: bfloat16 matrices, all else float32.

The kept file, ``model.gguf`` beside this module, is what training left (``tools/train_fixture``), rounded to bfloat16 once; so
``f32`` and ``bf16`` are the same numbers, and every other kind of weights is those numbers as ggml itself quantises them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from dgr.artifact.artifact import Artifact
from dgr.engine.quants import dequantize, quantize
from dgr.errors import InputError
from dgr.gguf.reader import MetaValue, ValueType, read_gguf
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm
from dgr.selftest.fixture.files import Content, write_file
from dgr.selftest.fixture.metadata import metadata_of
from dgr.selftest.fixture.presets import tensor_type
from dgr.selftest.fixture.vocabulary import byte_vocabulary
from dgr.v4.hyper_parameters import HyperParameters
from dgr.v4.tensors import TensorKind, TensorSpec, block_tensors, head_tensors, tail_tensors

__all__ = [
    "KEPT",
    "TEXT",
    "LearnedSummary",
    "held_out_text",
    "learned_summary",
    "model_tensors",
    "read_values",
    "write_learned",
    "write_model",
]

#: The kept file, and text that it was never trained on.
KEPT = Path(__file__).with_name("model.gguf")
TEXT = Path(__file__).with_name("text.txt")

#: Of the text that the model was trained on, by its SPDX name.
_LICENCE = "Python-2.0"


@frozen
class LearnedSummary:
    """What was written."""

    path: str
    weights: str
    layers: int
    n_tensors: int
    n_parameters: int
    #: Size in bytes.
    file_bytes: int


def held_out_text() -> bytes:
    """English that the model was never trained on: ASCII, no brackets."""
    return TEXT.read_bytes()


def model_tensors(hp: HyperParameters) -> list[TensorSpec]:
    """Every tensor of such a model, in the order of its file."""
    specs = [*head_tensors(hp), *tail_tensors(hp)]
    for block in range(hp.n_blocks):
        specs += [spec for spec in block_tensors(hp, block) if spec.required]
    return specs


def read_values(path: str | os.PathLike[str], name: str) -> npt.NDArray[np.float32] | npt.NDArray[np.int32]:
    """A tensor of a whole GGUF as numbers, C order (the fastest dimension last). Raises :class:`~dgr.errors.InputError`."""
    file = read_gguf(path)
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InputError(f"{file.path} has no tensor {name!r}")
    with file.path.open("rb") as opened:
        opened.seek(tensor.offset)
        raw = opened.read(tensor.n_bytes)
    shape = tensor.ne[::-1]
    if tensor.type is GgmlType.I32:
        return np.frombuffer(raw, "<i4").astype(np.int32).reshape(shape)
    if tensor.type is GgmlType.F32:
        values = np.frombuffer(raw, "<f4").astype(np.float32)
    elif tensor.type is GgmlType.F16:
        values = np.frombuffer(raw, "<f2").astype(np.float32)
    elif tensor.type is GgmlType.BF16:
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = np.frombuffer(dequantize(tensor.type, raw), np.float32)
    return values.reshape(shape)


def _encoded(values: Callable[[], npt.NDArray[np.generic]], kind: GgmlType, width: int) -> Iterable[bytes]:
    found = np.ascontiguousarray(values())
    if kind is GgmlType.I32:
        yield found.astype("<i4").tobytes()
    else:
        yield quantize(kind, found.astype(np.float32).tobytes(), width)


def write_model(
    path: str | os.PathLike[str],
    hp: HyperParameters,
    values: Callable[[str], npt.NDArray[np.generic]],
    weights: str,
    name: str,
) -> Path:
    """Write a model over a token for each byte: ``values`` gives a tensor by its name, C order.

    ``weights``: a key of :data:`~dgr.selftest.fixture.presets.WEIGHTS`, or a type of which every matrix shall be. Raises
    :class:`~dgr.errors.InputError` where rows are not whole blocks of it, and when ``path`` cannot be written.
    """
    tensors: dict[TensorForm, Content] = {}
    for spec in model_tensors(hp):
        form = TensorForm(spec.name, spec.ne, tensor_type(spec, weights))
        tensors[form] = partial(_encoded, partial(values, spec.name), form.type, spec.ne[0])
    metadata: Mapping[str, MetaValue] = {
        **metadata_of(hp, byte_vocabulary(), name),
        "general.license": MetaValue(ValueType.STRING, _LICENCE),
    }
    write_file(Path(path), metadata, tensors)
    return Path(path)


def write_learned(
    path: str | os.PathLike[str], weights: str = "mixed", *, source: str | os.PathLike[str] = KEPT
) -> Path:
    """Write the learned model in some weights, as :func:`write_model` does; or another ``source`` of its kind."""
    hp = Artifact.open(source).hp
    return write_model(path, hp, partial(read_values, source), weights, f"dgr learned fixture {weights}")


def learned_summary(path: str | os.PathLike[str], weights: str) -> LearnedSummary:
    """What such a file holds."""
    artifact = Artifact.open(path)
    specs = model_tensors(artifact.hp)
    return LearnedSummary(
        path=str(path),
        weights=weights,
        layers=artifact.hp.n_layers,
        n_tensors=len(specs),
        n_parameters=sum(spec.n_elements for spec in specs if spec.kind is not TensorKind.HASH_TABLE),
        file_bytes=artifact.file_bytes,
    )
