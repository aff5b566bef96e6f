"""A made-up model behind the real seam: deterministic, instant, pure Python, nothing like V4.

Use it to test what stands above :class:`~dgr.engine.base.ShardEngine` offline, in milliseconds. The arithmetic is
integer, modulo a prime below 2**24, carried between stages as float32, so that every residual is exact. Each layer
reads the row it wrote for the token before and an older one, and mixes them into what it hands on: a result depends on
every earlier token, every layer and every position, and on nothing else. Split, chunked, merged with others or
re-prefilled: the same bits.

It differs from V4 in all that callers must not assume: the boundary is three floats wide, stages need no token ids, and
the state components are a *tape* (one row per token, every layer) and a *tally* (four sums, every third layer only).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from attrs import frozen

from dgr.core.route import LayerRange
from dgr.core.values import (
    ComponentSummary,
    ContextParams,
    LogitsWanted,
    SamplingParams,
    StageIdentity,
    StateSummary,
    TopLogprob,
)
from dgr.engine.base import FORK, MemoryReport, Output, Work
from dgr.errors import ContextLimitExceeded, EngineError, InputError, InvalidLayerRange, NonFinite
from dgr.testing.engines.sampling import check_sampling, draw, top_logprobs

__all__ = ["FakeEngine", "FakeModel", "FakeVocabulary", "Fault", "FaultKind"]

#: The largest prime below 2**24: every residue is an exact float32.
_PRIME = 16_777_213
#: Rows of a tally.
_RING = 4
_WORD = 4
_TAPE, _TALLY = "tape", "tally"


def _numbers(text: str, count: int) -> list[int]:
    """Residues other than 0 that depend on ``text`` alone."""
    raw = b"".join(hashlib.blake2b(f"{text}/{part}".encode()).digest() for part in range(-(-count // 8)))
    return [1 + value % (_PRIME - 1) for value in struct.unpack(f"<{len(raw) // 8}Q", raw)[:count]]


@frozen
class FakeModel:
    """What all stages of one made-up model share."""

    n_layers: int = 6
    #: Token ids; the default is every byte and an end-of-text.
    n_vocab: int = 257
    #: Floats per token of the boundary.
    width: int = 3
    #: Other weights: another model.
    seed: int = 0

    @property
    def identity(self) -> str:
        """What :attr:`StageIdentity.artifact` says."""
        text = f"dgr-fake/1/{self.n_layers}/{self.n_vocab}/{self.width}/{self.seed}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def has_tally(self, layer: int) -> bool:
        return layer % 3 == 2


class FaultKind(Enum):
    """How an engine misbehaves on purpose."""

    #: The run raises :class:`EngineError`; every sequence of the batch is lost.
    ERROR = "error"
    #: The outputs of one sequence are NaN.
    NON_FINITE = "non-finite"


@frozen
class Fault:
    """A misbehaviour, acted out once. All conditions that are given must hold; none given: the next run."""

    kind: FaultKind
    #: The number of the run, from 1.
    step: int | None = None
    #: Some work of the run covers this position ...
    position: int | None = None
    #: ... or is of this slot.
    slot: int | None = None

    def strikes(self, step: int, work: Work) -> bool:
        return (
            self.step in (None, step)
            and self.slot in (None, work.slot)
            and (self.position is None or work.position <= self.position < work.position + len(work.tokens))
        )


class FakeVocabulary:
    """Bytes as token ids, and 256 for the end of a text."""

    n_vocab = 257
    eos: int | None = 256

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:  # noqa: ARG002 (as a vocabulary's)
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class _Slot:
    """A sequence: rows of its layers, and the tokens committed."""

    def __init__(self, layers: Sequence[int], model: FakeModel, n_ctx: int) -> None:
        self.position = 0
        #: Native code failed on it; it must be cleared.
        self.lost = False
        #: Something in it is not finite, and so is all that comes out of it from now on.
        self.poisoned = False
        self.tape = {layer: array("I", bytes(_WORD * model.width * n_ctx)) for layer in layers}
        self.tally = {layer: array("I", bytes(_WORD * _RING)) for layer in layers if model.has_tally(layer)}


class FakeEngine:
    """One stage of a :class:`FakeModel`. See :class:`~dgr.engine.base.ShardEngine` for the methods.

    Runs inline, so it may be used under an autojump clock. ``faults`` are acted out as they come due, ``watch`` is
    called with every batch just before it runs, and ``runs``, ``tokens_run`` and ``forks`` count.
    """

    inline = True

    def __init__(
        self,
        layers: LayerRange | None = None,
        context: ContextParams | None = None,
        *,
        model: FakeModel | None = None,
        kernel_fingerprint: str = "fake",
    ) -> None:
        self.model = model or FakeModel()
        layers = layers or LayerRange(0, self.model.n_layers)
        context = context or ContextParams()
        if layers.end > self.model.n_layers:
            raise InvalidLayerRange(
                f"layers {layers} end beyond the last main layer; the model has {self.model.n_layers}"
            )
        if context.wire.rounds:
            raise InputError(f"wire is {context.wire}; a fake's residuals travel as f32, as they are")
        if context.n_ubatch > context.n_batch:
            raise InputError(f"n_ubatch is {context.n_ubatch}, must be in 1..n_batch ({context.n_batch})")
        self.faults: list[Fault] = []
        self.watch: Callable[[Sequence[Work]], None] | None = None
        self.runs = 0
        self.tokens_run = 0
        self.forks = 0
        self._layers = layers.layers
        self._context = context
        self._stopped = False
        self._aborted = False
        self._slots = [self._new_slot() for _ in range(context.n_seq_max)]
        width = self.model.width
        self._weights = {layer: _numbers(f"{self.model.seed}/layer/{layer}", 5) for layer in self._layers}
        self._embedding = _numbers(f"{self.model.seed}/embedding", 2 * width)
        self._head = _numbers(f"{self.model.seed}/head", width + 2)
        self._memory = self._measure()
        self._description = StageIdentity(
            adapter="fake/1",
            architecture="fake",
            artifact=self.model.identity,
            layers=layers,
            n_layers=self.model.n_layers,
            n_vocab=self.model.n_vocab,
            width_in=0 if layers.begin == 0 else width,
            width_out=0 if layers.end == self.model.n_layers else width,
            token_sideband=False,
            context=context,
            kernel_fingerprint=kernel_fingerprint,
            components=tuple(name for name, size in self._memory.state.items() if size),
            capabilities={"decode": "executable", FORK: "executable"},
            runtime="fake",
            devices=("fake",),
        )

    def describe(self) -> StageIdentity:
        return self._description

    def memory(self) -> MemoryReport:
        return self._memory

    def _measure(self) -> MemoryReport:
        model, context = self.model, self._context
        tables = 2 * model.width if self._layers.start == 0 else 0
        if self._layers.stop == model.n_layers:
            tables += model.width + 2
        return MemoryReport(
            weights=_WORD * (5 * len(self._layers) + tables),
            compute=_WORD * context.n_batch * model.width,
            state={
                _TAPE: sum(_WORD * len(rows) for slot in self._slots for rows in slot.tape.values()),
                _TALLY: sum(_WORD * len(rows) for slot in self._slots for rows in slot.tally.values()),
            },
        )

    # --- running ---

    def run(self, batch: Sequence[Work]) -> list[Output]:
        self._check(batch)
        self.runs += 1
        self.tokens_run += sum(len(work.tokens) for work in batch)
        if self.watch is not None:
            self.watch(batch)
        self._act_out(batch)
        return [self._run(work) for work in batch]

    def _act_out(self, batch: Sequence[Work]) -> None:
        """Fail, or let values go wrong, if a fault says so."""
        for fault in list(self.faults):
            struck = [work.slot for work in batch if fault.strikes(self.runs, work)]
            if not struck:
                continue
            self.faults.remove(fault)
            if fault.kind is FaultKind.ERROR:
                for work in batch:
                    self._slots[work.slot].lost = True
                raise EngineError(
                    f"stage {self._description.layers}: run {self.runs} fails on purpose: clear its slots"
                )
            for index in struck:
                self._slots[index].poisoned = True

    def _run(self, work: Work) -> Output:
        slot, width = self._slots[work.slot], self.model.width
        given = itertools.repeat((), len(work.tokens)) if work.residual is None else _rows(work.residual, width)
        out: list[list[int]] = []
        for position, (token, values) in enumerate(zip(work.tokens, given, strict=True), work.position):
            stream = [int(value) % _PRIME for value in values] or self._embed(token)
            for layer in self._layers:
                stream = self._layer(layer, stream, position, slot)
            out.append(stream)
        slot.position += len(work.tokens)
        return self._output(work, out, finite=not slot.poisoned)

    def _embed(self, token: int) -> list[int]:
        factors = self._embedding
        return [(token * factors[2 * i] + factors[2 * i + 1]) % _PRIME for i in range(self.model.width)]

    def _layer(self, layer: int, stream: list[int], position: int, slot: _Slot) -> list[int]:
        """One token through one layer: write its row, and mix it into the stream."""
        width, tape = self.model.width, slot.tape[layer]
        before, far = (position - 1) * width, position // 2 * width
        a, b, c, d, e = self._weights[layer]
        row = []
        for i, value in enumerate(stream):
            old = a * tape[before + i] + b * tape[far + (i + 1) % width] if position else 0
            row.append(1 + (old + c * value + d + position) % (_PRIME - 1))
        tape[position * width : (position + 1) * width] = array("I", row)
        mixed = [(value + e * row[i] + row[(i + 1) % width]) % _PRIME for i, value in enumerate(stream)]
        tally = slot.tally.get(layer)
        if tally is not None:
            at = position % _RING
            tally[at] = 1 + (a * tally[at] + row[0] + position) % (_PRIME - 1)
            mixed[0] = (mixed[0] + tally[at]) % _PRIME
        return mixed

    def _output(self, work: Work, rows: list[list[int]], *, finite: bool) -> Output:
        if self._layers.stop < self.model.n_layers:
            return Output(work.slot, residual=_pack([v for row in rows for v in row], finite), finite=finite)
        if work.logits is LogitsWanted.NONE:
            return Output(work.slot)  # no value leaves, so none can be seen to be wrong
        wanted = rows if work.logits is LogitsWanted.ALL else rows[-1:]
        return Output(work.slot, logits=_pack([v for row in wanted for v in self._logits(row)], finite), finite=finite)

    def _logits(self, stream: list[int]) -> list[float]:
        """Eighths from 0 to 32 for any token; printable bytes are likelier, an end of text comes now and then."""
        *mix, step, scale = self._head
        start = sum(value * factor for value, factor in zip(stream, mix, strict=True)) % _PRIME
        values = [(start + step * token) * scale % _PRIME % 256 / 8.0 for token in range(self.model.n_vocab)]
        if self.model.n_vocab == FakeVocabulary.n_vocab:
            values[32:127] = [value + 32 for value in values[32:127]]
            if start % 61 == 0:
                values[256] += 64
        return values

    # --- guards: what the native stage refuses, in the same words as far as callers can tell ---

    def _check(self, batch: Sequence[Work]) -> None:
        """Refuse a batch before anything changes."""
        about = self._description
        self._check_running()
        n_tokens = sum(len(work.tokens) for work in batch)
        if not 0 < n_tokens <= about.context.n_batch or not all(work.tokens for work in batch):
            raise InputError(f"n_tokens is {n_tokens}, must be in 1..n_batch ({about.context.n_batch}), and none empty")
        for work in batch:
            self._check_residual_size(work)
        previous = -1
        for work in batch:
            self._check_work(work, previous)
            previous = work.slot
        for work in batch:
            if work.residual is not None and not all(map(math.isfinite, _floats(work.residual))):
                raise NonFinite(f"the residual of slot {work.slot} from position {work.position} on holds NaN or Inf")

    def _check_running(self) -> None:
        if self._stopped:
            raise EngineError("the stage was stopped; open another one")
        if self._aborted:
            raise EngineError("the stage was aborted: close it")

    def _check_work(self, work: Work, previous: int) -> None:
        n_vocab = self.model.n_vocab
        slot = self._slot(work.slot)
        for token in work.tokens:
            if not 0 <= token < n_vocab:
                raise InputError(f"token id {token} is outside the vocabulary 0..{n_vocab - 1}")
        if work.slot <= previous:
            raise InputError(f"slot {work.slot} follows slot {previous}: give each slot one run, in ascending order")
        if slot.lost:
            raise InputError(f"slot {work.slot} was lost in an earlier run: clear it first")
        if work.position != slot.position:
            raise InputError(f"position is {work.position}, slot {work.slot} continues at {slot.position}")
        if slot.position + len(work.tokens) > self._context.n_ctx:
            raise ContextLimitExceeded(
                f"slot {work.slot} holds {slot.position} tokens and cannot take {len(work.tokens)} more: n_ctx is"
                f" {self._context.n_ctx}"
            )

    def _check_residual_size(self, work: Work) -> None:
        width = self._description.width_in
        given = 0 if work.residual is None else memoryview(work.residual).nbytes
        if given != _WORD * width * len(work.tokens):
            raise InputError(
                f"slot {work.slot} came with a residual of {given} bytes; stage {self._description.layers} takes"
                f" {len(work.tokens)} x {width} float32 = {_WORD * width * len(work.tokens)} bytes"
            )

    def _slot(self, slot: int) -> _Slot:
        if self._stopped:
            raise EngineError("the stage was stopped; open another one")
        if not 0 <= slot < len(self._slots):
            raise InputError(f"slot is {slot}, must be in 0..{len(self._slots) - 1}")
        return self._slots[slot]

    # --- slots ---

    def _new_slot(self) -> _Slot:
        return _Slot(self._layers, self.model, self._context.n_ctx)

    def position(self, slot: int) -> int:
        return self._slot(slot).position

    def close(self, slot: int) -> None:
        self._slot(slot)
        self._slots[slot] = self._new_slot()

    def fork(self, source: int, target: int) -> None:
        held, into = self._slot(source), self._slot(target)
        self._check_running()
        if source == target:
            raise InputError(f"slot {source} cannot be copied into itself")
        for slot, state in ((source, held), (target, into)):
            if state.lost:
                raise InputError(f"slot {slot} was lost in an earlier run: clear it first")
        if not held.position:
            raise InputError(f"slot {source} is empty: there is nothing to copy")
        if into.position:
            raise InputError(f"slot {target} holds {into.position} tokens: clear it first")
        self.forks += 1
        self._slots[target] = self._copy(held)

    def _copy(self, slot: _Slot) -> _Slot:
        return copy.deepcopy(slot)

    def state_summary(self, slot: int) -> StateSummary:
        state, width = self._slot(slot), self.model.width
        parts = (
            _component(_TAPE, state.tape.values(), width, self._context.n_ctx),
            _component(_TALLY, state.tally.values(), 1, _RING),
        )
        return StateSummary(state.position, tuple(part for part in parts if part.n_layers))

    # --- sampling ---

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        n_vocab = self.model.n_vocab
        check_sampling(params, n_vocab)
        if memoryview(logits).nbytes < _WORD * n_vocab:
            raise InputError(f"a row of logits is {_WORD * n_vocab} bytes, given were {memoryview(logits).nbytes}")
        if any(not 0 <= token < n_vocab for token in history):
            raise InputError(f"the history holds a token id outside the vocabulary 0..{n_vocab - 1}")
        row = _floats(memoryview(logits)[-_WORD * n_vocab :])
        if not all(map(math.isfinite, row)):
            raise NonFinite("the logits hold NaN or Inf: drop the session")
        return draw(row, history, params), top_logprobs(row, params.top_logprobs)

    # --- its end ---

    def abort(self) -> None:
        self._aborted = True

    def stop(self) -> None:
        self._stopped = True
        self._slots = []


def _floats(data: memoryview | bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{memoryview(data).nbytes // _WORD}f", data)


def _rows(data: memoryview | bytes, width: int) -> Sequence[tuple[float, ...]]:
    values = _floats(data)
    return [values[start : start + width] for start in range(0, len(values), width)]


def _pack(values: Sequence[float], finite: bool) -> bytes:
    return struct.pack(f"<{len(values)}f", *(values if finite else [math.nan] * len(values)))


def _component(name: str, layers: Iterable[array[int]], width: int, capacity: int) -> ComponentSummary:
    """Counts the rows that hold data and digests them; a row that was written is never zero."""
    counts, digest = [], hashlib.blake2b(digest_size=16)
    for rows in layers:
        live = [row for row in (rows[i : i + width] for i in range(0, len(rows), width)) if any(row)]
        counts.append(len(live))
        for row in live:
            digest.update(row.tobytes())
    return ComponentSummary(
        name, len(counts), capacity, min(counts, default=0), max(counts, default=0), digest.hexdigest()
    )
