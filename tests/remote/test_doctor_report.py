"""What `dgr doctor` finds out about a route: for every kind of trouble what it is, where, and what to do next."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from conversations import seen
from remote_stages import HANDSHAKE, THREE, TWO, Hosts, open_hosts, read_to_end

from dgr.errors import LinkBroken
from dgr.model.route import LayerRange, Route, StageRef
from dgr.model.route_file import RouteFile
from dgr.runtime import doctor
from dgr.runtime.remote import LinkPolicy
from dgr.wire.links import Link


def file_of(route: Route) -> RouteFile:
    return RouteFile(Path("route.toml"), route, {})


async def the_problem(hosts: Hosts, route: Route) -> doctor.Problem:
    report = await doctor.examine(file_of(route), hosts.policy)
    assert report.fence_seconds is None
    (problem,) = report.problems
    return problem


@asynccontextmanager
async def something_else(said: bytes) -> AsyncIterator[StageRef]:
    """What listens where a stage should be."""

    async def talk(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(said)
            await read_to_end(stream)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, talk, [listener])
        yield StageRef(f"127.0.0.1:{listener.socket.getsockname()[1]}", LayerRange(0, 6))
        nursery.cancel_scope.cancel()


async def test_a_healthy_route(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        stages = await hosts.start_all(THREE)
        report = await doctor.examine(file_of(hosts.route(stages)), hosts.policy)
        assert report.problems == ()
        assert report.fence_seconds is not None
        assert [stage.address for stage in report.stages] == [host.address for host in stages]
        for stage in report.stages:
            assert stage.round_trip is not None
            assert stage.bandwidth is not None
            assert 0 < stage.round_trip < HANDSHAKE
            assert stage.bandwidth > 2**20
        await hosts.assert_empty()


@pytest.mark.parametrize(
    ("said", "what", "next_step"),
    [
        (b"", "did not say what it speaks within 1 s", "takes connections and does not answer"),
        (b"SSH-2.0-something or other", "no dgr: its first bytes are", "something else than a stage of this dgr"),
    ],
    ids=["mute", "ssh"],
)
async def test_something_that_is_no_stage(said: bytes, what: str, next_step: str) -> None:
    async with open_hosts() as hosts, something_else(said) as ref:
        problem = await the_problem(hosts, Route((ref,)))
        assert problem.where == f"stage {ref.address}"
        assert what in problem.what
        assert next_step in problem.next_step


async def test_stages_that_do_not_reach_each_other() -> None:
    """From here every stage is well, and yet the route is not."""

    async def firewall(own: str, successor: str) -> Link:
        raise LinkBroken(f"no way from {own} to {successor}")

    async with open_hosts() as hosts:
        head, tail = await hosts.start("0:2", dial=firewall), await hosts.start("2:6")
        problem = await the_problem(hosts, hosts.route([head, tail]))
        assert problem.where == "the route as a whole"
        assert f"stage {head.address}: cannot reach the next stage {tail.address}: no way" in problem.what
        assert problem.next_step.startswith("each stage must reach the next one at the address in the route file")


async def test_a_link_too_slow_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MEASURE", 0.0)
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        problem = await the_problem(hosts, hosts.route([whole]))
        assert "20 round trips and 8388608 bytes took over 0 s" in problem.what
        await hosts.assert_empty()


async def test_an_examination_leaves_what_is_at_work_alone() -> None:
    async with open_hosts() as hosts:
        stages = await hosts.start_all(TWO)
        async with hosts.pipeline(stages) as pipeline, pipeline.session() as session:
            events = pipeline.events()
            await session.prefill([1, 2, 3])
            report = await doctor.examine(file_of(hosts.route(stages)), hosts.policy)
            assert report.problems == ()
            frontier = await session.frontier()
            assert {frame.position for frame in frontier.values()} == {3}
            assert [type(event).__name__ for event in seen(events)] == ["Prefilled"]
