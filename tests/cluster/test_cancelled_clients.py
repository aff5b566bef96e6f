"""A timeout around a pipeline over sockets, at any moment: the client ends quietly, and the stages hold nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cancel_at import cancelled_at
from cluster.remote_stages import TWO, answer_of, open_hosts, reference

from dgr.cluster.connect import LinkPolicy

#: Where Linux lists what a process has open.
FILES = Path("/proc/self/fd")


def _open_files() -> int:
    return len(list(FILES.iterdir())) if FILES.is_dir() else 0


async def _cancel_everywhere(policy: LinkPolicy, stride: int) -> int:
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(TWO)
        await hosts.assert_serving(stages)  # from now on there is a link between them
        before = _open_files()
        step, reached = 1, True
        while reached:
            with cancelled_at(step) as killer:
                async with hosts.pipeline(stages) as pipeline:
                    assert await answer_of(pipeline, count=2) == reference(count=2)
            reached = killer.reached
            await hosts.assert_empty()
            assert _open_files() <= before, f"cancelled at step {step}"
            step += stride
        await hosts.assert_serving(stages)
        return step


async def test_a_cancelled_client_leaves_nothing(policy: LinkPolicy) -> None:
    assert await _cancel_everywhere(policy, 29) > 100


@pytest.mark.slow
async def test_a_cancelled_client_leaves_nothing_at_any_step(policy: LinkPolicy) -> None:
    assert await _cancel_everywhere(policy, 1) > 100
