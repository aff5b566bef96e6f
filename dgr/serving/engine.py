"""One object between many requests and one pipeline: admission, a session for each, deadlines, and what to count.

    async with open_serving(pipeline, ServingLimits()) as serving:
        async with serving.admit(Job(prompt, max_tokens=64)) as answer:   # refused at once, or has its place in the line
            async for token in answer:                                    # waits for its turn, then for each token
                ...
        answer.finish_reason, answer.usage

Leaving the block ends the work within one prefill chunk and keeps what was evaluated for the client's retry.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from dgr.client.generation import GeneratedToken, Generation
from dgr.client.pipeline import Pipeline
from dgr.client.tracing import RequestTrace
from dgr.errors import (
    ClosedError,
    ContextLimitExceeded,
    DeadlineExceeded,
    DgrError,
    InputError,
    InvalidToken,
    NotServing,
    Overloaded,
    PrefillFailed,
    RequestTimedOut,
    SessionError,
    StageDraining,
)
from dgr.protocol.sampling import check_sampling
from dgr.protocol.states import RouteState
from dgr.serving.jobs import Counters, Job, Phase, ServingLimits, Usage
from dgr.serving.line import Line, Place
from dgr.serving.sessions import KeptSession, Miss, SessionPool, Turn
from dgr.serving.shared import SharedPrompt
from dgr.wire.nurseries import open_nursery

__all__ = ["Answer", "Job", "Phase", "ServingEngine", "ServingLimits", "Usage", "open_serving"]

#: Seconds after which a client may try again where nobody can know: a route that is being fenced, a stage that is full.
_SOON = 1.0


class Answer:
    """The answer to one :class:`Job`: an asynchronous iterator of its tokens. Made by :meth:`ServingEngine.admit`."""

    def __init__(
        self, serving: ServingEngine, job: Job, place: Place, deadline: float, trace: RequestTrace | None = None
    ) -> None:
        self.job = job
        #: The request that it is part of, if that is traced.
        self.trace = trace
        self.usage = Usage(len(job.prompt))
        self.phase = Phase.WAITING
        #: At the end: ``stop`` or ``length``.
        self.finish_reason: str | None = None
        #: Why it ended before it was complete, if it was not its reader who left.
        self.ended_because: DgrError | None = None
        self.scope: trio.CancelScope | None = None
        self.place = place
        self.kept: KeptSession | None = None
        self._serving = serving
        self._prefill_began = math.nan
        self._seconds = deadline
        #: When it must be complete, in trio's time.
        self.deadline = trio.current_time() + deadline
        self._generation: Generation | None = None
        self._turn: Turn | None = None
        #: Tokens of the turn that were handed out.
        self._told = 0
        #: Tokens its session had sent before this answer; None once the prompt is counted.
        self._sent: int | None = None

    @property
    def evaluated(self) -> int:
        """Tokens of the prompt that every stage has."""
        shared = self.job.shared
        kept = shared.evaluating if self.kept is None and shared is not None else self.kept
        return 0 if kept is None else min(kept.session.committed, self.usage.prompt)

    @property
    def prefill_ms(self) -> float:
        """Milliseconds since its prefill began; 0 before."""
        return 1000 * (trio.current_time() - self._prefill_began) if self.kept is not None else 0.0

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> GeneratedToken:
        """The next token.

        Raises :class:`~dgr.errors.RequestTimedOut`, :class:`~dgr.errors.NotServing`, and :class:`~dgr.errors.SessionError`
        after its block; any other of dgr's errors is the pipeline's own.
        """
        if self.ended_because is not None:
            raise self.ended_because
        if self.finish_reason is not None:
            raise StopAsyncIteration
        if self.phase is Phase.ENDED:  # its session may be another answer's by now
            raise SessionError("the answer was left, and its slot given back; ask again")
        token: GeneratedToken | None = None
        self.scope = scope = trio.CancelScope(deadline=self.deadline)
        try:
            with scope:
                token = await self._next()
        except DgrError as error:
            self.ended_because = error
        if self.ended_because is None and scope.cancelled_caught:
            self.time_out()
        if self.ended_because is not None:
            raise self.ended_because
        if token is None:
            # At once: whoever reads may take its time with what was made already.
            self._serving.release(self)
            raise StopAsyncIteration
        return token

    @property
    def is_complete(self) -> bool:
        """Whether it has all the tokens it was to have."""
        return self.finish_reason is not None or self.usage.completion >= self.job.max_tokens

    def time_out(self) -> RequestTimedOut:
        """End it because its deadline has passed; the error says where it was."""
        error = RequestTimedOut(
            f"the answer was not complete within {self._seconds:g} s: it was in phase {self.phase.value} with"
            f" {self.usage.completion} tokens drawn; ask for fewer tokens, or raise the server's deadline"
        )
        self.end(error)
        return error

    def finish(self, reason: str) -> None:
        """Its reader has enough: what was drawn holds a stop string, for example."""
        self.finish_reason = reason
        self._serving.release(self)

    def end(self, error: DgrError) -> None:
        """End it from outside: whoever iterates gets ``error``. The first error is the one that counts."""
        self.ended_because = self.ended_because or error
        if self.scope is not None:
            self.scope.cancel()

    async def _next(self) -> GeneratedToken | None:
        if self.usage.completion >= self.job.max_tokens:
            self.finish_reason = "length"
            return None
        try:
            if self._generation is None:
                await self._begin()
            token = await self._draw()
        except StageDraining as error:
            raise NotServing(f"nothing new is admitted: {error}", _SOON) from error
        except Overloaded as error:
            raise NotServing(f"the stages serve others as well and have no slot left: {error}", _SOON) from error
        except (DeadlineExceeded, ClosedError, PrefillFailed) as error:
            raise NotServing(f"the route does not answer: {error}", _SOON) from error
        if token is None:  # ended by a token, or the context is full
            ended = None if self._generation is None else self._generation.finish_reason
            self.finish_reason = "stop" if ended == "stop" else "length"
        elif token.id in self.job.stop and self.usage.completion >= self.job.min_tokens:
            self.finish_reason = "stop"
        else:
            self.usage.completion += 1
            self._serving.counters.completion_tokens += 1
            return token
        return None

    async def _begin(self) -> None:
        """Wait for the turn, and for the session that holds most of the prompt; begun again when it was cut short."""
        job = self.job
        if self.kept is None:
            await self.place.turn.wait()
            self.phase, self._prefill_began = Phase.PREFILL, trio.current_time()
            await self._take_session()
        assert self.kept is not None
        session, turn = self.kept.session, self.kept.unfinished
        if turn is None:
            turn = Turn(job.prompt, job.sampling, job.seeded, [])
            await self._keep_copies(self.kept)
            if not job.sampling.top_logprobs:  # with its candidates a token takes kilobytes
                self.kept.unfinished = turn
        self._turn, self._told = turn, 0
        told = [token.id for token in turn.drawn]
        # Before min_tokens an end is none; the stages would take it for one.
        stop, ahead = ((), 0) if job.min_tokens else (sorted(job.stop), self._serving.limits.ahead)
        self._generation = session.generate(
            transcript=[*job.prompt, *told],
            max_tokens=max(job.max_tokens - len(told), 0),
            sampling=turn.sampling,
            stop=stop,
            ahead=0 if job.ends_early else ahead,
        )

    async def _take_session(self) -> None:
        """The session in which it was left, a copy of what another choice evaluated, or what the pool has."""
        job, sessions, shared = self.job, self._serving.sessions, self.job.shared
        kept = sessions.left(job.prompt, job.sampling, seeded=job.seeded)
        if kept is None and shared is not None and self._serving.pipeline.copies_sessions:
            kept = await shared.copy(sessions)
            if kept is None:
                try:
                    self._hold(await sessions.take(job.prompt))
                    shared.evaluating = self.kept
                    await self._evaluate_for_all(shared)
                finally:
                    shared.end()
                return
        self._hold(kept or await sessions.take(job.prompt))

    def _hold(self, kept: KeptSession) -> None:
        self.kept = kept
        if self.trace is not None:
            self.trace.follow(kept.session)
        self.usage.cached, self._sent = min(kept.session.committed, self.usage.prompt), kept.session.sent_in_all

    async def _evaluate_for_all(self, shared: SharedPrompt) -> None:
        """Evaluate the prompt but for its last token, and give the other choices copies."""
        assert self.kept is not None
        await self._keep_copies(self.kept)
        if end := len(self.job.prompt) - 1:
            await self._evaluate(self.kept, end)
            await shared.hand_out(self.kept, self._serving.sessions)

    async def _keep_copies(self, kept: KeptSession) -> None:
        """Evaluate the prompt as far as there is something worth to be kept."""
        sessions, prompt = self._serving.sessions, self.job.prompt
        for point in sessions.points(prompt, kept):
            await self._evaluate(kept, point)
            await sessions.store(kept, shared=point < len(prompt) - 1)

    async def _evaluate(self, kept: KeptSession, point: int) -> None:
        kept.session.generate(transcript=self.job.prompt[:point])
        await kept.session.prefill(())

    async def _draw(self) -> GeneratedToken | None:
        """The next token: one that was drawn for an earlier try, or a new one."""
        assert self._generation is not None
        assert self._turn is not None
        assert self.kept is not None
        drawn = self._turn.drawn
        if self._told < len(drawn):
            self.phase = Phase.DECODE
            self._told += 1
            return drawn[self._told - 1]
        token = await anext(self._generation, None)
        if token is None:
            return None
        self._note_prefill()
        self.phase = Phase.DECODE
        if self.kept.unfinished is not None:
            drawn.append(token)
            self._told += 1
        return token

    def _note_prefill(self) -> None:
        """Count what of the prompt was evaluated; the stages were sent its end and all that was told again."""
        if self._sent is None:
            return
        assert self.kept is not None
        assert self._turn is not None
        evaluated = max(self.kept.session.sent_in_all - self._sent - len(self._turn.drawn), 0)
        before, self.usage.cached = self.usage.cached, max(self.usage.prompt - evaluated, 0)
        if before and not self.usage.cached:
            self._serving.sessions.misses[Miss.LOST] += 1
        self._sent = None


class ServingEngine:
    """Answers many clients over one pipeline. Made by :func:`open_serving`."""

    def __init__(self, pipeline: Pipeline, limits: ServingLimits, nursery: trio.Nursery) -> None:
        n_seq_max, n_ctx = pipeline.context.n_seq_max, pipeline.context.n_ctx
        slots = n_seq_max - (limits.prefixes or 0) if limits.sessions is None else limits.sessions
        prefixes = max(n_seq_max - slots, 0) if limits.prefixes is None else limits.prefixes
        if slots < 1 or slots + prefixes > n_seq_max:
            raise InputError(
                f"sessions is {slots} and prefixes {prefixes}; the stages have {n_seq_max} slots (n_seq_max) for both, and"
                " there must be one session"
            )
        tokens = 8 * n_ctx if limits.max_waiting_tokens is None else limits.max_waiting_tokens
        self.pipeline = pipeline
        self.limits = limits
        self.line = Line(slots, limits.max_waiting, tokens)
        self.sessions = SessionPool(pipeline, slots + prefixes, prefixes, nursery)
        self.counters = Counters()
        self._answers: set[Answer] = set()
        self._draining = False

    @property
    def is_ready(self) -> bool:
        """Whether a request would be admitted now, or wait in the line."""
        is_live = self.pipeline.state is RouteState.LIVE
        return not self._draining and is_live and self.pipeline.refuses_sessions is None

    def refuse_if_not_serving(self) -> None:
        """Raise :class:`~dgr.errors.NotServing` while the server ends, or the route is down or takes no new sessions."""
        if self._draining:
            raise NotServing("the server is about to end; ask another one, or this one again when it is back", _SOON)
        state = self.pipeline.state
        if state is not RouteState.LIVE:
            why = self.pipeline.last_recovery_error
            raise NotServing(
                f"the route is {state.value}{f' ({why})' if why else ''}; its stages must answer first", _SOON
            )
        if (why := self.pipeline.refuses_sessions) is not None:
            raise NotServing(f"nothing new is admitted: {why}", _SOON)

    @asynccontextmanager
    async def admit(
        self, job: Job, deadline: float | None = None, *, trace: RequestTrace | None = None
    ) -> AsyncIterator[Answer]:
        """A place in the line for ``job``, given back with the block.

        Raises at once, with nothing begun: :class:`~dgr.errors.NotServing`, :class:`~dgr.errors.QueueFull`,
        :class:`~dgr.errors.InputError`. ``deadline``: seconds, at most those of the limits. ``trace``: the request's, if it
        is traced; the work of its stages is noted there.
        """
        self.refuse_if_not_serving()
        self._check(job)
        place = self.line.enter(len(job.prompt))
        seconds = self.limits.deadline if deadline is None else min(deadline, self.limits.deadline)
        answer = Answer(self, job, place, seconds, trace)
        self._answers.add(answer)
        try:
            yield answer
        finally:
            self.release(answer)

    def release(self, answer: Answer) -> None:
        """Its end: it is counted, and its slot and its session are the next one's. Releasing twice is harmless."""
        if answer not in self._answers:
            return
        self._answers.discard(answer)
        if not answer.is_complete and answer.ended_because is None:
            self.counters.cancelled += 1
        if answer.phase is Phase.DECODE:
            self.counters.prompt_tokens += answer.usage.prompt
            self.counters.cached_tokens += answer.usage.cached
        answer.phase = Phase.ENDED
        if answer.kept is not None:
            if answer.finish_reason is not None:
                answer.kept.unfinished = None
            if answer.trace is not None:
                answer.trace.leave(answer.kept.session)
            self.sessions.give_back(answer.kept)
        self.line.leave(answer.place)

    def _check(self, job: Job) -> None:
        n_prompt, n_ctx, n_vocab = len(job.prompt), self.pipeline.context.n_ctx, self.pipeline.n_vocab
        if not n_prompt:
            raise InputError("the prompt is empty; give at least one token")
        if not 0 <= job.min_tokens <= job.max_tokens or job.max_tokens < 1:
            raise InputError(
                f"max_tokens is {job.max_tokens} and min_tokens {job.min_tokens}; give 1 or more, and no more of the latter"
            )
        if n_prompt + job.max_tokens > n_ctx:
            raise ContextLimitExceeded(
                f"this model's context holds {n_ctx} tokens (n_ctx), but {n_prompt + job.max_tokens} were asked for:"
                f" {n_prompt} in the prompt and {job.max_tokens} for the answer; shorten one of them"
            )
        if not 0 <= min(job.prompt) <= max(job.prompt) < n_vocab:
            wrong = next(token for token in job.prompt if not 0 <= token < n_vocab)
            raise InvalidToken(f"token id {wrong} is outside the vocabulary of {n_vocab}")
        check_sampling(job.sampling, n_vocab)

    async def drain(self, seconds: float) -> None:
        """Admit nobody from now on; wait for the answers under way, and end those that take longer than ``seconds``."""
        self._draining = True
        with trio.move_on_after(seconds):
            await self.line.wait_empty()
        self.end_all()

    def end_all(self) -> None:
        """Admit nobody from now on, and end the answers under way: whoever reads one gets an error."""
        self._draining = True
        for answer in list(self._answers):
            answer.end(NotServing("the server ended before the answer was complete; ask again", _SOON))


@asynccontextmanager
async def open_serving(pipeline: Pipeline, limits: ServingLimits | None = None) -> AsyncIterator[ServingEngine]:
    """Serve a pipeline; leaving the block drops the kept sessions. Raises :class:`~dgr.errors.InputError`."""
    async with open_nursery() as nursery:
        serving = ServingEngine(pipeline, limits or ServingLimits(), nursery)
        try:
            yield serving
        finally:
            with trio.CancelScope() as hurried:  # whoever ends a server does not wait for a stage that hangs
                hurried.cancel()
                await serving.sessions.aclose()
