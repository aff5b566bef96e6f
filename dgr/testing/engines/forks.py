"""What every engine that copies slots promises of the copies. Part of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import SkipTest

from dgr.core.values import LogitsWanted, StateSummary
from dgr.engine.base import FORK, ShardEngine, Work, WorksInPieces
from dgr.errors import EngineError, InputError
from dgr.selftest.chain import Chain
from dgr.testing.engines.case import ContractCase, as_bytes, check, check_equal, refused

__all__ = ["ForkChecks"]

#: Lengths around the borders of components: windows and blocks of 4, 8 and 128 tokens.
_LENGTHS = (1, 3, 4, 5, 8, 127, 128, 129)


class ForkChecks(ContractCase):
    """Part of :class:`~dgr.testing.engines.contract.EngineContract`."""

    def needs_fork(self, engine: ShardEngine) -> None:
        """Skip the check unless the engine copies slots, and has some."""
        if (status := engine.describe().capabilities.get(FORK)) != "executable":
            raise SkipTest(f"capability {FORK} is {status or 'not offered'}")
        self.needs_slots(engine, 2)

    def test_a_fork_goes_on_as_a_cold_run_does(self) -> None:
        with self.cut_in_two() as chain:
            self.needs_fork(chain.tail)
            slots = chain.tail.describe().context.n_seq_max
            prompt = self.prompt(chain.tail)
            mine, theirs = (self.prompt(chain.tail, self.decoded, kind=kind) for kind in (1, 2))
            for length in [*(length for length in _LENGTHS if length < len(prompt)), len(prompt)]:
                tokens = prompt[:length]
                after_mine, after_theirs = (self._cold(chain, tokens, more) for more in (mine, theirs))
                # In the third slot lies another text, which must be neither copied nor touched.
                beside = self._beside(chain, slots)
                for source, target in ((0, 1), (1, 0)):
                    self._fill(chain, tokens, source)
                    held = chain.summaries(source)
                    _fork(chain, source, target)
                    what = f"slot {source} of {length} tokens, copied to slot {target}"
                    check_equal(chain.summaries(target), held, f"state of the copy of {what}")
                    check_equal(chain.summaries(source), held, f"state of the source of {what}")
                    check_equal(self._go_on(chain, source, length, mine), after_mine, f"logits of the source of {what}")
                    check_equal(
                        self._go_on(chain, target, length, theirs), after_theirs, f"logits of the copy of {what}"
                    )
                    check_equal([chain.summaries(slot) for slot in range(2, slots)], beside, f"slots beside {what}")
                    chain.close(source)
                    chain.close(target)
                for slot in range(2, slots):
                    chain.close(slot)

    def test_a_fork_outlives_its_source(self) -> None:
        with self.cut_in_two() as chain:
            self.needs_fork(chain.tail)
            tokens, more = self.prompt(chain.tail), self.prompt(chain.tail, self.decoded, kind=1)
            expected = self._cold(chain, tokens, more)
            self._fill(chain, tokens, 0)
            _fork(chain, 0, 1)
            chain.close(0)
            self._fill(chain, more, 0)
            check_equal(
                self._go_on(chain, 1, len(tokens), more), expected, "logits of a copy whose source was closed at once"
            )
            chain.close(0)
            chain.close(1)
            self._fill(chain, tokens, 0)
            _fork(chain, 0, 1)
            chain.close(1)
            check_equal(self._go_on(chain, 0, len(tokens), more), expected, "logits of a source whose copy was closed")
            chain.close(0)
            check_equal(self._cold(chain, tokens, more), expected, "logits of a slot that was copied before")

    def test_forks_that_cannot_be_are_refused(self) -> None:
        with self.engine() as engine:
            self.needs_fork(engine)
            n_slots = engine.describe().context.n_seq_max
            self._refuses_forks(engine, [(0, 1)])  # both are empty
            engine.run([Work(0, 0, self.prompt(engine, 5))])
            self._refuses_forks(engine, [(-1, 1), (n_slots, 1), (0, -1), (0, n_slots), (0, 0), (1, 0)])
            engine.fork(0, 1)
            self._refuses_forks(engine, [(0, 1), (1, 0)])
            engine.abort()
            engine.close(1)
            with refused(EngineError, "a fork in an aborted engine"):
                engine.fork(0, 1)
            engine.stop()
            with refused(EngineError, "a fork in a stopped engine"):
                engine.fork(0, 1)

    def _refuses_forks(self, engine: ShardEngine, pairs: Sequence[tuple[int, int]]) -> None:
        slots = range(engine.describe().context.n_seq_max)
        before = [engine.state_summary(slot) for slot in slots]
        for source, target in pairs:
            with refused(InputError, f"a copy of slot {source} into slot {target}"):
                engine.fork(source, target)
            check_equal([engine.state_summary(slot) for slot in slots], before, "state after a fork was refused")

    def _fill(self, chain: Chain, tokens: Sequence[int], slot: int) -> None:
        chain.advance(tokens, chunk=chain.tail.describe().context.n_batch, slot=slot)

    def _cold(self, chain: Chain, tokens: Sequence[int], more: Sequence[int]) -> list[bytes]:
        """Logits of what follows a prompt, in a slot that nothing else was in."""
        self._fill(chain, tokens, 0)
        rows = self._go_on(chain, 0, len(tokens), more)
        chain.close(0)
        return rows

    def _go_on(self, chain: Chain, slot: int, position: int, tokens: Sequence[int]) -> list[bytes]:
        return [
            as_bytes(chain.run([Work(slot, at, [token], logits=LogitsWanted.LAST)])[0].logits)
            for at, token in enumerate(tokens, position)
        ]

    def _beside(self, chain: Chain, slots: int) -> list[list[StateSummary]]:
        for slot in range(2, slots):
            self._fill(chain, self.prompt(chain.tail, 6 + slot, kind=3), slot)
        return [chain.summaries(slot) for slot in range(2, slots)]


def _fork(chain: Chain, source: int, target: int) -> None:
    for engine in chain.engines:
        if isinstance(engine, WorksInPieces) and target > source:
            pieces = list(engine.fork_pieces(source, target))
            check_equal(pieces, [None] * len(pieces), "what fork_pieces() yields")
        else:
            engine.fork(source, target)
        check(engine.position(source) == engine.position(target), "a copy stands where its source stands")
