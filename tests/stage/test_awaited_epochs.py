"""Stages that wait for an epoch: each for so long as it would, and no flood of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import trio
from stage.test_traffic import link_with_pings
from trio.testing import MockClock

from dgr.errors import WireError
from dgr.stage import peers
from dgr.stage.peers import AwaitedEpochs
from dgr.stage.supervisor import EpochSupervisor
from dgr.wire.frames import AwaitReady
from dgr.wire.links import Link


def _wait(waits: AwaitedEpochs, link: Link, route: bytes, epoch: int) -> None:
    waits.wait(link, "before", AwaitReady(route, epoch), None)


def _at(route: bytes, epoch: int, predecessor: str = "before") -> EpochSupervisor:
    return cast("EpochSupervisor", SimpleNamespace(route=route, epoch=epoch, predecessor=predecessor))


async def test_a_wait_ends_with_its_epoch_its_link_or_its_time(autojump_clock: MockClock) -> None:
    waits = AwaitedEpochs(60.0)
    async with link_with_pings(0) as one, link_with_pings(0) as other:
        for epoch in (1, 2, 3):
            _wait(waits, one, b"a", epoch)
        _wait(waits, other, b"b", 1)
        waits.admitted(_at(b"a", 2))
        assert len(waits) == 2
        waits.left(other)
        assert len(waits) == 1
        waits.forget(_at(b"a", 2))
        assert len(waits) == 1
        await trio.sleep(40)
        _wait(waits, other, b"c", 1)
        await trio.sleep(30)
        assert len(waits) == 1
        waits.admitted(_at(b"c", 1, "another"))
        assert len(waits) == 0


async def test_too_many_waits_are_a_flood_unless_their_time_is_over(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_AWAITING", 3)
    waits = AwaitedEpochs(60.0)
    async with link_with_pings(0) as link:
        for route in (b"a", b"b", b"c"):
            _wait(waits, link, route, 1)
        with pytest.raises(WireError, match="3 stages wait"):
            _wait(waits, link, b"d", 1)
        await trio.sleep(61)
        _wait(waits, link, b"d", 1)
        assert len(waits) == 1
