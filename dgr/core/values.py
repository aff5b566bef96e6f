"""The values that engine, wire, client, stage and command line share: one class each, and a message holds them as they are.

All are msgspec structs: immutable, compared by value, and on a link an array of their fields. ``msgspec.structs.replace``
makes a changed copy.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from dgr.core.arguments import check_flag, check_member, check_text, check_whole
from dgr.core.route import LayerRange
from dgr.core.scalars import COMPONENTS_MAX, STOP_MAX, TOP_MAX, U32, U63, Digest, Finite, Name, RouteId, TokenId
from dgr.errors import InputError

__all__ = [
    "ComponentSummary",
    "ContextParams",
    "DecodeRun",
    "Expectation",
    "Key",
    "LogitsWanted",
    "Numerics",
    "SamplingParams",
    "StageIdentity",
    "StateSummary",
    "TopLogprob",
    "Wire",
]

#: Native code counts in 32 bits.
_INT_MAX = 2**31 - 1
Count = Annotated[int, Meta(ge=1, le=_INT_MAX)]


class Numerics(StrEnum):
    """Which promise the kernels keep."""

    #: The same tokens give the same bits, however they are split, chunked, batched, threaded or re-prefilled.
    EXACT = "exact"
    #: The kernels of ``exact``, and residuals that are rounded where the model is cut: the same tokens over the same cuts
    #: give the same bits, however they are chunked, batched, threaded or re-prefilled; over other cuts they may differ.
    SAME_CUTS = "same-cuts"
    #: Upstream's fastest kernels; equal bits only for equal batch structure.
    NATIVE = "native"

    @property
    def exact_kernels(self) -> bool:
        """Whether the kernels' bits do not depend on how the work is batched."""
        return self is not Numerics.NATIVE


