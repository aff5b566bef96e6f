"""Random conversations on random routes while everything fails: no wrong token, no request without an end, nothing left.

Stages, links, pipelines and servings are the real ones, over the fake engine and bad networks, on trio's mock clock. A short
form runs by default; ``make test-chaos`` runs thousands of faults, from a new seed each time.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from chaos import sim_clients
from chaos.sim_world import Found
from chaos.simulation import Totals, run_episode

from dgr.client.replies import PendingReplies, PendingReply, ReplyKey, WorkReply
from dgr.client.route_client import RouteClient
from dgr.errors import DgrError
from dgr.stage.ledger import Lease, Ledger
from dgr.stage.scheduler import Scheduler
from dgr.wire.framing import Received

#: Faults of one long episode.
LONG = 200
#: Seconds between two words of how far it is.
EVERY = 30.0
#: Seeds of the default suite; 4 has flipped bits.
SHORT = ("1", "2", "4")


@pytest.mark.parametrize("seed", SHORT)
def test_nothing_is_wrong_late_or_left_for_a_while(seed: str) -> None:
    episode = run_episode(seed, 12)
    assert episode.world.faults.total() >= 12
    assert episode.world.answers.right > 5


@pytest.mark.slow
def test_a_seed_gives_the_same_events_every_time() -> None:
    first, again, other = run_episode("7", 8), run_episode("7", 8), run_episode("8", 8)
    assert (first.world.digest, first.steps) == (again.world.digest, again.steps)
    assert first.world.digest != other.world.digest


@pytest.mark.chaos
def test_nothing_is_wrong_late_or_left_after_thousands_of_faults(
    wanted: tuple[str | None, int], report: Callable[[object], None]
) -> None:
    seed, faults = wanted
    if seed is not None and "." in seed:  # one episode again, as a finding names it
        totals = Totals()
        totals.add(run_episode(seed, faults))
        report(totals)
        return
    seed = seed or str(secrets.randbelow(10**9))
    report(f"SEED={seed} FAULTS={faults}")
    totals, began, said = Totals(), time.monotonic(), time.monotonic()
    while totals.faults.total() < faults:
        totals.add(run_episode(f"{seed}.{totals.episodes}", LONG))
        if time.monotonic() > said + EVERY:
            said = time.monotonic()
            report(f"{totals.faults.total()} faults, {totals.right} tokens right, in {said - began:.0f} s")
    report(totals)
    assert totals.right + totals.not_judged == totals.tokens


# --- the oracles: each must see what it is there for ---


def found(seed: str = "7", faults: int = 40, **options: Any) -> str:
    with pytest.raises(Found) as caught:
        run_episode(seed, faults, **options)
    return str(caught.value)


@pytest.mark.slow
def test_a_wrong_token_after_a_change_of_route_is_found() -> None:
    """The mutant: one of several stages of the same layers runs other weights than it says."""
    assert ": wrong" in found(lying=("4:6#c",), faults=80)


@pytest.mark.slow
def test_a_leaked_session_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: one in twenty leases is not given back."""
    releases, release = [0], Ledger.release

    def forgetful(ledger: Ledger, lease: Lease) -> None:
        releases[0] += 1
        if releases[0] % 20:
            release(ledger, lease)

    monkeypatch.setattr(Ledger, "release", forgetful)
    assert "is not idle" in found()


@pytest.mark.slow
def test_a_slot_that_is_not_cleared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: what a session leaves in its slot stays there."""

    async def nothing(_scheduler: Scheduler, _slot: int) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Scheduler, "clear", nothing)
    assert "of nobody" in found()


@pytest.mark.slow
def test_a_request_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: work in flight is not told that its session is lost, and is waited for without a deadline."""
    wait, resolve = PendingReply.wait, PendingReplies.resolve

    async def patient(reply: PendingReply, seconds: float, what: str) -> Any:
        return await wait(reply, math.inf if "work frame" in what else seconds, what)

    def deaf(replies: PendingReplies, key: ReplyKey, value: Received | DgrError) -> bool:
        return not (isinstance(key, WorkReply) and isinstance(value, DgrError)) and resolve(replies, key, value)

    monkeypatch.setattr(PendingReply, "wait", patient)
    monkeypatch.setattr(PendingReplies, "resolve", deaf)
    monkeypatch.setattr(sim_clients, "commit_deadline", lambda: 60.0)
    assert "never ended" in found("9", 100)


@pytest.mark.slow
def test_a_leaked_descriptor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a change of route forgets to close a file."""
    opened: list[int] = []
    change: Callable[..., Awaitable[None]] = RouteClient.change

    async def careless(client: RouteClient, *args: Any) -> None:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        await change(client, *args)

    monkeypatch.setattr(RouteClient, "change", careless)
    try:
        assert "descriptor of /dev/null is left" in found()
    finally:
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.slow
def test_a_leaked_task_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a change of route leaves a task behind."""
    change: Callable[..., Awaitable[None]] = RouteClient.change

    async def careless(client: RouteClient, *args: Any) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep, 1e9)
        await change(client, *args)

    monkeypatch.setattr(RouteClient, "change", careless)
    assert "tasks are left" in found()
