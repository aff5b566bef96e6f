"""The two endpoints that generate: one way of answering for both, streamed or whole."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import trio
from attrs import define, frozen

from dgr.core.values import SamplingParams
from dgr.errors import DgrError
from dgr.serving.api.errors import ApiError, api_error, overlong
from dgr.serving.api.fields import ChatFields, CompletionFields, Fields, decode_body, read_fields
from dgr.serving.api.prompts import chat_prompt, refuse_beyond
from dgr.serving.engine import Answer, Job, Phase
from dgr.serving.http.keys import Receive, Scope, Send, send_error
from dgr.serving.http.replies import ChatReply, CompletionReply, Reply
from dgr.serving.http.service import Service
from dgr.serving.http.streams import ClientLeft, Emit, data_event, read_body, send_events, send_whole, while_connected
from dgr.serving.http.whole import whole_chat, whole_completion
from dgr.wire.nurseries import open_nursery

_log = logging.getLogger("dgr.serve")

__all__ = ["ChatCompletions", "Completions", "Endpoint"]

#: Seconds between two reports of progress, where a client asked for them.
_PROGRESS = 1.0
#: Answers without a bound of their own are at most this long, as in DeepSeek's API without thinking.
_DEFAULT_TOKENS = 8192
#: Bytes of a body that are read at once: a millisecond or so.
_SHORT = 32 << 10


@frozen
class Plan:
    """A request, read: what to run, and what each choice's tokens become."""

    fields: Fields
    #: One for each prompt; a chat has one.
    prompts: Sequence[tuple[int, ...]]
    #: Tokens of each choice; None: as many as fit.
    most_tokens: int | None
    replies: Callable[[int], Reply]
    #: ``object`` of a chunk, and the head of an identifier.
    object: str
    prefix: str
    whole: Callable[[list[list[dict[str, Any]]]], list[dict[str, Any]]]
    #: What a default of ``most_tokens`` is at most.
    default_tokens: int = _DEFAULT_TOKENS


@define
class Running:
    """One choice under way."""

    answer: Answer
    reply: Reply
    chunks: list[dict[str, Any]]


