"""Writes small DeepSeek V4 models: the real graph and schedule, narrow widths, reproducible bytes.

``python -m dgr.testing.fixture OUT.gguf`` and ``dgr fixture OUT.gguf`` call :func:`write_fixture`. Every tensor holds
non-trivial values; a seed gives the same file on every platform. Needs the extra ``fixture`` (numpy, gguf).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from dgr.errors import InputError
from dgr.model.artifact import Artifact
from dgr.model.ggml import GgmlType
from dgr.model.gguf_write import writing
from dgr.model.manifest import encode_manifest
from dgr.model.shares import manifest_path
from dgr.model.tensors import TensorKind, TensorSpec, block_tensors, head_tensors, tail_tensors
from dgr.model.v4 import ARCHITECTURE, V4_FLASH, HyperParameters
from dgr.testing.fixture_blocks import BLOCK_TYPES, random_blocks
from dgr.testing.fixture_edit import write_in_parts
from dgr.testing.fixture_metadata import add_metadata
from dgr.testing.fixture_presets import PRESETS, WEIGHTS
from dgr.testing.fixture_stream import Stream, bfloat16, mxfp4_blocks, q4_k_blocks, q8_0_blocks
from dgr.testing.fixture_vocab import MIN_VOCAB, Vocabulary, build_vocabulary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["PRESETS", "WEIGHTS", "FixtureSummary", "add_arguments", "write_fixture", "write_from_arguments"]

_BLOCK_WRITERS = {"Q8_0": q8_0_blocks, "MXFP4": mxfp4_blocks, "Q4_K": q4_k_blocks}

#: Kinds of matrix that a quantised file quantises.
_QUANTISED_KINDS = (
    TensorKind.EMBEDDING, TensorKind.OUTPUT, TensorKind.DENSE, TensorKind.COMPRESSOR, TensorKind.EXPERT
)  # fmt: skip


@frozen
class FixtureSummary:
    """What was written."""

    path: str
    preset: str
    weights: str
    seed: int
    layers: int
    mtp: bool
    n_tensors: int
    n_parameters: int
    #: Size in bytes, of all parts (apparent size when sparse).
    file_bytes: int


def _requirements() -> tuple[Any, Any]:
    try:
        import gguf
        import numpy as np
    except ImportError as missing:
        raise InputError(
            f"writing a fixture model needs the package {missing.name!r}; install it with: pip install 'dgr[fixture]'"
        ) from missing
    return gguf, np


def _head_gains(vocab: Vocabulary) -> npt.NDArray[np.float32]:
    """Size of each row of the head: words speak loudest, so that greedy text reads like words."""
    import numpy as np

    gains = np.full(len(vocab.tokens), 0.5, np.float32)
    for token, text in enumerate(vocab.tokens):
        if token in vocab.words:
            gains[token] = 4.0
        elif token >= MIN_VOCAB:
            gains[token] = 1.5
        elif text.isascii() and text.isalpha():
            gains[token] = 1.0
    return gains


def _types_by_kind(weights: str) -> dict[TensorKind, str]:
    """What ``weights`` means: a key of :data:`WEIGHTS`, or the name of a type that every matrix shall have."""
    if weights in WEIGHTS:
        return WEIGHTS[weights]
    name = weights.upper()
    if name not in ("BF16", *(kind.name for kind in BLOCK_TYPES)):
        raise InputError(f"unknown weights {weights!r}; choose one of {', '.join(WEIGHTS)}, or a quantised type")
    return dict.fromkeys(_QUANTISED_KINDS, name)


def _tensor_type(spec: TensorSpec, weights: str) -> str:
    if spec.kind is TensorKind.HASH_TABLE:
        return "I32"
    name = _types_by_kind(weights).get(spec.kind, "F32")
    block = GgmlType[name].block_size
    if spec.ne[0] % block:
        raise InputError(
            f"weights {weights!r} need rows that are multiples of {block} values, but {spec.name} has rows of"
            f" {spec.ne[0]}; use the preset 'wide' or 'big'"
        )
    return name


def _table(np: Any, spec: TensorSpec, stream: Stream, n_expert: int) -> Any:
    """Expert ids per token, distinct within a row: the first draws of a shuffle."""
    used, n_vocab = spec.ne
    ids = np.tile(np.arange(n_expert, dtype=np.int32), (n_vocab, 1))
    rows = np.arange(n_vocab)
    draws = stream.integers(used * n_vocab).reshape(used, n_vocab)
    for place in range(used):
        other = place + (draws[place] % np.uint32(n_expert - place)).astype(np.int64)
        ids[rows, place], ids[rows, other] = ids[rows, other], ids[rows, place].copy()
    return np.ascontiguousarray(ids[:, :used])


#: (half width, centre) of the values of each vector kind.
_VECTOR_VALUES = {
    TensorKind.NORM: (0.25, 1.0),
    TensorKind.SINK: (1.0, 0.0),
    TensorKind.APE: (0.5, 0.0),
    TensorKind.HC_BASE: (0.5, 0.0),
    TensorKind.HC_SCALE: (0.25, 0.75),
    TensorKind.EXPERT_BIAS: (0.125, 0.0),
}


def _values(np: Any, spec: TensorSpec, type_name: str, seed: int, hp: HyperParameters, gains: Any) -> Any:
    """The bytes of one tensor: an array of its own dtype, or of uint8 in block or bfloat16 layout."""
    stream = Stream(seed, spec.name)
    shape = spec.ne[::-1]
    if spec.kind is TensorKind.HASH_TABLE:
        return _table(np, spec, stream, hp.n_expert)
    if spec.kind in _VECTOR_VALUES:
        return stream.uniform(spec.n_elements, *_VECTOR_VALUES[spec.kind]).reshape(shape)

    n_rows = spec.n_elements // spec.ne[0]
    # Embeddings are the signal itself; a matrix keeps the size of what it multiplies.
    rms = 1.0 if spec.kind is TensorKind.EMBEDDING else 1 / math.sqrt(spec.ne[0])
    row_rms = np.full(n_rows, rms, np.float32)
    if spec.kind is TensorKind.OUTPUT:
        row_rms *= gains
    kind = GgmlType[type_name]
    if kind in BLOCK_TYPES:
        sizes = np.repeat(row_rms, spec.ne[0] // kind.block_size)
        write = _BLOCK_WRITERS.get(type_name)
        blocks = random_blocks(kind, stream, sizes) if write is None else write(stream, sizes)
        return blocks.reshape(*shape[:-1], -1)
    values = stream.uniform(spec.n_elements, math.sqrt(3)).reshape(n_rows, spec.ne[0])
    values *= row_rms[:, None]
    if type_name == "F16":
        return values.astype(np.float16).reshape(shape)
    if type_name == "BF16":
        return bfloat16(values.reshape(-1)).reshape(*shape[:-1], -1)
    return values.reshape(shape)


def write_fixture(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    preset: str | None = None,
    layers: int = 43,
    mtp: bool = False,
    weights: str = "f32",
    sparse: bool = False,
    parts: int = 1,
) -> FixtureSummary:
    """Write a V4 model to ``path`` (replaced in one step when complete).

    ``layers``: a prefix of the real schedule. ``weights``: a key of :data:`WEIGHTS`, or a quantised type for every
    matrix. ``preset``: a key of :data:`PRESETS`; by default ``tiny``, or ``wide`` for types with long blocks. ``mtp``:
    append the MTP block. ``sparse``: write header and zeroes as a hole in the file (sizes only; the model must not be
    run). ``parts``: write ``STEM-00001-of-0000N.gguf`` and so on instead of ``STEM.gguf``, the first without tensors, and
    the model's manifest beside them (not when sparse).
    """
    gguf, np = _requirements()
    longest = max((GgmlType[name].block_size for name in _types_by_kind(weights).values()), default=1)
    preset = preset or ("wide" if longest > 32 else "tiny")
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    if not 1 <= layers <= V4_FLASH.n_layers:
        raise InputError(f"{layers} layers asked for, but the schedule has 1 to {V4_FLASH.n_layers}")
    if not 0 <= seed < 1 << 63:
        raise InputError(f"seed {seed} is outside 0 to 2**63 - 1")
    if not 1 <= parts <= 99999:
        raise InputError(f"{parts} parts asked for; a model is written in 1 to 99999")
    if preset == "real" and not sparse:
        raise InputError("the preset 'real' has 284 G parameters; write it sparse, for its sizes only")
    base = PRESETS[preset]
    n_mtp = int(mtp)
    clamps = base.swiglu_clamp_exp[:1] * (layers + n_mtp)
    hp = evolve(
        base,
        n_layers=layers,
        n_mtp_layers=n_mtp,
        compress_ratios=base.compress_ratios[:layers],
        hash_layers=min(base.hash_layers, layers),
        swiglu_clamp_exp=clamps,
        swiglu_clamp_shexp=clamps,
    )
    specs = [*head_tensors(hp), *tail_tensors(hp)]
    for block in range(hp.n_blocks):
        specs += [spec for spec in block_tensors(hp, block) if spec.required or ".nextn.shared_head_norm" in spec.name]
    vocab = build_vocabulary(hp.n_vocab)

    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    add_metadata(writer, hp, vocab, f"dgr fixture {preset} {weights} seed {seed}")
    types = [_tensor_type(spec, weights) for spec in specs]
    for spec, type_name in zip(specs, types, strict=True):
        ggml_type = gguf.GGMLQuantizationType[type_name]
        block, size = gguf.GGML_QUANT_SIZES[ggml_type]
        writer.add_tensor_info(
            spec.name, spec.ne[::-1], np.dtype(np.float32), spec.n_elements // block * size, raw_dtype=ggml_type
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        gains = _head_gains(vocab)
        if sparse:
            file = writer.fout[0]
            writer.write_padding(file, file.tell())
            padded = (
                gguf.GGUFWriter.ggml_pad(info.nbytes, writer.data_alignment) for info in writer.tensors[0].values()
            )
            file.truncate(file.tell() + sum(padded))
        else:
            for spec, type_name in zip(specs, types, strict=True):
                writer.write_tensor_data(_values(np, spec, type_name, seed, hp, gains))
        writer.close()
        if parts > 1:
            target = _in_parts(partial, target, parts, sparse)
        else:
            _forget_manifest(target)
            partial.replace(target)
    except OSError as failed:
        raise InputError(f"{target} cannot be written: {failed.strerror or failed}; choose another place") from failed
    finally:
        partial.unlink(missing_ok=True)
    return FixtureSummary(
        path=str(target),
        preset=preset,
        weights=weights,
        seed=seed,
        layers=layers,
        mtp=mtp,
        n_tensors=len(specs),
        n_parameters=sum(spec.n_elements for spec in specs if spec.kind is not TensorKind.HASH_TABLE),
        file_bytes=Artifact.open(target).file_bytes,
    )


def _forget_manifest(target: Path) -> None:
    """Remove the manifest of a model that is replaced."""
    target.with_name(target.name.removesuffix(".gguf") + ".manifest.json").unlink(missing_ok=True)


def _in_parts(source: Path, target: Path, n_parts: int, sparse: bool) -> Path:
    """Write a finished model in parts, with its manifest; gives the first part."""
    _forget_manifest(target)
    first = write_in_parts(source, target, n_parts, sparse=sparse)[0]
    if not sparse:
        artifact = Artifact.open(first)
        with writing(manifest_path(artifact.parts)) as out:
            out.write(encode_manifest(artifact.read_manifest()))
    return first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that ``dgr fixture`` and ``python -m dgr.testing.fixture`` share."""
    parser.add_argument("out", metavar="OUT.gguf", help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of every value (default: 0)")
    parser.add_argument("--preset", choices=PRESETS, help="widths (default: tiny; wide for K-quants)")
    parser.add_argument(
        "--layers", type=int, default=43, metavar="N", help="first N layers of the schedule (default: 43)"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="f32", help="tensor types (default: f32)")
    parser.add_argument("--mtp", action="store_true", help="append the MTP block (dgr never runs it)")
    parser.add_argument(
        "--sparse", action="store_true", help="header and sizes only; the weights are a hole in the file"
    )
    parser.add_argument(
        "--parts",
        type=int,
        default=1,
        metavar="N",
        help="write N files, OUT-00001-of-0000N.gguf and so on, and the model's manifest; the first holds no tensor",
    )


def write_from_arguments(args: argparse.Namespace) -> FixtureSummary:
    """Write what :func:`add_arguments` read."""
    return write_fixture(
        args.out,
        seed=args.seed,
        preset=args.preset,
        layers=args.layers,
        mtp=args.mtp,
        weights=args.weights,
        sparse=args.sparse,
        parts=args.parts,
    )


def _main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dgr.testing.fixture", description="Write a small V4 model.")
    add_arguments(parser)
    try:
        summary = write_from_arguments(parser.parse_args(argv))
    except InputError as refused:
        parser.error(str(refused))
    print(f"{summary.path}: {summary.n_tensors} tensors, {summary.file_bytes} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
