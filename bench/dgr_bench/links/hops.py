"""``dgr-bench hops``: what a hop costs beyond its wire, and how many bytes a frame is there.

A boundary frame of V4 Flash goes through a dgr link and back, against a bare echo of the same bytes on the same transport; the
two ways alternate round by round. Two shapes: one token's boundary (65 536 bytes: a decode step) and 512 tokens' (32 MiB: a
prefill chunk). Metrics are round trips there and back, so a hop is half of one. Processes of one host (``unix``) are held
against the same link over loopback TCP.

Units:

``TRANSPORT, SHAPE``
    ``tokens``, ``payload_bytes``, ``bare_ms`` (``unix``: ``tcp_ms``) and ``link_ms``: milliseconds of every round trip, in
    pairs.
``TRANSPORT, SHAPE, bytes``
    ``tokens``, ``payload_bytes``, ``frames``: sent both ways; ``wire_bytes``: all that a relay under TLS passed on for
    them, both ways, so with TLS records and with the credit that each frame is answered with.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from attrs import frozen

from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.links.echo import Echo, bare_round, link_round, open_echo, open_echo_link, payload_bytes, wire_bytes
from dgr_bench.plots import BLUE, GREY, RED, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.verdicts import Check, Goal

TRANSPORTS = ("memory", "unix", "tcp", "tls")
#: Name of a shape -> tokens of its frame.
SHAPES = {"decode": 1, "prefill": 512}
#: Extra milliseconds of one token's hop, by transport; extra bytes of one token's frame on any wire.
GOALS = {
    "memory": Goal("at most", 0.25, "ms"),
    "tls": Goal("at most", 0.6, "ms"),
    "bytes": Goal("at most", 320, "bytes"),
}
#: Time of a prefill chunk's round trip over that of its bare bytes, by transport.
RATIO_GOALS = {"memory": Goal("at most", 1.3), "tcp": Goal("at most", 1.3), "tls": Goal("at most", 1.05)}
#: Speed of a prefill chunk between processes of one host, over that of the same link over loopback TCP.
UNIX_GOAL = Goal("at least", 2.0)
#: Round trips by shape.
_ROUNDS, _QUICK_ROUNDS = {"decode": 1000, "prefill": 15}, {"decode": 100, "prefill": 2}
#: Round trips that count for nothing: buffers grow, TLS sends its session tickets.
_WARM_UP = 3
_COUNTED_ROUNDS = 20


class HopsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: rounds by shape, over which transports."""

    name: str
    transports: tuple[str, ...]
    rounds: dict[str, int]
    goals: dict[str, str]


def plan(quick: bool, transports: Sequence[str] = TRANSPORTS, shapes: Sequence[str] = tuple(SHAPES)) -> HopsPlan:
    """The plan that flags ask for."""
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    return HopsPlan(
        name="hops, quick" if quick else "hops",
        transports=tuple(transports),
        rounds={shape: rounds[shape] for shape in shapes},
        goals={name: str(goal) for name, goal in GOALS.items()}
        | {f"{name}, prefill": str(goal) for name, goal in RATIO_GOALS.items()}
        | {"unix, prefill": str(UNIX_GOAL)},
    )


async def _time(tokens: int, rounds: int, echo: Echo) -> dict[str, Any]:
    payload = bytes(payload_bytes(tokens))
    async with echo.connect() as bare, echo.connect() as linked:
        await bare.send_all(b"b")
        async with open_echo_link(linked) as link:
            times = [
                (await bare_round(bare, payload), await link_round(link, tokens, payload))
                for _ in range(_WARM_UP + rounds)
            ]
    bare_ms, link_ms = _pairs(times)
    return {"tokens": tokens, "payload_bytes": len(payload), "bare_ms": bare_ms, "link_ms": link_ms}


