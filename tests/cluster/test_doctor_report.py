"""What `dgr doctor` finds out about a route: for every kind of trouble what it is, where, and what to do next."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from attrs import evolve
from cluster.remote_stages import HANDSHAKE, SHORT, THREE, TWO, Authority, Hosts, impostor, open_hosts
from conversations import seen
from narrow import as_a, present

from dgr.cluster import doctor
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.diagnosis import own_findings
from dgr.cluster.route_file import RouteFile
from dgr.core.route import LayerRange, Route, StageRef
from dgr.errors import LinkBroken
from dgr.wire.credentials import Credentials
from dgr.wire.links import Link


def file_of(route: Route) -> RouteFile:
    return RouteFile(Path("route.toml"), route, {})


async def the_problem(hosts: Hosts, route: Route) -> doctor.Problem:
    report = await doctor.examine(file_of(route), hosts.policy)
    assert report.fence_seconds is None
    (problem,) = report.problems
    return problem


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
        (b"", "did not say what it speaks within 0.4 s", "takes connections and does not answer"),
        (b"SSH-2.0-something or other", "not dgr: its first bytes are", "something else than a stage of this dgr"),
    ],
    ids=["mute", "ssh"],
)
async def test_something_that_is_no_stage(said: bytes, what: str, next_step: str) -> None:
    async with open_hosts(LinkPolicy(handshake=SHORT)) as hosts, impostor(said) as address:
        problem = await the_problem(hosts, Route((StageRef(address, LayerRange(0, 6)),)))
        assert problem.where == f"stage {address}"
        assert what in problem.what
        assert next_step in problem.next_step


async def test_a_drained_stage_is_a_problem_unless_another_of_its_layers_is_well() -> None:
    async with open_hosts() as hosts:
        (first, tail), (spare, _) = await hosts.start_all(TWO), await hosts.start_all(TWO)
        first.shard.draining.begin(60)
        route = hosts.route([first, tail])
        problem = await the_problem(hosts, route)
        assert (problem.where, "it is being drained" in problem.what) == (f"stage {first.address}", True)
        assert "--undo" in problem.next_step
        spares = tuple(ref for ref in hosts.route([spare, tail]).stages if ref.address == spare.address)
        report = await doctor.examine(evolve(file_of(route), spares=spares), hosts.policy)
        assert report.problems == ()
        assert report.fence_seconds is not None
        (warning,) = report.warnings
        assert f"{spare.address} owns layers" in warning.what


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
            frontier = await session.state_summaries()
            assert {frame.state.position for frame in frontier.values()} == {3}
            assert [type(event).__name__ for event in seen(events)] == ["Prefilled"]


# --- several stages of the same layers ---


async def test_a_spare_that_is_of_no_use_is_spoken_of_and_no_problem(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        head, tail = await hosts.start_all(TWO)
        gone = StageRef("127.0.0.1:9", LayerRange(2, 6))
        file = evolve(file_of(hosts.route([head, tail])), spares=(gone,))
        report = await doctor.examine(file, hosts.policy)
        assert report.problems == ()
        assert report.fence_seconds is not None
        (warning,) = report.warnings
        assert warning.where == f"stage {gone.address}"
        assert f"({tail.address} owns layers 2:6 too, and is well)" in warning.what
        assert [stage.address for stage in report.stages] == [head.address, tail.address, gone.address]
        await tail.kill()
        report = await doctor.examine(file, hosts.policy)
        assert [problem.where for problem in report.problems] == [f"stage {tail.address}", f"stage {gone.address}"]


async def test_a_spare_in_the_place_of_a_stage_that_is_down_is_fenced(policy: LinkPolicy) -> None:
    async with open_hosts(policy) as hosts:
        head, tail = await hosts.start_all(TWO)
        route = Route((StageRef("127.0.0.1:9", LayerRange(0, 2)), *hosts.route([head, tail]).stages[1:]))
        report = await doctor.examine(evolve(file_of(route), spares=hosts.route([head]).stages), hosts.policy)
        assert (report.problems, len(report.warnings)) == ((), 1)
        assert report.fence_seconds is not None


# --- certificates ---

PAST, FUTURE, SOON, LONG = (-10, -1), (1, 90), (-10, 5), (-10, 90)


@pytest.mark.parametrize(
    ("days", "what", "next_step"),
    [
        (PAST, "has expired", "make a new one with `dgr keys`"),
        (FUTURE, "is not valid yet", "set this host's clock, or wait until it is"),
    ],
    ids=["expired", "future"],
)
async def test_its_own_certificate_is_looked_at_first(
    days: tuple[float, float], what: str, next_step: str, authority: Authority
) -> None:
    """The stage is up and refuses it without a word; "start the stage there" would mislead."""
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        whole = await hosts.start("0:6")
        own = evolve(hosts.policy, credentials=authority.credentials("client", days=days))
        report = await doctor.examine(file_of(hosts.route([whole])), own)
        first, second = report.problems
        assert (first.where, first.next_step.startswith(next_step)) == ("this host", True)
        assert f"{present(own.credentials).certificate} {what}" in first.what
        assert second.where == f"stage {whole.address}"
        assert second.next_step == "something listens there and ended the link: mend this host's certificate first"


async def test_a_certificate_that_ends_soon_is_spoken_of_and_no_problem(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        whole = await hosts.start("0:6")
        for days, spoken_of in ((SOON, True), (LONG, False)):
            own = evolve(hosts.policy, credentials=authority.credentials("client", days=days))
            report = await doctor.examine(file_of(hosts.route([whole])), own)
            assert report.problems == ()
            assert [warning.where for warning in report.warnings] == ["this host"] * spoken_of
        assert all("expires on " in warning.what for warning in report.warnings)


async def test_a_stages_certificate_that_ends_soon_is_spoken_of_too(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        soon = LinkPolicy(credentials=authority.credentials("127.0.0.1", days=SOON), handshake=HANDSHAKE)
        head, tail = await hosts.start("0:2"), await hosts.start("2:6", policy=soon)
        report = await doctor.examine(file_of(hosts.route([head, tail])), hosts.policy)
        assert report.problems == ()
        (warning,) = report.warnings
        assert (warning.where, "no restart" in warning.next_step) == (f"stage {tail.address}", True)
        assert f"the certificate of stage {tail.address} expires on " in warning.what
        assert present(report.stages[1].certificate_expiry) < present(report.stages[0].certificate_expiry)


async def test_a_certificate_of_another_ca_than_its_own_is_told(authority: Authority, tmp_path: Path) -> None:
    mine = authority.credentials("client")
    other = Authority(tmp_path / "other").credentials("client")
    (finding,) = own_findings(Credentials(other.ca, mine.certificate, mine.key))
    assert f"{mine.certificate} is not one of {other.ca}: " in finding.what
    assert finding.next_step == "use files that `dgr keys` made together"
    assert own_findings(mine) == []
    assert own_findings(None) == []


def test_a_ca_that_has_expired_or_soon_will_is_told(authority: Authority) -> None:
    mine = authority.credentials("client", days=(-10, 90))
    (ca,) = mine.context(server=True).get_ca_certs()
    end = ssl.cert_time_to_seconds(as_a(str, ca["notAfter"]))
    for now, later in ((end + 1, False), (end - 86_400, True)):
        finding, *_ = own_findings(mine, now)
        assert (finding.later, f"the CA's certificate {authority.ca} " in finding.what) == (later, True)


@pytest.mark.parametrize(
    ("names", "days", "next_step"),
    [
        (("127.0.0.1",), PAST, "the certificate there has expired"),
        (("127.0.0.1",), FUTURE, "the certificate there is not valid yet: compare the clocks"),
        (("127.0.0.2",), LONG, "its certificate is for other names"),
        (("stage-a",), LONG, "its certificate is for other names"),
        ((), LONG, "it is not of this host's CA"),
    ],
    ids=["expired", "future", "other IP", "other name", "other CA"],
)
async def test_advice_on_a_stages_certificate_goes_by_what_is_wrong(
    names: tuple[str, ...], days: tuple[float, float], next_step: str, authority: Authority, tmp_path: Path
) -> None:
    issuer = authority if names else Authority(tmp_path / "other")
    theirs = LinkPolicy(credentials=issuer.credentials(*names or ("127.0.0.1",), days=days), handshake=HANDSHAKE)
    async with open_hosts(theirs) as hosts:
        whole = await hosts.start("0:6")
        report = await doctor.examine(file_of(hosts.route([whole])), authority.policy("client"))
        (problem,) = report.problems
        assert problem.next_step.startswith(next_step)
        assert ("certificates of one CA" in problem.what) == (not names)  # said where it is the CA


async def test_advice_on_a_link_that_ends_goes_by_whether_anything_listens(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        whole = await hosts.start("0:6")
        plain = await doctor.examine(file_of(hosts.route([whole])), LinkPolicy(handshake=HANDSHAKE))
        assert "it may want TLS" in plain.problems[0].next_step
        await whole.kill()
        gone = await doctor.examine(file_of(hosts.route([whole])), hosts.policy)
        assert gone.problems[0].next_step.startswith("nothing listens there: start the stage there (dgr stage)")
        nowhere = Route((StageRef("no-such-host.invalid:1", LayerRange(0, 6)),))
        unknown = await doctor.examine(file_of(nowhere), hosts.policy)
        assert unknown.problems[0].next_step.startswith("the name is not known on this host")
