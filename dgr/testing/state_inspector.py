"""An engine whose state rows tests may read and overwrite.

It runs on the test extension, a complete second link of the product's native code with a few functions more
(``cffi_build/dgr_probe.h``). The product's own extension has none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dgr.artifact.artifact import Artifact
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.llama import LlamaEngine
from dgr.engine.native import Native
from dgr.errors import InputError
from dgr.v4.state_map import Component, ContextShape, StateMap, state_map

__all__ = ["InspectedEngine", "inspector_native", "split_text"]


@lru_cache(maxsize=1)
def inspector_native() -> Native:
    """The test extension; present in builds made with ``DGR_TEST_EXTENSION=ON``."""
    return Native(importlib.import_module("dgr.testing._probe"))


def split_text(expressions: Sequence[str], text: str) -> list[int]:
    """Bytes of each word that llama.cpp splits a text into by a pre-tokenizer's expressions."""
    native = inspector_native()
    kept = [native.ffi.new("char[]", expression.encode()) for expression in expressions]
    exprs, data, n = native.ffi.new("char *[]", kept), text.encode(), native.ffi.new("size_t *")
    out = native.ffi.new("int32_t[]", len(data) + 1)
    native.check(native.lib.dgr_probe_words(exprs, len(kept), data, len(data), out, len(out), n), "splitting")
    return list(native.ffi.unpack(out, n[0])) if n[0] else []


class InspectedEngine(LlamaEngine):
    """A native stage that also tells what its state tensors hold."""

    def __init__(
        self,
        model: str | Path | Artifact,
        layers: LayerRange | None = None,
        context: ContextParams | None = None,
        **options: Any,
    ) -> None:
        artifact = model if isinstance(model, Artifact) else Artifact.open(model)
        super().__init__(artifact, layers, context, native=inspector_native(), **options)
        about = self.describe()
        shape = ContextShape(about.context.n_ctx, about.context.n_ubatch, about.context.n_seq_max, about.context.type_k)
        #: What the range owns, and in which shapes.
        self.map: StateMap = state_map(artifact.hp, about.layers, shape)

    def owned(self) -> Iterator[tuple[Component, int]]:
        """Every (component, layer) that the stage holds."""
        for state in self.map.owned:
            for layer in state.layers:
                yield state.component, layer

    def rows(
        self, component: Component, layer: int, slot: int = 0, begin: int = 0, count: int | None = None
    ) -> list[bytes]:
        """Rows as they are stored (all of them by default); a ring row is its kv row, then its score row."""
        ffi, lib = self._native.ffi, self._native.lib
        where = (self._handle, list(Component).index(component), layer, slot, begin)
        what = f"{component} of layer {layer}, slot {slot}"
        count = self.map[component].rows - begin if count is None else count
        size = ffi.new("size_t *")
        self._native.check(lib.dgr_probe_rows(*where, 0, ffi.NULL, 0, size), what)
        out = bytearray(count * size[0])
        self._native.check(lib.dgr_probe_rows(*where, count, ffi.from_buffer(out), len(out), size), what)
        return [bytes(out[at : at + size[0]]) for at in range(0, len(out), size[0])]

    def raw_positions(self, slot: int = 0) -> list[int]:
        """The position each cell of the slot's sliding window holds, -1 where it is free."""
        ffi, lib = self._native.ffi, self._native.lib
        n = ffi.new("size_t *")
        self._native.check(lib.dgr_probe_raw_positions(self._handle, slot, ffi.NULL, 0, n), f"cells of slot {slot}")
        out = ffi.new("int32_t[]", n[0])
        self._native.check(lib.dgr_probe_raw_positions(self._handle, slot, out, n[0], n), f"cells of slot {slot}")
        return list(out)

    def poke(self, component: Component, layer: int, row: int, data: bytes, slot: int = 0) -> None:
        """Overwrite one row."""
        index = list(Component).index(component)
        self._native.check(
            self._native.lib.dgr_probe_poke(self._handle, index, layer, slot, row, data, len(data)),
            f"{component} of layer {layer}, slot {slot}, row {row}",
        )

    def image(self, slot: int = 0) -> dict[tuple[Component, int], bytes]:
        """Every byte of state that the slot has, by component and layer, and the positions of its raw cells."""
        if not 0 <= slot < self.describe().context.n_seq_max:
            raise InputError(f"slot {slot} is outside 0 to {self.describe().context.n_seq_max - 1}")
        found = {key: b"".join(self.rows(*key, slot=slot)) for key in self.owned()}
        cells = self.raw_positions(slot)
        found[Component.RAW_SWA, -1] = b"".join(cell.to_bytes(4, "little", signed=True) for cell in cells)
        return found
