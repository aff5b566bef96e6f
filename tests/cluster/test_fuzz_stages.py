"""Seeded peers that mean harm, over sockets, against stages that reach other stages; see also ``pipeline/test_fuzz``."""

from __future__ import annotations

import logging
import random

import pytest
import trio
from cluster.remote_stages import CONTEXT, HANDSHAKE, TWO, Host, client, connected, open_hosts, stage
from hostile import Talker, raw, talk
from msgspec.structs import replace

from dgr.cluster.connect import LinkPolicy
from dgr.core.route import LayerRange
from dgr.errors import DgrError
from dgr.testing.engines.fake import FakeEngine
from dgr.wire import frames, nurseries
from dgr.wire.handshake import exchange_preamble

POLICY = LinkPolicy(handshake=HANDSHAKE)


async def _attack(rng: random.Random, target: Host, names: list[str]) -> None:
    """One hostile connection: what a pipeline says, or a previous stage, until it hangs up."""
    talker = Talker(rng, target.engine.describe(), names)
    try:
        async with connected(target.address) as stream:
            await exchange_preamble(stream, HANDSHAKE)
            hello = client() if rng.random() < 0.8 else stage(rng.choice(names), rng.choice(["0:2", "2:6"]))
            await stream.send_all(raw(hello))
            await talk(stream, talker.next_bytes, rng, 40)
    except (DgrError, OSError, trio.BrokenResourceError):
        return


async def _fence_and_hang_up(rng: random.Random, target: Host, names: list[str]) -> None:
    """Have a stage reach one that refuses it, and be gone when the refusal comes."""
    async with connected(target.address) as stream:
        await exchange_preamble(stream, HANDSHAKE)
        fence = frames.Fence(rng.randbytes(16), 1, rng.choice(["a", "127.0.0.1:7"]), "", rng.choice(names))
        await stream.send_all(raw(client()) + raw(fence))
        for _ in range(rng.randrange(120)):
            await trio.lowlevel.checkpoint()


async def _besiege(seed: int, rounds: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What went wrong in the stages; nothing, if they serve as before."""
    rng = random.Random(seed)
    async with open_hosts(POLICY) as hosts:
        stages = await hosts.start_all(TWO)
        other = FakeEngine(LayerRange(2, 6), replace(CONTEXT, n_ctx=64))
        refusing = [(await hosts.start("", engine=other)).address, (await hosts.start("4:6")).address]
        names = [*refusing, *(host.address for host in stages), "127.0.0.1:1", "nowhere"]
        for _ in range(rounds):
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_attack, rng, rng.choice(stages), names)
                    for _ in range(3):
                        nursery.start_soon(_fence_and_hang_up, rng, stages[0], refusing)
            wrong = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
            if wrong:
                return wrong
        await hosts.assert_serving(stages)
        return []


@pytest.mark.parametrize("seed", [1, 2])
async def test_stages_outlive_every_peer(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    assert await _besiege(seed, 25, caplog) == []


async def test_a_refusal_that_leaves_in_a_group_with_a_cancellation_is_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: an error beside a cancellation is not a lone error, so that whoever waits for it does not know it."""

    right = nurseries._lone

    def lone(group: BaseExceptionGroup, block: BaseException | None) -> BaseException | None:
        found = right(group, block)
        beside = group.subgroup(trio.Cancelled)
        return found if beside is None or isinstance(found, trio.Cancelled) else None

    monkeypatch.setattr(nurseries, "_lone", lone)
    assert await _besiege(1, 400, caplog)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 110))
async def test_stages_outlive_every_peer_for_longer(caplog: pytest.LogCaptureFixture, seed: int) -> None:
    assert await _besiege(seed, 400, caplog) == []
