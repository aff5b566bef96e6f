"""``dgr-bench servers``: ``dgr serve`` against upstream's own llama-server of the same pin, asked by the same clients.

Both serve the same file, each a process of its own that stays for all rounds of a comparison, with as many slots, equal
context, batch and sub-batch, flash attention and K-cache type, and weights read into memory. The clients are a third process
(``dgr_bench.overhead.load_client``): each streams one greedy answer at a time to prompts of its own. What is timed is all of
it, from the first question to the last token, prompts included.

dgr computes in exact numerics, llama-server in native ones; ``--numerics native`` for the same on both sides.

Units are the comparisons' own (``dgr-bench overhead --help``).
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import trio
from attrs import frozen

from dgr import ContextParams, Numerics
from dgr.cli.children import python_module, spelled_out
from dgr.engine.budget import available_cpus
from dgr.engine.native import build_info
from dgr.errors import EngineError, InputError
from dgr.selftest.chain import cut_at
from dgr.testing.network.processes import open_program
from dgr_bench.benchmark import Group, Store, Units, benchmark_command, no_error
from dgr_bench.overhead.ratios import Comparison, Ratios, Sides
from dgr_bench.plots import Plot
from dgr_bench.reports import Section
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import add_model_argument, model_of, whole_model
from dgr_bench.upstream.llama_server import LlamaServer
from dgr_bench.upstream.programs import add_program_argument, find_program
from dgr_bench.verdicts import Check, Goal

#: Speed over llama-server's, with one stage and that many clients or more.
_GOAL, _MANY = 1.0, 4
#: Token ids that clients make prompts of are below this one, or below the vocabulary's size.
_VOCABULARY = 4000


class ServersPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

    name: str
    clients: tuple[int, ...]
    #: Of a server of one stage, and of llama-server beside it.
    threads: tuple[int, ...]
    #: Layer ranges of two stages of one thread each, beside a llama-server with two.
    split: tuple[str, ...]
    #: Tokens of a prompt and of an answer; answers of each client in a run; rounds.
    prompt: int
    answer: int
    requests: int
    rounds: int
    #: Token ids of prompts are below.
    vocabulary: int
    numerics: str
    #: Whether anything is asked of the figures.
    judged: bool

    @property
    def context(self) -> ContextParams:
        """Of both sides."""
        n_ctx = max(-(-(self.prompt + self.answer) // 256) * 256, 256)
        return ContextParams(n_ctx=n_ctx, n_seq_max=max(self.clients), numerics=Numerics(self.numerics))


async def load_seconds(url: str, clients: int, plan: ServersPlan) -> float:
    """Seconds that a server takes for what ``clients`` ask. Raises :class:`~dgr.errors.EngineError` when an answer fails."""
    asked = {"clients": clients, "requests": plan.requests, "prompt": plan.prompt, "tokens": plan.answer}
    flags = [f"--{name}={value}" for name, value in (asked | {"vocabulary": plan.vocabulary}).items()]
    command = python_module("dgr_bench.overhead.load_client", url, *flags, "--json")
    ended = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if ended.returncode != 0:
        words = ended.stderr.decode(errors="replace").strip()[-400:]
        raise EngineError(f"{clients} clients of {url} got no answers: {words}")
    return float(msgspec.json.decode(ended.stdout)["seconds"])


@asynccontextmanager
async def dgr_serve(model: Path, context: ContextParams, split: str | None, threads: int) -> AsyncIterator[str]:
    """The address of ``dgr serve`` for the length of the block. ``split``: of its stages; None for one."""
    flags = [f"--model={spelled_out(model)}", f"--threads={threads}", f"--ctx={context.n_ctx}", "--prefixes=0"]
    flags += [f"--batch={context.n_batch}", f"--ubatch={context.n_ubatch}", f"--sessions={context.n_seq_max}"]
    flags += [f"--numerics={context.numerics.value}", "--listen=127.0.0.1:0", "--json"]
    if split is not None:
        flags.append(f"--split={split}")
    async with open_program("serve", *flags) as program:
        yield (await program.first_line())["url"]


def comparisons(model: Path, plan: ServersPlan, llama_server: Path) -> list[Comparison]:
    """Everything that a plan compares."""
    commit, split = build_info()["llama_cpp_commit"], ",".join(plan.split)

    @asynccontextmanager
    async def sides(clients: int, cut: str | None, threads: int, theirs: int) -> AsyncIterator[Sides]:
        server = LlamaServer(llama_server, commit, model, plan.context, theirs)
        async with dgr_serve(model, plan.context, cut, threads) as ours, server.running() as other:
            yield partial(load_seconds, ours, clients, plan), partial(load_seconds, other, clients, plan)

    layouts: list[tuple[str, str | None, int, int]] = [
        (f"one stage / llama-server, {n} thread{'s' * (n > 1)}", None, n, n) for n in plan.threads
    ]
    layouts.append(("two stages of 1 thread / llama-server, 2 threads", split, 1, 2))
    found = []
    for words, cut, threads, theirs in layouts:
        for clients in plan.clients:
            asked = Goal("at least", _GOAL) if plan.judged and cut is None and clients >= _MANY else None
            opened = partial(sides, clients, cut, threads, theirs)
            tokens = clients * plan.requests * plan.answer
            found.append(
                Comparison(f"{clients} client{'s' * (clients > 1)}, {words}", tokens, plan.rounds, asked, opened)
            )
    return found


@frozen
class Servers:
    """The benchmark."""

    plan: ServersPlan
    ratios: Ratios
    about: dict[str, Any]
    kind: ClassVar[Kind] = "servers"
    title: ClassVar[str] = "Servers"

    def subject(self) -> dict[str, Any]:
        return self.about

    def units(self, _: Store) -> Iterator[Group]:
        yield from (each.group() for each in self.ratios.compared)

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return {"speed": self.ratios.metrics(units)}

    def checks(self, units: Units) -> list[Check]:
        """Every goal."""
        return [no_error(units, "round"), *self.ratios.checks(units)]

    def tables(self, result: Result) -> list[Section]:
        return [self.ratios.section(result.metrics["speed"])]

    def plots(self, result: Result) -> list[Plot]:
        return [self.ratios.plot(result.metrics["speed"], "servers", "Speed of dgr serve over llama-server's")]


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    numerics = [each.value for each in Numerics]
    parser.add_argument("--numerics", choices=numerics, default="exact", help="of dgr's side (default: exact)")
    add_program_argument(parser, "llama-server")


def _servers(args: argparse.Namespace) -> Servers:
    cpus = available_cpus()
    if cpus < 2:
        raise InputError(f"this process may use {cpus} CPU; two stages of one thread each need 2")
    model = model_of(args)
    artifact = whole_model(model)
    plan = ServersPlan(
        name="servers, quick" if args.quick else "servers",
        clients=(1, 2) if args.quick else (1, 4, 8),
        threads=(1,) if args.quick else (1, 2),
        split=tuple(str(layers) for layers in cut_at(artifact.hp.n_layers, [artifact.hp.n_layers // 2])),
        prompt=32,
        answer=16 if args.quick else 64,
        requests=1,
        rounds=1 if args.quick else 3,
        vocabulary=min(_VOCABULARY, artifact.hp.n_vocab),
        numerics=args.numerics,
        judged=not args.quick,
    )
    compared = comparisons(model, plan, find_program("llama-server", args.llama_server))
    return Servers(plan, Ratios(compared), {"model": model.name, "artifact": artifact.identity})


_HELP = "dgr serve against upstream's llama-server, asked by the same clients"
COMMAND = benchmark_command("servers", _HELP, __doc__ or "", _add_arguments, _servers)
