"""The ``ShardEngine`` seam: what an actor knows of a model stage, and all it knows.

An engine is synchronous and owns one native handle. It is called by one owner at a time, from any thread. Sequence
*slots* are small integers ``0 <= slot < n_seq_max``; which session sits in a slot is the runtime's business. Nothing in
this module is specific to one architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Protocol, runtime_checkable

from attrs import field, frozen

from dgr.core.arguments import flag, member, text, whole
from dgr.core.route import LayerRange

__all__ = [
    "ComponentFrontier",
    "ContextParams",
    "EngineDescription",
    "Frontier",
    "LogitsWanted",
    "MemoryReport",
    "Numerics",
    "Output",
    "SamplingParams",
    "ShardEngine",
    "TopLogprob",
    "Work",
]


#: Native code counts in 32 bits.
_INT_MAX = 2**31 - 1


class Numerics(StrEnum):
    """Which promise the kernels keep."""

    #: The same tokens give the same bits, however they are split, chunked, batched, threaded or re-prefilled.
    EXACT = "exact"
    #: Upstream's fastest kernels; equal bits only for equal batch structure.
    NATIVE = "native"


class LogitsWanted(IntEnum):
    """Which rows of a :class:`Work` item the tail turns into logits."""

    #: No row: a prefill chunk that is not the last.
    NONE = 0
    #: The last row only: the next token is wanted.
    LAST = 1
    #: Every row (``dgr logits``, certificates).
    ALL = 2


@frozen
class ContextParams:
    """Parameters that every stage of a route shares; the handshake compares them.

    Raises :class:`~dgr.errors.InputError` for a value of another type or out of range.
    """

    #: Tokens one sequence can hold (padded to 256 by upstream; the padded value is what stages compare).
    n_ctx: int = field(default=4096, validator=whole(1, _INT_MAX))
    #: Most tokens in one native call, over all sequences.
    n_batch: int = field(default=512, validator=whole(1, _INT_MAX))
    #: Most tokens in one native sub-batch; fixes the ring geometry and so the bits.
    n_ubatch: int = field(default=512, validator=whole(1, _INT_MAX))
    #: Sequence slots; state for all of them is allocated up front.
    n_seq_max: int = field(default=1, validator=whole(1, _INT_MAX))
    #: K-cache type: ``f16`` or ``f32`` (or another type the numerics in force admit).
    type_k: str = field(default="f16", validator=text())
    flash_attn: bool = field(default=True, validator=flag())
    numerics: Numerics = field(default=Numerics.EXACT, validator=member(Numerics))


@frozen
class EngineDescription:
    """What a stage says of itself; compared at the handshake and shown to people."""

    #: Name and version of the adapter, e.g. ``llama-v4/1``.
    adapter: str
    architecture: str
    #: Digest that identifies the artifact (metadata and tensor table), hex.
    artifact: str
    layers: LayerRange
    #: Main layers of the whole model.
    n_layers: int
    n_vocab: int
    #: Floats per token at the entry of the stage; 0 on a head, which takes token ids.
    width_in: int
    #: Floats per token at the exit of the stage; 0 on a tail, which gives logits.
    width_out: int
    #: Whether a stage needs the token ids beside the residual.
    token_sideband: bool
    context: ContextParams
    #: Digest over CPU features, compiler, build flags and a probe graph's output, hex; equal digests give equal bits.
    kernel_fingerprint: str
    #: Names of the state components this range owns.
    components: tuple[str, ...]
    #: Capability -> ``executable`` | ``reserved``.
    capabilities: Mapping[str, str] = field(factory=dict)
    #: Version of dgr and of the native code behind it, e.g. ``0.1.0 llama.cpp 0c1e57098+d5786b98``.
    runtime: str = ""
    #: What may compute, preferred first, e.g. ``CUDA0 NVIDIA H200``; the CPU alone wherever numerics are exact.
    devices: tuple[str, ...] = ()

    @property
    def is_head(self) -> bool:
        return self.layers.begin == 0

    @property
    def is_tail(self) -> bool:
        return self.layers.end == self.n_layers


@frozen
class SamplingParams:
    """How the tail draws the next token with llama.cpp's own sampler chain.

    ``temperature == 0`` is greedy. A draw depends only on (logits, history, seed, position, choice): a re-prefilled
    session continues exactly as it would have.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    #: Tokens of history the penalties look at; -1 is the whole transcript.
    penalty_last_n: int = -1
    seed: int = 0
    #: Index of the answer when several are drawn from one prompt.
    choice: int = 0
    #: Top log-probabilities to return beside the token (0: none).
    top_logprobs: int = 0


