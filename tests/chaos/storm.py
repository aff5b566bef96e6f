"""Stages as processes, over TLS and bad networks, in a storm of faults; clients that must never hear a wrong token."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio
from attrs import define, evolve, field
from cluster.remote_stages import Authority

import dgr
from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.cluster.route_file import RouteFile, format_route_file
from dgr.core.route import Route
from dgr.errors import DgrError
from dgr.testing.network.processes import Program, is_gone, open_up, write_route
from dgr.testing.network.proxy import FaultyProxy, open_proxies
from dgr.testing.network.relay import Flow
from dgr.wire.credentials import Credentials

__all__ = ["ANSWER", "CONTEXT", "Storm", "expected_of", "open_storm", "wrong_at"]

CONTEXT: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32}
#: Tokens of an answer.
ANSWER = 12
RETRIES, CHUNK, CHUNKS = 2, 10, 6
TIMEOUTS = Timeouts(reply=10.0, control=10.0, route=20.0)
#: Seconds in which one token comes, or an error: every wait of every try at its longest.
TOKEN_DEADLINE = (1 + RETRIES) * (TIMEOUTS.route + 4 * TIMEOUTS.reply + 2 * TIMEOUTS.control + CHUNKS * TIMEOUTS.reply)
BEAT = 0.5


async def expected_of(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What the whole model, undisturbed and in this process, answers."""
    async with dgr.open_pipeline(model, context=dgr.ContextParams(n_seq_max=1, **CONTEXT)) as pipeline:
        found = []
        for prompt in prompts:
            async with pipeline.session() as session:
                found.append([token.id async for token in session.generate(prompt, max_tokens=ANSWER, stop=())])
        return found


