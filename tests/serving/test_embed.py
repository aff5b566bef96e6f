"""dgr from asyncio: results, errors and cancellation cross both ways, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import trio
from narrow import present

import dgr
from dgr.errors import BudgetExceeded, ContextLimitExceeded, InvalidRoute, InvalidToken, SessionBusy
from dgr.serving import embed

SPLIT = "0:2,2:5,5:7"
CONTEXT = dgr.ContextParams(n_ctx=512, n_seq_max=2)
PROMPT = list(range(10, 50))


def undisturbed(model: Path, prompt: list[int], n: int) -> list[int]:
    """The same turn from trio, through the whole model."""

    async def run() -> list[int]:
        async with dgr.open_pipeline(model, context=CONTEXT) as pipeline, pipeline.session() as session:
            return [token.id async for token in session.generate(prompt, max_tokens=n, stop=())]

    return trio.run(run)


async def answer(session: embed.EmbeddedSession, prompt: list[int], n: int) -> list[int]:
    return [token.id async for token in await session.generate(prompt, max_tokens=n, stop=())]


def test_an_answer_equals_the_trio_one(small: Path) -> None:
    async def main() -> list[int]:
        async with embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline, pipeline.session() as session:
            return await answer(session, PROMPT, 12)

    assert asyncio.run(main()) == undisturbed(small, PROMPT, 12)


def test_a_fork_answers_as_its_source_would(small: Path) -> None:
    async def main() -> tuple[list[int], list[int]]:
        async with embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline, pipeline.session() as session:
            await session.prefill(PROMPT)
            async with session.fork() as other:
                assert other.committed == session.committed == len(PROMPT)
                copied = await answer(other, [5], 6)
            return copied, await answer(session, [5], 6)

    assert asyncio.run(main()) == (undisturbed(small, [*PROMPT, 5], 6),) * 2


def test_the_end_of_an_answer_is_told_as_under_trio(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a stop token in mid-character leaves over are in the tail."""
    first, second = undisturbed(small, PROMPT, 2)

    async def main() -> tuple[str, str | None, str]:
        async with embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline, pipeline.session() as session:
            cut = {first: b"\xe2"}
            monkeypatch.setattr(present(pipeline._pipeline.vocabulary), "piece", lambda token: cut.get(token, b""))
            generation = await session.generate(PROMPT, stop=[second])
            text = "".join([token.text async for token in generation])
            return text, generation.finish_reason, generation.tail

    assert asyncio.run(main()) == ("", "stop", "\ufffd")


def test_errors_arrive_with_their_own_types(small: Path) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRoute, match="leaves out layers"):
            async with embed.open_pipeline(small, "0:2,3:7"):
                pytest.fail("a split with a hole opened")
        with pytest.raises(BudgetExceeded, match="over the budget of 1048576 B"):
            async with embed.open_pipeline(small, SPLIT, memory_budget="1MiB"):
                pytest.fail("a budget of 1 MiB was kept")
        async with embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline, pipeline.session() as session:
            with pytest.raises(ContextLimitExceeded, match="n_prompt"):
                await session.generate([5] * 513)
            with pytest.raises(InvalidToken, match="99999"):
                await session.generate([99999])
            assert await answer(session, PROMPT, 4) == undisturbed(small, PROMPT, 4)

    asyncio.run(main())


def test_an_error_in_the_block_leaves_as_itself_and_closes_everything(small: Path) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="the caller's own"):
            async with embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline, pipeline.session():
                raise RuntimeError("the caller's own")

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dgr-trio")]


def test_a_cancelled_turn_keeps_the_session_for_the_next(small: Path) -> None:
    """The next turn may start at once: a cancelled await returns only when the other side has unwound."""

    async def main() -> tuple[list[int], list[int]]:
        async with (
            embed.open_pipeline(small, SPLIT, context=CONTEXT, chunk=64) as pipeline,
            pipeline.session() as session,
        ):
            generation = await session.generate(PROMPT * 10, max_tokens=8, stop=())
            turn = asyncio.ensure_future(anext(generation))
            while (await pipeline.statistics()).in_flight == 0 and not turn.done():
                continue
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            said = session.transcript
            return said, await answer(session, [7, 8, 9], 8)

    said, answered = asyncio.run(main())
    assert answered == undisturbed(small, [*said, 7, 8, 9], 8)


def test_two_awaits_on_one_session_are_refused_and_two_sessions_are_not(small: Path) -> None:
    async def main() -> tuple[list[int], list[int]]:
        async with (
            embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline,
            pipeline.session() as one,
            pipeline.session() as other,
        ):
            generation = await one.generate(PROMPT * 8, max_tokens=1, stop=())
            running = asyncio.ensure_future(anext(generation))
            while (await pipeline.statistics()).in_flight == 0 and not running.done():
                continue
            if not running.done():
                with pytest.raises(SessionBusy):
                    await one.generate([1])
            await running
            first, second = await asyncio.gather(answer(one, PROMPT, 6), answer(other, PROMPT, 6))
            assert (await pipeline.statistics()).sessions == 2
            return first, second

    _, second = asyncio.run(main())
    assert second == undisturbed(small, PROMPT, 6)


def test_a_route_change_goes_through(small: Path) -> None:
    async def main() -> list[int]:
        async with embed.open_pipeline(small, SPLIT, context=CONTEXT) as pipeline, pipeline.session() as session:
            first = await answer(session, PROMPT, 5)
            ranges = [dgr.LayerRange(0, 2), dgr.LayerRange(2, 5), dgr.LayerRange(5, 7)]
            stages = tuple(dgr.StageRef(f"stage-{index}", layers) for index, layers in enumerate(ranges))
            await pipeline.change_route(dgr.Route(stages))
            return first + await answer(session, [], 5)

    assert asyncio.run(main()) == undisturbed(small, PROMPT, 10)
