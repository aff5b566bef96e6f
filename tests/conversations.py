"""What a conversation with stages of the default fake model must give, what it gave, and what was told of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dgr import GeneratedToken, Generation
from dgr.client.events import drain
from dgr.core.values import ContextParams, LogitsWanted, SamplingParams
from dgr.engine.base import Work
from dgr.testing import pause
from dgr.testing.engines.fake import FakeEngine


@lru_cache(maxsize=4096)
def _reference(prompt: tuple[int, ...], count: int, sampling: SamplingParams) -> tuple[int, ...]:
    room = len(prompt) + count
    engine = FakeEngine(None, ContextParams(n_ctx=room, n_batch=room, n_ubatch=room, n_seq_max=1))
    history, new = list(prompt), list(prompt)
    for _ in range(count):
        position = len(history) - len(new)
        (output,) = engine.run([Work(0, position, new, logits=LogitsWanted.LAST)])
        assert output.logits is not None
        new = [engine.sample(output.logits, history, sampling)[0]]
        history += new
    return tuple(history[len(prompt) :])


def reference(prompt: Sequence[int], count: int, sampling: SamplingParams | None = None) -> list[int]:
    """What the whole model, undisturbed, answers to a prompt."""
    return list(_reference(tuple(prompt), count, sampling or SamplingParams()))


async def take_tokens(generation: Generation, count: int | None = None) -> list[GeneratedToken]:
    """The next ``count`` tokens, or all."""
    tokens: list[GeneratedToken] = []
    while count is None or len(tokens) < count:
        try:
            tokens.append(await anext(generation))
        except StopAsyncIteration:
            break
    return tokens


async def take(generation: Generation, count: int | None = None) -> list[int]:
    """The ids of the next ``count`` tokens, or of all."""
    return [token.id for token in await take_tokens(generation, count)]


#: The events that came so far.
seen = drain


#: Nothing runs on a shard for the length of the block.
held = pause
