"""How many turns of the event loop a decoded token takes: what the runtime adds to the engine's own time."""

from __future__ import annotations

import pytest
import trio
from pipeline.harness import THREE, TWO, WHOLE

from dgr.testing import open_fake_pipeline

#: Between a token and the next: client -> reader -> session -> scheduler -> session for each stage, and then reader -> client.
TURNS = {WHOLE: 6, TWO: 10, THREE: 14}


class _Turns(trio.abc.Instrument):
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


@pytest.mark.parametrize("split", TURNS)
async def test_a_decoded_token_takes_no_more_turns_of_the_event_loop(split: str) -> None:
    turns = _Turns()
    async with open_fake_pipeline(split) as offline, offline.pipeline.session() as session:
        trio.lowlevel.add_instrument(turns)
        at = [turns.count async for _ in session.generate("abc", max_tokens=60, stop=())]
        trio.lowlevel.remove_instrument(turns)
    assert (at[49] - at[9]) / 40 <= TURNS[split]
