"""One case of a drill: stages as processes, a cable before each, and something that happens to one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Protocol

import msgspec
import psutil
import trio
from attrs import frozen

from dgr import ClientSession, Generation, LinkPolicy, Pipeline, Timeouts, open_pipeline, open_pipeline_on
from dgr.client.events import RePrefilled, RouteChanged, RouteDown, StateLost, drain
from dgr.cluster.connect import RemoteConnector
from dgr.cluster.route_file import RouteFile
from dgr.core.values import ContextParams
from dgr.errors import DeadlineExceeded, DgrError
from dgr.selftest.chain import some_tokens
from dgr.testing.network.processes import Program, is_gone, open_up, write_route
from dgr.testing.network.proxy import FaultyProxy, open_proxies
from dgr.testing.waits import until
from dgr.wire.nurseries import open_nursery

Fault = Literal["kill", "cut", "stall", "slow"]
FAULTS: tuple[Fault, ...] = ("kill", "cut", "stall", "slow")
Moment = Literal["prefill", "token 1", "token n", "cancel", "twice"]
MOMENTS: tuple[Moment, ...] = ("prefill", "token 1", "token n", "cancel", "twice")

#: Seconds of the links' heartbeat: short, so that a drill does not last.
HEARTBEAT = 0.25
#: Seconds after which a case hangs; its own waits end earlier.
_HANG = 180.0
#: Seconds that a process has to be gone when everything was told to end.
_GONE = 5.0
#: Tokens of usual speed between two times of slowness.
_BETWEEN = 2


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What all cases share."""

    #: Layer ranges ``A:B``, head first.
    split: tuple[str, ...]
    n_vocab: int
    #: Tokens of the first prompt, of the next turn's, of a prefill chunk.
    prompt: int = 320
    next_prompt: int = 24
    chunk: int = 32
    #: Tokens of an answer, and the one that is "token n".
    answer: int = 24
    late: int = 7
    #: Milliseconds that ``slow`` adds each way in one cable, and tokens after which it ends.
    delay_ms: float = 20.0
    slow_tokens: int = 6
    #: Seconds of the links' heartbeat; a peer silent for three is given up.
    heartbeat: float = HEARTBEAT

    @property
    def n_ctx(self) -> int:
        """Tokens that the stages' context holds."""
        return self.prompt + self.next_prompt + 2 * self.answer

    def tokens(self, turn: int) -> list[int]:
        """The prompt of a turn, counted from 0."""
        return some_tokens((self.prompt, self.next_prompt)[turn], self.n_vocab, seed=turn)

    def stage_name(self, index: int) -> str:
        """``head``, ``middle`` (numbered where there are several), ``tail``."""
        last = len(self.split) - 1
        if index in (0, last):
            return "tail" if index else "head"
        return "middle" if last == 2 else f"middle {index}"


class DrillCase(msgspec.Struct, frozen=True, kw_only=True):
    """What happens, to which stage, and when."""

    fault: Fault = msgspec.field(name="act")
    #: Index of the stage; the cable is the one before it.
    stage: int
    moment: Moment

    def name(self, scenario: Scenario) -> str:
        """As the unit is called: ``kill/head/token 1``."""
        return f"{self.fault}/{scenario.stage_name(self.stage)}/{self.moment}"

    def received(self, scenario: Scenario) -> int:
        """Tokens of the answer that were received when it happens."""
        return {"prefill": 0, "token 1": 1}.get(self.moment, scenario.late)


class Injection(msgspec.Struct, kw_only=True):
    """One time that it happened."""

    #: Tokens that every stage had committed, and tokens of the answer received, at that time.
    committed: int
    received: int
    #: Seconds from the act to the pipeline's StateLost or RouteDown; None: there was none.
    detected: float | None = None
    #: Why, as the pipeline tells it.
    why: str = ""
    #: Seconds from the act to the next token.
    recovered: float | None = None


