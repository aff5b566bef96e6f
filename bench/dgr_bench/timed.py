"""Seconds of a prompt and of an answer on a pipeline."""

from __future__ import annotations

import trio

from dgr import Pipeline
from dgr.client.generation import AHEAD
from dgr.selftest.chain import some_tokens

__all__ = ["decode_seconds", "prefill_seconds"]


async def prefill_seconds(pipeline: Pipeline, tokens: int) -> float:
    """From a prompt of that many tokens to the first token of the answer."""
    async with pipeline.session() as session:
        began = trio.current_time()
        async for _ in session.generate(some_tokens(tokens, pipeline.n_vocab), max_tokens=1, stop=()):
            pass
        return trio.current_time() - began


async def decode_seconds(pipeline: Pipeline, tokens: int, ahead: int = AHEAD) -> float:
    """From the first token of an answer to that many later."""
    async with pipeline.session() as session:
        answer = session.generate(some_tokens(1, pipeline.n_vocab), max_tokens=tokens + 1, stop=(), ahead=ahead)
        await anext(answer)
        began = trio.current_time()
        async for _ in answer:
            pass
        return trio.current_time() - began
