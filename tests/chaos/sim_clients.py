"""Clients of the simulation: what they ask at random, and what they must get.

Every token must be the one that the whole model, undisturbed, would have drawn. Every request must end, with an answer or with
one of dgr's errors, within the deadline that its timeouts add up to; its client may also have given it up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio
from attrs import evolve
from chaos.sim_stages import CONTEXT, MODEL
from chaos.sim_world import SPLITS, TIMEOUTS, World
from conversations import reference

from dgr.client.events import drain
from dgr.client.pipeline import Pipeline, open_pipeline_on
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams, LogitsWanted, SamplingParams
from dgr.engine.base import Work
from dgr.errors import DgrError
from dgr.serving.engine import Job, ServingEngine, ServingLimits, open_serving
from dgr.serving.shared import SharedPrompt
from dgr.testing.engines.fake import FakeEngine

__all__ = ["DEADLINE", "RETRIES", "client", "commit_deadline", "expect_answer", "server"]

RETRIES = 2
#: Seconds of a served request.
DEADLINE = 25.0
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=6),
    SamplingParams(top_logprobs=2),
)
#: Seconds in which a session, and its copies, are closed.
LEAVING = 3 * TIMEOUTS.control
#: Seconds after its deadline after which a request is given up for good.
_HANG = 60.0
#: Seconds by which an end may be late: the event loop's own, and a step that has begun.
_SLACK = 3.0


def commit_deadline() -> float:
    """Seconds in which one commit of a whole context ends: every wait of every try at its longest."""
    chunks = math.ceil(CONTEXT.n_ctx / CONTEXT.n_ubatch)
    drained = 4 * TIMEOUTS.reply  # a window
    one = TIMEOUTS.route + drained + 2 * TIMEOUTS.control + chunks * TIMEOUTS.reply
    return (1 + RETRIES) * one


class Client:
    """What one client knows, and how its requests end."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dice = world.dice(name)

    async def request(
        self, what: str, seconds: float, work: Callable[[], Awaitable[None]], *, leaving: float = 0.0
    ) -> bool:
        """Ask, and look at how it ends; True for an answer. ``seconds``: its deadline; ``leaving``: of it once given up."""
        world, answers = self.world, self.world.answers
        patience = self.dice.expovariate(1 / 0.4) if self.dice.random() < 0.25 else math.inf
        began, jumped, ended = trio.current_time(), world.jumped, ""
        world.note(f"{self.name} asks", what)
        with world.guarded(seconds + _HANG) as hang, trio.move_on_after(patience) as given_up:
            try:
                await work()
                ended = "answer"
            except DgrError as error:
                ended = type(error).__name__
                answers.errors[ended] += 1
            except Exception as error:
                ended = f"{type(error).__name__}: {error}"
                world.accuse(f"{self.name}: {what} ended with {ended}, which is no error of dgr's")
        took = trio.current_time() - began - (world.jumped - jumped)
        if hang.cancelled_caught:
            world.accuse(f"{self.name}: {what} never ended")
        elif given_up.cancelled_caught:
            ended = "given up"
            answers.cancelled += 1
            world.struck("cancel", what)
            took, seconds = took - patience, leaving
        if took > seconds + _SLACK:
            world.accuse(f"{self.name}: {what} took {took:.1f} s, its deadline is {seconds:.1f} s ({ended})")
        answers.slowest[what] = max(answers.slowest.get(what, 0.0), took)
        world.note(f"{self.name} has", f"{what}: {ended}")
        return ended == "answer"


class Talk:
    """A session, and whether what it holds may be another text's: a bit of it may have been flipped on its way."""

    def __init__(self, who: Client, session: ClientSession, flips: int) -> None:
        self.who = who
        self.session = session
        self._flips = flips

    def is_judged(self) -> bool:
        return self._flips == self.who.world.flips

    async def answer(self, count: int) -> None:
        dice, session = self.who.dice, self.session
        sampling = dice.choice(SAMPLINGS)
        before = list(session.transcript)
        if dice.random() < 0.2:
            before = before[: dice.randrange(len(before) + 1)]  # a client that edits what was said
        prompt = [*before, *dice.choices(range(256), k=dice.randint(1, 20))]
        ahead = dice.choice((0, 0, 2, 6))
        if dice.random() < 0.3:
            generation = session.generate(transcript=prompt, max_tokens=count, sampling=sampling, stop=(), ahead=ahead)
        else:
            new = prompt[len(before) :]
            prompt = [*session.transcript, *new]
            generation = session.generate(new, max_tokens=count, sampling=sampling, stop=(), ahead=ahead)
        said, expected = list[int](), reference(prompt, count, sampling)
        async for token in generation:
            said.append(token.id)
            expect_answer(self.who, said, expected, judged=self.is_judged())
            if token.position != len(prompt) + len(said) - 1:
                self.who.world.accuse(f"{self.who.name}: token {len(said)} came for position {token.position}")

    async def rows(self) -> None:
        """Rows of logits; after a loss they may come again, with the same bits."""
        first, row = len(self.session.transcript), 4 * MODEL.n_vocab
        new = self.who.dice.choices(range(256), k=self.who.dice.randint(1, 9))
        expected = _reference_rows([*self.session.transcript, *new], first)
        came = bytearray(len(expected))

        def take(position: int, values: memoryview) -> None:
            came[(position - first) * row : (position - first) * row + values.nbytes] = values

        await self.session.logits(new, take)
        if self.is_judged() and bytes(came) != expected:
            self.who.world.accuse(f"{self.who.name}: rows of {len(new)} tokens after {first}: wrong")

    async def prefill(self) -> None:
        await self.session.prefill(self.who.dice.choices(range(256), k=self.who.dice.randint(1, 20)))

    async def summaries(self) -> None:
        reports = await self.session.state_summaries()
        if any(report.state.position != self.session.committed for report in reports.values()):
            self.who.world.accuse(f"{self.who.name}: stages stand elsewhere than the session: {reports}")


