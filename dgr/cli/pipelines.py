"""From a command's flags to its pipeline: stages in this process, or those of a route file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import trio

from dgr.cli.options import context_of, link_policy_of, placement_of, stage_flags
from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.connect import open_route
from dgr.cluster.local import open_pipeline
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.errors import InputError, WireError
from dgr.stage.shard import Shard

__all__ = ["add_route_argument", "check_wait", "enter_waiting", "open_either", "open_local", "route_of"]


def add_route_argument(parser: argparse.ArgumentParser) -> None:
    """``--route``, for a command that can also have its stages in its own process."""
    parser.add_argument(
        "--route", metavar="TOML", help="use the stages of a route file instead of stages in this process"
    )


def check_wait(seconds: float | None, *, has_route: bool) -> None:
    """Refuse a ``--wait`` that cannot be. Raises :class:`~dgr.errors.InputError`."""
    if seconds is None:
        return
    if not has_route:
        raise InputError("--wait is for stages elsewhere: give --route with it")
    if not 0 < seconds < math.inf:
        raise InputError(f"--wait is {seconds:g} seconds; give a number above 0")


async def enter_waiting(
    stack: AsyncExitStack, opened: Callable[[], AbstractAsyncContextManager[Pipeline]], seconds: float | None
) -> Pipeline:
    """Open a pipeline; try for so many ``seconds`` to reach stages that are not up yet. Raises what opening it raises."""
    deadline = trio.current_time() + (seconds or 0.0)
    pause = 0.05
    while True:
        try:
            return await stack.enter_async_context(opened())
        except WireError:
            if trio.current_time() + pause > deadline:
                raise
        await trio.sleep(pause)
        pause = min(2 * pause, 0.5)


def open_local(
    args: argparse.Namespace, on_shard: Callable[[Shard], None] | None = None
) -> AbstractAsyncContextManager[Pipeline]:
    """The pipeline of ``--model`` and ``--split``, to enter.

    Raises:
        InputError: ``--model`` is missing.
    """
    if args.model is None:
        raise InputError("give --model GGUF, or --route TOML for stages elsewhere")
    return open_pipeline(
        args.model,
        args.split,
        context=context_of(args),
        threads=args.threads,
        mmap=args.mmap,
        mlock=args.mlock,
        memory_budget=args.memory,
        placement=placement_of(args),
        chunk=args.chunk,
        chunk_seconds=args.chunk_seconds,
        on_shard=on_shard,
    )


def route_of(args: argparse.Namespace, own: Collection[str] = ()) -> tuple[RouteFile, str]:
    """The file that ``--route`` names, and the model whose vocabulary is used: that of ``--model``, or the file's.

    Args:
        own: what a command does itself with flags of stages, by their names in ``args``; the others may not be given.

    Raises:
        InputError: ``--split`` or a flag of stages is given too, or neither names a model.
        InvalidRoute: as of :func:`~dgr.cluster.route_file.read_route_file`.
    """
    if args.split is not None:
        raise InputError("--split cuts a model in this process, --route names stages elsewhere; give one of them")
    if others := [flag for name, flag in stage_flags(args).items() if name not in own]:
        raise InputError(
            f"{', '.join(others)} beside --route: what its stages are was decided where they run; give the flag to"
            " `dgr stage` there, and leave it out here"
        )
    file = read_route_file(args.route)
    model = file.model if args.model is None else args.model
    if model is None:
        raise InputError("text needs a vocabulary: give --model GGUF, or `model` in the route file")
    return file, str(model)


def open_either(
    args: argparse.Namespace,
    on_shard: Callable[[Shard], None] | None = None,
    *,
    timeouts: Timeouts | None = None,
    own: Collection[str] = (),
) -> AbstractAsyncContextManager[Pipeline]:
    """The pipeline of ``--route``, to enter, or that of ``--model`` and ``--split``; ``timeouts`` are of the former.

    ``own``: as of :func:`route_of`. With ``--route`` the model whose vocabulary is used is left in ``args.model``. Errors as
    of the two it is made of.
    """
    if args.route is None:
        return open_local(args, on_shard)
    file, args.model = route_of(args, own)
    return open_route(
        file,
        policy=link_policy_of(args, file.tls),
        model=args.model,
        chunk=args.chunk,
        chunk_seconds=args.chunk_seconds,
        timeouts=timeouts,
    )
