"""What every :class:`~dgr.engine.base.ShardEngine` promises, as a suite that anybody's engine can run.

    class TestMyEngine(EngineContract):
        def make(self, layers, context):
            return MyEngine("model.gguf", layers, context)

pytest collects the checks from the subclass; :meth:`EngineContract.failures` runs them without pytest. Sizes, limits
and token ids come from what the engine says of itself. Only what the contract promises is asserted: equal bits over
other chunks and companions are demanded of engines that describe their numerics as exact.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

from dgr.engine.base import (
    ContextParams,
    Frontier,
    LogitsWanted,
    Numerics,
    Output,
    SamplingParams,
    ShardEngine,
    Work,
)
from dgr.errors import ContextLimitExceeded, DgrError, EngineError, InputError, NonFinite
from dgr.model.route import LayerRange

__all__ = ["EngineContract"]

_FLOAT = 4


class _Chain:
    """Stages in order, driven as a pipeline would drive them, without one."""

    def __init__(self, engines: Sequence[ShardEngine]) -> None:
        self.engines = engines
        self.tail = engines[-1]

    def feed(self, slot: int, position: int, tokens: Sequence[int], logits: LogitsWanted = LogitsWanted.NONE) -> Output:
        """Run tokens of one sequence through every stage; the tail's output."""
        return self.feed_many([Work(slot, position, tokens, None, logits)])[0]

    def feed_many(self, batch: Sequence[Work]) -> list[Output]:
        outputs: list[Output] = []
        for engine in self.engines:
            residuals = [output.residual for output in outputs] or [None] * len(batch)
            outputs = engine.run(
                [
                    Work(work.slot, work.position, work.tokens, residual, work.logits)
                    for work, residual in zip(batch, residuals, strict=True)
                ]
            )
        return outputs

    def prefill(self, slot: int, tokens: Sequence[int], chunk: int, position: int = 0) -> bytes:
        """Run tokens in chunks; the last row of logits."""
        output = Output(slot)
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            last = start + chunk >= len(tokens)
            output = self.feed(slot, position + start, part, LogitsWanted.LAST if last else LogitsWanted.NONE)
        return _bytes(output.logits)

    def frontiers(self, slot: int) -> list[Frontier]:
        return [engine.frontier(slot) for engine in self.engines]


