"""Anthropic's Messages API, asked by Anthropic's own client and by hand."""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
import trio
from serving.http.apis import CALL, LONG, QUICK, body_of, events_of
from serving.http.chat_model import THINK

from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import ServingLimits
from dgr.serving.http.keys import ApiKeys
from dgr.serving.http.service import ServerOptions
from dgr.testing.waits import until

TOOLS: Any = [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}]
LOW: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}}
OFF: Any = {"thinking": {"type": "disabled"}}
ARGUMENTS = {"a": 'x "y"', "n": 5}


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": text}], **OFF, **fields}


async def test_the_client_reads_a_whole_message(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.anthropic() as client:
        message = await client.messages.create(**asking("some words", system=[{"type": "text", "text": "be"}]))
        assert [(block.type, block.text) for block in message.content] == [("text", "some words")]
        assert (message.role, message.model, message.stop_reason) == ("assistant", "m", "end_turn")
        assert message.id.startswith("msg_")
        assert message.usage.output_tokens == len("some words")
        assert message.usage.input_tokens == len("be") + len("some words") + 4
        assert bytes(server.model.seen[0][1:3]) == b"be"


async def test_a_stream_has_blocks_of_thinking_text_and_tools(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.anthropic() as client:
        server.model.script["go"] = "hm</think>ok" + CALL
        async with client.messages.stream(**asking("go", tools=TOOLS, **LOW)) as stream:
            kinds = [event.type async for event in stream]
            message: Any = await stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        thinking, text, call = message.content
        assert (thinking.thinking, text.text, call.name, call.input) == ("hm", "ok", "f", ARGUMENTS)
        assert message.stop_reason == "tool_use"
        whole: Any = await client.messages.create(**asking("go", tools=TOOLS, **LOW))
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert whole.content[2].input == ARGUMENTS
        assert whole.usage.output_tokens == message.usage.output_tokens == server.engine.counters.completion_tokens / 2
        events = await events_of(server, "messages", body_of("messages", "go", tools=TOOLS, **LOW))
        blocks = [data["index"] for name, data in events if name == "content_block_start"]
        assert blocks == [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
        parts = [data["delta"].get("partial_json", "") for name, data in events if name == "content_block_delta"]
        assert json.loads("".join(parts)) == ARGUMENTS


async def test_results_of_tools_go_back_and_the_prefix_is_found(serve: Callable[..., Any]) -> None:
    """What was found is not among ``input_tokens``, and a stream's last numbers say so too."""
    async with serve() as server, server.anthropic() as client:
        server.model.script["go"] = "hm</think>ok" + CALL
        first = await client.messages.create(**asking("go", tools=TOOLS, **LOW))
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "done"}
        body = asking("go", tools=TOOLS, **LOW)
        body["messages"] += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(**body) as stream:
            second = await stream.get_final_message()
        spent = first.usage.input_tokens + first.usage.output_tokens
        assert first.usage.cache_read_input_tokens == 0
        assert second.usage.cache_read_input_tokens is not None
        assert second.usage.cache_read_input_tokens >= spent - 1
        counted = await client.messages.count_tokens(**{k: v for k, v in body.items() if k != "max_tokens"})
        assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


async def test_tokens_are_counted_without_an_answer(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=128) as server, server.anthropic() as client:
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "four"}], **OFF)
        assert counted.input_tokens == len("four") + 4
        assert not server.model.seen
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="other", messages=[{"role": "user", "content": "four"}])
        metrics = (await server.ask("GET", "/metrics")).body.decode()
        assert 'dgr_requests_total{endpoint="count_tokens",status="200"} 1.0' in metrics


async def test_words_of_other_clients_are_understood(serve: Callable[..., Any]) -> None:
    """A custom tool is one without a type; adaptive thinking is thinking."""
    async with serve() as server, server.anthropic() as client:
        adaptive = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
        for fields in ({"tools": TOOLS, **LOW}, {"tools": [{"type": "custom", **TOOLS[0]}], **adaptive}):
            await client.messages.create(**asking("hi", **fields, max_tokens=1))
        first, second = server.model.seen
        assert first == second
        assert THINK in first


