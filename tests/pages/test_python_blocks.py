"""Python blocks of the pages run: programs as they stand, fragments inside a pipeline, all of it over a made-up model.

Those that ask a server over HTTP run in tests/serving/http/test_serve_command.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import runpy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from pages.reading import ROOT, Block, blocks, blocks_of
from trio.testing import MockClock

import dgr
from dgr.client.pipeline import Pipeline
from dgr.serving import blocking
from dgr.serving.engine import Job, ServingLimits, open_serving
from dgr.testing import EngineContract, FakeEngine, FakeModel, open_fake_pipeline

_HTTP = re.compile(r"^import (openai|anthropic)\b", re.MULTILINE)
FOUND = [block for block in blocks("python") if not _HTTP.search(block.code)]


@asynccontextmanager
async def made_up(_model: object, split: str, **options: Any) -> AsyncIterator[Pipeline]:
    """What `dgr.open_pipeline` is here."""
    async with open_fake_pipeline(split, model=FakeModel(n_layers=43), **options) as offline:
        yield offline.pipeline


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a fragment takes from the text around it."""
    monkeypatch.setattr(dgr, "open_pipeline", made_up)
    monkeypatch.setattr("dgr.serving.embed.open_trio_pipeline", made_up)
    return {
        "__name__": "__main__",
        "Job": Job,
        "MyEngine": lambda _, layers, context: FakeEngine(layers, context),
        "ServingLimits": ServingLimits,
        "asynccontextmanager": asynccontextmanager,
        "blocking": blocking,
        "dgr": dgr,
        "open_fake_pipeline": open_fake_pipeline,
        "open_serving": open_serving,
        "trio": trio,
    }


def ran(block: Block, known: dict[str, Any]) -> None:
    """Run a block, and what it only defines: tests, a main, an engine's contract."""
    code = compile(block.code, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:

        async def inside() -> None:
            async with open_fake_pipeline() as offline:
                await eval(code, {**known, "pipeline": offline.pipeline})

        trio.run(inside, clock=MockClock(autojump_threshold=0))
        return
    before = {*known}
    exec(code, known)
    for name, value in [(name, value) for name, value in known.items() if name not in before]:
        if name.startswith("test_"):
            trio.run(value, None, clock=MockClock(autojump_threshold=0))
        elif name == "main" and ".run(main" not in block.code:
            assert asyncio.run(value())
        elif inspect.isclass(value) and issubclass(value, EngineContract) and value is not EngineContract:
            value().test_describes_itself()


@pytest.mark.parametrize("block", FOUND, ids=str)
def test_a_block_runs(block: Block, known: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ran(block, known)
    if "print(" in block.code and "except" not in block.code:
        assert capsys.readouterr().out


def test_blocks_that_do_not_run_would_be_seen(known: dict[str, Any]) -> None:
    for code in (
        "import dgr\ndgr.no_such_name\n",
        "async with pipeline.session() as session:\n    await session.no()\n",
    ):
        with pytest.raises(AttributeError):
            ran(Block(FOUND[0].page, 1, "python", code), dict(known))


def test_the_other_architecture_is_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/another_architecture.py"), run_name="__main__")
    (shown,) = blocks_of(ROOT / "docs/adding-an-architecture.md", "text")
    assert capsys.readouterr().out == shown.code


def test_every_kind_is_there() -> None:
    text = "\n".join(block.code for block in FOUND)
    for kind in (
        "trio.run(",
        "asyncio.run(",
        "blocking.open_serving(",
        "async with pipeline.session()",
        "EngineContract",
    ):
        assert kind in text
