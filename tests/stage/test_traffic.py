"""Counters of links: by side and peer, with those that ended, and bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dgr.core.load import Side
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.protocol.limits import limits_of
from dgr.stage import traffic
from dgr.stage.traffic import Traffic
from dgr.testing.engines.fake import FakeEngine
from dgr.wire.frames import Ping
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports

LIMITS = limits_of(FakeEngine(LayerRange(0, 6), ContextParams(n_ctx=96, n_batch=16, n_ubatch=8)).describe())


@asynccontextmanager
async def link_with_pings(count: int) -> AsyncIterator[Link]:
    near, _far = memory_transports()
    async with open_link(near, LIMITS) as link:
        for nonce in range(count):
            link.send_nowait(Ping(nonce + 1))
        yield link


async def test_a_link_counts_while_it_is_open_and_after_it() -> None:
    counted = Traffic()
    for before in (0, 3, 6):
        async with link_with_pings(3) as link:
            with counted.counting(Side.NEXT, "a:1", link):
                assert counted.statistics()[Side.NEXT, "a:1"].frames_sent == before + 3
        assert counted.statistics()[Side.NEXT, "a:1"].frames_sent == before + 3
    assert list(counted.statistics()) == [(Side.NEXT, "a:1")]


async def test_strangers_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_REMEMBERED", 3)
    counted = Traffic()
    for port in (1, 2, 3, 1, 4):  # the first is heard of again: the second is the oldest
        async with link_with_pings(1) as link:
            with counted.counting(Side.PREVIOUS, f"a:{port}", link):
                pass
    assert sorted(peer for _, peer in counted.statistics()) == ["a:1", "a:3", "a:4"]
