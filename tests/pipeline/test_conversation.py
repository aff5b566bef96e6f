"""A conversation through the runtime: the same tokens as the whole model, whatever the split, turn by turn."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import trio
from conversations import reference, seen, take, take_tokens
from msgspec.structs import replace
from narrow import all_of, as_a
from pipeline.harness import CONTEXT, MODEL, THREE, TWO, WHOLE, kinds, open_stages

from dgr.client.events import Prefilled, PrefillProgress, RePrefilled
from dgr.core.route import LayerRange
from dgr.core.values import LogitsWanted, SamplingParams
from dgr.engine.base import Work
from dgr.errors import (
    ContextLimitExceeded,
    InputError,
    InvalidRoute,
    InvalidToken,
    SessionBusy,
    SessionError,
)
from dgr.protocol.states import ClientState
from dgr.testing.engines.fake import FakeEngine, FakeModel, FakeVocabulary

PROMPT = list(b"The quick brown fox jumps over")
SPLITS = [WHOLE, TWO, THREE, "0:3,3:6", "0:1,1:2,2:3,3:4,4:5,5:6"]


@pytest.mark.parametrize("split", SPLITS)
async def test_any_split_answers_like_the_whole_model(autojump_clock: trio.abc.Clock, split: str) -> None:
    async with open_stages(split) as stages, stages.pipeline(split) as pipeline, pipeline.session() as session:
        assert await take(session.generate(PROMPT, max_tokens=20)) == reference(PROMPT, 20)
        assert session.transcript == PROMPT + reference(PROMPT, 20)


@pytest.mark.parametrize("chunk", [1, 5, 8, 16])
@pytest.mark.parametrize("window", [1, 2, 7])
async def test_chunks_and_windows_change_nothing(autojump_clock: trio.abc.Clock, chunk: int, window: int) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, repeat_penalty=1.3, presence_penalty=0.5)
    async with (
        open_stages(THREE) as stages,
        stages.pipeline(THREE, chunk=chunk, window=window) as pipeline,
        pipeline.session() as session,
    ):
        answer = await take(session.generate(PROMPT, max_tokens=12, sampling=sampling))
        assert answer == reference(PROMPT, 12, sampling)


async def test_seeds_and_choices_draw_apart(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        answers = set()
        for seed, choice in ((0, 0), (1, 0), (0, 1)):
            sampling = SamplingParams(temperature=1.0, seed=seed, choice=choice)
            async with pipeline.session() as session:
                answer = await take(session.generate(PROMPT, max_tokens=8, sampling=sampling))
            assert answer == reference(PROMPT, 8, sampling)
            answers.add(tuple(answer))
        assert len(answers) == 3


async def test_next_turn_prefills_only_what_is_new(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        first = await take(session.generate(PROMPT, max_tokens=4))
        # The last token drawn is not run before somebody wants what follows it.
        assert stages.tokens_run(THREE) == [len(PROMPT) + 3] * 3
        question = list(b" and then?")
        second = await take(session.generate(question, max_tokens=4))
        assert second == reference([*PROMPT, *first, *question], 4)
        assert stages.tokens_run(THREE) == [len(PROMPT) + 4 + len(question) + 3] * 3
        prefilled = [event.tokens for event in seen(events) if isinstance(event, Prefilled)]
        assert prefilled == [len(PROMPT), 1 + len(question)]


async def test_a_whole_transcript_prefills_only_what_is_new(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        first = await take(session.generate(transcript=PROMPT, max_tokens=3))
        longer = [*PROMPT, *first, *b"!"]
        assert await take(session.generate(transcript=longer, max_tokens=3)) == reference(longer, 3)
        assert stages.tokens_run(TWO) == [len(PROMPT) + 2 + 1 + 1 + 2] * 2


@pytest.mark.parametrize("at", [0, 7, 29])
async def test_a_diverged_transcript_is_prefilled_anew(autojump_clock: trio.abc.Clock, at: int) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        await take(session.generate(PROMPT, max_tokens=3))
        other = [*PROMPT[:at], 1, *PROMPT[at + 1 :], 2]
        assert await take(session.generate(transcript=other, max_tokens=3)) == reference(other, 3)
        again = [event for event in seen(events) if isinstance(event, RePrefilled)]
        assert [(event.reason, event.tokens) for event in again] == [("diverged", len(other))]


async def test_a_shorter_transcript_is_prefilled_anew(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        await take(session.generate(PROMPT, max_tokens=3))
        assert await take(session.generate(transcript=PROMPT[:9], max_tokens=3)) == reference(PROMPT[:9], 3)


async def test_prefill_without_an_answer_then_more(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        await session.prefill(PROMPT)
        assert (session.committed, session.state) == (len(PROMPT), ClientState.READY)
        await session.prefill([])
        assert stages.tokens_run(THREE) == [len(PROMPT)] * 3
        assert await take(session.generate([5], max_tokens=2)) == reference([*PROMPT, 5], 2)
        assert stages.tokens_run(THREE) == [len(PROMPT) + 2] * 3


async def test_an_answer_to_what_is_prefilled_runs_it_again_and_says_so(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        await session.prefill(PROMPT)
        assert await take(session.generate(max_tokens=2)) == reference(PROMPT, 2)
        assert [event.reason for event in seen(events) if isinstance(event, RePrefilled)] == [
            "the logits of the last token are gone"
        ]


async def test_rows_of_logits_are_those_of_the_whole_model(autojump_clock: trio.abc.Clock) -> None:
    whole = FakeEngine(None, replace(CONTEXT, n_batch=64, n_ubatch=64))
    expected = whole.run([Work(0, 0, PROMPT, logits=LogitsWanted.ALL)])[0].logits
    rows: dict[int, bytes] = {}

    def keep(position: int, values: memoryview) -> None:
        size = 4 * MODEL.n_vocab
        for index in range(values.nbytes // size):
            rows[position + index] = bytes(values[index * size : (index + 1) * size])

    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        await session.logits(PROMPT[:11], keep)
        await session.logits(PROMPT[11:], keep)
        assert sorted(rows) == list(range(len(PROMPT)))
        assert b"".join(rows[position] for position in sorted(rows)) == expected


async def test_top_logprobs_come_with_the_token(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        tokens = await take_tokens(session.generate(PROMPT, max_tokens=2, sampling=SamplingParams(top_logprobs=3)))
        for token in tokens:
            assert len(token.top) == 3
            assert token.top[0].token == token.id
        assert [token.position for token in tokens] == [len(PROMPT), len(PROMPT) + 1]


async def test_text_comes_and_goes_through_the_vocabulary(autojump_clock: trio.abc.Clock) -> None:
    vocabulary = FakeVocabulary()
    async with (
        open_stages(TWO) as stages,
        stages.pipeline(TWO, vocabulary=vocabulary) as pipeline,
        pipeline.session() as session,
    ):
        text = "".join(token.text for token in await take_tokens(session.generate("Grüße", max_tokens=6)))
        assert text == bytes(reference(list("Grüße".encode()), 6)).decode()


class _Cut(FakeVocabulary):
    """Every token is the first byte of a character of three."""

    def piece(self, token: int) -> bytes:
        return bytes([0xE2 + token % 2])


@pytest.mark.parametrize("end", ["length", "stop", "context"])
async def test_an_answer_cut_in_mid_character_has_the_same_text_however_it_ends(
    autojump_clock: trio.abc.Clock, end: str
) -> None:
    prompt = PROMPT if end != "context" else (PROMPT * 4)[: CONTEXT.n_ctx - 3]
    expected = reference(prompt, 4)
    assert expected[3] not in expected[:3]
    ends: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": 3}, "stop": {"stop": [expected[3]]}, "context": {"stop": ()},
    }  # fmt: skip
    options = ends[end]
    async with (
        open_stages(TWO) as stages,
        stages.pipeline(TWO, vocabulary=_Cut()) as pipeline,
        pipeline.session() as session,
    ):
        generation = session.generate(prompt, **options)
        tokens = [token async for token in generation]
        answer = expected[:3] if end != "context" else expected
        assert (generation.finish_reason, [token.id for token in tokens]) == (end, answer)
        whole = b"".join(_Cut().piece(token) for token in answer).decode("utf-8", "replace")
        assert "".join(token.text for token in tokens) + generation.tail == whole
        assert generation.tail == ("\ufffd" if end == "stop" else "")


async def test_an_answer_of_nothing_has_no_tail(autojump_clock: trio.abc.Clock) -> None:
    async with (
        open_stages(TWO) as stages,
        stages.pipeline(TWO, vocabulary=_Cut()) as pipeline,
        pipeline.session() as session,
    ):
        generation = session.generate(PROMPT, max_tokens=0)
        assert [token async for token in generation] == []
        assert (generation.finish_reason, generation.tail) == ("length", "")


async def test_a_stop_token_ends_the_answer(autojump_clock: trio.abc.Clock) -> None:
    expected = reference(PROMPT, 5)
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        generation = session.generate(PROMPT, max_tokens=9, stop=[expected[4]])
        assert await take(generation) == expected[: expected.index(expected[4])]
        assert generation.finish_reason == "stop"
        assert await take(generation) == []


async def test_length_ends_the_answer(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, stages.pipeline(WHOLE) as pipeline, pipeline.session() as session:
        generation = session.generate(PROMPT, max_tokens=2)
        assert len(await take(generation)) == 2
        assert generation.finish_reason == "length"
        nothing = session.generate([1], max_tokens=0)
        assert await take(nothing) == []


# --- limits ---


async def test_a_prompt_of_n_ctx_fits_and_one_more_does_not(autojump_clock: trio.abc.Clock) -> None:
    n_ctx = CONTEXT.n_ctx
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        full = [token % 250 for token in range(n_ctx)]
        async with pipeline.session() as session:
            generation = session.generate(full)
            assert await take(generation) == reference(full, 1)
            assert generation.finish_reason == "context"
            assert session.committed == n_ctx
            with pytest.raises(ContextLimitExceeded, match=rf"{n_ctx + 1} tokens .* {n_ctx} \(n_ctx\)"):
                session.generate()
        async with pipeline.session() as session:
            await session.prefill([3])
            with pytest.raises(ContextLimitExceeded, match=rf"{n_ctx + 1} tokens"):
                session.generate(full)
            assert session.transcript == [3]
            assert await take(session.generate([4], max_tokens=1)) == reference([3, 4], 1)


async def test_an_answer_ends_where_the_context_does(autojump_clock: trio.abc.Clock) -> None:
    prompt = list(range(CONTEXT.n_ctx - 3))
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        generation = session.generate(prompt, max_tokens=50)
        assert await take(generation) == reference(prompt, 4)
        assert generation.finish_reason == "context"


@pytest.mark.parametrize("token", [-1, MODEL.n_vocab, 2**31, 2**40])
async def test_tokens_outside_the_vocabulary_are_refused(autojump_clock: trio.abc.Clock, token: int) -> None:
    async with open_stages(WHOLE) as stages, stages.pipeline(WHOLE) as pipeline, pipeline.session() as session:
        await session.prefill([1, 2])
        for refused in (session.generate, lambda tokens: session.generate(transcript=tokens)):
            with pytest.raises(InvalidToken, match=f"token id {token} at position"):
                refused([1, 2, token])
        assert session.transcript == [1, 2]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=-1),
        SamplingParams(top_k=-1),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.5),
        SamplingParams(temperature=-1.0),
        SamplingParams(min_p=2.0),
        SamplingParams(repeat_penalty=0.0),
        SamplingParams(temperature=float("nan")),
        SamplingParams(temperature=float("inf")),
        SamplingParams(penalty_last_n=-2),
        SamplingParams(top_logprobs=65),
        SamplingParams(choice=-1),
    ],
    ids=str,
)
async def test_sampling_out_of_range_is_refused_before_anything_moves(
    autojump_clock: trio.abc.Clock, sampling: SamplingParams
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        with pytest.raises(InputError):
            session.generate(PROMPT, sampling=sampling)
        assert session.transcript == []
        assert await take(session.generate(PROMPT, max_tokens=2)) == reference(PROMPT, 2)
        assert pipeline.epoch == 1


async def test_an_answer_to_nothing_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, stages.pipeline(WHOLE) as pipeline, pipeline.session() as session:
        ways: tuple[dict[str, Any], ...] = ({}, {"prompt": []}, {"transcript": []})
        for nothing in ways:
            with pytest.raises(InputError, match="nothing to go on from"):
                session.generate(**nothing)
        with pytest.raises(InputError, match="needs a vocabulary"):
            session.generate("text")


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chunk": -1}, {"window": 0}, {"window": 65}, {"retries": -1}])
async def test_pipelines_refuse_sizes_that_make_no_sense(
    autojump_clock: trio.abc.Clock, options: dict[str, Any]
) -> None:
    async with open_stages(WHOLE) as stages:
        with pytest.raises(InputError, match=f"{next(iter(options))} is"):
            async with stages.pipeline(WHOLE, **options):
                pass


# --- one answer at a time ---


async def test_a_second_generation_while_one_waits_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        generation = session.generate(PROMPT, max_tokens=3)
        refused = []

        def ask_more(_batch: object) -> None:
            stages.engines["0:2"].watch = None
            calls: list[Callable[[], object]] = [
                lambda: session.generate([1]), lambda: session.generate(transcript=[1]),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(SessionBusy, match="is answering already"):
                    call()
                refused.append(True)

        stages.engines["0:2"].watch = ask_more
        assert await take(generation) == reference(PROMPT, 3)
        assert refused == [True, True]


async def test_an_answer_is_over_when_another_turn_begins(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        old = session.generate(PROMPT, max_tokens=9)
        begun = await take(old, 2)
        new = session.generate([1], max_tokens=2)
        with pytest.raises(SessionBusy, match="begun another turn"):
            await anext(old)
        assert await take(new) == reference([*PROMPT, *begun, 1], 2)


async def test_a_closed_session_refuses_everything(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        async with pipeline.session() as session:
            generation = session.generate(PROMPT)
            await anext(generation)
        calls: list[Callable[[], Any]] = [
            lambda: session.generate([1]), lambda: anext(generation), session.state_summaries,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(SessionError, match="is closed"):
                await call()


# --- state summaries ---


async def test_state_summaries_tell_the_same_on_every_stage(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        empty = await session.state_summaries()
        assert {summary.state.position for summary in empty.values()} == {0}
        await session.prefill(PROMPT)
        summaries = await session.state_summaries()
        assert list(summaries) == THREE.split(",")
        assert {summary.state.position for summary in summaries.values()} == {len(PROMPT)}
        assert len({summary.digest for summary in summaries.values()}) == 1
        assert [[part.name for part in summary.state.components] for summary in summaries.values()] == [
            ["tape"],
            ["tape", "tally"],
            ["tape", "tally"],
        ]


async def test_state_summaries_do_not_depend_on_how_the_tokens_came(autojump_clock: trio.abc.Clock) -> None:
    seen_components = []
    for chunk in (3, 8):
        async with (
            open_stages(THREE) as stages,
            stages.pipeline(THREE, chunk=chunk) as pipeline,
            pipeline.session() as session,
        ):
            await session.prefill(PROMPT)
            summaries = await session.state_summaries()
            seen_components.append([summary.state.components for summary in summaries.values()])
    assert seen_components[0] == seen_components[1]


# --- routes that do not fit ---


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (FakeEngine(None, CONTEXT, model=FakeModel(seed=1)), "artifact identity"),
        (FakeEngine(None, replace(CONTEXT, n_ctx=64)), "context parameters"),
        (FakeEngine(None, CONTEXT, kernel_fingerprint="other"), "kernel fingerprint other"),
    ],
)
async def test_a_stage_that_does_not_belong_is_refused_and_named(
    autojump_clock: trio.abc.Clock, engine: FakeEngine, words: str
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        await stages.start("0:6#other", engine)
        stages.engines["0:6#other"] = FakeEngine(None, CONTEXT)  # a stranger's slots are not looked at
        with pytest.raises(InvalidRoute, match=words):
            await pipeline.change_route(stages.route("0:6#other"))
        assert pipeline.epoch == 1
        assert await take(session.generate(PROMPT, max_tokens=2)) == reference(PROMPT, 2)


async def test_events_tell_first_prefills(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        await take(session.generate(PROMPT, max_tokens=3))
        happened = seen(events)
        assert kinds(happened) == ["Prefilled"]
        assert as_a(Prefilled, happened[-1]).tokens == len(PROMPT)


async def test_residuals_are_whole_numbers(autojump_clock: trio.abc.Clock) -> None:
    """The fake's promise of exactness: what crosses a boundary is an integer that float32 holds."""
    head = FakeEngine(LayerRange(0, 2), CONTEXT)
    residual = head.run([Work(0, 0, PROMPT[:8])])[0].residual
    assert residual is not None
    values = struct.unpack(f"<{len(bytes(residual)) // 4}f", residual)
    assert all(value == int(value) and 0 <= value < 2**24 for value in values)


