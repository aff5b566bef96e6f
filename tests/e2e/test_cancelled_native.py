"""A timeout around a pipeline of native stages, at any moment: it ends quietly, and no thread or descriptor is left."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import trio
from cancel_at import cancelled_at

import dgr
from dgr.core.values import ContextParams

CONTEXT = ContextParams(n_ctx=256, n_batch=64, n_ubatch=32, n_seq_max=2)
SPLIT = "0:2,2:4,4:7"
#: Where Linux lists what a process has open.
_FILES = Path("/proc/self/fd")


async def _live(model: Path, step: int) -> bool:
    """Open, prefill, decode and close, cancelled at a step; gives whether there was such a step."""
    with cancelled_at(step) as killer:
        async with dgr.open_pipeline(model, SPLIT, context=CONTEXT) as pipeline, pipeline.session() as session:
            async for _ in session.generate(list(range(70)), max_tokens=2, stop=()):
                pass
    return killer.reached


def _held() -> tuple[set[threading.Thread], int]:
    gc.collect()
    # Threads of trio's own pool, which load models, end after ten idle seconds.
    mine = {thread for thread in threading.enumerate() if thread.name == "dgr-engine"}
    return mine, len(list(_FILES.iterdir())) if _FILES.is_dir() else 0


def _cancel_everywhere(model: Path, first: int, stride: int) -> int:
    trio.run(_live, model, -1)
    before, step = _held(), first
    while trio.run(_live, model, step):
        assert _held() == before, f"cancelled at step {step}"
        step += stride
    return step


@pytest.mark.slow
def test_a_cancelled_pipeline_leaves_nothing(small: Path) -> None:
    assert _cancel_everywhere(small, 3, 7) > 150


@pytest.mark.chaos
def test_a_cancelled_pipeline_leaves_nothing_at_any_step(small: Path) -> None:
    assert _cancel_everywhere(small, 1, 1) > 150
