"""Slices: a GGUF that holds what one layer range needs, and the manifest of the model it was cut from."""

from __future__ import annotations

import os
from collections.abc import Iterator

from attrs import frozen

from dgr.artifact.artifact import Artifact
from dgr.artifact.digests import Progress, new_digest
from dgr.artifact.manifest import Manifest
from dgr.artifact.slice_metadata import slice_keys
from dgr.core.files.outputs import writing
from dgr.core.files.targets import Target, find_target
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError
from dgr.gguf.reader import MetaValue
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm, lay_out, zero_padding

__all__ = ["SliceSummary", "write_slice"]

_STEP = 1 << 20


@frozen
class SliceSummary:
    """What was written."""

    path: str
    layers: str
    #: Identity of the model, which the slice shares.
    identity: str
    #: Digest over the tensors of the range and the metadata.
    range_digest: str
    n_tensors: int
    weight_bytes: int
    file_bytes: int


def write_slice(
    artifact: Artifact, layers: LayerRange, path: str | os.PathLike[str] | Target, progress: Progress | None = None
) -> SliceSummary:
    """Write what a stage of ``layers`` needs to ``path``, as :func:`dgr.core.files.outputs.writing` writes.

    All metadata stays as it is. The weights are held against the manifest as they are copied. ``progress`` is called for
    the copy; make the manifest first (:meth:`Artifact.manifest`) to see the progress of that.
    """
    artifact.check(layers)
    target = path if isinstance(path, Target) else find_target(path)
    target.check_apart(*artifact.parts.paths)
    manifest = artifact.manifest()
    tensors = list(artifact.tensors_of(layers))
    layout = lay_out(_metadata(artifact, layers, manifest), [*tensors, *_stand_in(artifact)])
    total = sum(tensor.n_bytes for tensor in tensors)
    digests = manifest.by_name()
    done = 0
    with writing(target) as out:
        out.write(layout.header)
        for tensor in tensors:
            for chunk in _verified(artifact, tensor.name, digests[tensor.name].digest):
                out.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            out.write(zero_padding(tensor.n_bytes, layout.alignment))
        for begin in layout.offsets[len(tensors) :]:
            out.write(bytes(layout.file_bytes - begin))
    return SliceSummary(
        path=str(target.path),
        layers=str(layers),
        identity=manifest.identity,
        range_digest=manifest.digest_of(tensor.name for tensor in tensors),
        n_tensors=len(tensors),
        weight_bytes=total,
        file_bytes=layout.file_bytes,
    )


def _metadata(artifact: Artifact, layers: LayerRange, manifest: Manifest) -> dict[str, MetaValue]:
    kept = {key: value for key, value in artifact.file.metadata.items() if not key.startswith("split.")}
    return kept | slice_keys(layers, manifest)


def _stand_in(artifact: Artifact) -> list[TensorForm]:
    """What keeps the schedule as it is in a slice of a model with an MTP block.

    llama.cpp asks for ``nextn.eh_proj`` of the block behind the main layers, and without it takes that block for one more
    main layer (``llama_model_deepseek4::load_arch_hparams``). It looks at the shape and skips the data, so zeroes of the
    smallest type do.
    """
    hp = artifact.hp
    if not hp.n_mtp_layers:
        return []
    name, ne = f"blk.{hp.n_layers}.nextn.eh_proj.weight", (2 * hp.n_embd, hp.n_embd)
    kinds = (kind for kind in GgmlType if kind.is_matrix_operand and ne[0] % kind.block_size == 0)
    return [min((TensorForm(name, ne, kind) for kind in kinds), key=lambda tensor: tensor.n_bytes)]


def _verified(artifact: Artifact, name: str, expected: str) -> Iterator[bytes]:
    """The data of a tensor; raises at its end when it is not what the manifest says."""
    file, tensor = artifact.located[name]
    digest = new_digest()
    try:
        with file.path.open("rb", buffering=0) as data:
            data.seek(tensor.offset)
            left = tensor.n_bytes
            while left:
                chunk = data.read(min(_STEP, left))
                if not chunk:
                    raise ArtifactError(f"{file.path}: the file became shorter while being read; fetch it again")
                digest.update(chunk)
                left -= len(chunk)
                yield chunk
    except OSError as failed:
        raise ArtifactError(f"{file.path}: cannot be read: {failed.strerror or failed}; check the path") from failed
    if digest.hexdigest() != expected:
        raise ArtifactError(
            f"{file.path}: the weights of {name!r} are not those of the manifest: their digest is {digest.hexdigest()}, not"
            f" {expected}; fetch the file again"
        )
