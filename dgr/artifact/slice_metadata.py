"""What a file that holds a share of a model says of the whole: its layers, and the manifest it carries or lies beside."""

from __future__ import annotations

import stat
from pathlib import Path

from dgr.artifact.manifest import Manifest, decode_manifest, encode_manifest
from dgr.artifact.parts import Parts
from dgr.core.route import LayerRange
from dgr.errors import ArtifactError
from dgr.gguf.reader import GgufFile, MetaValue, ValueType
from dgr.gguf.writer import u32
from dgr.v4.hyper_parameters import ARCHITECTURE, HyperParameters

__all__ = [
    "LAYER_BEGIN",
    "LAYER_END",
    "MANIFEST_KEY",
    "PARENT_KEY",
    "layers_of",
    "manifest_path",
    "read_stored_manifest",
    "slice_keys",
]

#: Keys of a slice. llama.cpp reads the first two (see the patch), dgr the others.
LAYER_BEGIN, LAYER_END = f"{ARCHITECTURE}.dgr.layer_begin", f"{ARCHITECTURE}.dgr.layer_end"
#: The parent's manifest as JSON, and its identity for people.
MANIFEST_KEY, PARENT_KEY = f"{ARCHITECTURE}.dgr.manifest", f"{ARCHITECTURE}.dgr.parent"

#: A manifest of V4 Flash has 0.3 MiB.
_MAX_MANIFEST_BYTES = 64 << 20


def slice_keys(layers: LayerRange, manifest: Manifest) -> dict[str, MetaValue]:
    """What a slice says beside the keys of its model: its layers, and the whole model's manifest."""
    return {
        LAYER_BEGIN: u32(layers.begin),
        LAYER_END: u32(layers.end),
        PARENT_KEY: MetaValue(ValueType.STRING, manifest.identity),
        MANIFEST_KEY: MetaValue(ValueType.STRING, encode_manifest(manifest).decode()),
    }


def manifest_path(parts: Parts) -> Path:
    """Where the manifest of a model lies, when it lies beside it."""
    return parts.stem.with_name(parts.stem.name + ".manifest.json")


def read_stored_manifest(parts: Parts) -> Manifest | None:
    """The manifest that a slice carries, or that lies beside the file."""
    stored = parts.first.metadata.get(MANIFEST_KEY)
    if stored is not None:
        if not isinstance(stored.value, str):
            raise ArtifactError(f"{parts.first.path}: {MANIFEST_KEY} is not a text; make the slice again")
        return decode_manifest(stored.value.encode("utf-8", "surrogateescape"), parts.first.path)
    path = manifest_path(parts)
    try:
        about = path.stat()
        # Asked before opening: opening a pipe would wait for its writer.
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_MANIFEST_BYTES:
            raise ArtifactError(
                f"{path}: lies where the model's manifest would, but is not a regular file of at most"
                f" {_MAX_MANIFEST_BYTES} bytes; make the manifest again, or remove it"
            )
        return decode_manifest(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except OSError as failed:
        raise ArtifactError(f"{path}: cannot be read: {failed.strerror or failed}; check the file") from failed


def layers_of(file: GgufFile, hp: HyperParameters) -> LayerRange:
    """The main layers a file says it holds: all of them unless it is a slice."""
    bounds = []
    for key, default in ((LAYER_BEGIN, 0), (LAYER_END, hp.n_layers)):
        stored = file.metadata.get(key)
        value = default if stored is None else stored.value
        if not isinstance(value, int) or (stored is not None and stored.type is not ValueType.UINT32):
            raise ArtifactError(f"{file.path}: {key} is {value!r}, but must be a UINT32; make the slice again")
        bounds.append(value)
    if not 0 <= bounds[0] < bounds[1] <= hp.n_layers:
        raise ArtifactError(
            f"{file.path}: {LAYER_BEGIN} and {LAYER_END} are {bounds[0]} and {bounds[1]}, which is not a range of the model's"
            f" {hp.n_layers} main layers; make the slice again"
        )
    return LayerRange(*bounds)
