"""Operations of a graph, told apart by the part of a layer that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

from dgr.testing.native_measurements import Operation

#: Parts of a layer, each with beginnings of names of weights or results and names of operations.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "experts": (("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_moe"), ()),
    "router": (("ffn_gate_inp", "ffn_gate_tid2eid", "exp_probs_b"), ()),
    "shared expert": (("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_swiglu"), ()),
    "projections": (("attn_q_a", "attn_q_b", "attn_kv", "attn_output"), ()),
    "indexer": (("indexer", "lid_", "csa_lid", "csa_top_k"), ("LIGHTNING_INDEXER", "TOP_K")),
    "compressor": (("attn_compressor", "csa_", "hca_"), ()),
    "attention": (("attn_sinks",), ("FLASH_ATTN_EXT",)),
    "streams": (("hc_",), ("DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST")),
    "output head": (("output", "hc_head"), ()),
}
REST = "norms, rope, copies"


def part_of(operation: Operation) -> str:
    """The part of a layer that an operation belongs to."""
    if operation.name.endswith("_norm"):
        return REST
    for part, (names, ops) in PARTS.items():
        if operation.op in ops or operation.name.startswith(names):
            return part
    return REST


def by_part(operations: Sequence[Operation], times: int) -> dict[str, float]:
    """Seconds of each part, of one batch."""
    found: dict[str, float] = {}
    for one in operations:
        found[part_of(one)] = found.get(part_of(one), 0.0) + one.seconds / times
    return found
