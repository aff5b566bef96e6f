"""What a model consists of, in a form that does not change with how it is stored: the base of its identity.

A manifest names every tensor of the whole model with type, shape and a digest of its data, and digests the metadata that
decides what is computed. From it follows one identity for a single file, for any split into parts and for a slice of some
layers; a file that holds only a share carries the manifest (or finds it beside itself) and is held against it.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from dgr.core.files.inputs import NOT_JSON
from dgr.errors import ArtifactError
from dgr.gguf.reader import MetaValue, TensorInfo
from dgr.gguf.types import GgmlType
from dgr.gguf.writer import encode_value
from dgr.v4.hyper_parameters import ARCHITECTURE

__all__ = ["DIGEST_SIZE", "Entry", "Manifest", "decode_manifest", "encode_manifest", "make_manifest", "metadata_digest"]

#: Bytes of every digest here.
DIGEST_SIZE = 32
#: ``GGML_MAX_DIMS``.
_MAX_DIMS = 4
#: Bytes of all tensors together: a thousand times the largest model, and far from where 64 bits overflow.
_MAX_BYTES = 1 << 50
_HEX = re.compile(f"[0-9a-f]{{{2 * DIGEST_SIZE}}}")

#: Keys that do not change what the model computes, or that differ between files of one model.
_UNIDENTIFYING = ("general.", "split.", f"{ARCHITECTURE}.dgr.")
#: Keys below ``general.`` that count all the same.
_IDENTIFYING = frozenset({"general.architecture", "general.quantization_version"})


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the model."""

    name: str
    type: int
    #: Shape, fastest dimension first.
    ne: tuple[int, ...]
    #: Digest of its data, hex.
    digest: str

    def matches(self, tensor: TensorInfo) -> bool:
        """Whether a stored tensor has this type and shape."""
        return (self.type, self.ne) == (tensor.type, tensor.ne)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor of a whole model, by name, and the digest of its metadata."""

    #: Digest of the metadata that decides what is computed, hex.
    metadata: str
    #: Ascending by name.
    tensors: tuple[Entry, ...]
    version: int = 1

    @property
    def digest(self) -> str:
        """Digest over all entries, hex."""
        return _digest_entries(self.tensors)

    @property
    def identity(self) -> str:
        """What tells this model from every other, hex: metadata and weights, not names, files, offsets or padding."""
        return _digest(b"dgr-artifact/2", (self.metadata.encode(), self.digest.encode()))

    def digest_of(self, names: Iterable[str]) -> str:
        """Digest over the entries of some tensors, as a layer range needs them, and the metadata."""
        wanted = set(names)
        entries = _digest_entries(entry for entry in self.tensors if entry.name in wanted)
        return _digest(b"dgr-range/1", (self.metadata.encode(), entries.encode()))

    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.tensors}


def _digest(person: bytes, items: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE, person=person)
    for item in items:
        digest.update(struct.pack("<Q", len(item)))
        digest.update(item)
    return digest.hexdigest()


def _digest_entries(entries: Iterable[Entry]) -> str:
    def items() -> Iterable[bytes]:
        for entry in entries:
            yield entry.name.encode()
            yield struct.pack(f"<I{len(entry.ne)}Q", entry.type, *entry.ne)
            yield entry.digest.encode()

    return _digest(b"dgr-manifest/1", items())


def metadata_digest(metadata: Mapping[str, MetaValue]) -> str:
    """Digest of the keys that decide what is computed, in the order of names, each with its type and bytes.

    Names, authors and the like, split and range keys and the alignment of data do not count.
    """

    def items() -> Iterable[bytes]:
        for key in sorted(metadata):
            if key in _IDENTIFYING or not key.startswith(_UNIDENTIFYING):
                yield key.encode()
                yield struct.pack("<I", metadata[key].type) + encode_value(metadata[key])

    return _digest(b"dgr-metadata/1", items())


def make_manifest(
    metadata: Mapping[str, MetaValue], tensors: Iterable[TensorInfo], digests: Mapping[str, str]
) -> Manifest:
    """The manifest of a model whose tensors have these digests."""
    entries = (Entry(tensor.name, int(tensor.type), tensor.ne, digests[tensor.name]) for tensor in tensors)
    return Manifest(metadata_digest(metadata), tuple(sorted(entries, key=lambda entry: entry.name)))


def encode_manifest(manifest: Manifest) -> bytes:
    """A manifest as JSON."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes | str, path: Path) -> Manifest:
    """Read and check a manifest; ``path`` is where it came from, for the error."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except NOT_JSON as wrong:
        raise ArtifactError(f"{path}: the manifest of its model is damaged: {wrong}; make it again") from wrong
    if manifest.version != 1:
        raise ArtifactError(f"{path}: its manifest has version {manifest.version}, this dgr reads 1; use a newer dgr")
    names = [entry.name for entry in manifest.tensors]
    if names != sorted(set(names)):
        raise ArtifactError(f"{path}: the manifest of its model is damaged: its names are not ascending; make it again")
    n_bytes = 0
    for entry in manifest.tensors:
        if (size := _size_of(entry)) is None:
            raise ArtifactError(
                f"{path}: the manifest of its model is damaged: {entry.name[:80]!r} is not a tensor of a GGUF file (type"
                f" {entry.type}, shape {list(entry.ne)}); make it again"
            )
        n_bytes += size
    if n_bytes > _MAX_BYTES:
        raise ArtifactError(
            f"{path}: the manifest of its model is damaged: its tensors take {n_bytes} bytes, but a model may take"
            f" {_MAX_BYTES}; make it again"
        )
    return manifest


def _size_of(entry: Entry) -> int | None:
    """Bytes of a tensor, with the bounds of :func:`~dgr.gguf.reader.read_gguf`; None where they are exceeded."""
    try:
        kind = GgmlType(entry.type)
    except ValueError:
        return None
    if not 1 <= len(entry.ne) <= _MAX_DIMS or not all(0 < dim <= _MAX_BYTES for dim in entry.ne):
        return None
    if entry.ne[0] % kind.block_size or not _HEX.fullmatch(entry.digest):
        return None
    return kind.row_bytes(entry.ne[0]) * math.prod(entry.ne[1:])
