"""``dgr-bench hops``: what a hop costs beyond its wire, and how many bytes a frame is there.

A boundary frame of V4 Flash goes through a dgr link and back, against a bare echo of the same bytes on the same transport; the
two ways alternate round by round. Two shapes: one token's boundary (65 536 bytes: a decode step) and 512 tokens' (32 MiB: a
prefill chunk). Figures are round trips there and back, so a hop is half of one.

Units:

``TRANSPORT, SHAPE``
    ``tokens``, ``payload_bytes``, ``bare_ms`` and ``link_ms``: milliseconds of every round trip, in pairs.
``TRANSPORT, SHAPE, bytes``
    ``tokens``, ``payload_bytes``, ``frames``: sent both ways; ``wire_bytes``: all that a relay under TLS passed on for
    them, both ways, so with TLS records and with the credit that each frame is answered with.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from dgr_bench import reports
from dgr_bench.options import add_run_arguments, exit_code, say
from dgr_bench.overhead.echo import Echo, bare_round, link_round, open_echo, open_echo_link, payload_bytes
from dgr_bench.plots import BLUE, GREY, RED, draw
from dgr_bench.progress import Progress
from dgr_bench.quartiles import Goal, quartiles_of
from dgr_bench.results import Check, Journal, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["GOALS", "SHAPES", "TRANSPORTS", "checks", "measure", "metrics", "plan", "register", "report_part"]

TRANSPORTS = ("memory", "tcp", "tls")
#: Name of a shape -> tokens of its frame.
SHAPES = {"decode": 1, "prefill": 512}
#: Extra milliseconds of one token's hop, by transport; extra bytes of one token's frame on any wire.
GOALS = {
    "memory": Goal("at most", 0.25, "ms"),
    "tls": Goal("at most", 0.6, "ms"),
    "bytes": Goal("at most", 320, "bytes"),
}
#: Round trips by shape.
_ROUNDS = {"decode": 1000, "prefill": 15}
_QUICK_ROUNDS = {"decode": 100, "prefill": 2}
#: Round trips that count for nothing: buffers grow, TLS sends its session tickets.
_WARM_UP = 3
_COUNTED_ROUNDS = 20


def plan(quick: bool, transports: Sequence[str] = TRANSPORTS, shapes: Sequence[str] = tuple(SHAPES)) -> dict[str, Any]:
    """What is measured: rounds by shape, over which transports."""
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    return {
        "name": "hops, quick" if quick else "hops",
        "transports": list(transports),
        "rounds": {shape: rounds[shape] for shape in shapes},
        "goals": {name: str(goal) for name, goal in GOALS.items()},
    }


async def measure(journal: Journal, locked: Mapping[str, Any], bar: Progress) -> None:
    """Measure the units of a plan that are missing in the journal."""
    for transport in locked["transports"]:
        names = [f"{transport}, {shape}" for shape in locked["rounds"]]
        if transport != "memory":
            names += [f"{name}, bytes" for name in names]
        if any(journal.get(name) is None for name in names):
            async with open_echo(transport) as echo:
                for name in names:
                    bar.begin(name)
                    if journal.get(name) is None:
                        shape = name.split(", ")[1]
                        tokens, rounds = SHAPES[shape], locked["rounds"][shape]
                        counts = name.endswith("bytes")
                        journal.put(name, await (_count if counts else _time)(echo, tokens, rounds))
        bar.done()


async def _time(echo: Echo, tokens: int, rounds: int) -> dict[str, Any]:
    payload = bytes(payload_bytes(tokens))
    bare_ms, link_ms = [], []
    async with echo.connect() as bare, echo.connect() as linked:
        await bare.send_all(b"b")
        async with open_echo_link(linked) as link:
            for index in range(_WARM_UP + rounds):
                times = await bare_round(bare, payload), await link_round(link, tokens, payload)
                if index >= _WARM_UP:
                    bare_ms.append(round(1e3 * times[0], 4))
                    link_ms.append(round(1e3 * times[1], 4))
    return {"tokens": tokens, "payload_bytes": len(payload), "bare_ms": bare_ms, "link_ms": link_ms}


async def _count(echo: Echo, tokens: int, rounds: int) -> dict[str, Any]:
    payload = bytes(payload_bytes(tokens))
    rounds = min(rounds, _COUNTED_ROUNDS)
    async with echo.counted() as (transport, relay), open_echo_link(transport) as link:

        def passed_on() -> int:
            return relay.rightward.forwarded + relay.leftward.forwarded

        async def settle() -> int:
            """Bytes passed on, once the last credit is through: a frame may be whole before it."""
            await link.flush()
            before = -1
            while before != passed_on():
                before = passed_on()
                await trio.sleep(_QUIET)
            return before

        for _ in range(_WARM_UP):
            await link_round(link, tokens, payload)
        began = await settle()
        for _ in range(rounds):
            await link_round(link, tokens, payload)
        counted = await settle() - began
    return {"tokens": tokens, "payload_bytes": len(payload), "frames": 2 * rounds, "wire_bytes": counted}


#: Seconds without a byte after which a relay has passed everything on.
_QUIET = 0.1


# --- metrics and verdicts --------------------------------------------------------------------------------------------


def metrics(units: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per unit: spreads of the extra milliseconds a hop and of the ratio, or the bytes a frame."""
    found = {}
    for name, unit in units.items():
        if "wire_bytes" in unit:
            per_frame = unit["wire_bytes"] / unit["frames"]
            found[name] = {"bytes_per_frame": per_frame, "extra_bytes": per_frame - unit["payload_bytes"]}
        elif "link_ms" in unit:
            pairs = list(zip(unit["link_ms"], unit["bare_ms"], strict=True))
            found[name] = {
                "bare_ms": quartiles_of(unit["bare_ms"]),
                "link_ms": quartiles_of(unit["link_ms"]),
                "extra_ms_per_hop": quartiles_of([(link - bare) / 2 for link, bare in pairs]),
                "ratio": quartiles_of([link / bare for link, bare in pairs]),
            }
    return found


