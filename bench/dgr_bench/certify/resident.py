"""Resident memory of stages, in a process of their own: what was allocated there before does not blur it.

    python -P -m dgr_bench.certify.resident MODEL SPLIT CONTEXT.json

prints one JSON object: ``before`` and ``loaded``, bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
import trio
from msgspec.structs import replace

from dgr import Artifact, ContextParams, LayerRange
from dgr.cli.children import python_module, spelled_out
from dgr.cluster.local import load_engines
from dgr.core.route import parse_split
from dgr.errors import EngineError
from dgr_bench.subjects import resident_bytes


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes before loading (stages were loaded once already, and stopped), and with every stage loaded.

    Weights and state are resident at once, compute buffers as they are used.
    """

    before: int
    loaded: int


async def resident_with(artifact: Artifact, ranges: Sequence[LayerRange], context: ContextParams) -> Resident:
    """Load stages in a child process. Raises :class:`~dgr.errors.EngineError` with the end of what it wrote when it fails."""
    split = ",".join(map(str, ranges))
    about = msgspec.json.encode(context).decode()
    command = python_module("dgr_bench.certify.resident", spelled_out(artifact.file.path), split, about)
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise EngineError(f"stages {split} do not load in a process of their own: {words[-1]}")
    return msgspec.json.decode(done.stdout, type=Resident)


async def _measure(model: str, split: str, context: ContextParams) -> Resident:
    artifact = Artifact.open(model)
    ranges = parse_split(split, artifact.hp.n_layers)
    await _loaded(artifact, ranges, replace(context, n_ctx=1))  # libraries, tables, the allocator: once a process
    before = resident_bytes()
    return Resident(before=before, loaded=await _loaded(artifact, ranges, context))


async def _loaded(artifact: Artifact, ranges: Sequence[LayerRange], context: ContextParams) -> int:
    """Resident memory while the stages are loaded."""
    engines = await load_engines(artifact, ranges, context)
    try:
        return resident_bytes()
    finally:
        for engine in engines:
            engine.stop()


def main(model: str, split: str, context: str) -> None:
    """What the child does."""
    found = trio.run(_measure, model, split, msgspec.json.decode(context, type=ContextParams))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
