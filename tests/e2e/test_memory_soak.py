"""Sessions come and go at random points, and the process does not grow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from e2e.running import Open
from e2e.soaking import PER_HUNDRED, course, growth
from fixture_types import Model, Prompt

#: Bytes of resident memory that a hundred of thousands of sessions may leave behind: what an allocator's noise is.
SLOPE = 64 << 10


@pytest.mark.slow
async def test_300_sessions_leave_nothing_behind(model: Model, prompt: Prompt, open_stages: Open) -> None:
    grown = await growth(open_stages, model("f32", layers=5), prompt, 300)
    assert sum(grown.windows) / 3 < PER_HUNDRED, grown
    assert min(grown.fates.values()) > 20


@pytest.mark.slow
async def test_60_sessions_leave_nothing_behind(model: Model, prompt: Prompt, open_stages: Open) -> None:
    grown = await growth(open_stages, model("f32", layers=5), prompt, 60)
    assert grown.steady < PER_HUNDRED, grown


@pytest.mark.slow
async def test_a_leak_is_caught(model: Model, prompt: Prompt, open_stages: Open) -> None:
    leaked: list[bytes] = []
    grown = await growth(
        open_stages, model("f32", layers=5), prompt, 30, lambda: leaked.append(random.randbytes(100_000))
    )
    assert grown.steady > PER_HUNDRED, grown


@pytest.mark.chaos
async def test_2000_sessions_leave_everything_flat(
    model: Model, prompt: Prompt, open_stages: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = await course(open_stages, model("f32", layers=5), prompt, int(os.environ.get("DGR_SOAK") or 2000), 100)
    with capsys.disabled():
        print(f"\n{seen.sessions[-1]} sessions: {seen.slope:.0f} bytes of resident memory for a hundred; {seen.fates}")
    assert seen.grown() == []
    assert abs(seen.slope) < SLOPE, seen
    assert min(seen.fates.values()) > seen.sessions[-1] // 20


def _descriptor(kept: list[int]) -> Callable[[], None]:
    def leak() -> None:
        kept.append(os.open(os.devnull, os.O_RDONLY))

    return leak


@pytest.mark.chaos
async def test_leaks_too_small_for_a_short_soak_are_caught(model: Model, prompt: Prompt, open_stages: Open) -> None:
    """The mutants: 4 KiB for every session, which is six times the bound for a hundred; one descriptor for every session."""
    leaked: list[bytes] = []
    path = model("f32", layers=5)
    seen = await course(open_stages, path, prompt, 100, 20, lambda: leaked.append(random.randbytes(4096)), warm=60)
    assert seen.slope > SLOPE, seen
    kept: list[int] = []
    try:
        seen = await course(open_stages, path, prompt, 10, 5, _descriptor(kept), warm=1)
    finally:
        for descriptor in kept:
            os.close(descriptor)
    assert any(said.startswith("descriptors") for said in seen.grown())
