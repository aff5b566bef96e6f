"""Restarts and signs of life, as decisions with given times."""

from __future__ import annotations

import pytest

from dgr.cluster.upkeep import Patience, RestartPolicy, Vitals

# --- starting again ---


def test_refused_arguments_are_final_at_the_first_start_alone() -> None:
    assert RestartPolicy().ended(2, None) is None
    for before in (0, 1, -9):
        policy = RestartPolicy()
        assert policy.ended(before, None) is not None
        assert policy.ended(2, None) is not None
    assert RestartPolicy().ended(2, 1.0) is not None  # it had taken its arguments


def test_pauses_grow_up_to_a_bound_and_begin_anew_after_a_good_while() -> None:
    policy = RestartPolicy()
    pauses = [policy.ended(1, None) for _ in range(9)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    assert policy.ended(-9, 29.0) == 10.0
    assert [policy.ended(-9, 30.0), policy.ended(-9, None)] == [0.2, 0.4]


def test_minutes_of_loading_are_no_good_while() -> None:
    """What dies when its weights are read would be started without a pause for ever."""
    policy = RestartPolicy()
    assert [policy.ended(-9, None) for _ in range(3)] == [0.2, 0.4, 0.8]


def test_an_end_that_was_wished_for_costs_no_pause() -> None:
    policy = RestartPolicy()
    assert [policy.ended(1, None), policy.ended(0, 5.0, wanted=True), policy.ended(1, None)] == [0.2, 0.0, 0.2]


# --- signs of life ---

EVERY = 1.0


def verdicts(vitals: Vitals, *times: float) -> list[bool]:
    return [vitals.verdict(now, EVERY) is not None for now in times]


def test_a_stage_that_does_not_answer_is_frozen() -> None:
    vitals = Vitals(Patience(silence=3), 0.0)
    vitals.ready(0.0)
    assert verdicts(vitals, 1, 2, 3, 4) == [False, False, False, True]
    vitals.heard(4.0)
    assert verdicts(vitals, 5, 6, 7) == [False] * 3


def test_whoever_was_stopped_itself_blames_nobody() -> None:
    """A machine that slept, or a terminal that stopped the whole group: the time in which nobody asked does not count."""
    vitals = Vitals(Patience(silence=3), 0.0)
    vitals.ready(0.0)
    assert verdicts(vitals, 1, 500, 501, 502) == [False, False, False, True]


def test_a_stage_that_loads_is_alive_as_long_as_it_does_something() -> None:
    vitals = Vitals(Patience(silence=3, loading=10), 0.0)
    for second in range(1, 100):
        vitals.worked(("cpu", second // 5), float(second))
        assert vitals.verdict(second, EVERY) is None
    assert [vitals.verdict(float(second), EVERY) is None for second in range(100, 110)] == [True] * 6 + [False] * 4


def test_work_does_not_speak_for_a_stage_that_is_ready() -> None:
    vitals = Vitals(Patience(silence=3), 0.0)
    vitals.ready(0.0)
    for second in range(1, 4):
        vitals.worked(second, float(second))
        assert vitals.verdict(second, EVERY) is None
    assert vitals.verdict(4, EVERY) is not None


@pytest.mark.parametrize(
    ("running", "longest", "hangs"),
    [
        (119, 0.01, False),  # less than anything is given
        (121, 0.01, True),
        (121, 7, False),  # batches here are long
        (141, 7, True),
        (899, 0, False),  # the first one of all may take whatever it takes
        (901, 0, True),
        (0, 1000, False),
    ],
)
def test_a_batch_hangs_by_what_was_seen_before(running: float, longest: float, hangs: bool) -> None:
    vitals = Vitals(Patience(), 0.0)
    vitals.ready(0.0)
    vitals.heard(0.5, running, longest)
    assert (vitals.verdict(1.0, EVERY) is not None) == hangs
