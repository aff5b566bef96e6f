"""The MTP contract's tables: which tensor, duty, state and value belongs to whom, and what rollback planes weigh.

Each entry names the anchors that it was read from; ``vendor/llama.cpp/mtp_anchors.toml`` has them with file and line, and
``vendor/llama.cpp/check_mtp_anchors.py`` fails when one of those places changes.
"""

from __future__ import annotations

import math
from enum import StrEnum

from attrs import evolve, frozen

from dgr.core.route import LayerRange
from dgr.gguf.types import parse_type
from dgr.v4.hyper_parameters import HyperParameters
from dgr.v4.state_map import Component, ContextShape, state_map
from dgr.v4.tensors import block_tensors, head_tensors, tail_tensors

__all__ = [
    "CROSSINGS",
    "DUTIES",
    "STATE",
    "Crossing",
    "Duty",
    "MtpBytes",
    "MtpTensor",
    "Origin",
    "Owner",
    "StateItem",
    "mtp_bytes",
    "mtp_tensors",
    "plane_bytes",
    "with_mtp",
]


class Owner(StrEnum):
    """Who holds a tensor or state, or does a piece of work."""

    HEAD = "head"
    #: Every stage, head and tail included, for its own main layers.
    EVERY_STAGE = "every stage"
    #: The tail's main layers, and what stands behind them.
    TAIL_TRUNK = "tail, trunk"
    #: The MTP block on the tail: a model and a context of its own.
    TAIL_MTP = "tail, MTP"
    PIPELINE = "pipeline"


class Origin(StrEnum):
    """Where a tensor of an MTP file comes from."""

    #: The block's own layer, like any main layer of ratio 0.
    BLOCK = "block"
    #: What makes a layer an MTP block.
    NEXTN = "nextn"
    #: The block's own hyper-connection head, stored under the trunk's names.
    OWN_HEAD = "own head"
    #: A copy of the trunk's.
    SHARED = "shared"


@frozen
class MtpTensor:
    """A tensor of an MTP file (``mtp-*.gguf``). All of them belong to the tail's MTP model."""

    name: str
    #: Shape, fastest dimension first.
    ne: tuple[int, ...]
    origin: Origin
    required: bool
    #: Tensor of the same file that stands in when it is absent.
    fallback: str | None
    anchors: tuple[str, ...]

    @property
    def n_elements(self) -> int:
        return math.prod(self.ne)


def with_mtp(hp: HyperParameters) -> HyperParameters:
    """The model with its MTP block, which files without one do not count."""
    if hp.n_mtp_layers:
        return hp
    return evolve(
        hp,
        n_mtp_layers=1,
        swiglu_clamp_exp=(*hp.swiglu_clamp_exp, hp.swiglu_clamp_exp[-1]),
        swiglu_clamp_shexp=(*hp.swiglu_clamp_shexp, hp.swiglu_clamp_shexp[-1]),
    )


#: Suffix of a ``nextn`` tensor -> what stands in for it, and the anchor that says so.
_NEXTN = {
    "eh_proj.weight": (None, "eh-proj"),
    "enorm.weight": (None, "enorm-streams"),
    "hnorm.weight": (None, "hnorm-streams"),
    "embed_tokens.weight": ("token_embd.weight", "embed-fallback"),
    "shared_head_norm.weight": ("output_norm.weight", "norm-fallback"),
    "shared_head_head.weight": ("output.weight", "head-fallback"),
}


def mtp_tensors(hp: HyperParameters) -> tuple[MtpTensor, ...]:
    """Every tensor of the MTP file that goes with a model, in the order of its graph."""
    full = with_mtp(hp)
    block = full.n_layers
    shared = ("globals-required", "conv-shared")
    found = [MtpTensor(spec.name, spec.ne, Origin.SHARED, True, None, shared) for spec in head_tensors(full)]
    for spec in block_tensors(full, block):
        _, _, suffix = spec.name.partition(".nextn.")
        fallback, anchor = _NEXTN[suffix] if suffix else (None, "block-flags")
        origin = Origin.NEXTN if suffix else Origin.BLOCK
        found.append(MtpTensor(spec.name, spec.ne, origin, spec.required, fallback, (anchor, "nextn-tensors")))
    for spec in tail_tensors(full):
        if spec.name.startswith("output_hc_"):
            anchors: tuple[str, ...] = ("conv-own-head", "hc-head-root")
            found.append(MtpTensor(spec.name, spec.ne, Origin.OWN_HEAD, True, None, anchors))
        else:
            found.append(MtpTensor(spec.name, spec.ne, Origin.SHARED, True, None, shared))
    return tuple(found)


@frozen
class Duty:
    """A piece of work, and who does it."""

    what: str
    owner: Owner
    anchors: tuple[str, ...]


