"""What every endpoint that reads a body does, and those that generate: one way of answering, streamed or whole.

How an API says it is its :class:`Dialect`; they are in :mod:`~dgr.serving.http.completions`,
:mod:`~dgr.serving.http.responses` and :mod:`~dgr.serving.http.messages`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import trio
from attrs import define, frozen

from dgr.client.tracing import RequestTrace
from dgr.core.log_fields import log_fields
from dgr.errors import DgrError
from dgr.protocol.sampling import sampling_problem
from dgr.protocol.threads import in_thread
from dgr.serving.api.errors import ApiError, ErrorShape, api_error, naming, overlong
from dgr.serving.api.fields import Fields, decode_body
from dgr.serving.api.prompts import ChatPrompt
from dgr.serving.engine import Answer, Job, Phase
from dgr.serving.http.keys import Receive, Scope, Send, send_error
from dgr.serving.http.replies import Reply
from dgr.serving.http.service import Service
from dgr.serving.http.streams import ClientLeft, Emit, read_body, send_events, send_whole, while_connected
from dgr.serving.shared import SharedPrompt
from dgr.wire.nurseries import open_nursery

_log = logging.getLogger("dgr.serve")

__all__ = [
    "Dialect",
    "Endpoint",
    "GeneratingEndpoint",
    "Plan",
    "Running",
    "check_model",
    "default_tokens",
    "least_far",
    "phase_comment",
]

#: Seconds between two reports of progress, where a client asked for them.
_PROGRESS = 1.0
#: Answers without a bound of their own are at most this long, as in DeepSeek's API without thinking.
_DEFAULT_TOKENS = 8192
#: Bytes of a body that are read at once: a millisecond or so.
_SHORT = 32 << 10

T = TypeVar("T")


@define
class Running:
    """One answer under way."""

    answer: Answer
    reply: Reply
    #: What the reply made of it so far, where it is not streamed.
    parts: list[Any]


class Dialect(Protocol):
    """How one API tells of the answers to one request: server-sent events, or the body of a whole response."""

    def events(self, one: Running, parts: list[Any]) -> bytes:
        """What a stream gets for some parts of an answer; empty for none."""

    def ending(self, running: list[Running]) -> bytes:
        """What a stream gets when all answers are complete."""

    def failure(self, error: ApiError) -> bytes:
        """What a stream gets in place of an ending."""

    def sign_of_life(self, running: list[Running]) -> bytes:
        """What a stream gets when there is nothing to tell."""

    def whole(self, running: list[Running]) -> bytes:
        """The response of a request that is not streamed, as JSON."""


@frozen
class Plan:
    """A request, read: what to run, and what each answer's tokens become."""

    fields: Fields
    #: One for each prompt; a conversation has one.
    prompts: Sequence[tuple[int, ...]]
    replies: Callable[[int], Reply]
    dialect: Dialect
    #: Tokens of an answer where nothing is said, if they fit.
    default_tokens: int = _DEFAULT_TOKENS


class Endpoint:
    """An ASGI application that reads a body and answers; it ends its work when the client leaves."""

    #: As counted in the metrics.
    name = ""
    errors = ErrorShape.OPENAI

    def __init__(self, service: Service) -> None:
        self.service = service

    async def answer(self, receive: Receive, send: Send, trace: RequestTrace | None) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began, tracing = 200, trio.current_time(), self.service.tracing
        traced = None if tracing is None else tracing.begin(f"POST {scope['path']}", scope["headers"])
        try:
            await self.answer(receive, send, None if traced is None else traced.request)
        except ClientLeft:
            status = 499  # nginx's word for it; nobody is there to read one
        except (ApiError, DgrError) as error:
            told = error if isinstance(error, ApiError) else api_error(error)
            status = told.status
            await send_error(send, told, self.errors)
        finally:
            self.service.metrics.requests.labels(self.name, str(status)).inc()
            pipeline = self.service.engine.pipeline
            fields = log_fields(pipeline.route_id, pipeline.epoch)
            if tracing is not None and traced is not None:
                tracing.end(traced, status)
                fields = {**fields, "trace": traced.id}
            _log.info("%s: %d after %.3f s", self.name, status, trio.current_time() - began, extra=fields)

    def check_serves(self) -> None:
        """Raises where nothing would come of understanding a request."""

    async def understand(self, receive: Receive, by: Callable[[dict[str, Any]], T]) -> T:
        """What a request's body comes to; a long one in a thread, so that streams go on.

        Raises :class:`ApiError`, :class:`~dgr.errors.DgrError`, :class:`ClientLeft`.
        """
        with self.service.bodies.held() as body:
            raw = await read_body(receive, self.service.options.max_body, body)
            self.check_serves()
            if len(raw) <= _SHORT:
                return by(decode_body(raw))

            async def in_turn() -> T:
                async with self.service.reading:
                    return await in_thread(lambda: by(decode_body(raw)))

            return await while_connected(receive, in_turn)