def checks(units: Mapping[str, dict[str, Any]]) -> list[Check]:
    """The goals for one token's boundary."""
    found = metrics(units)
    verdicts = []
    for transport in TRANSPORTS:
        timed, counted = f"{transport}, decode", f"{transport}, decode, bytes"
        if transport in GOALS and timed in found:
            where = "in process" if transport == "memory" else f"over loopback {transport.upper()}"
            extra = found[timed]["extra_ms_per_hop"]
            verdicts.append(GOALS[transport].check(f"extra time of a hop {where}", extra))
        if counted in found:
            goal, extra_bytes, frames = GOALS["bytes"], found[counted]["extra_bytes"], units[counted]["frames"]
            detail = f"{extra_bytes:.1f} bytes beyond the payload of {units[counted]['payload_bytes']}; goal {goal}"
            name = f"bytes of a frame over {transport.upper()}"
            verdicts.append(Check(name=name, passed=extra_bytes <= goal.value, cases=frames, detail=detail))
    return verdicts


# --- the command -----------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "hops",
        help="cost of a hop: a boundary frame through a link, against a bare echo of its bytes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="what to measure (default: all)"
    )
    add_run_arguments(parser, "dgr-bench-hops")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, report, judge."""
    transports = [name for name in TRANSPORTS if name in args.transport]
    locked = plan(args.quick, transports)
    journal = Journal.open(args.out, "hops", locked, {"boundary": "V4 Flash"}, args.command_line, fresh=args.fresh)
    with Progress("hops", len(transports)) as bar:
        trio.run(measure, journal, locked, bar)
    result = journal.finish(metrics(journal.result.units), checks(journal.result.units))
    reports.write_report(
        args.out,
        reports.heading(result, "A hop"),
        reports.verdicts(result),
        report_part(result, journal),
        reports.machine(result),
    )
    say(result, args.out, args.json)
    return exit_code(result)


def report_part(result: Result, journal: Journal) -> str:
    """Tables and the plot, for any result with units of hops."""
    found = metrics(result.units)
    times = [
        (
            *name.split(", "),
            f"{figure['bare_ms'].median:.3f}",
            f"{figure['link_ms'].median:.3f}",
            str(figure["ratio"]),
            str(figure["extra_ms_per_hop"]),
        )
        for name, figure in found.items()
        if "ratio" in figure
    ]
    sizes = [
        (*name.split(", ")[:2], result.units[name]["payload_bytes"], f"{figure['extra_bytes']:.1f}")
        for name, figure in found.items()
        if "extra_bytes" in figure
    ]
    heads = ("transport", "frame", "bare, ms", "link, ms", "link / bare", "extra a hop, ms")
    parts = [
        "## Time\n\nRound trips; medians, with quartiles in brackets.",
        reports.table(heads, times),
        reports.picture(_plot(result, journal), "Extra milliseconds of one token's hop by transport"),
    ]
    if sizes:
        parts += [
            "## Bytes\n\nCounted on TCP: TLS records, packet headers and the credit in return are in the extra bytes.",
            reports.table(("transport", "frame", "payload, bytes", "extra bytes a frame"), sizes),
        ]
    return "\n\n".join(parts)


def _plot(result: Result, journal: Journal) -> str:
    found = metrics(result.units)
    names = [name for name in TRANSPORTS if f"{name}, decode" in found]

    def paint(axes: Axes) -> None:
        for place, name in enumerate(names):
            extra = found[f"{name}, decode"]["extra_ms_per_hop"]
            below, above = extra.median - extra.low, extra.high - extra.median
            axes.bar(place, extra.median, 0.5, color=BLUE, yerr=[[below], [above]], ecolor=GREY, capsize=4)
            if name in GOALS:
                goal = GOALS[name].value
                ends = place - 0.35, place + 0.35
                axes.plot(ends, (goal, goal), color=RED, linestyle="--", label=None if place else "goal, at most")
        axes.set_xticks(range(len(names)), [{"memory": "in process"}.get(name, name.upper()) for name in names])
        axes.set_ylim(bottom=0)

    return draw(
        journal.folder,
        "hops",
        "One token's boundary: a hop beyond its wire",
        "transport",
        "extra time of a hop, ms (median, quartiles)",
        paint,
    )