async def test_a_negative_number_of_tokens_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(WHOLE) as stages, stages.pipeline(WHOLE) as pipeline, pipeline.session() as session:
        with pytest.raises(InputError, match="max_tokens is -4"):
            session.generate(PROMPT, max_tokens=-4)
        assert session.transcript == []
        assert await take(session.generate(PROMPT, max_tokens=0)) == []


async def test_a_prefill_of_several_chunks_tells_how_far_it_is(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        events = pipeline.events()
        await session.prefill(PROMPT[:20])
        told = seen(events)
        assert [(e.session, e.committed, e.total) for e in all_of(PrefillProgress, told[:-1])] == [
            (session.id, n, 20) for n in (8, 16, 20)
        ]
        assert isinstance(told[-1], Prefilled)
        assert told[-1].seconds == as_a(PrefillProgress, told[-2]).seconds
        # A later turn counts its own tokens; one chunk is not news.
        await session.prefill(PROMPT[:9])
        assert [(e.committed, e.total) for e in seen(events) if isinstance(e, PrefillProgress)] == [(8, 9), (9, 9)]
        await take(session.generate(PROMPT[:7], max_tokens=3))
        assert not any(isinstance(event, PrefillProgress) for event in seen(events))


async def test_progress_does_not_push_out_what_matters_more(autojump_clock: trio.abc.Clock) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline:
        events = pipeline.events()
        for committed in range(10_000):
            pipeline._hub.emit(PrefillProgress(1, committed, 10_000, 0.0))
        pipeline._hub.emit(Prefilled(1, 10_000, 0.0))
        assert isinstance(seen(events)[-1], Prefilled)
