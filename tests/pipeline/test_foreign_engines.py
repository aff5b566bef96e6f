"""What an engine that is not ours returns is checked where it comes in: its session is lost, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from conversations import reference
from pipeline.harness import WHOLE, open_stages

from dgr.core.values import LogitsWanted, TopLogprob
from dgr.testing.raw_client import open_raw_client
from dgr.wire import frames

DRAWN: dict[str, Any] = {
    "drew token 257,": (257, ()),
    "drew token -1,": (-1, ()),
    "drew token 1.0,": (1.0, ()),
    "drew token None,": (None, ()),
    "drew token 300,": (5, (TopLogprob(300, -1.0),)),
    "returned 65 candidates": (5, (TopLogprob(1, -1.0),) * 65),
}


@pytest.mark.parametrize("problem", DRAWN)
async def test_a_token_that_no_reply_can_hold_loses_its_session_alone(
    problem: str, autojump_clock: trio.abc.Clock
) -> None:
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as client:
        await client.begin()
        await client.say(client.open(2, 1))
        engine = stages.engines[WHOLE]
        sample = engine.sample
        engine.sample = lambda *_: DRAWN[problem]  # type: ignore[method-assign]
        (reply,) = await client.say(client.work(1, 2, [1, 2]))
        engine.sample = sample  # type: ignore[method-assign]
        assert isinstance(reply, frames.Refused)
        assert (reply.code, reply.key.session) == (frames.Refusal.ENGINE, 1)
        assert problem in reply.message
        (token,) = await client.say(client.work(2, 2, [1, 2]))
        assert isinstance(token, frames.Token)
        assert [token.token] == reference([1, 2], 1)


@pytest.mark.parametrize("rows", [0, 1, 3])
async def test_logits_of_another_size_lose_their_session(rows: int, autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, open_raw_client(stages.cluster.connect, stages.route(WHOLE)) as client:
        await client.begin()
        engine = stages.engines[WHOLE]
        run = engine.run

        def resized(batch: Any) -> Any:
            (output,) = run(batch)
            output = type(output)(output.slot, None, bytes(4 * 257 * rows))
            return [output]

        engine.run = resized  # type: ignore[method-assign]
        work = client.work(1, 2, [1, 2], logits=LogitsWanted.ALL, sampling=None)
        (reply,) = await client.say(work)
        assert isinstance(reply, frames.Refused)
        assert f"returned {4 * 257 * rows} bytes of logits; what was wanted of it is {4 * 257 * 2}" in reply.message
