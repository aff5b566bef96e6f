"""What every :class:`~dgr.engine.base.ShardEngine` promises, as a suite that anybody's engine can run.

    class TestMyEngine(EngineContract):
        def make(self, layers, context):
            return MyEngine("model.gguf", layers, context)

pytest collects the checks from the subclass; :meth:`EngineContract.failures` runs them without pytest. Sizes, limits
and token ids come from what the engine says of itself. Only what the contract promises is asserted: equal bits over
other chunks and companions are demanded of engines that describe their numerics as exact. A check of what an engine does
not promise or have is skipped, with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dgr.core.route import LayerRange
from dgr.core.values import LogitsWanted, SamplingParams, StateSummary
from dgr.engine.base import ShardEngine, Work, WorksInPieces
from dgr.errors import EngineError
from dgr.selftest.chain import Chain
from dgr.testing.engines.case import as_bytes, check, check_equal, refused
from dgr.testing.engines.forks import ForkChecks
from dgr.testing.engines.refusals import RefusalChecks

__all__ = ["EngineContract"]

_FLOAT = 4


class EngineContract(RefusalChecks, ForkChecks):
    """The checks. Define :meth:`make`; override the attributes where an engine needs other sizes."""

    # --- what it says of itself ---

    def test_describes_itself(self) -> None:
        with self.engine() as engine:
            about, again = engine.describe(), engine.describe()
            check(isinstance(engine, ShardEngine), "an engine has every method of ShardEngine")
            check_equal(about, again, "describe() says the same every time")
            check_equal(about.layers, LayerRange(0, about.n_layers), "without a range an engine owns every main layer")
            check_equal((about.is_head, about.is_tail), (True, True), "the whole model is head and tail")
            check_equal((about.width_in, about.width_out), (0, 0), "the whole model takes ids and returns logits")
            check(about.n_vocab > 0 and about.artifact and about.kernel_fingerprint, "identity is stated")
            check(len(about.devices) > 0, "what computes is stated")
            check_equal(about.capabilities.get("decode"), "executable", "capability decode")
            for name, status in about.capabilities.items():
                check(status in ("executable", "reserved"), f"capability {name} is executable or reserved")
            for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
                check(
                    getattr(about.context, name) >= getattr(self.context, name),
                    f"{name} is not below what was asked for",
                )
            check_equal(about.context.n_seq_max, self.context.n_seq_max, "n_seq_max is what was asked for")

    def test_stages_fit_together(self) -> None:
        with self.engine() as engine:
            whole, cuts = engine.describe(), self.cuts_of(engine)
        for cut in cuts:
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
                    check_equal(getattr(head, name), getattr(whole, name), f"{name} of the head cut at {cut}")
                    check_equal(getattr(tail, name), getattr(whole, name), f"{name} of the tail cut at {cut}")
                check_equal((head.width_in, tail.width_out), (0, 0), "a head takes ids, a tail returns logits")
                check_equal(head.width_out, tail.width_in, f"width of the boundary at {cut}")
                check(head.width_out > 0, "a boundary has a width")

    # --- memory ---

    def test_memory_is_accounted_for(self) -> None:
        with self.engine() as engine:
            about, memory = engine.describe(), engine.memory()
            check_equal(
                about.components,
                tuple(name for name, size in memory.state.items() if size),
                "components are the names of the state that has bytes, in order",
            )
            check(memory.weights > 0 and memory.compute >= 0, "weights and compute buffers are counted")
            for name, size in memory.state.items():
                check_equal(size % about.context.n_seq_max, 0, f"bytes of {name} divide among the slots: remainder")
            whole = memory.state
            Chain([engine]).prefill(self.prompt(engine), chunk=about.context.n_batch)
            check_equal(engine.memory().state, whole, "bytes of state after use")
            engine.close(0)
            check_equal(engine.memory().state, whole, "bytes of state after a slot was closed")

    def test_state_of_the_stages_adds_up(self) -> None:
        with self.engine() as engine:
            whole, cuts = engine.memory().state, self.cuts_of(engine)
        for cut in cuts:
            with self.chain(cut) as chain:
                parts = [stage.memory().state for stage in chain.engines]
                total = {name: sum(part.get(name, 0) for part in parts) for name in whole}
                check_equal(total, dict(whole), f"bytes of state of the stages cut at {cut}, added up")

    # --- equal bits ---

    def test_split_equals_whole(self) -> None:
        with self.chain() as whole:
            tokens = self.prompt(whole.tail)
            chunk = whole.tail.describe().context.n_batch
            expected = self._converse(whole, tokens, chunk)
            cuts = self.cuts_of(whole.tail)
        for split in [(cut,) for cut in cuts] + ([tuple(cuts)] if len(cuts) > 1 else []):
            with self.chain(*split) as chain:
                check_equal(self._converse(chain, tokens, chunk), expected, f"logits of the model cut at {split}")

    def _converse(self, chain: Chain, tokens: Sequence[int], chunk: int) -> list[bytes]:
        """Logits after a prompt and after each of a few greedy tokens."""
        rows = [chain.prefill(tokens, chunk=chunk)]
        history = list(tokens)
        for _ in range(self.decoded):
            token, _top = chain.tail.sample(rows[-1], history, SamplingParams())
            rows.append(as_bytes(chain.run([Work(0, len(history), [token], logits=LogitsWanted.LAST)])[0].logits))
            history.append(token)
        return rows

    def test_chunks_do_not_matter(self) -> None:
        with self.cut_in_two() as chain:
            self.needs_exact_numerics(chain.tail)
            tokens = self.prompt(chain.tail)
            largest = chain.tail.describe().context.n_batch
            expected = None
            for chunk in (largest, 1, 5, largest - 1):
                seen = (chain.prefill(tokens, chunk=chunk), [_digests(part) for part in chain.summaries(0)])
                expected = expected or seen
                check_equal(seen, expected, f"logits and digests in chunks of {chunk}, against chunks of {largest}")
                chain.close(0)

    def test_companions_do_not_matter(self) -> None:
        with self.cut_in_two() as chain:
            about = chain.tail.describe()
            self.needs_exact_numerics(chain.tail)
            self.needs_slots(chain.tail, 2)
            slots = range(about.context.n_seq_max)
            room = about.context.n_batch // len(slots)
            prompts = [self.prompt(chain.tail, 3 * room - 2 * slot - 1, kind=slot) for slot in slots]
            together = self._merged(chain, prompts, room)
            digests = [[_digests(part) for part in chain.summaries(slot)] for slot in slots]
            for slot, prompt in zip(slots, prompts, strict=True):
                chain.close(slot)
                alone = chain.prefill(prompt, chunk=room, slot=slot)
                check_equal(alone, together[slot], f"logits of slot {slot}, alone and merged")
                seen = [_digests(part) for part in chain.summaries(slot)]
                check_equal(seen, digests[slot], f"digests of slot {slot}, alone and merged")

    def _merged(self, chain: Chain, prompts: Sequence[Sequence[int]], room: int) -> list[bytes]:
        """Run all prompts side by side, in uneven pieces; the last row of logits of each."""
        done, rows = [0] * len(prompts), [b""] * len(prompts)
        while any(position < len(prompt) for position, prompt in zip(done, prompts, strict=True)):
            batch = []
            for slot, prompt in enumerate(prompts):
                part = prompt[done[slot] : done[slot] + max(1, room - slot)]
                if part:
                    batch.append(Work(slot, done[slot], part, logits=LogitsWanted.LAST))
            for work, output in zip(batch, chain.run(batch), strict=True):
                check_equal(output.slot, work.slot, "outputs come in the order of the batch: slot")
                done[work.slot] += len(work.tokens)
                rows[work.slot] = as_bytes(output.logits)
        return rows

    def test_ids_are_needed_as_described(self) -> None:
        """Without a sideband, a stage behind the head computes from the residual alone."""
        with self.cut_in_two() as chain:
            head, tail = chain.engines
            self.needs_no_sideband(tail)
            tokens = self.prompt(head, 9)
            residual = head.run([Work(0, 0, tokens)])[0].residual
            right = tail.run([Work(0, 0, tokens, residual, LogitsWanted.LAST)])[0].logits
            tail.close(0)
            other = tail.run([Work(0, 0, tokens[::-1], residual, LogitsWanted.LAST)])[0].logits
            check_equal(as_bytes(other), as_bytes(right), "logits with other ids beside the same residual")

    # --- slots ---

    def test_positions_are_counted(self) -> None:
        with self.cut_in_two() as chain:
            tokens, chunk = self.prompt(chain.tail), chain.tail.describe().context.n_batch
            done = 0
            for position in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 127, 128, 129, len(tokens)):
                if done < position <= len(tokens):
                    chain.advance(tokens[done:position], chunk=chunk, begin=done)
                    done = position
                    for engine, summary in zip(chain.engines, chain.summaries(0), strict=True):
                        check_equal(engine.position(0), position, "position()")
                        check_equal(summary.position, position, "state_summary().position")
                        self._check_report(engine, summary)
                        if isinstance(engine, WorksInPieces):
                            check_equal(list(engine.state_pieces(0))[-1], summary, "the last of state_pieces()")

    def _check_report(self, engine: ShardEngine, summary: StateSummary) -> None:
        about = engine.describe()
        names = tuple(part.name for part in summary.components)
        check_equal(names, about.components, "state_summary() tells of the components that are owned, in order")
        for part in summary.components:
            check(0 <= part.rows_min <= part.rows_max <= part.capacity, f"rows of {part.name} within its capacity")
            check(0 < part.n_layers <= len(about.layers), f"layers of {part.name} within the range")
            check_equal(len(bytes.fromhex(part.digest)), 16, f"digest of {part.name}, bytes")

    def test_close_clears(self) -> None:
        with self.cut_in_two() as chain:
            tokens = self.prompt(chain.tail)
            never_used = chain.summaries(0)
            check_equal([part.position for part in never_used], [0, 0], "position of a slot that was never used")
            first = chain.prefill(tokens, chunk=16)
            used = chain.summaries(0)
            check(used != never_used, "a state summary tells a used slot from an empty one")
            for engine in chain.engines:
                engine.close(0)
                engine.close(0)  # again: harmless
                check_equal(engine.position(0), 0, "position of a closed slot")
            check_equal(chain.summaries(0), never_used, "state summary of a closed slot")
            for engine in chain.engines:
                if isinstance(engine, WorksInPieces):
                    chain.prefill(tokens, chunk=16)
                    pieces = list(engine.close_pieces(0))
                    check_equal(pieces, [None] * len(pieces), "what close_pieces() yields")
                    check_equal(engine.position(0), 0, "position of a slot that was closed in pieces")
                    chain.close()
                    check_equal(chain.summaries(0), never_used, "state summary of a slot that was closed in pieces")
            check_equal(chain.prefill(tokens, chunk=16), first, "logits from a slot that was used before")
            check_equal(chain.summaries(0), used, "state summary of a slot that was used before")

    def test_slots_do_not_touch(self) -> None:
        with self.cut_in_two() as chain:
            self.needs_slots(chain.tail, 2)
            mine, theirs = self.prompt(chain.tail), self.prompt(chain.tail, 50, kind=1)
            undisturbed = chain.prefill(mine, chunk=16)
            before = chain.summaries(0)
            for _ in range(3):
                chain.prefill(theirs, chunk=16, slot=1)
                check_equal(chain.summaries(0), before, "state summary of slot 0 while slot 1 runs")
                chain.close(1)
                check_equal(chain.summaries(0), before, "state summary of slot 0 when slot 1 is closed")
            after = as_bytes(chain.run([Work(0, len(mine), theirs[:1], logits=LogitsWanted.LAST)])[0].logits)
            chain.close(0)
            check_equal(chain.prefill(mine, chunk=16), undisturbed, "logits of the prompt, again")
            again = as_bytes(chain.run([Work(0, len(mine), theirs[:1], logits=LogitsWanted.LAST)])[0].logits)
            check_equal(again, after, "logits of the next token, without and with a neighbour")

    # --- outputs ---

    def test_rows_are_those_asked_for(self) -> None:
        with self.cut_in_two() as chain:
            head, tail = chain.engines
            tokens, row = self.prompt(head, 6), _FLOAT * tail.describe().n_vocab
            outputs = {}
            for wanted in LogitsWanted:
                chain_output = chain.run([Work(0, 0, tokens, logits=wanted)])[0]
                check_equal(chain_output.residual, None, "a tail returns no residual")
                check(chain_output.finite, "a sound output is finite")
                outputs[wanted] = as_bytes(chain_output.logits)
                chain.close(0)
            check_equal(len(outputs[LogitsWanted.NONE]), 0, "bytes of no logits")
            check_equal(len(outputs[LogitsWanted.ALL]), row * len(tokens), "bytes of all rows")
            check_equal(len(outputs[LogitsWanted.LAST]), row, "bytes of one row")
            head_output = head.run([Work(0, 0, tokens)])[0]
            check_equal(head_output.logits, None, "a head returns no logits")
            size = _FLOAT * head.describe().width_out * len(tokens)
            check_equal(len(as_bytes(head_output.residual)), size, "bytes of a residual")

    def test_the_last_row_is_the_same_alone_and_among_all(self) -> None:
        with self.cut_in_two() as chain:
            self.needs_exact_numerics(chain.tail)
            tokens, row = self.prompt(chain.tail, 6), _FLOAT * chain.tail.describe().n_vocab
            every = as_bytes(chain.run([Work(0, 0, tokens, logits=LogitsWanted.ALL)])[0].logits)
            chain.close(0)
            last = as_bytes(chain.run([Work(0, 0, tokens, logits=LogitsWanted.LAST)])[0].logits)
            check_equal(last, every[-row:], "the last row, alone and among all")

    def test_sampling_repeats_itself(self) -> None:
        with self.chain() as chain:
            engine, about = chain.tail, chain.tail.describe()
            history = self.prompt(engine, 12)
            logits = chain.prefill(history, chunk=len(history))
            values = struct.unpack(f"<{about.n_vocab}f", logits)
            token, top = engine.sample(logits, history, SamplingParams(top_logprobs=min(4, about.n_vocab)))
            check_equal(token, values.index(max(values)), "greedy takes the first of the largest logits")
            check_equal(top[0].token, token, "the likeliest candidate")
            check_equal(
                [part.logprob for part in top],
                sorted((part.logprob for part in top), reverse=True),
                "order of candidates",
            )
            draws = {}
            for seed in range(8):
                params = SamplingParams(temperature=1e6, seed=seed)  # all tokens about as likely
                draws[seed] = engine.sample(logits, history, params)[0]
                check_equal(engine.sample(logits, history, params)[0], draws[seed], f"the draw with seed {seed}, again")
                check(0 <= draws[seed] < about.n_vocab, "a draw is a token")
            check(len(set(draws.values())) > 1, "seeds make a difference")
            others = [engine.sample(logits, history[:n], SamplingParams(temperature=1e6))[0] for n in range(1, 9)]
            check(len(set(others)) > 1, "positions make a difference")
            choices = [engine.sample(logits, history, SamplingParams(temperature=1e6, choice=n))[0] for n in range(8)]
            check(len(set(choices)) > 1, "choices make a difference")
            shunned, _ = engine.sample(logits, [*history, token], SamplingParams(presence_penalty=1e6))
            check(shunned != token, "a penalty looks at the history")

    # --- the end ---

    def test_stop_is_final_and_idempotent(self) -> None:
        with self.engine() as engine:
            about, memory, tokens = engine.describe(), engine.memory(), self.prompt(engine, 3)
            engine.run([Work(0, 0, tokens)])
            engine.stop()
            engine.stop()
            check_equal((engine.describe(), engine.memory()), (about, memory), "what a stopped engine says of itself")
            with refused(EngineError, "work for a stopped engine"):
                engine.run([Work(0, 3, tokens)])
            for method in (engine.position, engine.close, engine.state_summary):
                with refused(EngineError, "a slot of a stopped engine"):
                    method(0)
            engine.abort()  # harmless

    def test_abort_fails_later_runs(self) -> None:
        with self.engine() as engine:
            tokens = self.prompt(engine, 3)
            engine.run([Work(0, 0, tokens)])
            engine.abort()
            with refused(EngineError, "work for an aborted engine"):
                engine.run([Work(0, 3, tokens)])
            engine.close(0)


def _digests(summary: StateSummary) -> list[tuple[str, str]]:
    """What must not depend on how the tokens came: counts may (a ring keeps more rows after larger chunks)."""
    return [(part.name, part.digest) for part in summary.components]
