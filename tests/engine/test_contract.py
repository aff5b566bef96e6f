"""The native engine keeps the contract that every engine keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, Numerics
from dgr.engine.base import ShardEngine
from dgr.engine.llama import LlamaEngine
from dgr.testing.engines.contract import EngineContract


class TestExact(EngineContract):
    context = replace(EngineContract.context, n_ctx=256)

    @pytest.fixture(autouse=True)
    def _model(self, small: Path) -> None:
        self.path = small

    def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
        return LlamaEngine(self.path, layers, context)


@pytest.mark.slow
class TestNative(TestExact):
    context = replace(TestExact.context, numerics=Numerics.NATIVE)
