"""Episodes of the simulation, and what is left when one has ended.

python -m pytest tests/chaos -m chaos -k simulation   # many episodes: make test-chaos
DGR_CHAOS_SEED=17.3 ...                                # one episode again, the very same
"""

from __future__ import annotations

import gc
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing
from attrs import define, field, frozen
from chaos.sim_clients import pipelines
from chaos.sim_faults import Chaos
from chaos.sim_network import open_sim_cluster
from chaos.sim_world import Found, World, open_files, simulated, tasks_alive
from trio.testing import MockClock

__all__ = ["Episode", "Totals", "held", "own_temporary_folder", "run_episode"]

#: Seconds between two faults, in the mean.
PAUSE = 0.15
#: Seconds after which a stage remembers nothing of pipelines that are gone: twice what a fence may take.
FORGOTTEN = 61.0
#: Of so many episodes one has flipped bits.
FLIPPED = 4


@frozen
class Episode:
    """What came of one."""

    seed: str
    world: World
    steps: int
    seconds: float


@define
class Totals:
    """Of many episodes."""

    episodes: int = 0
    steps: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(factory=Counter)
    events: Counter[str] = field(factory=Counter)
    errors: Counter[str] = field(factory=Counter)
    tokens: int = 0
    right: int = 0
    not_judged: int = 0
    cancelled: int = 0
    slowest: dict[str, float] = field(factory=dict)

    def add(self, episode: Episode) -> None:
        world, answers = episode.world, episode.world.answers
        self.episodes += 1
        self.steps += episode.steps
        self.seconds += episode.seconds
        self.faults += world.faults
        self.events += world.events
        self.errors += answers.errors
        self.tokens += answers.tokens
        self.right += answers.right
        self.not_judged += answers.not_judged
        self.cancelled += answers.cancelled
        for what, seconds in answers.slowest.items():
            self.slowest[what] = max(seconds, self.slowest.get(what, 0.0))

    def __str__(self) -> str:
        def table(counts: Counter[str]) -> str:
            return "\n".join(f"  {count:8} {what}" for what, count in sorted(counts.items()))

        slowest = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in sorted(self.slowest.items()))
        return (
            f"{self.episodes} episodes, {self.seconds:.0f} s of the mock clock, {self.steps} steps of tasks\n"
            f"{self.faults.total()} faults:\n{table(self.faults)}\n"
            f"{self.tokens} tokens delivered: {self.right} right, {self.not_judged} not judged (after a flipped bit),"
            f" {self.tokens - self.right - self.not_judged} wrong\n"
            f"{self.errors.total()} requests ended in an error:\n{table(self.errors)}\n"
            f"pipelines told:\n{table(self.events)}\nslowest: {slowest}"
        )


class _Steps(trio.abc.Instrument):
    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def _live(seed: str, faults: int, lying: Sequence[str], clock: MockClock, made: Callable[[World], None]) -> None:
    """Stages, pipelines and chaos; then calm, in which everything comes back, and is left."""
    before = tasks_alive()
    async with open_sim_cluster(random.Random(f"{seed}/packets")) as cluster:
        world = World(seed, cluster, lying=lying)
        made(world)
        for name in world.names:
            await world.start(name)
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as struck:
                chaos = Chaos(world, clock, struck, flips=world.dice("flips").randrange(FLIPPED) == 0)
                for name, serves in (("talk", False), ("serve", True)):
                    nursery.start_soon(partial(pipelines, world, name, serves, chaos.scopes))
                await chaos.run(faults, PAUSE)
                world.until = trio.current_time()
            await world.heal()
            world.healed.set()
        await trio.sleep(FORGOTTEN)
        await trio.testing.wait_all_tasks_blocked()
        world.check_idle()
    if cluster.lines or cluster.shards:
        world.accuse(f"after the end there are still {[line.name for line in cluster.lines]}, {list(cluster.shards)}")
    if (left := tasks_alive() - before) > 0:
        world.accuse(f"{left} tasks are left")


def held() -> Counter[str]:
    """What this process has: threads, descriptors, children, temporary files.

    Trio's own pool keeps its threads for ten idle seconds; what others left behind may go meanwhile.
    """
    gc.collect()
    threads = (thread.name for thread in threading.enumerate() if "Trio thread" not in thread.name)
    found = Counter(f"thread {name}" for name in threads)
    found.update(f"descriptor of {name}" for name in open_files())
    found.update(f"process {child.pid}" for child in psutil.Process().children(recursive=True))
    found.update(f"temporary file {path.name}" for path in Path(tempfile.gettempdir()).iterdir())
    return found


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Temporary files of this process, and of those that it starts, are nobody else's."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield Path(folder)


def run_episode(seed: str, faults: int, *, lying: Sequence[str] = ()) -> Episode:
    """Live one episode. Raises :class:`Found` with what must not be.

    ``lying``: stages that say they are of the model and are not, to be found out.
    """
    steps, clock, worlds = _Steps(), MockClock(autojump_threshold=0), list[World]()
    with own_temporary_folder(), simulated(seed) as watch:
        before = held()

        def made(world: World) -> None:
            worlds.append(world)
            watch(world)

        trio.run(_live, seed, faults, lying, clock, made, clock=clock, instruments=[steps])
        left = held() - before
    (world,) = worlds
    world.wrong += [f"{what} is left, {count} times" for what, count in left.items()]
    if world.wrong:
        raise Found(
            f"seed {seed}: {len(world.wrong)} findings after {world.faults.total()} faults:\n"
            + "\n".join(world.wrong[:10])
            + f"\n--- the last that happened\n{world.tail}\n--- again: make test-chaos SEED={seed} FAULTS={faults}"
        )
    return Episode(seed, world, steps.count, clock.current_time())
