"""``dgr logits``: raw logits for a file of token ids, to compare with any other implementation."""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from pathlib import Path
from typing import Any

import trio

from dgr.cli.options import add_model_arguments, context_of
from dgr.errors import InputError
from dgr.runtime.local import open_pipeline

__all__ = ["read_tokens", "register", "run"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "logits",
        help="write raw logits for a file of token ids",
        description="Write the logits of every position: float32 little-endian, rows = tokens, columns = vocabulary.",
    )
    add_model_arguments(parser)
    parser.add_argument("--tokens", required=True, metavar="FILE.i32", help="token ids, int32 little-endian")
    parser.add_argument("--out", required=True, metavar="FILE.f32", help="where to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def read_tokens(path: Path) -> list[int]:
    """Token ids of an int32 little-endian file."""
    data = path.read_bytes()
    if not data or len(data) % 4:
        raise InputError(f"{path} holds {len(data)} bytes; token ids are int32, so give a positive multiple of 4")
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def run(args: argparse.Namespace) -> int:
    return trio.run(_logits, args)


async def _logits(args: argparse.Namespace) -> int:
    if args.model is None:
        raise InputError("give --model GGUF")
    tokens = read_tokens(Path(args.tokens))
    out = Path(args.out)
    part = out.with_name(out.name + ".part")
    async with open_pipeline(
        args.model,
        args.split,
        context=context_of(args),
        threads=args.threads,
        mmap=args.mmap,
        memory_budget=args.memory,
        chunk=args.chunk,
    ) as pipeline:
        row_bytes = 4 * pipeline.n_vocab
        try:
            with part.open("wb") as file:

                def write(position: int, values: memoryview) -> None:
                    file.seek(position * row_bytes)
                    file.write(values)

                async with pipeline.session() as session:
                    await session.logits(tokens, write)
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    shape = {"out": str(out), "rows": len(tokens), "columns": pipeline.n_vocab, "bytes": len(tokens) * row_bytes}
    print(json.dumps(shape) if args.json else f"{out}: {len(tokens)} x {pipeline.n_vocab} float32")
    return 0