@frozen
class Work:
    """One run of consecutive tokens of one sequence.

    ``tokens`` are the ids of positions ``position .. position + len(tokens) - 1``. ``residual`` holds
    ``len(tokens) * width_in`` little-endian float32 (absent on a head).
    """

    slot: int
    position: int
    tokens: Sequence[int]
    residual: memoryview | bytes | None = None
    logits: LogitsWanted = LogitsWanted.NONE


@frozen
class TopLogprob:
    """A candidate of the sampler: its token id and natural-log probability (before temperature)."""

    token: int
    logprob: float


@frozen
class Output:
    """What one :class:`Work` item gave.

    ``residual``: ``len(tokens) * width_out`` little-endian float32, absent on a tail.
    ``logits``: ``rows * n_vocab`` little-endian float32 for the rows that were wanted, absent elsewhere.
    ``finite`` is False when any value of the item's output is NaN or Inf: the sequence is then poisoned and must be
    closed by the caller.
    """

    slot: int
    residual: memoryview | bytes | None = None
    logits: memoryview | bytes | None = None
    finite: bool = True


@frozen
class ComponentFrontier:
    """Where one component of a sequence stands: counts and a digest, never rows."""

    name: str
    n_layers: int
    #: Rows the sequence could hold per layer.
    capacity: int
    #: Rows that hold data, read from the tensors: least and most over the layers.
    rows_min: int
    rows_max: int
    #: 128-bit digest over every layer's live rows, in layer and position order, hex.
    digest: str


@frozen
class Frontier:
    """Where a sequence stands on a stage."""

    #: Tokens committed (P); the next position to run.
    position: int
    components: tuple[ComponentFrontier, ...]


@frozen
class MemoryReport:
    """Bytes a stage has allocated natively."""

    weights: int
    compute: int
    #: Component name -> bytes over all sequence slots.
    state: Mapping[str, int]

    @property
    def total(self) -> int:
        return self.weights + self.compute + sum(self.state.values())


@runtime_checkable
class ShardEngine(Protocol):
    """One stage of a model: the only interface that actors know.

    Errors: :class:`~dgr.errors.InputError` when a guard refuses (nothing changed), :class:`~dgr.errors.EngineError`
    when native code failed (every sequence of the batch is lost and must be closed).
    """

    #: True when calls return at once and need no worker thread (fakes).
    inline: bool

    def describe(self) -> EngineDescription: ...

    def run(self, batch: Sequence[Work]) -> list[Output]:
        """Run several sequences' work as one native batch; outputs in the order of ``batch``."""
        ...

    def position(self, slot: int) -> int:
        """Tokens committed in the slot; 0 when it is empty."""
        ...

    def close(self, slot: int) -> None:
        """Erase every component of the slot; afterwards its rows are zero and position is 0."""
        ...

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        """Draw from one row of logits; ``history`` is the whole transcript so far."""
        ...

    def frontier(self, slot: int) -> Frontier: ...

    def memory(self) -> MemoryReport: ...

    def abort(self) -> None:
        """From any thread: the run in progress and all later ones fail. Only for stopping a stage."""
        ...

    def stop(self) -> None:
        """Release everything; idempotent. No call may be in progress."""
        ...
