"""A model file as dgr sees it: what it is, what each layer weighs, and whether a range of it can run.

:meth:`Artifact.open` reads the header only. :meth:`Artifact.check` looks at what a stage of one range would load, and
refuses what llama.cpp would abort on. Multi-part files are not read.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping

from attrs import field, frozen

from dgr.errors import ArtifactError, UnsupportedModel
from dgr.model.ggml import GgmlType
from dgr.model.gguf import GgufFile, MetaArray, MetaValue, TensorInfo, ValueType, read_gguf
from dgr.model.metadata import from_metadata
from dgr.model.route import LayerRange
from dgr.model.tensors import TensorKind, TensorSpec, block_tensors, head_tensors, range_tensors, tail_tensors
from dgr.model.v4 import ARCHITECTURE, HyperParameters

__all__ = ["Artifact", "identity"]

#: Keys that do not change what the model computes, or that differ between files of one model.
_UNIDENTIFYING = ("general.", "split.", f"{ARCHITECTURE}.dgr.")
#: Keys below ``general.`` that count all the same.
_IDENTIFYING = frozenset({"general.architecture", "general.quantization_version"})
#: Bytes of a hash table read at a time.
_TABLE_STEP = 4 << 20


@frozen
class Artifact:
    """One GGUF file of a V4 model."""

    file: GgufFile
    hp: HyperParameters
    #: Digest over what identifies the model (see :func:`identity`), hex.
    identity: str
    _known: Mapping[str, TensorSpec] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read a header; raises :class:`~dgr.errors.ArtifactError` for a bad file or another model."""
        file = read_gguf(path)
        _refuse_parts(file)
        try:
            hp = from_metadata(file.metadata, file.tensors.__contains__)
        except UnsupportedModel as refused:
            raise UnsupportedModel(f"{file.path}: {refused}") from None
        specs = [*head_tensors(hp), *tail_tensors(hp)]
        for block in range(hp.n_blocks):
            specs += block_tensors(hp, block)
        return cls(file, hp, identity(file.metadata, file.tensors.values()), {spec.name: spec for spec in specs})

    def tensors_of(self, layers: LayerRange) -> tuple[TensorInfo, ...]:
        """Tensors in the file that a stage of the range loads, in the order of the graph."""
        stored = self.file.tensors
        return tuple(stored[spec.name] for spec in range_tensors(self.hp, layers) if spec.name in stored)

    def weight_bytes(self, layers: LayerRange) -> int:
        """Bytes of every tensor that a stage of the range loads."""
        return sum(tensor.n_bytes for tensor in self.tensors_of(layers))

    def block_bytes(self, block: int) -> int:
        """Bytes of one block's own tensors, without the globals of head and tail; MTP follows the main layers."""
        return self._bytes(block_tensors(self.hp, block))

    @property
    def head_bytes(self) -> int:
        """Bytes of the globals that the head loads beside its layers."""
        return self._bytes(head_tensors(self.hp))

    @property
    def tail_bytes(self) -> int:
        """Bytes of the globals that the tail loads beside its layers."""
        return self._bytes(tail_tensors(self.hp))

    def matrix_types(self, layers: LayerRange) -> tuple[GgmlType, ...]:
        """Types of the weight matrices in a range: what decides whether exact numerics hold."""
        return tuple(
            sorted({tensor.type for tensor in self.tensors_of(layers) if self._known[tensor.name].kind.is_matrix})
        )

    def check(self, layers: LayerRange) -> None:
        """Refuse a range whose tensors are missing, misshapen, of a type the graph cannot use, or route to nowhere.

        Finite weights are the native loader's check; it reads them anyway.
        """
        for spec in range_tensors(self.hp, layers):
            tensor = self.file.tensors.get(spec.name)
            if tensor is not None:
                self._check_tensor(spec, tensor)
            elif spec.required:
                raise ArtifactError(
                    f"{self.file.path}: the tensor {spec.name!r} is missing, but layer range {layers} needs it; fetch a"
                    " complete DeepSeek V4 file"
                )
        unknown = next((name for name in self.file.tensors if name not in self._known), None)
        if unknown is not None:
            raise UnsupportedModel(
                f"{self.file.path}: the tensor {unknown!r} is no part of a DeepSeek V4 Flash model of"
                f" {self.hp.n_blocks} blocks; use a plain conversion"
            )
        for layer in layers.layers:
            if self.hp.is_hash_routed(layer):
                self._check_hash_table(layer)

    def _bytes(self, specs: Iterable[TensorSpec]) -> int:
        stored = self.file.tensors
        return sum(stored[spec.name].n_bytes for spec in specs if spec.name in stored)

    def _check_tensor(self, spec: TensorSpec, tensor: TensorInfo) -> None:
        if not spec.fits(tensor.ne):
            raise ArtifactError(
                f"{self.file.path}: the tensor {spec.name!r} has the shape {list(tensor.ne)}, but the hyper-parameters"
                f" give {list(spec.ne)}; convert the model again"
            )
        if spec.kind is TensorKind.HASH_TABLE:
            allowed, wanted = tensor.type is GgmlType.I32, GgmlType.I32.label
        elif spec.kind.is_matrix:
            allowed, wanted = tensor.type.is_matrix_operand, "a float or quantised type"
        else:
            allowed, wanted = tensor.type is GgmlType.F32, GgmlType.F32.label
        if not allowed:
            raise ArtifactError(
                f"{self.file.path}: the tensor {spec.name!r} has the type {tensor.type.label}, but must have {wanted};"
                " convert the model again"
            )

    def _check_hash_table(self, layer: int) -> None:
        """Every expert id in ``[0, n_expert)``: llama.cpp asserts this inside the graph (``ggml_get_rows``)."""
        tensor = self.file.tensors[f"blk.{layer}.ffn_gate_tid2eid.weight"]
        n_expert = self.hp.n_expert
        try:
            with self.file.path.open("rb") as data:
                data.seek(tensor.offset)
                for begin in range(0, tensor.n_bytes, _TABLE_STEP):
                    raw = data.read(min(_TABLE_STEP, tensor.n_bytes - begin))
                    ids = array("i", raw[: len(raw) // 4 * 4])
                    if len(ids) * 4 != min(_TABLE_STEP, tensor.n_bytes - begin):
                        raise ArtifactError(
                            f"{self.file.path}: the file became shorter while being read; fetch it again"
                        )
                    if sys.byteorder == "big":
                        ids.byteswap()
                    if min(ids) < 0 or max(ids) >= n_expert:
                        index, expert = next((i, e) for i, e in enumerate(ids) if not 0 <= e < n_expert)
                        token = (begin // 4 + index) // self.hp.n_expert_used
                        raise ArtifactError(
                            f"{self.file.path}: {tensor.name!r} sends token {token} to expert {expert}, but the model"
                            f" has experts 0 to {n_expert - 1}; fetch the file again"
                        )
        except OSError as failed:
            raise ArtifactError(
                f"{self.file.path}: cannot be read: {failed.strerror or failed}; check the path"
            ) from failed


def _refuse_parts(file: GgufFile) -> None:
    stored = file.metadata.get("split.count")
    count = stored.value if stored is not None else 0
    if not isinstance(count, int) or count > 1:
        number = file.metadata.get("split.no")
        which = f"part {number.value + 1}" if number is not None and isinstance(number.value, int) else "one part"
        raise ArtifactError(
            f"{file.path}: this is {which} of a model in {count} files (split.count); multi-part models are not read:"
            " join the parts with llama-gguf-split --merge"
        )


_PACKED = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}


def _encoded(stored: MetaValue) -> bytes:
    """A metadata value as its types and its bytes in the file."""
    if isinstance(stored.value, MetaArray):
        return struct.pack("<IIQ", stored.type, stored.value.element, len(stored.value)) + stored.value.raw
    if isinstance(stored.value, str):
        return struct.pack("<I", stored.type) + stored.value.encode("utf-8", "surrogateescape")
    return struct.pack("<I", stored.type) + struct.pack(_PACKED[stored.type], stored.value)


def identity(metadata: Mapping[str, MetaValue], tensors: Iterable[TensorInfo]) -> str:
    """Digest of a model: its metadata and its tensor table (name, type, shape), each in the order of names.

    Names, authors and the like, split and range keys, offsets and padding do not count: files of one model agree
    however they are cut. Weights are not read; a digest per tensor would join its entry in the table.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"dgr-artifact/1")

    def add(item: bytes) -> None:
        digest.update(struct.pack("<Q", len(item)))
        digest.update(item)

    for key in sorted(metadata):
        if key in _IDENTIFYING or not key.startswith(_UNIDENTIFYING):
            add(key.encode())
            add(_encoded(metadata[key]))
    for tensor in sorted(tensors, key=lambda entry: entry.name):
        add(tensor.name.encode())
        add(struct.pack(f"<I{len(tensor.ne)}Q", tensor.type, *tensor.ne))
    return digest.hexdigest()