def wrong_at(said: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first token of an answer, or of its beginning, that is not the undisturbed one's."""
    return next((at for at, token in enumerate(said) if at >= len(expected) or token != expected[at]), None)


@define(eq=False)
class Stages:
    """Processes of one route, and the proxies before them."""

    up: Program
    file: RouteFile
    route: Route
    proxies: list[FaultyProxy]

    def pid(self, index: int) -> int | None:
        ready = self.up.events(self.file.route.stages[index].address, "ready")
        return ready[-1]["pid"] if ready and not is_gone(ready[-1]["pid"]) else None


@define(eq=False)
class Storm:
    """All of it."""

    dice: random.Random
    sets: Mapping[str, Stages]
    policy: LinkPolicy
    #: Certificate and key in use by everybody, and copies: good ones, expired ones.
    certificates: Mapping[str, Credentials]
    faults: Counter[str] = field(factory=Counter)
    errors: Counter[str] = field(factory=Counter)
    wrong: list[str] = field(factory=list)
    #: Exit codes of stages, as ``dgr up`` told of them; negative: the signal.
    codes: Counter[int] = field(factory=Counter)
    tokens: int = 0
    answers: int = 0
    given_up: int = 0
    slowest: float = 0.0
    over: bool = False

    # --- clients ---

    async def clients(self, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], name: str) -> None:
        """A pipeline after the other, each with its sessions, until the storm is over; then all must be well."""
        while not self.over:
            with trio.move_on_after(self.dice.uniform(4, 30)) as vanished:
                await self._typed(f"{name}: a pipeline", partial(self._pipeline, prompts, expected, name))
            if vanished.cancelled_caught:
                self.faults["client vanished"] += 1

    async def _pipeline(self, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], name: str) -> None:
        stages = self.dice.choice(list(self.sets.values()))
        async with self.open(stages) as pipeline, trio.open_nursery() as nursery:
            nursery.start_soon(self._change_routes, pipeline)
            async with trio.open_nursery() as talking:
                for index in range(3):
                    talking.start_soon(self._talk, pipeline, prompts, expected, f"{name}.{index}")
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def open(self, stages: Stages) -> AsyncIterator[Pipeline]:
        connect = RemoteConnector(self.policy)
        async with open_pipeline_on(connect, stages.route, chunk=CHUNK, retries=RETRIES, timeouts=TIMEOUTS) as pipeline:
            yield pipeline

    async def _talk(
        self, pipeline: Pipeline, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], name: str
    ) -> None:
        while not self.over:
            which = self.dice.randrange(len(prompts))
            await self._typed(name, partial(self.answer, pipeline, prompts[which], expected[which], name))
            await trio.sleep(0.01)

    async def answer(self, pipeline: Pipeline, prompt: Sequence[int], expected: Sequence[int], name: str) -> None:
        said: list[int] = []
        patience = self.dice.expovariate(1 / 2) if self.dice.random() < 0.2 else 1e9
        with trio.move_on_after(patience) as given_up:
            async with pipeline.session() as session:
                if self.dice.random() < 0.3:
                    await session.prefill(prompt[: len(prompt) // 2])
                    async with session.fork() as other:
                        await self._listen(other, prompt, said, expected, name)
                else:
                    await self._listen(session, prompt, said, expected, name)
        self.given_up += given_up.cancelled_caught
        self.answers += len(said) == ANSWER

    async def _listen(
        self,
        session: dgr.ClientSession,
        prompt: Sequence[int],
        said: list[int],
        expected: Sequence[int],
        name: str,
    ) -> None:
        began = trio.current_time()
        async for token in session.generate(transcript=prompt, max_tokens=ANSWER, stop=()):
            said.append(token.id)
            self.tokens += 1
            if (at := wrong_at(said, expected)) is not None:
                self.wrong.append(f"{name}: token {at} after {len(prompt)} is {said[at]}: wrong")
                return
            now = trio.current_time()
            self.slowest, began = max(self.slowest, now - began), now

    async def _typed(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """It ends well or with an error of dgr's, in time."""
        with trio.move_on_after(ANSWER * TOKEN_DEADLINE) as hang:
            try:
                await work()
            except DgrError as error:
                self.errors[type(error).__name__] += 1
                await trio.sleep(0.2)
            except Exception as error:
                self.wrong.append(f"{name} ended with {error!r}, which is no error of dgr's")
        if hang.cancelled_caught:
            self.wrong.append(f"{name} never ended")

    async def _change_routes(self, pipeline: Pipeline) -> None:
        while not self.over:
            await trio.sleep(self.dice.expovariate(1 / 3))
            for _ in range(2):  # twice in a second
                self.faults["route changed"] += 1
                stages = self.dice.choice(list(self.sets.values()))
                with contextlib.suppress(DgrError):
                    await pipeline.change_route(stages.route)

    # --- faults ---

    async def rage(self, seconds: float, pause: float) -> None:
        """Strike for so long, ``pause`` seconds apart in the mean."""
        kinds = (
            self.kill, self.stop, self.cut, self.cut_one_way, self.slow, self.flip, self.expire, self.refuse_memory,
        )  # fmt: skip
        weights = (4, 3, 6, 4, 6, 6, 1, 2)
        until = time.monotonic() + seconds
        async with trio.open_nursery() as nursery:
            while time.monotonic() < until:
                await trio.sleep(self.dice.expovariate(1 / pause))
                nursery.start_soon(self.dice.choices(kinds, weights)[0])
        self.over = True

    def _stage(self) -> tuple[Stages, int]:
        stages = self.dice.choice(list(self.sets.values()))
        return stages, self.dice.randrange(len(stages.proxies))

    def _flow(self) -> Flow | None:
        stages, index = self._stage()
        relays = stages.proxies[index].relays
        if not relays:
            return None
        relay = self.dice.choice(relays)
        return self.dice.choice((relay.rightward, relay.leftward))

    def _signal(self, which: signal.Signals) -> int | None:
        stages, index = self._stage()
        if (pid := stages.pid(index)) is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)
            return pid
        return None

    async def kill(self) -> None:
        self.faults["stage killed"] += self._signal(signal.SIGKILL) is not None

    async def stop(self) -> None:
        if (pid := self._signal(signal.SIGSTOP)) is None:
            return
        self.faults["stage stopped"] += 1
        await trio.sleep(self.dice.choice((0.2, 1.0, 4.0)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def cut(self) -> None:
        stages, index = self._stage()
        self.faults["links cut"] += len(stages.proxies[index].relays)
        await stages.proxies[index].cut()

    async def cut_one_way(self) -> None:
        if (flow := self._flow()) is None:
            return
        self.faults["link cut one way"] += 1
        flow.stall()
        await trio.sleep(self.dice.choice((0.3, 2.0, 5.0)))
        flow.resume()

    async def slow(self) -> None:
        stages, index = self._stage()
        proxy = stages.proxies[index]
        if self.dice.random() < 0.5:
            self.faults["links delayed"] += 1
            proxy.delay = self.dice.choice((0.005, 0.05))
        else:
            self.faults["links of low rate"] += 1
            proxy.rate = 200_000.0
        await trio.sleep(self.dice.uniform(0.5, 3))
        proxy.delay, proxy.rate = 0.0, None

    async def flip(self) -> None:
        """One bit of what is under way; over TLS it must be noticed."""
        if (flow := self._flow()) is None:
            return
        flow.stall()
        with trio.move_on_after(3):
            while not flow.held:  # noqa: ASYNC110 (a flow tells nobody)
                await trio.sleep(0.005)
            came, data = flow._held[0]
            flipped = bytearray(data)
            flipped[self.dice.randrange(len(flipped))] ^= 1 << self.dice.randrange(8)
            flow._held[0] = came, memoryview(bytes(flipped))
            self.faults["bit flipped"] += 1
        flow.resume()

    async def expire(self) -> None:
        """The certificate in use has ended; new links are refused until there is a good one again."""
        self.faults["certificate expired"] += 1
        self._use("expired")
        stages, index = self._stage()
        await stages.proxies[index].cut()
        await trio.sleep(self.dice.uniform(0.5, 2))
        self._use("good")

    def _use(self, which: str) -> None:
        used, source = self.certificates["used"], self.certificates[which]
        for mine, theirs in ((used.key, source.key), (used.certificate, source.certificate)):
            fresh = mine.with_name(f"{mine.name}.new")
            fresh.write_bytes(theirs.read_bytes())
            fresh.chmod(0o600)
            fresh.replace(mine)

    async def refuse_memory(self) -> None:
        """A stage gets no more memory from the system for a while."""
        stages, index = self._stage()
        if (pid := stages.pid(index)) is None:
            return
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + (1 << 16), most))
            self.faults["memory refused"] += 1
            await trio.sleep(self.dice.uniform(0.3, 2))
            resource.prlimit(pid, resource.RLIMIT_AS, (most, most))

    # --- in the end ---

    def count_codes(self) -> None:
        for stages in self.sets.values():
            self.codes.update(line["code"] for line in stages.up.lines if line["event"] == "ended")

    async def check_calm(self, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        """Every route answers, and holds nothing of anybody."""
        for name, stages in self.sets.items():
            deadline, error = trio.current_time() + 120, ""
            while trio.current_time() < deadline:
                try:
                    error = await self._calm(stages, prompts[0], expected[0])
                except DgrError as failure:
                    error = str(failure)
                if not error:
                    break
                await trio.sleep(0.5)
            if error:
                self.wrong.append(f"route {name} did not come back: {error}")

    async def _calm(self, stages: Stages, prompt: Sequence[int], expected: Sequence[int]) -> str:
        async with self.open(stages) as pipeline:
            async with pipeline.session() as session:
                said = [token.id async for token in session.generate(prompt, max_tokens=ANSWER, stop=())]
            if wrong_at(said, expected) is not None or len(said) != ANSWER:
                self.wrong.append(f"once all is well the answer is {said}")
            for address, load in (await pipeline.load()).items():
                if load is None or (load.routes, load.sessions, load.slots_leased) != (1, 0, 0):
                    return f"stage {address} is not idle: {load}"
        return ""


@asynccontextmanager
async def open_storm(model: Path, folder: Path, seed: str) -> AsyncIterator[Storm]:
    """Two routes of the same model, their stages kept alive by ``dgr up``; one set logs to a full disk."""
    authority = Authority(folder / "keys")
    used, good, expired = (authority.credentials("127.0.0.1", days=days) for days in ((-1, 30), (-1, 30), (-2, -1)))
    policy = LinkPolicy(credentials=used, heartbeat=BEAT, handshake=5.0)
    async with AsyncExitStack() as stack:
        full = os.open("/dev/full", os.O_WRONLY)
        stack.callback(os.close, full)
        sets = {}
        for name, split in (("two", ("0:3", "3:7")), ("three", ("0:2", "2:5", "5:7"))):
            file = write_route(folder / f"{name}.toml", model, split, **CONTEXT)
            file = evolve(file, tls=(used.ca, used.certificate, used.key))
            file.path.write_text(format_route_file(file))
            options = {"stderr": full} if name == "three" else {}
            up = await stack.enter_async_context(
                open_up(file, "--frozen-after", "3", "--heartbeat", str(BEAT), **options)
            )
            route, proxies = await stack.enter_async_context(open_proxies(file.route))
            sets[name] = Stages(up, file, route, proxies)
        certificates = {"used": used, "good": good, "expired": expired}
        storm = Storm(random.Random(seed), sets, policy, certificates)
        storm.faults["disk of the log full"] += 1
        yield storm
