"""What every engine refuses, with which error, and that nothing has changed afterwards."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dgr.core.route import LayerRange
from dgr.core.values import LogitsWanted, SamplingParams
from dgr.engine.base import ShardEngine, Work
from dgr.errors import ContextLimitExceeded, InputError, NonFinite
from dgr.testing.engines.case import ContractCase, as_bytes, check_equal, refused

__all__ = ["RefusalChecks"]

_FLOAT = 4


class RefusalChecks(ContractCase):
    """Part of :class:`~dgr.testing.engines.contract.EngineContract`."""

    def test_refuses_ranges_that_are_not_there(self) -> None:
        with self.engine() as engine:
            n_layers = engine.describe().n_layers
        with refused(InputError, "a range beyond the last main layer"):
            self.make(LayerRange(0, n_layers + 1), self.context).stop()

    def test_refusals_change_nothing(self) -> None:
        with self.cut_in_two() as chain:
            head, about = chain.engines[0], chain.engines[0].describe()
            tokens = self.prompt(head, 20)
            full = about.context.n_batch
            chain.advance(tokens[:10], chunk=full)
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
            self._refuses(head, bad)
            for slot in (-1, about.context.n_seq_max):
                for method in (head.position, head.state_summary, head.close):
                    with refused(InputError, f"slot {slot}"):
                        method(slot)
            after = chain.prefill(tokens[10:], chunk=16, begin=10)
            chain.close(0)
            chain.advance(tokens[:10], chunk=full)
            check_equal(chain.prefill(tokens[10:], chunk=16, begin=10), after, "logits after refusals, and without any")

    def test_a_batch_is_refused_as_a_whole(self) -> None:
        with self.cut_in_two() as chain:
            head, about = chain.engines[0], chain.engines[0].describe()
            self.needs_slots(head, 2)
            tokens = self.prompt(head, 11)
            chain.advance(tokens[:10], chunk=about.context.n_batch)
            self._refuses(
                head,
                [
                    ("a new sequence that does not begin at 0", [Work(1, 1, tokens[:1])]),
                    ("slots out of order", [Work(1, 0, tokens[:1]), Work(0, 10, tokens[:1])]),
                    ("a good companion of a bad token id", [Work(0, 10, tokens[:1]), Work(1, 0, [about.n_vocab])]),
                ],
            )

    def _refuses(self, engine: ShardEngine, bad: Sequence[tuple[str, list[Work]]]) -> None:
        for what, batch in bad:
            with self._unchanged(engine, what), refused(InputError, what):
                engine.run(batch)

    def test_bad_residuals_are_refused(self) -> None:
        with self.cut_in_two() as chain:
            head, tail = chain.engines
            tokens, row = self.prompt(head, 4), tail.describe().width_in
            good = as_bytes(head.run([Work(0, 0, tokens)])[0].residual)
            bad = [
                ("no residual", None, InputError),
                ("half a residual", good[: len(good) // 2], InputError),
                ("one float too many", good + bytes(_FLOAT), InputError),
                ("NaN in the last row", good[:-_FLOAT] + struct.pack("<f", math.nan), NonFinite),
                ("infinity in the first row", struct.pack("<f", -math.inf) + good[_FLOAT:], NonFinite),
            ]
            for what, residual, error in bad:
                with self._unchanged(tail, what), refused(error, what):
                    tail.run([Work(0, 0, tokens, residual, LogitsWanted.LAST)])
            logits = tail.run([Work(0, 0, tokens, good, LogitsWanted.LAST)])[0].logits
            chain.close(0)
            check_equal(len(good), _FLOAT * row * len(tokens), "bytes of a residual")
            check_equal(
                chain.prefill(tokens, chunk=len(tokens)), as_bytes(logits), "logits after refusals, and without any"
            )

    def test_context_ends_at_n_ctx(self) -> None:
        with self.cut_in_two() as chain:
            head, context = chain.engines[0], chain.engines[0].describe().context
            tokens = [token for _ in range(context.n_ctx) for token in self.prompt(head, 1)]
            chain.advance(tokens[: context.n_ctx - 2], chunk=context.n_batch)
            with (
                self._unchanged(head, "one token too many"),
                refused(ContextLimitExceeded, "three tokens, two places"),
            ):
                chain.run([Work(0, context.n_ctx - 2, tokens[:3])])
            chain.run([Work(0, context.n_ctx - 2, tokens[:2])])
            check_equal(
                [engine.position(0) for engine in chain.engines], [context.n_ctx] * 2, "position of a full slot"
            )
            with self._unchanged(head, "a full slot"), refused(ContextLimitExceeded, "a token for a full slot"):
                chain.run([Work(0, context.n_ctx, tokens[:1])])

    @contextmanager
    def _unchanged(self, engine: ShardEngine, what: str) -> Iterator[None]:
        slots = range(engine.describe().context.n_seq_max)
        before = [engine.state_summary(slot) for slot in slots]
        yield
        check_equal([engine.state_summary(slot) for slot in slots], before, f"state after {what} was refused")

    def test_sampling_refuses_nonsense(self) -> None:
        with self.chain() as chain:
            engine, n_vocab = chain.tail, chain.tail.describe().n_vocab
            history = self.prompt(engine, 3)
            logits = chain.prefill(history, chunk=len(history))
            for params in (
                SamplingParams(temperature=math.nan),
                SamplingParams(top_p=0.0),
                SamplingParams(min_p=1.5),
                SamplingParams(repeat_penalty=0.0),
                SamplingParams(penalty_last_n=-2),
                SamplingParams(top_logprobs=65),
                SamplingParams(top_logprobs=-1),
            ):
                with refused(InputError, f"{params}"):
                    engine.sample(logits, history, params)
            for token in (n_vocab, -1, 2**40):  # looked at where penalties look at it
                with refused(InputError, f"a token id of {token} in the history, with a penalty"):
                    engine.sample(logits, [token], SamplingParams(repeat_penalty=1.1))
            with refused(InputError, "a row that is too short"):
                engine.sample(logits[:-_FLOAT], history, SamplingParams())
            with refused(NonFinite, "NaN among the logits"):
                engine.sample(struct.pack("<f", math.nan) + logits[_FLOAT:], history, SamplingParams())
