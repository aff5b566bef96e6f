"""The ``ShardEngine`` seam: what an actor knows of a model stage, and all it knows.

An engine is synchronous and owns one native handle. It is called by one owner at a time, from any thread. Sequence
*slots* are small integers ``0 <= slot < n_seq_max``; which session sits in a slot is the runtime's business. Nothing in
this module is specific to one architecture.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from attrs import field, frozen

from dgr.core.values import LogitsWanted, SamplingParams, StageIdentity, StateSummary, TopLogprob

__all__ = ["FORK", "DeviceMemory", "MemoryReport", "Output", "ShardEngine", "Work", "WorksInPieces"]

#: The capability of copying a slot: :meth:`ShardEngine.fork`.
FORK = "fork"


@frozen
class Work:
    """One run of consecutive tokens of one sequence.

    ``tokens`` are the ids of positions ``position .. position + len(tokens) - 1``. ``residual`` holds
    ``len(tokens)`` rows of ``width_in`` values, little-endian float32 or as the context's ``wire`` says (absent on a head).
    """

    slot: int
    position: int
    tokens: Sequence[int]
    residual: memoryview | bytes | None = None
    logits: LogitsWanted = LogitsWanted.NONE


@frozen
class Output:
    """The result of one :class:`Work` item.

    ``residual``: ``len(tokens)`` rows of ``width_out`` values, like those that come in; absent on a tail.
    ``logits``: ``rows * n_vocab`` little-endian float32 for the rows that were wanted, absent elsewhere.
    ``finite`` is False when any value of the item's output is NaN or Inf: the sequence is then poisoned and must be
    closed by the caller. So it is when ``too_great``: a residual holds a value that the wire type does not carry.
    """

    slot: int
    residual: memoryview | bytes | None = None
    logits: memoryview | bytes | None = None
    finite: bool = True
    too_great: bool = False


@frozen
class DeviceMemory:
    """Bytes of a stage that lie in the memory of one device."""

    weights: int
    compute: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.compute + self.state


@frozen
class MemoryReport:
    """Bytes a stage has allocated natively, wherever they lie."""

    weights: int
    compute: int
    #: Component name -> bytes over all sequence slots.
    state: Mapping[str, int]
    #: What of it lies in memory of the devices' own, by their names; all else is the host's.
    devices: Mapping[str, DeviceMemory] = field(factory=dict)

    @property
    def total(self) -> int:
        return self.weights + self.compute + sum(self.state.values())

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return self.total - sum(device.total for device in self.devices.values())


@runtime_checkable
class ShardEngine(Protocol):
    """One stage of a model: the only interface that actors know.

    Errors: :class:`~dgr.errors.InputError` when a guard refuses (nothing changed), :class:`~dgr.errors.EngineError`
    when native code failed (every sequence of the batch is lost and must be closed).
    """

    #: True when calls return at once and need no worker thread (fakes).
    inline: bool

    def describe(self) -> StageIdentity:
        """What the stage is and what it promises: the same for its whole life."""
        ...

    def run(self, batch: Sequence[Work]) -> list[Output]:
        """Run several sequences' work as one native batch; outputs in the order of ``batch``.

        Each slot comes once, in ascending order; at most ``n_batch`` tokens in all, and each item at the position that its
        slot has reached. Raises :class:`~dgr.errors.InputError` when a guard refuses (no slot has moved),
        :class:`~dgr.errors.ContextLimitExceeded` beyond ``n_ctx``, :class:`~dgr.errors.EngineError` when native code failed.
        """
        ...

    def position(self, slot: int) -> int:
        """Tokens committed in the slot; 0 when it is empty."""
        ...

    def close(self, slot: int) -> None:
        """Erase every component of the slot; afterwards its rows are zero and position is 0."""
        ...

    def fork(self, source: int, target: int) -> None:
        """Copy all that a slot holds into an empty one; from then on each goes on by itself, as if alone.

        When it returns the copy is complete: the source may be closed at once. Raises :class:`~dgr.errors.InputError` when a
        guard refuses (a slot that is not there, an empty source, a target that is not empty or is the source): nothing
        changed then; :class:`~dgr.errors.EngineError` when native code failed: the target must be closed, the source is as
        it was. Engines that describe the capability ``fork`` as executable have it; of others it is not called.
        """
        ...

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        """Draw a token; returns its id and the ``top_logprobs`` most likely ones, best first.

        ``logits``: one or more rows of ``n_vocab`` little-endian float32, of which the last is drawn from. ``history``: the
        ids of the whole transcript, for the penalties; its length is the position that seeds the draw. Raises
        :class:`~dgr.errors.InputError` when a row is short or a parameter out of range,
        :class:`~dgr.errors.EngineError` when native code failed.
        """
        ...

    def state_summary(self, slot: int) -> StateSummary:
        """Tokens committed in the slot, and rows and a digest of each component that the stage owns."""
        ...

    def memory(self) -> MemoryReport:
        """Bytes allocated for weights, compute buffers and state; the same for the stage's whole life."""
        ...

    def abort(self) -> None:
        """From any thread: the run in progress and all later ones fail. Only for stopping a stage."""
        ...

    def stop(self) -> None:
        """Release everything; idempotent. No call may be in progress."""
        ...


@runtime_checkable
class WorksInPieces(Protocol):
    """What an engine may have beside :class:`ShardEngine` whose slots are large, so that no other session waits for long.

    Each piece takes some milliseconds and is a call of the engine, by its one owner; other slots may run in between.
    """

    def state_pieces(self, slot: int) -> Generator[StateSummary | None, None, None]:
        """:meth:`ShardEngine.state_summary`, which comes last; None before.

        It is of one moment: raises :class:`~dgr.errors.InputError` when the slot itself does not stand still.
        """
        ...

    def close_pieces(self, slot: int) -> Generator[None, None, None]:
        """:meth:`ShardEngine.close`; before the end the slot takes no work."""
        ...

    def fork_pieces(self, source: int, target: int) -> Generator[None, None, None]:
        """:meth:`ShardEngine.fork`; before the end the target takes no work.

        The copy is of what the source held at the first piece, also when the source goes on between two; it must not be
        closed before the last.
        """
        ...
