"""A client of a route on a host of its own: it says as JSON lines what it draws and what its pipeline tells of.

far_client.py ROUTE  <  a line [[prompt ids], how many tokens] for each answer
"""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

import dgr
from dgr.client.events import Event, RePrefilled, RouteChanged, RouteDown
from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.route_file import read_route_file
from dgr.wire.credentials import Credentials


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def told(event: Event) -> None:
    match event:
        case RouteDown():
            say(event="down", why=event.why)
        case RouteChanged():
            say(event="route", stages=[ref.address for ref in event.route.stages])
        case RePrefilled():
            say(event="again", tokens=event.tokens, seconds=event.seconds)


async def watch(pipeline: Pipeline, *, task_status: trio.TaskStatus[None]) -> None:
    events = pipeline.events()
    task_status.started()
    async for event in events:
        told(event)


async def main(path: str, beat: float) -> None:
    file = read_route_file(path)
    assert file.tls is not None
    policy = LinkPolicy(Credentials(*file.tls), heartbeat=beat, handshake=5.0)
    timeouts = Timeouts(reply=30.0, control=30.0)
    async with dgr.open_route(file, policy=policy, timeouts=timeouts) as pipeline, trio.open_nursery() as nursery:
        await nursery.start(watch, pipeline)
        say(event="route", stages=[ref.address for ref in pipeline.route.stages])
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            prompt, count = json.loads(line)
            async with pipeline.session() as session:
                async for token in session.generate(prompt, max_tokens=count, stop=()):
                    say(token=token.id)
            say(event="end")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], float(sys.argv[2]))
