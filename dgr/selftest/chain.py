"""Stages run by hand: a chain of engines in which the residual of each is the input of the next, without any runtime.

What a chain returns is what a pipeline over the same engines must return. An engine may be wrapped, to do wrong on purpose.
:func:`dgr.selftest.llama_chain.open_chain` loads native ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from attrs import evolve

from dgr.core.route import LayerRange
from dgr.core.values import LogitsWanted, SamplingParams, StateSummary
from dgr.engine.base import Output, ShardEngine, Work
from dgr.errors import NonFinite

__all__ = ["Chain", "cut_at", "pieces", "some_tokens"]


def some_tokens(count: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Token ids without a pattern, the same for a seed everywhere; a longer list begins like a shorter one."""
    ids, state = [], seed
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append((state >> 33) % n_vocab)
    return ids


def pieces(total: int, chunk: int) -> Iterator[tuple[int, int]]:
    """``total`` positions cut into runs of ``chunk``: (begin, end)."""
    for begin in range(0, total, chunk):
        yield begin, min(begin + chunk, total)


def cut_at(n_layers: int, cuts: Sequence[int]) -> tuple[LayerRange, ...]:
    """The ranges between some cuts, which ascend: 43 layers cut at 15 and 29 are 0:15, 15:29, 29:43."""
    bounds = [0, *cuts, n_layers]
    return tuple(LayerRange(begin, end) for begin, end in itertools.pairwise(bounds))


class Chain:
    """Engines in the order of their layers."""

    def __init__(self, engines: Sequence[ShardEngine]) -> None:
        self.engines = tuple(engines)
        self.tail = self.engines[-1]
        self._row = 4 * self.tail.describe().n_vocab

    def run(self, batch: Sequence[Work]) -> list[Output]:
        """Run a batch through every stage; the tail's outputs."""
        outputs: list[Output] = []
        for index, engine in enumerate(self.engines):
            if index:
                batch = [evolve(work, residual=output.residual) for work, output in zip(batch, outputs, strict=True)]
            outputs = engine.run(batch)
        return outputs

    def feed(self, tokens: Sequence[int], *, chunk: int, slot: int = 0, begin: int = 0) -> bytes:
        """Run ``tokens`` from position ``begin`` on, ``chunk`` at a time; every row of logits, end to end."""
        rows = bytearray()
        for first, last in pieces(len(tokens), chunk):
            work = Work(slot, begin + first, tokens[first:last], logits=LogitsWanted.ALL)
            rows += self._rows(work)
        return bytes(rows)

    def advance(self, tokens: Sequence[int], *, chunk: int, slot: int = 0, begin: int = 0) -> None:
        """Run ``tokens`` as :meth:`feed` does, and ask for no logits."""
        for first, last in pieces(len(tokens), chunk):
            self.run([Work(slot, begin + first, tokens[first:last])])

    def prefill(self, tokens: Sequence[int], *, chunk: int, slot: int = 0, begin: int = 0) -> bytes:
        """Run ``tokens`` as a prompt is run: the last row of logits, and no other is asked for."""
        last = (len(tokens) - 1) // chunk * chunk
        self.advance(tokens[:last], chunk=chunk, slot=slot, begin=begin)
        return bytes(self._rows(Work(slot, begin + last, tokens[last:], logits=LogitsWanted.LAST)))

    def decode(self, token: int, position: int, n_tokens: int, *, slot: int = 0) -> tuple[list[int], bytes]:
        """Feed ``token`` at ``position``, draw the next one greedily, feed it, and so on ``n_tokens`` times.

        Returns the tokens drawn and the rows of logits they were drawn from.
        """
        drawn: list[int] = []
        rows = bytearray()
        for at in range(position, position + n_tokens):
            logits = self._rows(Work(slot, at, (token,), logits=LogitsWanted.ALL))
            rows += logits
            token, _ = self.tail.sample(logits, (), SamplingParams())
            drawn.append(token)
        return drawn, bytes(rows)

    def _rows(self, work: Work) -> memoryview | bytes:
        output = self.run([work])[0]
        if not output.finite or output.logits is None:
            raise NonFinite(f"NaN or Inf in the logits from position {work.position} on")
        return output.logits

    def row(self, rows: bytes, index: int) -> bytes:
        """One row out of several."""
        return rows[index * self._row : (index + 1) * self._row]

    def summaries(self, slot: int = 0) -> list[StateSummary]:
        """What every stage holds of a slot."""
        return [engine.state_summary(slot) for engine in self.engines]

    def close(self, slot: int = 0) -> None:
        """Clear a slot on every stage."""
        for engine in self.engines:
            engine.close(slot)
