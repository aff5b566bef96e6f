"""``dgr inspect``: what a model is, and what state a layer range of it owns."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import attrs

from dgr.artifact.artifact import Artifact
from dgr.cli.inspect_identity import show_cuts, show_identity
from dgr.cli.inspect_plot import show_plot
from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.cli.tables import layer_runs, render_table
from dgr.core.mtp import CONTRACT, RESERVED
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes
from dgr.engine.opening import warn_beyond_training
from dgr.errors import InputError
from dgr.v4.hyper_parameters import V4_FLASH, HyperParameters
from dgr.v4.state_map import ContextShape, StateMap, state_map
from dgr.v4.tensors import TensorSpec, block_tensors, head_tensors, range_tensors, tail_tensors

__all__ = ["register", "run"]

#: Stands for the published model's hyper-parameters; needs no file.
_BUILT_IN = "v4-flash"
#: As :class:`~dgr.engine.base.ContextParams`.
_DEFAULT_CTX = 4096
#: Bytes of weights that are read to tell a model's identity without being asked to.
_QUICK = 1 << 30


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="show a model, or the state a layer range owns",
        description="Show hyper-parameters, layer schedule and bytes of weights; with --layers or --ctx, the state"
        " that a layer range owns; with --cuts, where it may be cut; with --identity, what a handshake compares. Weights are"
        " read for the identity alone, once; those of more than 1 GiB only with --identity.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a GGUF file (the first, if in parts), or {_BUILT_IN} for the published widths"
    )
    parser.add_argument("--layers", metavar="A:B", help="layer range to show (default: all, with --ctx)")
    parser.add_argument(
        "--ctx",
        type=int,
        metavar="N",
        help=f"tokens per session, rounded up to a multiple of 256 (default: {_DEFAULT_CTX})",
    )
    parser.add_argument(
        "--ubatch", type=int, default=512, metavar="N", help="tokens per native sub-batch (default: 512)"
    )
    parser.add_argument("--sessions", type=int, default=1, metavar="S", help="sequence slots (default: 1)")
    parser.add_argument("--type-k", default="f16", metavar="TYPE", help="K-cache type: f16, f32, q8_0 (default: f16)")
    parser.add_argument("--cuts", action="store_true", help="show the valid cuts, and what is not supported and why")
    parser.add_argument(
        "--identity", action="store_true", help="show identity and digests of model, range, wire schema and kernels"
    )
    parser.add_argument(
        "--manifest",
        nargs="?",
        const="",
        metavar="FILE",
        help="with --identity: write the manifest, which a host with some parts needs (default: beside the model)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.svg",
        help="draw which layers and state --layers owns, or each stage of --split, with --ctx, --ubatch and --sessions",
    )
    parser.add_argument("--split", metavar="A:B,…", help="with --plot: the stages of the whole model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _schedule(hp: HyperParameters, artifact: Artifact | None) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for layer in range(hp.n_layers):
        entry: dict[str, Any] = {
            "layer": layer,
            "kind": hp.kind(layer).value,
            "compress_ratio": hp.ratio(layer),
            "hash_routed": hp.is_hash_routed(layer),
        }
        if artifact is not None:
            one = LayerRange(layer, layer + 1)
            inner = [tensor for tensor in artifact.tensors_of(one) if tensor.name.startswith("blk.")]
            entry["weight_bytes"] = sum(tensor.n_bytes for tensor in inner)
            entry["missing_tensors"] = _missing(artifact, block_tensors(hp, layer))
            entry["types"] = sorted({tensor.type.label for tensor in inner})
        entries.append(entry)
    return entries


def _missing(artifact: Artifact, specs: Iterable[TensorSpec]) -> int:
    """Tensors that must be in the model and of which nothing is known here: their part is missing, and no manifest tells."""
    return sum(spec.required and spec.name not in artifact.tensors for spec in specs)


def _size(n_bytes: int, missing: int) -> str:
    """Bytes that are here, and whether that is all."""
    if not missing:
        return human_bytes(n_bytes)
    return f"{human_bytes(n_bytes)} and more, not here" if n_bytes else "not here"


def _model_object(name: str, hp: HyperParameters, artifact: Artifact | None) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name, "hyper_parameters": attrs.asdict(hp), "layers": _schedule(hp, artifact)}
    found["mtp"] = {"blocks": hp.n_mtp_layers, "status": RESERVED, "contract": CONTRACT}
    if artifact is not None:
        found |= {
            "file_bytes": artifact.file_bytes,
            "files": [str(path) for path in artifact.parts.paths],
            "missing_files": [str(path) for path in artifact.parts.missing],
            "slice": str(artifact.layers) if artifact.is_slice else None,
            "identity": _quick_identity(artifact),
            "n_tensors": len(artifact.tensors),
            "weight_bytes": artifact.weight_bytes(hp.whole),
            "head_bytes": artifact.head_bytes,
            "tail_bytes": artifact.tail_bytes,
            "missing_tensors": _missing(artifact, range_tensors(hp, hp.whole)),
            "mtp_bytes": sum(artifact.block_bytes(block) for block in range(hp.n_layers, hp.n_blocks)),
            "matrix_types": [kind.label for kind in artifact.matrix_types(hp.whole)],
        }
    return found


def _facts(hp: HyperParameters) -> list[tuple[str, str]]:
    mtp = f" + {hp.n_mtp_layers} MTP block (reserved, never run)" if hp.n_mtp_layers else ""
    attention = (
        f"{hp.n_head} heads of {hp.head_dim} ({hp.rope_dim} rotated), 1 K head, window {hp.window},"
        f" q rank {hp.q_lora_rank}, output {hp.o_groups} x {hp.o_lora_rank}"
    )
    experts = (
        f"{hp.n_expert_used} of {hp.n_expert} + {hp.n_expert_shared} shared, {hp.expert_ff} wide,"
        f" scale {hp.expert_weights_scale:g}, first {hp.hash_layers} layers routed by token id"
    )
    rope = (
        f"base {hp.rope_base:g}; compressed layers {hp.compress_rope_base:g}, YaRN x{hp.yarn.factor:g} from"
        f" {hp.yarn.original_context} tokens"
    )
    return [
        ("main layers", f"{hp.n_layers}{mtp}"),
        *([("MTP block", f"ignored: stages load and run the main layers alone ({CONTRACT})")] if mtp else []),
        ("widths", f"n_embd {hp.n_embd}, {hp.hc_streams} streams, boundary {hp.boundary_width} floats per token"),
        ("vocabulary", f"{hp.n_vocab} tokens"),
        ("trained context", f"{hp.context_length} tokens"),
        ("attention", attention),
        ("indexer", f"{hp.indexer_heads} heads of {hp.indexer_dim}, top {hp.indexer_top_k} rows"),
        ("experts", experts),
        ("hyper-connections", f"{hp.hc_sinkhorn_iterations} Sinkhorn iterations, epsilon {hp.hc_epsilon:.3g}"),
        ("rope", rope),
    ]


def _quick_identity(artifact: Artifact) -> str | None:
    """The identity, where it is known or takes no more than a second."""
    if artifact.is_whole and artifact.file_bytes <= _QUICK:
        with progress_bar("reading the model"):
            return artifact.identity
    known = artifact.known_manifest()
    return None if known is None else known.identity


def _file_facts(artifact: Artifact) -> str:
    parts, n_here = artifact.parts, len(artifact.located)
    facts = f"{human_bytes(artifact.file_bytes)}, {n_here} tensors"
    if len(parts.paths) > 1:
        facts += f" in {len(parts.present)} of {len(parts.paths)} parts"
    return facts + (f"; a slice: layers {artifact.layers}" if artifact.is_slice else "")


def _print_model(name: str, hp: HyperParameters, artifact: Artifact | None) -> None:
    facts = [("model", name)]
    if artifact is not None:
        types = ", ".join(kind.label for kind in artifact.matrix_types(hp.whole))
        facts.append(("file", _file_facts(artifact)))
        facts.append(("identity", _quick_identity(artifact) or "not known yet (dgr inspect --identity)"))
        facts.append(("matrix types", types))
    print(render_table(facts + _facts(hp)))
    print()

    groups: dict[tuple[object, ...], list[int]] = {}
    schedule = _schedule(hp, artifact)
    for entry in schedule:
        facts_of_layer = ("kind", "hash_routed", "weight_bytes", "missing_tensors")
        look = (*map(entry.get, facts_of_layer), tuple(entry.get("types", ())))
        groups.setdefault(look, []).append(entry["layer"])
    heading = ["layers", "count", "kind", "experts by"]
    rows = [heading + (["weights each", "weights", "types"] if artifact is not None else [])]
    for layers in groups.values():
        entry = schedule[layers[0]]
        row = [layer_runs(layers), str(len(layers)), entry["kind"], "token id" if entry["hash_routed"] else "router"]
        if artifact is not None:
            each, missing = entry["weight_bytes"], entry["missing_tensors"]
            row += [_size(each, missing), _size(each * len(layers), missing), ", ".join(entry["types"])]
        rows.append(row)
    if artifact is not None:
        for label, size, specs in (
            ("head", artifact.head_bytes, head_tensors(hp)),
            ("tail", artifact.tail_bytes, tail_tensors(hp)),
        ):
            rows.append([label, "", "", "", "", _size(size, _missing(artifact, specs)), ""])
        for block in range(hp.n_layers, hp.n_blocks):
            weighs = _size(artifact.block_bytes(block), _missing(artifact, block_tensors(hp, block)))
            rows.append([f"MTP {block}", "1", "", "", "", weighs, "not loaded"])
        lacks = _missing(artifact, range_tensors(hp, hp.whole))
        rows.append(["total", str(hp.n_layers), "", "", "", _size(artifact.weight_bytes(hp.whole), lacks), ""])
    print(render_table(rows, numeric=(1, 4, 5)))
    if artifact is not None and lacks:
        away = ", ".join(path.name for path in artifact.parts.missing)
        print(
            f"\n{lacks} tensors are not here: {away or 'other layers'}; a manifest of the whole model would tell of them"
        )


def _map_object(name: str, owned: StateMap, artifact: Artifact | None) -> dict[str, Any]:
    shape = owned.shape
    found: dict[str, Any] = {
        "model": name,
        "layers": str(owned.layers),
        "n_ctx": shape.n_ctx_seq,
        "n_ubatch": shape.n_ubatch,
        "n_seq_max": shape.n_seq_max,
        "type_k": shape.type_k,
        "components": [
            {
                "name": state.component.value,
                "layers": list(state.layers),
                "bytes": state.n_bytes,
                "rows": state.rows,
                "width": state.width,
                "type": state.type.label,
                "tensors": [
                    {"name": tensor.name, "layer": tensor.layer, "shape": list(tensor.ne), "bytes": tensor.n_bytes}
                    for tensor in state.tensors
                ],
            }
            for state in owned.owned
        ],
        "total_bytes": owned.total_bytes,
    }
    if artifact is not None:
        found["weight_bytes"] = artifact.weight_bytes(owned.layers)
        found["missing_tensors"] = _missing(artifact, range_tensors(artifact.hp, owned.layers))
    return found


def _print_map(name: str, owned: StateMap, artifact: Artifact | None) -> None:
    shape = owned.shape
    sessions = "1 session" if shape.n_seq_max == 1 else f"{shape.n_seq_max} sessions"
    print(f"{name}, layers {owned.layers}: state of {sessions} of {shape.n_ctx_seq} tokens, n_ubatch {shape.n_ubatch}")
    print()
    rows = [["component", "layers", "count", "tensors per layer", "shape", "type", "bytes", ""]]
    for state in owned.owned:
        per_layer = len(state.tensors) // len(state.layers)
        names = [tensor.name for tensor in state.tensors[:per_layer]]
        rows.append(
            [
                state.component.value,
                layer_runs(state.layers),
                str(len(state.layers)),
                ", ".join(text.removesuffix(str(state.layers[0])) + "*" for text in names),
                f"{state.width} x {state.rows} x {shape.n_seq_max}",
                state.type.label,
                str(state.n_bytes),
                human_bytes(state.n_bytes),
            ]
        )
    rows.append(["total", "", "", "", "", "", str(owned.total_bytes), human_bytes(owned.total_bytes)])
    print(render_table(rows, numeric=(2, 6, 7)))
    if artifact is not None:
        print()
        lacks = _missing(artifact, range_tensors(artifact.hp, owned.layers))
        print(f"weights of layers {owned.layers}: {_size(artifact.weight_bytes(owned.layers), lacks)}")


def run(args: argparse.Namespace) -> int:
    artifact = None if args.model == _BUILT_IN else Artifact.open(args.model)
    hp = V4_FLASH if artifact is None else artifact.hp
    if args.manifest is not None and not args.identity:
        raise InputError("--manifest writes what --identity finds; give both")
    if args.split is not None and (args.plot is None or args.layers is not None):
        raise InputError(
            "--split is for --plot, and says the layers of every stage; give --plot with it, and no --layers"
        )
    if args.cuts:
        return show_cuts(args, hp)
    if args.identity:
        if artifact is None:
            raise InputError(f"{_BUILT_IN} stands for widths, not for weights; give a GGUF file to --identity")
        return show_identity(args, artifact)
    ctx = _DEFAULT_CTX if args.ctx is None else args.ctx
    shape = ContextShape(ctx, args.ubatch, args.sessions, args.type_k)
    if args.plot is not None:
        return show_plot(args, hp, shape, artifact)
    if args.layers is None and args.ctx is None:
        if args.json:
            print_json(_model_object(args.model, hp, artifact))
        else:
            _print_model(args.model, hp, artifact)
        return 0
    layers = hp.whole if args.layers is None else LayerRange.parse(args.layers)
    warn_beyond_training(hp, ctx)
    owned = state_map(hp, layers, shape)
    if args.json:
        print_json(_map_object(args.model, owned, artifact))
    else:
        _print_map(args.model, owned, artifact)
    return 0
