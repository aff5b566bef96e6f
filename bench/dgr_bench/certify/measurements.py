"""The units of a certificate: one length in one variant, cancellations, clean-up, memory. Raw metrics only."""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Sequence

import msgspec
import trio

from dgr import Artifact, ContextParams, LayerRange, Pipeline, SamplingParams
from dgr.client.events import Event, RePrefilled, StateLost, drain
from dgr.core.prefix import PrefixDigest
from dgr.core.values import LogitsWanted
from dgr.engine.base import Work
from dgr.errors import NonFinite
from dgr.selftest.chain import Chain, pieces, some_tokens
from dgr_bench.certify.profiles import Profile
from dgr_bench.certify.resident import resident_with
from dgr_bench.subjects import Conversation, Resumed, Stages, StageState, Traffic, Wrap, load_wrapped, resident_bytes


class RePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to bring a lost session back."""

    reason: str
    tokens: int
    seconds: float
    #: From the change of the route to the next token.
    to_next_token_s: float


class LengthRun(msgspec.Struct, kw_only=True):
    """One prompt, its answer, and given tokens after it, run in one way."""

    variant: str
    length: int
    #: The tokens drawn.
    tokens: list[int] = []
    #: States of the stages when the whole prompt is committed, and when all drawn tokens but the last are.
    at_prompt: list[StageState] = []
    at_end: list[StageState] = []
    #: Digests of the tokens committed at these moments, counted here.
    prefix_at_prompt: str = ""
    prefix_at_end: str = ""
    #: BLAKE2b-128 of the rows of logits of the given tokens, hex.
    rows_digest: str = ""
    #: Values among them that are NaN or Inf.
    rows_not_finite: int = 0
    #: Seconds to the first token, between the following ones, and for the given tokens.
    first_token_s: float = 0.0
    token_s: list[float] = []
    rows_s: float = 0.0
    #: Of this process, at the end.
    resident_bytes: int = 0
    #: Between stages, for the prompt and for one drawn token each; None where it cannot be seen.
    prompt_traffic: Traffic | None = None
    decode_traffic: Traffic | None = None
    #: Reasons for which the session lost its state.
    lost: list[str] = []
    reprefill: RePrefill | None = None
    #: Why the run ended early; empty when it did not.
    error: str = ""


def _elapsed(since: float) -> float:
    return trio.current_time() - since


def _traffic(stages: Stages | None, before: Traffic | None) -> Traffic | None:
    now = None if stages is None else stages.traffic()
    if now is None or before is None:
        return now
    return Traffic(frames=now.frames - before.frames, bytes=now.bytes - before.bytes)


def not_finite(rows: bytes) -> int:
    """How many little-endian float32 are NaN or Inf."""
    values = array("f", rows)
    return sum(1 for value in values if not math.isfinite(value))


async def run_length(
    run: LengthRun,
    talk: Conversation,
    profile: Profile,
    n_vocab: int,
    *,
    stages: Stages | None = None,
    disturb: Pipeline | None = None,
) -> bytes:
    """Fill ``run``: a prompt of its length, the profile's drawn tokens, and its given ones; returns the rows of the latter.

    ``disturb``: a pipeline whose route changes after half of the drawn tokens.
    """
    prompt = some_tokens(run.length, n_vocab, profile.seed)
    idle, began = _traffic(stages, None), trio.current_time()
    run.tokens.append(await talk.start(prompt))
    run.first_token_s = _elapsed(began)
    run.prompt_traffic = _traffic(stages, idle)
    run.at_prompt = await talk.states()
    run.prefix_at_prompt = PrefixDigest(prompt).digest().hex()
    before_decode = _traffic(stages, None)
    for index in range(1, profile.decode):
        changing = disturb is not None and index == profile.decode // 2
        began = trio.current_time()
        if disturb is not None and changing:
            events = disturb.events()
            await disturb.change_route(disturb.route)
            run.tokens.append(await talk.next())
            run.reprefill = _reprefill(events, _elapsed(began))
        else:
            run.tokens.append(await talk.next())
            run.token_s.append(_elapsed(began))
    if disturb is None:
        run.decode_traffic = _traffic(stages, before_decode)
    run.at_end = await talk.states()
    run.prefix_at_end = PrefixDigest([*prompt, *run.tokens[:-1]]).digest().hex()
    began = trio.current_time()
    rows = await talk.rows(some_tokens(profile.continuation, n_vocab, profile.seed + 1))
    run.rows_s = _elapsed(began)
    run.rows_digest = hashlib.blake2b(rows, digest_size=16).hexdigest()
    run.rows_not_finite = not_finite(rows)
    run.resident_bytes = resident_bytes()
    return rows


def _reprefill(events: trio.MemoryReceiveChannel[Event], to_next_token_s: float) -> RePrefill | None:
    found = next((event for event in drain(events) if isinstance(event, RePrefilled)), None)
    if found is None:
        return None
    return RePrefill(reason=found.reason, tokens=found.tokens, seconds=found.seconds, to_next_token_s=to_next_token_s)


async def run_piped(
    run: LengthRun, stages: Stages, profile: Profile, n_vocab: int, chunk: int, *, disturbed: bool = False
) -> bytes:
    """The same through a pipeline of stages; every loss of state is recorded."""
    async with stages.pipeline(chunk) as pipeline:
        events = pipeline.events()
        try:
            async with stages.conversation(pipeline) as talk:
                return await run_length(
                    run, talk, profile, n_vocab, stages=stages, disturb=pipeline if disturbed else None
                )
        finally:
            run.lost = [event.reason for event in drain(events) if isinstance(event, StateLost)]


# --- sessions beside each other -------------------------------------------------------------------------------------


async def run_forked(run: LengthRun, stages: Stages, profile: Profile, n_vocab: int) -> bytes:
    """Fill ``run`` from a copy of a session that stood one token before the prompt's end, and goes on otherwise itself."""
    prompt = some_tokens(run.length, n_vocab, profile.seed)
    async with stages.pipeline(profile.chunk) as pipeline:
        events = pipeline.events()
        try:
            async with pipeline.session() as source:
                await source.prefill(prompt[:-1])
                async with source.fork() as session:
                    await source.prefill(some_tokens(profile.continuation, n_vocab, profile.seed + 3))
                    return await run_length(run, Resumed(pipeline, session), profile, n_vocab)
        finally:
            run.lost = [event.reason for event in drain(events) if isinstance(event, StateLost)]


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """Several sessions in the same native batches. Each has a variant of its own: ``together-N.I``."""

    runs: list[LengthRun]


