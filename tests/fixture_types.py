"""Types of the fixtures that many tests ask for: calls that make something, told by their arguments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import dgr
from dgr.core.values import ContextParams

T = TypeVar("T")


class Model(Protocol):
    """``model("f32", layers=7)``: the path of a fixture model."""

    def __call__(
        self,
        weights: str = "f32",
        *,
        preset: str | None = None,
        layers: int = 43,
        mtp: bool = False,
        seed: int = 0,
    ) -> Path: ...


class Prompt(Protocol):
    """``prompt(5, seed=1)``: token ids."""

    def __call__(self, n_tokens: int, seed: int = 0) -> list[int]: ...


class Parallel(Protocol):
    """``parallel(jobs)``: the results of jobs that ran side by side."""

    def __call__(self, jobs: Sequence[Callable[[], T]]) -> list[T]: ...


class PipelineLogits(Protocol):
    """``await pipeline_logits(path, split, tokens)``: all rows of logits."""

    def __call__(
        self,
        path: Path,
        split: str | Sequence[dgr.LayerRange],
        tokens: Sequence[int],
        *,
        context: ContextParams | None = None,
        chunk: int | None = None,
        threads: int = 1,
    ) -> Awaitable[bytes]: ...
