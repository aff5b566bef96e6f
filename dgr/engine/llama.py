"""The V4 adapter: one native llama.cpp stage behind :class:`~dgr.engine.base.ShardEngine`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from dgr.artifact.artifact import Artifact
from dgr.core.buffers import new_buffer
from dgr.core.mtp import CAPABILITY, RESERVED, refuse_value
from dgr.core.route import LayerRange
from dgr.core.values import (
    ComponentSummary,
    ContextParams,
    LogitsWanted,
    SamplingParams,
    StageIdentity,
    StateSummary,
    TopLogprob,
    Wire,
)
from dgr.engine.address_space import has_address_limit
from dgr.engine.base import FORK, MemoryReport, Output, Work
from dgr.engine.devices import ALL_DEVICES, Placement
from dgr.engine.native import Native, NativeHandle, default_native, kernel_fingerprint, runtime_version
from dgr.engine.numerics import check_exact_types
from dgr.engine.opening import MOST_THREADS, estimate_memory, given, memory_of, open_native, read_info, text_of
from dgr.errors import EngineError, InputError
from dgr.v4.hyper_parameters import ARCHITECTURE
from dgr.v4.state_map import Component

__all__ = ["ADAPTER", "MOST_THREADS", "LlamaEngine", "draw_seed", "estimate_memory"]

#: Name and version of this adapter; grows when its behaviour towards other stages changes.
ADAPTER = "llama-v4/1"

#: Bytes of state read or cleared in one piece: some milliseconds, as a step of decoding takes.
_PIECE = 32 << 20
#: Times that a state is read which changes meanwhile.
_READINGS = 3

#: ggml_type of residuals.
_WIRE = {Wire.F32: 0, Wire.F32_ZSTD: 0, Wire.F16: 1, Wire.Q8: 8, Wire.BF16: 30}
#: Verdict on a row that its wire type cannot carry.
_TOO_GREAT = 2


def draw_seed(seed: int, position: int, choice: int) -> int:
    """The 32-bit seed of one draw: a hash, and never 0xFFFFFFFF, which llama.cpp takes as random."""
    text = f"{seed}:{position}:{choice}".encode()
    value = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    return value if value != 0xFFFFFFFF else 0


def _seen_by_penalties(history: Sequence[int], params: SamplingParams) -> array[int]:
    """A copy of the end of the history that the penalties look at; nothing when they are off.

    A draw must not cost more with every token before it, and the history may change while it is drawn.
    """
    if (params.repeat_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0):
        return array("i")
    n = params.penalty_last_n
    seen = history if n < 0 else history[max(0, len(history) - n) :]
    try:
        return array("i", seen)
    except OverflowError:
        wrong = next(value for value in seen if not -(2**31) <= value < 2**31)
        raise InputError(f"token id {wrong} of the history does not fit 32 bits") from None


def _summary_of(found: Any) -> StateSummary:
    components = tuple(
        ComponentSummary(
            name=component.value,
            n_layers=part.n_layers,
            capacity=part.capacity,
            rows_min=part.rows_min,
            rows_max=part.rows_max,
            digest=bytes(part.digest).hex(),
        )
        for component, part in zip(Component, found.components, strict=True)
        if part.n_layers
    )
    return StateSummary(int(found.position), components)


class LlamaEngine(NativeHandle):
    """A stage on llama.cpp's V4 graph and kernels: one ``dgr_stage`` of the native extension.

    Shapes, units and errors of the methods are those of :class:`~dgr.engine.base.ShardEngine`. Upstream's part is
    ``src/models/deepseek4.cpp`` at the pin (``vendor/llama.cpp``).
    """

    inline = False

    def __init__(
        self,
        model: str | Path | Artifact,
        layers: LayerRange | None = None,
        context: ContextParams | None = None,
        *,
        threads: int = 1,
        mmap: bool = False,
        mlock: bool = False,
        check_tensors: bool = False,
        placement: Placement = ALL_DEVICES,
        native: Native | None = None,
        certified_only: bool = True,
        mtp: None = None,
    ) -> None:
        """Load the layers' tensors (all that the artifact holds by default) and allocate their state.

        ``threads``: compute threads; more than the free cores is hundreds of times slower (ggml spins). ``mmap``: map the
        file, and fetch the layers' tensors from it at once where they fit the memory. ``mlock``: keep them in memory, which
        raises :class:`~dgr.errors.BudgetExceeded` where the process may not lock that much. ``placement``: the devices that
        native numerics run on, and how many of the layers lie there. ``certified_only``: with exact numerics, refuse types
        that the invariance suite has not passed here; only the suite itself turns this off. ``mtp`` is reserved: None.
        Raises :class:`~dgr.errors.ArtifactError` for weights that are missing, misshapen or of another model,
        :class:`~dgr.errors.NumericsRefused` for types that are not known to be exact here,
        :class:`~dgr.errors.BudgetExceeded` where the process or a device has no room for it,
        :class:`~dgr.errors.MtpNotExecutable`, :class:`~dgr.errors.InputError` for any other value, a device that is not there
        among them, and :class:`~dgr.errors.EngineError` when native code failed.
        """
        refuse_value("mtp", mtp)
        artifact = model if isinstance(model, Artifact) else Artifact.open(model)
        context, layers = given(artifact, layers, context)
        artifact.check(layers)
        if certified_only and context.numerics.exact_kernels:
            check_exact_types((kind.label for kind in artifact.matrix_types(layers)), context.type_k)
        needs = estimate_memory(artifact, layers, context, placement).host if has_address_limit() else 0
        identity = artifact.verify_weights(layers)
        self._native = native or default_native()
        self._stage = open_native(
            self._native,
            artifact,
            layers,
            context,
            {"threads": threads, "mmap": mmap, "mlock": mlock, "check_tensors": check_tensors},
            placement,
            needs,
        )
        self._info = read_info(self._native, self._stage)
        #: Sampling parameters that native code takes as they are; of the seed each draw has its own.
        taken = (name for name, _ in self._native.ffi.typeof("dgr_sample_params").fields)
        self._sampled_with = tuple(
            name for name in taken if name in SamplingParams.__struct_fields__ and name != "seed"
        )
        context = replace(
            context,
            n_ctx=self._info.n_ctx_seq,
            n_batch=self._info.n_batch,
            n_ubatch=self._info.n_ubatch,
        )
        self._memory = memory_of(self._native, self._info)
        self._description = StageIdentity(
            adapter=ADAPTER,
            architecture=ARCHITECTURE,
            artifact=identity,
            layers=layers,
            n_layers=artifact.hp.n_layers,
            n_vocab=self._info.n_vocab,
            width_in=self._info.width_in,
            width_out=self._info.width_out,
            token_sideband=True,
            context=context,
            kernel_fingerprint=kernel_fingerprint(),
            components=tuple(name for name, size in self._memory.state.items() if size),
            capabilities={"decode": "executable", FORK: "executable", CAPABILITY: RESERVED},
            runtime=runtime_version(),
            devices=tuple(text_of(self._native, self._info.devices).splitlines()),
        )

    @property
    def _handle(self) -> Any:
        if self._stage is None:
            raise EngineError("the stage was stopped; open another one")
        return self._stage

    def describe(self) -> StageIdentity:
        return self._description

    def memory(self) -> MemoryReport:
        return self._memory

    @property
    def graph_splits(self) -> int:
        """Parts of the graph that was laid out last: each beyond the first is a hand-over between devices."""
        return int(self._info.graph_splits)

    def run(self, batch: Sequence[Work]) -> list[Output]:
        ffi, lib = self._native.ffi, self._native.lib
        about = self._description
        n_tokens = sum(len(work.tokens) for work in batch)
        tokens = self._int32s("token id", [token for work in batch for token in work.tokens])
        positions = self._int32s(
            "position", [at for work in batch for at in range(work.position, work.position + len(work.tokens))]
        )
        slots = self._int32s("slot", [work.slot for work in batch for _ in work.tokens])
        wanted = [self._rows_wanted(work) for work in batch]
        want_logits = bytearray(n_tokens)
        first = 0
        for work, rows in zip(batch, wanted, strict=True):
            first += len(work.tokens)
            want_logits[first - rows : first] = b"\1" * rows
        residual_out = new_buffer(n_tokens * about.context.wire.row_bytes(about.width_out))
        logits_out = new_buffer(4 * sum(wanted) * about.n_vocab)
        row_finite = bytearray(n_tokens)
        run = ffi.new("dgr_run *")
        run.n_tokens = n_tokens
        run.tokens, run.positions, run.slots = tokens, positions, slots
        run.residual_type = _WIRE[about.context.wire]
        residual_in = self._residual_in(batch)
        with ExitStack() as held:

            def pointer(kind: str, buffer: bytes | bytearray | memoryview) -> Any:
                return ffi.cast(kind, held.enter_context(ffi.from_buffer(buffer))) if len(buffer) else ffi.NULL

            # Let go in any case. An error's traceback keeps this frame, and a memoryview that a buffer still refers to
            # makes the collector of older CPythons crash when it finds both in a cycle (gh-77894).
            run.want_logits, run.row_finite = pointer("uint8_t *", want_logits), pointer("uint8_t *", row_finite)
            run.residual_out, run.logits_out = pointer("void *", residual_out), pointer("float *", logits_out)
            run.residual_in = pointer("void *", residual_in)
            self._native.check(lib.dgr_stage_run(self._handle, run), f"stage {about.layers}")
        return self._outputs(batch, wanted, residual_out, logits_out, row_finite)

    def _int32s(self, what: str, values: Sequence[int]) -> Any:
        """A C array; the native guards look at its values, so only what does not fit is refused here."""
        try:
            return self._native.ffi.new("int32_t[]", values)
        except OverflowError:
            wrong = next(value for value in values if not -(2**31) <= value < 2**31)
            raise InputError(f"{what} {wrong} does not fit 32 bits; nothing was run") from None

    def _rows_wanted(self, work: Work) -> int:
        if not self._description.is_tail:
            return 0
        return {LogitsWanted.NONE: 0, LogitsWanted.LAST: 1, LogitsWanted.ALL: len(work.tokens)}[work.logits]

    def _residual_in(self, batch: Sequence[Work]) -> bytes | memoryview:
        """The batch's residual, end to end; copied only when several sessions are merged."""
        width, wire = self._description.width_in, self._description.context.wire
        row_bytes = wire.row_bytes(width)
        parts = []
        for work in batch:
            given = 0 if work.residual is None else memoryview(work.residual).nbytes
            if given != row_bytes * len(work.tokens):
                raise InputError(
                    f"slot {work.slot} came with a residual of {given} bytes; stage {self._description.layers} takes"
                    f" {len(work.tokens)} x {width} {wire} = {row_bytes * len(work.tokens)} bytes"
                )
            if work.residual is not None:
                parts.append(work.residual)
        if not parts:
            return b""
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _outputs(
        self, batch: Sequence[Work], wanted: Sequence[int], residual: memoryview, logits: memoryview, finite: bytearray
    ) -> list[Output]:
        about = self._description
        row_out, row_logits = about.context.wire.row_bytes(about.width_out), 4 * about.n_vocab
        outputs, token, row = [], 0, 0
        for work, rows in zip(batch, wanted, strict=True):
            end = token + len(work.tokens)
            outputs.append(
                Output(
                    slot=work.slot,
                    residual=residual[token * row_out : end * row_out] if row_out else None,
                    logits=logits[row * row_logits : (row + rows) * row_logits] if rows else None,
                    finite=all(finite[token:end]),
                    too_great=_TOO_GREAT in finite[token:end],
                )
            )
            token, row = end, row + rows
        return outputs

    def _check_slot(self, slot: int) -> None:
        n_slots = self._description.context.n_seq_max
        if not 0 <= slot < n_slots:
            raise InputError(f"slot is {slot}, must be in 0..{n_slots - 1}")

    def position(self, slot: int) -> int:
        self._check_slot(slot)
        out = self._native.ffi.new("int32_t *")
        self._native.check(self._native.lib.dgr_stage_position(self._handle, slot, out), f"position of slot {slot}")
        return int(out[0])

    def close(self, slot: int) -> None:
        self._check_slot(slot)
        self._native.check(self._native.lib.dgr_stage_clear(self._handle, slot), f"clearing slot {slot}")

    def close_pieces(self, slot: int) -> Generator[None, None, None]:
        self._check_slot(slot)
        done, what = self._native.ffi.new("bool *"), f"clearing slot {slot}"
        while True:
            self._native.check(self._native.lib.dgr_stage_clear_some(self._handle, slot, _PIECE, done), what)
            if done[0]:
                return
            yield

    def fork(self, source: int, target: int) -> None:
        self._check_slot(source)
        self._check_slot(target)
        what = f"copying slot {source} to slot {target}"
        self._native.check(self._native.lib.dgr_stage_fork(self._handle, source, target), what)

    def fork_pieces(self, source: int, target: int) -> Generator[None, None, None]:
        self._check_slot(source)
        self._check_slot(target)
        done, what = self._native.ffi.new("bool *"), f"copying slot {source} to slot {target}"
        while True:
            self._native.check(self._native.lib.dgr_stage_fork_some(self._handle, source, target, _PIECE, done), what)
            if done[0]:
                return
            yield

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        ffi, lib = self._native.ffi, self._native.lib
        row_bytes = 4 * self._description.n_vocab
        row = memoryview(logits).cast("B")[-row_bytes:]
        if row.nbytes != row_bytes:
            raise InputError(f"a row of logits has {row.nbytes} bytes; it must have {row_bytes}, n_vocab float32")
        n_top = params.top_logprobs
        given = {name: getattr(params, name) for name in self._sampled_with}
        seed = draw_seed(params.seed, len(history), params.choice)
        p = ffi.new("dgr_sample_params *", given | {"seed": seed, "n_top": n_top})
        token = ffi.new("int32_t *")
        top_tokens, top_logprobs = ffi.new("int32_t[]", max(1, n_top)), ffi.new("float[]", max(1, n_top))
        seen = _seen_by_penalties(history, params)
        ids = ffi.from_buffer("int32_t[]", seen.tobytes()) if seen else ffi.NULL
        values = ffi.cast("float *", ffi.from_buffer(row))
        self._native.check(
            lib.dgr_sample(values, self._description.n_vocab, ids, len(seen), p, token, top_tokens, top_logprobs),
            "sampling",
        )
        return int(token[0]), tuple(TopLogprob(int(top_tokens[i]), float(top_logprobs[i])) for i in range(n_top))

    def state_summary(self, slot: int) -> StateSummary:
        for summary in self.state_pieces(slot):
            if summary is not None:
                return summary
        raise AssertionError("the last piece is the summary")

    def state_pieces(self, slot: int) -> Generator[StateSummary | None, None, None]:
        self._check_slot(slot)
        native = self._native
        reader, out = native.ffi.new("dgr_summary_reader **"), native.ffi.new("dgr_state_summary *")
        reading, what = native.ffi.new("dgr_reading *"), f"state of slot {slot}"
        for _ in range(_READINGS):
            native.check(native.lib.dgr_summary_open(self._handle, slot, reader), what)
            try:
                while True:
                    _ = self._handle  # the stage may have been stopped since the last piece
                    native.check(native.lib.dgr_summary_read(reader[0], _PIECE, reading, out), what)
                    if reading[0] != native.lib.DGR_READING_MORE:
                        break
                    yield None
            finally:
                native.lib.dgr_summary_close(reader[0])
            if reading[0] == native.lib.DGR_READING_DONE:
                yield _summary_of(out)
                return
        raise InputError(f"slot {slot} does not stand still: ask for its state when it is idle")

    def abort(self) -> None:
        if self._stage is not None:
            self._native.lib.dgr_stage_abort(self._stage)

    def stop(self) -> None:
        if self._stage is not None:
            self._native.lib.dgr_stage_close(self._stage)
            self._stage = None
