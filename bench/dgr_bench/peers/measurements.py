"""Both ways to spread a model over processes, with a cable of the same kind before each of them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import frozen

from dgr import ClientSession, ContextParams, Pipeline, SamplingParams, open_pipeline_on
from dgr.client.generation import AHEAD
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.core.values import Numerics
from dgr.engine.native import build_info
from dgr.selftest.chain import some_tokens
from dgr.testing.network.processes import Program, open_up, write_route
from dgr.testing.network.proxy import FaultyProxy, open_proxies, open_proxy
from dgr_bench.peers.rpc import RpcBench, Server, open_servers
from dgr_bench.subjects import PATIENCE
from dgr_bench.upstream.llama_bench import LlamaBench
from dgr_bench.upstream.llama_server import LlamaServer, timings_of
from dgr_bench.upstream.programs import bench_beside

#: Tokens of an answer in which a stage is killed, and how many of them come before it.
_KILL_ANSWER, _KILL_AFTER = 16, 6


class PeersPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared."""

    name: str
    #: Tokens of a prompt, and drawn ones, of a round.
    prefill: int
    decode: int
    rounds: int
    #: One-way delays of every cable, milliseconds.
    delays: tuple[float, ...]
    #: Tokens before those whose bytes are counted.
    contexts: tuple[int, ...]
    #: Layer ranges of our stages; as many servers on the other side.
    split: tuple[str, ...]
    n_vocab: int
    #: Of our side; theirs are native.
    numerics: str
    #: Ratios of speed: ``decode`` or ``prefill``, and the delay.
    goals: dict[str, str]

    @property
    def context(self) -> ContextParams:
        """Settings of both sides."""
        longest = max(self.prefill, max(self.contexts, default=0)) + 4 * self.decode + _KILL_ANSWER
        return ContextParams(n_ctx=max(512, longest), numerics=Numerics(self.numerics))


@frozen
class Ours:
    """Stage processes, a pipeline over cables."""

    pipeline: Pipeline
    cables: list[FaultyProxy]
    up: Program
    #: Address of the last stage itself.
    tail: str
    plan: PeersPlan

    async def prefill_seconds(self, tokens: int) -> float:
        async with self.pipeline.session() as session:
            began = trio.current_time()
            await _draw(session, some_tokens(tokens, self.plan.n_vocab), 1)
            return trio.current_time() - began

    async def decode(self, tokens: int, depth: int = 0) -> tuple[float, int, int]:
        """Seconds, bytes on all cables, and turns on them, of tokens drawn after ``depth`` others."""
        async with self.pipeline.session() as session:
            answer = session.generate(
                some_tokens(max(depth, 1), self.plan.n_vocab),
                max_tokens=tokens + 1,
                stop=(),
                sampling=SamplingParams(),
                ahead=AHEAD,
            )
            await anext(answer)
            before, began = _counts(self.cables), trio.current_time()
            async for _ in answer:
                pass
            seconds, after = trio.current_time() - began, _counts(self.cables)
        return seconds, after[0] - before[0], after[1] - before[1]

    async def killed(self) -> dict[str, Any]:
        """The last stage is killed while an answer is drawn: seconds to the next token, and tokens that came in all."""
        pid = self.up.events(self.tail, "ready")[-1]["pid"]
        async with self.pipeline.session() as session:
            answer = session.generate(
                some_tokens(32, self.plan.n_vocab),
                max_tokens=_KILL_ANSWER,
                stop=(),
                sampling=SamplingParams(),
                ahead=AHEAD,
            )
            for _ in range(_KILL_AFTER):
                await anext(answer)
            os.kill(pid, signal.SIGKILL)
            began = trio.current_time()
            await anext(answer)
            seconds = trio.current_time() - began
            came = _KILL_AFTER + 1
            async for _ in answer:
                came += 1
        return {"next_token_s": seconds, "tokens": came, "asked": _KILL_ANSWER}


async def _draw(session: ClientSession, prompt: list[int], count: int) -> None:
    async for _ in session.generate(prompt, max_tokens=count, stop=(), sampling=SamplingParams()):
        pass


def _counts(cables: list[FaultyProxy]) -> tuple[int, int]:
    return sum(cable.passed for cable in cables), sum(cable.turns for cable in cables)


@frozen
class Theirs:
    """Servers of the RPC backend, and llama-bench over cables."""

    bench: RpcBench
    cables: list[FaultyProxy]
    servers: list[Server]

    async def decode(self, tokens: int, depth: int = 0) -> tuple[int, int]:
        """Bytes on all cables, and turns on them, of so many more tokens drawn after ``depth`` others."""
        counts = []
        for count in (tokens, 2 * tokens):
            before = _counts(self.cables)
            await self.bench.blocks(depth, count, 1)
            after = _counts(self.cables)
            counts.append((after[0] - before[0], after[1] - before[1]))
        (few_bytes, few_turns), (many_bytes, many_turns) = counts
        return many_bytes - few_bytes, many_turns - few_turns