class EngineContract:
    """The checks. Give :meth:`make`; override the attributes where an engine needs other sizes."""

    #: What engines are made with; they may round it up, and the checks go by what they describe.
    context = ContextParams(n_ctx=256, n_batch=48, n_ubatch=32, n_seq_max=3)
    #: Tokens of the longest prompt; at most n_ctx - 16. Long enough for every component to hold rows.
    length = 140
    #: Tokens decoded after it.
    decoded = 4

    def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
        """A new engine of the range; of the whole model when ``layers`` is None."""
        raise NotImplementedError

    def cuts(self, n_layers: int) -> Sequence[int]:
        """Layers at which the model may be cut in two."""
        return sorted({1, n_layers // 2, n_layers - 1} - {0, n_layers})

    @classmethod
    def failures(cls, *, first_only: bool = False) -> dict[str, Exception]:
        """Run every check; those that fail, with their errors."""
        failed: dict[str, Exception] = {}
        for name in sorted(dir(cls)):
            if name.startswith("test_") and not (first_only and failed):
                try:
                    getattr(cls(), name)()
                except (AssertionError, DgrError) as error:
                    failed[name] = error
        return failed

    # --- helpers ---

    @contextmanager
    def engine(self, layers: LayerRange | None = None) -> Iterator[ShardEngine]:
        """An engine for the length of the block."""
        engine = self.make(layers, self.context)
        try:
            yield engine
        finally:
            engine.stop()

    @contextmanager
    def chain(self, *cuts: int) -> Iterator[_Chain]:
        """The model cut at ``cuts``."""
        if not cuts:
            with self.engine() as engine:
                yield _Chain([engine])
            return
        with ExitStack() as stack:
            first = stack.enter_context(self.engine(LayerRange(0, cuts[0])))
            bounds = [*cuts, first.describe().n_layers]
            rest = [stack.enter_context(self.engine(LayerRange(*pair))) for pair in pairwise(bounds)]
            yield _Chain([first, *rest])

    @contextmanager
    def cut_in_two(self) -> Iterator[_Chain]:
        """The model cut once, somewhere in the middle."""
        with self.engine() as whole:
            cuts = self.cuts(whole.describe().n_layers)
        with self.chain(cuts[len(cuts) // 2]) as chain:
            yield chain

    def prompt(self, engine: ShardEngine, length: int | None = None, kind: int = 0) -> list[int]:
        """Token ids that depend on ``kind``, within the engine's vocabulary and context."""
        about = engine.describe()
        length = min(length or self.length, about.context.n_ctx - 16)
        return [(7 + 11 * kind + i * (13 + kind) + i * i // 3) % about.n_vocab for i in range(length)]

    def is_exact(self, engine: ShardEngine) -> bool:
        return engine.describe().context.numerics is Numerics.EXACT

    # --- what it says of itself ---

    def test_describes_itself(self) -> None:
        with self.engine() as engine:
            about, again = engine.describe(), engine.describe()
            _is(isinstance(engine, ShardEngine), "an engine has every method of ShardEngine")
            _same(about, again, "describe() says the same every time")
            _same(about.layers, LayerRange(0, about.n_layers), "without a range an engine owns every main layer")
            _same((about.is_head, about.is_tail), (True, True), "the whole model is head and tail")
            _same((about.width_in, about.width_out), (0, 0), "the whole model takes ids and gives logits")
            _is(about.n_vocab > 0 and about.artifact and about.kernel_fingerprint, "identity is stated")
            _is(len(about.devices) > 0, "what computes is stated")
            _same(about.capabilities.get("decode"), "executable", "capability decode")
            _same(about.capabilities.get("mtp"), "reserved", "capability mtp")
            for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
                _is(
                    getattr(about.context, name) >= getattr(self.context, name),
                    f"{name} is not below what was asked for",
                )
            _same(about.context.n_seq_max, self.context.n_seq_max, "n_seq_max is what was asked for")

    def test_stages_fit_together(self) -> None:
        with self.engine() as engine:
            whole = engine.describe()
        for cut in self.cuts(whole.n_layers):
            with self.chain(cut) as chain:
                head, tail = (engine.describe() for engine in chain.engines)
                for name in (
                    "adapter",
                    "architecture",
                    "artifact",
                    "n_layers",
                    "n_vocab",
                    "context",
                    "kernel_fingerprint",
                ):
                    _same(getattr(head, name), getattr(whole, name), f"{name} of the head cut at {cut}")
                    _same(getattr(tail, name), getattr(whole, name), f"{name} of the tail cut at {cut}")
                _same((head.width_in, tail.width_out), (0, 0), "a head takes ids, a tail gives logits")
                _same(head.width_out, tail.width_in, f"width of the boundary at {cut}")
                _is(head.width_out > 0, "a boundary has a width")

    def test_refuses_ranges_that_are_not_there(self) -> None:
        with self.engine() as engine:
            n_layers = engine.describe().n_layers
        with _refused(InputError, "a range beyond the last main layer"):
            self.make(LayerRange(0, n_layers + 1), self.context).stop()

    # --- memory ---

    def test_memory_is_accounted_for(self) -> None:
        with self.engine() as engine:
            about, memory = engine.describe(), engine.memory()
            _same(
                about.components,
                tuple(name for name, size in memory.state.items() if size),
                "components are the names of the state that has bytes, in order",
            )
            _is(memory.weights > 0 and memory.compute >= 0, "weights and compute buffers are counted")
            for name, size in memory.state.items():
                _same(size % about.context.n_seq_max, 0, f"bytes of {name} divide among the slots: remainder")
            whole = memory.state
            _Chain([engine]).prefill(0, self.prompt(engine), about.context.n_batch)
            _same(engine.memory().state, whole, "bytes of state after use")
            engine.close(0)
            _same(engine.memory().state, whole, "bytes of state after a slot was closed")
        for cut in self.cuts(about.n_layers):
            with self.chain(cut) as chain:
                parts = [stage.memory().state for stage in chain.engines]
                total = {name: sum(part.get(name, 0) for part in parts) for name in whole}
                _same(total, dict(whole), f"bytes of state of the stages cut at {cut}, added up")

    # --- equal bits ---

    def test_split_equals_whole(self) -> None:
        with self.chain() as whole:
            tokens = self.prompt(whole.tail)
            chunk = whole.tail.describe().context.n_batch
            expected = self._converse(whole, tokens, chunk)
            n_layers = whole.tail.describe().n_layers
        cuts = self.cuts(n_layers)
        for split in [(cut,) for cut in cuts] + ([tuple(cuts)] if len(cuts) > 1 else []):
            with self.chain(*split) as chain:
                _same(self._converse(chain, tokens, chunk), expected, f"logits of the model cut at {split}")

    def _converse(self, chain: _Chain, tokens: Sequence[int], chunk: int) -> list[bytes]:
        """Logits after a prompt and after each of a few greedy tokens."""
        rows = [chain.prefill(0, tokens, chunk)]
        history = list(tokens)
        for _ in range(self.decoded):
            token, _top = chain.tail.sample(rows[-1], history, SamplingParams())
            rows.append(_bytes(chain.feed(0, len(history), [token], LogitsWanted.LAST).logits))
            history.append(token)
        return rows

    def test_chunks_do_not_matter(self) -> None:
        with self.cut_in_two() as chain:
            if not self.is_exact(chain.tail):
                return
            tokens = self.prompt(chain.tail)
            largest = chain.tail.describe().context.n_batch
            expected = None
            for chunk in (largest, 1, 5, largest - 1):
                seen = (chain.prefill(0, tokens, chunk), [_digests(part) for part in chain.frontiers(0)])
                expected = expected or seen
                _same(seen, expected, f"logits and digests in chunks of {chunk}, against chunks of {largest}")
                for engine in chain.engines:
                    engine.close(0)

    def test_companions_do_not_matter(self) -> None:
        with self.cut_in_two() as chain:
            about = chain.tail.describe()
            if not self.is_exact(chain.tail) or about.context.n_seq_max < 2:
                return
            slots = range(about.context.n_seq_max)
            room = about.context.n_batch // len(slots)
            prompts = [self.prompt(chain.tail, 3 * room - 2 * slot - 1, kind=slot) for slot in slots]
            together = self._merged(chain, prompts, room)
            digests = [[_digests(part) for part in chain.frontiers(slot)] for slot in slots]
            for slot, prompt in zip(slots, prompts, strict=True):
                for engine in chain.engines:
                    engine.close(slot)
                _same(chain.prefill(slot, prompt, room), together[slot], f"logits of slot {slot}, alone and merged")
                alone = [_digests(part) for part in chain.frontiers(slot)]
                _same(alone, digests[slot], f"digests of slot {slot}, alone and merged")

    def _merged(self, chain: _Chain, prompts: Sequence[Sequence[int]], room: int) -> list[bytes]:
        """Run all prompts side by side, in uneven pieces; the last row of logits of each."""
        done, rows = [0] * len(prompts), [b""] * len(prompts)
        while any(position < len(prompt) for position, prompt in zip(done, prompts, strict=True)):
            batch = []
            for slot, prompt in enumerate(prompts):
                part = prompt[done[slot] : done[slot] + max(1, room - slot)]
                if part:
                    batch.append(Work(slot, done[slot], part, logits=LogitsWanted.LAST))
            for work, output in zip(batch, chain.feed_many(batch), strict=True):
                _same(output.slot, work.slot, "outputs come in the order of the batch: slot")
                done[work.slot] += len(work.tokens)
                rows[work.slot] = _bytes(output.logits)
        return rows

    def test_ids_are_needed_as_described(self) -> None:
        """Without a sideband, a stage behind the head computes from the residual alone."""
        with self.cut_in_two() as chain:
            head, tail = chain.engines
            if tail.describe().token_sideband:
                return
            tokens = self.prompt(head, 9)
            residual = head.run([Work(0, 0, tokens)])[0].residual
            right = tail.run([Work(0, 0, tokens, residual, LogitsWanted.LAST)])[0].logits
            tail.close(0)
            other = tail.run([Work(0, 0, tokens[::-1], residual, LogitsWanted.LAST)])[0].logits
            _same(_bytes(other), _bytes(right), "logits with other ids beside the same residual")

    # --- slots ---

    def test_positions_are_counted(self) -> None:
        with self.cut_in_two() as chain:
            tokens = self.prompt(chain.tail)
            done = 0
            for position in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 127, 128, 129, len(tokens)):
                if done < position <= len(tokens):
                    self._advance(chain, tokens, done, position)
                    done = position
                    for engine, frontier in zip(chain.engines, chain.frontiers(0), strict=True):
                        _same(engine.position(0), position, "position()")
                        _same(frontier.position, position, "frontier().position")
                        self._check_frontier(engine, frontier)

    def _advance(self, chain: _Chain, tokens: Sequence[int], begin: int, end: int) -> None:
        chunk = chain.tail.describe().context.n_batch
        for start in range(begin, end, chunk):
            chain.feed(0, start, tokens[start : min(start + chunk, end)])

    def _check_frontier(self, engine: ShardEngine, frontier: Frontier) -> None:
        about = engine.describe()
        names = tuple(part.name for part in frontier.components)
        _same(names, about.components, "frontier() tells of the components that are owned, in order")
        for part in frontier.components:
            _is(0 <= part.rows_min <= part.rows_max <= part.capacity, f"rows of {part.name} within its capacity")
            _is(0 < part.n_layers <= len(about.layers), f"layers of {part.name} within the range")
            _same(len(bytes.fromhex(part.digest)), 16, f"digest of {part.name}, bytes")

    def test_close_clears(self) -> None:
        with self.cut_in_two() as chain:
            tokens = self.prompt(chain.tail)
            never_used = chain.frontiers(0)
            _same([part.position for part in never_used], [0, 0], "position of a slot that was never used")
            first = chain.prefill(0, tokens, 16)
            used = chain.frontiers(0)
            _is(used != never_used, "a frontier tells a used slot from an empty one")
            for engine in chain.engines:
                engine.close(0)
                engine.close(0)  # again: harmless
                _same(engine.position(0), 0, "position of a closed slot")
            _same(chain.frontiers(0), never_used, "frontier of a closed slot")
            _same(chain.prefill(0, tokens, 16), first, "logits from a slot that was used before")
            _same(chain.frontiers(0), used, "frontier of a slot that was used before")

    def test_slots_do_not_touch(self) -> None:
        with self.cut_in_two() as chain:
            if chain.tail.describe().context.n_seq_max < 2:
                return
            mine, theirs = self.prompt(chain.tail), self.prompt(chain.tail, 50, kind=1)
            undisturbed = chain.prefill(0, mine, 16)
            before = chain.frontiers(0)
            for _ in range(3):
                chain.prefill(1, theirs, 16)
                _same(chain.frontiers(0), before, "frontier of slot 0 while slot 1 runs")
                for engine in chain.engines:
                    engine.close(1)
                _same(chain.frontiers(0), before, "frontier of slot 0 when slot 1 is closed")
            after = _bytes(chain.feed(0, len(mine), theirs[:1], LogitsWanted.LAST).logits)
            for engine in chain.engines:
                engine.close(0)
            _same(chain.prefill(0, mine, 16), undisturbed, "logits of the prompt, again")
            again = _bytes(chain.feed(0, len(mine), theirs[:1], LogitsWanted.LAST).logits)
            _same(again, after, "logits of the next token, without and with a neighbour")

    # --- refusals ---

    def test_refusals_change_nothing(self) -> None:
        with self.cut_in_two() as chain:
            head, about = chain.engines[0], chain.engines[0].describe()
            tokens = self.prompt(head, 20)
            full = about.context.n_batch
            self._advance(chain, tokens, 0, 10)
            bad: list[tuple[str, list[Work]]] = [
                ("an empty batch", []),
                ("no tokens", [Work(0, 10, [])]),
                ("more than n_batch tokens", [Work(0, 10, [1 % about.n_vocab] * (full + 1))]),
                ("a negative slot", [Work(-1, 0, tokens[:1])]),
                ("a slot beyond the last", [Work(about.context.n_seq_max, 0, tokens[:1])]),
                ("a position in the past", [Work(0, 9, tokens[:1])]),
                ("a position in the future", [Work(0, 11, tokens[:1])]),
                ("a negative token id", [Work(0, 10, [-1])]),
                ("a token id beyond the vocabulary", [Work(0, 10, [tokens[0], about.n_vocab])]),
                ("a residual on a head", [Work(0, 10, tokens[:1], bytes(_FLOAT * about.width_out))]),
            ]
            if about.context.n_seq_max > 1:
                bad += [
                    ("a new sequence that does not begin at 0", [Work(1, 1, tokens[:1])]),
                    ("slots out of order", [Work(1, 0, tokens[:1]), Work(0, 10, tokens[:1])]),
                    ("a good companion of a bad token id", [Work(0, 10, tokens[:1]), Work(1, 0, [about.n_vocab])]),
                ]
            for what, batch in bad:
                with self._unchanged(head, what), _refused(InputError, what):
                    head.run(batch)
            for slot in (-1, about.context.n_seq_max):
                for method in (head.position, head.frontier, head.close):
                    with _refused(InputError, f"slot {slot}"):
                        method(slot)
            after = chain.prefill(0, tokens[10:], 16, position=10)
            for engine in chain.engines:
                engine.close(0)
            self._advance(chain, tokens, 0, 10)
            _same(chain.prefill(0, tokens[10:], 16, position=10), after, "logits after refusals, and without any")

    def test_bad_residuals_are_refused(self) -> None:
        with self.cut_in_two() as chain:
            head, tail = chain.engines
            tokens, row = self.prompt(head, 4), tail.describe().width_in
            good = _bytes(head.run([Work(0, 0, tokens)])[0].residual)
            bad = [
                ("no residual", None, InputError),
                ("half a residual", good[: len(good) // 2], InputError),
                ("one float too many", good + bytes(_FLOAT), InputError),
                ("NaN in the last row", good[:-_FLOAT] + struct.pack("<f", math.nan), NonFinite),
                ("infinity in the first row", struct.pack("<f", -math.inf) + good[_FLOAT:], NonFinite),
            ]
            for what, residual, error in bad:
                with self._unchanged(tail, what), _refused(error, what):
                    tail.run([Work(0, 0, tokens, residual, LogitsWanted.LAST)])
            logits = tail.run([Work(0, 0, tokens, good, LogitsWanted.LAST)])[0].logits
            for engine in chain.engines:
                engine.close(0)
            _same(len(good), _FLOAT * row * len(tokens), "bytes of a residual")
            _same(chain.prefill(0, tokens, len(tokens)), _bytes(logits), "logits after refusals, and without any")

    def test_context_ends_at_n_ctx(self) -> None:
        with self.cut_in_two() as chain:
            head, context = chain.engines[0], chain.engines[0].describe().context
            tokens = [token for _ in range(context.n_ctx) for token in self.prompt(head, 1)]
            self._advance(chain, tokens, 0, context.n_ctx - 2)
            with (
                self._unchanged(head, "one token too many"),
                _refused(ContextLimitExceeded, "three tokens, two places"),
            ):
                chain.feed(0, context.n_ctx - 2, tokens[:3])
            chain.feed(0, context.n_ctx - 2, tokens[:2])
            _same([engine.position(0) for engine in chain.engines], [context.n_ctx] * 2, "position of a full slot")
            with self._unchanged(head, "a full slot"), _refused(ContextLimitExceeded, "a token for a full slot"):
                chain.feed(0, context.n_ctx, tokens[:1])

    @contextmanager
    def _unchanged(self, engine: ShardEngine, what: str) -> Iterator[None]:
        slots = range(engine.describe().context.n_seq_max)
        before = [engine.frontier(slot) for slot in slots]
        yield
        _same([engine.frontier(slot) for slot in slots], before, f"state after {what} was refused")

    # --- outputs ---

    def test_rows_are_those_asked_for(self) -> None:
        with self.cut_in_two() as chain:
            head, tail = chain.engines
            tokens, row = self.prompt(head, 6), _FLOAT * tail.describe().n_vocab
            outputs = {}
            for wanted in LogitsWanted:
                chain_output = chain.feed(0, 0, tokens, wanted)
                _same(chain_output.residual, None, "a tail gives no residual")
                _is(chain_output.finite, "a sound output is finite")
                outputs[wanted] = _bytes(chain_output.logits)
                for engine in chain.engines:
                    engine.close(0)
            _same(len(outputs[LogitsWanted.NONE]), 0, "bytes of no logits")
            _same(len(outputs[LogitsWanted.ALL]), row * len(tokens), "bytes of all rows")
            if self.is_exact(tail):
                _same(outputs[LogitsWanted.LAST], outputs[LogitsWanted.ALL][-row:], "the last row, alone and among all")
            _same(len(outputs[LogitsWanted.LAST]), row, "bytes of one row")
            head_output = head.run([Work(0, 0, tokens)])[0]
            _same(head_output.logits, None, "a head gives no logits")
            size = _FLOAT * head.describe().width_out * len(tokens)
            _same(len(_bytes(head_output.residual)), size, "bytes of a residual")

    def test_sampling_repeats_itself(self) -> None:
        with self.chain() as chain:
            engine, about = chain.tail, chain.tail.describe()
            history = self.prompt(engine, 12)
            logits = chain.prefill(0, history, len(history))
            values = struct.unpack(f"<{about.n_vocab}f", logits)
            token, top = engine.sample(logits, history, SamplingParams(top_logprobs=min(4, about.n_vocab)))
            _same(token, values.index(max(values)), "greedy takes the first of the largest logits")
            _same(top[0].token, token, "the likeliest candidate")
            _same(
                [part.logprob for part in top],
                sorted((part.logprob for part in top), reverse=True),
                "order of candidates",
            )
            draws = {}
            for seed in range(8):
                params = SamplingParams(temperature=1e6, seed=seed)  # all tokens about as likely
                draws[seed] = engine.sample(logits, history, params)[0]
                _same(engine.sample(logits, history, params)[0], draws[seed], f"the draw with seed {seed}, again")
                _is(0 <= draws[seed] < about.n_vocab, "a draw is a token")
            _is(len(set(draws.values())) > 1, "seeds make a difference")
            others = [engine.sample(logits, history[:n], SamplingParams(temperature=1e6))[0] for n in range(1, 9)]
            _is(len(set(others)) > 1, "positions make a difference")
            choices = [engine.sample(logits, history, SamplingParams(temperature=1e6, choice=n))[0] for n in range(8)]
            _is(len(set(choices)) > 1, "choices make a difference")
            shunned, _ = engine.sample(logits, [*history, token], SamplingParams(presence_penalty=1e6))
            _is(shunned != token, "a penalty looks at the history")

    def test_sampling_refuses_nonsense(self) -> None:
        with self.chain() as chain:
            engine, n_vocab = chain.tail, chain.tail.describe().n_vocab
            history = self.prompt(engine, 3)
            logits = chain.prefill(0, history, len(history))
            for params in (
                SamplingParams(temperature=math.nan),
                SamplingParams(top_p=0.0),
                SamplingParams(min_p=1.5),
                SamplingParams(repeat_penalty=0.0),
                SamplingParams(penalty_last_n=-2),
                SamplingParams(top_logprobs=65),
                SamplingParams(top_logprobs=-1),
            ):
                with _refused(InputError, f"{params}"):
                    engine.sample(logits, history, params)
            with _refused(InputError, "a token id beyond the vocabulary in the history"):
                engine.sample(logits, [n_vocab], SamplingParams())
            with _refused(InputError, "a row that is too short"):
                engine.sample(logits[:-_FLOAT], history, SamplingParams())
            with _refused(NonFinite, "NaN among the logits"):
                engine.sample(struct.pack("<f", math.nan) + logits[_FLOAT:], history, SamplingParams())

    # --- the end ---

    def test_stop_is_final_and_idempotent(self) -> None:
        with self.engine() as engine:
            about, memory, tokens = engine.describe(), engine.memory(), self.prompt(engine, 3)
            engine.run([Work(0, 0, tokens)])
            engine.stop()
            engine.stop()
            _same((engine.describe(), engine.memory()), (about, memory), "what a stopped engine says of itself")
            with _refused(EngineError, "work for a stopped engine"):
                engine.run([Work(0, 3, tokens)])
            for method in (engine.position, engine.close, engine.frontier):
                with _refused(EngineError, "a slot of a stopped engine"):
                    method(0)
            engine.abort()  # harmless

    def test_abort_fails_later_runs(self) -> None:
        with self.engine() as engine:
            tokens = self.prompt(engine, 3)
            engine.run([Work(0, 0, tokens)])
            engine.abort()
            with _refused(EngineError, "work for an aborted engine"):
                engine.run([Work(0, 3, tokens)])
            engine.close(0)


def _bytes(data: memoryview | bytes | None) -> bytes:
    return b"" if data is None else bytes(data)


def _digests(frontier: Frontier) -> list[tuple[str, str]]:
    """What must not depend on how the tokens came: counts may (a ring keeps more rows after larger chunks)."""
    return [(part.name, part.digest) for part in frontier.components]


def _is(truth: object, what: str) -> None:
    if not truth:
        raise AssertionError(f"not so: {what}")


def _same(seen: object, expected: object, what: str) -> None:
    if seen != expected:
        raise AssertionError(f"{what}: {_short(seen)} is not {_short(expected)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


@contextmanager
def _refused(error: type[DgrError], what: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    except DgrError as other:
        raise AssertionError(f"{what}: raised {type(other).__name__} ({other}), should be {error.__name__}") from other
    raise AssertionError(f"{what} was not refused; {error.__name__} is due")
