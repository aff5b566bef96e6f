"""The simulation's world: stages that are there or not, what is noted, what is counted, and what must never be.

Everything in an episode follows from its seed: when a fault strikes and what, what clients ask, and the order in which tasks
run. What happened is noted line by line, so that two runs of a seed can be compared, and a finding can be read.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import random
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import define, field
from chaos.sim_network import Line, SimCluster
from chaos.sim_stages import CONTEXT, MODEL, OTHER, LyingEngine, SimEngine, SimThread, layers_of

from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.local import ShardPolicy
from dgr.core.buffers import new_buffer
from dgr.core.route import Route, StageRef, parse_split
from dgr.errors import DgrError
from dgr.serving import sessions as serving_sessions
from dgr.stage import scheduler
from dgr.stage.shard import Shard
from dgr.wire import framing

__all__ = [
    "SPLITS", "TIMEOUTS", "Answers", "Found", "World", "fill_disk", "open_files", "refuse_memory", "simulated", "tasks_alive",
]  # fmt: skip

#: The routes; a name stands for the layers of a stage.
SPLITS = ("0:6", "0:2,2:6", "0:1,1:4,4:6", "0:4#b,4:6#b", "0:2#b,2:4,4:6#c")
TIMEOUTS = Timeouts(reply=8.0, control=8.0, route=15.0)
#: Lines of what happened that are kept to be read.
_TAIL = 60


class Found(AssertionError):
    """The simulation found something; the message says what, and how to see it again."""


@define
class Answers:
    """How requests ended."""

    right: int = 0
    tokens: int = 0
    #: Of sessions that may have been told something else by a flipped bit: a plain link does not notice.
    not_judged: int = 0
    cancelled: int = 0
    errors: Counter[str] = field(factory=Counter)
    #: Seconds of the slowest, by what was asked.
    slowest: dict[str, float] = field(factory=dict)


class World:
    """One episode."""

    def __init__(self, seed: str, cluster: SimCluster, *, lying: Sequence[str] = ()) -> None:
        self.seed = seed
        self.cluster = cluster
        self.engines: dict[str, SimEngine] = {}
        #: What must not be, and is.
        self.wrong: list[str] = []
        self.faults: Counter[str] = Counter()
        self.answers = Answers()
        self.events: Counter[str] = Counter()
        #: Those that are open, by name.
        self.pipelines: dict[str, Pipeline] = {}
        #: Set when nothing is in anybody's way any more.
        self.healed = trio.Event()
        #: When the chaos ends.
        self.until = math.inf
        #: Seconds that the clock has jumped.
        self.jumped = 0.0
        #: Grows with every bit that was flipped.
        self.flips = 0
        self._lying = lying
        self._guards: list[trio.CancelScope] = []
        self._starting: set[str] = set()
        self._digest = hashlib.blake2b(digest_size=16)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        cluster.on_line = lambda line: self.note("line", line.name)

    def dice(self, who: str) -> random.Random:
        """The dice of one who acts."""
        return random.Random(f"{self.seed}/{who}")

    # --- noting ---

    def note(self, what: str, detail: object = "") -> None:
        said = f"{trio.current_time():.6f} {what} {detail}"
        self._digest.update(said.encode())
        self._tail.append(said)

    def accuse(self, what: str) -> None:
        self.note("WRONG", what)
        self.wrong.append(what)

    @property
    def digest(self) -> str:
        """Of everything that was noted."""
        return self._digest.hexdigest()

    @property
    def tail(self) -> str:
        return "\n".join(self._tail)

    @contextmanager
    def guarded(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Cancelled after so many seconds in which the clock did not jump."""
        with trio.move_on_after(seconds) as scope:
            self._guards.append(scope)
            try:
                yield scope
            finally:
                self._guards.remove(scope)

    def has_jumped(self, seconds: float) -> None:
        self.jumped += seconds
        for scope in self._guards:
            scope.deadline += seconds

    def struck(self, kind: str, detail: object = "") -> None:
        self.faults[kind] += 1
        self.note(f"fault {kind}", detail)

    # --- stages ---

    @property
    def names(self) -> list[str]:
        """All stages there can be."""
        return list(dict.fromkeys(name for split in SPLITS for name in split.split(",")))

    def running(self) -> list[str]:
        return [name for name in self.names if name in self.cluster.shards]

    async def start(self, name: str, *, other_model: bool = False) -> None:
        """A stage comes, without any state."""
        if name in self.cluster.shards or name in self._starting:
            return
        self._starting.add(name)
        engine = LyingEngine(name) if name in self._lying else SimEngine(name, OTHER if other_model else MODEL)
        try:
            await self.cluster.start(name, engine, ShardPolicy(min_idle=0.05, idle_timeout=30.0))
        finally:
            self._starting.discard(name)
        self.engines[name] = engine
        self.note("start", name)

    def stop(self, name: str) -> None:
        """A stage is killed."""
        if name in self.cluster.shards:
            self.cluster.stop(name)
            self.note("stop", name)

    def shard(self, name: str) -> Shard:
        return self.cluster.shards[name]

    def route(self, split: str) -> Route:
        names = split.split(",")
        ranges = parse_split(",".join(name.partition("#")[0] for name in names), MODEL.n_layers)
        return Route(tuple(StageRef(name, layers) for name, layers in zip(names, ranges, strict=True)))

    def spares(self, split: str) -> list[StageRef]:
        """Other stages of the same layers."""
        taken = split.split(",")
        ranges = [layers_of(name) for name in taken]
        return [
            StageRef(name, layers_of(name)) for name in self.names if name not in taken and layers_of(name) in ranges
        ]

    def lines_of(self, stage: str) -> list[Line]:
        return [line for line in self.cluster.lines if line.touches(stage)]

    def undrain(self, shard: Shard) -> None:
        """A stage takes sessions again, and says so."""
        draining = shard.draining
        if draining.is_on and self.cluster.shards.get(shard.name) is shard:
            draining._turn(False)
            for link in draining.links:
                with suppress(DgrError):
                    link.send_nowait(draining.occupancy())

    # --- in the end ---

    async def heal(self) -> None:
        """Nothing is in anybody's way any more."""
        self.note("heal")
        fill_disk(False)
        refuse_memory(0)
        self.cluster.unreachable.clear()
        for line in list(self.cluster.lines):
            line.heal()
            for packets in (line.rightward, line.leftward):
                packets.faults.clear()
            if line.meddled:
                await line.relay.cut()
        for name in self.names:
            shard = self.cluster.shards.get(name)
            if shard is not None and self.engines[name].describe().artifact != MODEL.identity:
                self.stop(name)
            await self.start(name)
            engine = self.engines[name]
            engine.slowness, engine.refused_copies = 1.0, 0
            engine.faults.clear()
            engine.thaw()
            self.undrain(self.shard(name))

    def check_idle(self) -> None:
        """No stage holds anything of anybody."""
        for name in self.running():
            shard, engine = self.shard(name), self.engines[name]
            seen = shard.statistics()
            if (seen.routes, seen.sessions, seen.leased_bytes) != (0, 0, 0):
                self.accuse(f"stage {name} is not idle: {seen.routes} routes, {seen.sessions} sessions, {seen.leased}")
            for slot in range(CONTEXT.n_seq_max):
                if engine.position(slot):
                    self.accuse(f"stage {name}: slot {slot} holds {engine.position(slot)} tokens of nobody")
            if len(shard._awaited):
                self.accuse(f"stage {name} remembers {len(shard._awaited)} waits of route sessions that are over")
            if shard.draining.links:
                self.accuse(f"stage {name} remembers {len(shard.draining.links)} control links that have ended")


