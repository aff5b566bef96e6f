"""Whatever strangers write, and whatever a model says: a refusal or an answer, and never anything else."""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from deepseek_recipe import MessagesRequest, MessagesResponse, ResponsesRequest, Tokenizer
from serving.http.chat_model import TOKENS, spelled, vocabulary

from dgr.client.generation import GeneratedToken
from dgr.errors import DgrError
from dgr.serving.api.errors import ApiError
from dgr.serving.api.fields import ChatFields, MessagesFields, ResponsesFields, decode_body, read_fields
from dgr.serving.api.messages import messages_prompt
from dgr.serving.api.prompts import Ladder, Thinking, chat_prompt
from dgr.serving.api.recipe import no_panic
from dgr.serving.api.responses import responses_prompt
from dgr.serving.http.replies import ChatReply, ParsedReply
from dgr.serving.http.whole import whole_chat

_VALUES: list[Any] = [
    None, True, 0, 1, -1, 1e300, 2**63, 2**64, "", "x", "user", "assistant", "tool", "text", "function", "auto", "{}", "[1]",
    '{"a": 1}', '{"a":', "\ud800", "\x00", [], {}, "<think>", "｜DSML｜",
]  # fmt: skip
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments", "parameters", "prefix",
         "reasoning_content", "properties", "required", "items", "enum", "$ref", "anyOf", "text")  # fmt: skip
_PIECES = (
    "<｜DSML｜tool_calls>\n", '<｜DSML｜invoke name="f">\n', '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜parameter>\n",
    "</｜DSML｜invoke>\n", "</｜DSML｜tool_calls>", "</think>", "<think>", "x", "\n\n", "é", '"', "{}", "5", 'string="false">',
)  # fmt: skip


