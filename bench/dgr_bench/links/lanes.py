"""``dgr-bench lanes``: how long what is short waits behind what is long, on one link over a slow cable.

A link to an echo in a process of its own, over TCP and a cable that passes so many megabits a second each way. One session
sends prefill chunks of V4 Flash's width one after another, as fast as the link takes them. Beside them, and before them on
the idle link, round trips are timed one by one: of a control message (``Ping``, as heartbeats are), and of one token's
boundary of another session. Both ways are full, so that what is short stands behind what is long twice. What it stands
behind is told in bytes of one way: half of the time that it takes longer, at the cable's rate.

Units:

``RATE Mbit/s``
    ``rate``; ``alone_ms`` and ``beside_ms``: milliseconds of every round trip, of ``control`` and of ``decode``;
    ``chunk_bytes``, and ``chunks``: those that came back meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import trio
from attrs import frozen

from dgr.errors import LinkBroken
from dgr.wire import Link, frames
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.links.echo import Echo, boundary_of, open_echo, open_echo_link, payload_bytes
from dgr_bench.links.rates import add_rates_argument, rates_of
from dgr_bench.plots import BLUE, RED, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.verdicts import Check, Goal

_MBIT = 1e6 / 8
#: Bytes that the cable holds each way, as a router with little to spare does; the kernel has as much before it.
_CAPACITY = 64 * 1024
#: What a short message may stand behind, each way: bytes that the cable and the kernel hold, and a fragment; and milliseconds
#: for the event loops of three processes.
_BEHIND, _TURNS = 512 * 1024, 20.0
#: Sessions by what they send.
_LONG, _SHORT = 1, 2
#: Seconds between two looks.
_LOOK = 0.01
_FULL: dict[str, Any] = {"tokens": 512, "rounds": 30, "judged": True}
_QUICK: dict[str, Any] = {"tokens": 64, "rounds": 4, "judged": False}


class LanesPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    name: str
    #: Of a chunk.
    tokens: int
    #: Round trips of each kind.
    rounds: int
    #: Megabits a second.
    rates: tuple[float, ...]
    #: Whether anything is asked of the figures.
    judged: bool
    goal: str = f"at most {_BEHIND >> 10} KiB and {_TURNS:g} ms"


class _Traffic:
    """One end of a link on which two sessions and pings are under way."""

    def __init__(self, link: Link, tokens: int) -> None:
        self._link, self._tokens = link, tokens
        self._chunk, self._token = bytes(payload_bytes(tokens)), bytes(payload_bytes(1))
        self._nonce = 0
        self._came = trio.Event()
        self.chunks = 0

    async def read(self) -> None:
        """Tell whoever waits that his came back, and give back what was taken."""
        async for received in self._link:
            if received.payload is not None:
                self._link.grant(received.payload.nbytes)
            if isinstance(received.frame, frames.Boundary) and received.frame.key.session == _LONG:
                self.chunks += 1
            else:
                self._came.set()
        raise LinkBroken("the echo went away")

    async def fill(self) -> None:
        """Chunk after chunk."""
        while True:
            await self._link.send(boundary_of(self._tokens, _LONG), self._chunk)

    async def control(self) -> float:
        """Seconds of a round trip."""
        self._nonce += 1
        self._link.send_nowait(frames.Ping(self._nonce))
        return await self._wait()

    async def decode(self) -> float:
        await self._link.send(boundary_of(1, _SHORT), self._token)
        return await self._wait()

    async def _wait(self) -> float:
        began, self._came = trio.current_time(), trio.Event()
        await self._came.wait()
        return trio.current_time() - began


async def _measure(plan: LanesPlan, rate: float, echo: Echo) -> dict[str, Any]:
    found: dict[str, Any] = {"rate": rate, "chunk_bytes": payload_bytes(plan.tokens)}
    async with echo.counted(_CAPACITY) as (transport, cable), open_echo_link(transport) as link:
        cable.rate = rate * _MBIT
        traffic = _Traffic(link, plan.tokens)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traffic.read)
            found["alone_ms"] = await _rounds(traffic, plan.rounds)
            nursery.start_soon(traffic.fill)
            came = link.statistics().bytes_received
            # Until the first chunk comes back: both ways are full.
            while link.statistics().bytes_received < came + 2 * _CAPACITY:  # noqa: ASYNC110 (a link's figures tell nobody)
                await trio.sleep(_LOOK)
            found["beside_ms"] = await _rounds(traffic, plan.rounds)
            found["chunks"] = traffic.chunks
            nursery.cancel_scope.cancel()
    return found


async def _rounds(traffic: _Traffic, count: int) -> dict[str, list[float]]:
    kinds = {"control": traffic.control, "decode": traffic.decode}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(count):
        for name, one in kinds.items():
            found[name].append(round(1e3 * await one(), 3))
    return found


@frozen
class Lanes:
    """The benchmark."""

    plan: LanesPlan
    kind: ClassVar[Kind] = "lanes"
    title: ClassVar[str] = "Short behind long"

    def subject(self) -> dict[str, Any]:
        return {"boundary": "V4 Flash"}

    def units(self, _: Store) -> Iterator[Group]:
        for rate in self.plan.rates:
            yield Group([Unit(_name(rate), partial(_measure, self.plan, rate), 1 / rate)], _open)

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """Per rate and kind: round trips alone and beside chunks, and the KiB that stood before it each way."""
        found: dict[str, Any] = {}
        for name, unit in units.items():
            if "beside_ms" not in unit:
                continue
            for kind, beside in unit["beside_ms"].items():
                alone = quartiles_of(unit["alone_ms"][kind])
                waits = [(ms - alone.median) / 2 for ms in beside]
                found[f"{name}, {kind}"] = {
                    "alone_ms": alone,
                    "beside_ms": quartiles_of(beside),
                    "wait_ms": quartiles_of(waits),
                    "before_kib": quartiles_of([ms / 1e3 * unit["rate"] * _MBIT / 1024 for ms in waits]),
                }
        return found

    def checks(self, units: Units) -> list[Check]:
        """Nothing short stands behind a chunk, which has 32 MiB."""
        found = self.metrics(units)
        return [no_error(units, "rate")] + [
            goal_of(rate).check(f"how long a message of {kind} waits at {rate:g} Mbit/s", found[name]["wait_ms"])
            for rate in self.plan.rates
            for kind in ("control", "decode")
            if self.plan.judged and (name := f"{_name(rate)}, {kind}") in found
        ]

    def tables(self, result: Result) -> list[Section]:
        rows = []
        for name, row in _converted(result.metrics).items():
            rate, kind = name.split(", ")
            alone, beside = row["alone_ms"], row["beside_ms"]
            rows.append(
                (rate, kind, f"{alone.median:.1f}", f"{beside.median:.1f}", f"{beside.high:.1f}", row["before_kib"])
            )
        heads = (
            "cable",
            "round trip of",
            "alone, ms",
            "beside chunks, ms",
            "upper quartile",
            "stands behind, KiB a way",
        )
        kib = payload_bytes(self.plan.tokens) >> 10
        said = f"Chunks of {self.plan.tokens} tokens, {kib} KiB; medians, with quartiles in brackets."
        return [Section("Short behind long", (said, table(heads, rows)))]

    def plots(self, result: Result) -> list[Plot]:
        found = _converted(result.metrics)

        def paint(axes: Axes) -> None:
            for kind, colour in (("control", BLUE), ("decode", RED)):
                named = {rate: found.get(f"{_name(rate)}, {kind}") for rate in self.plan.rates}
                rates = [rate for rate, row in named.items() if row is not None]
                axes.plot(
                    rates,
                    [found[f"{_name(rate)}, {kind}"]["before_kib"].median for rate in rates],
                    "o-",
                    color=colour,
                    label=kind,
                )
            axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.legend()

        return [
            Plot("Short behind long", "lanes", "What is short, behind prefill chunks", "Mbit/s", "KiB before it", paint)
        ]


def goal_of(rate: float) -> Goal:
    """How long a short message may wait each way."""
    return Goal("at most", round(_TURNS + 1e3 * _BEHIND / (rate * _MBIT), 1), "ms")


def _name(rate: float) -> str:
    return f"{rate:g} Mbit/s"


def _converted(metrics: Mapping[str, Any]) -> dict[str, dict[str, Quartiles]]:
    return {name: msgspec.convert(row, dict[str, Quartiles]) for name, row in metrics.items()}


@asynccontextmanager
async def _open() -> AsyncIterator[Echo]:
    async with open_echo("tcp") as echo:
        yield echo


def _lanes(args: argparse.Namespace) -> Lanes:
    name = "lanes, quick" if args.quick else "lanes"
    return Lanes(LanesPlan(name=name, **(_QUICK if args.quick else _FULL), rates=rates_of(args)))


_HELP = "what a control message and a decoded token wait for behind another session's prefill"
COMMAND = benchmark_command("lanes", _HELP, __doc__ or "", add_rates_argument, _lanes)
