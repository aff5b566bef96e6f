"""Stages that share memory with each other and with their clients: the same pipeline, and whom it is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.remote_stages import (
    THREE,
    TWO,
    Authority,
    answer_of,
    denied,
    open_hosts,
    reference,
    stage,
)

from dgr.cluster.connect import LinkPolicy
from dgr.cluster.diagnosis import next_step
from dgr.cluster.doctor import examine
from dgr.cluster.route_file import read_route_file
from dgr.core.load import Side
from dgr.errors import InvalidRoute, LinkBroken, PeerRefused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unix: addresses are there on Linux alone")


def places(folder: Path, count: int) -> Iterator[str]:
    return (f"unix:{folder}/{index}" for index in range(count))


async def test_the_text_is_that_of_one_machine(tmp_path: Path) -> None:
    async with open_hosts() as hosts:
        stages = [
            await hosts.start(layers, address=place) for layers, place in zip(THREE, places(tmp_path, 3), strict=True)
        ]
        assert [host.address for host in stages] == list(places(tmp_path, 3))
        await hosts.assert_serving(stages)
        again = await hosts.restart(stages[1])
        await hosts.assert_serving([stages[0], again, stages[2]])
        assert Side.NEXT in {side for side, _ in stages[0].server.statistics().traffic}
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240 (nothing else runs)
    assert "memfd:dgr-link" not in Path("/proc/self/maps").read_text("utf-8")  # noqa: ASYNC240 (nothing else runs)


async def test_stages_of_one_host_and_of_several_are_not_mixed(tmp_path: Path) -> None:
    """A client with a certificate could have a stage connect to whatever listens for its user."""
    async with open_hosts() as hosts:
        near = [
            await hosts.start(layers, address=place) for layers, place in zip(TWO, places(tmp_path, 2), strict=True)
        ]
        far = [await hosts.start(layers) for layers in TWO]
        for mixed in ([near[0], far[1]], [far[0], near[1]]):
            with pytest.raises(PeerRefused, match="unix: addresses alone, or none"):
                async with hosts.pipeline(mixed):
                    pass
        await hosts.assert_serving(near)


async def test_a_stage_over_tls_is_no_stage_of_this_host(authority: Authority) -> None:
    policy = authority.policy("127.0.0.1")
    async with open_hosts(policy) as hosts:
        host = await hosts.start("2:6")
        said = await denied(host.address, stage("unix:/run/stage"), policy.credentials)
        assert "calls itself unix:/run/stage, but its certificate is for 127.0.0.1" in said


async def test_credentials_are_not_asked_for(authority: Authority, tmp_path: Path) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        [place] = places(tmp_path, 1)
        host = await hosts.start("0:6", address=place)
        async with hosts.pipeline([host]) as pipeline:
            assert await answer_of(pipeline) == reference()


def _route(folder: Path, *addresses: str) -> Path:
    path = folder / "route.toml"
    stages = zip(addresses, TWO, strict=True)
    path.write_text(
        "".join(f'[[stage]]\naddress = "{address}"\nlayers = "{layers}"\n' for address, layers in stages), "utf-8"
    )
    return path


@pytest.mark.parametrize(
    ("addresses", "what"),
    [
        (("unix:/run/a", "127.0.0.1:7701"), "give one to every stage, or to none"),
        (("127.0.0.1:7701", "unix:/run/a"), "give one to every stage, or to none"),
        (("unix:a", "unix:/run/b"), "whole path"),
    ],
)
def test_a_route_file_names_one_kind_of_address(addresses: tuple[str, str], what: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRoute, match=what):
        read_route_file(_route(tmp_path, *addresses))


async def test_another_users_socket_is_named_as_such() -> None:
    error = LinkBroken("cannot connect")
    error.__cause__ = PermissionError(13, "Permission denied")
    assert "another user's" in await next_step("unix:/run/stage", error, None, own_is_bad=False)


async def test_doctor_looks_at_them_too(tmp_path: Path) -> None:
    head, tail = places(tmp_path, 2)
    file = read_route_file(_route(tmp_path, head, tail))
    async with open_hosts() as hosts:
        await hosts.start(TWO[0], address=head)
        report = await examine(file, LinkPolicy())
        assert [problem.where for problem in report.problems] == [f"stage {tail}"]
        assert "nothing listens there" in report.problems[0].next_step
        await hosts.start(TWO[1], address=tail)
        report = await examine(file, LinkPolicy())
        assert not report.problems
