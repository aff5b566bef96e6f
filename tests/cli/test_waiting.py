"""Commands that wait for stages that are not up yet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from dgr.cli.pipelines import enter_waiting
from dgr.client.pipeline import Pipeline
from dgr.errors import InvalidRoute, LinkBroken
from dgr.testing.offline import open_fake_pipeline


@pytest.mark.parametrize(("seconds", "is_reached"), [(None, False), (5.0, False), (30.0, True)])
async def test_stages_are_waited_for_as_long_as_is_said(
    seconds: float | None, is_reached: bool, autojump_clock: MockClock
) -> None:
    began, tries = trio.current_time(), 0

    @asynccontextmanager
    async def opened() -> AsyncIterator[Pipeline]:
        nonlocal tries
        tries += 1
        if trio.current_time() < began + 10:
            raise LinkBroken("cannot connect")
        async with open_fake_pipeline() as offline:
            yield offline.pipeline

    async with AsyncExitStack() as stack:
        if is_reached:
            pipeline = await enter_waiting(stack, opened, seconds)
            assert pipeline.epoch == 1
            assert trio.current_time() - began < 11
            return
        with pytest.raises(LinkBroken):
            await enter_waiting(stack, opened, seconds)
        assert trio.current_time() - began <= (seconds or 0.0)
        assert (tries > 1) == (seconds is not None)


async def test_what_waiting_does_not_mend_is_said_at_once(autojump_clock: MockClock) -> None:
    def opened() -> AbstractAsyncContextManager[Pipeline]:
        raise InvalidRoute("other layers")

    async with AsyncExitStack() as stack:
        with pytest.raises(InvalidRoute):
            await enter_waiting(stack, opened, 60.0)
    assert trio.current_time() < 60
