"""``dgr-bench wires``: prefill over slow links, residuals as they are against packed and rounded ones.

Two stage processes of one thread each on loopback, and between them a cable that passes so many bits a second each way.
For every wire type and rate, a prompt is prefilled over stages that exchange f32 and over stages that exchange the wire type,
in turns. Numerics are ``same-cuts`` on both sides. A rate is that of each connection; TCP, TLS and the link's own headers are
below a thousandth.

Units:

``WIRE at RATE Mbit/s, round N``
    ``tokens``; ``f32_s`` and ``wire_s``: seconds from the prompt to its first token; ``f32_bytes`` and ``wire_bytes``: what
    passed the cable towards the second stage.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import msgspec
from attrs import frozen

from dgr import Pipeline, open_pipeline_on
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.core.values import ContextParams, Numerics, Wire
from dgr.selftest.fixture.cached import cached_fixture
from dgr.testing.network.processes import open_up, write_route
from dgr.testing.network.proxy import FaultyProxy, open_proxies
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.links.rates import add_rates_argument, rates_of
from dgr_bench.plots import BLUE, GREY, RED, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import PATIENCE, whole_model
from dgr_bench.timed import prefill_seconds
from dgr_bench.verdicts import Check, Tally

_MBIT = 1e6 / 8
#: Of the boundary's bytes: messages, headers, credits.
_BESIDE = 0.02
#: What a lossless code must leave at most, to be worth its time.
_PACKED = 0.85
_FULL: dict[str, Any] = {"tokens": 256, "rounds": 3}
_QUICK: dict[str, Any] = {"tokens": 32, "rounds": 1}

#: A pipeline, and the cable before its second stage.
_Side: TypeAlias = tuple[Pipeline, FaultyProxy]


class WiresPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    name: str
    tokens: int
    rounds: int
    wires: tuple[Wire, ...]
    #: Megabits a second.
    rates: tuple[float, ...]
    #: Layer ranges of the two stages.
    split: tuple[str, ...]
    #: Floats per token of the boundary.
    width: int

    def row_name(self, wire: Wire, rate: float) -> str:
        return f"{wire} at {rate:g} Mbit/s"


@asynccontextmanager
async def _open_side(model: Path, plan: WiresPlan, wire: Wire) -> AsyncIterator[_Side]:
    context = ContextParams(n_ctx=1024, numerics=Numerics.SAME_CUTS, wire=wire)
    settings = {name: value for name, value in msgspec.structs.asdict(context).items() if name != "n_seq_max"}
    with tempfile.TemporaryDirectory() as folder:
        file = write_route(Path(folder) / "route.toml", model, plan.split, **settings)
        async with open_up(file), open_proxies(file.route) as (route, cables):
            connector = RemoteConnector(LinkPolicy())
            async with open_pipeline_on(connector, route, timeouts=PATIENCE, chunk=64) as pipeline:
                yield pipeline, cables[1]


async def _prefill(side: _Side, tokens: int, rate: float) -> tuple[float, int]:
    pipeline, cable = side
    cable.rate = rate * _MBIT
    before = _passed(cable)
    seconds = await prefill_seconds(pipeline, tokens)
    return seconds, _passed(cable) - before


def _passed(cable: FaultyProxy) -> int:
    return sum(relay.rightward.forwarded for relay in cable.relays)


@frozen
class Wires:
    """The benchmark."""

    plan: WiresPlan
    model: Path
    artifact: str
    kind: ClassVar[Kind] = "wires"
    title: ClassVar[str] = "Wire types over slow links"

    def subject(self) -> dict[str, Any]:
        return {"artifact": self.artifact, "model": self.model.name, "split": ",".join(self.plan.split)}

    def units(self, _: Store) -> Iterator[Group]:
        for wire in self.plan.wires:
            units = [
                Unit(f"{self.plan.row_name(wire, rate)}, round {number}", partial(self._round, rate, number), 1 / rate)
                for rate in self.plan.rates
                for number in range(self.plan.rounds)
            ]
            yield Group(units, partial(self._both, wire))

    @asynccontextmanager
    async def _both(self, wire: Wire) -> AsyncIterator[dict[str, _Side]]:
        async with AsyncExitStack() as stack:
            sides = {
                name: await stack.enter_async_context(_open_side(self.model, self.plan, kind))
                for name, kind in (("f32", Wire.F32), ("wire", wire))
            }
            for side in sides.values():
                await _prefill(side, 8, 1e6)  # links are made at first use
            yield sides

    async def _round(self, rate: float, number: int, sides: dict[str, _Side]) -> dict[str, Any]:
        found: dict[str, Any] = {"tokens": self.plan.tokens}
        for name in sorted(sides, reverse=bool(number % 2)):
            found[f"{name}_s"], found[f"{name}_bytes"] = await _prefill(sides[name], self.plan.tokens, rate)
        return found

    def _rows(self, units: Units) -> Iterator[tuple[Wire, float, list[dict[str, Any]]]]:
        for wire in self.plan.wires:
            for rate in self.plan.rates:
                names = (f"{self.plan.row_name(wire, rate)}, round {number}" for number in range(self.plan.rounds))
                if measured := [dict(units[name]) for name in names if "wire_s" in units.get(name, {})]:
                    yield wire, rate, measured

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """Per wire type and rate: tokens a second of both sides, their ratio, and bytes a token."""
        return {
            self.plan.row_name(wire, rate): {
                "ratio": quartiles_of([unit["f32_s"] / unit["wire_s"] for unit in measured]),
                "f32_tokens_per_s": quartiles_of([unit["tokens"] / unit["f32_s"] for unit in measured]),
                "wire_tokens_per_s": quartiles_of([unit["tokens"] / unit["wire_s"] for unit in measured]),
                "f32_bytes_per_token": quartiles_of([unit["f32_bytes"] / unit["tokens"] for unit in measured]),
                "wire_bytes_per_token": quartiles_of([unit["wire_bytes"] / unit["tokens"] for unit in measured]),
            }
            for wire, rate, measured in self._rows(units)
        }

    def checks(self, units: Units) -> list[Check]:
        """Bytes are not a matter of chance: they are the boundary's, and little beside it."""
        tally = Tally(
            "bytes on the cable are the boundary's",
            "every round within 2 % and 4 KiB of its residuals, of 85 % of them where they are packed",
        )
        for wire, rate, measured in self._rows(units):
            for unit in measured:
                for name, kind in (("f32", Wire.F32), ("wire", wire)):
                    boundary = unit["tokens"] * kind.row_bytes(self.plan.width)
                    least, most = (0.75, _PACKED) if kind.packs else (1.0, 1.0)
                    passed = unit[f"{name}_bytes"]
                    ok = least * boundary <= passed <= (most + _BESIDE) * boundary + 4096
                    tally.hold(ok, f"{self.plan.row_name(kind, rate)}: {passed} bytes, {boundary} of them residuals")
        return [no_error(units, "round"), tally.check()]

    def tables(self, result: Result) -> list[Section]:
        rows = []
        for wire, rate, _ in self._rows(result.units):
            found = msgspec.convert(result.metrics[self.plan.row_name(wire, rate)], dict[str, Quartiles])
            rows.append(
                (
                    f"{rate:g}",
                    wire.value,
                    f"{found['f32_bytes_per_token'].median:.0f}",
                    f"{found['wire_bytes_per_token'].median:.0f}",
                    f"{rate * _MBIT / found['f32_bytes_per_token'].median:.1f}",
                    f"{found['f32_tokens_per_s'].median:.1f}",
                    f"{found['wire_tokens_per_s'].median:.1f}",
                    found["ratio"],
                )
            )
        heads = (
            "Mbit/s", "wire", "bytes a token, f32", "bytes a token", "f32 tokens/s that the cable allows",
            "f32, tokens/s", "wire, tokens/s", "wire / f32",
        )  # fmt: skip
        said = f"Prompts of {self.plan.tokens} tokens in chunks of 64; medians, ratios of speed are per round."
        return [Section("Prefill over slow links", (said, table(heads, rows)))]

    def plots(self, result: Result) -> list[Plot]:
        found = {
            (wire, rate): result.metrics[self.plan.row_name(wire, rate)] for wire, rate, _ in self._rows(result.units)
        }

        def paint(axes: Axes) -> None:
            for place, wire in enumerate(self.plan.wires):
                rates = [rate for rate in self.plan.rates if (wire, rate) in found]
                ratios = [msgspec.convert(found[wire, rate]["ratio"], Quartiles).median for rate in rates]
                shade = (RED, BLUE, GREY, "black")[place % 4]
                axes.plot(rates, ratios, marker="o", color=shade, label=wire.value)
            axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.legend()

        return [Plot("Prefill", "wires", "Prefill over a slow link, against f32", "Mbit/s", "ratio of speed", paint)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="M", help="a GGUF (default: a fixture of V4 Flash's widths and four layers)"
    )
    add_rates_argument(parser)


def _wires(args: argparse.Namespace) -> Wires:
    model = Path(
        args.model or (cached_fixture(layers=7) if args.quick else cached_fixture("mixed", preset="flash", layers=4))
    )
    artifact = whole_model(model)
    n_layers = artifact.hp.n_layers
    half = max(2, n_layers // 2)
    plan = WiresPlan(
        name="wires, quick" if args.quick else "wires",
        **(_QUICK if args.quick else _FULL),
        wires=(Wire.F32_ZSTD, Wire.BF16, Wire.F16, Wire.Q8),
        rates=rates_of(args),
        split=(f"0:{half}", f"{half}:{n_layers}"),
        width=4 * artifact.hp.n_embd,
    )
    return Wires(plan, model, artifact.identity)


_HELP = "prefill over slow links: packed and rounded residuals against f32"
COMMAND = benchmark_command("wires", _HELP, __doc__ or "", _add_arguments, _wires)
