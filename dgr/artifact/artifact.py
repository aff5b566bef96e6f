"""A model as dgr sees it: what it is, what each layer weighs, and whether a range of it can run.

An artifact is one GGUF, a GGUF in parts of which some may be elsewhere, or a slice (``dgr slice``) that holds some layers
of another. :meth:`Artifact.open` reads headers only. :meth:`Artifact.check` looks at what a stage of one range would load,
and refuses what llama.cpp would abort on. :meth:`Artifact.verify_weights` finds out whose weights they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from attrs import field, frozen

from dgr.artifact.digests import Progress, digest_tensors, known_digests
from dgr.artifact.manifest import Manifest, make_manifest, metadata_digest
from dgr.artifact.parts import Parts, read_parts
from dgr.artifact.slice_metadata import LAYER_END, MANIFEST_KEY, layers_of, manifest_path, read_stored_manifest
from dgr.artifact.tensor_checks import check_hash_table, check_shape, check_type
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError, UnsupportedModel
from dgr.gguf.reader import GgufFile, TensorInfo
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import TensorForm
from dgr.v4.hyper_parameters import HyperParameters
from dgr.v4.metadata import from_metadata
from dgr.v4.mtp import Shipped, mtp_packaging, refuse_artifact
from dgr.v4.tensors import TensorKind, TensorSpec, block_tensors, head_tensors, range_tensors, tail_tensors

__all__ = ["Artifact"]


@frozen
class Artifact:
    """A V4 model, or the part of one that is here."""

    parts: Parts
    hp: HyperParameters
    #: Main layers that the files are for: all of them, or those of a slice.
    layers: LayerRange
    #: What the files themselves, or a manifest beside them, say of the whole model; None: the files are the model.
    stored_manifest: Manifest | None = field(repr=False)
    _known: Mapping[str, TensorSpec] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read headers; raises :class:`~dgr.errors.ArtifactError` for a bad file or another model.

        A file of an MTP block alone is refused with :class:`~dgr.errors.MtpNotExecutable`.
        """
        parts = read_parts(path)
        stored = read_stored_manifest(parts)
        names = set(parts.located()) | {entry.name for entry in (stored.tensors if stored else ())}
        unseen = stored is None and bool(parts.missing)  # an MTP block that is announced may be elsewhere
        try:
            hp = from_metadata(parts.first.metadata, lambda name: unseen or name in names)
        except UnsupportedModel as refused:
            raise UnsupportedModel(f"{parts.first.path}: {refused}") from None
        shipped = mtp_packaging(names, hp.n_layers)
        is_share = stored is None and (parts.missing or LAYER_END in parts.first.metadata)
        refuse_artifact(parts.first.path, parts.first.metadata, Shipped.ABSENT if is_share else shipped)
        specs = [*head_tensors(hp), *tail_tensors(hp)]
        for block in range(hp.n_blocks):
            specs += block_tensors(hp, block)
        known = {spec.name: spec for spec in specs}
        artifact = cls(parts, hp, layers_of(parts.first, hp), stored, known)
        if stored is not None:
            _check_manifest(artifact, stored)
        return artifact

    @property
    def file(self) -> GgufFile:
        """The file with the metadata: the only one, or the first part."""
        return self.parts.first

    @property
    def is_slice(self) -> bool:
        return LAYER_END in self.file.metadata

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the model is here."""
        return not self.is_slice and not self.parts.missing

    @property
    def file_bytes(self) -> int:
        """Bytes of all files that are here."""
        return sum(file.file_bytes for file in self.parts.present)

    @cached_property
    def located(self) -> Mapping[str, tuple[GgufFile, TensorInfo]]:
        """Tensors that are here, with their files."""
        return self.parts.located()

    @cached_property
    def tensors(self) -> Mapping[str, TensorForm]:
        """Every tensor of the whole model that is known: from a manifest where there is one, else what is here."""
        if self.stored_manifest is not None:
            return {
                entry.name: TensorForm(entry.name, entry.ne, GgmlType(entry.type))
                for entry in self.stored_manifest.tensors
            }
        return {name: TensorForm(name, tensor.ne, tensor.type) for name, (_, tensor) in self.located.items()}

    # --- what it weighs -----------------------------------------------------------------------------------------------

    def specs_of(self, layers: LayerRange) -> tuple[TensorSpec, ...]:
        """Tensors that a stage of the range must have, or may."""
        return range_tensors(self.hp, layers)

    def tensors_of(self, layers: LayerRange) -> tuple[TensorForm, ...]:
        """Tensors that a stage of the range loads, in the order of the graph."""
        return tuple(self.tensors[spec.name] for spec in self.specs_of(layers) if spec.name in self.tensors)

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

    def _bytes(self, specs: Iterable[TensorSpec]) -> int:
        return sum(self.tensors[spec.name].n_bytes for spec in specs if spec.name in self.tensors)

    # --- whether a range of it can run --------------------------------------------------------------------------------

    def check(self, layers: LayerRange) -> None:
        """Refuse a range whose tensors are missing, misshapen, of a type the graph cannot use, or route to nowhere.

        Finite weights are the native loader's check; it reads them anyway.
        """
        self.hp.check_range(layers)
        if not (self.layers.begin <= layers.begin and layers.end <= self.layers.end):
            raise ArtifactError(
                f"{self.file.path}: this slice holds layers {self.layers} of the model, not all of {layers}; use another"
                " slice, or the whole model"
            )
        self.check_forms(layers)
        located = self.located
        for spec in self.specs_of(layers):
            if spec.name not in located and (spec.required or spec.name in self.tensors):
                raise ArtifactError(self._absence(spec.name, layers))
        for layer in layers.layers:
            if self.hp.is_hash_routed(layer):
                check_hash_table(*located[f"blk.{layer}.ffn_gate_tid2eid.weight"], self.hp)

    def check_forms(self, layers: LayerRange) -> None:
        """What :meth:`check` looks at in the headers, for a load that only sizes the range: its data may be elsewhere."""
        for spec in self.specs_of(layers):
            if spec.name in self.tensors:
                check_shape(self._path_of(spec.name), spec, self.tensors[spec.name])
                check_type(self._path_of(spec.name), spec, self.tensors[spec.name])
            elif spec.required:
                raise ArtifactError(self._absence(spec.name, layers))
        unknown = next((name for name in self.tensors if name not in self._known), None)
        if unknown is not None:
            raise UnsupportedModel(
                f"{self.file.path}: the tensor {unknown!r} is not part of a DeepSeek V4 Flash model of"
                f" {self.hp.n_blocks} blocks; use a plain conversion"
            )
        factor = next((name for name in self.tensors if self._known[name].kind is TensorKind.SCALE), None)
        if factor is not None:
            raise UnsupportedModel(
                f"{self.file.path}: {factor!r} is a factor that llama.cpp's V4 graph does not apply: the model would run with"
                " wrong weights, without any error; use a conversion without separate factors"
            )
        for name, tensor in self.tensors.items():
            if name not in self.located:  # a manifest alone speaks of it; the loader may be given a hole of this size
                check_shape(self.file.path, self._known[name], tensor)

    def _path_of(self, name: str) -> Path:
        """The file to name for a tensor: the one that holds it, if it is here."""
        return (self.located[name][0] if name in self.located else self.file).path

    def _absence(self, name: str, layers: LayerRange) -> str:
        missing = self.parts.missing
        if not missing:
            return (
                f"{self.file.path}: the tensor {name!r} is missing, but layer range {layers} needs it; fetch a complete"
                " DeepSeek V4 file"
            )
        files = ", ".join(path.name for path in missing)
        return (
            f"{self.file.path}: the tensor {name!r} is in none of the parts that are here, but layer range {layers} needs"
            f" it; fetch {files}" + (" (or the one of them that holds it)" if len(missing) > 1 else "")
        )

    # --- whose weights they are ---------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """What tells this model from every other, hex (see :class:`~dgr.artifact.manifest.Manifest`).

        A file, its parts and its slices have one identity. Reads all weights the first time, unless a manifest says it.
        """
        return self.manifest().identity

    def manifest(self, progress: Progress | None = None) -> Manifest:
        """Every tensor of the whole model with its digest: as a manifest says, or from the weights."""
        return self.stored_manifest or self.read_manifest(progress)

    def read_manifest(self, progress: Progress | None = None) -> Manifest:
        """The manifest from the weights themselves, whatever one beside them says; the whole model must be here."""
        if not self.is_whole:
            raise ArtifactError(self._identity_unknown_message())
        jobs = [(file, tuple(file.tensors.values())) for file in self.parts.present]
        return make_manifest(self.file.metadata, self._infos(), digest_tensors(jobs, progress))

    def known_manifest(self) -> Manifest | None:
        """The manifest, if it is known without reading weights."""
        if self.stored_manifest is not None or not self.is_whole:
            return self.stored_manifest
        digests = {name: digest for file in self.parts.present for name, digest in known_digests(file).items()}
        return make_manifest(self.file.metadata, self._infos(), digests) if set(self.located) <= set(digests) else None

    def _infos(self) -> list[TensorInfo]:
        return [tensor for _, tensor in self.located.values()]

    def verify_weights(self, layers: LayerRange, progress: Progress | None = None) -> str:
        """The identity, after holding the weights of a range against it.

        With a manifest at hand only the tensors of the range are read. Raises :class:`~dgr.errors.ArtifactError` naming
        the tensor that is another than the manifest says.
        """
        if self.stored_manifest is None:
            return self.read_manifest(progress).identity
        located = self.located
        jobs: dict[str, tuple[GgufFile, list[TensorInfo]]] = {}
        for spec in self.specs_of(layers):
            if spec.name in located:
                file, tensor = located[spec.name]
                jobs.setdefault(str(file.path), (file, []))[1].append(tensor)
        digests = digest_tensors(list(jobs.values()), progress)
        entries = self.stored_manifest.by_name()
        for name, digest in digests.items():
            if entries[name].digest != digest:
                raise ArtifactError(
                    f"{located[name][0].path}: the weights of {name!r} are not those of model"
                    f" {self.stored_manifest.identity}: their digest is {digest}, not {entries[name].digest};"
                    " fetch the file again"
                )
        return self.stored_manifest.identity

    def _identity_unknown_message(self) -> str:
        if self.is_slice:
            return f"{self.file.path}: holds layers {self.layers} only and does not say of which model; use `dgr slice`"
        files = ", ".join(path.name for path in self.parts.missing)
        return (
            f"{self.file.path}: {files} is not here, so the model's identity cannot be told; fetch it, or put the manifest"
            f" here as {manifest_path(self.parts).name} (`dgr inspect MODEL --identity --manifest` where all parts are)"
        )


def _check_manifest(artifact: Artifact, stored: Manifest) -> None:
    """Refuse a manifest of another model: other metadata, or a tensor of another type or shape."""
    parts, entries = artifact.parts, stored.by_name()
    where = parts.first.path if MANIFEST_KEY in parts.first.metadata else manifest_path(parts)
    mine = artifact.located
    if artifact.is_slice:  # a slice of a model with MTP holds a stand-in for one of its tensors
        mine = {name: mine[name] for name in (spec.name for spec in artifact.specs_of(artifact.layers)) if name in mine}
    wrong = next(
        (name for name, (_, info) in mine.items() if name not in entries or not entries[name].matches(info)), None
    )
    if metadata_digest(parts.first.metadata) != stored.metadata:
        found = f"its metadata is not that of {parts.first.path.name}"
    elif wrong is not None:
        found = f"{wrong!r} is not in it as {mine[wrong][0].path.name} has it"
    elif not artifact.is_slice and len(entries) != parts.n_tensors:
        found = f"it lists {len(entries)} tensors, but the model has {parts.n_tensors}"
    else:
        return
    raise ArtifactError(f"{where}: this manifest is of another model: {found}; make it again, or remove it")