class GeneratingEndpoint(Endpoint):
    """An endpoint that is admitted to the engine, and answers with what that generates."""

    def plan(self, body: dict[str, Any]) -> Plan:
        """What to do for a body. Raises :class:`ApiError`, :class:`~dgr.errors.DgrError`."""
        raise NotImplementedError

    def check_serves(self) -> None:
        self.service.engine.refuse_if_not_serving()

    async def answer(self, receive: Receive, send: Send, trace: RequestTrace | None) -> None:
        plan = await self.understand(receive, self.plan)
        async with self._admitted(plan, trace) as running:
            if plan.fields.stream:
                await self._stream(plan, running, receive, send)
                return
            whole = await while_connected(receive, partial(self._collect, plan, running))
        await send_whole(send, whole)

    # --- admission ---

    @asynccontextmanager
    async def _admitted(self, plan: Plan, trace: RequestTrace | None) -> AsyncIterator[list[Running]]:
        """Every answer in the line, or none."""
        jobs, line = self._jobs(plan), self.service.engine.line
        param = "n" if plan.fields.choices > 1 else "prompt"
        with naming(param, f"{param}: "):
            line.refuse_more_than_ever_fits([len(job.prompt) for job in jobs])
        async with AsyncExitStack() as stack:
            running = []
            for index, job in enumerate(jobs):
                answer = await stack.enter_async_context(self.service.engine.admit(job, trace=trace))
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
            most = plan.fields.most_tokens
            if most is None:
                most = max(1, min(plan.default_tokens, n_ctx - len(prompt)))
            least = fields.min_tokens or 0
            if least > most:
                message = f"min_tokens is {least}, and the answer has at most {most}"
                raise ApiError(400, message, param="min_tokens", code="invalid_value")
            if len(prompt) + most > n_ctx:
                raise overlong(len(prompt), most if plan.fields.most_tokens is not None else None, n_ctx)
            shared = SharedPrompt() if fields.choices > 1 else None
            for choice in range(fields.choices):
                sampling = fields.sampling(seed, choice)
                problem = sampling_problem(sampling, self.service.engine.pipeline.n_vocab)
                if problem is not None:  # it begins with the parameter's name
                    raise ApiError(400, problem, param=fields.name_of(problem.split()[0]), code="invalid_value")
                ends_early, seeded = bool(fields.stop_strings), fields.seed is not None
                jobs.append(Job(prompt, most, sampling, stop, least, ends_early, seeded=seeded, shared=shared))
        return jobs

    # --- running ---

    async def _run(self, running: Running, take: Callable[[list[Any]], Any]) -> None:
        """One answer, from the line to its last token."""
        answer, reply, metrics = running.answer, running.reply, self.service.metrics
        began = first = last = trio.current_time()
        try:
            # The deadline is for the client too: one that reads slowly must not hold a slot for longer.
            with trio.CancelScope(deadline=answer.deadline) as scope:
                async for token in answer:
                    now = trio.current_time()
                    if answer.usage.completion == 1:
                        first = now
                        metrics.first(answer, began, now)
                    else:
                        metrics.inter_token.observe(now - last)
                    last = now
                    await take(reply.token(token))
                    if reply.finished:
                        answer.finish("stop")
            if scope.cancelled_caught:
                raise answer.time_out()
        finally:
            self.service.engine.release(answer)
        ended = trio.current_time()
        metrics.complete(answer, began, first, ended)
        if answer.trace is not None:
            _note_phases(answer.trace, began, max(answer.place.since, began), first, ended)
        await take(reply.closing(answer.finish_reason or "stop"))

    async def _run_all(self, running: list[Running], take: Callable[[Running, list[Any]], Any]) -> None:
        """All answers side by side; the first failure ends the others, and is the one that is told."""
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

    async def _collect(self, plan: Plan, running: list[Running]) -> bytes:
        async def keep(one: Running, parts: list[Any]) -> None:
            one.parts += parts

        for one in running:
            one.parts += one.reply.opening()
        await self._run_all(running, keep)
        return plan.dialect.whole(running)

    async def _stream(self, plan: Plan, running: list[Running], receive: Receive, send: Send) -> None:
        dialect = plan.dialect

        async def produce(emit: Emit) -> None:
            async def tell(one: Running, parts: list[Any]) -> None:
                if parts:
                    await emit(dialect.events(one, parts))

            try:
                for one in running:
                    await tell(one, one.reply.opening())
                await self._run_all(running, tell)
            except DgrError as error:
                await emit(dialect.failure(api_error(error)))
                return
            if end := dialect.ending(running):
                await emit(end)

        every = self.service.options.keep_alive
        every = min(_PROGRESS, every) if plan.fields.wants_progress else every
        await send_events(receive, send, produce, partial(dialect.sign_of_life, running), every)


def _note_phases(trace: RequestTrace, began: float, turn: float, first: float, ended: float) -> None:
    trace.phase("queue", began, turn)
    trace.phase("prefill", turn, first)
    trace.phase("decode", first, ended)


def least_far(running: list[Running]) -> Answer:
    """The answer that is the least far."""
    return min((one.answer for one in running), key=lambda answer: list(Phase).index(answer.phase))


def phase_comment(running: list[Running]) -> bytes:
    """A comment that says how far the answers are."""
    answer = least_far(running)
    done = f" {answer.evaluated}/{answer.usage.prompt}" if answer.phase is Phase.PREFILL else ""
    return f": {answer.phase.value}{done}\n\n".encode()


def default_tokens(prompt: ChatPrompt, n_ctx: int) -> int:
    """The encoder's own defaults for an answer's length: longer with thinking."""
    room = max(1, n_ctx - len(prompt.tokens))
    return prompt.conversation.resolve_max_tokens(len(prompt.tokens), len(prompt.tokens) + room)


def check_model(fields: Fields, service: Service) -> None:
    """Raises :class:`ApiError` when a request asks for another model."""
    name = service.options.model
    if fields.model not in (None, name):
        raise ApiError(
            404,
            f"the model {str(fields.model)[:80]!r} is not served here; this server has {name!r}",
            param="model",
            code="model_not_found",
        )