def expect_answer(who: Client, said: list[int], expected: list[int], *, judged: bool) -> None:
    """The last token is that of the undisturbed model."""
    answers, at = who.world.answers, len(said) - 1
    answers.tokens += 1
    if not judged:
        answers.not_judged += 1
    elif at >= len(expected) or said[at] != expected[at]:
        who.world.accuse(f"{who.name}: token {at} is {said[at]}, not of {expected}: wrong")
    else:
        answers.right += 1


def _reference_rows(transcript: list[int], first: int) -> bytes:
    """What the whole model, undisturbed, says of positions ``first`` and after."""
    room = len(transcript)
    engine = FakeEngine(None, ContextParams(n_ctx=room, n_batch=room, n_ubatch=room, n_seq_max=1), model=MODEL)
    (output,) = engine.run([Work(0, 0, transcript, logits=LogitsWanted.ALL)])
    assert output.logits is not None
    return bytes(output.logits)[4 * MODEL.n_vocab * first :]


# --- conversations ---


async def client(world: World, name: str, pipeline: Pipeline) -> None:
    """Conversations one after another, until the chaos ends."""
    who = Client(world, name)
    while trio.current_time() < world.until:
        await who.request("session", math.inf, partial(_converse, who, pipeline), leaving=LEAVING)
        await trio.sleep(who.dice.uniform(0, 0.3))


async def _converse(who: Client, pipeline: Pipeline) -> None:
    # Counted before it is opened, so that a flip that strikes its first frame is one of its own.
    flips = who.world.flips
    async with pipeline.session() as session:
        await _talk(Talk(who, session, flips), who.dice.randint(1, 5), pipeline)


async def _talk(talk: Talk, turns: int, pipeline: Pipeline, depth: int = 0) -> None:
    who, dice, bound = talk.who, talk.who.dice, commit_deadline()
    for _ in range(turns):
        if trio.current_time() >= who.world.until:
            return
        if len(talk.session.transcript) > CONTEXT.n_ctx - 40:
            return
        match dice.choices(
            ("answer", "prefill", "rows", "summaries", "fork", "load", "trace"), (50, 10, 6, 8, 14, 4, 4)
        )[0]:
            case "answer":
                count = dice.randint(1, 6)
                await who.request("answer", count * bound, partial(talk.answer, count))
            case "prefill":
                await who.request("prefill", bound, talk.prefill)
            case "rows":
                await who.request("rows", bound, talk.rows)
            case "summaries" if talk.session.transcript:
                await who.request("summaries", bound, talk.summaries)
            case "fork" if depth < 2:
                await who.request("fork", math.inf, partial(_fork, talk, pipeline, depth), leaving=LEAVING)
            case "load":
                await who.request("load", 5.0, partial(_load, pipeline))
            case "trace":
                await who.request("trace", bound + 12.0, partial(_trace, talk, pipeline))
        await trio.sleep(dice.expovariate(1 / 0.05))


async def _fork(talk: Talk, pipeline: Pipeline, depth: int) -> None:
    async with talk.session.fork() as session:
        await _talk(Talk(talk.who, session, talk._flips), talk.who.dice.randint(1, 3), pipeline, depth + 1)


async def _load(pipeline: Pipeline) -> None:
    await pipeline.load(5.0)


async def _trace(talk: Talk, pipeline: Pipeline) -> None:
    trace = pipeline.tracer.begin()
    with trace.of(talk.session):
        try:
            await talk.answer(1)
        finally:
            pipeline.tracer.drop(trace)
    await pipeline.tracer.finish(trace)


# --- many requests over one pipeline ---

LIMITS = ServingLimits(prefixes=1, max_waiting=6, deadline=DEADLINE)


