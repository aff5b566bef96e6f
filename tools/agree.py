"""``python -m tools.agree``: the same weights in ``transformers``' V4 and in a pipeline of several stages, row by row.

An independent implementation, in float32, against llama.cpp's graph cut into stages, in float32 weights and K. Both sum in
their own order, so that the last bits differ; what must not differ is what the model says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import trio

import dgr
from dgr.errors import DgrError
from dgr.selftest.chain import some_tokens
from dgr.selftest.learned.model import held_out_text, read_values, write_learned
from dgr.selftest.learned.recall import BOS, as_tokens
from tools.v4_transformers import build_model, load_weights

__all__ = ["compare", "main", "pipeline_logits", "transformers_logits"]

Rows = npt.NDArray[np.float32]


def transformers_logits(model: Path, tokens: Sequence[int]) -> Rows:
    """[tokens, n_vocab], all tokens in one call."""
    hp = dgr.Artifact.open(model).hp
    built = build_model(hp).eval()
    load_weights(built, hp, lambda name: read_values(model, name))
    with torch.no_grad():
        logits = built(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.to(torch.float32).numpy()


def pipeline_logits(model: Path, split: str, tokens: Sequence[int], chunk: int) -> Rows:
    """[tokens, n_vocab], through stages in this process."""

    async def run() -> Rows:
        found: dict[int, bytes] = {}
        # Flash attention rounds K to float16 before it is used, whatever the cache holds.
        context = dgr.ContextParams(n_ctx=max(256, len(tokens)), type_k="f32", flash_attn=False)
        async with (
            dgr.open_pipeline(model, split, context=context, chunk=chunk) as pipeline,
            pipeline.session() as session,
        ):
            await session.logits(tokens, lambda at, values: found.__setitem__(at, bytes(values)))
        return np.frombuffer(b"".join(found[at] for at in sorted(found)), np.float32).reshape(len(tokens), -1)

    return trio.run(run)


def _log_softmax(rows: Rows) -> npt.NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def compare(ours: Rows, theirs: Rows) -> dict[str, float]:
    """How far two sets of rows are apart."""
    a, b = _log_softmax(theirs), _log_softmax(ours)
    divergence = np.maximum(0.0, (np.exp(a) * (a - b)).sum(axis=1))
    difference = np.abs(ours.astype(np.float64) - theirs).max(axis=1)
    return {
        "rows": len(ours),
        "deviation": float(theirs.std()),
        "difference_p50": float(np.percentile(difference, 50)),
        "difference_p99": float(np.percentile(difference, 99)),
        "difference_max": float(difference.max()),
        "divergence_p50": float(np.percentile(divergence, 50)),
        "divergence_p99": float(np.percentile(divergence, 99)),
        "divergence_max": float(divergence.max()),
        "same_top": float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()),
    }


def _tokens(count: int, n_vocab: int, text: bool) -> list[int]:
    return [BOS, *as_tokens(held_out_text()[: count - 1])] if text else some_tokens(count, n_vocab)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.agree", description=__doc__)
    parser.add_argument("--model", type=Path, help="a small V4 GGUF (default: the learned fixture, as f32)")
    parser.add_argument("--split", default=None, help="layer ranges of the stages (default: three even ones)")
    parser.add_argument("--tokens", type=int, default=1024, help="given tokens (default: 1024)")
    parser.add_argument("--chunk", type=int, default=96, help="tokens of a native call (default: 96)")
    parser.add_argument("--random", action="store_true", help="tokens without a pattern instead of English text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--least", type=float, default=0.99, help="share of equal top tokens that must be reached")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when both say the same, 1 when they do not, 2 for bad input."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = args.model or write_learned(Path(folder) / "learned.gguf", "f32")
            hp = dgr.Artifact.open(model).hp
            third = hp.n_layers // 3
            split = args.split or f"0:{third},{third}:{2 * third},{2 * third}:{hp.n_layers}"
            tokens = _tokens(args.tokens, hp.n_vocab, not args.random)
            began = time.monotonic()
            ours = pipeline_logits(model, split, tokens, args.chunk)
            between = time.monotonic()
            theirs = transformers_logits(model, tokens)
        except DgrError as error:
            print(f"tools.agree: {error}", file=sys.stderr)
            return 2
    found: dict[str, Any] = {"layers": hp.n_layers, "split": split, **compare(ours, theirs)}
    found |= {"dgr_s": between - began, "transformers_s": time.monotonic() - between}
    if args.json:
        print(json.dumps(found))
    else:
        print(
            *(
                f"{name:16} {value:.6g}" if isinstance(value, float) else f"{name:16} {value}"
                for name, value in found.items()
            ),
            sep="\n",
        )
    return 0 if found["same_top"] >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
