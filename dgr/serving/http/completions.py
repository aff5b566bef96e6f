"""OpenAI's two older APIs, chat and text completions: choices in chunks, or all of them in one object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dgr.core.arguments import token_ids
from dgr.serving.api.errors import ApiError, naming
from dgr.serving.api.fields import ChatFields, ChoicesFields, CompletionFields, read_fields
from dgr.serving.api.prompts import chat_prompt, refuse_beyond
from dgr.serving.engine import Phase
from dgr.serving.http.endpoints import (
    GeneratingEndpoint,
    Plan,
    Running,
    check_model,
    default_tokens,
    least_far,
    phase_comment,
)
from dgr.serving.http.replies import ChatReply, CompletionReply
from dgr.serving.http.service import Service
from dgr.serving.http.streams import data_event
from dgr.serving.http.whole import whole_chat, whole_completion

__all__ = ["MOST_AT_ONCE", "ChatCompletions", "Completions"]

#: Choices of all prompts of one request.
MOST_AT_ONCE = 128
#: Tokens of a text completion that says nothing of its length, as in OpenAI's API.
_TEXT_TOKENS = 16


class Choices:
    """The dialect of both: a part is a choice of a chunk."""

    def __init__(
        self,
        service: Service,
        fields: ChoicesFields,
        kind: str,
        prefix: str,
        whole: Callable[[list[list[dict[str, Any]]]], list[dict[str, Any]]],
    ) -> None:
        self._fields = fields
        self._kind = kind
        self._whole = whole
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if kind == "chat.completion" else kind,
            "created": int(time.time()),
            "model": service.options.model,
            "system_fingerprint": service.fingerprint,
        }
        self._no_usage: dict[str, Any] = {"usage": None} if fields.wants_usage else {}

    def events(self, _: Running, parts: list[Any]) -> bytes:
        return b"".join(self._chunk(choices=[choice], **self._no_usage) for choice in parts)

    def ending(self, running: list[Running]) -> bytes:
        usage = self._chunk(choices=[], usage=self._usage(running)) if self._fields.wants_usage else b""
        return usage + data_event(b"[DONE]")

    def failure(self, error: ApiError) -> bytes:
        return data_event(error.body())

    def sign_of_life(self, running: list[Running]) -> bytes:
        """A comment that says how far the answer is; an event, where the client asked for progress."""
        answer = least_far(running)
        if answer.phase not in (Phase.WAITING, Phase.PREFILL) or not self._fields.wants_progress:
            return phase_comment(running)
        told = {
            "total": answer.usage.prompt,
            "cache": answer.usage.cached,
            "processed": answer.evaluated,
            "time_ms": answer.prefill_ms,
        }
        return self._chunk(choices=[], prompt_progress=told)

    def whole(self, running: list[Running]) -> bytes:
        choices = self._whole([one.parts for one in running])
        told = {**self._head, "object": self._kind, "choices": choices, "usage": self._usage(running)}
        return msgspec.json.encode(told)

    def _chunk(self, **content: Any) -> bytes:
        return data_event(msgspec.json.encode({**self._head, **content}))

    def _usage(self, running: list[Running]) -> dict[str, Any]:
        """Tokens of all choices. Of a prompt with several, the least that was found evaluated counts as cached."""
        n, answers = self._fields.choices, [one.answer for one in running]
        prompt = sum(answer.usage.prompt for answer in answers[::n])
        cached = sum(min(answer.usage.cached for answer in answers[at : at + n]) for at in range(0, len(answers), n))
        completion = sum(answer.usage.completion for answer in answers)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "prompt_cache_hit_tokens": cached,
            "prompt_cache_miss_tokens": prompt - cached,
        }
        reasoning = [one.reply.reasoning_tokens for one in running if one.reply.reasoning_tokens is not None]
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage


class ChatCompletions(GeneratingEndpoint):
    """``POST /v1/chat/completions``."""

    name = "chat"

    def plan(self, body: dict[str, Any]) -> Plan:
        service = self.service
        fields = read_fields(body, ChatFields)
        check_model(fields, service)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
        options = service.options
        prompt = chat_prompt(
            body, service.vocabulary, default=options.thinking, ladder=options.ladder, n_ctx=service.n_ctx
        )
        top = (fields.top_logprobs or 0) if fields.logprobs else None

        def reply(index: int) -> ChatReply:
            return ChatReply(
                index, prompt, service.vocabulary, service.tokenizer, stop=fields.stop_strings, top_logprobs=top
            )

        dialect = Choices(service, fields, "chat.completion", "chatcmpl", whole_chat)
        return Plan(fields, [prompt.tokens], reply, dialect, default_tokens(prompt, service.n_ctx))


class Completions(GeneratingEndpoint):
    """``POST /v1/completions``."""

    name = "completions"

    def plan(self, body: dict[str, Any]) -> Plan:
        service = self.service
        fields = read_fields(body, CompletionFields)
        check_model(fields, service)
        prompts = self._prompts(fields)

        def reply(index: int) -> CompletionReply:
            return CompletionReply(index, service.vocabulary, stop=fields.stop_strings, top_logprobs=fields.logprobs)

        dialect = Choices(service, fields, "text_completion", "cmpl", whole_completion)
        return Plan(fields, prompts, reply, dialect, _TEXT_TOKENS)

    def _prompts(self, fields: CompletionFields) -> list[tuple[int, ...]]:
        """Token ids of every prompt. A text begins with the model's begin-of-text token; ids are taken as they are."""
        given: Sequence[object] = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
        if given and all(isinstance(each, int) for each in given):
            given = [given]
        if not 0 < len(given) * fields.choices <= MOST_AT_ONCE:
            message = (
                f"prompt: {len(given)} prompts of {fields.choices} choices; give 1 to {MOST_AT_ONCE} choices in all"
            )
            raise ApiError(400, message, param="prompt", code="invalid_value")
        vocabulary = self.service.vocabulary
        bos = () if vocabulary.bos is None else (vocabulary.bos,)
        prompts: list[tuple[int, ...]] = []
        for each in given:
            if isinstance(each, str):
                refuse_beyond(each, vocabulary, self.service.n_ctx)
                prompts.append((*bos, *vocabulary.encode(each)))
            elif isinstance(each, list) and each:
                with naming("prompt"):
                    prompts.append(tuple(token_ids("prompt", each, self.service.engine.pipeline.n_vocab)))
            else:
                message = (
                    "prompt: give a text, token ids, or a list of texts or of lists of token ids; none of them empty"
                )
                raise ApiError(400, message, param="prompt", code="invalid_value")
        return prompts