async def server(world: World, name: str, pipeline: Pipeline) -> None:
    """Requests that begin alike over a serving, so that prefixes are kept and copied."""
    limits = evolve(LIMITS, ahead=world.dice(name).choice((0, 4)))
    async with open_serving(pipeline, limits) as engine, trio.open_nursery() as nursery:
        for index in range(4):
            nursery.start_soon(_ask, world, f"{name}.{index}", engine)
    if engine.line.running or engine.line.waiting or engine.sessions.kept:
        world.accuse(f"{name}: {engine.line.running} run, {engine.line.waiting} wait, {engine.sessions.kept} are kept")


async def _ask(world: World, name: str, engine: ServingEngine) -> None:
    who = Client(world, name)
    openings = [world.dice(f"opening {index}").choices(range(256), k=24 + 8 * index) for index in range(3)]
    while trio.current_time() < world.until:
        await who.request("served", DEADLINE, partial(_served, who, engine, openings))
        await trio.sleep(who.dice.expovariate(1 / 0.1))


async def _served(who: Client, engine: ServingEngine, openings: list[list[int]]) -> None:
    dice, flips = who.dice, who.world.flips
    prompt = [*dice.choice(openings), *dice.choices(range(256), k=dice.randint(1, 6))]
    sampling, count = dice.choice(SAMPLINGS), dice.randint(1, 6)
    if dice.random() < 0.2:
        shared = SharedPrompt()
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(_choice, who, engine, Job(tuple(prompt), count, sampling, shared=shared), flips)
    else:
        await _listen(who, engine, Job(tuple(prompt), count, sampling), flips)


async def _choice(who: Client, engine: ServingEngine, job: Job, flips: int) -> None:
    try:
        await _listen(who, engine, job, flips)
    except DgrError as error:
        who.world.answers.errors[type(error).__name__] += 1


async def _listen(who: Client, engine: ServingEngine, job: Job, flips: int) -> None:
    said, expected = list[int](), reference(job.prompt, job.max_tokens, job.sampling)
    # What a kept session or prefix holds may have been told wrong before this request: a serving is judged as a whole.
    async with engine.admit(job) as answer:
        async for token in answer:
            said.append(token.id)
            judged = flips == who.world.flips == 0
            expect_answer(who, said, expected, judged=judged)


# --- pipelines ---


@contextmanager
def _told(world: World, name: str, pipeline: Pipeline) -> Iterator[None]:
    """What the pipeline tells of itself is noted at its end."""
    with pipeline.events() as events:
        try:
            yield
        finally:
            for event in drain(events):
                world.events[type(event).__name__] += 1
            world.note(f"{name} told", sorted(world.events.items()))


async def pipelines(world: World, name: str, serves: bool, scopes: dict[str, trio.CancelScope]) -> None:
    """Pipelines one after another, each with its clients; ``scopes`` has the one that is open, to be ended at any moment."""
    who = Client(world, name)
    count = 0
    while trio.current_time() < world.until:
        count += 1
        with trio.CancelScope() as scopes[name]:
            try:
                await _pipeline(world, f"{name}{count}", who.dice, serves)
            except DgrError as error:
                world.answers.errors[f"opening: {type(error).__name__}"] += 1
                world.note(f"{name} cannot open", type(error).__name__)
        scopes.pop(name, None)
        await trio.sleep(who.dice.uniform(0.1, 1.0))


async def _pipeline(world: World, name: str, dice: random.Random, serves: bool) -> None:
    split = dice.choice(SPLITS)
    spares = world.spares(split) if dice.random() < 0.6 else []
    opened = open_pipeline_on(
        world.cluster.connect,
        world.route(split),
        spares=spares,
        retries=RETRIES,
        timeouts=TIMEOUTS,
        window=dice.choice([None, 1, 4]),
        chunk=dice.choice([None, 5]),
        ahead=dice.choice([0, 3]),
    )
    world.note("open", f"{name} over {split}, {len(spares)} spares")
    async with opened as pipeline:
        world.pipelines[name] = pipeline
        try:
            with _told(world, name, pipeline):
                if serves:
                    await server(world, name, pipeline)
                else:
                    async with trio.open_nursery() as nursery:
                        for index in range(3):
                            nursery.start_soon(client, world, f"{name}.{index}", pipeline)
                await _comes_back(world, name, pipeline)
                if left := len(pipeline._client._links.replies):
                    world.accuse(f"{name} remembers {left} replies that nobody waits for")
        finally:
            del world.pipelines[name]


async def _comes_back(world: World, name: str, pipeline: Pipeline) -> None:
    """When nothing is in its way any more, a pipeline answers."""
    await world.healed.wait()
    began, error = trio.current_time(), "it does not answer"
    with world.guarded(300):
        while True:
            try:
                async with pipeline.session() as session:
                    said = [token.id async for token in session.generate([1, 2, 3], max_tokens=3, stop=())]
            except DgrError as failure:
                error = str(failure)
                await trio.sleep(1.0)
                continue
            if said != reference([1, 2, 3], 3):
                world.accuse(f"{name}: once all is well it answers {said}: wrong")
            world.note(f"{name} is back", f"after {trio.current_time() - began:.1f} s")
            return
    world.accuse(f"{name} did not come back: {error}")