class Endpoint:
    """An ASGI application: reads a body, is admitted, answers; ends its work when the client leaves."""

    name = ""

    def __init__(self, service: Service) -> None:
        self.service = service

    def plan(self, body: dict[str, Any]) -> Plan:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        status, began = 200, trio.current_time()
        try:
            await self._answer(receive, send)
        except ClientLeft:
            status = 499  # nginx's word for it; nobody is there to read one
        except ApiError as error:
            status = error.status
            await send_error(send, error)
        except DgrError as error:
            told = api_error(error)
            status = told.status
            await send_error(send, told)
        finally:
            self.service.metrics.requests.labels(self.name, str(status)).inc()
            _log.info("%s: %d after %.3f s", self.name, status, trio.current_time() - began)

    async def _answer(self, receive: Receive, send: Send) -> None:
        raw = await read_body(receive, self.service.options.max_body)
        self.service.engine.refuse_if_not_serving()
        plan = await self._read(raw)
        head = {
            "id": f"{plan.prefix}-{secrets.token_hex(12)}",
            "object": plan.object,
            "created": int(time.time()),
            "model": self.service.options.model,
            "system_fingerprint": self.service.fingerprint,
        }
        async with self._admitted(plan) as running:
            if plan.fields.stream:
                await self._stream(plan, head, running, receive, send)
                return
            whole = await while_connected(receive, partial(self._collect, plan, head, running))
        await send_whole(send, whole)

    async def _read(self, raw: bytes) -> Plan:
        """The request, read; a long one in a thread, so that streams go on."""

        def read() -> Plan:
            return self.plan(decode_body(raw))

        if len(raw) <= _SHORT:
            return read()
        async with self.service.reading:
            return await trio.to_thread.run_sync(read)

    # --- admission ---

    @asynccontextmanager
    async def _admitted(self, plan: Plan) -> AsyncIterator[list[Running]]:
        """Every choice in the line, or none."""
        async with AsyncExitStack() as stack:
            running = []
            for index, job in enumerate(self._jobs(plan)):
                answer = await stack.enter_async_context(self.service.engine.admit(job))
                running.append(Running(answer, plan.replies(index), []))
            yield running

    def _jobs(self, plan: Plan) -> list[Job]:
        fields, vocabulary, n_ctx = plan.fields, self.service.vocabulary, self.service.n_ctx
        seed = fields.seed_or_random()
        stop = frozenset(fields.stop_token_ids or ())
        if not fields.ignore_eos and vocabulary.eos is not None:
            stop |= {vocabulary.eos}
        jobs = []
        for prompt in plan.prompts:
            most = plan.most_tokens
            if most is None:
                most = max(1, min(plan.default_tokens, n_ctx - len(prompt)))
            least = fields.min_tokens or 0
            if least > most:
                message = f"min_tokens is {least}, and the answer has at most {most}"
                raise ApiError(400, message, param="min_tokens", code="invalid_value")
            if len(prompt) + most > n_ctx:
                raise overlong(len(prompt), most if plan.most_tokens is not None else None, n_ctx)
            for choice in range(fields.choices):
                sampling: SamplingParams = fields.sampling(seed, choice)
                jobs.append(Job(prompt, most, sampling, stop, least, seeded=fields.seed is not None))
        return jobs

    # --- running ---

    async def _run(self, running: Running, take: Callable[[list[dict[str, Any]]], Any]) -> None:
        """One choice, from the line to its last token."""
        answer, reply, metrics = running.answer, running.reply, self.service.metrics
        began = last = trio.current_time()
        try:
            # The deadline is for the client too: one that reads slowly must not hold a slot for longer.
            with trio.CancelScope(deadline=answer.deadline) as scope:
                async for token in answer:
                    now = trio.current_time()
                    (metrics.first_token if answer.usage.completion == 1 else metrics.inter_token).observe(now - last)
                    last = now
                    await take(reply.token(token))
                    if reply.finished:
                        answer.finish("stop")
            if scope.cancelled_caught:
                raise answer.time_out()
        finally:
            self.service.engine.release(answer)
        metrics.whole.observe(trio.current_time() - began)
        await take(reply.closing(answer.finish_reason or "stop"))

    async def _run_all(self, running: list[Running], take: Callable[[Running, list[dict[str, Any]]], Any]) -> None:
        """All choices side by side; the first failure ends the others, and is the one that is told."""
        failures: list[DgrError] = []

        async def run(one: Running) -> None:
            try:
                await self._run(one, partial(take, one))
            except DgrError as error:
                failures.append(error)
                for other in running:
                    other.answer.end(error)
                nursery.cancel_scope.cancel()

        async with open_nursery() as nursery:
            for one in running:
                nursery.start_soon(run, one)
        if failures:
            raise failures[0]

    async def _collect(self, plan: Plan, head: dict[str, Any], running: list[Running]) -> bytes:
        async def keep(one: Running, chunks: list[dict[str, Any]]) -> None:
            one.chunks += chunks

        for one in running:
            one.chunks += one.reply.opening()
        await self._run_all(running, keep)
        choices = plan.whole([one.chunks for one in running])
        head["object"] = plan.object.removesuffix(".chunk")
        return msgspec.json.encode({**head, "choices": choices, "usage": _usage(running, plan)})

    async def _stream(
        self, plan: Plan, head: dict[str, Any], running: list[Running], receive: Receive, send: Send
    ) -> None:
        usage: dict[str, Any] = {"usage": None} if plan.fields.wants_usage else {}

        async def produce(emit: Emit) -> None:
            async def tell(_: Running, choices: list[dict[str, Any]]) -> None:
                for choice in choices:
                    await emit(data_event(msgspec.json.encode({**head, "choices": [choice], **usage})))

            try:
                for one in running:
                    await tell(one, one.reply.opening())
                await self._run_all(running, tell)
            except DgrError as error:
                await emit(data_event(api_error(error).body))
                return
            if plan.fields.wants_usage:
                last = {**head, "choices": [], "usage": _usage(running, plan)}
                await emit(data_event(msgspec.json.encode(last)))
            await emit(data_event(b"[DONE]"))

        progress, every = bool(plan.fields.return_progress), self.service.options.keep_alive
        every = min(_PROGRESS, every) if progress else every
        await send_events(receive, send, produce, partial(_sign_of_life, head, running, progress), every)


