"""Faults of the simulation: each strikes at a random moment, most of them end by themselves a little later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from chaos.sim_clients import Client
from chaos.sim_network import MEDDLING, Line
from chaos.sim_world import SPLITS, World, fill_disk, refuse_memory
from trio.testing import MockClock

from dgr.client.pipeline import Pipeline
from dgr.testing.engines.fake import Fault, FaultKind
from dgr.wire.frames import Miss

__all__ = ["KINDS", "Chaos"]


class Chaos:
    """Strikes a world."""

    def __init__(self, world: World, clock: MockClock, nursery: trio.Nursery, *, flips: bool) -> None:
        self.world = world
        self.dice = world.dice("chaos")
        self.clock = clock
        self.nursery = nursery
        self.flips = flips
        #: By the name of what goes on in it.
        self.scopes: dict[str, trio.CancelScope] = {}

    async def run(self, faults: int, pause: float) -> None:
        """Strike so many times, ``pause`` seconds apart in the mean."""
        kinds = list(KINDS)
        weights = [KINDS[kind][1] for kind in kinds]
        while self.world.faults.total() < faults:
            await trio.sleep(self.dice.expovariate(1 / pause))
            kind = self.dice.choices(kinds, weights)[0]
            # Bursts: what strikes together is worse than what strikes alone.
            for _ in range(self.dice.choice((1, 1, 1, 2, 3))):
                await KINDS[kind][0](self)

    def later(self, seconds: float, function: Callable[..., Awaitable[object]], *args: object) -> None:
        async def run() -> None:
            await trio.sleep(seconds)
            await function(*args)

        self.nursery.start_soon(run)

    def _stage(self) -> str | None:
        running = self.world.running()
        return self.dice.choice(running) if running else None

    def _line(self) -> Line | None:
        return self.dice.choice(self.world.cluster.lines) if self.world.cluster.lines else None

    def _pipeline(self) -> tuple[str, Pipeline] | None:
        found = self.world.pipelines
        return self.dice.choice(list(found.items())) if found else None

    # --- stages ---

    async def kill(self) -> bool:
        if (name := self._stage()) is None:
            return False
        self.world.struck("stage killed", name)
        self.world.stop(name)
        # One that is a route by itself would be believed: a pipeline that is opened then was told of no model.
        if self.dice.random() < 0.1 and name not in SPLITS:
            self.later(self.dice.uniform(0.05, 1), self._start_another, name)
            self.later(self.dice.uniform(1, 4), self._replace, name)
        else:
            self.later(self.dice.choice((0.0, 0.01, 0.5, 3.0)), self.world.start, name)
        return True

    async def _start_another(self, name: str) -> None:
        if name not in self.world.cluster.shards:
            self.world.struck("another model's stage comes back", name)
            await self.world.start(name, other_model=True)

    async def _replace(self, name: str) -> None:
        self.world.stop(name)
        await self.world.start(name)

    async def freeze(self) -> bool:
        """All of a stage stands still: its engine, and what it hears and says."""
        if (name := self._stage()) is None:
            return False
        self.world.struck("stage frozen", name)
        engine = self.world.engines[name]
        engine.freeze()
        stalled = [flow for line in self.world.lines_of(name) for flow in line.flows]
        for flow in stalled:
            flow.stall()

        async def thaw() -> None:
            engine.thaw()
            for flow in stalled:
                flow.resume()

        self.later(self.dice.choice((0.1, 1.0, 5.0, 20.0)), thaw)
        return True

    async def hang_engine(self) -> bool:
        """A native step that takes long: the stage itself answers."""
        if (name := self._stage()) is None:
            return False
        self.world.struck("step hangs", name)
        engine = self.world.engines[name]
        engine.freeze()

        async def thaw() -> None:
            engine.thaw()

        self.later(self.dice.choice((0.1, 1.0, 12.0)), thaw)
        return True

    async def slow(self) -> bool:
        if (name := self._stage()) is None:
            return False
        self.world.struck("stage slowed", name)
        engine = self.world.engines[name]
        engine.slowness = self.dice.choice((3.0, 20.0, 200.0))

        async def recover() -> None:
            engine.slowness = 1.0

        self.later(self.dice.uniform(0.5, 5), recover)
        return True

    async def fail_step(self) -> bool:
        if (name := self._stage()) is None:
            return False
        kind = self.dice.choice(list(FaultKind))
        self.world.struck(f"step fails: {kind.value}", name)
        self.world.engines[name].faults.append(Fault(kind, slot=self.dice.choice((None, 0, 1, 2))))
        return True

    async def refuse_copy(self) -> bool:
        if (name := self._stage()) is None:
            return False
        self.world.struck("copy without memory", name)
        self.world.engines[name].refused_copies += 1
        return True

    async def refuse_payload(self) -> bool:
        self.world.struck("payload without memory")
        refuse_memory(self.dice.randint(1, 3))
        return True

    async def full_disk(self) -> bool:
        self.world.struck("disk full")
        fill_disk(True)

        async def free() -> None:
            fill_disk(False)

        self.later(self.dice.uniform(0.5, 5), free)
        return True

    async def lose_session(self) -> bool:
        """A session is evicted, or has been idle for too long."""
        if (name := self._stage()) is None:
            return False
        idle = [actor for actor in self.world.shard(name).actors() if actor.is_idle]
        if not idle:
            return False
        reason = self.dice.choice((Miss.EVICTED, Miss.EXPIRED))
        self.world.struck(f"session {reason.name.lower()}", name)
        self.dice.choice(idle).end(reason)
        return True

    async def drain(self) -> bool:
        if (name := self._stage()) is None or self.world.shard(name).draining.is_on:
            return False
        self.world.struck("stage drained", name)
        shard = self.world.shard(name)
        shard.draining.begin(0)

        async def undo() -> None:
            self.world.undrain(shard)

        self.later(self.dice.uniform(0.5, 4), undo)
        return True

    # --- the network ---

    async def cut(self) -> bool:
        if (line := self._line()) is None:
            return False
        how = self.dice.choice(("at once", "cleanly", "inside a frame"))
        self.world.struck(f"link cut {how}", line.name)
        match how:
            case "at once":
                line.relay._cut_abruptly()
            case "cleanly":
                line.relay._cut_cleanly(*line.flows)
            case _:
                self.dice.choice(line.flows).cut_after(self.dice.randrange(1, 200))
        return True

    async def cut_one_way(self) -> bool:
        if (line := self._line()) is None:
            return False
        self.world.struck("link cut one way", line.name)
        flow = self.dice.choice(line.flows)
        flow.stall()

        async def resume() -> None:
            flow.resume()

        self.later(self.dice.choice((0.5, 3.0, 15.0)), resume)
        return True

    async def slow_link(self) -> bool:
        if (line := self._line()) is None:
            return False
        how = self.dice.choice(("delayed", "trickling", "of low rate"))
        self.world.struck(f"link {how}", line.name)
        flow = self.dice.choice(line.flows)
        match how:
            case "delayed":
                flow.delay = self.dice.choice((0.005, 0.1, 1.5))
            case "trickling":
                flow.trickle(self.dice.randint(1, 50), 0.002)
            case _:
                flow.rate = self.dice.choice((3000.0, 30000.0))

        async def recover() -> None:
            line.heal()

        self.later(self.dice.uniform(0.3, 3), recover)
        return True

    async def meddle(self) -> bool:
        """With single frames."""
        if (line := self._line()) is None:
            return False
        kind = self.dice.choice([kind for kind in MEDDLING if self.flips or kind != "flip"])
        self.world.struck(f"frame: {kind}", line.name)
        line.meddled = True
        if kind == "flip":
            self.world.flips += 1
        packets = self.dice.choice((line.rightward, line.leftward))
        packets.faults.append(kind)
        return True

    async def partition(self) -> bool:
        """Nobody reaches a stage any more, or is refused: links that there are go on."""
        name = self.dice.choice(self.world.names)
        why = self.dice.choice(("no route to host", "its certificate has expired", "the connection timed out"))
        self.world.struck(f"unreachable: {why}", name)
        self.world.cluster.unreachable[name] = why
        if self.dice.random() < 0.5:
            for line in list(self.world.lines_of(name)):
                line.relay._cut_abruptly()

        async def restore() -> None:
            self.world.cluster.unreachable.pop(name, None)

        self.later(self.dice.uniform(0.3, 5), restore)
        return True

    # --- clients ---

    async def change_route(self) -> bool:
        """Twice in a second, now and then at once."""
        if (found := self._pipeline()) is None:
            return False
        for _ in range(2):
            self.world.struck("route changed", found[0])
            self.nursery.start_soon(self._change, *found)
            await trio.sleep(self.dice.choice((0.0, 0.0, 0.01, 0.4)))
        return True

    async def _change(self, name: str, pipeline: Pipeline) -> None:
        split = self.dice.choice(SPLITS)
        spares = self.world.spares(split) if self.dice.random() < 0.6 else []

        async def change() -> None:
            await pipeline.change_route(self.world.route(split), spares)

        # As many stages as a range has are tried, each until its fence has timed out, behind another change.
        await Client(self.world, f"{name} route {self.world.faults['route changed']}").request("route", 400.0, change)

    async def vanish(self) -> bool:
        """A client's process ends: its links break, and nobody says goodbye."""
        if not self.scopes:
            return False
        name = self.dice.choice(list(self.scopes))
        self.world.struck("client vanished", name)
        if self.dice.random() < 0.5:
            for line in [line for line in self.world.cluster.lines if not line.source]:
                line.relay._cut_abruptly()
        self.scopes.pop(name).cancel()
        return True

    # --- clocks ---

    async def jump(self) -> bool:
        """All clocks go on at once, as after a sleep of the machine."""
        seconds = self.dice.choice((0.5, 5.0, 40.0))
        self.world.struck("clock jumped", seconds)
        self.world.has_jumped(seconds)
        self.clock.jump(seconds)
        return True

    async def skew(self) -> bool:
        """A stage's clock is set."""
        if (name := self._stage()) is None:
            return False
        self.world.struck("clock set", name)
        self.world.cluster.clocks[name] = self.dice.choice((-3600.0, -1.0, 0.5, 86400.0 * 365))
        return True


#: Kind -> how it strikes, giving whether it did, and how often beside the others.
KINDS: dict[str, tuple[Callable[[Chaos], Awaitable[bool]], float]] = {
    "kill": (Chaos.kill, 8),
    "freeze": (Chaos.freeze, 4),
    "hang": (Chaos.hang_engine, 2),
    "slow": (Chaos.slow, 4),
    "step": (Chaos.fail_step, 6),
    "copy": (Chaos.refuse_copy, 3),
    "memory": (Chaos.refuse_payload, 3),
    "disk": (Chaos.full_disk, 3),
    "session": (Chaos.lose_session, 6),
    "drain": (Chaos.drain, 2),
    "cut": (Chaos.cut, 6),
    "one way": (Chaos.cut_one_way, 4),
    "slow link": (Chaos.slow_link, 6),
    "meddle": (Chaos.meddle, 12),
    "partition": (Chaos.partition, 3),
    "route": (Chaos.change_route, 6),
    "vanish": (Chaos.vanish, 4),
    "jump": (Chaos.jump, 2),
    "skew": (Chaos.skew, 2),
}
