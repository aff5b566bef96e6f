"""Links of a cluster in one process that pass bad networks: relays that know where frames begin and end."""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from attrs import define, evolve, field

from dgr.cluster.local import LocalCluster
from dgr.core.values import StageIdentity
from dgr.errors import LinkBroken
from dgr.protocol.limits import limits_of
from dgr.stage.shard import Shard
from dgr.testing.network.relay import Flow, Relay, open_relay
from dgr.wire.framing import HEADER_SIZE, Limits, decode_message
from dgr.wire.links import Link, open_link
from dgr.wire.memory import memory_transports
from dgr.wire.nurseries import open_nursery

__all__ = ["MEDDLING", "Line", "SimCluster", "open_sim_cluster"]

#: Of every link, seconds: as between processes.
HEARTBEAT = 2.0
#: Bytes of a payload's fragment: less than a boundary of a few tokens, so that payloads are cut up and take turns.
FRAGMENT = 64
_HEADER = struct.Struct("<IBBH")
_MESSAGE = 1
#: What can become of one frame.
MEDDLING = ("duplicate", "reorder", "hold", "echo", "flip")


class Packets(trio.abc.Stream):
    """A stream whose reader gets some frames twice, late, or with another bit.

    A frame goes with its payload. Packets of one payload keep their order: nothing but TLS would tell that they had lost it,
    as with a bit.
    """

    def __init__(self, inner: trio.abc.Stream, rng: random.Random) -> None:
        self._inner = inner
        self._rng = rng
        self._rest = bytearray()
        self._out: deque[bytes] = deque()
        self._ended = False
        #: What becomes of the next frames; one each.
        self.faults: deque[str] = deque()
        #: [frames that go first, frame], for each that is late.
        self._held: list[tuple[int, bytes]] = []
        #: A frame that went before.
        self._before = b""
        #: The frame that a fault is for, the stream of its payload, and how much of that is still to come.
        self._struck: tuple[str, bytearray, int, int] | None = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while not self._out and not self._ended:
            data = await self._inner.receive_some()
            self._rest += data
            while (packet := self._next_whole()) is not None:
                self._pass(packet)
            if not data:
                self._ended = True
                self._out += [frame for _, frame in self._held]
                self._out.append(bytes(self._rest))  # cut inside a packet
        return self._out.popleft() if self._out else b""

    def _next_whole(self) -> bytes | None:
        if len(self._rest) < HEADER_SIZE:
            return None
        size = HEADER_SIZE + _HEADER.unpack_from(self._rest)[0]
        if len(self._rest) < size:
            return None
        packet = bytes(self._rest[:size])
        del self._rest[:size]
        return packet

    def _pass(self, packet: bytes) -> None:
        length, kind, _, stream = _HEADER.unpack_from(packet)
        is_message = kind == _MESSAGE
        if self._struck is not None and not is_message and stream == self._struck[2]:
            fault, frame, stream, left = self._struck
            frame += packet
            self._struck = fault, frame, stream, left - length
        elif self.faults and self.faults[0] == "flip":
            self.faults.popleft()
            flipped = bytearray(packet)
            flipped[self._rng.randrange(len(flipped))] ^= 1 << self._rng.randrange(8)
            self._out.append(bytes(flipped))
        elif self.faults and self._struck is None and is_message:
            size = decode_message(packet[HEADER_SIZE:]).payload if stream else 0  # type: ignore[union-attr]
            self._struck = self.faults.popleft(), bytearray(packet), stream, size
        else:
            self._out.append(packet)
            if is_message and not stream:
                self._pass_late()
                if self._rng.random() < 0.1:
                    self._before = packet
        if self._struck is not None and not self._struck[3]:
            fault, frame, *_ = self._struck
            self._struck = None
            self._strike(fault, bytes(frame))

    def _strike(self, fault: str, frame: bytes) -> None:
        match fault:
            case "duplicate":
                self._out += [frame, frame]
            case "reorder":
                self._held.append((1, frame))
            case "hold":
                self._held.append((self._rng.randrange(2, 12), frame))
            case _:
                self._out += [frame, self._before] if self._before else [frame]

    def _pass_late(self) -> None:
        """One more frame went before those that are late."""
        held, self._held = self._held, []
        for left, frame in held:
            if left > 1:
                self._held.append((left - 1, frame))
            else:
                self._out.append(frame)


