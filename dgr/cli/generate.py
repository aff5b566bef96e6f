"""``dgr generate``: a prompt through a pipeline of stages in this process."""

from __future__ import annotations

import argparse
import hashlib
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import msgspec
import trio

from dgr.cli.options import add_ahead_argument, add_link_arguments, add_model_arguments, placement_of
from dgr.cli.pipelines import add_route_argument, check_wait, enter_waiting, open_either
from dgr.cli.progress import Activity, progress_bar, say_above
from dgr.cli.streams import print_json, read_prompt
from dgr.client.events import Event, PrefillProgress, RouteChanged, drain
from dgr.client.generation import MOST_AHEAD, GeneratedToken
from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.local import open_pipeline
from dgr.core.arguments import check_whole
from dgr.core.units import human_bytes
from dgr.core.values import SamplingParams
from dgr.protocol.sampling import check_sampling
from dgr.stage.shard import Shard
from dgr.wire.nurseries import open_nursery

__all__ = ["logits_digest", "register", "run"]

#: Flags of stages that the pipeline of ``--verify`` takes, which is in this process also with ``--route``.
_OF_THE_COMPARISON = ("threads", "mmap", "device", "gpu_layers")


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt through a pipeline of stages",
        description="Answer a prompt through a pipeline of layer-range stages in this process. Greedy unless --temp is"
        " given; tokens are printed as they come.",
    )
    add_route_argument(parser)
    add_model_arguments(parser)
    add_link_arguments(parser)
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="with --route: wait this long for stages that are not up yet, and for a route that is not live"
        f" (default: none at the start, {Timeouts().route:g} later)",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads standard input")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=64, metavar="N", help="most tokens to draw (default: 64)"
    )
    add_ahead_argument(parser)
    parser.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature; 0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to mass P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the likeliest")
    parser.add_argument("--repeat-penalty", type=float, default=1.0, metavar="X", help="1: off")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws (default: 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the pipeline's logits with the whole model's; where residuals are rounded (--wire), with those of the"
        " same cuts in other chunks",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Looked at before anything is loaded; no number depends on a vocabulary.
    check_sampling(_sampling(args), n_vocab=1)
    check_whole("max_tokens", args.max_tokens, 0)
    check_whole("ahead", args.ahead, 0, MOST_AHEAD)
    return trio.run(_generate, args, read_prompt(args.prompt))


def _sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        seed=args.seed,
    )


async def _generate(args: argparse.Namespace, prompt: str) -> int:
    shards: list[Shard] = []
    check_wait(args.wait, has_route=args.route is not None)
    timeouts = Timeouts() if args.wait is None else Timeouts(route=args.wait)
    async with AsyncExitStack() as stack:
        with progress_bar("opening the stages"):
            own = _OF_THE_COMPARISON if args.verify else ()
            opened = partial(open_either, args, shards.append, timeouts=timeouts, own=own)
            pipeline = await enter_waiting(stack, opened, args.wait)
        stages = [_stage(shard) for shard in shards] if shards else _remote_stages(pipeline)
        if not args.json:
            _print_stages(stages)
        events = pipeline.events()
        with progress_bar("prefill", _tokens) as activity:
            answer = await _answer(args, pipeline, prompt, activity)
        reported = [_event(event) for event in drain(events) if not isinstance(event, PrefillProgress)]
        verdict = None
        if args.verify:
            with progress_bar("running the model again to compare"):
                verdict = await _verify(args, pipeline, answer["prompt_tokens"] + answer["tokens"])
    result = {**answer, "stages": stages, "events": reported, "verified": verdict}
    if args.json:
        print_json(result)
    else:
        _print_end(result)
    return 0 if verdict is None or verdict["equal"] else 1


async def _answer(
    args: argparse.Namespace, pipeline: Pipeline, prompt: str, activity: Activity | None
) -> dict[str, Any]:
    """Take one turn, and show the answer as it comes, or how far it is where it is kept for the end."""
    tokens: list[GeneratedToken] = []
    async with pipeline.session() as session, open_nursery() as nursery:
        if activity is not None:
            nursery.start_soon(_show_prefill, pipeline.events(), activity)
        generation = session.generate(
            prompt,
            max_tokens=args.max_tokens,
            sampling=_sampling(args),
            stop=() if args.ignore_eos else None,
            ahead=args.ahead,
        )
        n_prompt = len(session.transcript)
        began = first = trio.current_time()
        async for token in generation:
            if not tokens:
                first = trio.current_time()
            tokens.append(token)
            _show_token(args, token, len(tokens), activity)
        if not args.json:
            say_above(activity, generation.tail, end="", rest=True)
        ended = trio.current_time()
        transcript = list(session.transcript)
        nursery.cancel_scope.cancel()
    return {
        "prompt_tokens": transcript[:n_prompt],
        "tokens": [token.id for token in tokens],
        "text": "".join(token.text for token in tokens) + generation.tail,
        "finish_reason": generation.finish_reason,
        "seconds": {"to_first_token": first - began, "decode": ended - first},
    }


