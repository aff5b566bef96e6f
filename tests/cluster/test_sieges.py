"""Thousands of hostile connections to a stage: afterwards it answers as before and holds what it held, no more."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
import trio
from cluster import remote_stages
from cluster.remote_stages import Authority, Host, Hosts, open_hosts
from cluster.sieges import KINDS, besiege

from dgr.cluster.connect import LinkPolicy
from dgr.cluster.server import StageServer
from dgr.errors import DeadlineExceeded, LinkBroken
from dgr.testing.waits import until
from dgr.wire.links import Link
from dgr.wire.nurseries import open_nursery

#: Seconds for each step of a handshake; strangers hold their place for so long.
SHORT = 0.2
#: Bytes by which this process, which holds both sides, may have grown in the end.
GROWTH = 48 << 20


async def _nobody(own: str, successor: str) -> Link:
    raise LinkBroken(f"{own} reaches nobody, and not {successor}")


@asynccontextmanager
async def standing(hosts: Hosts, caplog: pytest.LogCaptureFixture, seconds: float = 20.0) -> AsyncIterator[Host]:
    """A stage that is as idle after the block as before, and answers the same."""
    caplog.set_level(logging.ERROR)
    whole = await hosts.start("0:6", dial=_nobody)
    await hosts.assert_serving([whole])
    process = psutil.Process()
    gc.collect()
    descriptors, tasks = process.num_fds(), trio.lowlevel.current_statistics().tasks_living
    resident = process.memory_info().rss
    yield whole
    await until(lambda: whole.server.statistics().links + whole.server.statistics().handshaking == 0, 60)
    await until(lambda: process.num_fds() <= descriptors, seconds, f"{descriptors} descriptors")
    await until(lambda: trio.lowlevel.current_statistics().tasks_living <= tasks, seconds, f"{tasks} tasks")
    await hosts.assert_serving([whole])
    gc.collect()
    assert process.memory_info().rss - resident < GROWTH
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("how", ["plain", "tls"])
async def test_a_stage_outlives_every_kind_of_stranger(
    how: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    policy = LinkPolicy(handshake=SHORT) if how == "plain" else authority.policy("127.0.0.1", handshake=SHORT)
    async with open_hosts(policy) as hosts, standing(hosts, caplog) as whole:
        done = await besiege(whole, 1, 4 * len(KINDS), policy.credentials)
        assert set(done) == set(KINDS)


@pytest.mark.fuzz
@pytest.mark.parametrize(("how", "seed", "count"), [("plain", 10, 7500), ("plain", 11, 7500), ("tls", 12, 6000)])
async def test_a_stage_outlives_thousands_of_strangers(
    how: str,
    seed: int,
    count: int,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_stages, "HANG", 1800)
    policy = LinkPolicy(handshake=SHORT) if how == "plain" else authority.policy("127.0.0.1", handshake=SHORT)
    async with open_hosts(policy) as hosts, standing(hosts, caplog) as whole:
        done = await besiege(whole, seed, count, policy.credentials)
        print(f"{how}, seed {seed}:", ", ".join(f"{kind} {number}" for kind, number in done.items()))
        print("taken for links:", whole.server.statistics().accepted, "refused:", whole.server.statistics().refused)
        assert sum(done.values()) == count


async def test_a_stage_that_keeps_what_strangers_began_would_be_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a task for every connection, which outlives it."""
    take = StageServer._take
    async with open_hosts(LinkPolicy(handshake=SHORT)) as hosts, open_nursery() as kept:

        async def leaking(self: StageServer, stream: trio.SocketStream) -> None:
            kept.start_soon(trio.sleep_forever)
            await take(self, stream)

        monkeypatch.setattr(StageServer, "_take", leaking)
        with pytest.raises(DeadlineExceeded, match="tasks"):
            async with standing(hosts, caplog, seconds=0.5) as whole:
                await besiege(whole, 1, len(KINDS))
        kept.cancel_scope.cancel()
