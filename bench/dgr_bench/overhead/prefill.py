"""``dgr-bench prefill``: one long prompt on a ring of stages, against what its stages themselves took.

Chunks of a prompt follow each other through the stages, so a prefill can take no less than the *slowest stage* computes in all,
and the *fill*: the first chunk's way to that stage and the last one's from there. Both are taken from the stages' own calls in
the same run, on the same busy cores; what is beyond them is the runtime's: a stage that waits for its next chunk.

Units:

``prefill, round N``
    ``seconds`` from the prompt to its last token's commit; ``stages``, head first: for each chunk its ``tokens``, and when the
    engine's call ``began`` and ``ended``, seconds since the prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from attrs import field, frozen

from dgr import Artifact, ContextParams, ShardEngine
from dgr.core.route import parse_split
from dgr.engine.base import Output, Work
from dgr.errors import InputError
from dgr.selftest.chain import cut_at, some_tokens
from dgr.testing.engines.mutants import Mutant
from dgr_bench.benchmark import Group, Store, Unit, Units, benchmark_command, no_error
from dgr_bench.plots import BLUE, Axes, Plot
from dgr_bench.quartiles import Quartiles, quartiles_of
from dgr_bench.reports import Section, table
from dgr_bench.results import Kind, Result
from dgr_bench.subjects import Stages, add_model_argument, model_of, open_stages, whole_model
from dgr_bench.verdicts import Check, Goal, judge

#: Of the time that a prefill takes, over fill and slowest stage.
_GOAL = Goal("at most", 1.1)


class PrefillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    name: str
    #: Layer ranges of the stages, one thread each.
    split: tuple[str, ...]
    #: Tokens of the prompt; and of a chunk, None: as a pipeline does by itself.
    prompt: int
    chunk: int | None
    rounds: int
    judged: bool


class _Watched(Mutant):
    """An engine that notes its calls; it changes nothing."""

    def __init__(self, engine: ShardEngine, calls: list[dict[str, float]]) -> None:
        super().__init__(engine)
        self._calls = calls

    def run(self, batch: Sequence[Work]) -> list[Output]:
        began = time.perf_counter()
        outputs = super().run(batch)
        tokens = sum(len(work.tokens) for work in batch)
        self._calls.append({"tokens": tokens, "began": began, "ended": time.perf_counter()})
        return outputs


@frozen
class Ring:
    """Stages, and the calls of each engine since they were last taken."""

    stages: Stages
    calls: Sequence[list[dict[str, float]]]

    async def prefill(self, plan: PrefillPlan) -> dict[str, Any]:
        """One unit."""
        for calls in self.calls:
            calls.clear()
        async with self.stages.pipeline(plan.chunk) as pipeline, pipeline.session() as session:
            began = time.perf_counter()
            await session.prefill(some_tokens(plan.prompt, pipeline.n_vocab))
            seconds = time.perf_counter() - began
        since = [
            [{**call, "began": call["began"] - began, "ended": call["ended"] - began} for call in calls]
            for calls in self.calls
        ]
        return {"seconds": seconds, "stages": since}


@frozen
class Bound:
    """What a prefill can take at least."""

    #: Index of the slowest stage, and seconds that it computed.
    slowest: int
    busy: float
    #: Seconds of the first chunk before that stage, and of the last one behind it.
    fill: float

    @classmethod
    def of(cls, stages: Sequence[Sequence[Mapping[str, float]]]) -> Bound:
        """From the calls of every stage."""
        took = [[call["ended"] - call["began"] for call in calls] for calls in stages]
        slowest = max(range(len(took)), key=lambda index: sum(took[index]))
        fill = sum(each[0] for each in took[:slowest]) + sum(each[-1] for each in took[slowest + 1 :])
        return cls(slowest, sum(took[slowest]), fill)

    @property
    def seconds(self) -> float:
        return self.busy + self.fill


@frozen
class Prefill:
    """The benchmark."""

    artifact: Artifact
    plan: PrefillPlan
    about: dict[str, Any] = field(factory=dict)
    kind: ClassVar[Kind] = "prefill"
    title: ClassVar[str] = "Prefill on a ring"

    def subject(self) -> dict[str, Any]:
        return self.about

    def units(self, _: Store) -> Iterator[Group]:
        async def measure(ring: Ring) -> dict[str, Any]:
            return await ring.prefill(self.plan)

        rounds = [Unit(f"prefill, round {number}", measure) for number in range(self.plan.rounds)]
        yield Group(rounds, partial(_open_ring, self.artifact, self.plan))

    def metrics(self, units: Units, _: Path | None = None) -> dict[str, Any]:
        """Quartiles over the rounds: seconds, what they could have been, the ratio; and how long each stage computed."""
        rounds = _measured(units)
        if not rounds:
            return {}
        bounds = [Bound.of(unit["stages"]) for unit in rounds]
        busy = [
            quartiles_of([sum(call["ended"] - call["began"] for call in unit["stages"][index]) for unit in rounds])
            for index in range(len(self.plan.split))
        ]
        return {
            "seconds": quartiles_of([unit["seconds"] for unit in rounds]),
            "slowest_s": quartiles_of([bound.busy for bound in bounds]),
            "fill_s": quartiles_of([bound.fill for bound in bounds]),
            "ratio": quartiles_of(
                [unit["seconds"] / bound.seconds for unit, bound in zip(rounds, bounds, strict=True)]
            ),
            "busy_s": dict(zip(self.plan.split, busy, strict=True)),
            "chunks": quartiles_of([len(unit["stages"][0]) for unit in rounds]),
        }

    def checks(self, units: Units) -> list[Check]:
        """The goal; and that every stage ran every token once."""
        ran = (
            (name, [sum(call["tokens"] for call in calls) for calls in unit["stages"]])
            for name, unit in units.items()
            if "stages" in unit
        )
        whole = judge(
            "every stage runs the prompt once",
            f"{self.plan.prompt} tokens on each of {len(self.plan.split)} stages",
            ((name, "" if {*tokens} == {self.plan.prompt} else f"{tokens} tokens") for name, tokens in ran),
        )
        found = [no_error(units, "round"), whole]
        if self.plan.judged and _measured(units):
            found.append(_GOAL.check("time over fill and slowest stage", self.metrics(units)["ratio"]))
        return found

    def tables(self, result: Result) -> list[Section]:
        if not result.metrics:
            return []
        found = msgspec.convert(
            {name: result.metrics[name] for name in ("seconds", "slowest_s", "fill_s", "ratio")}, dict[str, Quartiles]
        )
        said = f"A prompt of {self.plan.prompt} tokens; medians, with quartiles in brackets, the ratio per round."
        row = (found["seconds"], found["fill_s"], found["slowest_s"], found["ratio"], _GOAL if self.plan.judged else "")
        whole = table(("prefill, s", "fill, s", "slowest stage, s", "ratio", "goal"), [row])
        busy = msgspec.convert(result.metrics["busy_s"], dict[str, Quartiles])
        stages = table(("layers", "computed, s"), list(busy.items()))
        return [Section("Prefill", (said, whole, stages))]

    def plots(self, result: Result) -> list[Plot]:
        rounds = _measured(result.units)

        def paint(axes: Axes) -> None:
            for place, calls in enumerate(rounds[0]["stages"] if rounds else ()):
                for call in calls:
                    width = call["ended"] - call["began"]
                    axes.barh(place, width, 0.8, left=call["began"], color=BLUE, edgecolor="white")
            axes.set_yticks(range(len(self.plan.split)), self.plan.split)
            axes.invert_yaxis()

        return [Plot("Prefill", "prefill", "Chunks on each stage, first round", "seconds since the prompt", "", paint)]


def _measured(units: Units) -> list[Mapping[str, Any]]:
    """The rounds that were measured to their end."""
    return [unit for unit in units.values() if "stages" in unit]


@asynccontextmanager
async def _open_ring(artifact: Artifact, plan: PrefillPlan) -> AsyncIterator[Ring]:
    calls: list[list[dict[str, float]]] = [[] for _ in plan.split]
    ranges = parse_split(",".join(plan.split), artifact.hp.n_layers)
    context = ContextParams(n_ctx=-(-plan.prompt // 256) * 256)
    async with open_stages(artifact, ranges, context, lambda at, engine: _Watched(engine, calls[at])) as stages:
        ring = Ring(stages, calls)
        await ring.prefill(msgspec.structs.replace(plan, prompt=min(plan.prompt, 256)))  # warm
        yield ring


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--stages", type=int, default=3, metavar="K", help="stages of one thread each (default: 3)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of the prompt (default: 4096)")
    parser.add_argument(
        "--chunk", type=int, metavar="N", help="tokens of a chunk (default: as a pipeline does by itself)"
    )


def _prefill(args: argparse.Namespace) -> Prefill:
    model = model_of(args)
    artifact = whole_model(model)
    n_layers = artifact.hp.n_layers
    if not 1 <= args.stages <= n_layers:
        raise InputError(f"--stages {args.stages}: give 1 to {n_layers}, the layers of {model.name}")
    if args.tokens is not None and args.tokens < 1:
        raise InputError(f"--tokens {args.tokens}: give 1 or more")
    ranges = cut_at(n_layers, [n_layers * at // args.stages for at in range(1, args.stages)])
    plan = PrefillPlan(
        name="prefill, quick" if args.quick else "prefill",
        split=tuple(map(str, ranges)),
        prompt=args.tokens or (256 if args.quick else 4096),
        chunk=args.chunk,
        rounds=1 if args.quick else 3,
        judged=not args.quick,
    )
    return Prefill(artifact, plan, {"model": model.name, "artifact": artifact.identity})


_HELP = "a long prompt on a ring of stages, against its fill and the slowest stage"
COMMAND = benchmark_command("prefill", _HELP, __doc__ or "", _add_arguments, _prefill)