DUTIES = (
    Duty("embed the tokens of the main layers", Owner.HEAD, ("trunk-embed",)),
    Duty("run its own main layers over certain tokens and candidates alike", Owner.EVERY_STAGE, ("verify-batch",)),
    Duty("keep and choose rollback planes; roll back on command", Owner.EVERY_STAGE, ("comp-plan", "seq-rm")),
    Duty("give the final rows of all tokens, before the hyper-connection head", Owner.TAIL_TRUNK, ("h-nextn",)),
    Duty("norm, head, logits of every candidate", Owner.TAIL_TRUNK, ("trunk-head", "verify-batch")),
    Duty("draw behind every candidate, and accept while it is the one drawn", Owner.TAIL_TRUNK, ("accept-loop",)),
    Duty("embed the tokens of the MTP block", Owner.TAIL_MTP, ("embed-fallback",)),
    Duty("catch up: run every token the trunk ran, with the trunk's row before it", Owner.TAIL_MTP, ("process",)),
    Duty("draft: run its own guesses with its own rows", Owner.TAIL_MTP, ("draft",)),
    Duty("choose the row to go on from after acceptance", Owner.TAIL_MTP, ("accept-row",)),
    Duty("truncate its own cache behind what is certain", Owner.TAIL_MTP, ("dft-truncate",)),
    Duty("hold transcript and candidates; send work and rollbacks in order", Owner.PIPELINE, ("rollback-both",)),
)


@frozen
class StateItem:
    """State of a session that speculation adds or touches. None of it ever crosses a seam."""

    what: str
    owner: Owner
    #: When it goes: besides, all of it goes with the session and with the epoch.
    ends: str
    anchors: tuple[str, ...]


STATE = (
    StateItem(
        "rollback planes 1..R of the CSA, HCA and indexer rings",
        Owner.EVERY_STAGE,
        "overwritten by every ubatch of the session; zero after a clear, stale after a restore or a copy",
        ("planes", "comp-clear", "apply-copies", "comp-read"),
    ),
    StateItem(
        "pending rollback (rs_idx)",
        Owner.EVERY_STAGE,
        "taken by the next decode of the session, before it computes",
        ("rs-idx", "rs-idx-reset"),
    ),
    StateItem(
        "compressed rows of rejected candidates",
        Owner.EVERY_STAGE,
        "masked by position at once; overwritten when the block ends again",
        ("visible",),
    ),
    StateItem(
        "final rows of the last R + 1 positions", Owner.TAIL_MTP, "replaced by every work", ("process", "accept-row")
    ),
    StateItem(
        "the MTP block's own sliding-window cache (K and V)",
        Owner.TAIL_MTP,
        "truncated behind what is certain before every catch-up",
        ("mtp-memory", "dft-truncate"),
    ),
    StateItem("the block's own row while it drafts", Owner.TAIL_MTP, "with the draft", ("draft",)),
)


@frozen
class Crossing:
    """A value that crosses a seam, and the message and field that carry it."""

    what: str
    way: str
    field: str
    n_bytes: str


CROSSINGS = (
    Crossing("certain tokens and candidates", "pipeline → head → … → tail", "Work.tokens", "at most 5 each"),
    Crossing("how many of them are candidates", "pipeline → head → … → tail", "Work.candidates", "at most 5"),
    Crossing("residual of those tokens", "stage → next stage", "payload of Work", "16 * n_embd a token"),
    Crossing("position and prefix digest", "pipeline → head → … → tail", "Work.expect", "at most 24"),
    Crossing("rollback: from where to where", "pipeline → head → … → tail", "Rollback.at, Rollback.to", "at most 48"),
    Crossing("how many candidates are right", "tail → pipeline", "Proposal.accepted", "at most 5"),
    Crossing("the token drawn, and its position", "tail → pipeline", "Proposal.token, .position", "at most 10"),
    Crossing("guesses for the next round", "tail → pipeline", "Proposal.drafts", "at most 5 each"),
    Crossing("where every stage stands now", "tail → pipeline", "RolledBack.position", "at most 5"),
    Crossing("why a stage refuses", "any stage → pipeline", "Refused.reason, .position, .budget", "at most 11"),
)

#: Components that planes multiply.
_RINGS = (Component.CSA_RING, Component.HCA_RING, Component.INDEXER_RING)


def plane_bytes(hp: HyperParameters, layers: LayerRange, planes: int, n_seq_max: int = 1) -> int:
    """Bytes that ``planes`` rollback planes add to a stage, for all its slots (dsv4:964-966: ``n_stream * (1 + n_rs_seq)``).

    ``R * S * (n_csa * (2 * 2*head_dim * 8 + 2 * 2*indexer_dim * 8) + n_hca * 2 * head_dim * 128) * 4``: independent of the
    context, since rings are.
    """
    owned = state_map(hp, layers, ContextShape(n_ctx=1, n_seq_max=n_seq_max))
    return planes * sum(owned[ring].n_bytes for ring in _RINGS)


@frozen
class MtpBytes:
    """What speculation takes, in bytes, for all slots."""

    #: Rollback planes of all stages.
    planes: int
    #: K and V of the MTP block, on the tail.
    own_cache: int
    #: Final rows of every session, on the tail: R + 1 each.
    rows: int
    #: Host buffer for the final rows of one batch, on the tail.
    batch_rows: int

    @property
    def total(self) -> int:
        return self.planes + self.own_cache + self.rows + self.batch_rows


def mtp_bytes(hp: HyperParameters, shape: ContextShape, planes: int, n_batch: int = 512) -> MtpBytes:
    """What speculation with ``planes`` rollback planes would take over a whole route, weights aside."""
    row = 4 * hp.boundary_width
    one_side = parse_type(shape.type_k).row_bytes(hp.head_dim) * shape.raw_rows(hp.window) * shape.n_seq_max
    return MtpBytes(
        planes=plane_bytes(hp, hp.whole, planes, shape.n_seq_max),
        own_cache=2 * one_side,
        rows=(planes + 1) * row * shape.n_seq_max,
        batch_rows=n_batch * row,
    )