@frozen
class Sides:
    """Both, at work by turns."""

    ours: Ours
    theirs: Theirs

    def delay(self, milliseconds: float) -> None:
        """Of every cable, each way."""
        for cable in (*self.ours.cables, *self.theirs.cables):
            cable.delay = milliseconds / 1e3


@asynccontextmanager
async def open_ours(model: Path, plan: PeersPlan) -> AsyncIterator[Ours]:
    settings = msgspec.structs.asdict(plan.context)
    with tempfile.TemporaryDirectory() as folder:
        file = write_route(Path(folder) / "route.toml", model, plan.split, **settings)
        async with open_up(file) as up, open_proxies(file.route) as (route, cables):
            connector = RemoteConnector(LinkPolicy())
            async with open_pipeline_on(connector, route, timeouts=PATIENCE) as pipeline:
                yield Ours(pipeline, cables, up, file.route.stages[-1].address, plan)


@asynccontextmanager
async def open_theirs(model: Path, plan: PeersPlan, rpc_server: Path) -> AsyncIterator[Theirs]:
    commit = build_info()["llama_cpp_commit"]
    async with open_servers(rpc_server, len(plan.split), 1) as servers, AsyncExitStack() as stack:
        cables = [await stack.enter_async_context(open_proxy(server.address)) for server in servers]
        addresses = tuple(cable.address for cable in cables)
        bench = RpcBench(bench_beside(rpc_server), commit, model, plan.context, 1, addresses)
        yield Theirs(bench, cables, list(servers))


@asynccontextmanager
async def open_sides(model: Path, plan: PeersPlan, rpc_server: Path) -> AsyncIterator[Sides]:
    """Both sides, warm."""
    async with open_ours(model, plan) as ours, open_theirs(model, plan, rpc_server) as theirs:
        await ours.prefill_seconds(8)
        await ours.decode(2)
        yield Sides(ours, theirs)


# --- units -----------------------------------------------------------------------------------------------------------


async def speed_round(plan: PeersPlan, phase: str, delay: float, number: int, sides: Sides) -> dict[str, Any]:
    """Seconds of both sides for the same work; they begin by turns."""
    sides.delay(delay)
    tokens = plan.prefill if phase == "prefill" else plan.decode

    async def ours() -> float:
        return await sides.ours.prefill_seconds(tokens) if phase == "prefill" else (await sides.ours.decode(tokens))[0]

    async def theirs() -> float:
        return await sides.theirs.bench.seconds(**{phase: tokens})

    found: dict[str, Any] = {"tokens": tokens, "began": "theirs" if number % 2 else "ours"}
    for name, run in sorted({"ours_s": ours, "theirs_s": theirs}.items(), reverse=bool(number % 2)):
        found[name] = await run()
    sides.delay(0)
    return found


async def traffic_at(plan: PeersPlan, context: int, sides: Sides) -> dict[str, Any]:
    """Bytes and turns of drawn tokens, on all cables together."""
    _, our_bytes, our_turns = await sides.ours.decode(plan.decode, context)
    their_bytes, their_turns = await sides.theirs.decode(plan.decode, context)
    return {
        "tokens": plan.decode,
        "ours_bytes": our_bytes,
        "ours_turns": our_turns,
        "theirs_bytes": their_bytes,
        "theirs_turns": their_turns,
    }


async def alone(plan: PeersPlan, model: Path, rpc_server: Path, llama_server: Path) -> dict[str, Any]:
    """llama-bench in one process, of one thread; and llama-server, by what it says of its answers."""
    commit = build_info()["llama_cpp_commit"]
    whole = LlamaBench(bench_beside(rpc_server), commit, model, plan.context, 1)
    found: dict[str, Any] = {
        "decode_tokens": plan.decode,
        "decode_s": await whole.seconds(decode=plan.decode),
        "prefill_tokens": plan.prefill,
        "prefill_s": await whole.seconds(prefill=plan.prefill),
    }
    prompt = some_tokens(plan.prefill, plan.n_vocab)
    async with LlamaServer(llama_server, commit, model, plan.context, 1).running() as url:
        await timings_of(url, prompt[:8], 2)
        # Its own time begins with the first token, which a prompt's last one gives.
        found["server_decode_s"] = (await timings_of(url, prompt[:1], plan.decode + 1)).predicted_ms / 1e3
        found["server_prefill_s"] = (await timings_of(url, prompt, 1)).prompt_ms / 1e3
    return found


async def kill(plan: PeersPlan, sides: Sides) -> dict[str, Any]:
    """A process of each side is killed while tokens are drawn. Theirs is not started again: nothing does that."""
    ours = await sides.ours.killed()
    decode = plan.context.n_ctx - 1
    end = await sides.theirs.bench.ended_by(decode, sides.theirs.servers[-1])
    theirs = {"exit_code": end.code, "ended_s": end.seconds, "said": end.said}
    return {"ours": ours, "theirs": theirs}
