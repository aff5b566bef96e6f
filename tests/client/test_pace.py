"""How large chunks of prefill become: by what they take, within bounds."""

from __future__ import annotations

import pytest

from dgr.client.pace import ChunkPace


def test_a_chunk_grows_to_what_fits_its_time_and_shrinks_when_it_takes_longer() -> None:
    pace = ChunkPace(512, 0.5)
    sizes = [pace.tokens]
    for rate in [400.0] * 6 + [150.0] * 8:
        pace.passed(pace.tokens, pace.tokens / rate)
        sizes.append(pace.tokens)
    assert sizes[:4] == [64, 128, 192, 192]  # never more than twice as large at once
    assert sizes[6] == 192  # 200, in units of 16
    assert sizes[-1] == 64  # 75
    assert sizes == sorted(sizes[:7]) + sorted(sizes[7:], reverse=True)


@pytest.mark.parametrize(("rate", "tokens"), [(1e9, 512), (1.0, 32)])
def test_a_chunk_has_a_most_and_a_least(rate: float, tokens: int) -> None:
    pace = ChunkPace(512, 0.5)
    for _ in range(10):
        pace.passed(pace.tokens, pace.tokens / rate)
    assert pace.tokens == tokens


def test_chunks_that_take_no_time_are_as_large_as_may_be() -> None:
    pace = ChunkPace(500, 0.5)
    for _ in range(4):
        pace.passed(pace.tokens, 0.0)
    assert pace.tokens == 500


def test_the_most_may_be_less_than_the_least() -> None:
    pace = ChunkPace(4, 0.5)
    assert pace.tokens == 4
    pace.passed(4, 100.0)
    assert pace.tokens == 4


def test_without_a_time_a_chunk_is_always_of_one_size() -> None:
    pace = ChunkPace(512, None)
    pace.passed(512, 100.0)
    assert pace.tokens == 512