@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_an_answer_may_end_with_how_a_call_begins(serve: Callable[..., Any], tools: Any) -> None:
    async with serve() as server, server.anthropic() as client:
        for text in ("a <", "a << b <"):
            message: Any = await client.messages.create(**asking(text, tools=tools))
            assert message.content[0].text == text


async def test_length_and_stop_sequences(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.anthropic() as client:
        cut: Any = await client.messages.create(**asking("abcdef", max_tokens=3))
        assert (cut.content[0].text, cut.stop_reason) == ("abc", "max_tokens")
        stopped: Any = await client.messages.create(**asking("one two three", stop_sequences=["zz", "tw"]))
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("one ", "stop_sequence", "tw")
        assert stopped.usage.output_tokens == len("one tw")
        events = await events_of(server, "messages", body_of("messages", "one two three", stop_sequences=["tw"]))
        assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "tw"}
        assert events[-2][1]["usage"]["output_tokens"] == len("one tw")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
async def test_a_call_that_must_be_is_opened_by_the_prompt(serve: Callable[..., Any], choice: Any) -> None:
    async with serve() as server, server.anthropic() as client:
        server.model.script["must"] = CALL.split("tool_calls>\n", 1)[1]
        message: Any = await client.messages.create(**asking("must", tools=TOOLS, tool_choice=choice))
        assert [(block.type, block.input) for block in message.content] == [("tool_use", ARGUMENTS)]
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            await client.messages.create(**asking("must", tools=TOOLS, tool_choice=choice, **LOW))
        server.model.script["garbage"] = "garbage"
        text: Any = await client.messages.create(**asking("garbage", tools=TOOLS, tool_choice=choice))
        assert [(block.type, block.text) for block in text.content] == [("text", "garbage")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "ends with an answer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].content: a part of type 'image'",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "server tools are not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format 'json_schema' is not supported"),
        ({"output_config": {"effort": "huge"}, "thinking": None}, "output_config.effort is 'huge'"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"container": "x"}, "container is not supported"),
        ({"context_management": {"edits": []}}, "context_management is not supported"),
        ({"stop_sequences": [""]}, "stop_sequences: give up to 16"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"thinking": "yes"}, "thinking: give"),
    ],
)
async def test_what_cannot_be_kept_is_refused_in_anthropics_shape(
    serve: Callable[..., Any], fields: dict[str, Any], message: str
) -> None:
    async with serve() as server, server.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError, match=message) as refused:
            await client.messages.create(**asking("hi", extra_body=fields))
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert not server.model.seen


async def test_every_status_has_anthropics_word_for_it(serve: Callable[..., Any]) -> None:
    """Those of the gate and of the routes too; the same errors have OpenAI's shape elsewhere."""
    key = "0123456789abcdef-key"
    options = ServerOptions(model="m", thinking=Thinking.OFF, max_body=2000)
    async with serve(sessions=1, limits=ServingLimits(max_waiting=0), keys=ApiKeys([key]), options=options) as server:

        async def told(path: str = "/v1/messages", method: str = "POST", **fields: Any) -> tuple[int, str]:
            headers = {"x-api-key": fields.pop("key", key)}
            reply = await server.ask(method, path, fields.pop("raw", body_of("messages", "hi", **fields)), **headers)
            if reply.status == 200:
                return 200, "message"
            assert reply.json()["type"] == "error"
            assert set(reply.error) == {"type", "message"}
            return reply.status, reply.error["type"]

        assert await told(key="wrong") == (401, "authentication_error")
        assert await told(path="/v1/messages/batches") == (404, "not_found_error")
        assert await told(model="other") == (404, "not_found_error")
        assert await told(method="GET") == (405, "invalid_request_error")
        assert await told(raw=b"{") == (400, "invalid_request_error")
        assert await told(raw=b" " * 2001) == (413, "request_too_large")
        async with trio.open_nursery() as nursery:
            server.model.hold()
            nursery.start_soon(told)
            await until(lambda: server.engine.line.running == 1)
            assert await told() == (429, "rate_limit_error")
            server.model.release()
        server.engine.end_all()
        assert await told() == (503, "overloaded_error")
        assert (await server.ask("POST", "/v1/responses", {"input": "hi"}, **{"x-api-key": key})).error["param"] is None


