"""OpenAI's Responses API, as far as it needs no state on the server: events and objects are deepseek-recipe's."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from deepseek_recipe import ResponsesRequest, ResponsesResponse

from dgr.serving.api.errors import ApiError
from dgr.serving.api.fields import ResponsesFields, read_fields
from dgr.serving.api.responses import responses_prompt
from dgr.serving.http.endpoints import (
    GeneratingEndpoint,
    Plan,
    Running,
    check_model,
    default_tokens,
    phase_comment,
)
from dgr.serving.http.replies import ParsedReply
from dgr.serving.http.streams import data_event

__all__ = ["Responses"]


class _ResponseEvents:
    """The dialect: a part is an event of the library's, whose numbers of tokens are replaced by the engine's."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata or {}
        #: Events so far; the next one's ``sequence_number``.
        self._told = 0
        #: The response as the last event had it.
        self._response: dict[str, Any] = {}

    def events(self, one: Running, parts: list[Any]) -> bytes:
        return b"".join(self._event(one, part) for part in parts)

    def ending(self, _: list[Running]) -> bytes:
        return b""  # the last event of the one answer has said so

    def failure(self, error: ApiError) -> bytes:
        told = error.content()["error"]
        if not self._response:
            event = {"type": "error", "sequence_number": self._told, **told}
        else:
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            failed = {"status": "failed", "error": {"code": code, "message": error.message}}
            event = {
                "type": "response.failed",
                "sequence_number": self._told,
                "response": {**self._response, **failed},
            }
        return data_event(msgspec.json.encode(event), event["type"])

    def sign_of_life(self, running: list[Running]) -> bytes:
        return phase_comment(running)

    def whole(self, running: list[Running]) -> bytes:
        (one,) = running
        return msgspec.json.encode(self._corrected(one, one.parts[-1].to_json())["response"])

    def _event(self, one: Running, part: Any) -> bytes:
        name = ResponsesResponse.sse_event_name(part)
        assert name is not None
        self._told += 1
        data = part.to_json()
        if name.endswith("delta"):
            return data_event(data.encode(), name)
        return data_event(msgspec.json.encode(self._corrected(one, data)), name)

    def _corrected(self, one: Running, data: str) -> dict[str, Any]:
        event: dict[str, Any] = msgspec.json.decode(data)
        response = event.get("response")
        items = [event["item"]] if "item" in event else []
        if response is not None:
            self._response = response
            items += response["output"]
            response["metadata"] = self._metadata
            if response["usage"] is not None:
                response["usage"] = _usage(one)
        for item in items:
            if item["type"] == "reasoning":
                item["encrypted_content"] = None  # its text is in the clear
        return event


def _usage(one: Running) -> dict[str, Any]:
    usage = one.answer.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": one.reply.reasoning_tokens or 0},
        "total_tokens": usage.prompt + usage.completion,
    }


class Responses(GeneratingEndpoint):
    """``POST /v1/responses``."""

    name = "responses"

    def plan(self, body: dict[str, Any]) -> Plan:
        service, options = self.service, self.service.options
        fields = read_fields(body, ResponsesFields)
        check_model(fields, service)
        if fields.top_logprobs and not fields.wants_logprobs:
            message = 'top_logprobs needs "message.output_text.logprobs" in include'
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")
        prompt = responses_prompt(
            body, service.vocabulary, default=options.thinking, ladder=options.ladder, n_ctx=service.n_ctx
        )
        top = (fields.top_logprobs or 0) if fields.wants_logprobs else None

        def reply(_: int) -> ParsedReply:
            identifier = f"resp_{secrets.token_hex(12)}"
            generator = ResponsesRequest.chunk_generator(prompt.chat.conversation, identifier, options.model)
            return ParsedReply(
                generator.with_echo(prompt.echo),
                prompt.chat,
                service.vocabulary,
                service.tokenizer,
                stop=fields.stop_strings,
                top_logprobs=top,
            )

        dialect = _ResponseEvents(body.get("metadata"))
        return Plan(fields, [prompt.chat.tokens], reply, dialect, default_tokens(prompt.chat, service.n_ctx))
