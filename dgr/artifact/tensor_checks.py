"""What is looked at in a tensor before llama.cpp sees it: shape, type, and where a hash table routes to."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from dgr.errors import ArtifactError
from dgr.gguf.reader import GgufFile, TensorInfo
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm
from dgr.v4.hyper_parameters import HyperParameters
from dgr.v4.tensors import TensorKind, TensorSpec

__all__ = ["check_hash_table", "check_shape", "check_type"]

#: Bytes of a hash table read at a time.
_TABLE_STEP = 4 << 20


def check_shape(path: Path, spec: TensorSpec, tensor: TensorForm) -> None:
    """Refuse a misshapen tensor; ``path``: the file that says so."""
    if not spec.fits(tensor.ne):
        raise ArtifactError(
            f"{path}: the tensor {spec.name!r} has the shape {list(tensor.ne)}, but the hyper-parameters"
            f" give {list(spec.ne)}; convert the model again"
        )


def check_type(path: Path, spec: TensorSpec, tensor: TensorForm) -> None:
    """Refuse a tensor of a type that the graph cannot use; ``path``: the file that says so."""
    if spec.kind is TensorKind.HASH_TABLE:
        allowed, wanted = tensor.type is GgmlType.I32, GgmlType.I32.label
    elif spec.kind.is_matrix:
        allowed, wanted = tensor.type.is_matrix_operand, "a float or quantised type"
    else:
        allowed, wanted = tensor.type is GgmlType.F32, GgmlType.F32.label
    if not allowed:
        raise ArtifactError(
            f"{path}: the tensor {spec.name!r} has the type {tensor.type.label}, but must have {wanted};"
            " convert the model again"
        )


def check_hash_table(file: GgufFile, tensor: TensorInfo, hp: HyperParameters) -> None:
    """Every expert id in ``[0, n_expert)``: llama.cpp asserts this inside the graph (``ggml_get_rows``)."""
    try:
        with file.path.open("rb") as data:
            data.seek(tensor.offset)
            for begin in range(0, tensor.n_bytes, _TABLE_STEP):
                raw = data.read(min(_TABLE_STEP, tensor.n_bytes - begin))
                ids = array("i", raw[: len(raw) // 4 * 4])
                if len(ids) * 4 != min(_TABLE_STEP, tensor.n_bytes - begin):
                    raise ArtifactError(f"{file.path}: the file became shorter while being read; fetch it again")
                if sys.byteorder == "big":
                    ids.byteswap()
                if min(ids) < 0 or max(ids) >= hp.n_expert:
                    index, expert = next((i, e) for i, e in enumerate(ids) if not 0 <= e < hp.n_expert)
                    token = (begin // 4 + index) // hp.n_expert_used
                    raise ArtifactError(
                        f"{file.path}: {tensor.name!r} sends token {token} to expert {expert}, but the model"
                        f" has experts 0 to {hp.n_expert - 1}; fetch the file again"
                    )
    except OSError as failed:
        raise ArtifactError(f"{file.path}: cannot be read: {failed.strerror or failed}; check the path") from failed
