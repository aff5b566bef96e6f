"""``dgr inspect --identity`` and ``--cuts``."""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import Manifest, encode_manifest
from dgr.artifact.slice_metadata import manifest_path
from dgr.cli.progress import progress_bar
from dgr.cli.streams import json_line, print_json
from dgr.cli.summary import print_beside
from dgr.cli.tables import layer_runs, render_table
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.route import LayerRange
from dgr.engine.llama import ADAPTER
from dgr.engine.native import build_info, kernel_fingerprint, runtime_version
from dgr.errors import ArtifactError
from dgr.v4.cuts import restrictions, valid_cuts
from dgr.v4.hyper_parameters import HyperParameters
from dgr.wire.frames import SCHEMA_HASH, SCHEMA_VERSION

__all__ = ["show_cuts", "show_identity"]


def _manifest_of(artifact: Artifact) -> Manifest:
    """From the weights where all of them are here, and then the one beside them must agree; else as given."""
    if not artifact.is_whole:
        return artifact.manifest()
    with progress_bar("reading the model") as progress:
        manifest = artifact.read_manifest(progress)
    if artifact.stored_manifest is not None and artifact.stored_manifest != manifest:
        raise ArtifactError(
            f"{manifest_path(artifact.parts)}: this manifest is of model {artifact.stored_manifest.identity}, but the"
            f" weights beside it are {manifest.identity}; make it again with --manifest, or remove it"
        )
    return manifest


def show_identity(args: argparse.Namespace, artifact: Artifact) -> int:
    """Print what a handshake compares, and write the manifest where that is asked for."""
    target = None if args.manifest is None else find_target(args.manifest or manifest_path(artifact.parts))
    if target is not None:
        target.check_apart(*artifact.parts.paths)
    if target is not None and artifact.stored_manifest is not None and artifact.is_whole:
        artifact = attrs.evolve(artifact, stored_manifest=None)  # it is about to be made again
    manifest = _manifest_of(artifact)
    layers = artifact.layers if args.layers is None else LayerRange.parse(args.layers)
    if artifact.is_slice or args.layers is not None:
        artifact.check(layers)
        with progress_bar("reading the range") as progress:
            artifact.verify_weights(layers, progress)
    info = build_info()
    found: dict[str, Any] = {
        "model": args.model,
        "identity": manifest.identity,
        "manifest_digest": manifest.digest,
        "metadata_digest": manifest.metadata,
        "n_tensors": len(manifest.tensors),
        "layers": str(layers),
        "range_digest": manifest.digest_of(spec.name for spec in artifact.specs_of(layers)),
        "adapter": ADAPTER,
        "schema_version": SCHEMA_VERSION,
        "schema_hash": SCHEMA_HASH,
        "runtime": runtime_version(),
        "llama_cpp_commit": info["llama_cpp_commit"],
        "patch_digest": info["patch_digest"],
        "kernel_fingerprint": kernel_fingerprint(),
    }
    if target is not None:
        write_file(target, encode_manifest(manifest))
        found["manifest"] = str(target.path)
    text = json_line(found) if args.json else render_table([(key.replace("_", " "), str(found[key])) for key in found])
    print_beside(target, text)
    return 0


def show_cuts(args: argparse.Namespace, hp: HyperParameters) -> int:
    """Print where the model may be cut, and what is refused and why."""
    cuts, refused = valid_cuts(hp), restrictions(hp)
    if args.json:
        found = {
            "model": args.model,
            "n_layers": hp.n_layers,
            "cuts": [attrs.asdict(cut) for cut in cuts],
            "restrictions": [attrs.asdict(restriction) for restriction in refused],
        }
        print_json(found)
        return 0
    with_ids = layer_runs([cut.layer for cut in cuts if cut.needs_token_ids]) or "no layer"
    print(
        f"{args.model}: {hp.n_layers} main layers; a cut before any of layers {layer_runs([cut.layer for cut in cuts])}"
    )
    print(f"boundary: {hp.boundary_width} floats a token, with the token ids beside them")
    print(f"stages that begin at {with_ids} route by the ids; the others only pass them on")
    print()
    rows = [("not supported", "refused at", "because")]
    print(render_table([*rows, *((item.what, item.refused_at, item.reason) for item in refused)]))
    return 0