class Wire(StrEnum):
    """How residuals travel between stages: as they are, or each token's rounded by itself, with ggml's own code."""

    #: As they are.
    F32 = "f32"
    #: As they are, in fewer bytes where a link leaves the host (:mod:`dgr.protocol.planes`).
    F32_ZSTD = "f32+zstd"
    #: 8 bits of precision, the range of f32.
    BF16 = "bf16"
    #: 11 bits of precision, magnitudes to 65504; a greater one ends its request.
    F16 = "f16"
    #: Blocks of 32 values of 8 bits with a scale (ggml's q8_0), magnitudes to 8.3e6.
    Q8 = "q8"

    @property
    def packs(self) -> bool:
        """Whether a payload may have fewer bytes than its rows, with nothing lost."""
        return self is Wire.F32_ZSTD

    @property
    def rounds(self) -> bool:
        """Whether what arrives may be other values than what was sent."""
        return self not in (Wire.F32, Wire.F32_ZSTD)

    def row_bytes(self, width: int) -> int:
        """Bytes of one token's residual of ``width`` values, as an engine takes and gives it."""
        match self:
            case Wire.F32 | Wire.F32_ZSTD:
                return 4 * width
            case Wire.BF16 | Wire.F16:
                return 2 * width
            case _:
                return -(-width // 32) * 34


class LogitsWanted(IntEnum):
    """Which rows of a work item the tail turns into logits."""

    #: No row: a prefill chunk that is not the last.
    NONE = 0
    #: The last row only: the next token is wanted.
    LAST = 1
    #: Every row (``dgr logits``, certificates).
    ALL = 2


class _Value(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a message."""


class Key(_Value, frozen=True):
    """Whose state a frame speaks of: (route session, epoch, session)."""

    route: RouteId
    epoch: U63
    session: U63


class Expectation(_Value, frozen=True):
    """What a stage must hold before it may run a frame: tokens committed, and the digest of exactly those tokens."""

    position: U32
    digest: Digest


class ContextParams(_Value, frozen=True):
    """Parameters that every stage of a route shares; the handshake compares them.

    Raises :class:`~dgr.errors.InputError` for a value of another type or out of range.
    """

    #: Tokens one sequence can hold (padded to 256 by upstream; the padded value is what stages compare).
    n_ctx: Count = 4096
    #: Most tokens in one native call, over all sequences.
    n_batch: Count = 512
    #: Most tokens in one native sub-batch; fixes the ring geometry and so the bits.
    n_ubatch: Count = 512
    #: Sequence slots; state for all of them is allocated up front.
    n_seq_max: Count = 1
    #: K-cache type: ``f16`` or ``f32`` (or another type the numerics in force admit).
    type_k: Name = "f16"
    flash_attn: bool = True
    numerics: Numerics = Numerics.EXACT
    #: How residuals travel between stages.
    wire: Wire = Wire.F32

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
            check_whole(name, getattr(self, name), 1, _INT_MAX)
        check_text("type_k", self.type_k)
        check_flag("flash_attn", self.flash_attn)
        check_member("numerics", self.numerics, Numerics)
        check_member("wire", self.wire, Wire)
        if self.wire.rounds and self.numerics is Numerics.EXACT:
            raise InputError(
                f"wire {self.wire} rounds residuals where the model is cut, and numerics = exact promise the same bits however"
                " it is cut; choose numerics = same-cuts (the same bits over the same cuts), or wire = f32 or f32+zstd"
            )


class SamplingParams(_Value, frozen=True):
    """How the tail draws the next token with llama.cpp's own sampler chain.

    ``temperature == 0`` is greedy. A draw depends only on (logits, history, seed, position, choice): a re-prefilled
    session continues exactly as it would have. Values are looked at when they are used
    (:func:`dgr.protocol.sampling.check_sampling`).
    """

    temperature: Finite = 0.0
    top_k: Annotated[int, Meta(ge=0, le=_INT_MAX)] = 0
    top_p: Finite = 1.0
    min_p: Finite = 0.0
    repeat_penalty: Finite = 1.0
    frequency_penalty: Finite = 0.0
    presence_penalty: Finite = 0.0
    #: Tokens of history the penalties look at; -1 is the whole transcript.
    penalty_last_n: Annotated[int, Meta(ge=-1, le=_INT_MAX)] = -1
    seed: U63 = 0
    #: Index of the answer when several are drawn from one prompt.
    choice: U32 = 0
    #: Top log-probabilities to return beside the token (0: none).
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_MAX)] = 0


class DecodeRun(_Value, frozen=True):
    """Leave for the stages to decode on after a drawn token without being asked for the next one."""

    #: Further tokens, at most.
    tokens: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    #: After one of these the run ends.
    stop: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_MAX)] = ()


class TopLogprob(_Value, frozen=True):
    """A candidate of the sampler: its token id and natural-log probability (before temperature)."""

    token: TokenId
    logprob: float


class StageIdentity(_Value, frozen=True):
    """What a stage is, to the last bit that matters for its numbers; compared at the handshake and shown to people."""

    #: Name and version of the adapter, e.g. ``llama-v4/1``.
    adapter: Name
    architecture: Name
    #: Digest that identifies the artifact (metadata and tensor table), hex.
    artifact: Name
    layers: LayerRange
    #: Main layers of the whole model.
    n_layers: U32
    n_vocab: U32
    #: Floats per token at the entry of the stage; 0 on a head, which takes token ids.
    width_in: U32
    #: Floats per token at the exit of the stage; 0 on a tail, which returns logits.
    width_out: U32
    #: Whether a stage needs the token ids beside the residual.
    token_sideband: bool
    context: ContextParams
    #: Digest over CPU features, compiler, build flags and a probe graph's output, hex; equal digests give equal bits.
    kernel_fingerprint: Name
    #: Names of the state components this range owns.
    components: Annotated[tuple[Name, ...], Meta(max_length=COMPONENTS_MAX)]
    #: Capability -> ``executable`` | ``reserved``.
    capabilities: Annotated[dict[Name, Name], Meta(max_length=64)] = field(default_factory=dict)
    #: Version of dgr and of the native code behind it, e.g. ``0.2.0 llama.cpp 0c1e57098+d5786b98``.
    runtime: Name = ""
    #: What may compute, preferred first, e.g. ``CUDA0 NVIDIA H200``; the CPU alone wherever numerics are exact.
    devices: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()

    @property
    def is_head(self) -> bool:
        return self.layers.begin == 0

    @property
    def is_tail(self) -> bool:
        return self.layers.end == self.n_layers


class ComponentSummary(_Value, frozen=True):
    """Where one state component of a sequence stands: counts and a digest, never rows."""

    name: Annotated[str, Meta(max_length=64)]
    n_layers: U32
    #: Rows the sequence could hold per layer.
    capacity: U32
    #: Rows that hold data, read from the tensors: least and most over the layers.
    rows_min: U32
    rows_max: U32
    #: 128-bit digest over every layer's live rows, in layer and position order, hex.
    digest: Annotated[str, Meta(max_length=64)]


class StateSummary(_Value, frozen=True):
    """Where a sequence stands on a stage."""

    #: Tokens committed (P); the next position to run.
    position: U32
    components: Annotated[tuple[ComponentSummary, ...], Meta(max_length=COMPONENTS_MAX)]
