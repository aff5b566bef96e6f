"""The ownership map against golden bytes, and the expected frontier against a token-by-token simulation.

The byte values were computed once by hand-checked closed forms for the published widths and confirmed by native
allocation; they are literals so that a wrong formula cannot agree with itself.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from dgr.core.route import LayerRange
from dgr.errors import InputError, InvalidLayerRange
from dgr.gguf.types import GgmlType
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.state_map import Component, ContextShape, expected_state, state_map

MIB = 1 << 20
WHOLE = LayerRange(0, 43)
ROOT = Path(__file__).parents[2]


def total(layers: LayerRange, n_ctx: int, **shape: Any) -> int:
    return state_map(V4_FLASH, layers, ContextShape(n_ctx, **shape)).total_bytes


@pytest.mark.parametrize(
    ("n_ctx", "whole", "swa", "csa", "hca"),
    [
        (4096, 78_790_656, 0.75, 2.078125, 1.5),
        (32768, 271_466_496, 0.75, 10.828125, 1.5),
        (65536, 496_910_336, 0.75, 20.828125, 1.75),
        (131072, 947_798_016, 0.75, 40.828125, 2.25),
        (262144, 1_849_573_376, 0.75, 80.828125, 3.25),
        (1048576, 7_260_225_536, 0.75, 320.828125, 9.25),
    ],
)
def test_bytes_of_v4_flash(n_ctx: int, whole: int, swa: float, csa: float, hca: float) -> None:
    assert total(WHOLE, n_ctx) == whole
    owned = state_map(V4_FLASH, WHOLE, ContextShape(n_ctx))
    assert [owned.layer_bytes(layer) / MIB for layer in (0, 1, 2, 3, 42)] == [swa, swa, csa, hca, csa]


def test_a_larger_ubatch_widens_the_window_cache_only() -> None:
    for n_ctx in (32768, 131072, 1048576):
        assert total(WHOLE, n_ctx, n_ubatch=2048) - total(WHOLE, n_ctx) == int(64.5 * MIB)
    assert state_map(V4_FLASH, WHOLE, ContextShape(32768, 2048))[Component.RAW_SWA].rows == 2304
    assert state_map(V4_FLASH, WHOLE, ContextShape(32768, 128))[Component.RAW_SWA].rows == 256
    assert state_map(V4_FLASH, WHOLE, ContextShape(32768, 129))[Component.RAW_SWA].rows == 512


@pytest.mark.parametrize(("n_ctx", "mib"), [(32768, 142.99), (131072, 485.65), (1048576, 3683.77)])
def test_quantised_k_cache(n_ctx: int, mib: float) -> None:
    assert round(total(WHOLE, n_ctx, type_k="q8_0") / MIB, 2) == mib


def test_f32_k_cache_doubles_all_but_the_rings() -> None:
    half, full = (state_map(V4_FLASH, WHOLE, ContextShape(32768, type_k=kind)) for kind in ("f16", "f32"))
    for state in half.components:
        ring = state.component.value.endswith("_ring")
        assert full[state.component].n_bytes == state.n_bytes * (1 if ring else 2), state.component
        assert state.type is (GgmlType.F32 if ring else GgmlType.F16)


@pytest.mark.parametrize(
    ("n_ctx", "mib"),
    [(32768, [61.6, 63.1, 72.5, 61.6]), (1048576, [1642.6, 1659.6, 1971.2, 1650.4])],
)
def test_four_stage_split(n_ctx: int, mib: list[float]) -> None:
    cuts = (0, 11, 22, 33, 43)
    stages = [total(LayerRange(a, b), n_ctx) for a, b in itertools.pairwise(cuts)]
    assert [round(stage / MIB, 1) for stage in stages] == mib
    assert sum(stages) == total(WHOLE, n_ctx)


def test_components_at_one_million_tokens() -> None:
    owned = state_map(V4_FLASH, WHOLE, ContextShape(1048576))
    mib = {state.component.value: state.n_bytes / MIB for state in owned.components}
    assert mib == {
        "raw_swa": 32.25,
        "csa": 5376.0,
        "hca": 160.0,
        "indexer": 1344.0,
        "csa_ring": 21 * 64 / 1024,
        "hca_ring": 10.0,
        "indexer_ring": 21 * 16 / 1024,
    }
    assert {state.component.value: (len(state.layers), state.rows, state.width) for state in owned.components} == {
        "raw_swa": (43, 768, 512),
        "csa": (21, 262144, 512),
        "hca": (20, 8192, 512),
        "indexer": (21, 262144, 128),
        "csa_ring": (21, 8, 1024),
        "hca_ring": (20, 128, 512),
        "indexer_ring": (21, 8, 256),
    }


def test_sessions_multiply_everything() -> None:
    one, four = (state_map(V4_FLASH, WHOLE, ContextShape(1048576, n_seq_max=n)) for n in (1, 4))
    assert four.total_bytes == 4 * one.total_bytes
    assert round(four.total_bytes / (1 << 30), 2) == 27.05
    assert all(tensor.ne[2] == 4 for state in four.components for tensor in state.tensors)


def test_contexts_are_rounded_up_to_256() -> None:
    assert [ContextShape(n).n_ctx_seq for n in (1, 256, 257)] == [256, 256, 512]
    assert total(WHOLE, 32513) == total(WHOLE, 32768)
    assert total(WHOLE, 32768) < total(WHOLE, 32769)
    # A short context is held whole by the window cache, however large the sub-batch.
    short = state_map(V4_FLASH, WHOLE, ContextShape(300, 2048))
    assert [short[part].rows for part in (Component.RAW_SWA, Component.CSA, Component.HCA)] == [512, 256, 256]
    # Compressed caches have their own padding: 4 tokens more than 1024 rows hold make 256 more.
    assert [state_map(V4_FLASH, WHOLE, ContextShape(n))[Component.CSA].rows for n in (4096, 4097)] == [1024, 1280]
    assert [state_map(V4_FLASH, WHOLE, ContextShape(n))[Component.HCA].rows for n in (32768, 32769)] == [256, 512]


@pytest.mark.parametrize("cut", range(1, 43))
def test_every_cut_divides_every_component(cut: int) -> None:
    shape = ContextShape(5000, 64, 3, "q8_0")
    whole = state_map(V4_FLASH, WHOLE, shape)
    head, tail = (state_map(V4_FLASH, part, shape) for part in (LayerRange(0, cut), LayerRange(cut, 43)))
    for component in Component:
        assert head[component].layers + tail[component].layers == whole[component].layers
        assert head[component].tensors + tail[component].tensors == whole[component].tensors


def test_what_a_range_does_not_own() -> None:
    owned = {
        str(layers): [state.component.value for state in state_map(V4_FLASH, layers, ContextShape(512)).owned]
        for layers in (LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, 4))
    }
    assert owned == {
        "0:2": ["raw_swa"],
        "2:3": ["raw_swa", "csa", "indexer", "csa_ring", "indexer_ring"],
        "3:4": ["raw_swa", "hca", "hca_ring"],
    }


def test_tensor_names_and_shapes() -> None:
    owned = state_map(V4_FLASH, LayerRange(2, 4), ContextShape(4096, n_seq_max=2))
    named = [(state.component.value, tensor.name, tensor.ne) for state in owned.owned for tensor in state.tensors]
    assert named == [
        ("raw_swa", "cache_k_l2", (512, 768, 2)),
        ("raw_swa", "cache_k_l3", (512, 768, 2)),
        ("csa", "cache_k_l2", (512, 1024, 2)),
        ("hca", "cache_k_l3", (512, 256, 2)),
        ("indexer", "cache_k_l2", (128, 1024, 2)),
        ("csa_ring", "dsv4_csa_state_kv_l2", (1024, 8, 2)),
        ("csa_ring", "dsv4_csa_state_score_l2", (1024, 8, 2)),
        ("hca_ring", "dsv4_hca_state_kv_l3", (512, 128, 2)),
        ("hca_ring", "dsv4_hca_state_score_l3", (512, 128, 2)),
        ("indexer_ring", "dsv4_lid_state_kv_l2", (256, 8, 2)),
        ("indexer_ring", "dsv4_lid_state_score_l2", (256, 8, 2)),
    ]


def test_component_order_is_the_native_headers() -> None:
    header = (ROOT / "cffi_build" / "dgr_native.h").read_text().partition("enum dgr_component {")[2].partition("}")[0]
    native = {int(value): name.lower() for name, value in re.findall(r"^ *DGR_(\w+) *= (\d),", header, re.MULTILINE)}
    components = [native[index] for index in range(len(Component))]
    assert components == [component.value for component in Component]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_ctx": 512, "n_ubatch": 0}, "n_ubatch is 0"),
        ({"n_ctx": 512, "n_seq_max": 257}, "n_seq_max is 257, but must be 1 to 256"),
        ({"n_ctx": 512, "type_k": "f8"}, "unknown tensor type 'f8'"),
    ],
)
def test_refuses_bad_shapes(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ContextShape(**shape)


def test_refuses_rows_that_are_no_whole_blocks() -> None:
    narrow = evolve(V4_FLASH, head_dim=16, rope_dim=8)
    with pytest.raises(InputError, match="a row of 16 values cannot have type q8_0"):
        assert state_map(narrow, WHOLE, ContextShape(512, type_k="q8_0")).total_bytes


def test_refuses_ranges_beyond_the_model() -> None:
    with pytest.raises(InvalidLayerRange, match="40:44"):
        state_map(V4_FLASH, LayerRange(40, 44), ContextShape(512))


POSITIONS = (0, 1, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257, 511, 512, 513, 767, 768, 769, 1000, 1024)


def simulate(n_tokens: int, raw_rows: int) -> dict[str, list[int]]:
    """Write token after token: what each kind of storage holds at the end, oldest knowledge overwritten."""
    raw: dict[int, int] = {}
    rings: dict[str, dict[int, int]] = {"csa_ring": {}, "hca_ring": {}, "indexer_ring": {}}
    blocks: dict[str, list[int]] = {"csa": [], "hca": [], "indexer": []}
    for position in range(n_tokens):
        raw[position % raw_rows] = position
        for name, size in (("csa_ring", 8), ("hca_ring", 128), ("indexer_ring", 8)):
            rings[name][position % size] = position
        for name, ratio in (("csa", 4), ("hca", 128), ("indexer", 4)):
            if (position + 1) % ratio == 0:
                blocks[name].append(position + 1 - ratio)
    return {
        "raw_swa": sorted(raw.values()),
        **blocks,
        **{name: [ring[row] for row in sorted(ring)] for name, ring in rings.items()},
    }


@pytest.mark.parametrize("n_tokens", POSITIONS)
def test_frontier_is_what_a_simulation_leaves(n_tokens: int) -> None:
    shape = ContextShape(1024, 512)
    frontier = expected_state(V4_FLASH, WHOLE, shape, n_tokens)
    held = simulate(n_tokens, 768)
    assert [part.component for part in frontier] == list(Component)
    for part in frontier:
        assert list(part.positions) == held[part.component.value], part.component
        assert part.rows == len(part.positions)
        assert part.capacity == state_map(V4_FLASH, WHOLE, shape)[part.component].rows


def test_ring_rows_are_listed_by_row() -> None:
    ring = {part.component: part for part in expected_state(V4_FLASH, WHOLE, ContextShape(256), 13)}
    assert list(ring[Component.CSA_RING].positions) == [8, 9, 10, 11, 12, 5, 6, 7]
    assert list(ring[Component.HCA_RING].positions) == list(range(13))


def test_frontier_covers_owned_components_and_the_context_only() -> None:
    shape = ContextShape(300)
    assert [part.component.value for part in expected_state(V4_FLASH, LayerRange(0, 2), shape, 5)] == ["raw_swa"]
    assert expected_state(V4_FLASH, WHOLE, shape, 512)[1].rows == 128
    for bad in (-1, 513):
        with pytest.raises(InputError, match="it holds 0 to 512"):
            expected_state(V4_FLASH, WHOLE, shape, bad)
