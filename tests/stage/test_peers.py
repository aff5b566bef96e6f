"""Stages that wait for an epoch: each for so long as it would, and no flood of them."""

from __future__ import annotations

import pytest
import trio
from stage.test_traffic import link_with_pings
from trio.testing import MockClock

from dgr.errors import WireError
from dgr.stage import peers
from dgr.stage.peers import Waits


async def test_a_wait_ends_with_its_epoch_its_link_or_its_time(autojump_clock: MockClock) -> None:
    waits = Waits(60.0)
    async with link_with_pings(0) as one, link_with_pings(0) as other:
        for epoch in (1, 2, 3):
            waits.add(b"a", epoch, "before", one)
        waits.add(b"b", 1, "before", other)
        assert waits.take(b"a", 2, "another") is None
        assert waits.take(b"a", 2, "before") is one
        waits.forget(b"a", 2)
        assert len(waits) == 2
        waits.leave(other)
        assert len(waits) == 1
        await trio.sleep(40)
        waits.add(b"c", 1, "before", other)
        await trio.sleep(30)
        assert (len(waits), waits.take(b"c", 1, "before")) == (1, other)


async def test_too_many_waits_are_a_flood_unless_their_time_is_over(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_WAITS", 3)
    waits = Waits(60.0)
    async with link_with_pings(0) as link:
        for route in (b"a", b"b", b"c"):
            waits.add(route, 1, "before", link)
        with pytest.raises(WireError, match="3 stages wait"):
            waits.add(b"d", 1, "before", link)
        await trio.sleep(61)
        waits.add(b"d", 1, "before", link)
        assert len(waits) == 1
