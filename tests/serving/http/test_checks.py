"""What clients of OpenAI's API rely on, each point named after what broke elsewhere when it did not hold.

Not covered here, because it is not built: copies of a state at the end of a prompt (the next turn of a thinking chat without
tools is evaluated from its first token; the miss is counted), replaying sampled tool calls by their id, answers held to a
schema, empty lines before the body of an answer that is not streamed.
"""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import openai
import pytest
import trio
from serving.http.apis import CALL, LONG, QUICK
from serving.http.chat_model import EOS, UNTHINK, spelled
from serving.http.http_servers import Server, chat_body

from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import ServingLimits
from dgr.serving.http.keys import ApiKeys
from dgr.serving.http.service import ServerOptions
from dgr.testing.waits import until

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
THINKING = {"thinking": {"type": "enabled"}, "reasoning_effort": "low"}


def text_of(chunks: list[Any], name: str = "content") -> str:
    return "".join(choice["delta"].get(name) or "" for chunk in chunks[:-1] for choice in chunk["choices"])


def calls_of(chunks: list[Any]) -> list[dict[str, Any]]:
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    return [call for delta in deltas for call in delta.get("tool_calls", ())]


def last_choice(chunks: list[Any]) -> dict[str, Any]:
    last: dict[str, Any] = [choice for chunk in chunks[:-1] for choice in chunk["choices"]][-1]
    return last


def cached(reply: Any) -> int:
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- stream and connection ---


