"""``dgr trace``: one request, and where its time went on every stage, between them and on the client."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

import trio

from dgr.cli.options import add_link_arguments, add_model_arguments
from dgr.cli.pipelines import add_route_argument, open_either
from dgr.cli.progress import progress_bar
from dgr.cli.streams import json_line, read_prompt
from dgr.cli.summary import print_beside
from dgr.cli.tables import render_table
from dgr.client.tracing import Trace
from dgr.core.arguments import check_whole
from dgr.core.files.outputs import writing
from dgr.core.files.targets import find_target
from dgr.serving.tracing.account import Account, account_of
from dgr.serving.tracing.perfetto import perfetto_json
from dgr.serving.tracing.spans import CLIENT, Part

__all__ = ["register", "run", "summary"]

#: Parts in the order of a frame's life, and what they are called.
_PARTS = {
    Part.WIRE: "wire",
    Part.QUEUE: "queue",
    Part.WAIT: "wait",
    Part.COMPUTE: "compute",
    Part.RESULT: "result",
    Part.CLIENT: "client",
}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "trace",
        help="where the time of one request goes",
        description="Answer a prompt, greedily, and tell where the time went: computing, waiting and on the wire, for each"
        " stage; and write it as a file for ui.perfetto.dev or chrome://tracing. Neither holds a word of prompt or answer.",
    )
    add_route_argument(parser)
    add_model_arguments(parser)
    add_link_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the prompt; - reads standard input")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=32, metavar="N", help="most tokens to draw (default: 32)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    parser.add_argument("-o", "--out", metavar="FILE.json", help="where to write the trace (default: nowhere)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    target = None if args.out is None else find_target(args.out)
    if target is not None:
        target.check_apart(*(path for path in (args.model, args.route) if path is not None))
    prompt = read_prompt(args.prompt)
    check_whole("max_tokens", args.max_tokens, 0)
    with ExitStack() as stack:
        # Opened first: a place that cannot be written is told before the model is loaded.
        file = None if target is None else stack.enter_context(writing(target))
        trace = trio.run(_trace, args, prompt)
        if file is not None:
            file.write(perfetto_json(trace))
    told = {**summary(trace), "out": args.out}
    text = json_line(told) if args.json else _tables(trace, told)
    if target is None:
        print(text)
    else:
        print_beside(target, text if args.json else f"{text}\n\n{args.out}: open it at https://ui.perfetto.dev")
    return 0


async def _trace(args: argparse.Namespace, prompt: str) -> Trace:
    with progress_bar("opening the stages") as activity:
        async with open_either(args) as pipeline, pipeline.session() as session:
            if activity is not None:
                activity.about("answer")
            trace = pipeline.tracer.begin()
            with trace.of(session):
                answer = session.generate(prompt, max_tokens=args.max_tokens, stop=() if args.ignore_eos else None)
                async for _ in answer:
                    pass
            return await pipeline.tracer.finish(trace)


def summary(trace: Trace) -> dict[str, Any]:
    """What a trace comes to, seconds; ``prefill`` and ``decode`` as of :class:`~dgr.serving.tracing.account.Account`."""
    prefill, decode = account_of(trace)
    return {
        "trace": trace.id.hex(),
        "prefill": _account(trace, prefill),
        "decode": {**_account(trace, decode), "unexplained": decode.unexplained},
        "clocks": [
            {
                "stage": stage.address,
                "offset": None if stage.clock is None else stage.clock.offset,
                "error": None if stage.clock is None else stage.clock.error,
                "records_dropped": stage.dropped,
                "problem": stage.problem,
            }
            for stage in trace.stages
        ],
    }


def _account(trace: Trace, account: Account) -> dict[str, Any]:
    where = [*(stage.address for stage in trace.stages), CLIENT]
    return {
        "frames": account.frames,
        "incomplete": account.incomplete,
        "measured": account.measured,
        "parts": {
            one: {part.value: account.parts[one, part] for part in Part if (one, part) in account.parts}
            for one in where
        },
    }


def _tables(trace: Trace, told: dict[str, Any]) -> str:
    prefill, decode = told["prefill"], told["decode"]
    texts = []
    if prefill["frames"]:
        took = f"{prefill['measured'] * 1000:.2f} ms from the first one sent to the last reply"
        texts.append(f"prompt: {_count(prefill['frames'], 'chunk')}, {took}; ms a chunk\n{_table(trace, prefill)}")
    if decode["frames"]:
        each = decode["measured"] / decode["frames"] * 1000
        count = _count(decode["frames"], "token")
        text = f"answer: {count} after the first, {each:.3f} ms each; ms a token\n{_table(trace, decode)}"
        share = decode["unexplained"] / decode["measured"] if decode["measured"] else 0.0
        text += f"\nunexplained: {decode['unexplained'] / decode['frames'] * 1000:.3f} ms a token ({share:.1%})"
        texts.append(text)
    missing = prefill["incomplete"] + decode["incomplete"]
    if missing:
        texts.append(f"of {_count(missing, 'work frame')} not every stage told when it did what")
    clocks = []
    for clock in told["clocks"]:
        if clock["offset"] is None:
            clocks.append(f"{clock['stage']}: {clock['problem']}")
        else:
            clocks.append(
                f"{clock['stage']}: its clock is at {clock['offset']:+.6f} s against this one,"
                f" known to ±{clock['error'] * 1e3:.3f} ms"
            )
    clocks.append("each process counts from a moment of its own: what counts is how well the difference is known")
    return "\n\n".join([*texts, "\n".join(clocks)])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(trace: Trace, account: dict[str, Any]) -> str:
    rows = [["WHERE", "LAYERS", *(name.upper() for name in _PARTS.values()), "SUM", "SHARE"]]
    layers = {stage.address: str(stage.layers) for stage in trace.stages}
    total = sum(sum(parts.values()) for parts in account["parts"].values())
    sums = dict.fromkeys(_PARTS, 0.0)
    for where, parts in account["parts"].items():
        for part in _PARTS:
            sums[part] += parts.get(part.value, 0.0)
        rows.append([where, layers.get(where, ""), *_row(parts, account["frames"], total)])
    rows.append(["all", "", *_row({part.value: value for part, value in sums.items()}, account["frames"], total)])
    return render_table(rows, range(2, len(rows[0])))


def _row(parts: dict[str, float], frames: int, total: float) -> list[str]:
    each = [f"{parts[part.value] / frames * 1000:.3f}" if part.value in parts else "" for part in _PARTS]
    whole = sum(parts.values())
    return [*each, f"{whole / frames * 1000:.3f}", f"{whole / total:.1%}" if total else ""]
