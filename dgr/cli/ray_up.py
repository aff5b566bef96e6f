"""``dgr up --ray``: the stages of a route in a Ray cluster, one actor each in a placement group."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import attrs
import ray
import ray.exceptions
import trio
from attrs import frozen
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dgr.cli.ray_actor import StageActor
from dgr.cluster.route_file import RouteFile, format_route_file
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.route import Route, StageRef
from dgr.errors import InputError, LinkBroken
from dgr.wire.tcp import parse_address

__all__ = ["Placement", "run_on_ray"]

_log = logging.getLogger("dgr.ray")

#: Seconds between two looks at where the stages are.
_EVERY = 1.0
#: Seconds for Ray to find room for all stages.
_PATIENCE = 60.0


@frozen
class Placement:
    """How stages are placed."""

    #: Address of the cluster; ``auto`` is the one that this host belongs to.
    cluster: str
    #: Ray's strategy: STRICT_SPREAD, SPREAD, PACK or STRICT_PACK.
    strategy: str
    #: CPUs of each stage; None: an even share of a node's.
    threads: int | None
    #: The route file that is written, with the stages' addresses.
    out: Path


async def run_on_ray(
    file: RouteFile,
    command: Callable[[StageRef, int], Sequence[str]],
    placement: Placement,
    report: Callable[..., None],
) -> None:
    """Keep every stage of a route file in a cluster, until cancelled.

    ``command``: what ``dgr`` is run with for a stage, given its threads; addresses are the actor's to say. The host of each
    address in ``file`` is a name only: a stage listens at its node's address, at the port that the file names. Wherever stages
    are, now and after each restart, is written to ``placement.out``. ``report``: told of each stage that is ready, anew too.

    Raises:
        InputError: there is no cluster, or no room in it, or a stage refuses its arguments.
        LinkBroken: the cluster was lost.
    """
    stages = file.stages
    target = find_target(placement.out)
    target.check_apart(file.path)
    await trio.to_thread.run_sync(_join, placement)
    try:
        threads = await trio.to_thread.run_sync(_threads_of, placement, len(stages))
        group = await _room(placement, len(stages), threads)
        actors = [
            _placed(group, index, command(ref, threads), ref, file.stage_metrics.get(ref.address))
            for index, ref in enumerate(stages)
        ]
        try:
            known: dict[StageRef, Mapping[str, Any]] = {}

            async def take(ref: StageRef, found: Mapping[str, Any]) -> None:
                known[ref] = found
                if len(known) == len(stages):
                    text = format_route_file(_placed_route(file, known, placement.out))
                    await trio.to_thread.run_sync(write_file, target, text.encode())
                report(ref, "ready", pid=found["pid"], address=found["address"], node=found["node"])

            await _watch(dict(zip(stages, actors, strict=True)), take)
        except ray.exceptions.RayActorError as error:
            raise _gone(error) from error
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)
    except ray.exceptions.RayError as error:
        raise LinkBroken(f"Ray does not answer: {error}") from error
    finally:
        ray.shutdown()


def _join(placement: Placement) -> None:
    try:
        ray.init(address=placement.cluster, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError, AssertionError) as error:
        raise InputError(
            f"no Ray cluster at {placement.cluster}: {error}; start one with `ray start --head`, and join it on every other"
            " host with `ray start --address=HOST:PORT`"
        ) from error


def _threads_of(placement: Placement, n_stages: int) -> int:
    """CPUs of a stage; refuses at once what no waiting would bring."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if placement.strategy == "STRICT_SPREAD" and len(cpus) < n_stages:
        raise InputError(
            f"{n_stages} stages on hosts of their own, but the cluster has {len(cpus)}: add hosts, or let stages share them:"
            " --ray-strategy SPREAD"
        )
    return placement.threads or max(1, min(cpus) // math.ceil(n_stages / len(cpus)))


async def _room(placement: Placement, n_stages: int, threads: int) -> PlacementGroup:
    group = placement_group([{"CPU": threads}] * n_stages, strategy=placement.strategy)
    if not await trio.to_thread.run_sync(group.wait, _PATIENCE, abandon_on_cancel=True):
        has = (
            f"{ray.cluster_resources().get('CPU', 0):g} CPUs, {ray.available_resources().get('CPU', 0):g} of them free"
        )
        remove_placement_group(group)
        raise InputError(
            f"{n_stages} stages of {threads} CPUs each found no room within {_PATIENCE:g} s; the cluster has {has}: give fewer"
            " --threads, or add hosts"
        )
    return group


def _placed(group: PlacementGroup, index: int, command: Sequence[str], ref: StageRef, metrics: str | None) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    made = ray.remote(StageActor).options(
        name=f"dgr-{group.id.hex()[:8]}-{ref.layers}",
        num_cpus=group.bundle_specs[index]["CPU"],
        max_restarts=-1,
        scheduling_strategy=strategy,
    )
    port = parse_address(ref.address)[1]
    return made.remote(list(command), port, None if metrics is None else parse_address(metrics)[1])


async def _watch(
    actors: Mapping[StageRef, Any], take: Callable[[StageRef, Mapping[str, Any]], Awaitable[None]]
) -> NoReturn:
    """Tell where every stage is, when it is ready and again whenever it is another process."""
    asked = {ref: actor.where.remote() for ref, actor in actors.items()}
    seen: dict[StageRef, int] = {}
    while True:
        refs = list(asked.values())
        look = partial(ray.wait, refs, num_returns=len(refs), timeout=_EVERY)
        answered = {*(await trio.to_thread.run_sync(look, abandon_on_cancel=True))[0]}
        for ref in [ref for ref, call in asked.items() if call in answered]:
            call, asked[ref] = asked[ref], actors[ref].where.remote()
            try:
                found = await trio.to_thread.run_sync(ray.get, call, abandon_on_cancel=True)
            except ray.exceptions.ActorUnavailableError:
                continue  # it is being made anew
            if seen.get(ref) != found["pid"]:
                seen[ref] = found["pid"]
                await take(ref, found)
        await trio.sleep(_EVERY)


def _placed_route(file: RouteFile, known: Mapping[StageRef, Mapping[str, Any]], path: Path) -> RouteFile:
    """The route file of the stages where they are, spares among them."""

    def placed(refs: Sequence[StageRef]) -> tuple[StageRef, ...]:
        return tuple(StageRef(known[ref]["address"], ref.layers) for ref in refs)

    return attrs.evolve(
        file,
        path=path,
        route=Route(placed(file.route.stages)),
        spares=placed(file.spares),
        stage_models={},
        stage_metrics={found["address"]: found["metrics"] for found in known.values() if found["metrics"]},
    )


def _gone(error: ray.exceptions.RayActorError) -> InputError | LinkBroken:
    last = str(error).strip().splitlines()[-1]
    refused = last.partition(InputError.__name__ + ": ")[2]
    return InputError(refused) if refused else LinkBroken(f"Ray gave an actor up: {last}")