def _tokens(count: int) -> str:
    return f"{count} tokens"


async def _show_prefill(events: trio.MemoryReceiveChannel[Event], activity: Activity) -> None:
    async for event in events:
        if isinstance(event, PrefillProgress) and event.committed < event.total:  # the answer shows the end
            activity(event.committed, event.total)


def _show_token(args: argparse.Namespace, token: GeneratedToken, count: int, activity: Activity | None) -> None:
    shows = not args.json and sys.stdout.isatty()
    if not args.json:
        say_above(activity, token.text, end="", rest=shows)
    if activity is not None and not shows:
        if count == 1:
            activity.about("answer")
        activity(count, args.max_tokens)


def _stage(shard: Shard) -> dict[str, Any]:
    memory = shard.ledger.memory
    return {
        "name": shard.name,
        "layers": str(shard.description.layers),
        "weights_bytes": memory.weights,
        "state_bytes": sum(memory.state.values()),
        "state": dict(memory.state),
        "compute_bytes": memory.compute,
        "device_bytes": {name: device.total for name, device in memory.devices.items()},
        "devices": list(shard.description.devices),
    }


def _remote_stages(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Stages elsewhere; what they take is their own hosts' business (``dgr stage`` prints it there)."""
    return [{"name": ref.address, "layers": str(ref.layers)} for ref in pipeline.route.stages]


def _print_stages(stages: list[dict[str, Any]]) -> None:
    for stage in stages:
        if "weights_bytes" not in stage:
            print(f"stage {stage['name']} layers {stage['layers']}")
            continue
        print(
            f"{stage['name']:<9} layers {stage['layers']:<6} weights {human_bytes(stage['weights_bytes']):>11}"
            f"   state {human_bytes(stage['state_bytes']):>11}   compute {human_bytes(stage['compute_bytes']):>11}"
            + "".join(f"   {human_bytes(size)} on {name}" for name, size in stage["device_bytes"].items())
        )
    print()


def _print_end(result: dict[str, Any]) -> None:
    n_prompt, n_tokens = len(result["prompt_tokens"]), len(result["tokens"])
    seconds = result["seconds"]
    rate = f", {(n_tokens - 1) / seconds['decode']:.1f} tokens/s" if n_tokens > 1 and seconds["decode"] > 0 else ""
    print(
        f"\n\n{n_prompt} prompt tokens, first token after {seconds['to_first_token']:.2f} s; {n_tokens} tokens{rate}",
        end="",
    )
    print(f"; ended by {result['finish_reason']}")
    verdict = result["verified"]
    if verdict is not None and verdict["equal"]:
        print(f"logits of all {verdict['rows']} positions equal {verdict['with']}, bit for bit ({verdict['digest']})")
    elif verdict is not None:
        print(f"logits DIFFER from {verdict['with']}: {verdict['digest']} is not {verdict['other_digest']}")
        if not verdict["promised"]:
            print("native numerics do not promise that they are equal")


def _event(event: Event) -> dict[str, Any]:
    fields = attrs.asdict(event, recurse=False)
    if isinstance(event, RouteChanged):
        fields["route"] = str(event.route)
    return {"event": type(event).__name__, **fields}


async def logits_digest(pipeline: Pipeline, tokens: list[int]) -> tuple[str, int]:
    """(digest, rows) of the logits of every token, through a fresh session."""
    digest = hashlib.blake2b(digest_size=16)
    rows = 0

    def take(_position: int, values: memoryview) -> None:
        nonlocal rows
        digest.update(values)
        rows += values.nbytes // (4 * pipeline.n_vocab)

    async with pipeline.session() as session:
        await session.logits(tokens, take)
    return digest.hexdigest(), rows


async def _verify(args: argparse.Namespace, pipeline: Pipeline, transcript: list[int]) -> dict[str, Any]:
    """Compare with the whole model; where the wire rounds, with what is promised then: the same cuts in other chunks."""
    ours, rows = await logits_digest(pipeline, transcript)
    context = msgspec.structs.replace(pipeline.context, n_seq_max=1)
    cuts, chunk, other = None, None, "the whole model's"
    if context.wire.rounds:
        cuts = ",".join(str(stage.layers) for stage in pipeline.route.stages)
        chunk = max(1, min(context.n_ubatch, context.n_batch, len(transcript)) // 2)
        other = f"those of the same cuts in chunks of {chunk}"
    placed = placement_of(args)
    async with open_pipeline(
        args.model, cuts, context=context, threads=args.threads, mmap=args.mmap, placement=placed, chunk=chunk
    ) as again:
        theirs, _ = await logits_digest(again, transcript)
    return {
        "equal": ours == theirs,
        "rows": rows,
        "digest": ours,
        "other_digest": theirs,
        "with": other,
        "promised": context.numerics.exact_kernels,
    }