@define(eq=False)
class Line:
    """One link, and the bad network in it."""

    number: int
    #: ``""``: a pipeline.
    source: str
    target: str
    relay: Relay
    rightward: Packets
    leftward: Packets
    #: Whether anything was done to its frames: what is lost of a link's own accounts comes back with the next link only.
    meddled: bool = field(default=False)

    @property
    def name(self) -> str:
        return f"{self.source or 'client'}>{self.target}#{self.number}"

    @property
    def flows(self) -> tuple[Flow, Flow]:
        return self.relay.rightward, self.relay.leftward

    def touches(self, stage: str) -> bool:
        return stage in (self.source, self.target)

    def heal(self) -> None:
        """As a good network, but for what was lost."""
        for flow in self.flows:
            flow.delay, flow.rate = 0.0, None
            flow.trickle(65536)
            flow.resume()


def _limits(shard: Shard) -> Limits:
    return evolve(limits_of(shard.description), fragment=FRAGMENT)


class SimCluster(LocalCluster):
    """Its links pass relays, have heartbeats, and may not be had at all."""

    def __init__(self, nursery: trio.Nursery, rng: random.Random) -> None:
        super().__init__(nursery)
        self._rng = rng
        self._made = 0
        #: Those that are open.
        self.lines: list[Line] = []
        #: Stage -> why no link to it can be had.
        self.unreachable: dict[str, str] = {}
        #: Stage -> seconds by which its clock is ahead.
        self.clocks: dict[str, float] = {}
        #: Told of every new line.
        self.on_line: Callable[[Line], None] = lambda _: None

    def _reach(self, address: str) -> Shard:
        if (why := self.unreachable.get(address)) is not None:
            raise LinkBroken(f"stage {address}: {why}")
        return self._get(address)

    @asynccontextmanager
    async def _wired(self, source: str, shard: Shard, credit: int | None) -> AsyncIterator[tuple[Link, Link]]:
        """Both ends of a link through a relay: (the near one, the stage's)."""
        (near, left), (right, far) = memory_transports(), memory_transports()
        rightward, leftward = Packets(left, self._rng), Packets(right, self._rng)
        limits = _limits(shard)
        async with open_relay(rightward, leftward) as relay:
            line = Line(self._made, source, shard.name, relay, rightward, leftward)
            self._made += 1
            self.lines.append(line)
            try:
                async with (
                    open_link(
                        far, limits, name=f"{shard.name}<-{source}", granted=credit, heartbeat=HEARTBEAT
                    ) as arriving,
                    open_link(
                        near, limits, name=f"{source}->{shard.name}", credit=credit, heartbeat=HEARTBEAT
                    ) as leaving,
                ):
                    arriving.clock = lambda: trio.current_time() + self.clocks.get(shard.name, 0.0)
                    self.on_line(line)
                    yield leaving, arriving
            finally:
                self.lines.remove(line)

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[tuple[Link, StageIdentity]]:
        shard = self._reach(address)
        async with self._wired("", shard, None) as (leaving, arriving):
            shard.start_soon(shard.serve_control, arriving)
            yield leaving, shard.description

    async def _dial(self, source: str, target: str) -> Link:
        self._reach(target)
        return await super()._dial(source, target)

    async def _join(
        self, before: Shard, after: Shard, *, task_status: trio.TaskStatus[Link] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with self._wired(before.name, after, _limits(after).under_way) as (leaving, arriving):
            after.start_soon(after.serve_boundary, arriving, before.name)
            self._boundaries[before, after] = leaving
            task_status.started(leaving)
            try:
                await before.watch_successor(leaving)
            finally:
                del self._boundaries[before, after]


@asynccontextmanager
async def open_sim_cluster(rng: random.Random) -> AsyncIterator[SimCluster]:
    async with open_nursery() as nursery:
        try:
            yield SimCluster(nursery, rng)
        finally:
            nursery.cancel_scope.cancel()
