"""Flags that several commands share, and what they make of them."""

from __future__ import annotations

import argparse

from dgr.engine.base import ContextParams, Numerics

__all__ = ["add_model_arguments", "context_of"]

_DEFAULTS = ContextParams()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--split`` and the context parameters."""
    parser.add_argument("--model", required=True, metavar="GGUF", help="the model file")
    parser.add_argument(
        "--split", metavar="A:B,...", help="layer ranges of the stages, for example 0:15,15:29,29:43 (default: one stage)"
    )
    parser.add_argument("--ctx", type=int, default=_DEFAULTS.n_ctx, metavar="N", help="tokens the context holds (n_ctx)")
    parser.add_argument("--batch", type=int, default=_DEFAULTS.n_batch, metavar="N", help="most tokens in a native call")
    parser.add_argument("--ubatch", type=int, default=_DEFAULTS.n_ubatch, metavar="N", help="tokens of a native sub-batch")
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens of a prefill chunk (default: --ubatch)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="compute threads of each stage (default: 1)")
    parser.add_argument(
        "--numerics",
        choices=[one.value for one in Numerics],
        default=_DEFAULTS.numerics.value,
        help="exact: the same bits however the work is cut; native: upstream's fastest kernels",
    )
    parser.add_argument("--flash-attn", choices=["on", "off"], default="on", help="flash attention (default: on)")
    parser.add_argument("--type-k", default=_DEFAULTS.type_k, metavar="TYPE", help="K-cache type: f16, f32, q8_0")
    parser.add_argument("--memory", metavar="SIZE", help="refuse what takes more: bytes, 24GiB, or 50%% of the machine")
    parser.add_argument("--mmap", action="store_true", help="map the model file instead of reading the owned tensors")


def context_of(args: argparse.Namespace) -> ContextParams:
    """The context parameters that the flags name."""
    return ContextParams(
        n_ctx=args.ctx,
        n_batch=args.batch,
        n_ubatch=args.ubatch,
        type_k=args.type_k,
        flash_attn=args.flash_attn == "on",
        numerics=Numerics(args.numerics),
    )
