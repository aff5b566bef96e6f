"""What a stage tells an operator: figures that agree with what it did, and whether it takes links."""

from __future__ import annotations

import json

from cluster.remote_stages import CONTEXT, PROMPT, TWO, answer_of, client, greeted, open_hosts, reference
from conversations import take
from serving.monitor.scrapes import get, scrape, watched

from dgr.cluster.connect import LinkPolicy
from dgr.core.log_fields import short_route
from dgr.serving.monitor.endpoint import open_endpoint
from dgr.serving.monitor.stage import StageMonitor
from dgr.testing.waits import until
from dgr.wire.frames import Fence, Fenced


async def test_the_figures_are_those_of_what_was_done() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with (
            watched(head) as (_, at_head),
            watched(tail) as (_, at_tail),
            hosts.pipeline([head, tail]) as pipeline,
        ):
            async with pipeline.session() as session:
                answer = await take(session.generate(PROMPT, max_tokens=12))
                assert answer == reference()
                for host, address in ((head, at_head), (tail, at_tail)):
                    seen = await scrape(address)
                    done = sum(seen.all("dgr_stage_batch_tokens_sum"))
                    assert done == host.engine.tokens_run == len(PROMPT) + len(answer) - 1
                    assert seen("dgr_stage_batch_tokens_count", kind="decode") >= len(answer) - 1
                    for name in ("tokens", "seconds", "wait_seconds"):
                        for kind in ("decode", "prefill"):
                            family = f"dgr_stage_batch_{name}"
                            assert seen(f"{family}_bucket", kind=kind, le="+Inf") == seen(f"{family}_count", kind=kind)
                    assert (seen("dgr_stage_sessions"), seen("dgr_stage_slots_leased")) == (1, 1)
                    assert seen("dgr_stage_slots") == CONTEXT.n_seq_max
                    assert seen("dgr_stage_route_epoch", route=short_route(pipeline.route_id)) == pipeline.epoch == 1
                    memory = host.engine.memory()
                    assert seen("dgr_stage_weights_bytes") == memory.weights
                    for component, size in memory.state.items():
                        assert seen("dgr_stage_state_bytes", component=component) == size
                        leased = seen("dgr_stage_state_leased_bytes", component=component)
                        assert leased == size // CONTEXT.n_seq_max
                    assert seen("process_resident_memory_bytes") > 1 << 20
                    assert seen("dgr_stage_info", layers=str(host.layers), numerics="exact") == 1
            await until(lambda: not tail.shard.statistics().sessions)
            assert (await scrape(at_tail))("dgr_stage_slots_leased") == 0


async def test_what_one_stage_sends_the_next_one_receives_and_ended_links_still_count() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with watched(head) as (_, at_head), watched(tail) as (_, at_tail):
            heard = []
            for _ in range(2):
                async with hosts.pipeline([head, tail]) as pipeline:
                    await answer_of(pipeline)
                await until(lambda: head.server.statistics().links == 0)
                heard.append(
                    (await scrape(at_head))("dgr_stage_link_bytes_total", side="pipeline", direction="received")
                )
            assert heard[0] > len(PROMPT)
            assert heard[1] > 1.9 * heard[0]
            sending, receiving = await scrape(at_head), await scrape(at_tail)
            out = {"side": "next", "peer": tail.address, "direction": "sent"}
            back = {"side": "previous", "peer": head.address, "direction": "received"}
            for name in ("dgr_stage_link_bytes_total", "dgr_stage_link_frames_total"):
                assert 0 < sending(name, **out) <= receiving(name, **back) + 1  # Hello is counted by one of them
            assert sending("dgr_stage_links_accepted_total") == 2


async def test_an_idle_link_tells_its_round_trip() -> None:
    async with open_hosts(LinkPolicy(heartbeat=0.05)) as hosts:
        (whole,) = await hosts.start_all(("0:6",))
        async with watched(whole) as (_, address), hosts.pipeline([whole]):
            await until(lambda: any(one.round_trip for one in whole.server.statistics().traffic.values()))
            assert 0 < (await scrape(address))("dgr_stage_link_round_trip_seconds", side="pipeline") < 20


async def test_alive_is_not_able() -> None:
    async with open_hosts() as hosts:
        host, monitor = await hosts.start("0:6"), StageMonitor()
        async with open_endpoint("127.0.0.1:0", monitor) as (address,):
            assert await _ready(address) == (503, "the weights are being loaded")
            early = await scrape(address)
            assert early("dgr_stage_ready") == 0
            assert early("process_resident_memory_bytes") > 1 << 20
            monitor.opened(host.shard, host.server)
            assert await _ready(address) == (200, None)
            assert (await scrape(address))("dgr_stage_ready") == 1
            monitor.ending()
            assert await _ready(address) == (503, "the stage is about to end")
            assert (await get(address, "/health"))[0] == 200


async def _ready(address: str) -> tuple[int, str | None]:
    status, text = await get(address, "/ready")
    return status, json.loads(text).get("reason")


async def test_a_page_of_another_site_learns_nothing() -> None:
    async with open_endpoint("127.0.0.1:0", StageMonitor()) as (address,):
        for path in ("/metrics", "/health", "/ready"):
            status, text = await get(address, path, host="evil.example")
            assert (status, "give --metrics an address" in text, "--api-key-file" in text) == (403, True, False)
        assert (await get(address, "/v1/models"))[0] == 404


async def test_route_sessions_that_begin_alike_are_one_series() -> None:
    """Ids are the pipelines' choice: two equal series would have the whole scrape refused."""
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        async with watched(whole) as (_, address), greeted(whole.address, client()) as (link, _answer):
            for last in (1, 2):
                route = bytes(15) + bytes([last])
                link.send_nowait(Fence(route, last, whole.address, "", "", 1))
                assert isinstance((await anext(link)).frame, Fenced)
            seen = await scrape(address)
            assert seen("dgr_stage_routes") == 2
            assert seen.all("dgr_stage_route_epoch") == [2]
