"""``dgr logits``: raw logits for a file of token ids, to compare with any other implementation."""

from __future__ import annotations

import argparse
import sys
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import trio

from dgr.cli.options import add_model_arguments
from dgr.cli.pipelines import open_local
from dgr.cli.progress import Activity, progress_bar
from dgr.cli.streams import json_line
from dgr.cli.summary import print_beside
from dgr.core.files.inputs import MOST_TEXT_BYTES, read_whole
from dgr.core.files.outputs import writing
from dgr.core.files.targets import Target, find_target
from dgr.errors import InputError, WireError

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
    try:
        data = read_whole(path, MOST_TEXT_BYTES, "a file of token ids")
    except OSError as error:
        raise InputError(f"cannot read token ids from {path}: {error.strerror}; check the path of --tokens") from error
    if not data or len(data) % 4:
        raise InputError(f"{path} holds {len(data)} bytes; token ids are int32, so give a positive multiple of 4")
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def run(args: argparse.Namespace) -> int:
    with progress_bar("opening the stages", lambda count: f"{count} tokens") as activity:
        target, shape = trio.run(_logits, args, activity)
    text = f"{shape['out']}: {shape['rows']} x {shape['columns']} float32"
    print_beside(target, json_line(shape) if args.json else text)
    return 0


async def _logits(args: argparse.Namespace, activity: Activity | None) -> tuple[Target, dict[str, Any]]:
    if args.model is None:
        raise InputError("give --model GGUF")
    tokens = read_tokens(Path(args.tokens))
    target = find_target(args.out)
    target.check_apart(args.model, args.tokens)
    with writing(target) as file:  # opened first: a place that cannot be written is told before the model is loaded
        async with open_local(args) as pipeline:
            if activity is not None:
                activity.about("prefill")
            rows = _Rows(file, 4 * pipeline.n_vocab, len(tokens), activity)
            async with pipeline.session() as session:
                await session.logits(tokens, rows.write)
    shape = {"out": args.out, "rows": len(tokens), "columns": pipeline.n_vocab, "bytes": rows.n_bytes}
    return target, shape


class _Rows:
    """Writes rows in order, each once: after a loss some come again, with the same bits."""

    def __init__(self, file: BinaryIO, row_bytes: int, n_rows: int = 0, activity: Activity | None = None) -> None:
        self.n_bytes = 0
        self._n_rows, self._activity = n_rows, activity
        self._file, self._row_bytes = file, row_bytes

    def write(self, position: int, values: memoryview) -> None:
        known = self.n_bytes - position * self._row_bytes
        if known < 0:
            raise WireError(
                f"rows of position {position} came, but those from {self.n_bytes // self._row_bytes} on are due"
            )
        fresh = values.cast("B")[known:]
        self._file.write(fresh)
        self.n_bytes += len(fresh)
        if self._activity is not None:
            self._activity(self.n_bytes // self._row_bytes, self._n_rows)
