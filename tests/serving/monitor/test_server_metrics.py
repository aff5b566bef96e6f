"""What a server counts agrees with what its clients saw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio
from cluster.remote_stages import open_hosts
from serving.http.http_servers import Server
from serving.monitor.scrapes import Scrape, scrape, watched

from dgr.client.events import FAILURE, EventHub, RePrefilled, RouteDown
from dgr.core.log_fields import short_route
from dgr.protocol.states import RouteState
from dgr.serving.api.prompts import Thinking
from dgr.serving.http import service
from dgr.serving.http.service import ServerOptions
from dgr.serving.metrics.stages import SeenStage, stage_metrics
from dgr.testing.waits import until

Serve = Callable[..., AbstractAsyncContextManager[Server]]


async def scraped(server: Server) -> Scrape:
    return Scrape.of((await server.ask("GET", "/metrics")).body.decode())


async def test_the_parts_of_an_answers_time_add_up(serve: Serve) -> None:
    async with serve() as server:
        usage = [(await server.chat(text)).json()["usage"] for text in ("hello", "good-bye")]
        seen = await scraped(server)
        part = {
            name: seen(f"dgr_{name}_sum")
            for name in (
                "time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                "request_decode_time_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
            )
        }  # fmt: skip
        first = part["request_queue_time_seconds"] + part["request_prefill_time_seconds"]
        assert part["time_to_first_token_seconds"] == pytest.approx(first)
        whole = part["time_to_first_token_seconds"] + part["request_decode_time_seconds"]
        assert part["e2e_request_latency_seconds"] == pytest.approx(whole)
        assert part["inter_token_latency_seconds"] <= part["request_decode_time_seconds"]
        assert seen("dgr_request_prompt_tokens_sum") == sum(one["prompt_tokens"] for one in usage)
        assert seen("dgr_request_generation_tokens_count") == 2
        assert seen("process_resident_memory_bytes") > 1 << 20


async def test_who_waits_for_a_slot_waits_in_the_queue(serve: Serve) -> None:
    async with serve(sessions=1) as server:
        server.model.hold()
        async with trio.open_nursery() as nursery:
            for text in ("first", "second"):
                nursery.start_soon(server.chat, text)
            await until(lambda: server.engine.line.waiting == 1)
            seen = await scraped(server)
            assert (seen("dgr_num_requests_running"), seen("dgr_num_requests_waiting")) == (1, 1)
            server.model.release()
        seen = await scraped(server)
        assert (seen("dgr_num_requests_running"), seen("dgr_num_requests_waiting")) == (0, 0)
        assert seen("dgr_request_queue_time_seconds_count") == 2
        at_once = seen("dgr_request_queue_time_seconds_bucket", le="0.01")
        assert at_once >= 1  # the first had its slot
        assert seen("dgr_request_queue_time_seconds_sum") > 0


async def test_a_route_that_changed_under_an_answer_is_counted(serve: Serve) -> None:
    async with serve() as server:
        pipeline, replies = server.engine.pipeline, []
        before = await scraped(server)
        assert before("dgr_route_state", state="live") == 1 == sum(before.all("dgr_route_state"))
        assert len(before.all("dgr_route_state")) == len(RouteState)
        assert before("dgr_route_info", route=short_route(pipeline.route_id)) == 1
        server.model.hold(after=2)

        async def ask() -> None:
            replies.append((await server.chat("an answer of several tokens")).json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: server.model.is_waiting)
            nursery.start_soon(pipeline.change_route, pipeline.route)
            await until(lambda: pipeline.epoch == 2)
            assert (await scraped(server))("dgr_route_state", state="fencing") == 1
            server.model.release()
        assert replies[0]["choices"][0]["message"]["content"] == "an answer of several tokens"
        seen = await scraped(server)
        assert seen("dgr_route_epoch") == before("dgr_route_epoch") + 1 == 2
        assert seen("dgr_re_prefills_total", reason="route change") == 1
        assert seen("dgr_re_prefilled_tokens_total", reason="route change") > replies[0]["usage"]["prompt_tokens"]
        assert sum(seen.all("dgr_re_prefills_total")) == 1


async def test_stages_without_a_port_of_their_own_are_told_of_by_their_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_FRESH", 0.0)
    options = ServerOptions(model="m", thinking=Thinking.OFF, stage_metrics=True)
    async with serve(options=options) as server:
        usage = (await server.chat("hello")).json()["usage"]
        shards = server.model.offline.cluster.shards
        seen = await scraped(server)
        for name, shard in shards.items():
            load = shard.load()
            prefill, decode = load.prefill.tokens.total, load.decode.tokens.total
            assert (prefill, decode) == (usage["prompt_tokens"], usage["completion_tokens"])
            assert seen("dgr_stage_batch_tokens_sum", stage=name, kind="prefill") == prefill
            assert seen("dgr_stage_batch_tokens_sum", stage=name, kind="decode") == decode
            assert seen("dgr_stage_slots", stage=name) == load.slots
            assert seen("dgr_stage_slots_leased", stage=name) == 1  # of the session that is kept
            assert seen("dgr_stage_info", stage=name, layers=str(shard.description.layers)) == 1
            assert seen.all("dgr_stage_link_frames_total", stage=name, side="pipeline", direction="sent")
        server.model.offline.cluster.stop("stage-1")
        await until(lambda: not server.engine.is_ready)
        assert len((await scraped(server)).all("dgr_stage_slots")) == 2
    async with serve() as server:
        assert not any(name.startswith("dgr_stage") for name in (await scraped(server)).samples)


async def test_whoever_asks_often_is_told_the_same_for_a_while(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FRESH", 1000.0)
    async with serve() as server:

        async def loads() -> list[dict[str, object]]:
            return [stage["load"] for stage in (await server.ask("GET", "/status")).json()["stages"]]

        assert await loads() == await loads() != [None] * 3


def test_a_server_and_a_stage_tell_the_same_of_a_stage() -> None:
    """But for what concerns its own port, and whether it is open at all."""

    async def run() -> tuple[set[str], set[str]]:
        async with open_hosts() as hosts:
            whole = await hosts.start("0:6")
            async with watched(whole) as (_, address), hosts.pipeline([whole]) as pipeline:
                loads = await pipeline.load()
                found = [
                    SeenStage(whole.shard.description, one, name) for name, one in loads.items() if one is not None
                ]
                ours = {family.name for family in stage_metrics(found)}
                own = {name for name in (await scrape(address)).helps if name.startswith("dgr_stage")}
                return ours, own

    ours, own = trio.run(run)
    assert own - ours == {
        "dgr_stage_ready",
        "dgr_stage_draining",
        *(f"dgr_stage_links{what}" for what in ("", "_handshaking", "_accepted", "_refused")),
    }
    assert ours <= own


def test_the_texts_of_errors_make_no_series() -> None:
    hub = EventHub()
    for reason in ("evicted", "stage a:1: cannot read", "stage b:2: closed", "diverged"):
        hub.emit(RePrefilled(1, reason, 10, 0.1))
    hub.emit(RouteDown(3, "stage a:1: cannot read"))
    assert hub.re_prefills == {"evicted": 1, FAILURE: 2, "diverged": 1}
    assert hub.re_prefilled_tokens[FAILURE] == 20
    assert hub.downs == 1
