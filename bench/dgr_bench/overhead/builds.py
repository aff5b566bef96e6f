"""``dgr-bench builds``: this build of dgr against another one on the same machine, as portable kernels against native ones.

One stage of the whole model in each environment, a process that stays for all rounds of a comparison, one thread. The client
is this process for both, so what is compared is kernels. Both must speak the same wire schema.

``--other`` names the Python of the other environment: that where a wheel is installed, say.

Units are the comparisons' own (``dgr-bench overhead --help``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from attrs import frozen

from dgr import ContextParams, LayerRange, LinkPolicy, Numerics, Pipeline, Route, StageRef, open_pipeline_on
from dgr.cli.children import flags_of, spelled_out
from dgr.cli.versions import versions
from dgr.cluster.connect import RemoteConnector
from dgr.errors import InputError
from dgr.testing.network.processes import open_program
from dgr_bench.benchmark import Group, Store, Units, benchmark_command, no_error
from dgr_bench.overhead.ratios import Comparison, Ratios, Sides
from dgr_bench.plots import Plot
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import add_model_argument, model_of, whole_model
from dgr_bench.timed import decode_seconds, prefill_seconds
from dgr_bench.verdicts import Check

_PHASES: dict[str, Callable[[Pipeline, int], Any]] = {"prefill": prefill_seconds, "decode": decode_seconds}


class BuildsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

    name: str
    #: Tokens of a run, and rounds, of ``prefill`` and ``decode``.
    tokens: dict[str, int]
    rounds: dict[str, int]
    numerics: tuple[str, ...]

    def context(self, numerics: str) -> ContextParams:
        """Of both sides."""
        n_ctx = max(self.tokens.values()) + 64
        return ContextParams(
            n_ctx=n_ctx, n_batch=min(512, n_ctx), n_ubatch=min(512, n_ctx), numerics=Numerics(numerics)
        )


_FULL = {"tokens": {"prefill": 512, "decode": 64}, "rounds": {"prefill": 9, "decode": 9}}
_QUICK = {"tokens": {"prefill": 32, "decode": 4}, "rounds": {"prefill": 2, "decode": 2}}


@asynccontextmanager
async def _open_stage(
    model: Path, n_layers: int, context: ContextParams, python: str | None
) -> AsyncIterator[Pipeline]:
    """A pipeline over one stage of the whole model, a process of an environment; this one's by default."""
    flags = {
        "--layers": f"0:{n_layers}", "--listen": "127.0.0.1:0", "--threads": "1", "--ctx": context.n_ctx,
        "--batch": context.n_batch, "--ubatch": context.n_ubatch, "--numerics": context.numerics.value,
    }  # fmt: skip
    arguments = ("stage", spelled_out(model), "--json", *flags_of(flags))
    async with open_program(*arguments, python=python) as stage:
        told = await stage.first_line()
        route = Route((StageRef(str(told["address"]), LayerRange(0, n_layers)),))
        async with open_pipeline_on(RemoteConnector(LinkPolicy()), route) as pipeline:
            yield pipeline


@frozen
class Builds:
    """The benchmark."""

    plan: BuildsPlan
    compared: list[Comparison]
    about: dict[str, Any]
    kind: ClassVar[Kind] = "builds"
    title: ClassVar[str] = "Two builds"

    @property
    def ratios(self) -> Ratios:
        """The part that compares."""
        return Ratios(self.compared)

    def subject(self) -> dict[str, Any]:
        return self.about

    def units(self, _: Store) -> Iterator[Group]:
        yield from (each.group() for each in self.compared)

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        return {"speed": self.ratios.metrics(units)}

    def checks(self, units: Units) -> list[Check]:
        """Nothing is asked of the ratios."""
        return [no_error(units, "round")]

    def tables(self, result: Result) -> list[Section]:
        kernels = {side: json.loads(result.subject[side]) for side in ("ours", "theirs")}
        rows = [
            (side, "portable" if found["portable"] else "native", f"`{' '.join(found['instruction_sets'])}`")
            for side, found in kernels.items()
        ]
        both = Section("Builds", (table(("side", "kernels", "instruction sets"), rows),))
        return [both, self.ratios.section(result.metrics["speed"])]

    def plots(self, result: Result) -> list[Plot]:
        return [self.ratios.plot(result.metrics["speed"], "builds", "Speed of this build over the other's")]


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--other", required=True, metavar="PYTHON", help="the Python of the other environment")
    parser.add_argument(
        "--numerics", nargs="+", choices=("exact", "native"), default=("exact", "native"), help="default: both"
    )


def kernels_of(python: str) -> dict[str, Any]:
    """What the dgr of an environment says of its kernels. Raises :class:`~dgr.errors.InputError`."""
    command = [str(Path(python).with_name("dgr")), "--version", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        found: dict[str, Any] = json.loads(done.stdout)["kernels"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        raise InputError(
            f"--other {python} runs no dgr that tells its versions ({error}); install the wheel there"
        ) from error
    return found


def _comparisons(model: Path, n_layers: int, plan: BuildsPlan, other: str) -> list[Comparison]:
    @asynccontextmanager
    async def sides(phase: str, numerics: str) -> AsyncIterator[Sides]:
        context, seconds = plan.context(numerics), _PHASES[phase]
        async with AsyncExitStack() as stack:
            ours, theirs = [
                await stack.enter_async_context(_open_stage(model, n_layers, context, python))
                for python in (None, other)
            ]
            yield partial(seconds, ours, plan.tokens[phase]), partial(seconds, theirs, plan.tokens[phase])

    return [
        Comparison(
            f"{phase}, {numerics} numerics, this build / the other",
            plan.tokens[phase],
            plan.rounds[phase],
            None,
            partial(sides, phase, numerics),
        )
        for numerics in plan.numerics
        for phase in _PHASES
    ]


def _builds(args: argparse.Namespace) -> Builds:
    theirs, ours = kernels_of(args.other), versions()["kernels"]
    model = model_of(args)
    artifact = whole_model(model)
    plan = BuildsPlan(
        name="builds, quick" if args.quick else "builds",
        **(_QUICK if args.quick else _FULL),
        numerics=tuple(args.numerics),
    )
    about = {
        "model": model.name,
        "artifact": artifact.identity,
        "ours": json.dumps(ours),
        "theirs": json.dumps(theirs),
    }
    return Builds(plan, _comparisons(model, artifact.hp.n_layers, plan, args.other), about)


_HELP = "this build against another one: what portable kernels cost"
COMMAND = benchmark_command("builds", _HELP, __doc__ or "", _add_arguments, _builds)
