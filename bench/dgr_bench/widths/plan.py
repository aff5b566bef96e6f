"""What ``dgr-bench widths`` measures, and on which model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from attrs import field, frozen

from dgr import Artifact, ContextParams, LayerRange, Numerics
from dgr.selftest.fixture import write_fixture
from dgr.testing.native_measurements import MeasuredEngine
from dgr.v4.hyper_parameters import V4_FLASH
from dgr_bench.widths.roofline import representatives

#: Tokens before those that are timed: the first finds cold caches and looks for free cells from the beginning.
WARM = 2
#: Tokens that are run operation by operation.
PROFILED = 4


class WidthsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    name: str
    #: Of the model that is written: see ``dgr fixture``.
    preset: str
    layers: str
    weights: str
    #: Where a layer is timed, tokens before; the last one leaves room for what is timed.
    contexts: tuple[int, ...]
    #: Contexts up to this are computed, those beyond are filled with random rows.
    prefilled: int
    n_ctx: int
    chunk: int
    #: Timed tokens.
    decode: int
    threads: int
    numerics: Numerics
    #: Whether llama-bench runs the same file.
    upstream: bool
    #: Seconds for each of the machine's limits, and bytes that are read for the memory's.
    roof_s: float
    roof_bytes: int
    seed: int = 0

    @property
    def room(self) -> int:
        """Tokens that are run at one context."""
        return WARM + self.decode + PROFILED + 2 * self.chunk

    @property
    def is_slice(self) -> bool:
        return ":" in self.layers

    @property
    def range(self) -> LayerRange:
        """The layers that the file holds."""
        return LayerRange.parse(self.layers) if self.is_slice else LayerRange(0, int(self.layers))

    @property
    def n_layers(self) -> int:
        """Main layers of the model."""
        return V4_FLASH.n_layers if self.is_slice else self.range.end

    @property
    def kinds(self) -> dict[str, int]:
        """The layer that stands for each kind."""
        return representatives(self.range, self.n_layers)

    def at(self, context: int) -> int:
        """Tokens before those that are timed."""
        return min(context, self.n_ctx - self.room)


@frozen
class WidthsJob:
    """Where it is measured."""

    plan: WidthsPlan
    #: The model; written when it is not there.
    path: Path
    llama_bench: Path | None = None
    #: What stands in for engines, in tests.
    engine: Callable[..., MeasuredEngine] = MeasuredEngine
    #: Filled as the file is opened.
    _opened: list[Artifact] = field(factory=list, repr=False)

    @property
    def context(self) -> ContextParams:
        plan = self.plan
        return ContextParams(n_ctx=plan.n_ctx, n_batch=plan.chunk, n_ubatch=plan.chunk, numerics=plan.numerics)

    def artifact(self) -> Artifact:
        """The model, if need be written first."""
        if not self._opened:
            if not self.path.exists():
                self.write()
            self._opened.append(Artifact.open(self.path))
        return self._opened[0]

    def write(self) -> None:
        """Write the model."""
        plan = self.plan
        self._opened.clear()
        write_fixture(
            self.path,
            preset=plan.preset,
            layers=plan.range if plan.is_slice else plan.range.end,
            weights=plan.weights,
            seed=plan.seed,
        )

    def load(self, layers: LayerRange, n_ctx: int | None = None) -> MeasuredEngine:
        """A stage; it must be stopped."""
        context = self.context if n_ctx is None else msgspec.structs.replace(self.context, n_ctx=n_ctx)
        return self.engine(self.artifact(), layers, context, threads=self.plan.threads)
