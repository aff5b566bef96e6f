"""A model as a :class:`~dgr.selftest.chain.Chain` of native engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange, parse_split
from dgr.core.values import ContextParams
from dgr.engine.llama import LlamaEngine
from dgr.selftest.chain import Chain

__all__ = ["open_chain"]


@contextmanager
def open_chain(
    model: str | Path | Artifact,
    ranges: str | Sequence[LayerRange] | None = None,
    context: ContextParams | None = None,
    *,
    threads: int = 1,
    certified_only: bool = True,
    engine: type[LlamaEngine] = LlamaEngine,
) -> Iterator[Chain]:
    """Load one native engine per range (one for the whole model by default); leaving the block frees them."""
    artifact = model if isinstance(model, Artifact) else Artifact.open(model)
    if ranges is None:
        ranges = (artifact.hp.whole,)
    elif isinstance(ranges, str):
        ranges = parse_split(ranges, artifact.hp.n_layers)
    with ExitStack() as stack:
        engines = []
        for layers in ranges:
            stage = engine(artifact, layers, context, threads=threads, certified_only=certified_only)
            stack.callback(stage.stop)
            engines.append(stage)
        yield Chain(engines)
