"""``dgr drain``: empty a stage before it is maintained."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from typing import Any

import trio

from dgr.cli.options import add_link_arguments, link_policy_of
from dgr.cli.progress import progress_bar, say_above
from dgr.cli.streams import json_line
from dgr.cluster.diagnosis import causes, next_step
from dgr.cluster.occupancy import drain, take_back
from dgr.cluster.route_file import read_route_file
from dgr.errors import FrameError, InputError, LinkBroken
from dgr.wire.frames import Occupancy

__all__ = ["register", "run"]

#: What no credentials help against.
_NOBODY = (ConnectionRefusedError, socket.gaierror)


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "drain",
        help="empty a stage before it is maintained",
        description="Have a stage take no new pipelines and no new sessions. Pipelines that know another stage of its layers"
        " move there and prefill again; the answers of others end where they are. Ends when no session is left, which it"
        " tells. The stage stays drained until it is started again, or --undo. Exit code 1: sessions are left.",
    )
    parser.add_argument("address", metavar="HOST:PORT", help="the stage, as a route names it")
    parser.add_argument("--route", metavar="TOML", help="a route file whose credentials to use")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="wait no longer than this (default: 300)"
    )
    parser.add_argument(
        "--idle",
        type=int,
        default=10,
        metavar="SECONDS",
        help="end sessions without work for this long: more than two tokens of an answer may be apart (default: 10)",
    )
    parser.add_argument("--undo", action="store_true", help="have it take pipelines and sessions again")
    add_link_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON lines: one for each change of who is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.timeout <= 86_400:
        raise InputError(f"--timeout is {args.timeout:g} seconds; give 0 to 86400")
    if not 0 <= args.idle <= 86_400:
        raise InputError(f"--idle is {args.idle} seconds; give 0 to 86400")
    tls = None if args.route is None else read_route_file(args.route).tls
    policy = link_policy_of(args, tls)

    def words(now: Occupancy) -> str:
        if args.json:
            facts = {"draining": now.draining, "routes": now.routes, "sessions": now.sessions}
            return json_line({"stage": args.address, **facts})
        if not now.draining:
            return f"stage {args.address} takes pipelines and sessions again"
        if now.sessions:
            return f"stage {args.address} is being drained: {now.sessions} sessions left"
        return f"stage {args.address} is drained: no session is left"

    async def go(tell: Callable[[Occupancy], None]) -> None:
        try:
            if args.undo:
                tell(await take_back(args.address, policy))
            else:
                await drain(args.address, policy, seconds=args.timeout, idle=args.idle, tell=tell)
        except (FrameError, LinkBroken) as error:
            if policy.credentials is not None or any(isinstance(one, _NOBODY) for one in causes(error)):
                raise
            step = await next_step(args.address, error, None, own_is_bad=False)
            raise type(error)(f"{error}; {step}; --route TOML takes those of a route file") from error

    with progress_bar(f"waiting for stage {args.address}") as activity:
        trio.run(go, lambda now: say_above(activity, words(now)))
    return 0
