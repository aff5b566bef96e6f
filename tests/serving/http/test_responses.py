"""OpenAI's Responses API, asked by OpenAI's own client and by hand."""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from serving.http.apis import CALL, LONG, body_of, events_of

from dgr.serving.engine import ServingLimits
from dgr.testing.waits import until

TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}]
LOW: Any = {"reasoning": {"effort": "low"}}
OFF: Any = {"reasoning": {"effort": "none"}}


async def test_the_client_reads_a_whole_response(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.client() as client:
        response = await client.responses.create(
            model="m", input="some words", instructions="be", metadata={"a": "b"}, store=False, **OFF
        )
        assert (response.output_text, response.status, response.object) == ("some words", "completed", "response")
        assert (response.model, response.instructions, response.metadata) == ("m", "be", {"a": "b"})
        assert response.id.startswith("resp_")
        assert not response.store
        assert response.usage is not None
        assert response.usage.output_tokens == len("some words")
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        assert bytes(server.model.seen[0][1:3]) == b"be"


async def test_a_stream_has_every_event_in_order_and_the_whole_at_its_end(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.client() as client:
        server.model.script["go"] = "hm</think>ok" + CALL
        stream = await client.responses.create(model="m", input="go", tools=TOOLS, stream=True, **LOW)
        events: list[Any] = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        kinds = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert kinds == ["reasoning", "message", "function_call"]
        said = dict.fromkeys(("reasoning_text", "output_text", "function_call_arguments"), "")
        for event in events:
            name = event.type.removeprefix("response.").removesuffix(".delta")
            if name in said and event.type.endswith(".delta"):
                said[name] += event.delta
        assert (said["reasoning_text"], said["output_text"]) == ("hm", "ok")
        assert json.loads(said["function_call_arguments"]) == {"a": 'x "y"', "n": 5}
        last = events[-1]
        assert last.type == "response.completed"
        reasoning, message, call = last.response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("hm", "ok")
        assert reasoning.encrypted_content is None
        assert json.loads(call.arguments) == {"a": 'x "y"', "n": 5}
        assert last.response.usage.output_tokens_details.reasoning_tokens == 2
        whole = await client.responses.create(model="m", input="go", tools=TOOLS, **LOW)
        assert [item.type for item in whole.output] == kinds
        assert whole.usage is not None
        assert (
            whole.usage.output_tokens
            == last.response.usage.output_tokens
            == server.engine.counters.completion_tokens / 2
        )


async def test_results_of_tools_go_back_and_the_prefix_is_found(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.client() as client:
        server.model.script["go"] = "hm</think>ok" + CALL
        asked: list[Any] = [{"role": "user", "content": "go"}]
        first = await client.responses.create(model="m", input=asked, tools=TOOLS, **LOW)
        call: Any = first.output[-1]
        asked += first.output
        asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
        second = await client.responses.create(model="m", input=asked, tools=TOOLS, **LOW)
        assert first.usage is not None
        assert second.usage is not None
        spent = first.usage.input_tokens + first.usage.output_tokens
        assert first.usage.input_tokens_details.cached_tokens == 0
        assert second.usage.input_tokens_details.cached_tokens >= spent - 1


async def test_developers_count_as_system_and_the_rest_of_the_conversation_is_kept(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        said = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
        ]
        items = [{"role": "developer", "content": "D"}, *said, {"role": "user", "content": "go"}]
        reply = await server.ask("POST", "/v1/responses", body_of("responses", "", input=items))
        responses = server.model.seen[0]
        messages = [{"role": "developer", "content": "D"}, {"role": "user", "content": "a"}, said[1], items[-1]]
        chat = {"messages": messages, "thinking": {"type": "disabled"}}
        await server.ask("POST", "/v1/chat/completions", chat)
        assert reply.json()["output"][0]["content"][0]["text"] == "go"
        assert server.model.seen[len("go") + 1] == responses


async def test_length_stop_and_log_probabilities(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.client() as client:
        cut = await client.responses.create(model="m", input="abcdef", max_output_tokens=3, **OFF)
        assert (cut.output_text, cut.status) == ("abc", "incomplete")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        stopped = await client.responses.create(model="m", input="one two", extra_body={"stop": "tw"}, **OFF)
        assert (stopped.output_text, stopped.status) == ("one ", "completed")
        told: Any = await client.responses.create(
            model="m", input="ab", include=["message.output_text.logprobs"], top_logprobs=2, **OFF
        )
        logprobs = told.output[0].content[0].logprobs
        assert [(one.token, one.logprob, len(one.top_logprobs)) for one in logprobs] == [("a", -0.5, 2), ("b", -0.5, 2)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "input"),
        ({"tools": [*TOOLS, {"type": "file_search"}]}, "tools[1]"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": "x"}, "temperature"),
    ],
)
async def test_what_needs_a_state_or_cannot_be_kept_is_refused_by_name(
    serve: Callable[..., Any], fields: dict[str, Any], param: str
) -> None:
    async with serve() as server:
        reply = await server.ask("POST", "/v1/responses", body_of("responses", "hi", **fields))
        assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")
        assert not server.model.seen


async def test_tools_in_namespaces_and_patches_come_back_under_their_own_names(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=8192) as server:
        server.model.script["go"] = CALL.replace('name="f"', 'name="n__f"')
        body = body_of("responses", "go", tools=[{"type": "namespace", "name": "n", "tools": TOOLS}])
        (call,) = (await server.ask("POST", "/v1/responses", body)).json()["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "n", "f")
        server.model.script["go"] = CALL.replace('name="f"', 'name="apply_patch"').replace('name="a"', 'name="input"')
        body = body_of("responses", "go", tools=[{"type": "custom", "name": "apply_patch"}])
        (call,) = (await server.ask("POST", "/v1/responses", body)).json()["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", 'x "y"')


async def test_searches_of_the_web_are_left_out_as_in_deepseeks_own_api(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        reply = await server.ask("POST", "/v1/responses", body_of("responses", "hi", tools=[{"type": "web_search"}]))
        assert reply.json()["output"][0]["content"][0]["text"] == "hi"


async def test_an_error_after_the_start_is_a_failed_response(serve: Callable[..., Any]) -> None:
    async with serve(limits=ServingLimits(deadline=0.1)) as server:
        server.model.hold(after=4)
        events = await events_of(server, "responses", body_of("responses", "some words"))
        name, failed = events[-1]
        assert name == "response.failed"
        assert failed["sequence_number"] == len(events) - 1
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["id"] == events[0][1]["response"]["id"]
        assert failed["response"]["error"]["code"] == "server_error"
        assert "within 0.1 s" in failed["response"]["error"]["message"]


async def test_errors_before_the_start_have_openais_shape(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=128) as server, server.client() as client:
        with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
            await client.responses.create(model="other", input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input=LONG, **OFF)
        assert refused.value.code == "context_length_exceeded"


async def test_a_client_that_leaves_stops_its_work_and_its_prefix_stays(serve: Callable[..., Any]) -> None:
    async with serve() as server, server.client() as client:
        server.model.hold(after=5)
        stream = await client.responses.create(model="m", input=LONG, stream=True, **OFF)
        await until(lambda: server.model.is_waiting)
        await stream.close()
        await until(lambda: server.engine.line.running == 0)
        assert server.engine.counters.cancelled == 1
        server.model.release()
        response = await client.responses.create(model="m", input=LONG, **OFF)
        assert response.output_text == LONG
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens >= 5 * 64


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_call_that_cannot_be_read_is_given_as_text(serve: Callable[..., Any], thinking: bool) -> None:
    """The text is a message of its own in the stream and at its end, also where reasoning was cut by it."""
    async with serve() as server:
        broken = "<｜DSML｜tool_calls>\n<｜DSML｜garbage"
        server.model.script["go"] = "hm " + broken if thinking else broken
        body = body_of("responses", "go", tools=TOOLS, **(LOW if thinking else OFF))
        events = await events_of(server, "responses", body)
        last = events[-1][1]["response"]
        assert [item["type"] for item in last["output"]] == ["reasoning"] * thinking + ["message"]
        assert last["output"][-1]["content"][0]["text"] == broken
        deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
        assert "".join(deltas) == broken
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
