"""Drawing a token looks at no more of the transcript than its penalties do: it must not cost more with every token before."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import pytest

from dgr.core.values import ContextParams, LogitsWanted, SamplingParams
from dgr.engine.base import Work
from dgr.engine.llama import LlamaEngine
from dgr.selftest.chain import some_tokens
from dgr.selftest.fixture import cached_fixture


class Watched(Sequence[int]):
    """A long history that counts the ids that are looked at."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.seen = 0

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        part = self.ids[at]
        self.seen += 1 if isinstance(part, int) else len(part)
        return part


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    engine = LlamaEngine(cached_fixture(layers=2), None, ContextParams(n_ctx=256))
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def logits(engine: LlamaEngine) -> bytes:
    (output,) = engine.run([Work(0, 0, some_tokens(8, engine.describe().n_vocab), logits=LogitsWanted.LAST)])
    return bytes(output.logits or b"")


@pytest.mark.parametrize(
    ("params", "looks_at"),
    [
        (SamplingParams(), 0),
        (SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5, top_logprobs=4), 0),
        (SamplingParams(penalty_last_n=64), 0),
        (SamplingParams(repeat_penalty=1.1, penalty_last_n=64), 64),
        (SamplingParams(presence_penalty=0.5, penalty_last_n=64), 64),
        (SamplingParams(frequency_penalty=0.5, penalty_last_n=0), 0),
        (SamplingParams(repeat_penalty=1.1), 5000),
    ],
)
def test_a_draw_looks_at_what_its_penalties_look_at(
    engine: LlamaEngine, logits: bytes, params: SamplingParams, looks_at: int
) -> None:
    ids = array("i", some_tokens(5000, engine.describe().n_vocab))
    history = Watched(ids)
    drawn = engine.sample(logits, history, params)
    assert history.seen == looks_at
    # The same as with the whole transcript, whatever it is kept in.
    assert drawn == engine.sample(logits, list(ids), params) == engine.sample(logits, ids, params)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("choice", [0, 2**32 - 1])
def test_a_seed_of_any_size_is_taken(engine: LlamaEngine, logits: bytes, seed: int, choice: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, choice=choice)
    assert engine.sample(logits, [1, 2], params) == engine.sample(logits, [1, 2], params)


def test_penalties_do_change_what_is_drawn(engine: LlamaEngine, logits: bytes) -> None:
    token, _ = engine.sample(logits, [], SamplingParams())
    again, _ = engine.sample(logits, [token], SamplingParams(repeat_penalty=100.0, frequency_penalty=100.0))
    assert again != token


def test_penalties_look_no_further_back_than_they_are_told(engine: LlamaEngine, logits: bytes) -> None:
    """The most likely token stands 64 and 65 places back, behind others: within the window, and just outside it."""
    token, _ = engine.sample(logits, [], SamplingParams())
    other = (token + 1) % engine.describe().n_vocab
    params = SamplingParams(frequency_penalty=100.0, penalty_last_n=64)
    near, _ = engine.sample(logits, [token, *[other] * 63], params)
    far, _ = engine.sample(logits, [token, *[other] * 64], params)
    assert near not in (token, other)
    assert far == token


def test_the_history_may_change_while_it_is_kept(engine: LlamaEngine, logits: bytes) -> None:
    """Nothing holds on to the caller's array: it could not be shortened, as a cancelled turn does."""
    history = array("i", [1, 2, 3])
    engine.sample(logits, history, SamplingParams(repeat_penalty=1.1))
    del history[-1]
    history.extend([4, 5])
