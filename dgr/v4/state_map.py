"""The ownership map: which state a layer range owns, in which tensors, how many bytes, and what P tokens leave in it.

Everything is closed form, from ``src/llama-kv-cache-dsv4.cpp`` (``dsv4``), ``src/llama-kv-cache-iswa.cpp`` (``iswa``)
and ``src/llama-context.cpp`` (``ctx``) at the pin, with ``swa_full`` off and no rollback planes, as dgr runs it. State
for every sequence slot is allocated when the context is made: bytes here are for all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from attrs import frozen

from dgr.core.route import LayerRange
from dgr.errors import InputError
from dgr.gguf.types import GgmlType, parse_type
from dgr.v4.hyper_parameters import CSA_RATIO, HCA_RATIO, HyperParameters, LayerKind

__all__ = [
    "Component",
    "ComponentExpectation",
    "ComponentLayout",
    "ContextShape",
    "StateMap",
    "StateTensor",
    "expected_state",
    "state_map",
]

#: Cells of every K cache come in this unit (``n_pad`` of the caches; ``GGML_PAD(.., 256)`` in ctx and dsv4).
_CELL_UNIT = 256
#: ``LLAMA_MAX_SEQ``.
_MAX_SEQUENCES = 256
#: Ring rows of a compressor: CSA and indexer windows overlap by one, so they keep two (``dsv4`` state_size).
_OVERLAP_RING_ROWS = 2 * CSA_RATIO
_HCA_RING_ROWS = HCA_RATIO
#: Rings are f32 whatever type_k is.
_RING_TYPE = GgmlType.F32


class Component(StrEnum):
    """A kind of state, in the order of ``enum dgr_component`` in ``dgr_native.h``."""

    #: Sliding-window K of every layer.
    RAW_SWA = "raw_swa"
    #: Compressed K of CSA layers, one row per 4 tokens.
    CSA = "csa"
    #: Compressed K of HCA layers, one row per 128 tokens.
    HCA = "hca"
    #: Indexer K of CSA layers, one row per 4 tokens.
    INDEXER = "indexer"
    #: Compressor ring of CSA layers: the last 8 positions.
    CSA_RING = "csa_ring"
    #: Compressor ring of HCA layers: the last 128 positions.
    HCA_RING = "hca_ring"
    #: Compressor ring of the indexer: the last 8 positions.
    INDEXER_RING = "indexer_ring"


#: Layers that hold each component; raw K is in every layer.
_KIND_OF_COMPONENT = {
    Component.CSA: LayerKind.CSA,
    Component.HCA: LayerKind.HCA,
    Component.INDEXER: LayerKind.CSA,
    Component.CSA_RING: LayerKind.CSA,
    Component.HCA_RING: LayerKind.HCA,
    Component.INDEXER_RING: LayerKind.CSA,
}

#: Tensor names per component; the K caches share one name in different ggml contexts.
_TENSOR_NAMES = {
    Component.RAW_SWA: ("cache_k_l{}",),
    Component.CSA: ("cache_k_l{}",),
    Component.HCA: ("cache_k_l{}",),
    Component.INDEXER: ("cache_k_l{}",),
    Component.CSA_RING: ("dsv4_csa_state_kv_l{}", "dsv4_csa_state_score_l{}"),
    Component.HCA_RING: ("dsv4_hca_state_kv_l{}", "dsv4_hca_state_score_l{}"),
    Component.INDEXER_RING: ("dsv4_lid_state_kv_l{}", "dsv4_lid_state_score_l{}"),
}


def _pad(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@frozen
class ContextShape:
    """The context parameters that size state; equal on every stage of a route."""

    #: Tokens one sequence can hold, before rounding.
    n_ctx: int
    #: Most tokens in one native sub-batch (the smaller of n_batch and n_ubatch).
    n_ubatch: int = 512
    #: Sequence slots.
    n_seq_max: int = 1
    #: K-cache type by name: ``f16``, ``f32``, ``q8_0``, ...
    type_k: str = "f16"

    def __attrs_post_init__(self) -> None:
        for name, value, most in (
            ("n_ctx", self.n_ctx, 1 << 30),
            ("n_ubatch", self.n_ubatch, 1 << 30),
            ("n_seq_max", self.n_seq_max, _MAX_SEQUENCES),
        ):
            if not 1 <= value <= most:
                raise InputError(f"{name} is {value}, but must be 1 to {most}")
        parse_type(self.type_k)

    @property
    def n_ctx_seq(self) -> int:
        """Tokens one sequence can hold, rounded as upstream rounds (ctx:290-306)."""
        return _pad(self.n_ctx, _CELL_UNIT)

    def raw_rows(self, window: int) -> int:
        """Cells of the sliding-window cache per layer and sequence: ``size_swa`` (iswa:73)."""
        return _pad(min(self.n_ctx_seq, window + self.n_ubatch), _CELL_UNIT)

    def compressed_rows(self, ratio: int) -> int:
        """Rows of a compressed cache per layer and sequence: ``n4``, ``n128`` (dsv4:28-30, 1292-1311)."""
        return _pad(self.n_ctx_seq // ratio, _CELL_UNIT)  # exact: both ratios divide the unit of n_ctx_seq


@frozen
class StateTensor:
    """One native tensor of state."""

    name: str
    layer: int
    #: Shape, fastest dimension first: channels, rows, slots.
    ne: tuple[int, int, int]
    type: GgmlType

    @property
    def n_bytes(self) -> int:
        return self.type.row_bytes(self.ne[0]) * self.ne[1] * self.ne[2]


@frozen
class ComponentLayout:
    """One component as a range owns it."""

    component: Component
    #: Layers that hold it, ascending; empty when the range has none of the kind.
    layers: tuple[int, ...]
    #: Rows per layer and slot.
    rows: int
    #: Channels of a row.
    width: int
    type: GgmlType
    tensors: tuple[StateTensor, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes over all layers and slots."""
        return sum(tensor.n_bytes for tensor in self.tensors)


