"""Draining over sockets: who may ask, what is told, and that a stage under load empties without a wrong token."""

from __future__ import annotations

import json

import pytest
import trio
from cluster.remote_stages import PROMPT, TIMEOUTS, TWO, Authority, answer_of, open_hosts, reference
from conversations import take
from serving.monitor.scrapes import get, scrape

from dgr.cluster.connect import LinkPolicy
from dgr.cluster.occupancy import drain, open_asking, take_back
from dgr.errors import DeadlineExceeded, LinkBroken, StageDraining
from dgr.serving.monitor.endpoint import open_endpoint
from dgr.serving.monitor.stage import StageMonitor
from dgr.wire.frames import Drain, Occupancy


async def test_a_stage_empties_and_says_so(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        head, tail = await hosts.start_all(TWO)
        spare = await hosts.start("2:6")
        told: list[Occupancy] = []
        monitor = StageMonitor()
        async with (
            open_endpoint("127.0.0.1:0", monitor) as (at,),
            hosts.pipeline([head, tail], spares=hosts.route([spare]).stages) as pipeline,
        ):
            monitor.opened(tail.shard, tail.server)
            assert (await get(at, "/ready"))[0] == 200
            async with pipeline.session() as session:
                answer = session.generate(PROMPT, max_tokens=16)
                text = await take(answer, 4)
                empty = await drain(tail.address, policy, seconds=10, idle=5, tell=told.append)
                assert (empty.draining, empty.routes, empty.sessions) == (True, 0, 0)
                text += await take(answer)
                assert text == reference(count=16)
            assert told[-1] == empty
            status, body = await get(at, "/ready")
            assert (status, json.loads(body)["reason"]) == (503, "the stage is being drained")
            assert (await get(at, "/health"))[0] == 200
            seen = await scrape(at)
            assert (seen("dgr_stage_draining"), seen("dgr_stage_ready")) == (1, 0)
            assert pipeline.route.stages[1].address == spare.address
            assert not (await take_back(tail.address, policy)).draining
            assert (await get(at, "/ready"))[0] == 200
        await hosts.assert_serving([head, tail])


async def test_a_stage_that_does_not_answer_takes_no_longer_than_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgr.cluster.occupancy._FIRST", 0.1)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"  # the kernel takes connections, and nobody answers
        with (
            trio.fail_after(5),
            pytest.raises(DeadlineExceeded, match=r"has not answered within 0\.2 s, and may not have"),
        ):
            await drain(address, LinkPolicy(), seconds=0.2, idle=0)


async def test_what_is_left_after_the_time_is_told_and_the_stage_stays_drained() -> None:
    async with open_hosts() as hosts:
        (whole,) = await hosts.start_all(("0:6",))
        async with hosts.pipeline([whole]) as pipeline, pipeline.session() as session:
            answer = session.generate(PROMPT, max_tokens=8)
            text = await take(answer, 4)
            with pytest.raises(DeadlineExceeded, match=r"still holds 1 sessions after 0\.3 s\. It stays drained"):
                await drain(whole.address, hosts.policy, seconds=0.3, idle=60)
            assert text + await take(answer) == reference(count=8)
            with pytest.raises(StageDraining):
                async with hosts.pipeline([whole]):
                    pytest.fail("it was taken")


async def test_whoever_may_be_a_client_may_ask_and_nobody_else(authority: Authority, tmp_path: object) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        (whole,) = await hosts.start_all(("0:6",))
        async with open_asking(whole.address, authority.policy("anyone"), "a client") as ask:
            assert (await ask(Drain(None))).draining is False
        stranger = Authority(authority.ca.parent / "other").policy("anyone")
        with pytest.raises(LinkBroken, match="certificate"):
            await drain(whole.address, stranger, seconds=1, idle=0)
        assert not whole.shard.draining.is_on


async def test_asking_changes_nothing_and_counts_what_is_there() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with (
            hosts.pipeline([head, tail], timeouts=TIMEOUTS) as pipeline,
            open_asking(tail.address, hosts.policy, "a test") as ask,
            pipeline.session() as session,
            pipeline.session() as prefilled,
        ):
            await take(session.generate(PROMPT, max_tokens=2))
            await prefilled.prefill(PROMPT)
            seen = await ask(Drain(None))
            assert (seen.draining, seen.routes, seen.sessions, seen.prefilling) == (False, 1, 2, 1)
            assert seen.batch_running_ms == 0
        async with hosts.pipeline([head, tail]) as pipeline:
            with trio.fail_after(10):
                assert await answer_of(pipeline) == reference()
