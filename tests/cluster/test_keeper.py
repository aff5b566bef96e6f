"""The keeper of a stage's process: a small process stands for it, and a stage in this one answers at its address."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import trio
from attrs import evolve
from cluster.remote_stages import Authority, Hosts, open_hosts

from dgr.cluster.connect import LinkPolicy
from dgr.cluster.keeper import Keeper
from dgr.cluster.upkeep import Patience
from dgr.core.route import StageRef
from dgr.testing.waits import until

#: A process that is ready at once, and ends in good order when it is told to.
READY = [sys.executable, "-I", "-S", "-c", "import time; print(1, flush=True); time.sleep(1000)"]
#: One that never is, and does nothing.
SILENT = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
PATIENCE = Patience(silence=0.3, loading=0.4)


class Told:
    """What was told of a stage."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, ref: StageRef, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [facts for one, facts in self.events if one == event]


@asynccontextmanager
async def kept(hosts: Hosts, policy: LinkPolicy, command: list[str]) -> AsyncIterator[tuple[Keeper, Told]]:
    whole = await hosts.start("0:6")
    told = Told()
    keeper = Keeper(StageRef(whole.address, whole.layers), command, policy, PATIENCE, told)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        yield keeper, told
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_stage_that_does_not_answer_is_killed_and_started_again() -> None:
    async with open_hosts() as hosts, kept(hosts, hosts.policy, READY) as (keeper, told):
        await until(lambda: keeper.occupancy is not None)
        await trio.sleep(2 * PATIENCE.silence)
        assert [event for event, _ in told.events] == ["ready"]
        await hosts.running[0].kill()
        await until(lambda: told.of("ended"))
        assert "has not answered for" in told.of("frozen")[0]["why"]
        assert told.of("ended")[0]["code"] == -signal.SIGKILL
        await until(lambda: len(told.of("ready")) == 2)
        assert told.of("ready")[0]["pid"] != told.of("ready")[1]["pid"]


@pytest.mark.slow
async def test_whoever_refuses_to_answer_is_alive(authority: Authority) -> None:
    """A stage whose certificate has expired, or that holds all its links, is not started again for that."""
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        plain = LinkPolicy(handshake=hosts.policy.handshake)
        expired = evolve(plain, credentials=authority.credentials("up", days=(-9, -1)))
        for policy in (plain, expired):
            async with kept(hosts, policy, READY) as (keeper, told):
                await until(lambda told=told: told.of("ready"))  # type: ignore[misc]
                await trio.sleep(2 * PATIENCE.silence)
                assert [event for event, _ in told.events] == ["ready"]
                assert keeper.occupancy is None


async def test_a_certificate_for_other_names_is_told_once_with_the_way_out(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """What `dgr up` does with a client's certificate: every stage is ready, and nobody can reach it."""
    async with open_hosts(authority.policy("client")) as hosts, kept(hosts, hosts.policy, READY) as (_, told):
        await until(lambda: told.of("unreachable"))
        await trio.sleep(2 * PATIENCE.silence)
        assert [event for event, _ in told.events] == ["ready", "unreachable"]
        why = told.of("unreachable")[0]["why"]
        assert "for other names: " in why
        assert "its certificate is that of --tls-cert, or of [tls] in the route file" in why
        assert f"no client can reach it: {why}" in caplog.text


async def test_a_process_that_loads_and_does_nothing_is_killed() -> None:
    async with open_hosts() as hosts, kept(hosts, hosts.policy, SILENT) as (_, told):
        await until(lambda: told.of("ended"))
        assert "it has loaded nothing and computed nothing" in told.of("frozen")[0]["why"]


async def test_a_stopped_process_is_restarted_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hear that it is to end; it is killed after its time of grace."""
    monkeypatch.setattr("dgr.cluster.keeper._GRACE", 0.1)
    async with open_hosts() as hosts, kept(hosts, hosts.policy, READY) as (keeper, told):
        await until(lambda: told.of("ready"))
        await keeper.restart()
        assert told.of("ended") == [{"code": -signal.SIGTERM, "again_in_seconds": 0.0}]
        stopped = psutil.Process(told.of("ready")[1]["pid"])
        os.kill(stopped.pid, signal.SIGSTOP)
        await until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        await keeper.restart()
        assert told.of("ended")[1] == {"code": -signal.SIGKILL, "again_in_seconds": 0.0}
        assert len(told.of("ready")) == 3