async def run_together(sessions: int, stages: Stages, profile: Profile, n_vocab: int) -> Together:
    """Step as many sessions as one, on the stages' engines themselves: who shares a batch is not left to chance."""
    chain = Chain(stages.engines)
    try:
        return await trio.to_thread.run_sync(_step_together, chain, sessions, profile, n_vocab)
    finally:
        for slot in range(sessions):
            chain.close(slot)


def _step_together(chain: Chain, sessions: int, profile: Profile, n_vocab: int) -> Together:
    runs = [
        LengthRun(variant=f"together-{sessions}.{index}", length=length)
        for index, length in enumerate(profile.lengths_together(sessions))
    ]
    held: list[list[int]] = [[] for _ in runs]
    share = max(1, profile.n_batch // sessions)

    def commit(slot: int, tokens: Sequence[int], logits: LogitsWanted) -> Work:
        work = Work(slot, len(held[slot]), tuple(tokens), logits=logits)
        held[slot] += tokens
        return work

    def step(batch: Sequence[Work]) -> dict[int, bytes]:
        outputs = chain.run(batch)
        if not all(output.finite for output in outputs):
            raise NonFinite(f"NaN or Inf in a batch of {len(batch)} sessions")
        return {output.slot: bytes(output.logits or b"") for output in outputs}

    def states(slot: int) -> tuple[list[StageState], str]:
        prefix = PrefixDigest(held[slot]).digest().hex()
        found = zip(chain.engines, chain.summaries(slot), strict=True)
        return [
            StageState(
                layers=str(engine.describe().layers),
                position=state.position,
                prefix=prefix,
                components=state.components,
            )
            for engine, state in found
        ], prefix

    def draw(slot: int, logits: bytes) -> None:
        runs[slot].tokens.append(chain.tail.sample(logits, (), SamplingParams())[0])

    prompts = [some_tokens(run.length, n_vocab, profile.seed) for run in runs]
    while waiting := [slot for slot, prompt in enumerate(prompts) if len(held[slot]) < len(prompt)]:
        batch = []
        for slot in waiting:  # in pieces of uneven length
            piece = prompts[slot][len(held[slot]) :][: max(1, share - slot)]
            ends = len(held[slot]) + len(piece) == len(prompts[slot])
            batch.append(commit(slot, piece, LogitsWanted.LAST if ends else LogitsWanted.NONE))
        for slot, logits in step(batch).items():
            if logits:
                draw(slot, logits)
                runs[slot].at_prompt, runs[slot].prefix_at_prompt = states(slot)
    for _ in range(1, profile.decode):
        batch = [commit(slot, run.tokens[-1:], LogitsWanted.LAST) for slot, run in enumerate(runs)]
        for slot, logits in step(batch).items():
            draw(slot, logits)
    for slot, run in enumerate(runs):
        run.at_end, run.prefix_at_end = states(slot)
    step([commit(slot, run.tokens[-1:], LogitsWanted.NONE) for slot, run in enumerate(runs)])
    given, rows = some_tokens(profile.continuation, n_vocab, profile.seed + 1), [b""] * sessions
    for begin, end in pieces(len(given), share):
        for slot, logits in step(
            [commit(slot, given[begin:end], LogitsWanted.ALL) for slot in range(sessions)]
        ).items():
            rows[slot] += logits
    for run, values in zip(runs, rows, strict=True):
        run.rows_digest = hashlib.blake2b(values, digest_size=16).hexdigest()
        run.rows_not_finite = not_finite(values)
    return Together(runs=runs)


# --- cancellation and clean-up ----------------------------------------------------------------------------------------


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """An answer given up at a random moment."""

    during: str
    #: Seconds from the request to the cancellation.
    after_s: float
    #: Seconds until the caller was out.
    caller_s: float
    #: Seconds until what was in flight had drained and the session could be used again.
    usable_s: float
    #: Where every stage stood then.
    positions: list[int]
    #: Whether the answer, taken up again, was the one of a session that nobody cancelled.
    same_answer: bool


async def cancellations(stages: Stages, profile: Profile, n_vocab: int, during: str) -> list[Cancellation]:
    """Cancel ``profile.cancels`` answers, in prefill or in decode, at moments drawn with the profile's seed."""
    prompt = some_tokens(profile.cancel_length, n_vocab, profile.seed + 2)
    moments = random.Random(profile.seed)
    found = []
    async with stages.pipeline(profile.cancel_chunk) as pipeline:
        async with stages.conversation(pipeline) as talk:  # how long it takes, and what is said
            began = trio.current_time()
            answer = [await talk.start(prompt)]
            prefill_s = _elapsed(began)
            began = trio.current_time()
            answer += [await talk.next() for _ in range(profile.decode - 1)]
            decode_s = _elapsed(began)
        for _ in range(profile.cancels):
            async with stages.conversation(pipeline) as talk:
                said: list[int] = []
                if during == "decode":
                    said.append(await talk.start(prompt))
                after = moments.uniform(0, prefill_s if during == "prefill" else decode_s)
                began = trio.current_time()
                with trio.move_on_after(after):
                    if during == "prefill":
                        said.append(await talk.start(prompt))
                    while len(said) < profile.decode:
                        said.append(await talk.next())
                caller_s = max(0.0, _elapsed(began) - after)
                positions = [state.position for state in await talk.states()]
                usable_s = max(0.0, _elapsed(began) - after)
                if not said:
                    said.append(await talk.start(()))
                elif len(said) < profile.decode:
                    said.append(await talk.next())
                found.append(
                    Cancellation(
                        during=during,
                        after_s=after,
                        caller_s=caller_s,
                        usable_s=usable_s,
                        positions=positions,
                        same_answer=said == answer[: len(said)],
                    )
                )
    return found


class CleanUp(msgspec.Struct, frozen=True, kw_only=True):
    """Leaving a session, as its caller and the stages see it."""

    #: State leased while it lived, on all stages.
    leased_bytes: int
    #: Seconds from leaving the block to its end.
    seconds: float
    #: Leased when the block had ended.
    left_bytes: int
    #: Rows that the freed slots still hold, over all components and stages.
    left_rows: int


async def clean_up(stages: Stages, profile: Profile, n_vocab: int) -> CleanUp:
    """Fill a session, leave it, and look at what is left."""
    prompt = some_tokens(profile.cancel_length, n_vocab, profile.seed + 2)
    async with stages.pipeline(profile.chunk) as pipeline:
        async with stages.conversation(pipeline) as talk:
            await talk.start(prompt)
            leased = stages.leased_bytes() or 0
            began = trio.current_time()
        seconds = _elapsed(began)
    rows = sum(part.rows_max for engine in stages.engines for part in engine.state_summary(0).components)
    return CleanUp(leased_bytes=leased, seconds=seconds, left_bytes=stages.leased_bytes() or 0, left_rows=rows)


# --- memory -----------------------------------------------------------------------------------------------------------


class MemoryAt(msgspec.Struct, frozen=True, kw_only=True):
    """What stages take at one context size."""

    n_ctx: int
    #: By layers: component -> bytes of state, as the native allocator counts.
    state: dict[str, dict[str, int]]
    weights_bytes: int
    compute_bytes: int
    #: Resident memory of a process of their own: before loading, and with all stages loaded.
    resident_before: int
    resident_loaded: int


async def memory_at(
    artifact: Artifact, ranges: Sequence[LayerRange], context: ContextParams, wrap: Wrap | None = None
) -> MemoryAt:
    """Load the stages at a context size, here and in a process of their own."""
    engines = await load_wrapped(artifact, ranges, context, wrap)
    try:
        reports = {str(engine.describe().layers): engine.memory() for engine in engines}
    finally:
        for engine in engines:
            engine.stop()
    resident = await resident_with(artifact, ranges, context)
    return MemoryAt(
        n_ctx=context.n_ctx,
        state={layers: dict(report.state) for layers, report in reports.items()},
        weights_bytes=sum(report.weights for report in reports.values()),
        compute_bytes=sum(report.compute for report in reports.values()),
        resident_before=resident.before,
        resident_loaded=resident.loaded,
    )