async def test_what_does_not_fit_is_told_in_the_words_that_clients_look_for(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=256) as server, server.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 256 maximum"):
            await client.messages.create(**asking("x" * 300))
        words = r"input length and `max_tokens` exceed context limit: 204 \+ 100 > 256"
        with pytest.raises(anthropic.BadRequestError, match=words):
            await client.messages.create(**asking("x" * 200, max_tokens=100))


async def test_an_error_after_the_start_is_an_event_that_the_client_raises(serve: Callable[..., Any]) -> None:
    async with serve(limits=ServingLimits(deadline=0.1)) as server, server.anthropic() as client:
        server.model.hold(after=4)
        events = await events_of(server, "messages", body_of("messages", "some words"))
        name, data = events[-1]
        assert (name, data["error"]["type"]) == ("error", "timeout_error")
        assert not [name for name, _ in events if name in ("message_delta", "message_stop")]
        with pytest.raises(anthropic.APIStatusError, match=r"within 0\.1 s"):
            async with client.messages.stream(**asking("some words")) as stream:
                await stream.until_done()


async def test_a_silent_stream_pings_once_the_message_has_begun(serve: Callable[..., Any]) -> None:
    async with serve(options=QUICK) as server:
        server.model.hold()
        stream = await server.stream(body_of("messages", "hi", stream=True), "/v1/messages")
        blocks = []
        async for block in stream.events():
            blocks.append(block)
            if len(blocks) == 6:
                server.model.release()
        assert blocks[0].startswith(": ")
        assert blocks[1].startswith("event: message_start\n")
        assert 'event: ping\ndata: {"type":"ping"}' in blocks[2:6]
        assert blocks[-1].startswith("event: message_stop\n")
        await stream.aclose()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_its_work_and_its_prefix_stays(
    serve: Callable[..., Any], stream: bool
) -> None:
    async with serve() as server, server.anthropic() as client:
        server.model.hold(after=5)
        connection = await server.connect()
        await connection.send("POST", "/v1/messages", body_of("messages", LONG, stream=stream, max_tokens=1000))
        await until(lambda: server.model.is_waiting)
        await connection.aclose()
        await until(lambda: server.engine.line.running == 0)
        assert server.engine.counters.cancelled == 1
        server.model.release()
        message: Any = await client.messages.create(**asking(LONG, max_tokens=1000))
        assert message.content[0].text == LONG
        assert message.usage.cache_read_input_tokens >= 5 * 64


async def test_a_key_goes_by_either_header(serve: Callable[..., Any]) -> None:
    key = "0123456789abcdef-key"
    async with serve(keys=ApiKeys([key])) as server:
        for options in ({"key": key}, {"key": "no key", "default_headers": {"authorization": f"Bearer {key}"}}):
            async with server.anthropic(**options) as client:
                assert (await client.messages.create(**asking("hi"))).stop_reason == "end_turn"
        async with server.anthropic("not a key") as client:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await client.messages.create(**asking("hi"))


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_call_that_cannot_be_read_is_given_as_text(serve: Callable[..., Any], thinking: bool) -> None:
    async with serve() as server, server.anthropic() as client:
        broken = "<｜DSML｜tool_calls>\n<｜DSML｜garbage"
        server.model.script["go"] = "hm " + broken if thinking else broken
        message: Any = await client.messages.create(**asking("go", tools=TOOLS, **(LOW if thinking else OFF)))
        assert [block.type for block in message.content] == ["thinking"] * thinking + ["text"]
        assert message.content[-1].text == broken
        assert message.stop_reason == "end_turn"