def _pairs(times: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    one, other = ([round(1e3 * seconds, 4) for seconds in side] for side in zip(*times[_WARM_UP:], strict=True))
    return one, other


@asynccontextmanager
async def _open_unix_and_tcp() -> AsyncIterator[tuple[Echo, Echo]]:
    async with open_echo("unix") as unix, open_echo("tcp") as tcp:
        yield unix, tcp


async def _time_against_tcp(tokens: int, rounds: int, echoes: tuple[Echo, Echo]) -> dict[str, Any]:
    payload = bytes(payload_bytes(tokens))
    async with (
        echoes[0].connect() as near,
        echoes[1].connect() as far,
        open_echo_link(near) as unix,
        open_echo_link(far) as tcp,
    ):
        times = [
            (await link_round(tcp, tokens, payload), await link_round(unix, tokens, payload))
            for _ in range(_WARM_UP + rounds)
        ]
    tcp_ms, link_ms = _pairs(times)
    return {"tokens": tokens, "payload_bytes": len(payload), "tcp_ms": tcp_ms, "link_ms": link_ms}


async def _count(tokens: int, rounds: int, echo: Echo) -> dict[str, Any]:
    rounds = min(rounds, _COUNTED_ROUNDS)
    counted = await wire_bytes(echo, tokens, _WARM_UP, rounds)
    return {"tokens": tokens, "payload_bytes": payload_bytes(tokens), "frames": 2 * rounds, "wire_bytes": counted}


@frozen
class Hops:
    """The benchmark; ``overhead`` has it as a part."""

    plan: HopsPlan
    kind: ClassVar[Kind] = "hops"
    title: ClassVar[str] = "A hop"

    def subject(self) -> dict[str, Any]:
        return {"boundary": "V4 Flash"}

    def units(self, _: Store) -> Iterator[Group]:
        for transport in self.plan.transports:
            if transport == "unix":
                shapes = self.plan.rounds.items()
                compared = [Unit(f"unix, {name}", partial(_time_against_tcp, SHAPES[name], n)) for name, n in shapes]
                yield Group(compared, _open_unix_and_tcp)
                continue
            kinds = {"": _time} if transport == "memory" else {"": _time, ", bytes": _count}
            units = [
                Unit(f"{transport}, {shape}{kind}", partial(one, SHAPES[shape], rounds))
                for kind, one in kinds.items()
                for shape, rounds in self.plan.rounds.items()
            ]
            yield Group(units, partial(open_echo, transport))

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """Per unit: quartiles of the extra milliseconds a hop and of the ratio, or the bytes a frame."""
        found: dict[str, Any] = {}
        for name, unit in units.items():
            if "wire_bytes" in unit:
                per_frame = unit["wire_bytes"] / unit["frames"]
                found[name] = {"bytes_per_frame": per_frame, "extra_bytes": per_frame - unit["payload_bytes"]}
            elif "tcp_ms" in unit:
                found[name] = {
                    "tcp_ms": quartiles_of(unit["tcp_ms"]),
                    "link_ms": quartiles_of(unit["link_ms"]),
                    "speed": quartiles_of([a / b for a, b in zip(unit["tcp_ms"], unit["link_ms"], strict=True)]),
                }
            elif "link_ms" in unit:
                pairs = list(zip(unit["link_ms"], unit["bare_ms"], strict=True))
                found[name] = {
                    "bare_ms": quartiles_of(unit["bare_ms"]),
                    "link_ms": quartiles_of(unit["link_ms"]),
                    "extra_ms_per_hop": quartiles_of([(link - bare) / 2 for link, bare in pairs]),
                    "ratio": quartiles_of([link / bare for link, bare in pairs]),
                }
        return found

    def checks(self, units: Units) -> list[Check]:
        """The goals for one token's boundary, and for a prefill chunk's."""
        found, verdicts = self.metrics(units), [no_error(units, "round")]
        for transport in TRANSPORTS:
            timed, counted = f"{transport}, decode", f"{transport}, decode, bytes"
            where = "in process" if transport == "memory" else f"over loopback {transport.upper()}"
            if transport in GOALS and timed in found:
                extra = found[timed]["extra_ms_per_hop"]
                verdicts.append(GOALS[transport].check(f"extra time of a hop {where}", extra))
            if (chunk := f"{transport}, prefill") in found and transport == "unix":
                what = "speed of a prefill chunk between processes of one host over that over loopback TCP"
                verdicts.append(UNIX_GOAL.check(what, found[chunk]["speed"]))
            elif chunk in found:
                what = f"time of a prefill chunk over that of its bytes, {where}"
                verdicts.append(RATIO_GOALS[transport].check(what, found[chunk]["ratio"]))
            if counted in found:
                extra_bytes = quartiles_of([found[counted]["extra_bytes"]] * units[counted]["frames"])
                verdicts.append(GOALS["bytes"].check(f"bytes of a frame over {transport.upper()}", extra_bytes))
        return verdicts

    def tables(self, result: Result) -> list[Section]:
        return self.sections(result.metrics, result.units)

    def plots(self, result: Result) -> list[Plot]:
        return [self.plot(result.metrics)]

    def sections(self, metrics: Mapping[str, Any], units: Units) -> list[Section]:
        """Tables of any result with units of hops."""
        timed = {name: msgspec.convert(row, dict[str, Quartiles]) for name, row in metrics.items() if "ratio" in row}
        shared = {name: msgspec.convert(row, dict[str, Quartiles]) for name, row in metrics.items() if "speed" in row}
        times = [
            (*name.split(", "), f"{row['bare_ms'].median:.3f}", f"{row['link_ms'].median:.3f}", row["ratio"],
             row["extra_ms_per_hop"])
            for name, row in timed.items()
        ]  # fmt: skip
        sizes = [
            (*name.split(", ")[:2], units[name]["payload_bytes"], f"{row['extra_bytes']:.1f}")
            for name, row in metrics.items()
            if "extra_bytes" in row
        ]
        heads = ("transport", "frame", "bare, ms", "link, ms", "link / bare", "extra a hop, ms")
        said = "Round trips; medians, with quartiles in brackets."
        counted = "Counted on TCP: TLS records, packet headers and the credit in return are in the extra bytes."
        size_heads = ("transport", "frame", "payload, bytes", "extra bytes a frame")
        found = [Section("Time of a hop", (said, table(heads, times)))] if times else []
        if shared:
            rows = [
                (name.split(", ")[1], f"{row['tcp_ms'].median:.3f}", f"{row['link_ms'].median:.3f}", row["speed"])
                for name, row in shared.items()
            ]
            unix_heads = ("frame", "loopback TCP, ms", "unix:, ms", "TCP / unix:")
            found.append(Section("Processes of one host", (said, table(unix_heads, rows))))
        return found + ([Section("Bytes of a frame", (counted, table(size_heads, sizes)))] if sizes else [])

    def plot(self, metrics: Mapping[str, Any]) -> Plot:
        """Extra time by transport, with the goals."""

        def paint(axes: Axes) -> None:
            names = [name for name in TRANSPORTS if "extra_ms_per_hop" in metrics.get(f"{name}, decode", {})]
            for place, name in enumerate(names):
                extra = msgspec.convert(metrics[f"{name}, decode"]["extra_ms_per_hop"], Quartiles)
                errors = [[extra.median - extra.low], [extra.high - extra.median]]
                axes.bar(place, extra.median, 0.5, color=BLUE, yerr=errors, ecolor=GREY, capsize=4)
                if name in GOALS:
                    ends, goal = (place - 0.35, place + 0.35), GOALS[name].value
                    axes.plot(ends, (goal, goal), "--", color=RED, label=None if place else "goal, at most")
            axes.set_xticks(range(len(names)), [{"memory": "in process"}.get(name, name.upper()) for name in names])
            axes.set_ylim(bottom=0)

        y = "extra time of a hop, ms (median, quartiles)"
        return Plot("Time of a hop", "hops", "One token's boundary: a hop beyond its wire", "transport", y, paint)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="what to measure (default: all)"
    )


def _hops(args: argparse.Namespace) -> Hops:
    return Hops(plan(args.quick, [name for name in TRANSPORTS if name in args.transport]))


_HELP = "cost of a hop: a boundary frame through a link, against a bare echo of its bytes"
COMMAND = benchmark_command("hops", _HELP, __doc__ or "", _add_arguments, _hops)