def _sign_of_life(head: dict[str, Any], running: list[Running], progress: bool) -> bytes:
    """A comment that says how far the answer is; an event, where the client asked for progress."""
    answer = min((one.answer for one in running), key=lambda answer: list(Phase).index(answer.phase))
    phase, total, done = answer.phase, answer.usage.prompt, answer.evaluated
    if phase not in (Phase.WAITING, Phase.PREFILL) or not progress:
        return f": {phase.value}{f' {done}/{total}' if phase is Phase.PREFILL else ''}\n\n".encode()
    told = {"total": total, "cache": answer.usage.cached, "processed": done, "time_ms": answer.prefill_ms}
    return data_event(msgspec.json.encode({**head, "choices": [], "prompt_progress": told}))


def _usage(running: list[Running], plan: Plan) -> dict[str, Any]:
    """Tokens of all choices. Of a prompt with several, the least that was found evaluated counts as cached."""
    n, answers = plan.fields.choices, [one.answer for one in running]
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


class ChatCompletions(Endpoint):
    """``POST /v1/chat/completions``."""

    name = "chat"

    def plan(self, body: dict[str, Any]) -> Plan:
        service = self.service
        fields = read_fields(body, ChatFields)
        _check_model(fields, service)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
        options = service.options
        prompt = chat_prompt(
            body, service.vocabulary, default=options.thinking, ladder=options.ladder, n_ctx=service.n_ctx
        )
        top = (fields.top_logprobs or 0) if fields.logprobs else None

        def reply(index: int) -> ChatReply:
            return ChatReply(index, prompt, service.vocabulary, service.tokenizer, top_logprobs=top)

        # The encoder's own defaults for an answer's length: longer with thinking.
        room = max(1, service.n_ctx - len(prompt.tokens))
        default = prompt.conversation.resolve_max_tokens(len(prompt.tokens), len(prompt.tokens) + room)
        return Plan(
            fields,
            [prompt.tokens],
            fields.most_tokens,
            reply,
            "chat.completion.chunk",
            "chatcmpl",
            whole_chat,
            default,
        )


class Completions(Endpoint):
    """``POST /v1/completions``."""

    name = "completions"

    def plan(self, body: dict[str, Any]) -> Plan:
        service = self.service
        fields = read_fields(body, CompletionFields)
        _check_model(fields, service)
        prompts = self._prompts(fields)

        def reply(index: int) -> CompletionReply:
            return CompletionReply(index, service.vocabulary, stop=fields.stop_strings, top_logprobs=fields.logprobs)

        return Plan(fields, prompts, fields.max_tokens or 16, reply, "text_completion", "cmpl", whole_completion)

    def _prompts(self, fields: CompletionFields) -> list[tuple[int, ...]]:
        """Token ids of every prompt. A text begins with the model's begin-of-text token; ids are taken as they are."""
        given = fields.prompt
        if isinstance(given, str) or (given and all(isinstance(each, int) for each in given)):
            given = [given]  # type: ignore[list-item]
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
                prompts.append(tuple(each))
            else:
                message = (
                    "prompt: give a text, token ids, or a list of texts or of lists of token ids; none of them empty"
                )
                raise ApiError(400, message, param="prompt", code="invalid_value")
        return prompts


#: Choices of all prompts of one request.
MOST_AT_ONCE = 128


def _check_model(fields: Fields, service: Service) -> None:
    name = service.options.model
    if fields.model not in (None, name):
        raise ApiError(
            404,
            f"the model {str(fields.model)[:80]!r} is not served here; this server has {name!r}",
            param="model",
            code="model_not_found",
        )