class Stranger:
    """Writes requests and answers at random; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _maybe(self, share: float) -> bool:
        return self._random.random() < share

    def _value(self, depth: int) -> Any:
        pick = self._random
        if not depth or self._maybe(0.5):
            return pick.choice(_VALUES)
        if self._maybe(0.5):
            return {pick.choice(_KEYS): self._value(depth - 1) for _ in range(pick.randint(0, 4))}
        return [self._value(depth - 1) for _ in range(pick.randint(0, 3))]

    def _message(self) -> dict[str, Any]:
        pick = self._random
        message = {"role": pick.choice(["system", "user", "assistant", "tool", "developer", "latest_reminder", 1])}
        message["content"] = pick.choice(["a", "", None, [{"type": "text", "text": "q"}], self._value(2)])
        if self._maybe(0.3):
            arguments = pick.choice(["{}", '{"a": 1}', "[1]", "nope", '{"a": 1e400}'])
            call = {
                "id": pick.choice(["c1", None]),
                "type": "function",
                "function": {"name": "f", "arguments": arguments},
            }
            message["tool_calls"] = pick.choice([[call], [call, call], self._value(2)])
        for name in ("tool_call_id", "reasoning_content", "reasoning", "prefix", pick.choice(_KEYS)):
            if self._maybe(0.2):
                message[name] = pick.choice(["c1", True, self._value(2)])
        return message

    def body(self) -> dict[str, Any]:
        pick = self._random
        body: dict[str, Any] = {"messages": [self._message() for _ in range(pick.randint(0, 4))]}
        if self._maybe(0.8):
            body["messages"].append({"role": "user", "content": "q"})
        if self._maybe(0.5):
            tool = {"type": "function", "function": {"name": pick.choice(["f", ""]), "parameters": self._value(4)}}
            body["tools"] = pick.choice([[tool], [{"type": "function", "function": {"name": "f"}}], self._value(3)])
        for name in (
            "tool_choice",
            "stop",
            "reasoning_effort",
            "thinking",
            "chat_template_kwargs",
            "n",
            "top_logprobs",
        ):
            if self._maybe(0.15):
                body[name] = pick.choice(
                    ["auto", "required", "none", "low", ["a"], {"type": "enabled"}, self._value(2)]
                )
        return body

    def items(self) -> dict[str, Any]:
        """A request of the Responses API."""
        pick = self._random
        items: list[Any] = []
        for _ in range(pick.randint(0, 4)):
            kind = pick.choice(["message", "reasoning", "function_call", "function_call_output", self._value(1)])
            item = {**self._message(), "type": kind, "call_id": pick.choice(["c1", "c2", None])}
            item |= {"name": "f", "arguments": pick.choice(["{}", '{"a": 1}', "nope"]), "output": self._value(1)}
            items.append({name: value for name, value in item.items() if self._maybe(0.9)})
        body: dict[str, Any] = {
            "input": pick.choice([items, [*items, {"role": "user", "content": "q"}], self._value(2)])
        }
        tool = {"type": "function", "name": "f", "parameters": pick.choice([{"type": "object"}, self._value(3)])}
        return self._settings(body, tool, "instructions", "reasoning", "text", "include", "metadata", "top_logprobs")

    def blocks(self) -> dict[str, Any]:
        """A request of the Messages API."""
        pick = self._random
        messages: list[Any] = []
        for _ in range(pick.randint(0, 4)):
            kinds = ["text", "thinking", "tool_use", "tool_result", self._value(1)]
            block = {
                "type": pick.choice(kinds),
                "text": "t",
                "thinking": "h",
                "signature": "s",
                "id": "c1",
                "name": "f",
            }
            block |= {
                "input": pick.choice([{}, {"a": 1}, self._value(2)]),
                "tool_use_id": "c1",
                "content": self._value(1),
            }
            message = {
                "role": pick.choice(["user", "assistant", 1]),
                "content": pick.choice([[block], "a", self._value(2)]),
            }
            messages.append(message)
        body: dict[str, Any] = {
            "messages": pick.choice([messages, [*messages, {"role": "user", "content": "q"}], self._value(2)])
        }
        tool = {"name": "f", "input_schema": pick.choice([{"type": "object"}, self._value(3)])}
        return self._settings(body, tool, "system", "output_config", "stop_sequences", "max_tokens", "thinking")

    def _settings(self, body: dict[str, Any], tool: dict[str, Any], *names: str) -> dict[str, Any]:
        pick = self._random
        if self._maybe(0.5):
            body["tools"] = pick.choice([[tool], [tool], self._value(2)])
        for name in (*names, "tool_choice"):
            if self._maybe(0.1):
                body[name] = pick.choice(["x", ["x"], {"type": "enabled"}, {"effort": "low"}, self._value(2)])
        return body

    def answer(self) -> list[int]:
        pick = self._random
        tokens = [token for _ in range(pick.randint(0, 25)) for token in spelled(pick.choice(_PIECES))]
        return [*tokens, *(pick.randrange(len(TOKENS)) for _ in range(pick.randint(0, 5)))]


def test_a_request_is_a_prompt_or_a_refusal_and_an_answer_has_one_end() -> None:
    words = vocabulary()
    tokenizer = Tokenizer.from_str(words.decoder_json)
    prompts = 0
    for seed in range(800):
        stranger = Stranger(seed)
        try:
            body = decode_body(json.dumps(stranger.body()).encode())
            fields = read_fields(body, ChatFields)
            prompt = chat_prompt(body, words, default=Thinking.OFF, ladder=Ladder.JULY)
        except (ApiError, DgrError):
            continue
        prompts += 1
        reply = ChatReply(0, prompt, words, tokenizer, stop=fields.stop_strings, top_logprobs=None)
        chunks = reply.opening()
        for token in stranger.answer():
            chunks += reply.token(GeneratedToken(token, 0, "", ()))
            if reply.finished:
                break
        chunks += reply.closing(("stop", "length")[seed % 2])
        reasons = [chunk["finish_reason"] for chunk in chunks]
        assert reasons[:-1] == [None] * (len(chunks) - 1)
        assert reasons[-1] in ("stop", "length", "tool_calls")
        (whole,) = whole_chat([chunks])
        assert "<｜User｜>" not in (whole["message"]["content"] or "")
        msgspec.json.encode(whole)
    assert prompts > 50


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_so_it_is_in_the_newer_apis(api: str) -> None:
    words = vocabulary()
    tokenizer = Tokenizer.from_str(words.decoder_json)
    options: Any = {"default": Thinking.LOW, "ladder": Ladder.JULY}
    prompts = 0
    for seed in range(2000):
        stranger = Stranger(seed)
        generator: Any
        try:
            body = decode_body(json.dumps(stranger.items() if api == "responses" else stranger.blocks()).encode())
            stop = read_fields(body, ResponsesFields if api == "responses" else MessagesFields).stop_strings
            if api == "responses":
                request = responses_prompt(body, words, **options)
                prompt = request.chat
                generator = ResponsesRequest.chunk_generator(prompt.conversation, "i", "m").with_echo(request.echo)
            else:
                prompt = messages_prompt(body, words, **options)
                generator = MessagesRequest.chunk_generator(prompt.conversation, "i", "m")
        except (ApiError, DgrError):
            continue
        prompts += 1
        reply = ParsedReply(generator, prompt, words, tokenizer, stop=stop)
        parts = reply.opening()
        for token in stranger.answer():
            parts += reply.token(GeneratedToken(token, 0, "", ()))
            if reply.finished:
                break
        parts += reply.closing(("stop", "length")[seed % 2])
        events = [json.loads(part.to_json()) for part in parts]
        if api == "responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            ends = {"response.completed", "response.incomplete"}
        else:
            whole = MessagesResponse("i", "m", 0, 0, 0)
            for part in parts:
                whole.accumulate(part)
            assert json.loads(whole.to_json())["stop_reason"] in ("end_turn", "max_tokens", "tool_use", "stop_sequence")
            ends = {"message_stop"}
        assert [event["type"] in ends for event in events] == [False] * (len(events) - 1) + [True]
        assert "<｜User｜>" not in json.dumps(events, ensure_ascii=False)
    assert prompts > 50


@pytest.mark.parametrize("depth", [100, 200, 900, 20_000])
def test_depth_is_bounded(depth: int) -> None:
    raw = b'{"messages": [{"role": "user", "content": "q"}], "tools": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    with pytest.raises(ApiError) as refused:
        chat_prompt(decode_body(raw), vocabulary(), default=Thinking.OFF, ladder=Ladder.JULY)
    assert refused.value.status == 400


def test_a_panic_of_native_code_ends_one_request() -> None:
    panic = type("PanicException", (BaseException,), {})
    for error in (panic("index out of bounds"), RuntimeError("stream processor has finished")):
        with pytest.raises(DgrError, match="deepseek-recipe"), no_panic("a test"):
            raise error
    with pytest.raises(KeyboardInterrupt), no_panic("a test"):
        raise KeyboardInterrupt
