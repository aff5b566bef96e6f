"""What users test their own code with: a pipeline without a model."""

from __future__ import annotations

import pytest
from narrow import as_a

from dgr.client.events import Event, RePrefilled
from dgr.errors import InvalidLayerRange, InvalidRoute
from dgr.testing.engines.fake import FakeModel, Fault, FaultKind
from dgr.testing.offline import Offline, open_fake_pipeline


async def answer(offline: Offline, lose: str | None = None) -> str:
    text = ""
    async with offline.pipeline.session() as session:
        async for token in session.generate("In a hole in the ground", max_tokens=8, stop=()):
            text += token.text
            if token.position == 26 and lose is not None:
                await offline.restart(lose)
    return text


@pytest.mark.parametrize("split", ["0:6", "0:1,1:6", "0:2,2:4,4:6"])
async def test_every_split_gives_the_same_text(split: str, autojump_clock: object) -> None:
    async with open_fake_pipeline() as one, open_fake_pipeline(split) as other:
        said = await answer(one)
        assert await answer(other) == said
        assert len(said) >= 8


@pytest.mark.parametrize("stage", ["stage-0", "stage-1", "stage-2"])
async def test_a_stage_that_dies_changes_nothing_but_the_events(stage: str, autojump_clock: object) -> None:
    async with open_fake_pipeline() as offline:
        said = await answer(offline)
        events = offline.pipeline.events()
        assert await answer(offline, lose=stage) == said
        seen: list[Event] = []
        while not isinstance(seen[-1] if seen else None, RePrefilled):
            seen.append(await events.receive())
        assert as_a(RePrefilled, seen[-1]).tokens == 27


async def test_faults_are_acted_out(autojump_clock: object) -> None:
    async with open_fake_pipeline() as offline:
        said = await answer(offline)
        offline.engines["stage-1"].faults.append(Fault(FaultKind.ERROR, position=5))
        assert await answer(offline) == said
        assert not offline.engines["stage-1"].faults


async def test_a_model_of_other_ids_has_no_text(autojump_clock: object) -> None:
    async with open_fake_pipeline("0:2", model=FakeModel(n_layers=2, n_vocab=80)) as offline:
        assert offline.pipeline.vocabulary is None


@pytest.mark.parametrize(
    ("split", "error"), [("0:2,3:6", InvalidRoute), ("0:7", InvalidLayerRange), ("x", InvalidLayerRange)]
)
async def test_a_split_that_is_none(split: str, error: type[Exception], autojump_clock: object) -> None:
    with pytest.raises(error):
        async with open_fake_pipeline(split):
            pass
