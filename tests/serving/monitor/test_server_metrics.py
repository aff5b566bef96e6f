"""What a server counts agrees with what its clients saw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import trio
from serving.http.http_servers import Server
from serving.monitor.scrapes import Scrape

from dgr.client.events import FAILURE, EventHub, RePrefilled, RouteDown
from dgr.core.log_fields import short_route
from dgr.protocol.states import RouteState
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


def test_the_texts_of_errors_make_no_series() -> None:
    hub = EventHub()
    for reason in ("evicted", "stage a:1: cannot read", "stage b:2: closed", "diverged"):
        hub.emit(RePrefilled(1, reason, 10, 0.1))
    hub.emit(RouteDown(3, "stage a:1: cannot read"))
    assert hub.re_prefills == {"evicted": 1, FAILURE: 2, "diverged": 1}
    assert hub.re_prefilled_tokens[FAILURE] == 20
    assert hub.downs == 1
