"""``dgr-bench peers``: dgr over processes against upstream's RPC backend over as many, on one artifact and like cables.

On one side stage processes of one thread each and a client; on the other ``ggml-rpc-server`` processes of one thread each and
a llama-bench that holds no layer itself, both of the unpatched pin with the same batch, sub-batch, K-cache type and flash
attention. Every process has a cable before it (a relay on loopback) with the same delay each way. Rounds alternate, and so
does who begins. llama-bench's times hold no start, load or warm-up, and it draws no token.

dgr computes in exact numerics, upstream in native ones; ``--numerics native`` for the same on both sides.

Bytes and turns (how often bytes go the other way than those before them) are counted on the cables, both ways, all of them
together: on our side while tokens are drawn, on the other as the difference of two runs, of which one draws twice as many.

Units:

``PHASE, delay D ms, round N``
    ``tokens``; ``ours_s`` and ``theirs_s``; ``began``: the side that began.
``traffic/CONTEXT``
    ``tokens``; ``ours_bytes``, ``ours_turns``, ``theirs_bytes``, ``theirs_turns`` of them, after so many others.
``alone/N``
    One process of one thread that holds the whole model: ``decode_tokens``, ``decode_s``, ``prefill_tokens``, ``prefill_s`` of
    llama-bench; ``server_decode_s``, ``server_prefill_s`` of llama-server for as many, as it says itself.
``kill``
    ``ours``: ``next_token_s`` (from the kill of the last stage to the next token), ``tokens`` that came of ``asked``;
    ``theirs``: ``exit_code`` of llama-bench (negative: a signal), ``ended_s`` after the kill of a server, ``said`` at last.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from attrs import frozen

from dgr import Numerics
from dgr.engine.budget import available_cpus
from dgr.engine.native import build_info
from dgr.errors import InputError
from dgr.selftest.chain import cut_at
from dgr.selftest.fixture.cached import cached_fixture
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.peers.measurements import PeersPlan, alone, kill, open_sides, speed_round, traffic_at
from dgr_bench.plots import BLUE, GREY, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import add_model_argument, whole_model
from dgr_bench.upstream.programs import add_program_argument, bench_beside, check_pin, find_program
from dgr_bench.verdicts import Check, Goal, Tally

_FULL: dict[str, Any] = {"prefill": 512, "decode": 32, "rounds": 5, "contexts": (0, 512, 1024)}
_QUICK: dict[str, Any] = {"prefill": 64, "decode": 4, "rounds": 1, "contexts": (0,)}
_PHASES = ("decode", "prefill")
#: Programs that hold the whole model, and how their seconds are called in a unit.
_ALONE = {"llama-bench": "", "llama-server": "server_"}


def row_name(phase: str, delay: float) -> str:
    """As the rows of speed are called."""
    return f"{phase}, delay {delay:g} ms"


_GOALS = {
    row_name("decode", 0): Goal("at least", 1.25),
    row_name("decode", 10): Goal("at least", 2.5),
    row_name("prefill", 0): Goal("at least", 1.0),
}


@frozen
class Peers:
    """The benchmark."""

    plan: PeersPlan
    model: Path
    artifact: str
    rpc_server: Path
    llama_server: Path
    kind: ClassVar[Kind] = "peers"
    title: ClassVar[str] = "Peers"

    def subject(self) -> dict[str, Any]:
        return {
            "artifact": self.artifact,
            "model": self.model.name,
            "split": ",".join(self.plan.split),
            "numerics": self.plan.numerics,
        }

    def units(self, _: Store) -> Iterator[Group]:
        plan, rounds = self.plan, range(self.plan.rounds)
        alone_units = [
            Unit(f"alone/{number}", lambda _opened: alone(plan, self.model, self.rpc_server, self.llama_server))
            for number in rounds
        ]
        speed = [
            Unit(f"{row_name(phase, delay)}, round {number}", partial(speed_round, plan, phase, delay, number))
            for delay in plan.delays
            for phase in _PHASES
            for number in rounds
        ]
        traffic = [Unit(f"traffic/{context}", partial(traffic_at, plan, context)) for context in plan.contexts]
        opened = partial(open_sides, self.model, plan, self.rpc_server)
        yield Group(alone_units)
        yield Group([*speed, *traffic], opened)
        yield Group([Unit("kill", partial(kill, plan))], opened)

    # --- what follows ---

    def _rounds(self, phase: str, delay: float, units: Units) -> list[dict[str, Any]]:
        names = (f"{row_name(phase, delay)}, round {number}" for number in range(self.plan.rounds))
        return [dict(units[name]) for name in names if "theirs_s" in units.get(name, {})]

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """Speed of both sides by phase and delay, their ratio; delays that a token waits for; bytes and turns; the kill."""
        found: dict[str, Any] = {"speed": {}, "traffic": {}, "delays_per_token": {}}
        for delay in self.plan.delays:
            for phase in _PHASES:
                if measured := self._rounds(phase, delay, units):
                    found["speed"][row_name(phase, delay)] = {
                        "ratio": quartiles_of([unit["theirs_s"] / unit["ours_s"] for unit in measured]),
                        "ours_tokens_per_s": quartiles_of([unit["tokens"] / unit["ours_s"] for unit in measured]),
                        "theirs_tokens_per_s": quartiles_of([unit["tokens"] / unit["theirs_s"] for unit in measured]),
                    }
        for context in self.plan.contexts:
            unit = units.get(f"traffic/{context}", {})
            if "tokens" in unit:
                found["traffic"][str(context)] = {
                    key: unit[key] / unit["tokens"] for key in unit if key.endswith(("_bytes", "_turns"))
                }
        if (longest := max(self.plan.delays)) > 0:
            near, far = (self._rounds("decode", delay, units) for delay in (0.0, longest))
            for side in ("ours", "theirs") if near and far else ():
                a, b = (quartiles_of([1e3 * unit[f"{side}_s"] / unit["tokens"] for unit in row]) for row in (near, far))
                found["delays_per_token"][side] = (b.median - a.median) / longest
        if rows := [unit for name, unit in units.items() if name.startswith("alone/") and "decode_s" in unit]:
            found["alone"] = {
                program: {
                    phase: quartiles_of([unit[f"{phase}_tokens"] / unit[f"{prefix}{phase}_s"] for unit in rows])
                    for phase in _PHASES
                }
                for program, prefix in _ALONE.items()
            }
        if "ours" in units.get("kill", {}):
            found["kill"] = dict(units["kill"])
        return found

    def checks(self, units: Units) -> list[Check]:
        """Everything was measured, our answer survives, and the goals."""
        found = self.metrics(units)
        survived = Tally("an answer survives the loss of a process", "every token that was asked for came")
        if "kill" in found:
            ours = found["kill"]["ours"]
            survived.same("tokens", ours["tokens"], ours["asked"])
        speed = found["speed"]
        goals = [
            goal.check(f"speed of {name}", speed[name]["ratio"])
            for name, goal in _GOALS.items()
            if name in self.plan.goals and name in speed
        ]
        return [no_error(units, "unit"), survived.check(), *goals]

    def tables(self, result: Result) -> list[Section]:
        found = result.metrics
        rows: list[tuple[Any, ...]] = []
        for name, row in found["speed"].items():
            speed = msgspec.convert(row, dict[str, Quartiles])
            ours, theirs = (f"{speed[f'{side}_tokens_per_s'].median:.1f}" for side in ("ours", "theirs"))
            rows.append((f"{name}, tokens/s", ours, theirs, speed["ratio"], self.plan.goals.get(name, "")))
        for context, traffic in found["traffic"].items():
            for key, words, unit in (("bytes", "KiB", 1024), ("turns", "turns", 1)):
                ours_n, theirs_n = (traffic[f"{side}_{key}"] / unit for side in ("ours", "theirs"))
                rows.append((f"{words} a token after {context}", f"{ours_n:.1f}", f"{theirs_n:.1f}", "", ""))
        if waits := found["delays_per_token"]:
            rows.append(
                (
                    "one-way delays that a token waits for",
                    *(f"{waits[side]:.1f}" for side in ("ours", "theirs")),
                    "",
                    "",
                )
            )
        if "kill" in found:
            ours_kill, theirs_kill = found["kill"]["ours"], found["kill"]["theirs"]
            code = theirs_kill["exit_code"]
            how = (
                "still waiting after a minute"
                if code is None
                else f"ends with {code} after {theirs_kill['ended_s']:.1f} s"
            )
            rows.append(("a process is killed", f"next token after {ours_kill['next_token_s']:.1f} s", how, "", ""))
        said = [
            f"Processes of one thread each, dgr in {self.plan.numerics} numerics; medians, ratios of speed by round.",
            table(("", "dgr", "RPC backend", "dgr / RPC", "goal"), rows),
        ]
        if "alone" in found:
            whole = msgspec.convert(found["alone"], dict[str, dict[str, Quartiles]])
            said.append("One process of one thread that holds the whole model:")
            said.append(
                table(
                    ("", "decode, tokens/s", "prefill, tokens/s"),
                    [(program, *(f"{row[phase].median:.1f}" for phase in _PHASES)) for program, row in whole.items()],
                )
            )
        return [Section("dgr beside llama.cpp's RPC backend", tuple(said))]

    def plots(self, result: Result) -> list[Plot]:
        speed = {name: msgspec.convert(row, dict[str, Quartiles]) for name, row in result.metrics["speed"].items()}

        def paint(axes: Axes) -> None:
            for place, row in enumerate(speed.values()):
                for shift, (side, shade) in enumerate((("ours", BLUE), ("theirs", GREY))):
                    label = {"ours": "dgr", "theirs": "RPC backend"}[side] if place == 0 else None
                    axes.bar(place + 0.4 * shift, row[f"{side}_tokens_per_s"].median, 0.38, color=shade, label=label)
            axes.set_xticks([place + 0.2 for place in range(len(speed))], [name.replace(", ", "\n") for name in speed])
            axes.set_yscale("log")
            axes.legend()

        return [Plot("Speed", "peers", "dgr beside llama.cpp's RPC backend", "", "tokens/s", paint)]


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--delays",
        type=float,
        nargs="+",
        default=(0.0, 10.0),
        metavar="MS",
        help="of every cable, each way (default: 0 10)",
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="stages, and servers (default: 2)")
    numerics = [each.value for each in Numerics]
    parser.add_argument("--numerics", choices=numerics, default="exact", help="of dgr's side (default: exact)")
    add_program_argument(parser, "rpc-server")
    add_program_argument(parser, "llama-server")


def _peers(args: argparse.Namespace) -> Peers:
    if not all(0 <= delay <= 1000 for delay in args.delays):
        raise InputError(
            f"--delays {' '.join(f'{delay:g}' for delay in args.delays)}: give milliseconds from 0 to 1000"
        )
    cpus = available_cpus()
    if not 2 <= args.processes <= cpus:
        raise InputError(f"--processes {args.processes}: give 2 to {cpus}, the CPUs this process may use")
    model = Path(args.model or (cached_fixture(layers=7) if args.quick else cached_fixture("mixed", preset="big")))
    artifact = whole_model(model)
    n_layers = artifact.hp.n_layers
    cuts = [n_layers * index // args.processes for index in range(1, args.processes)]
    delays = tuple(sorted({0.0, *args.delays}))
    rows = {row_name(phase, delay) for phase in _PHASES for delay in delays}
    plan = PeersPlan(
        name="peers, quick" if args.quick else "peers",
        **(_QUICK if args.quick else _FULL),
        delays=delays,
        split=tuple(map(str, cut_at(n_layers, cuts))),
        n_vocab=artifact.hp.n_vocab,
        numerics=args.numerics,
        # The small model is all overhead: --quick shows that everything runs.
        goals={} if args.quick else {name: str(goal) for name, goal in _GOALS.items() if name in rows},
    )
    rpc_server = find_program("rpc-server", args.rpc_server)
    # The server itself tells no commit; the llama-bench that was built with it does.
    check_pin(bench_beside(rpc_server), "rpc-server", build_info()["llama_cpp_commit"])
    llama_server = find_program("llama-server", args.llama_server)
    return Peers(plan, model, artifact.identity, rpc_server, llama_server)


_HELP = "dgr over processes against llama.cpp's RPC backend: speed, bytes, delays, a killed process"
COMMAND = benchmark_command("peers", _HELP, __doc__ or "", _add_arguments, _peers)
