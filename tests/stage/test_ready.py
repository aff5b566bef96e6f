"""Which ready work makes the next batch: turns, groups and waits, with times given by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from attrs import define

from dgr.engine.base import Work
from dgr.stage.ready import ReadyWork, StepTime, best_groups


@define(eq=False)
class Request:
    work: Work
    ring: int = 1
    abandoned: bool = False


def decode(slot: int, ring: int = 1) -> Request:
    return Request(Work(slot, 7, (1,)), ring)


def prefill(slot: int, tokens: int) -> Request:
    return Request(Work(slot, 0, tuple(range(tokens))))


def slots(found: list[Request] | float) -> list[int]:
    assert isinstance(found, list), f"it waits until {found}"
    return [request.work.slot for request in found]


def ready(*requests: Request, now: float = 0.0) -> ReadyWork[Request]:
    work: ReadyWork[Request] = ReadyWork(n_batch=8, n_ubatch=100)
    for request in requests:
        work.add(request, now)
    return work


def run(work: ReadyWork[Request], now: float, seconds: float) -> tuple[list[int], float]:
    """Take the next batch and run it: its slots, and when it ended."""
    batch = work.next(now)
    assert isinstance(batch, list)
    work.ran(batch, now, now + seconds)
    return slots(batch), now + seconds


# --- turns ---


def test_nothing_is_waited_for_without_end() -> None:
    assert ready().next(0.0) == math.inf


def test_decode_and_prefill_take_turns_and_neither_starves() -> None:
    work, now = ready(*(prefill(slot, 60) for slot in range(4))), 0.0
    turns = []
    for _ in range(4):
        work.add(decode(9), now)
        for _ in range(2):
            taken, now = run(work, now, 1.0)
            turns.append(taken)
    assert turns == [[0], [9], [1], [9], [2], [9], [3], [9]]


def test_chunks_of_prefill_share_a_batch_as_far_as_one_chunk_may_go() -> None:
    work = ready(prefill(3, 40), prefill(1, 40), prefill(0, 40), prefill(2, 10))
    assert slots(work.next(0)) == [1, 3]  # whoever waits longest, by slot
    assert slots(work.next(0)) == [0, 2]


def test_a_chunk_larger_than_a_sub_batch_goes_alone() -> None:
    work = ready(prefill(0, 300), prefill(1, 1 + 1))
    assert slots(work.next(0)) == [0]
    assert slots(work.next(0)) == [1]


def test_whoever_has_gone_is_not_run() -> None:
    one, two = decode(0), prefill(1, 5)
    work = ready(one, two)
    one.abandoned = two.abandoned = True
    assert work.next(0) == math.inf
    assert len(work) == 0


def test_a_decode_batch_holds_no_more_than_a_native_batch() -> None:
    work = ready(*(decode(slot) for slot in range(12)))
    assert slots(work.next(0)) == list(range(8))


# --- groups ---


def line(a: float, b: float) -> Callable[[int], float]:
    return lambda n: a + b * n


@pytest.mark.parametrize(
    ("sessions", "stages", "seconds", "groups"),
    [
        (8, 1, line(0.03, 0.01), 1),  # one stage: together
        (8, 2, line(0.03, 0.01), 2),
        (8, 4, line(0.03, 0.01), 4),
        (3, 2, line(0.03, 0.01), 2),
        (5, 4, line(0.026, 0.016), 5),  # {2, 1, 1, 1} would leave stages idle longer than a fifth batch costs
        (5, 4, line(0.03, 0.003), 4),
        (8, 2, line(0.0, 0.01), 2),  # size is all that costs: any number would do
        (2, 4, line(0.03, 0.01), 2),
        (1, 4, line(0.03, 0.01), 1),
        (7, 3, line(0.0, 0.0), 3),  # nothing measured yet
    ],
)
def test_the_number_of_groups_is_that_of_the_shortest_round(
    sessions: int, stages: int, seconds: Callable[[int], float], groups: int
) -> None:
    assert best_groups(sessions, stages, seconds) == groups


def test_the_time_of_a_batch_is_learned_over_its_size() -> None:
    time = StepTime()
    assert time(4) == 0
    time.add(2, 0.05)
    assert time(2) == time(8) == 0.05  # of one size alone nothing is known of others
    for n in (1, 4, 2, 8) * 20:
        time.add(n, 0.03 + 0.01 * n)
    assert time(6) == pytest.approx(0.09, rel=0.02)
    for n in (1, 4) * 200:  # it forgets what was
        time.add(n, 0.01 + 0.02 * n)
    assert time(6) == pytest.approx(0.13, rel=0.02)


@pytest.mark.parametrize("measured", [[(1, 0.5), (8, 0.1)], [(8, 0.1), (1, 0.0)], [(1, 0.0), (2, 5.0)]])
def test_times_that_make_no_sense_give_no_negative_time(measured: Sequence[tuple[int, float]]) -> None:
    time = StepTime()
    for n, seconds in measured:
        time.add(n, seconds)
    assert all(time(n) >= 0 for n in range(1, 100))


def test_a_ring_is_not_given_all_at_once() -> None:
    """No convoy: the head of two stages starts two of four, then the others."""
    work = ready(*(decode(slot, ring=2) for slot in range(4)))
    first, now = run(work, 0.0, 1.0)
    second, _ = run(work, now, 1.0)
    assert (first, second) == ([0, 1], [2, 3])


def test_groups_are_of_adjacent_slots_whoever_waits_longest() -> None:
    """Of any others upstream makes a sub-batch each."""
    work = ready(*(decode(slot, ring=2) for slot in (3, 0, 2, 1)))
    first, now = run(work, 0.0, 1.0)
    second, _ = run(work, now, 1.0)
    assert (first, second) == ([2, 3], [0, 1])


def test_a_group_that_is_complete_does_not_wait_for_another() -> None:
    work = ready(*(decode(slot, ring=2) for slot in range(4)))
    _, now = run(work, 0.0, 1.0)
    _, now = run(work, now, 1.0)
    for slot in (0, 2, 3):
        work.add(decode(slot, ring=2), now)
    assert slots(work.next(now)) == [2, 3]


# --- waits ---


def test_a_wait_for_another_group_that_was_in_vain_is_not_tried_again_for_a_while() -> None:
    """A long way round, or clients that think: whoever comes is alone, however long the stage waits."""
    work, now = ready(decode(0)), 0.0
    _, now = run(work, now, 1.0)
    work.add(decode(1), now)
    tried = []
    for step in range(40):
        found = work.next(now)
        tried.append(isinstance(found, float))
        if isinstance(found, float):
            assert found == pytest.approx(now + 1.5)
            now = found
            found = work.next(now)
        assert isinstance(found, list)
        assert len(found) == 1
        work.ran(found, now, now + 1.0)
        now += 1.0
        work.add(decode(step % 2), now)  # the other one comes just after this one has begun
    assert [at for at, one in enumerate(tried) if one] == [0, 9, 26]


def test_a_group_is_not_split_by_the_first_that_is_back() -> None:
    work = ready(decode(0), decode(1), decode(2))
    _, now = run(work, 0.0, 1.0)
    work.add(decode(1), now + 0.1)
    until = work.next(now + 0.1)
    assert until == pytest.approx(now + 0.12)
    work.add(decode(0), now + 0.11)
    assert work.next(now + 0.11) == until
    work.add(decode(2), now + 0.115)
    assert slots(work.next(now + 0.115)) == [0, 1, 2]


def test_whoever_does_not_come_back_is_waited_for_once_and_shortly() -> None:
    work = ready(decode(0), decode(1))
    _, now = run(work, 0.0, 1.0)
    work.add(decode(0), now + 0.1)
    assert work.next(now + 0.1) == pytest.approx(now + 0.12)
    taken, now = run(work, now + 0.12, 1.0)
    assert taken == [0]
    for _ in range(3):  # then it is known to be late, and at last to be gone
        work.add(decode(0), now + 0.1)
        taken, now = run(work, now + 0.1, 1.0)
        assert taken == [0]


def test_two_groups_where_one_would_do_become_one() -> None:
    """One stage: while one runs the other comes back; without a wait they would alternate for ever."""
    work = ready(decode(0))
    _, now = run(work, 0.0, 1.0)
    work.add(decode(1), 0.5)
    work.add(decode(0), now + 0.001)
    work.next(now)
    sizes = []
    for _ in range(4):
        found = work.next(now)
        while isinstance(found, float):  # what is away comes back a little later
            now += 0.001
            for slot in {0, 1} - {request.work.slot for request in work._decode}:
                work.add(decode(slot), now)
            found = work.next(now)
        work.ran(found, now, now + 1.0)
        now += 1.0
        sizes.append(len(found))
        for slot in slots(found):
            work.add(decode(slot), now + 0.001)
    assert sizes[-2:] == [2, 2]


def test_a_session_that_is_far_away_is_not_waited_for() -> None:
    work = ready(decode(0, ring=2), decode(1, ring=2))
    first, now = run(work, 0.0, 1.0)
    second, now = run(work, now, 1.0)
    work.add(decode(0, ring=2), now)
    assert (first, second) == ([0], [1])
    assert slots(work.next(now)) == [0]  # the other one is on the second stage, where it should be


def test_a_slot_given_to_another_session_tells_nothing_of_it() -> None:
    work = ready(decode(0), decode(1))
    _, now = run(work, 0.0, 1.0)
    work.forget(1)
    work.add(decode(0), now + 0.1)
    assert slots(work.next(now + 0.1)) == [0]
