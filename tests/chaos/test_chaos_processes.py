"""Processes in a storm: killed, stopped, cut off, over TLS with flipped bits and expired certificates. Minutes of it."""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from chaos.simulation import held, own_temporary_folder
from chaos.storm import expected_of, open_storm, wrong_at
from fixture_types import Prompt

from dgr.errors import DeadlineExceeded
from dgr.testing.waits import until

#: Seconds of storm, by default.
SECONDS = 120.0


def test_an_answer_that_parts_from_the_undisturbed_one_is_seen() -> None:
    assert wrong_at([], [5, 6]) is None
    assert wrong_at([5, 6], [5, 6]) is None
    assert wrong_at([5, 7], [5, 6]) == 1
    assert wrong_at([5, 6, 7], [5, 6]) == 2


@pytest.mark.chaos
async def test_processes_in_a_storm_say_nothing_wrong_and_leave_nothing(
    small: Path, prompt: Prompt, tmp_path: Path, wanted: tuple[str | None, int], report: Callable[[object], None]
) -> None:
    seed = wanted[0] or str(secrets.randbelow(10**9))
    seconds = float(os.environ.get("DGR_CHAOS_SECONDS") or SECONDS)
    report(f"SEED={seed} SECONDS={seconds:g}")
    dice = random.Random(seed)
    prompts = [prompt(dice.choice((5, 20, 40)), seed=index) for index in range(8)]
    expected = await expected_of(small, prompts)
    with own_temporary_folder():
        await _storm(small, tmp_path, seed, seconds, prompts, expected, report)


async def _storm(
    model: Path,
    folder: Path,
    seed: str,
    seconds: float,
    prompts: list[list[int]],
    expected: list[list[int]],
    report: Callable[[object], None],
) -> None:
    before = held()
    async with open_storm(model, folder, seed) as storm:
        async with trio.open_nursery() as nursery:
            for name in ("one", "two"):
                nursery.start_soon(storm.clients, prompts, expected, name)
            await storm.rage(seconds, 0.5)
        await storm.check_calm(prompts, expected)
        storm.count_codes()
    report(
        f"{storm.faults.total()} faults: {dict(storm.faults)}\n{storm.tokens} tokens of {storm.answers} whole answers,"
        f" {storm.given_up} given up; errors: {dict(storm.errors)}; slowest token {storm.slowest:.1f} s;"
        f" stages ended with {dict(storm.codes)}"
    )
    assert storm.wrong == []
    with suppress(DeadlineExceeded):
        await until(lambda: held() == before)
    assert held() - before == Counter()
    assert storm.answers > 0