class Leftovers(msgspec.Struct, kw_only=True):
    """What was left when everything was told to end."""

    #: Sessions and bytes of state that the stages still held after the session was closed.
    sessions: int = 0
    bytes: int = 0
    #: Exit code of ``dgr up``.
    exit_code: int | None = None
    #: Stage processes there ever were, and the ids of those that were not gone when ``dgr up`` was.
    seen: int = 0
    processes: list[int] = []


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a case."""

    #: Type and message of the error that it ended with; empty when it ended well.
    error: str = ""
    #: Token ids of the answer; of one that was cancelled, those before.
    answer: list[int] = []
    #: Token ids of the turn that follows a cancelled one.
    next_answer: list[int] = []
    injections: list[Injection] = msgspec.field(name="strikes", default_factory=list)
    #: StateLost events.
    losses: int = 0
    #: Tokens of each re-prefill that was finished.
    reprefilled: list[int] = []
    #: Seconds of each token asked for while the cable was slow, and of each that was asked for while it was not; the
    #: first of an answer is not among them.
    slow: list[float] = []
    usual: list[float] = []
    leftovers: Leftovers = msgspec.field(name="remains", default_factory=Leftovers)


@frozen
class Testbed:
    """Stages as processes, a cable before each, and a pipeline along the cables."""

    file: RouteFile
    up: Program
    cables: list[FaultyProxy]
    pipeline: Pipeline


@asynccontextmanager
async def open_testbed(model: Path, scenario: Scenario, leftovers: Leftovers) -> AsyncIterator[Testbed]:
    """Start everything; on the way out, write down what remained, and end that too."""
    beat = str(scenario.heartbeat)
    with TemporaryDirectory(prefix="dgr-drill-") as folder:
        file = write_route(
            Path(folder) / "route.toml",
            model,
            scenario.split,
            n_ctx=scenario.n_ctx,
            n_batch=scenario.chunk,
            n_ubatch=scenario.chunk,
        )
        async with open_up(file, "--sessions", "1", "--heartbeat", beat) as up:
            async with (
                open_proxies(file.route) as (route, cables),
                open_pipeline_on(
                    RemoteConnector(LinkPolicy(heartbeat=scenario.heartbeat)),
                    route,
                    chunk=scenario.chunk,
                    timeouts=Timeouts(reply=60.0, control=30.0, route=60.0),
                ) as pipeline,
            ):
                yield Testbed(file, up, cables, pipeline)
                fenced = await _fence(pipeline)
                leftovers.sessions, leftovers.bytes = fenced.sessions_dropped, fenced.bytes_released
            pids = {*up.stage_pids(), *(child.pid for child in psutil.Process(up.pid).children(recursive=True))}
            leftovers.seen = len(pids)
            leftovers.exit_code = await up.stop()
            leftovers.processes = await survivors(pids, _GONE)


async def _fence(pipeline: Pipeline) -> RouteChanged:
    """What a new epoch makes the stages drop: nothing, when no session is open."""
    events = pipeline.events()
    await pipeline.change_route(pipeline.route)
    async for event in events:
        if isinstance(event, RouteChanged):
            return event
    raise AssertionError("a change of route is always reported")


async def survivors(pids: Sequence[int] | set[int], seconds: float) -> list[int]:
    """The processes that are not gone after ``seconds``."""
    try:
        await until(lambda: all(map(is_gone, pids)), seconds)
    except DeadlineExceeded:
        return sorted(pid for pid in pids if not is_gone(pid))
    return []


async def undisturbed(model: Path, scenario: Scenario) -> dict[str, list[int]]:
    """``answer`` and ``next_answer`` of the whole model in this process: to the first prompt, and to the next one after
    ``late`` tokens."""
    context = ContextParams(n_ctx=scenario.n_ctx, n_batch=scenario.chunk, n_ubatch=scenario.chunk)
    async with open_pipeline(model, context=context, chunk=scenario.chunk) as pipeline:
        async with pipeline.session() as session:
            answer = await _take(session.generate(scenario.tokens(0), max_tokens=scenario.answer, stop=()))
        async with pipeline.session() as session:
            transcript = [*scenario.tokens(0), *answer[: scenario.late], *scenario.tokens(1)]
            next_answer = await _take(session.generate(transcript, max_tokens=scenario.answer, stop=()))
    return {"answer": answer, "next_answer": next_answer}


async def run_case(case: DrillCase, model: Path, scenario: Scenario) -> Outcome:
    """Run a case with processes of its own. An error is part of the outcome."""
    outcome = Outcome()
    with into_error(outcome, _HANG):
        async with open_testbed(model, scenario, outcome.leftovers) as testbed, testbed.pipeline.session() as session:
            reported = testbed.pipeline.events()
            kind = _Slowness if case.fault == "slow" else _Loss
            await kind(case, scenario, testbed, session, outcome).run()
            events = drain(reported)
            outcome.losses = sum(isinstance(event, StateLost) for event in events)
            outcome.reprefilled = [event.tokens for event in events if isinstance(event, RePrefilled)]
    return outcome


class HasError(Protocol):
    """What came of something that may have ended in an error."""

    error: str


@contextmanager
def into_error(outcome: HasError, seconds: float) -> Iterator[None]:
    """How the block ended, when not well: an error of stages and links, or that it took longer than ``seconds``."""
    try:
        with trio.fail_after(seconds):
            yield
    except (DgrError, OSError, trio.TooSlowError, ExceptionGroup) as error:
        outcome.error = f"{type(error).__name__}: {str(error) or f'not ended after {seconds:g} s'}"


async def _take(generation: Generation) -> list[int]:
    """The ids of all tokens that are left."""
    return [token.id async for token in generation]


class _FaultRun:
    """A case under way: reach the moment, inject, go on to the end of the answer."""

    def __init__(
        self, case: DrillCase, scenario: Scenario, testbed: Testbed, session: ClientSession, outcome: Outcome
    ) -> None:
        self.case, self.scenario, self.testbed, self.session, self.outcome = case, scenario, testbed, session, outcome
        self.cable = testbed.cables[case.stage]
        self.events = testbed.pipeline.events()
        self.injected_at = 0.0
        #: Where the ids of the present answer go.
        self.ids = outcome.answer

    async def run(self) -> None:
        case, scenario, usual = self.case, self.scenario, self.outcome.usual
        answer = self.session.generate(scenario.tokens(0), max_tokens=scenario.answer, stop=())
        await self.receive(answer, case.received(scenario), usual)
        async with open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(self._inject_in_time, scope)
                await self.receive(answer, 1, [])  # it is asked for while that happens
        if case.moment == "cancel":
            answer = self.session.generate(scenario.tokens(1), max_tokens=scenario.answer, stop=())
            self.ids = self.outcome.next_answer
            await self.receive(answer, 1, [])
        await self.go_on(answer)

    async def receive(self, answer: Generation, count: int | None, times: list[float]) -> None:
        """Receive ``count`` tokens, or all that are left; the seconds of each, but for the first of an answer."""
        while count is None or count > 0:
            began = trio.current_time()
            try:
                token = await anext(answer)
            except StopAsyncIteration:
                return
            now = trio.current_time()
            if self.ids:
                times.append(now - began)
            if self.outcome.injections and self.outcome.injections[-1].recovered is None:
                self.outcome.injections[-1].recovered = now - self.injected_at
            self.ids.append(token.id)
            count = None if count is None else count - 1

    async def inject(self) -> None:
        """What happens, and what follows once it was noticed."""
        raise NotImplementedError

    async def go_on(self, answer: Generation) -> None:
        """Receive the rest of the answer."""
        await self.receive(answer, None, self.outcome.usual)

    async def _inject_in_time(self, asking: trio.CancelScope) -> None:
        if self.case.moment == "prefill":
            await until(lambda: self.session.committed > 0, what="the first chunk")
        else:
            while not self.session.in_flight:  # it is a matter of microseconds, and no answer may come first
                await trio.lowlevel.checkpoint()
        if self.case.moment == "cancel":
            asking.cancel()
        await self.inject()

    def note(self) -> Injection:
        """Write down that it happens now."""
        received = len(self.session.transcript) - self.scenario.prompt
        injection = Injection(committed=self.session.committed, received=received)
        self.outcome.injections.append(injection)
        self.injected_at = trio.current_time()
        return injection


class _Loss(_FaultRun):
    """A stage, or its cable, is gone; the pipeline notices."""

    async def inject(self) -> None:
        await self._lose()
        if self.case.moment == "twice":
            await until(lambda: self.session.committed > 0, _HANG, "the first chunk of the re-prefill")
            await self._lose()

    async def _lose(self) -> None:
        address = self.testbed.file.route.stages[self.case.stage].address
        pid = self.testbed.up.events(address, "ready")[-1]["pid"]
        drain(self.events)
        injection = self.note()
        match self.case.fault:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stall":
                os.kill(pid, signal.SIGSTOP)
            case _:
                await self.cable.cut()
        async for event in self.events:
            if isinstance(event, StateLost | RouteDown):
                injection.detected = trio.current_time() - self.injected_at
                injection.why = event.reason if isinstance(event, StateLost) else event.why
                break
        if self.case.fault == "stall":
            os.kill(pid, signal.SIGCONT)


class _Slowness(_FaultRun):
    """A cable is slow for some tokens; nobody is lost."""

    async def inject(self) -> None:
        self.note()
        self.cable.delay = self.scenario.delay_ms / 1e3

    async def go_on(self, answer: Generation) -> None:
        await self._mend_after_a_while(answer)
        if self.case.moment == "twice":
            await self.receive(answer, _BETWEEN, self.outcome.usual)
            await self.inject()
            await self._mend_after_a_while(answer)
        await super().go_on(answer)

    async def _mend_after_a_while(self, answer: Generation) -> None:
        await self.receive(answer, self.scenario.slow_tokens, self.outcome.slow)
        self.cable.delay = 0.0
