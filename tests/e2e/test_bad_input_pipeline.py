"""Bad input through the whole runtime: a typed error to whoever caused it, nothing to anybody else, and life goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
from e2e.running import Open
from fixture_types import Prompt

import dgr
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams
from dgr.engine.base import Output, ShardEngine, Work
from dgr.errors import (
    ArtifactError,
    ContextLimitExceeded,
    DgrError,
    EngineError,
    InvalidLayerRange,
    InvalidRoute,
    InvalidToken,
    NonFinite,
    UnsupportedModel,
)
from dgr.protocol.states import ClientState
from dgr.testing.engines.mutants import BadResidual, Mutant

CONTEXT = ContextParams(n_ctx=256, n_batch=128, n_ubatch=128, n_seq_max=3)
SPLIT = "0:2,2:4,4:7"


async def some(session: ClientSession, prompt: Sequence[int], count: int) -> list[int]:
    return [token.id async for token in session.generate(prompt, max_tokens=count, stop=())]


# --- files and splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: data[:-1], ArtifactError, r"ends at byte \d+, but the file has \d+ bytes"),
        (lambda data: data[:999], ArtifactError, r"only \d+ bytes are left"),
        (lambda data: data.replace(b"deepseek4", b"deepseek3", 1), UnsupportedModel, "'deepseek3'.*'deepseek4'"),
        (
            lambda data: data.replace(b"blk.5.ffn_gate_inp.weight", b"blk.5.exp_probs_b_vl.bias"),
            ArtifactError,
            "ffn_gate_inp.* missing",
        ),
    ],
    ids=["truncated", "header only", "architecture", "tensor"],
)
async def test_a_file_that_cannot_run(
    small: Path, tmp_path: Path, change: Callable[[bytes], bytes], error: type[DgrError], message: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(small.read_bytes()))  # noqa: ASYNC240 (some MiB, and nothing else runs)
    with pytest.raises(error, match=f"{re.escape(str(path))}.*{message}"):
        async with dgr.open_pipeline(path, SPLIT, context=CONTEXT):
            pass


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ("0:2,2:2,2:7", InvalidLayerRange, "2:2 is empty"),
        ("0:4,3:7", InvalidRoute, "3:7 overlaps .*must begin at 4"),
        ("0:4,5:7", InvalidRoute, "5:7 leaves out .*must begin at 4"),
        ("0:4,4:6", InvalidRoute, "ends at layer 6, but the model has 7"),
        ("0:4,4:8", InvalidLayerRange, "4:8 ends beyond .*the model has 7"),
        ("1:7", InvalidRoute, "1:7 leaves out .*must begin at 0"),
        ("0:4;4:7", InvalidLayerRange, "not of the form A:B"),
        ("", InvalidLayerRange, "not of the form A:B"),
    ],
)
async def test_a_split_that_is_none(small: Path, split: str, error: type[DgrError], message: str) -> None:
    with pytest.raises(error, match=message):
        async with dgr.open_pipeline(small, split, context=CONTEXT):
            pass


# --- prompts ----------------------------------------------------------------------------------------------------------


async def test_prompts_that_cannot_be_run(small: Path, prompt: Prompt, open_stages: Open) -> None:
    async with open_stages(small, SPLIT, CONTEXT) as running, running.pipeline.session() as session:
        first = await some(session, prompt(30), 3)
        transcript, before = list(session.transcript), running.images(session)

        for token in (-1, 512, 2**31, 2**40):
            with pytest.raises(InvalidToken, match=rf"token id {token} at position 33 .*vocabulary of 512"):
                session.generate([token])
            with pytest.raises(InvalidToken, match=rf"token id {token} at position 0 "):
                session.generate(transcript=[token, 5])
        with pytest.raises(ContextLimitExceeded, match=r"257 tokens \(n_prompt\), .* 256 \(n_ctx\)"):
            session.generate(prompt(257 - 33))
        with pytest.raises(ContextLimitExceeded, match=r"300 tokens .*n_prompt.* 256 .*n_ctx"):
            session.generate(transcript=prompt(300))

        assert (session.transcript, session.state) == (transcript, ClientState.READY)
        assert running.images(session) == before
        again = await some(session, (), 3)
        async with running.pipeline.session() as other:
            assert await some(other, prompt(30), 6) == first + again


async def test_an_answer_that_fills_the_context(small: Path, prompt: Prompt, open_stages: Open) -> None:
    """Every token of the context is used, and the one that no longer fits is not asked for."""
    async with open_stages(small, SPLIT, CONTEXT) as running, running.pipeline.session() as session:
        generation = session.generate(prompt(250), stop=())
        found = [token.position async for token in generation]
        assert generation.finish_reason == "context"
        assert found == list(range(250, 257))
        assert session.committed == 256
        with pytest.raises(ContextLimitExceeded):
            session.generate([1])


# --- values that are not numbers, in mid-chain ------------------------------------------------------------------------

SPOILT = 511
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "1e38": 1e38}


def harmless(prompt: Prompt, length: int, seed: int) -> list[int]:
    return [token % SPOILT for token in prompt(length, seed=seed)]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
async def test_a_bad_residual_ends_one_request(
    small: Path, prompt: Prompt, open_stages: Open, stage: int, value: float
) -> None:
    texts = [harmless(prompt, 60, seed) for seed in range(2)]
    async with dgr.open_pipeline(small, context=CONTEXT) as whole:
        expected = []
        for text in texts:
            async with whole.session() as session:
                expected.append(await some(session, text, 12))

    spoilers: list[BadResidual] = []

    def spoil(engine: ShardEngine) -> BadResidual:
        spoilers.append(BadResidual(engine, value, SPOILT))
        return spoilers[-1]

    async with (
        open_stages(small, SPLIT, CONTEXT, chunk=16, mutate={stage: spoil}) as running,
        running.pipeline.session() as victim,
        running.pipeline.session() as other,
    ):
        found = await some(other, texts[0], 4)
        assert await some(victim, texts[1], 4) == expected[1][:4]

        async def disturbed() -> None:
            nonlocal found
            found += await some(other, (), 8)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturbed)
            with pytest.raises(NonFinite, match=rf"position {64 + 20}\b"):
                await some(victim, [*texts[0][:20], SPOILT, *texts[0][:20]], 4)
        assert found == expected[0]

        # Lost on all stages, and nothing of it is left; the session itself may go on from its transcript.
        before = running.images(other)
        assert (victim.state, victim.committed) == (ClientState.LOST, 0)
        spoilers[0].armed = False
        async with running.pipeline.session() as fresh:
            retried = await some(victim, (), 3)
            assert retried == await some(fresh, victim.transcript[:-3], 3)
        assert running.images(other) == before
        running.assert_slots_empty()


class Failing(Mutant):
    """Native code fails in mid-batch, once: the batch's sequences are lost."""

    failed = False

    def run(self, batch: Sequence[Work]) -> list[Output]:
        if not self.failed and any(SPOILT in work.tokens for work in batch):
            self.failed = True
            self.engine.run([Work(work.slot, work.position, work.tokens, work.residual) for work in batch])
            raise EngineError("the machine is on fire")
        return self.engine.run(batch)


async def test_a_native_failure_is_mended_by_a_re_prefill(small: Path, prompt: Prompt, open_stages: Open) -> None:
    text = [*harmless(prompt, 90, 3), SPOILT, *harmless(prompt, 9, 4)]
    async with dgr.open_pipeline(small, context=CONTEXT) as whole, whole.session() as session:
        expected = await some(session, text, 8)
    async with (
        open_stages(small, SPLIT, CONTEXT, chunk=32, mutate={1: Failing}) as running,
        running.pipeline.session() as session,
    ):
        events = running.pipeline.events()
        assert await some(session, text, 8) == expected
        seen = [type(events.receive_nowait()).__name__ for _ in range(events.statistics().current_buffer_used)]
        assert "StateLost" in seen
        assert "RePrefilled" in seen
