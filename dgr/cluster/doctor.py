"""Looks at a route from a client's place: who is there, do they fit, how far away are they."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

import trio
from attrs import evolve, frozen

from dgr.client.pipeline import Timeouts, open_pipeline_on
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.cluster.diagnosis import next_step, own_findings, peer_finding, said_step
from dgr.cluster.route_file import RouteFile
from dgr.core.route import Route, StageRef
from dgr.core.values import StageIdentity
from dgr.errors import DeadlineExceeded, DgrError, InvalidRoute, LinkBroken, PeerRefused, StageDraining, WireError
from dgr.protocol.identity import check_alike, check_neighbours
from dgr.wire import frames
from dgr.wire.links import Link
from dgr.wire.nurseries import open_nursery

__all__ = ["Problem", "RouteReport", "StageReport", "examine"]

_ROUND_TRIPS = 20
#: Bytes sent to measure a link: long enough to leave TCP's slow start, short enough for a slow WAN.
_FILL = 8 * 2**20
_FILL_STEP = 60_000
#: Seconds for measuring one link: what takes longer is too slow for boundaries.
_MEASURE = 60.0
#: What to do about an error met when every stage was well and the route as a whole was not.
_ROUTE_STEPS: Mapping[type[DgrError], str] = {
    StageDraining: "it is being maintained: wait for its restart, or have it take sessions again (dgr drain HOST:PORT --undo)",
    PeerRefused: "each stage must reach the next one at the address in the route file: check firewall, names and"
    " certificates between their hosts",
    LinkBroken: "a stage ended, or ended its link, while the route was being fenced: look at its log",
    DeadlineExceeded: "a stage did not fence in time: look at its log, and whether each host reaches the next one",
}


@frozen
class Problem:
    """Something that keeps the route from working, and what to do about it."""

    where: str
    what: str
    next_step: str


@frozen
class StageReport:
    """One stage as the client sees it."""

    address: str
    layers: str
    identity: StageIdentity | None
    #: Median of the round trips of an empty frame, seconds.
    round_trip: float | None
    #: Client to stage, bytes a second.
    bandwidth: float | None
    #: When its certificate ends, seconds since 1970; None without one.
    certificate_expiry: float | None = None


@frozen
class RouteReport:
    stages: tuple[StageReport, ...]
    problems: tuple[Problem, ...]
    #: Seconds until every stage had fenced an epoch, boundary links between them included; None: it did not work.
    fence_seconds: float | None
    #: What works today and will not for long.
    warnings: tuple[Problem, ...] = ()


async def examine(file: RouteFile, policy: LinkPolicy) -> RouteReport:
    """Reach every stage, compare identities, measure the links, then fence the whole route once."""
    own = [
        (finding.later, Problem("this host", finding.what, finding.next_step))
        for finding in await trio.to_thread.run_sync(own_findings, policy.credentials)
    ]
    own_is_bad = not all(later for later, _ in own)
    found: dict[str, Problem] = {}
    reports: dict[str, StageReport] = {}
    connect = RemoteConnector(policy, name="doctor", artifact=file.artifact, context=file.context)

    async def visit(ref: StageRef) -> None:
        try:
            async with connect(ref.address) as (link, description):
                if description.layers != ref.layers:
                    raise InvalidRoute(f"it owns layers {description.layers}; the route says {ref.layers}")
                with trio.move_on_after(_MEASURE) as patience:
                    round_trip, bandwidth = await _measure(link)
                if patience.cancelled_caught:
                    raise DeadlineExceeded(f"{_ROUND_TRIPS} round trips and {_FILL} bytes took over {_MEASURE:g} s")
                is_drained = await _is_drained(link)
        except DgrError as error:
            step = await next_step(ref.address, error, policy.credentials, own_is_bad=own_is_bad)
            found[ref.address] = Problem(f"stage {ref.address}", str(error), step)
            reports[ref.address] = StageReport(ref.address, str(ref.layers), None, None, None)
        else:
            reports[ref.address] = StageReport(
                ref.address, str(ref.layers), description, round_trip, bandwidth, connect.expiries.get(ref.address)
            )
            if is_drained:
                what, step = (
                    "it is being drained: it takes no new pipelines and no new sessions",
                    _ROUTE_STEPS[StageDraining],
                )
                found[ref.address] = Problem(f"stage {ref.address}", what, step)

    async with open_nursery() as nursery:
        for ref in file.stages:
            nursery.start_soon(visit, ref)
    ordered = tuple(reports[ref.address] for ref in file.stages)
    for address, problem in _unlike(ordered):
        found.setdefault(address, problem)
    problems = [problem for later, problem in own if not later]
    warnings = [problem for later, problem in own if later]
    stages: list[StageRef] = []
    for first in file.route.stages:
        candidates = [ref for ref in file.stages if ref.layers == first.layers]
        well = next((ref for ref in candidates if ref.address not in found), None)
        stages += [] if well is None else [well]
        bad = [found[ref.address] for ref in candidates if ref.address in found]
        if well is None:
            problems += bad
        else:
            warnings += [
                evolve(one, what=f"{one.what} ({well.address} owns layers {well.layers} too, and is well)")
                for one in bad
            ]
    if len(stages) == len(file.route.stages):
        problems += _strangers([reports[ref.address] for ref in stages])
    fence_seconds = None
    if not problems:
        try:
            fence_seconds = await _fence(connect, Route(tuple(stages)))
        except DgrError as error:
            problems.append(Problem("the route as a whole", str(error), said_step(error, _ROUTE_STEPS)))
    for address, expiry in connect.expiries.items():
        if (finding := peer_finding(address, expiry)) is not None:
            warnings.append(Problem(f"stage {address}", finding.what, finding.next_step))
    return RouteReport(ordered, tuple(problems), fence_seconds, tuple(warnings))


def _unlike(reports: Sequence[StageReport]) -> Iterator[tuple[str, Problem]]:
    """Stages that differ from the first one in what all of a route share."""
    known = [(report.address, report.identity) for report in reports if report.identity is not None]
    for address, identity in known[1:]:
        try:
            check_alike(f"it (unlike stage {known[0][0]})", identity, known[0][1])
        except InvalidRoute as error:
            yield address, Problem(f"stage {address}", str(error), said_step(error))


def _strangers(reports: Sequence[StageReport]) -> Iterator[Problem]:
    """Stages that do not fit behind the one before them."""
    known = [(report.address, report.identity) for report in reports if report.identity is not None]
    for (_, before), (address, after) in itertools.pairwise(known):
        try:
            check_neighbours(before, after)
        except InvalidRoute as error:
            yield Problem(f"stage {address}", str(error), said_step(error))


async def _measure(link: Link) -> tuple[float, float]:
    round_trip = statistics.median([await _ping(link, nonce) for nonce in range(1, _ROUND_TRIPS + 1)])
    began = trio.current_time()
    zeros = bytes(_FILL_STEP)
    sent = 0
    while sent < _FILL:
        link.send_nowait(frames.Ping(0, zeros))
        sent += len(zeros)
    await _ping(link, _ROUND_TRIPS + 1)
    seconds = max(trio.current_time() - began - round_trip, 1e-6)
    return round_trip, sent / seconds


async def _ping(link: Link, nonce: int) -> float:
    began = trio.current_time()
    link.send_nowait(frames.Ping(nonce))
    async for received in link:
        if isinstance(received.frame, frames.Pong) and received.frame.nonce == nonce:
            return trio.current_time() - began
        raise WireError(f"{type(received.frame).__name__} came instead of Pong")
    raise LinkBroken("the stage closed the link while it was being measured")


async def _is_drained(link: Link) -> bool:
    link.send_nowait(frames.Drain(None))
    async for received in link:
        if isinstance(received.frame, frames.Occupancy):
            return received.frame.draining
        raise WireError(f"{type(received.frame).__name__} came instead of Occupancy")
    raise LinkBroken("the stage closed the link before it said whether it is being drained")


async def _fence(connect: RemoteConnector, route: Route) -> float:
    began = trio.current_time()
    # Longer than a stage waits for the next one: it says which one, and why.
    async with open_pipeline_on(connect, route, timeouts=Timeouts(route=45.0)):
        return trio.current_time() - began
