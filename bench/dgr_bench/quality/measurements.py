"""One way to run, over the same text and the same recitals; and one state, changed on its way. Raw metrics only."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import trio
from attrs import field, frozen

from dgr import (
    Artifact,
    ClientSession,
    ContextParams,
    Pipeline,
    Route,
    ShardPolicy,
    StageRef,
    open_cluster,
    open_pipeline,
    open_pipeline_on,
)
from dgr.cluster.local import load_engines
from dgr.core.route import parse_split
from dgr.errors import EngineError
from dgr.selftest.learned.model import held_out_text
from dgr.selftest.learned.recall import BOS, Kind, Question, Recital, as_tokens, make_recital
from dgr_bench.quality.ways import FAR, QualityPlan, Way
from dgr_bench.subjects import PATIENCE

#: Rows of logits: [tokens, n_vocab].
Rows: TypeAlias = npt.NDArray[np.float32]
#: Writes a model in some weights and tells where.
Model: TypeAlias = Callable[[str], Path]


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of all recitals of one kind at one distance."""

    kind: str
    distance: int
    asked: int
    right: int
    #: Mean surprise at the right answers, nats.
    surprise: float
    #: Of every row of logits that was an answer.
    digest: str


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """What one way says."""

    way: str
    tokens: int
    #: Mean surprise at the text, bits a byte.
    bits_per_byte: float
    #: By row of the text, beside the reference: divergence from its distribution (nats), whether the likeliest token is its.
    divergence: list[float]
    same_top: list[bool]
    #: Of every row of the text.
    digest: str
    recalled: list[Recalled]
    seconds: float


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Recall after the state was changed between statements and questions."""

    change: str
    #: Tokens that were sent, beyond those of the transcripts.
    sent_again: int
    recalled: list[Recalled]


def log_softmax(rows: Rows) -> npt.NDArray[np.float64]:
    """Natural-log probabilities of every token, by row."""
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def text_tokens(plan: QualityPlan) -> list[int]:
    """The text that is measured."""
    return [BOS, *as_tokens(held_out_text()[: plan.text_tokens])]


def recitals(plan: QualityPlan, kind: Kind, distance: int, count: int | None = None) -> Iterator[Recital]:
    """What is asked of one kind at one distance."""
    usual = plan.recitals if distance <= FAR else 1
    for seed in range(usual if count is None else count):
        yield make_recital(kind, distance, held_out_text(), seed)


def digest_of_rows(rows: Rows) -> str:
    return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()


def recalled(kind: Kind, distance: int, answers: Rows, questions: Sequence[Question]) -> Recalled:
    """What rows of logits, one a question, say."""
    wanted = np.array([one.answer for one in questions])
    told = log_softmax(answers)[np.arange(len(wanted)), wanted]
    return Recalled(
        kind=kind,
        distance=distance,
        asked=len(wanted),
        right=int((answers.argmax(axis=1) == wanted).sum()),
        surprise=float(-told.mean()),
        digest=digest_of_rows(answers),
    )


@frozen
class _Taken:
    """Rows of logits as they come: after a loss some come again."""

    found: dict[int, Rows] = field(factory=dict)

    def take(self, n_vocab: int, position: int, values: memoryview) -> None:
        rows = np.frombuffer(bytes(values), np.float32).reshape(-1, n_vocab)
        for index, row in enumerate(rows):
            self.found[position + index] = row

    def at(self, positions: Sequence[int]) -> Rows:
        return np.stack([self.found[position] for position in positions])


async def ask(session: ClientSession, n_vocab: int, recital: Recital) -> Rows:
    """Go on with a recital from where the session stands; the rows of the answers."""
    taken = _Taken()
    await session.logits(recital.tokens[len(session.transcript) :], partial(taken.take, n_vocab))
    return taken.at([one.asked_at for one in recital.questions])


def before_questions(recital: Recital) -> Sequence[int]:
    """What precedes the first question."""
    return recital.tokens[: recital.first_asked]


def _n_ctx(plan: QualityPlan) -> int:
    longest = max((*plan.distances, plan.changed_at))
    return max(plan.text_tokens + 1, *(len(make_recital(kind, longest, held_out_text(), 0).tokens) for kind in Kind))


def context_of(plan: QualityPlan, way: Way, n_seq_max: int = 1) -> ContextParams:
    ubatch = max(32, plan.chunk)
    return ContextParams(
        n_ctx=_n_ctx(plan),
        n_batch=ubatch,
        n_ubatch=ubatch,
        n_seq_max=n_seq_max,
        type_k=way.type_k,
        flash_attn=way.flash_attn,
        numerics=way.numerics,
        wire=way.wire,
    )


async def say(plan: QualityPlan, way: Way, model: Model, *, recite: bool = True) -> tuple[Rows, list[Recalled], float]:
    """Rows of the text, everything recalled (unless ``recite`` is off), and the seconds it took."""
    path = await trio.to_thread.run_sync(model, way.weights)
    began = time.monotonic()
    found: list[Recalled] = []
    async with open_pipeline(
        path,
        way.split,
        context=context_of(plan, way),
        threads=way.threads,
        placement=way.placement,
        chunk=way.chunk,
        timeouts=PATIENCE,
    ) as pipeline:
        taken, tokens = _Taken(), text_tokens(plan)
        async with pipeline.session() as session:
            await session.logits(tokens, partial(taken.take, pipeline.n_vocab))
        for kind in Kind if recite else ():
            for distance in plan.distances:
                answers: list[Rows] = []
                questions: list[Question] = []
                for recital in recitals(plan, kind, distance):
                    async with pipeline.session() as session:
                        await session.prefill(before_questions(recital))
                        answers.append(await ask(session, pipeline.n_vocab, recital))
                    questions += recital.questions
                found.append(recalled(kind, distance, np.concatenate(answers), questions))
    return taken.at(range(len(tokens))), found, time.monotonic() - began


def quality_of(
    way: Way, rows: Rows, reference: Rows, found: list[Recalled], tokens: Sequence[int], s: float
) -> Quality:
    """A way beside the reference."""
    ours, theirs = log_softmax(reference), log_softmax(rows)
    told = theirs[np.arange(len(tokens) - 1), np.array(tokens[1:])]
    divergence = np.maximum(0.0, (np.exp(ours) * (ours - theirs)).sum(axis=1))
    return Quality(
        way=way.name,
        tokens=len(tokens) - 1,
        bits_per_byte=float(-told.mean() / math.log(2)),
        divergence=divergence.tolist(),
        same_top=(rows.argmax(axis=1) == reference.argmax(axis=1)).tolist(),
        digest=digest_of_rows(rows),
        recalled=found,
        seconds=s,
    )


# --- a state that is changed on its way ------------------------------------------------------------------------------

#: Changes between statements and questions, after each of which the answers must be the undisturbed ones, to the bit.
CHANGES = ("none", "fork", "route change", "eviction")


@asynccontextmanager
async def _two_routes(plan: QualityPlan, path: Path, way: Way) -> AsyncIterator[tuple[Pipeline, Route]]:
    """A pipeline over the whole model in one stage, and a route of other cuts to which it can change."""
    artifact = await trio.to_thread.run_sync(Artifact.open, path)
    context = context_of(plan, way, 1 if way.name == "eviction" else 2)
    policy = ShardPolicy(min_idle=0)  # a guest takes the only slot at once
    routes = []
    async with open_cluster() as cluster:
        for name, split in (("whole", f"0:{artifact.hp.n_layers}"), ("part", plan.split)):
            ranges = parse_split(split, artifact.hp.n_layers)
            refs = tuple(StageRef(f"{name}-{index}", layers) for index, layers in enumerate(ranges))
            engines = await load_engines([artifact] * len(ranges), ranges, context)
            for ref, engine in zip(refs, engines, strict=True):
                await cluster.start(ref.address, engine, policy)
            routes.append(Route(refs))
        async with open_pipeline_on(cluster.connect, routes[0], chunk=way.chunk, timeouts=PATIENCE) as pipeline:
            yield pipeline, routes[1]


async def _answers(pipeline: Pipeline, other: Route, change: str, recital: Recital) -> tuple[Rows, int]:
    async with pipeline.session() as session:
        await session.prefill(before_questions(recital))
        if change == "fork":
            async with session.fork() as copy:
                rows = await ask(copy, pipeline.n_vocab, recital)
                return rows, copy.sent_in_all
        if change == "route change":
            there = pipeline.route
            await pipeline.change_route(other)
            rows = await ask(session, pipeline.n_vocab, recital)
            await pipeline.change_route(there)
        else:
            if change == "eviction":
                async with pipeline.session() as guest:
                    await guest.prefill(recital.tokens[:8])
            rows = await ask(session, pipeline.n_vocab, recital)
        return rows, session.sent_in_all - len(session.transcript)


async def changed(plan: QualityPlan, change: str, model: Model) -> Changed:
    """Recall after a change."""
    path = await trio.to_thread.run_sync(model, "f32")
    way = Way(name=change, chunk=plan.chunk)
    found, again = [], 0
    async with _two_routes(plan, path, way) as (pipeline, other):
        for kind in Kind:
            answers: list[Rows] = []
            questions: list[Question] = []
            for recital in recitals(plan, kind, plan.changed_at, plan.changed_recitals):
                rows, sent = await _answers(pipeline, other, change, recital)
                answers.append(rows)
                questions += recital.questions
                again += sent
            found.append(recalled(kind, plan.changed_at, np.concatenate(answers), questions))
    if change in ("route change", "eviction") and again < plan.changed_at:
        raise EngineError(f"after {change} {again} tokens were sent again: the state was still there")
    return Changed(change=change, sent_again=again, recalled=found)