class _Disk:
    """Where the log goes; it can be full."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(text)

    def flush(self) -> None:
        """Nothing is kept."""


class _Defects(logging.Handler):
    """What dgr itself calls a defect is one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.world: World | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.world is not None:
            self.world.accuse(f"a defect was logged: {self.format(record)}")


@contextmanager
def simulated(seed: str) -> Iterator[Callable[[World], None]]:
    """What an episode needs to follow from its seed, patched for the length of the block."""
    with pytest.MonkeyPatch.context() as patch:
        dice = random.Random(f"{seed}/ids")
        patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        trio._core._run._r.seed(seed)
        patch.setattr(secrets, "token_bytes", lambda n=32: dice.randbytes(n))
        patch.setattr(scheduler, "EngineThread", SimThread)
        # Copies of short prompts are worth their slots: contexts are small here.
        patch.setattr(serving_sessions, "WORTH_A_COPY", 10)
        patch.setattr(logging, "raiseExceptions", False)
        patch.setattr(_Disk, "full", False)
        patch.setattr(_Memory, "refusals", 0)
        patch.setattr(framing, "new_buffer", _Memory.give)
        disk, defects, logger = logging.StreamHandler(_Disk()), _Defects(), logging.getLogger("dgr")
        level, spreads = logger.level, logger.propagate
        logger.addHandler(disk)
        logger.addHandler(defects)
        logger.setLevel(logging.INFO)
        logger.propagate = False

        def watch(world: World) -> None:
            defects.world = world

        try:
            yield watch
        finally:
            logger.removeHandler(disk)
            logger.removeHandler(defects)
            logger.setLevel(level)
            logger.propagate = spreads


def fill_disk(full: bool) -> None:
    """The disk of the log is full, or no longer."""
    _Disk.full = full


class _Memory:
    """What payloads under way get for their bytes; it can be refused."""

    refusals = 0

    @classmethod
    def give(cls, n_bytes: int) -> memoryview:
        if cls.refusals:
            cls.refusals -= 1
            raise MemoryError("refused")
        return new_buffer(n_bytes)


def refuse_memory(times: int) -> None:
    """The next so many payloads get no memory."""
    _Memory.refusals = times


def open_files() -> list[str]:
    """What descriptors of this process are open on, without numbers that differ; empty where the system does not tell."""
    found = []
    with suppress(FileNotFoundError):
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the one of this look
                found.append(str(entry.readlink()).partition(":[")[0])
    return sorted(found)


def tasks_alive() -> int:
    """Tasks of the program, the caller's own and trio's left out."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found, todo = 0, [root]
    while todo:
        task = todo.pop()
        found += 1
        todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found
