"""Where a model may be cut into stages, what a stage behind each cut needs, and why everything else is refused."""

from __future__ import annotations

from attrs import frozen

from dgr.core.route import LayerRange
from dgr.v4.hyper_parameters import ARCHITECTURE, CSA_RATIO, HC_STREAMS, HCA_RATIO, HyperParameters

__all__ = ["Cut", "Restriction", "needs_token_ids", "restrictions", "valid_cuts"]


@frozen
class Cut:
    """A boundary between two stages: layers below ``layer`` end, layers from it on begin."""

    layer: int
    #: Kinds of the layers on both sides.
    before: str
    after: str
    #: Whether what begins here routes by token id, so that its input is the residual *and* the ids.
    needs_token_ids: bool
    #: Floats per token that cross.
    width: int


@frozen
class Restriction:
    """Something that is not supported, where it is refused, and why."""

    what: str
    #: ``open``: reading the header. ``load``: starting a stage. ``route``: checking a route or a split.
    refused_at: str
    reason: str


def needs_token_ids(hp: HyperParameters, layers: LayerRange) -> bool:
    """Whether a range picks experts by token id. Every boundary frame has the ids; only these layers read them."""
    return layers.begin < hp.hash_layers


def valid_cuts(hp: HyperParameters) -> tuple[Cut, ...]:
    """Every place between two main layers, ascending: V4 layers share no state, so each may be cut."""
    return tuple(
        Cut(
            layer=layer,
            before=hp.kind(layer - 1).value,
            after=hp.kind(layer).value,
            needs_token_ids=needs_token_ids(hp, LayerRange(layer, hp.n_layers)),
            width=hp.boundary_width,
        )
        for layer in range(1, hp.n_layers)
    )


def restrictions(hp: HyperParameters) -> tuple[Restriction, ...]:
    """What a split, or a model, must not be."""
    n, hashed = hp.n_layers, hp.hash_layers
    mtp = f"layer {n}, the MTP block" if hp.n_mtp_layers else f"layer {n} and beyond"
    return (
        Restriction(
            f"a cut at 0 or at {n}",
            "route",
            "one side would own no layer; embedding and head go with the first and the last main layer",
        ),
        Restriction(
            "ranges that overlap or leave a layer out",
            "route",
            f"each main layer 0 to {n - 1} must run exactly once, in order",
        ),
        Restriction(
            f"a range that reaches {mtp}",
            "route",
            "MTP is reserved: its block is never loaded or run, and no route may name it",
        ),
        Restriction(
            "a cut inside a layer",
            "route",
            f"the boundary is the residual between layers, {HC_STREAMS} x n_embd floats; attention, experts and"
            " hyper-connection of a layer share intermediate values and one layer's state",
        ),
        Restriction(
            f"a residual without token ids for a range that begins below layer {hashed}",
            "route",
            f"{hashed} layers pick experts by token id: a boundary there is residual and ids together",
        ),
        Restriction(
            f"compress ratios other than 0, {CSA_RATIO} and {HCA_RATIO}",
            "open",
            "llama.cpp's graph, and the state map, know window-only, CSA and HCA layers alone",
        ),
        Restriction(
            "kv_source_layer_ids, shared_kv_layers (DeepSeek V4.1)",
            "open",
            "a layer would read K rows that another layer wrote: no cut between them leaves state local to a stage",
        ),
        Restriction(
            f"architectures other than {ARCHITECTURE}",
            "open",
            "boundary, sideband and state are those of DeepSeek V4 Flash",
        ),
        Restriction(
            "tensors *.scale and *.input_scale (NVFP4 with separate factors)",
            "load",
            "llama.cpp's V4 graph does not apply them: wrong weights without any error",
        ),
        Restriction(
            "weight and K-cache types without a passed invariance suite, in exact numerics",
            "load",
            "their bits may depend on how the work is cut (dgr selftest numerics)",
        ),
    )