@frozen
class StateMap:
    """All state of a layer range."""

    layers: LayerRange
    shape: ContextShape
    #: Every component, in :class:`Component` order; those the range does not own have no layers and no bytes.
    components: tuple[ComponentLayout, ...]

    def __getitem__(self, component: Component) -> ComponentLayout:
        return next(state for state in self.components if state.component is component)

    @property
    def owned(self) -> tuple[ComponentLayout, ...]:
        return tuple(state for state in self.components if state.layers)

    @property
    def total_bytes(self) -> int:
        return sum(state.n_bytes for state in self.components)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of every component in one layer, all slots."""
        return sum(tensor.n_bytes for state in self.components for tensor in state.tensors if tensor.layer == layer)


def _geometry(hp: HyperParameters, shape: ContextShape, component: Component) -> tuple[int, int, GgmlType]:
    """Channels of a row, rows per layer and slot, type."""
    type_k = parse_type(shape.type_k)
    match component:
        case Component.RAW_SWA:
            return hp.head_dim, shape.raw_rows(hp.window), type_k
        case Component.CSA:
            return hp.head_dim, shape.compressed_rows(CSA_RATIO), type_k
        case Component.HCA:
            return hp.head_dim, shape.compressed_rows(HCA_RATIO), type_k
        case Component.INDEXER:
            return hp.indexer_dim, shape.compressed_rows(CSA_RATIO), type_k
        case Component.CSA_RING:
            return 2 * hp.head_dim, _OVERLAP_RING_ROWS, _RING_TYPE
        case Component.HCA_RING:
            return hp.head_dim, _HCA_RING_ROWS, _RING_TYPE
        case Component.INDEXER_RING:
            return 2 * hp.indexer_dim, _OVERLAP_RING_ROWS, _RING_TYPE


def _owned_layers(hp: HyperParameters, layers: LayerRange, component: Component) -> tuple[int, ...]:
    kind = _KIND_OF_COMPONENT.get(component)
    return tuple(layers.layers) if kind is None else hp.layers_of(kind, layers)


def state_map(hp: HyperParameters, layers: LayerRange, shape: ContextShape) -> StateMap:
    """What a stage of that range owns (dsv4:1212-1336 for the caches, dsv4:905-995 for the rings)."""
    hp.check_range(layers)
    components = []
    for component in Component:
        width, rows, kind = _geometry(hp, shape, component)
        owned = _owned_layers(hp, layers, component)
        tensors = tuple(
            StateTensor(name.format(layer), layer, (width, rows, shape.n_seq_max), kind)
            for layer in owned
            for name in _TENSOR_NAMES[component]
        )
        components.append(ComponentLayout(component, owned, rows, width, kind, tensors))
    return StateMap(layers, shape, tuple(components))


@frozen
class ComponentExpectation:
    """What one component of a sequence holds after P tokens, in every layer that has it."""

    component: Component
    #: Rows per layer and slot.
    capacity: int
    #: Rows that hold live data.
    rows: int
    #: Position each live row stands for. Raw K: ascending, cells may hold them in any order. Compressed K and indexer
    #: K: row b stands for the block that begins here. Rings: by ring row.
    positions: Sequence[int]


def expected_state(
    hp: HyperParameters, layers: LayerRange, shape: ContextShape, n_tokens: int
) -> tuple[ComponentExpectation, ...]:
    """Every owned component after ``n_tokens`` committed tokens, positions ``0 .. n_tokens - 1``.

    A sequence that only ever grew (dgr never rolls back and never restores) has exactly these rows: raw K the last
    ``size_swa`` positions; compressed K one row per complete block; ring row r the largest position below P that is r
    modulo the ring's rows. Compressed rows beyond hold no meaning: the last row of a cache may have taken a dummy write
    (dsv4:547-627), so compare live rows only.
    """
    if not 0 <= n_tokens <= shape.n_ctx_seq:
        raise InputError(f"{n_tokens} tokens do not fit the context; it holds 0 to {shape.n_ctx_seq}")
    expected = []
    for state in state_map(hp, layers, shape).owned:
        match state.component:
            case Component.RAW_SWA:
                positions: Sequence[int] = range(max(0, n_tokens - state.rows), n_tokens)
            case Component.CSA | Component.INDEXER:
                positions = range(0, n_tokens // CSA_RATIO * CSA_RATIO, CSA_RATIO)
            case Component.HCA:
                positions = range(0, n_tokens // HCA_RATIO * HCA_RATIO, HCA_RATIO)
            case _:
                last = n_tokens - 1
                ring = state.rows
                positions = tuple(last - (last - row) % ring for row in range(min(n_tokens, ring)))
        expected.append(ComponentExpectation(state.component, state.rows, len(positions), positions))
    return tuple(expected)
