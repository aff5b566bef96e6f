"""Anthropic's Messages API: events and messages are deepseek-recipe's."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from deepseek_recipe import MessagesRequest, MessagesResponse

from dgr.client.tracing import RequestTrace
from dgr.serving.api.errors import ApiError, ErrorShape
from dgr.serving.api.fields import MessagesFields, read_fields
from dgr.serving.api.messages import messages_prompt
from dgr.serving.api.prompts import ChatPrompt
from dgr.serving.http.endpoints import (
    Endpoint,
    GeneratingEndpoint,
    Plan,
    Running,
    check_model,
    default_tokens,
    phase_comment,
)
from dgr.serving.http.keys import Receive, Send
from dgr.serving.http.replies import ParsedReply
from dgr.serving.http.service import Service
from dgr.serving.http.streams import data_event, send_whole

__all__ = ["CountTokens", "Messages"]

_PING = data_event(b'{"type":"ping"}', "ping")


class _MessageEvents:
    """The dialect: a part is an event of the library's, whose numbers of tokens are replaced by the engine's."""

    def __init__(self, identifier: str, model: str) -> None:
        self._identifier = identifier
        self._model = model
        self._has_begun = False

    def events(self, one: Running, parts: list[Any]) -> bytes:
        self._has_begun = True
        return b"".join(self._event(one, part) for part in parts)

    def ending(self, _: list[Running]) -> bytes:
        return b""  # the last event of the one answer has said so

    def failure(self, error: ApiError) -> bytes:
        return data_event(error.body(ErrorShape.ANTHROPIC), "error")

    def sign_of_life(self, running: list[Running]) -> bytes:
        """The API's own sign, which clients know once the message has begun."""
        return _PING if self._has_begun else phase_comment(running)

    def whole(self, running: list[Running]) -> bytes:
        (one,) = running
        response = MessagesResponse(self._identifier, self._model, int(time.time()), 0, 0)
        for part in one.parts:
            response.accumulate(part)
        message = msgspec.json.decode(response.to_json())
        return msgspec.json.encode({**message, "usage": _usage(one, message["usage"])})

    def _event(self, one: Running, part: Any) -> bytes:
        name, data = MessagesResponse.sse_event_name(part), part.to_json()
        if name == "message_delta":
            event = msgspec.json.decode(data)
            data = msgspec.json.encode({**event, "usage": _usage(one, event["usage"])}).decode()
        return data_event(data.encode(), name)


def _usage(one: Running, told: dict[str, Any]) -> dict[str, Any]:
    """Prompt tokens that were found evaluated are counted apart from the others, as in Anthropic's API."""
    usage = one.answer.usage
    counted = {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
    return {**told, **counted}


def _prompt(service: Service, body: dict[str, Any]) -> ChatPrompt:
    options = service.options
    return messages_prompt(
        body, service.vocabulary, default=options.thinking, ladder=options.ladder, n_ctx=service.n_ctx
    )


class Messages(GeneratingEndpoint):
    """``POST /v1/messages``."""

    name = "messages"
    errors = ErrorShape.ANTHROPIC

    def plan(self, body: dict[str, Any]) -> Plan:
        service, model = self.service, self.service.options.model
        fields = read_fields(body, MessagesFields)
        check_model(fields, service)
        prompt = _prompt(service, body)
        identifier = f"msg_{secrets.token_hex(12)}"

        def reply(_: int) -> ParsedReply:
            generator = MessagesRequest.chunk_generator(prompt.conversation, identifier, model)
            return ParsedReply(generator, prompt, service.vocabulary, service.tokenizer, stop=fields.stop_strings)

        dialect = _MessageEvents(identifier, model)
        return Plan(fields, [prompt.tokens], reply, dialect, default_tokens(prompt, service.n_ctx))


class CountTokens(Endpoint):
    """``POST /v1/messages/count_tokens``: how long the prompt of such a request would be."""

    name = "count_tokens"
    errors = ErrorShape.ANTHROPIC

    async def answer(self, receive: Receive, send: Send, trace: RequestTrace | None) -> None:  # noqa: ARG002 (as an endpoint's)
        count = await self.understand(receive, self._count)
        await send_whole(send, msgspec.json.encode({"input_tokens": count}))

    def _count(self, body: dict[str, Any]) -> int:
        check_model(read_fields(body, MessagesFields), self.service)
        return len(_prompt(self.service, body).tokens)
