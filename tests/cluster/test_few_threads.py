"""A host that gives no thread any more: work is done without, and a name that cannot be looked up costs a link alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster.remote_stages import PROMPT, TIMEOUTS, TWO, answer_of, open_hosts, reference
from conversations import take

from dgr.client.pipeline import open_pipeline_on
from dgr.core.route import Route, StageRef
from dgr.errors import LinkBroken
from dgr.protocol.threads import in_thread
from dgr.testing.waits import until


@contextmanager
def no_threads() -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trio._threads.start_thread_soon", refuse)
        yield


async def test_what_would_be_done_in_a_thread_is_done_once_all_the_same() -> None:
    calls: list[str] = []

    def fail() -> None:
        calls.append("fail")
        raise RuntimeError("its own")

    for _ in range(2):
        with no_threads():
            assert await in_thread(lambda: 7) == 7
            with pytest.raises(RuntimeError, match="its own"):
                await in_thread(fail)
    with pytest.raises(RuntimeError, match="its own"):
        await in_thread(fail)
    assert calls == ["fail"] * 3


async def test_a_stage_known_by_name_is_lost_and_found_again() -> None:
    async with open_hosts() as hosts:
        refs = [
            StageRef(host.address.replace("127.0.0.1", "localhost"), host.layers) for host in await hosts.start_all(TWO)
        ]
        async with (
            open_pipeline_on(hosts.connector(), Route(tuple(refs)), timeouts=TIMEOUTS) as pipeline,
            pipeline.session() as session,
        ):
            assert await take(session.generate(PROMPT, max_tokens=3)) == reference()[:3]
            with no_threads():
                for stage in pipeline._client._links.stages.values():
                    await stage.link.aclose()
                await until(lambda: pipeline.state.value == "down")
                with pytest.raises(LinkBroken, match="cannot look up localhost: can't start new thread"):
                    await pipeline.change_route(pipeline.route)
            assert await take(session.generate(max_tokens=3)) == reference()[3:6]
            assert await answer_of(pipeline) == reference()
        await hosts.assert_empty()