async def test_01_the_first_byte_comes_at_once_and_comments_while_waiting_and_in_prefill(
    serve: Callable[..., Any],
) -> None:
    async with serve(sessions=1, options=QUICK) as server:
        server.model.hold()
        first = await server.stream(chat_body("first", stream=True))
        second = await server.stream(chat_body("second", stream=True))
        seen: dict[str, list[str]] = {"first": [], "second": []}
        for name, stream in (("first", first), ("second", second)):
            async for event in stream.events():
                seen[name].append(event)
                if len(seen[name]) == 6:
                    break
        assert seen["second"][0] == ": waiting"
        assert json.loads(seen["second"][1].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        assert seen["second"][2:] == [": waiting"] * 4
        assert seen["first"][-1].startswith(": prefill 0/")
        server.model.release()
        assert [event async for event in second.events()][-1] == "data: [DONE]"
        await first.aclose()
        await second.aclose()


async def test_02_comments_stand_between_events_on_lines_of_their_own(serve: Callable[..., Any]) -> None:
    async with serve(options=QUICK) as server:
        server.model.hold(after=4)
        stream = await server.stream(chat_body("some words", stream=True))
        events = []
        async for event in stream.events():
            events.append(event)
            if event.startswith(": ") and len(events) > 5:
                server.model.release()
        assert all(event.startswith((": ", "data: ")) and "\n" not in event for event in events)
        assert events[-1] == "data: [DONE]"
        await stream.aclose()


async def test_02_comments_can_be_switched_off(serve: Callable[..., Any]) -> None:
    async with serve(options=ServerOptions(model="m", thinking=Thinking.OFF, keep_alive=math.inf)) as server:
        stream = await server.stream(chat_body("hi", stream=True))
        assert all([event.startswith("data: ") async for event in stream.events()])
        await stream.aclose()


async def test_03_a_deadline_ends_a_request_whatever_comments_were_sent(serve: Callable[..., Any]) -> None:
    async with serve(limits=ServingLimits(deadline=0.1), options=QUICK) as server:
        server.model.hold()
        chunks = await server.data(chat_body("never"))
        assert chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert "within 0.1 s" in chunks[-1]["error"]["message"]
        reply = await server.chat("never")
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")


async def test_04_progress_of_the_prefill_is_told_when_asked_for(serve: Callable[..., Any]) -> None:
    async with serve(options=QUICK) as server:
        server.model.hold(after=3)
        stream = await server.stream(chat_body(LONG, stream=True, return_progress=True, max_tokens=1))
        told = []
        async for event in stream.events():
            if "prompt_progress" in event:
                told.append(json.loads(event.removeprefix("data: "))["prompt_progress"])
                if told[-1]["processed"] == 192:
                    server.model.release()
        assert any(one["processed"] == 192 for one in told)
        assert all(one["total"] == len(LONG) + 4 and one["cache"] == 0 for one in told)
        assert told[0]["time_ms"] <= told[-1]["time_ms"]
        await stream.aclose()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("keys", [None, "0123456789abcdef-key"])
async def test_05_08_09_a_client_that_leaves_during_decode_stops_its_work(
    serve: Callable[..., Any], stream: bool, keys: str | None
) -> None:
    """Streamed or not, through the gate of API keys or not: at most the step under way is finished."""
    async with serve(keys=None if keys is None else ApiKeys([keys])) as server:
        connection = await server.connect()
        headers = {} if keys is None else {"authorization": f"Bearer {keys}"}
        server.model.hold(after=4 + 5)
        await connection.send("POST", "/v1/chat/completions", chat_body("word " * 50, stream=stream), headers)
        await until(lambda: server.model.is_waiting)
        runs, drawn = server.model.head.runs, len(server.model.seen)
        assert drawn > 0
        await connection.aclose()
        await until(lambda: server.engine.line.running == 0)
        assert server.engine.counters.cancelled == 1
        server.model.release()
        assert (await server.chat("next") if keys is None else await _with_key(server, keys)).status == 200
        ours = [
            history for history in server.model.seen[drawn:] if b"word word" in bytes(t for t in history if t < 256)
        ]
        assert len(ours) <= 1
        assert server.model.head.runs >= runs


async def _with_key(server: Server, key: str) -> Any:
    return await server.ask("POST", "/v1/chat/completions", chat_body("next"), authorization=f"Bearer {key}")


@pytest.mark.parametrize("stream", [True, False])
async def test_06_a_client_that_leaves_during_prefill_stops_its_work_within_a_chunk(
    serve: Callable[..., Any], stream: bool
) -> None:
    async with serve() as server:
        server.model.hold(after=2)
        connection = await server.connect()
        await connection.send("POST", "/v1/chat/completions", chat_body(LONG, stream=stream))
        await until(lambda: server.model.is_waiting)
        await connection.aclose()
        await until(lambda: server.engine.line.running == 0)
        server.model.release()
        assert (await server.chat("other")).status == 200
        assert server.model.head.tokens_run <= 3 * 64 + 2 * len("other") + 4  # chunks of 64; two ran, one was under way


@pytest.mark.parametrize("stream", [True, False])
async def test_07_a_client_that_leaves_the_line_is_never_begun(serve: Callable[..., Any], stream: bool) -> None:
    async with serve(sessions=1) as server, trio.open_nursery() as nursery:
        server.model.hold()
        nursery.start_soon(server.chat, "first")
        await until(lambda: server.model.is_waiting)
        connection = await server.connect()
        await connection.send("POST", "/v1/chat/completions", chat_body("never begun", stream=stream))
        await until(lambda: server.engine.line.waiting == 1)
        await connection.aclose()
        await until(lambda: server.engine.line.waiting == 0)
        server.model.release()
        assert (await server.chat("third")).status == 200
        assert not any(b"never begun" in bytes(token for token in one if token < 256) for one in server.model.seen)


async def test_10_a_retry_finds_what_was_evaluated_before_its_client_had_left(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.hold(after=5)
        connection = await server.connect()
        await connection.send("POST", "/v1/chat/completions", chat_body(LONG))
        await until(lambda: server.model.is_waiting)
        await connection.aclose()
        await until(lambda: server.engine.line.running == 0)
        server.model.release()
        reply = await server.chat(LONG)
        assert reply.json()["choices"][0]["message"]["content"] == LONG
        assert cached(reply) >= 5 * 64


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("seeded", [True, False])
async def test_10_a_retry_goes_on_with_the_answer_that_its_client_had_left(
    serve: Callable[..., Any], stream: bool, seeded: bool
) -> None:
    """It costs the tokens that are still to be drawn, and gives those that an undisturbed answer would have given."""
    async with serve() as server:
        body = chat_body("some more words", temperature=1, stream=stream, **({"seed": 7} if seeded else {}))
        server.model.hold(after=1 + 6)
        connection = await server.connect()
        await connection.send("POST", "/v1/chat/completions", body)
        await until(lambda: server.model.is_waiting)
        await connection.aclose()
        await until(lambda: server.engine.line.running == 0)
        drawn = len(server.model.seen)
        seed = server.model.drawn[0].seed
        server.model.release()
        reply = await server.ask("POST", "/v1/chat/completions", {**body, "stream": False})
        assert reply.json()["choices"][0]["message"]["content"] == "some more words"
        assert cached(reply) == reply.json()["usage"]["prompt_tokens"]
        assert server.engine.sessions.resumed == 1
        assert len(server.model.seen) <= len("some more words") + 2
        assert drawn >= 6
        assert {params.seed for params in server.model.drawn} == {seed}
        again = await server.ask("POST", "/v1/chat/completions", {**body, "stream": False})
        assert server.engine.sessions.resumed == 1, "an answer that was complete is not told again"
        assert again.json()["usage"]["completion_tokens"] == len("some more words")


async def test_10_another_seed_is_another_answer(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.hold(after=4)
        connection = await server.connect()
        await connection.send("POST", "/v1/chat/completions", chat_body("words", temperature=1, seed=1))
        await until(lambda: server.model.is_waiting)
        await connection.aclose()
        await until(lambda: server.engine.line.running == 0)
        server.model.release()
        for fields in ({"seed": 2}, {"seed": 1, "top_p": 0.5}, {}, {"seed": 1, "temperature": 0.5}):
            assert (await server.chat("words", **{"temperature": 1, **fields})).status == 200
        assert server.engine.sessions.resumed == 0


@pytest.mark.slow
async def test_11_the_tries_of_a_client_that_times_out_follow_each_other(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.hold(after=2)
        client = server.client(max_retries=1, timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": LONG}])
        await until(lambda: server.engine.line.running == 0)
        assert server.engine.counters.cancelled == 2
        server.model.release()
        assert cached(await server.chat(LONG)) >= 2 * 64
        await client.close()


async def test_12_14_15_a_stream_is_shaped_as_clients_expect(serve: Callable[..., Any]) -> None:
    """The role first and once, no empty content, one finish reason in the last choice, then the end mark."""
    async with serve() as server:
        chunks = await server.data(chat_body("some words"))
        assert chunks[-1] == "[DONE]"
        choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
        assert [("role" in choice["delta"]) for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert all(choice["delta"]["content"] for choice in choices[1:-1])
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert text_of(chunks) == "some words"
        assert len({chunk["id"] for chunk in chunks[:-1]}) == 1
        assert "usage" not in chunks[0]


async def test_13_an_error_after_the_start_is_an_event_and_no_finish_reason(serve: Callable[..., Any]) -> None:
    async with serve(limits=ServingLimits(deadline=0.1)) as server:
        server.model.hold(after=4)
        chunks = await server.data(chat_body("some words"))
        assert set(chunks[-1]) == {"error"}
        assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
        async with server.client() as client:
            messages = [{"role": "user", "content": "hi"}]
            chunks = await client.chat.completions.create(model="m", messages=messages, stream=True)
            with pytest.raises(openai.APIError, match=r"within 0\.1 s"):
                assert not [chunk async for chunk in chunks if chunk.choices[0].finish_reason]


async def test_16_proxies_are_told_not_to_hold_or_change_a_stream(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        stream = await server.connect()
        headers = {"accept-encoding": "gzip, br"}
        await stream.send("POST", "/v1/chat/completions", chat_body("hi", stream=True), headers)
        status, found = await stream.head()
        assert status == 200
        assert found["content-type"].startswith("text/event-stream")
        assert "no-cache" in found["cache-control"]
        assert found["x-accel-buffering"] == "no"
        assert "content-encoding" not in found
        await stream.aclose()


# --- text ---


@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("one two three", ["two"], "one "),
        ("ab STOP now cd", ["OP n"], "ab ST"),  # inside one token
        ("aaaab", ["aab"], "aa"),  # a false start, then a match that overlaps it
        ("x</y</z", ["</z"], "x</y"),
        ("no such thing", ["thingy"], "no such thing"),
        ("first second", ["second", "fir"], ""),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
async def test_17_stop_strings_are_found_wherever_they_lie(
    serve: Callable[..., Any], answer: str, stop: list[str], text: str, chat: bool
) -> None:
    async with serve() as server:
        server.model.script["go"] = answer
        if chat:
            body = chat_body("go", stop=stop)
            whole = (await server.ask("POST", "/v1/chat/completions", body)).json()["choices"][0]
            streamed = await server.data(body)
            assert whole["message"]["content"] == text_of(streamed) == text
        else:
            body = {"prompt": spelled("<｜User｜>go<｜Assistant｜></think>"), "stop": stop, "max_tokens": 64}
            whole = (await server.ask("POST", "/v1/completions", body)).json()["choices"][0]
            streamed = await server.data(body, "/v1/completions")
            assert whole["text"] == "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == text
        assert whole["finish_reason"] == last_choice(streamed)["finish_reason"] == "stop"


async def test_17_a_stop_string_ends_the_work_too(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = "one two" + 500 * "x"
        reply = await server.chat("go", stop="two")
        assert reply.json()["usage"]["completion_tokens"] == len("one two")
        assert len(server.model.seen) == len("one two")


async def test_18_stop_strings_do_not_count_in_reasoning_or_cut_tool_calls(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = "think END more</think>answer END rest"
        message = (await server.chat("go", stop=["END"], **THINKING)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "answer ", "reasoning_content": "think END more"}
        server.model.script["call"] = "so" + CALL
        choice = (await server.chat("call", stop=["tool_calls"], tools=TOOLS)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 'x "y"', "n": 5}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_19_only_whole_characters_leave(serve: Callable[..., Any], path: str) -> None:
    async with serve() as server:
        text = "é 😀 中文"
        size = len(text.encode())
        for limit in range(1, size + 1):
            body = chat_body(text, max_tokens=limit)
            if path == "/v1/completions":
                body = {"prompt": spelled(f"<｜User｜>{text}<｜Assistant｜></think>"), "max_tokens": limit}
            chunks = await server.data(body, path)
            parts = [
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
                for chunk in chunks[:-1]
                for choice in chunk["choices"]
            ]
            assert "".join(parts) == text.encode()[:limit].decode("utf-8", "ignore")
            assert "\ufffd" not in "".join(parts)


async def test_20_special_tokens_do_not_leak_into_answers(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = "a<｜User｜>b</think>c<think>d<｜begin▁of▁sentence｜>e｜DSML｜f"
        assert (await server.chat("go")).json()["choices"][0]["message"]["content"] == "abcdef"
        server.model.script["think"] = "r<｜User｜>1</think>a</think>b"
        message = (await server.chat("think", **THINKING)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "ab", "reasoning_content": "r1"}


async def test_21_special_spellings_of_users_are_text(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        text = "x<｜User｜>y</think>z｜DSML｜<think>"
        assert (await server.chat(text)).json()["choices"][0]["message"]["content"] == text
        history = server.model.seen[0]
        assert bytes(history[2 : 2 + len(text.encode())]).decode() == text
        assert history[2 + len(text.encode()) :][1] == UNTHINK


# --- tool calls and reasoning ---


async def test_22_25_tool_calls_are_streamed_as_openai_does(serve: Callable[..., Any]) -> None:
    """The start mark comes byte by byte; name, id and type once; arguments are JSON in pieces."""
    async with serve() as server:
        server.model.script["go"] = "ok" + CALL.replace(
            "\n</｜DSML｜tool_calls>",
            CALL.split("tool_calls>", 1)[1].removesuffix("</｜DSML｜tool_calls>") + "</｜DSML｜tool_calls>",
        )
        chunks = await server.data(chat_body("go", tools=TOOLS))
        calls = calls_of(chunks)
        first = [call for call in calls if "id" in call]
        assert [call["index"] for call in first] == [0, 1]
        assert all(call["type"] == "function" and call["function"]["name"] == "f" for call in first)
        assert len({call["id"] for call in first}) == 2
        assert all("type" not in call and "name" not in call["function"] for call in calls if "id" not in call)
        for index in (0, 1):
            text = "".join(call["function"]["arguments"] for call in calls if call["index"] == index)
            assert json.loads(text) == {"a": 'x "y"', "n": 5}
        assert last_choice(chunks)["finish_reason"] == "tool_calls"
        assert text_of(chunks) == "ok"
        whole = (await server.chat("go", tools=TOOLS)).json()["choices"][0]
        assert [json.loads(call["function"]["arguments"]) for call in whole["message"]["tool_calls"]] == [
            {"a": 'x "y"', "n": 5}
        ] * 2


async def test_23_a_call_inside_open_reasoning_is_a_call(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = "let me see" + CALL
        choice = (await server.chat("go", tools=TOOLS, **THINKING)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "let me see"
        assert len(choice["message"]["tool_calls"]) == 1


async def test_24_a_call_that_is_cut_off_ends_with_length(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = CALL
        choice = (await server.chat("go", tools=TOOLS, max_tokens=80)).json()["choices"][0]
        assert choice["finish_reason"] == "length"


async def test_26_tool_choice_is_kept_or_refused(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = "ok" + CALL
        choice = (await server.chat("go", tools=TOOLS, tool_choice="none")).json()["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert (await server.chat("go", tools=TOOLS, tool_choice="auto")).json()["choices"][0][
            "finish_reason"
        ] == "tool_calls"
        server.model.script["must"] = CALL.split("tool_calls>\n", 1)[1]  # the prompt has opened the call
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            choices = (await server.chat("must", tools=TOOLS, tool_choice=choice)).json()["choices"]
            assert choices[0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        reply = await server.chat("go", tools=TOOLS, tool_choice="required", **THINKING)
        assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
        assert "tool_choice" in reply.error["message"]


@pytest.mark.parametrize("broken", ["<｜DSML｜tool_calls>\n<｜DSML｜garbage", "<｜DSML｜nonsense> then words"])
async def test_27_a_call_that_cannot_be_read_is_given_as_text(serve: Callable[..., Any], broken: str) -> None:
    async with serve() as server:
        server.model.script["go"] = broken
        choice = (await server.chat("go", tools=TOOLS)).json()["choices"][0]
        assert choice["message"]["content"] == broken
        assert "tool_calls" not in choice["message"]
        chunks = await server.data(chat_body("go", tools=TOOLS))
        assert text_of(chunks) == broken
        assert last_choice(chunks)["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_28_reasoning_goes_out_and_comes_back_and_tool_chats_hit_their_prefix(
    serve: Callable[..., Any], name: str
) -> None:
    async with serve() as server:
        server.model.script["go"] = "hm</think>ok" + CALL
        body = chat_body("go", tools=TOOLS, **THINKING)
        first = (await server.ask("POST", "/v1/chat/completions", body)).json()
        answer = first["choices"][0]["message"]
        assert first["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
        answer[name] = answer.pop("reasoning_content")
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "done"}
        body["messages"] = [*body["messages"], answer, result]
        reply = await server.ask("POST", "/v1/chat/completions", body)
        spent = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert cached(reply) >= spent - 1


async def test_28_tokens_of_reasoning_are_counted_as_they_were_drawn(serve: Callable[..., Any]) -> None:
    """Not as the text would be tokenised: the first word is one token here."""
    async with serve() as server:
        server.model.script["go"] = "hello</think>hello!"
        usage = (await server.chat("go", **THINKING)).json()["usage"]
        assert usage["completion_tokens"] == 1 + 1 + 2
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 1
        usage = (await server.chat("go")).json()["usage"]
        assert "completion_tokens_details" not in usage


async def test_29_json_after_reasoning_is_content(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = 'hm</think>{"a": 1}'
        message = (await server.chat("go", **THINKING)).json()["choices"][0]["message"]
        assert json.loads(message["content"]) == {"a": 1}
        reply = await server.chat("json", response_format={"type": "json_object"})
        assert (reply.status, reply.error["param"]) == (400, "response_format")


async def test_30_a_conversation_that_ends_with_an_answer_is_gone_on_with_when_asked(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        said: dict[str, Any] = {"role": "assistant", "content": "ab"}
        messages = [{"role": "user", "content": "abcdef"}, said]
        reply = await server.ask("POST", "/v1/chat/completions", chat_body("", messages=messages))
        assert (reply.status, reply.error["param"]) == (400, "messages")
        said["prefix"] = True
        reply = await server.ask("POST", "/v1/chat/completions", chat_body("", messages=messages))
        assert reply.json()["choices"][0]["message"]["content"] == "cdef"


# --- usage, log-probabilities, limits ---


async def test_31_usage_stands_on_a_last_chunk_without_choices(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        for path, body in (
            ("/v1/chat/completions", chat_body("four")),
            ("/v1/completions", {"prompt": "ab", "max_tokens": 4}),
        ):
            chunks = await server.data({**body, "stream_options": {"include_usage": True}}, path)
            assert chunks[-2]["choices"] == []
            assert chunks[-2]["usage"]["completion_tokens"] == 4
            assert all(chunk["usage"] is None for chunk in chunks[:-2])


async def test_32_cached_tokens_are_those_that_were_not_evaluated(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        first = await server.chat(LONG)
        assert cached(first) == 0
        before = server.model.head.tokens_run
        messages = [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": LONG},
            {"role": "user", "content": "more"},
        ]
        second = await server.ask("POST", "/v1/chat/completions", chat_body("", messages=messages))
        usage = second.json()["usage"]
        evaluated = server.model.head.tokens_run - before - usage["completion_tokens"]
        assert usage["prompt_tokens"] - cached(second) == evaluated < 20


async def test_33_log_probabilities_have_their_shape(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = "hé" + "x</y"
        for stream in (False, True):
            if stream:
                chunks = await server.data(chat_body("go", logprobs=True, top_logprobs=2))
                content = [
                    one
                    for chunk in chunks[:-1]
                    for choice in chunk["choices"]
                    for one in (choice["logprobs"] or {}).get("content") or ()
                ]
            else:
                reply = await server.chat("go", logprobs=True, top_logprobs=2)
                content = reply.json()["choices"][0]["logprobs"]["content"]
            assert [one["bytes"] for one in content] == [[104], [0xC3], [0xA9], [*b"x</y"]]
            assert content[0] == {
                "token": "h", "logprob": -0.5, "bytes": [104],
                "top_logprobs": [
                    {"token": "h", "logprob": -0.5, "bytes": [104]}, {"token": "a", "logprob": -1.5, "bytes": [97]},
                ],
            }  # fmt: skip
            assert content[3]["logprob"] == -9999.0  # beyond the candidates that the tail tells of
        body = {"prompt": "ab", "max_tokens": 3, "logprobs": 1}
        logprobs = (await server.ask("POST", "/v1/completions", body)).json()["choices"][0]["logprobs"]
        assert logprobs == {
            "tokens": ["d", "e", "f"], "token_logprobs": [-0.5] * 3, "top_logprobs": [{"d": -0.5}, {"e": -0.5}, {"f": -0.5}],
            "text_offset": [0, 1, 2],
        }  # fmt: skip
        call = await server.data(chat_body("go", logprobs=True, tools=TOOLS))
        assert text_of(call) == "hé" + "x</y"


async def test_33_several_choices_are_drawn_apart_and_their_prompt_is_counted_once(serve: Callable[..., Any]) -> None:
    async with serve(sessions=2) as server:
        body = chat_body("abc", n=3, seed=4, temperature=1)
        reply = (await server.ask("POST", "/v1/chat/completions", body)).json()
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert all(choice["message"]["content"] == "abc" for choice in reply["choices"])
        assert reply["usage"]["completion_tokens"] == 9
        assert reply["usage"]["prompt_tokens"] == len("abc") + 4
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.engine.sessions.copied == 1  # the third has no slot yet
        assert {(params.seed, params.choice) for params in server.model.drawn} == {(4, 0), (4, 1), (4, 2)}
        chunks = await server.data({**body, "stream_options": {"include_usage": True}})
        for index in range(3):
            choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in choices) == "abc"
            assert choices[-1]["finish_reason"] == "stop"
        assert chunks[-2]["usage"]["completion_tokens"] == 9
        reply = await server.ask("POST", "/v1/completions", {"prompt": ["ab", [97, 98]], "max_tokens": 2, "n": 2})
        assert [choice["text"] for choice in reply.json()["choices"]] == ["de", "de", "cd", "cd"]
        assert reply.json()["usage"]["prompt_tokens"] == 3 + 2


async def test_37_several_choices_are_admitted_together_or_not_at_all(serve: Callable[..., Any]) -> None:
    async with serve(sessions=1, limits=ServingLimits(max_waiting=2)) as server, trio.open_nursery() as nursery:
        server.model.hold()
        nursery.start_soon(server.chat, "abc")
        await until(lambda: server.engine.line.running == 1)
        assert (await server.chat("abc", n=3)).status == 429
        assert (server.engine.line.running, server.engine.line.waiting) == (1, 0)
        server.model.release()
        await until(lambda: server.engine.line.running == 0)
        assert (await server.chat("abc", n=3)).status == 200


@pytest.mark.parametrize(
    ("limits", "fields", "param", "said"),
    [
        ({"max_waiting": 1}, {"prompt": "ab", "n": 3}, "n", "3 choices are asked for at once, and 2 are the most"),
        (
            {"max_waiting": 1},
            {"prompt": ["a", "b", "c"]},
            "prompt",
            "3 choices are asked for at once, and 2 are the most",
        ),
        ({"max_waiting_tokens": 5}, {"prompt": "ab", "n": 3}, "n", "6 prompt tokens, of which 5 may wait"),
    ],
)
async def test_37_what_can_never_fit_is_not_told_to_come_again(
    serve: Callable[..., Any], limits: dict[str, int], fields: dict[str, Any], param: str, said: str
) -> None:
    async with serve(sessions=1, limits=ServingLimits(**limits)) as server:
        for stream in (False, True):
            reply = await server.ask("POST", "/v1/completions", {**fields, "stream": stream})
            assert (reply.status, reply.error["param"]) == (400, param)
            assert said in reply.error["message"]
        assert (await server.ask("POST", "/v1/completions", {"prompt": ["a", "b"]})).status == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_34_the_length_of_an_answer_goes_by_either_name(serve: Callable[..., Any], name: str) -> None:
    async with serve() as server:
        choice = (await server.chat("abcdef", **{name: 3})).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


async def test_35_what_does_not_fit_is_refused_with_both_numbers(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=256) as server:
        for body in (chat_body("x" * 300), chat_body("x" * 200, max_tokens=100)):
            reply = await server.ask("POST", "/v1/chat/completions", body)
            assert reply.status == 400
            assert reply.error["code"] == "context_length_exceeded"
            assert reply.error["n_ctx"] == 256
            assert str(reply.error["n_prompt_tokens"]) in reply.error["message"]
        reply = await server.ask("POST", "/v1/completions", {"prompt": "x" * 300})
        assert reply.error["code"] == "context_length_exceeded"
        assert (await server.chat("x" * 200)).status == 200


async def test_36_what_load_clients_send_is_honoured_and_the_unknown_is_ignored(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        reply = await server.chat("ab", ignore_eos=True, max_tokens=9, unheard_of={"x": 1}, user="me", store=False)
        assert reply.json()["usage"]["completion_tokens"] == 9
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        reply = await server.chat("ab", min_tokens=6, max_tokens=9)
        assert reply.json()["usage"]["completion_tokens"] == 6
        assert reply.json()["choices"][0]["message"]["content"] == "ab"
        assert EOS in server.model.seen[-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"guided_json": {}, "grammar": "root ::= x"}, "grammar"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": "yes"}, "thinking"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"top_p": 1e-60}, "top_p"),  # nothing is left of it as a float32
        ({"repetition_penalty": 1e-60}, "repetition_penalty"),
    ],
)
async def test_36_a_wrong_value_is_refused_by_name(
    serve: Callable[..., Any], fields: dict[str, Any], param: str
) -> None:
    async with serve() as server:
        reply = await server.chat("hi", **fields)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert not server.model.seen


async def test_36_token_ids_of_no_vocabulary_are_refused_by_name(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        for prompt in ([97, 10**6], [[97], [-1]]):
            reply = await server.ask("POST", "/v1/completions", {"prompt": prompt})
            assert (reply.status, reply.error["param"]) == (400, "prompt")
            assert "outside the vocabulary" in reply.error["message"]


# --- queue and cache ---


async def test_37_a_full_line_refuses_at_once_and_says_when_to_come_again(serve: Callable[..., Any]) -> None:
    async with serve(sessions=1, limits=ServingLimits(max_waiting=1)) as server, trio.open_nursery() as nursery:
        server.model.hold()
        nursery.start_soon(server.chat, "first")
        await until(lambda: server.engine.line.running == 1)
        nursery.start_soon(server.chat, "second")
        await until(lambda: server.engine.line.waiting == 1)
        for stream in (False, True):
            reply = await server.chat("third", stream=stream)
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert int(reply.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            await server.client().chat.completions.create(model="m", messages=[{"role": "user", "content": "third"}])
        server.model.release()


async def test_37_the_line_is_bounded_by_tokens_too(serve: Callable[..., Any]) -> None:
    limits = ServingLimits(max_waiting=9, max_waiting_tokens=100)
    async with serve(sessions=1, limits=limits) as server, trio.open_nursery() as nursery:
        server.model.hold()
        nursery.start_soon(server.chat, "first")
        await until(lambda: server.engine.line.running == 1)
        nursery.start_soon(server.chat, "x" * 80)
        await until(lambda: server.engine.line.waiting == 1)
        reply = await server.chat("y" * 80)
        assert reply.status == 429
        assert "prompt tokens wait" in reply.error["message"]
        nursery.start_soon(server.chat, "z")
        await until(lambda: server.engine.line.waiting == 2)
        server.model.release()


async def test_38_running_answers_go_on_while_a_long_prompt_is_evaluated(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.script["go"] = 400 * "a"
        server.model.hold(after=3)
        stream = await server.stream(chat_body("go", stream=True))
        await until(lambda: server.model.is_waiting)
        drawn = len(server.model.seen)
        connection = await server.connect()
        await connection.send("POST", "/v1/chat/completions", chat_body(LONG, max_tokens=1))
        await until(lambda: server.engine.line.running == 2)
        server.model.release()
        await connection.head()
        short = [one for one in server.model.seen[drawn:] if b"tell me" not in bytes(t for t in one if t < 256)]
        assert len(short) >= 3
        await stream.aclose()
        await connection.aclose()


async def test_39_a_second_turn_hits_and_a_miss_says_why(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        sessions = server.engine.sessions
        history = [{"role": "system", "content": "It is 10:00."}, {"role": "user", "content": "hi"}]
        await server.ask("POST", "/v1/chat/completions", chat_body("", messages=history))
        assert dict(sessions.misses) == {"new": 1}
        turn = [*history, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and"}]
        assert cached(await server.ask("POST", "/v1/chat/completions", chat_body("", messages=turn))) > 10
        assert sessions.hits == 1
        turn[0] = {"role": "system", "content": "It is 10:01."}
        assert cached(await server.ask("POST", "/v1/chat/completions", chat_body("", messages=turn))) == 0
        assert dict(sessions.misses) == {"new": 1, "diverged": 1}


async def test_39_a_thinking_chat_hits_where_its_prompt_ended(serve: Callable[..., Any]) -> None:
    """The format drops the reasoning of earlier turns: what was evaluated of them is of no use, the copy before it is."""
    async with serve(sessions=4, limits=ServingLimits(sessions=2)) as server:
        server.model.script[LONG] = "hm</think>yes"
        messages = [{"role": "user", "content": LONG}]
        spent = 0
        for _ in range(3):
            body = chat_body("", messages=messages, **THINKING)
            reply = await server.ask("POST", "/v1/chat/completions", body)
            said = reply.json()["choices"][0]["message"]
            assert (said["reasoning_content"], said["content"]) == ("hm", "yes")
            assert cached(reply) == max(spent - 1, 0)
            spent = reply.json()["usage"]["prompt_tokens"]
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": LONG}]
        assert "dgr_prefixes_stored_total 3.0" in (await server.ask("GET", "/metrics")).body.decode()


async def test_39_a_lost_state_is_a_miss_of_its_own(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        await server.chat("hi")
        turn = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "on"},
        ]
        await server.model.offline.restart("stage-1")
        server.model.attach()
        await until(lambda: server.engine.is_ready)
        reply = await server.ask("POST", "/v1/chat/completions", chat_body("", messages=turn))
        assert reply.json()["choices"][0]["message"]["content"] == "on"
        assert cached(reply) == 0


async def test_40_no_conversation_sees_the_state_of_another(serve: Callable[..., Any]) -> None:
    """Two conversations take turns on one slot: every history that tokens were drawn from is the conversation's own."""
    async with serve(sessions=1) as server:
        talks: dict[str, list[dict[str, str]]] = {"a": [], "b": []}
        for turn in range(3):
            for name, talk in talks.items():
                talk.append({"role": "user", "content": f"{name}{turn}"})
                reply = await server.ask("POST", "/v1/chat/completions", chat_body("", messages=talk))
                assert reply.json()["choices"][0]["message"]["content"] == f"{name}{turn}"
                talk.append({"role": "assistant", "content": f"{name}{turn}"})
                other = b"b0" if name == "a" else b"a0"
                assert other not in bytes(token for token in server.model.seen[-1] if token < 256)


async def test_41_the_model_is_described(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=512) as server, server.client() as client:
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.owned_by, model.model_extra["context_length"]) == ("m", "dgr", 512)
        assert (await client.models.retrieve("m")).created == model.created
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        reply = await server.chat("hi", model="other")
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_42_the_metrics_have_the_names_of_others_dashboards(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        await server.chat("hello")
        text = (await server.ask("GET", "/metrics")).body.decode()
        found = {
            line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line[0] != "#"
        }
        for name in (
            "time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
            "num_requests_running", "num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total",
            "prompt_tokens_total", "tokens_predicted_total",
        ):  # fmt: skip
            assert f"dgr_{name}" in found
        assert found["dgr_time_to_first_token_seconds_count"] == 1
        assert found["dgr_tokens_predicted_total"] == found["dgr_inter_token_latency_seconds_count"] + 1 == 5
