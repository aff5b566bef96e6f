"""What a layer has to move and to compute at least, and how long the machine needs for it at best.

Per layer and batch of tokens after so many others: the weights it reads, once a batch; rows of state, once a batch; products,
by the type of number they are made in. Experts count as often as they are hit when every token picks its own at random.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dgr import LayerRange
from dgr.gguf.types import GgmlType, parse_type
from dgr.gguf.writer import TensorForm
from dgr.testing.native_measurements import Roof
from dgr.v4.hyper_parameters import CSA_RATIO, HCA_RATIO, V4_FLASH, HyperParameters, LayerKind
from dgr.v4.tensors import TensorKind, block_tensors

#: Number type in which a matrix of this type is multiplied on CPUs; types that are not here: 8-bit integers.
_PRODUCTS = {GgmlType.F32: Roof.F32, GgmlType.F16: Roof.F32, GgmlType.BF16: Roof.BF16}
#: What a token reads a row of, and no more.
_BY_ROW = (TensorKind.EMBEDDING, TensorKind.HASH_TABLE)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch of tokens takes."""

    weight_bytes: float
    state_bytes: float
    #: Multiplications and additions, by number type.
    operations: dict[str, float]

    @property
    def n_bytes(self) -> float:
        return self.weight_bytes + self.state_bytes

    def seconds(self, roofs: Mapping[str, float]) -> tuple[float, float]:
        """Least seconds of memory traffic and of computation; the larger one is the roof. An unknown peak is that of f32."""
        computing = sum(count / (roofs[kind] or roofs[Roof.F32]) for kind, count in self.operations.items())
        return self.n_bytes / roofs[Roof.READ], computing


def demand_of(
    hp: HyperParameters,
    tensors: Mapping[str, TensorForm],
    layer: int,
    n_tokens: int,
    position: int,
    type_k: str = "f16",
) -> Demand:
    """What a main layer takes for tokens ``position .. position + n_tokens - 1`` of one sequence, without head and tail."""
    hit = 1 - (1 - hp.n_expert_used / hp.n_expert) ** n_tokens
    weights = 0.0
    operations: dict[str, float] = {}
    for spec in block_tensors(hp, layer):
        if spec.name not in tensors or spec.kind in _BY_ROW:
            continue
        tensor, expert = tensors[spec.name], spec.kind is TensorKind.EXPERT
        weights += tensor.n_bytes * (hit if expert else 1)
        if spec.kind.is_matrix and spec.kind is not TensorKind.APE:
            share = hp.n_expert_used / hp.n_expert if expert else 1
            kind = _PRODUCTS.get(tensor.type, Roof.INT8)
            operations[kind] = operations.get(kind, 0.0) + 2.0 * spec.n_elements * share * n_tokens
    rows, products = _attention(hp, hp.kind(layer), n_tokens, position)
    operations[Roof.F32] = operations.get(Roof.F32, 0.0) + products
    row_type = parse_type(type_k)
    state = sum(count * row_type.row_bytes(width) for width, count in rows.items())
    return Demand(weight_bytes=weights, state_bytes=state, operations=operations)


def _attention(hp: HyperParameters, kind: LayerKind, n_tokens: int, position: int) -> tuple[dict[int, float], float]:
    """Rows of state by width, and products of attention and indexer."""
    end = position + n_tokens
    rows = {hp.head_dim: float(min(end, hp.window + n_tokens))}
    seen: float = min(end, hp.window)  # rows that one token attends to
    products = 0.0
    if kind is LayerKind.CSA:
        compressed = end / CSA_RATIO
        picked = min(float(hp.indexer_top_k), compressed)
        rows[hp.indexer_dim] = compressed
        rows[hp.head_dim] += min(compressed, n_tokens * picked)
        products += 2.0 * hp.indexer_heads * hp.indexer_dim * compressed * n_tokens
        seen += picked
    elif kind is LayerKind.HCA:
        rows[hp.head_dim] += end / HCA_RATIO
        seen += end / HCA_RATIO
    return rows, products + 4.0 * hp.n_head * hp.head_dim * seen * n_tokens


def output_demand(hp: HyperParameters, tensors: Mapping[str, TensorForm]) -> Demand:
    """What one row of logits takes."""
    tensor = tensors["output.weight"]
    products = 2.0 * hp.n_embd * hp.n_vocab
    return Demand(
        weight_bytes=tensor.n_bytes,
        state_bytes=0.0,
        operations={_PRODUCTS.get(tensor.type, Roof.INT8): products},
    )


def representatives(layers: LayerRange, n_layers: int) -> dict[str, int]:
    """One layer of every kind within a range of the schedule: where there is a choice, neither the head's nor the tail's."""
    found: dict[str, int] = {}
    inner = [layer for layer in layers.layers if 0 < layer < n_layers - 1]
    for layer in [*inner, *layers.layers]:
        found.setdefault(V4_FLASH.kind(layer).value, layer)
    return {kind.value: found[kind.value] for kind in LayerKind if kind.value in found}
