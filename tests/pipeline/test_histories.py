"""Random histories of sessions, epochs and slots, against a small model.

hypothesis drives a whole trio program step by step: the program runs in guest mode, only while a rule waits for it, so a
rule can leave work half done and let the next one strike. The clock moves only where a rule says so. A request whose
answer was lost thus never ends, and is found out when everything has come to rest.

After every step: no slot leaked, leased bytes are those of the live sessions, no answer left a stage for an epoch that is
not its own, no fence reached another pipeline's session, and every token is the one that the whole model would have drawn.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import outcome
import pytest
import trio
from attrs import define, field
from conversations import held, reference, take
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from pipeline.harness import CONTEXT, Stages, open_stages, rest

from dgr.client.generation import Generation
from dgr.client.pipeline import Pipeline
from dgr.client.session import ClientSession
from dgr.core.prefix import EMPTY_DIGEST
from dgr.core.values import Expectation, Key, LogitsWanted, SamplingParams
from dgr.errors import (
    ClosedError,
    ContextLimitExceeded,
    DgrError,
    NonFinite,
    Overloaded,
    PrefillFailed,
    SessionBusy,
    SessionError,
)
from dgr.protocol.states import ClientState, EpochState, RouteState
from dgr.stage.session import SessionActor
from dgr.stage.supervisor import EpochSupervisor
from dgr.testing import is_paused
from dgr.testing.engines.fake import Fault, FaultKind
from dgr.wire import frames
from dgr.wire.frames import Miss
from dgr.wire.links import Link

SPLITS = ["0:6", "0:2,2:6", "0:1,1:4,4:6", "0:4#b,4:6"]
SMALL = replace(CONTEXT, n_ctx=48, n_batch=8, n_ubatch=4, n_seq_max=2)
#: Tokens that stages may draw unasked.
AHEAD = 2
GREEDY, SEEDED = SamplingParams(), SamplingParams(temperature=0.8, seed=6)

TOKENS = st.lists(st.integers(0, 255), min_size=1, max_size=11)
ANY = st.integers(0, 11)


#: Turns of the loop that no call needs.
_ENOUGH = 20_000


T = TypeVar("T")


class Loop:
    """A trio program in guest mode; it runs only while a call waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        #: Whether the clock may jump while everything waits. Else it stands still.
        self.time_passes = False
        jump = trio.testing.MockClock._autojump
        patch.setattr(trio.testing.MockClock, "_autojump", lambda clock: jump(clock) if self.time_passes else None)
        self._turns: deque[Callable[[], object]] = deque()
        self._end: list[outcome.Outcome[None]] = []
        self._nursery: trio.Nursery | None = None
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._turns.append,
            done_callback=self._end.append,
            clock=trio.testing.MockClock(autojump_threshold=0),
        )
        self._run_until(lambda: self._nursery is not None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    def _run_until(self, done: Callable[[], object]) -> None:
        for _ in range(_ENOUGH):
            if done():
                return
            if self._end:
                self._end[0].unwrap()
                raise AssertionError("the program ended")
            self._turns.popleft()()
        raise AssertionError("a call waits for what does not come")

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        assert self._nursery is not None
        self._token.run_sync_soon(self._nursery.start_soon, function, *args)

    def call(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run an async function to its end, and everything else meanwhile."""
        results: list[outcome.Outcome[object]] = []

        async def run() -> None:
            results.append(await outcome.acapture(function, *args))

        self.start_soon(run)
        self._run_until(lambda: results)
        results[0].unwrap()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.time_passes = True
        self.call(trio.sleep, seconds)
        self.time_passes = False

    def close(self) -> None:
        if not self._end:
            assert self._nursery is not None
            self.time_passes = True
            self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
            for _ in range(_ENOUGH):
                if self._end:
                    return
                self._turns.popleft()()


@define(eq=False)
class Talk:
    """A session and what the model knows of it."""

    session: ClientSession
    pipeline: Running
    left: trio.Event = field(factory=trio.Event)
    transcript: list[int] = field(factory=list)
    #: The request under way.
    scope: trio.CancelScope | None = None
    generation: Generation | None = None
    #: What may have struck its request; without any, no error is due.
    disturbed: int = 0


@define(eq=False)
class Running:
    """A pipeline that is open."""

    pipeline: Pipeline
    nursery: trio.Nursery
    left: trio.Event = field(factory=trio.Event)
    talks: list[Talk] = field(factory=list)


class Watched:
    """What no stage may ever do, checked as it does it."""

    def __init__(self, patch: pytest.MonkeyPatch, stages: Callable[[], Stages]) -> None:
        self._stages = stages
        self._fencing: bytes | None = None
        send_nowait, end, begin = Link.send_nowait, SessionActor.end, EpochSupervisor._begin_fence

        def watched_send(link: Link, frame: frames.Frame) -> None:
            self._check_answer(link, frame)
            send_nowait(link, frame)

        def watched_end(actor: SessionActor, end_reason: Miss | None) -> None:
            assert self._fencing in (None, actor.key.route), "a fence reached another pipeline's session"
            end(actor, end_reason)

        def watched_begin(supervisor: EpochSupervisor, frame: frames.Fence) -> list[SessionActor] | None:
            self._fencing = supervisor.route
            try:
                return begin(supervisor, frame)
            finally:
                self._fencing = None

        patch.setattr(Link, "send_nowait", watched_send)
        patch.setattr(SessionActor, "end", watched_end)
        patch.setattr(EpochSupervisor, "_begin_fence", watched_begin)

    def _check_answer(self, link: Link, frame: frames.Frame) -> None:
        key = getattr(frame, "key", None)
        if key is None or isinstance(frame, frames.Closed):
            return
        for shard in self._stages().cluster.shards.values():
            supervisor = shard._routes.get(key.route)
            if supervisor is not None and supervisor.control is link:
                stale = isinstance(frame, frames.StaleEpoch)
                assert (key.epoch != supervisor.epoch) == stale, f"{frame} at epoch {supervisor.epoch}"
                if isinstance(frame, frames.Token | frames.Advanced | frames.StateReport | frames.Logits):
                    assert supervisor.state is EpochState.LIVE


class Histories(RuleBasedStateMachine):
    """One cluster; pipelines, sessions and stages that come, go and fail on it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        self.loop = Loop(self.patch)
        self.running: list[Running] = []
        self.holds: dict[str, trio.Event] = {}
        self.under_way = 0
        self.crashed = False
        self.unexpected: list[BaseException] = []

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        trio._core._run._r.seed(seed)
        Watched(self.patch, lambda: self.stages)

        self.loop.start_soon(self._live)
        self.settle()

    async def _live(self) -> None:
        self.leaving, self.left = trio.Event(), trio.Event()
        async with open_stages(*SPLITS, context=SMALL) as self.stages:
            await self.leaving.wait()
        self.left.set()

    # --- choosing ---

    @property
    def talks(self) -> list[Talk]:
        return [talk for running in self.running for talk in running.talks]

    def pick(self, among: list[T], which: int) -> T:
        return among[which % len(among)]

    def set(self, event: trio.Event) -> None:
        async def inside() -> None:
            event.set()

        self.loop.call(inside)

    def shard_names(self) -> list[str]:
        return list(self.stages.cluster.shards)

    def disturb(self, weight: int = 1) -> None:
        for talk in self.talks:
            talk.disturbed += weight

    # --- pipelines ---

    @precondition(lambda self: len(self.running) < 2)
    @rule(split=st.sampled_from(SPLITS), ahead=st.sampled_from([0, AHEAD]))
    def open_pipeline(self, split: str, ahead: int) -> None:
        async def live() -> None:
            try:
                async with self.stages.pipeline(split, ahead=ahead) as pipeline, trio.open_nursery() as nursery:
                    running = Running(pipeline, nursery)
                    self.running.append(running)
                    await running.left.wait()
                    nursery.cancel_scope.cancel()
            except DgrError as error:
                if not self.crashed:
                    self.unexpected.append(error)

        self.loop.start_soon(live)
        self.settle()

    @precondition(lambda self: self.running)
    @rule(which=ANY)
    def close_pipeline(self, which: int) -> None:
        """Its sessions are given up in the middle of whatever they do."""
        running = self.pick(self.running, which)
        self.running.remove(running)
        self.disturb()
        self.set(running.left)

    @precondition(lambda self: self.running)
    @rule(which=ANY, split=st.sampled_from(SPLITS), turns=st.integers(0, 60))
    def change_route(self, which: int, split: str, turns: int) -> None:
        running = self.pick(self.running, which)
        self.disturb()

        async def change() -> None:
            try:
                await running.pipeline.change_route(self.stages.route(split))
            except ClosedError as error:
                if not running.left.is_set():
                    self.unexpected.append(error)
            except DgrError as error:
                if not self.crashed:
                    self.unexpected.append(error)
            finally:
                self.under_way -= 1

        self.under_way += 1
        self.loop.start_soon(change)
        self.turns(turns)

    # --- sessions ---

    @precondition(lambda self: self.running and len(self.talks) < 4)
    @rule(which=ANY)
    def open_session(self, which: int) -> None:
        running = self.pick(self.running, which)

        async def live() -> None:
            async with running.pipeline.session() as session:
                talk = Talk(session, running)
                running.talks.append(talk)
                await talk.left.wait()

        self.loop.call(self._begin_in, running, live)

    async def _begin_in(self, running: Running, function: Callable[..., Awaitable[None]], *args: object) -> None:
        running.nursery.start_soon(partial(self._watch, function, *args))
        await trio.lowlevel.checkpoint()

    async def _watch(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            await function(*args)
        except (Exception, BaseExceptionGroup) as error:
            self.unexpected.append(error)

    @precondition(lambda self: 0 < len(self.talks) < 4)
    @rule(which=ANY, turns=st.integers(0, 40))
    def fork_session(self, which: int, turns: int) -> None:
        """The copy lives for itself; its source may answer, be closed or be lost while it is made."""
        source = self.pick(self.talks, which)
        running = source.pipeline
        self.disturb()  # its slot may be another's

        async def live() -> None:
            self.under_way += 1
            try:
                async with source.session.fork() as session:
                    self.under_way -= 1
                    talk = Talk(session, running, transcript=list(session.transcript), disturbed=100)
                    running.talks.append(talk)
                    try:
                        await talk.left.wait()
                    finally:
                        self.under_way += 1
            except (SessionBusy, Overloaded, SessionError, ClosedError):
                return  # it answers, all slots are in use, or one of the two was closed meanwhile
            finally:
                self.under_way -= 1

        self.loop.call(self._begin_in, running, live)
        self.turns(turns)

    @precondition(lambda self: self.talks)
    @rule(which=ANY)
    def close_session(self, which: int) -> None:
        """In the middle of an answer, if one is under way."""
        talk = self.pick(self.talks, which)
        talk.pipeline.talks.remove(talk)
        self.disturb()
        self.set(talk.left)

    @precondition(lambda self: any(talk.scope is None for talk in self.talks))
    @rule(
        which=ANY,
        tokens=TOKENS,
        count=st.integers(0, 4),
        sampling=st.sampled_from([GREEDY, SEEDED]),
        diverge=st.integers(0, 9),
        turns=st.integers(0, 90),
    )
    def ask(
        self, which: int, tokens: list[int], count: int, sampling: SamplingParams, diverge: int, turns: int
    ) -> None:
        """Prefill (no token wanted) or generate; the request goes on while other rules strike."""
        talk = self.pick([talk for talk in self.talks if talk.scope is None], which)
        keep = len(talk.transcript) if diverge else len(talk.transcript) // 2
        whole = [*talk.transcript[:keep], *tokens]
        self.disturb()  # its open may evict another
        talk.disturbed = self.under_way + 100 * any(engine.faults for engine in self.stages.engines.values())
        if len(whole) > SMALL.n_ctx:
            with pytest.raises(ContextLimitExceeded):
                talk.session.generate(transcript=whole)
            return
        if count == 0:
            whole = [*talk.transcript, *tokens]
            if len(whole) > SMALL.n_ctx:
                return
            work = partial(talk.session.prefill, tokens)
        else:
            talk.generation = talk.session.generate(transcript=whole, max_tokens=count, sampling=sampling, stop=())
            work = partial(self._listen, talk, talk.generation, whole, count, sampling)
        talk.transcript = whole
        talk.scope = trio.CancelScope()
        self.loop.call(self._begin_in, talk.pipeline, self._request, talk, work)
        self.turns(turns)

    async def _request(self, talk: Talk, work: Callable[[], Awaitable[None]]) -> None:
        self.under_way += 1
        try:
            with talk.scope or trio.CancelScope():
                await work()
        except (NonFinite, PrefillFailed, Overloaded) as error:
            if not talk.disturbed:
                self.unexpected.append(error)
        except (SessionError, ClosedError) as error:
            if not (talk.left.is_set() or talk.pipeline.left.is_set()):
                self.unexpected.append(error)
        finally:
            talk.scope = None
            self.under_way -= 1

    async def _listen(
        self, talk: Talk, generation: Generation, prompt: list[int], count: int, sampling: SamplingParams
    ) -> None:
        expected = reference(prompt, count, sampling)
        said: list[int] = []
        async for token in generation:
            said.append(token.id)
            talk.transcript = [*prompt, *said]
            assert said == expected[: len(said)]
            assert token.position == len(prompt) + len(said) - 1
        assert len(said) == min(count, SMALL.n_ctx + 1 - len(prompt))
        assert talk.session.transcript == talk.transcript

    @precondition(lambda self: any(talk.scope is not None for talk in self.talks))
    @rule(which=ANY, turns=st.integers(0, 30))
    def cancel(self, which: int, turns: int) -> None:
        scope = self.pick([talk.scope for talk in self.talks if talk.scope is not None], which)

        async def stop() -> None:
            scope.cancel()
            await trio.lowlevel.checkpoint()

        self.loop.call(stop)
        self.turns(turns)

    # --- what stages do to sessions ---

    @rule(which=ANY, name=ANY, reason=st.sampled_from([Miss.EVICTED, Miss.EXPIRED]))
    def lose_an_idle_session(self, which: int, name: int, reason: Miss) -> None:
        idle = [actor for actor in self.stages.shard(self.pick(self.shard_names(), name)).actors() if actor.is_idle]
        if idle:
            self.disturb()

            async def end() -> None:
                self.pick(idle, which).end(reason)

            self.loop.call(end)

    @rule(name=ANY, kind=st.sampled_from(FaultKind), slot=st.sampled_from([None, 0, 1]))
    def break_the_next_step(self, name: int, kind: FaultKind, slot: int | None) -> None:
        engine = self.stages.engines[self.pick(self.shard_names(), name)]
        if not engine.faults:
            engine.faults.append(Fault(kind, slot=slot))
        self.disturb(100)  # it may strike much later

    @precondition(lambda self: len(self.holds) < 2)
    @rule(name=ANY)
    def hold_a_stage(self, name: int) -> None:
        """A long native step: what comes queues, and no slot is cleared."""
        which = self.pick(self.shard_names(), name)
        if which in self.holds or is_paused(self.stages.shard(which)):
            return

        self.holds[which] = trio.Event()

        async def hold() -> None:
            async with held(self.stages.shard(which)):
                await self.holds[which].wait()

        self.loop.start_soon(hold)
        self.turns(2)

    @precondition(lambda self: self.holds)
    @rule(name=ANY, turns=st.integers(0, 60))
    def release_a_stage(self, name: int, turns: int) -> None:
        self.release(self.pick(list(self.holds), name))
        self.turns(turns)

    def release(self, name: str) -> None:
        self.set(self.holds.pop(name))

    @rule(name=ANY)
    def crash_a_stage(self, name: int) -> None:
        """And start it again at once."""
        which = self.pick(self.shard_names(), name)
        if which in self.holds:
            return
        self.crashed = True
        self.disturb(100)

        async def crash() -> None:
            self.stages.cluster.stop(which)
            await self.stages.start(which)

        self.loop.call(crash)

    # --- frames that come late ---

    @precondition(lambda self: any(running.pipeline.state is RouteState.LIVE for running in self.running))
    @rule(
        which=ANY,
        session=st.integers(1, 4),
        older=st.integers(0, 2),
        seq=st.integers(0, 3),
        tokens=TOKENS,
        kind=st.sampled_from(["work", "boundary", "open", "close", "cancel"]),
    )
    def a_late_frame(self, which: int, session: int, older: int, seq: int, tokens: list[int], kind: str) -> None:
        """Of an older epoch, or of an earlier life of its session: sequence numbers below those of the present one."""
        running = self.pick([one for one in self.running if one.pipeline.state is RouteState.LIVE], which)
        pipeline = running.pipeline
        key = Key(pipeline.route_id, max(0, pipeline.epoch - older), session)
        if older == 0 and (kind in ("open", "close") or pipeline.epoch == 0):
            return  # those are never late within an epoch: links keep order
        expect = Expectation(0, EMPTY_DIGEST)
        if kind == "boundary":
            self._late_boundary(pipeline, key, seq, tokens[:4])
            return
        late: dict[str, frames.Frame] = {
            "work": frames.Tokens(key, 0 if older == 0 else seq, expect, tuple(tokens[:8]), LogitsWanted.NONE, None),
            "open": frames.Open(key, seq),
            "close": frames.Close(key, seq),
            "cancel": frames.Cancel(key, 0),
        }
        frame = late[kind]

        async def send() -> None:
            pipeline._client.head.send_nowait(frame)

        self.loop.call(send)

    def _late_boundary(self, pipeline: Pipeline, key: Key, seq: int, tokens: list[int]) -> None:
        """To a stage in the middle, from the stage before it."""
        address = pipeline.route.stages[-1].address
        shard = self.stages.cluster.shards.get(address)
        if shard is None or key.epoch == pipeline.epoch:
            return
        supervisor = shard._routes.get(key.route)
        if supervisor is None:
            return
        consumed: list[int] = []
        payload = memoryview(bytes(4 * 3 * len(tokens)))
        frame = frames.Boundary(
            key, seq, Expectation(0, EMPTY_DIGEST), tuple(tokens), LogitsWanted.NONE, None, payload.nbytes
        )

        async def come() -> None:
            supervisor.work(frame, payload, lambda: consumed.append(1))
            await rest()

        self.loop.call(come)
        assert consumed == [1]

    # --- time ---

    @rule()
    def settle(self) -> None:
        self.loop.call(rest)

    def turns(self, count: int) -> None:
        async def some() -> None:
            for _ in range(count):
                await trio.lowlevel.checkpoint()

        self.loop.call(some)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "stages"):
            return
        assert self.unexpected == []
        self.stages.assert_consistent()
        for shard in self.stages.cluster.shards.values():
            for route, supervisor in shard._routes.items():
                assert supervisor.route == route
                for session, actor in supervisor.sessions.items():
                    assert (actor.key.route, actor.key.session) == (route, session)
                    if not actor.is_ending:
                        assert actor.key.epoch == supervisor.epoch
        for talk in self.talks:
            its = talk.session
            assert its.committed <= len(its.transcript) + AHEAD
            if its.state is ClientState.READY:
                assert its.in_flight == 0

    def teardown(self) -> None:
        try:
            if hasattr(self, "stages") and not self.loop._end:
                self._finish()
        finally:
            try:
                self.loop.close()
            finally:
                self.patch.undo()

    def _finish(self) -> None:
        for name in list(self.holds):
            self.release(name)
        self.loop.call(rest)
        if self.crashed:
            self.loop.sleep(5.0)  # routes come back
            self.loop.call(rest)
        assert self.under_way == 0, "a request waits for an answer that will not come"
        for engine in self.stages.engines.values():
            engine.faults.clear()
        # Whatever has happened, every session goes on as the whole model would.
        for talk in self.talks:
            if len(talk.transcript) < SMALL.n_ctx - 2:
                self.loop.call(self._goes_on, talk)
        self.everything_adds_up()
        for running in list(self.running):
            self.set(running.left)
        self.loop.call(rest)
        self.set(self.leaving)
        self.loop.call(self.left.wait)  # and nothing is left: see open_stages
        assert self.unexpected == []

    async def _goes_on(self, talk: Talk) -> None:
        prompt = [*talk.transcript, 1]
        try:
            said = await take(talk.session.generate(transcript=prompt, max_tokens=2, stop=()))
        except NonFinite:  # a tail was poisoned while it showed no values
            said = await take(talk.session.generate(transcript=prompt, max_tokens=2, stop=()))
        assert said == reference(prompt, 2)


#: Histories to look at: some, always the same, by default; to look for races give a number, which also shrinks a finding.
_MANY = os.environ.get("DGR_TEST_HISTORIES")

Histories.TestCase.settings = settings(
    max_examples=int(_MANY or "60"),
    stateful_step_count=40,
    deadline=None,
    derandomize=_MANY is None,
    phases=list(Phase) if _MANY else [Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
TestHistories = Histories.TestCase
