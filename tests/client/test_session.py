"""A session against a route that is a script: no stage, no link, every reply and every loss at a chosen moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import trio
import trio.testing
from attrs import define, field

from dgr.client.events import Event, GenerationCancelled, Prefilled, PrefillProgress, RePrefilled, StateLost
from dgr.client.generation import Generation
from dgr.client.pace import ChunkPace
from dgr.client.replies import ControlRequest, PendingReply
from dgr.client.route_client import SessionLimits, Timeouts
from dgr.client.session import ClientSession
from dgr.core.prefix import PrefixDigest
from dgr.core.state_machine import StateMachine
from dgr.core.values import Expectation, Key, SamplingParams, StateSummary
from dgr.errors import (
    ClosedError,
    ContextLimitExceeded,
    DgrError,
    InvalidToken,
    NonFinite,
    Overloaded,
    PrefillFailed,
    SessionBusy,
    SessionError,
    SessionLost,
    WireError,
)
from dgr.protocol.runs import next_in_run
from dgr.protocol.states import CLIENT_SESSION, ClientEvent, ClientState
from dgr.wire import frames
from dgr.wire.framing import Received

N_VOCAB, N_CTX, CHUNK, WINDOW = 50, 40, 4, 2
LIMITS = SessionLimits(n_vocab=N_VOCAB, n_ctx=N_CTX, chunk=CHUNK, window=WINDOW)
ROUTE_ID = b"route-of-16-byte"


def next_token(transcript: list[int]) -> int:
    """What the scripted model draws: a function of the whole transcript."""
    return (sum(transcript) * 7 + len(transcript)) % N_VOCAB


@define(eq=False)
class ScriptedRoute:
    """A route whose stages do what they should, at once, unless the test holds or twists their replies."""

    epoch: int = 1
    timeouts: Timeouts = field(factory=lambda: Timeouts(reply=5.0, control=5.0, route=5.0))
    limits: SessionLimits = LIMITS
    pace: ChunkPace = field(factory=lambda: ChunkPace(CHUNK, None))
    events: list[Event] = field(factory=list)
    #: Work frames in the order in which they were sent.
    sent: list[frames.Tokens] = field(factory=list)
    cancels: list[int] = field(factory=list)
    requests: list[frames.Frame] = field(factory=list)
    #: What the stages hold of the session.
    held: list[int] = field(factory=list)
    #: Whether replies wait for :meth:`release`.
    holding: bool = False
    #: Makes another reply of the right one.
    twist: Callable[[frames.Tokens], frames.Frame] | None = None
    #: What Open is replied to with.
    opened: Callable[[frames.Open], frames.Frame] | None = None
    broken: bool = False
    _waiting: dict[tuple[int, int], tuple[frames.Tokens, PendingReply]] = field(factory=dict)

    def key(self, session: int) -> Key:
        return Key(ROUTE_ID, self.epoch, session)

    async def wait_live(self) -> None:
        await trio.lowlevel.checkpoint()

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def send_work(self, frame: frames.Tokens) -> PendingReply:
        if self.broken:
            raise WireError("the link to the head is broken")
        reply = PendingReply()
        self.sent.append(frame)
        self._waiting[frame.key.session, frame.seq] = frame, reply
        if not self.holding:
            self.release()
        return reply

    def await_work(self, frame: frames.Tokens) -> PendingReply:
        reply = PendingReply()
        self._waiting[frame.key.session, frame.seq] = frame, reply
        if not self.holding:
            self.release()
        return reply

    def release(self, frames_to_run: int = 10**9) -> None:
        """Run held work frames, oldest first, and reply; what follows in a decode run counts as one more."""
        while self._waiting and frames_to_run:
            frames_to_run -= 1
            frame, reply = self._waiting.pop(next(iter(self._waiting)))
            result = self._run(frame)
            if self.twist is not None:
                reply.set(Received(self.twist(frame)))
            else:
                reply.set(Received(result))

    def _run(self, frame: frames.Tokens) -> frames.Frame:
        if frame.seq <= max(self.cancels, default=0):
            return frames.WorkSkipped(frame.key, frame.seq, len(self.held))
        if frame.expect != Expectation(len(self.held), PrefixDigest(self.held).digest()):
            return frames.CacheMiss(frame.key, frame.seq, frames.Miss.POSITION, len(self.held))
        self.held.extend(frame.tokens)
        if frame.sampling is not None:
            token, stands = next_token(self.held), Expectation(len(self.held), PrefixDigest(self.held).digest())
            goes_on = next_in_run(frame, token, stands, N_CTX) is not None
            return frames.Token(frame.key, frame.seq, len(self.held), token, (), goes_on)
        return frames.Advanced(frame.key, frame.seq, len(self.held))

    def cancel_work(self, session: int, last_seq: int) -> None:
        if self.broken:
            raise WireError("the link to the head is broken")
        self.cancels.append(last_seq)

    def fail_work(self, session: int, seq: int, error: DgrError) -> None:
        _, reply = self._waiting.pop((session, seq), (None, PendingReply()))
        reply.set(error)

    async def ask_all(self, frame: ControlRequest) -> list[tuple[str, frames.Frame]]:
        await trio.lowlevel.checkpoint()
        self.requests.append(frame)
        match frame:
            case frames.Open():
                self.held = []
                reply = frames.Opened(frame.key, frame.seq, 1) if self.opened is None else self.opened(frame)
            case frames.Close():
                self.held = []
                reply = frames.Closed(frame.key, frame.seq, 1)
            case frames.Fork():
                raise AssertionError("a script for one session copies none")
            case frames.QueryState():
                digest = PrefixDigest(self.held).digest()
                reply = frames.StateReport(frame.key, frame.seq, digest, StateSummary(len(self.held), ()))
        return [("head", reply)]


def undisturbed(prompt: list[int], n: int) -> list[int]:
    """The answer of a model that nothing ever happens to."""
    transcript = list(prompt)
    for _ in range(n):
        transcript.append(next_token(transcript))
    return transcript[len(prompt) :]


async def take(generation: Generation, n: int) -> list[int]:
    return [(await anext(generation)).id for _ in range(n)]


async def cancelled_after(session: ClientSession, generation: Generation) -> None:
    """Ask for a token, let the work be sent, and give up."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, generation, 1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.fixture
def route() -> ScriptedRoute:
    return ScriptedRoute()


@pytest.fixture
def session(route: ScriptedRoute) -> ClientSession:
    return ClientSession(route, 1, retries=2)


# --- undisturbed -----------------------------------------------------------------------------------------------------


async def test_an_answer_is_prefilled_in_chunks_and_decoded_token_by_token(
    route: ScriptedRoute, session: ClientSession
) -> None:
    prompt = list(range(10))
    assert await take(session.generate(prompt, max_tokens=3), 3) == undisturbed(prompt, 3)
    assert [len(frame.tokens) for frame in route.sent] == [4, 4, 2, 1, 1]
    assert [frame.expect.position for frame in route.sent] == [0, 4, 8, 10, 11]
    assert [frame.seq for frame in route.sent] == sorted({frame.seq for frame in route.sent})
    assert [type(event) for event in route.events] == [PrefillProgress] * 3 + [Prefilled]
    assert [event.committed for event in route.events if isinstance(event, PrefillProgress)] == [4, 8, 10]


async def test_no_more_chunks_are_in_flight_than_the_window_holds(route: ScriptedRoute, session: ClientSession) -> None:
    route.holding = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.prefill, list(range(17)))
        await trio.testing.wait_all_tasks_blocked()
        assert session.in_flight == len(route.sent) == WINDOW
        route.release(1)
        await trio.testing.wait_all_tasks_blocked()
        assert (session.in_flight, len(route.sent), session.committed) == (WINDOW, WINDOW + 1, CHUNK)
        route.holding = False
        route.release()
    assert (session.committed, session.in_flight) == (17, 0)


async def test_the_next_turn_prefills_only_what_is_new(route: ScriptedRoute, session: ClientSession) -> None:
    await take(session.generate([1, 2, 3], max_tokens=2), 2)
    del route.sent[:]
    await take(session.generate([4, 5]), 1)
    assert [frame.tokens for frame in route.sent] == [(session.transcript[4], 4, 5)]


async def test_sampling_travels_with_the_last_chunk_alone(route: ScriptedRoute, session: ClientSession) -> None:
    await take(session.generate(list(range(10)), sampling=SamplingParams(temperature=0.5, seed=3)), 1)
    assert [frame.sampling is not None for frame in route.sent] == [False, False, True]


# --- bad input changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "error"), [([N_VOCAB], InvalidToken), ([-1], InvalidToken), ([1] * (N_CTX + 1), ContextLimitExceeded)]
)
async def test_what_the_model_cannot_take_is_refused_and_nothing_is_changed(
    route: ScriptedRoute, session: ClientSession, tokens: list[int], error: type[DgrError]
) -> None:
    await session.prefill([1, 2, 3])
    before = (list(session.transcript), session.turn, session.state, session.committed, len(route.sent))
    with pytest.raises(error):
        session.generate(tokens)
    assert (list(session.transcript), session.turn, session.state, session.committed, len(route.sent)) == before


# --- cancelling ------------------------------------------------------------------------------------------------------


async def test_a_token_drawn_for_a_caller_who_had_gone_is_given_to_the_next(
    route: ScriptedRoute, session: ClientSession
) -> None:
    prompt = [1, 2, 3]
    answer = session.generate(prompt, max_tokens=3)
    first = await take(answer, 1)
    route.holding = True
    await cancelled_after(session, answer)
    assert session.state is ClientState.DRAINING
    route.cancels.clear()  # it came too late: the step had begun
    route.holding = False
    route.release()
    n_sent = len(route.sent)
    assert first + await take(answer, 2) == undisturbed(prompt, 3)
    assert len(route.sent) == n_sent + 1, "the token that was kept is not drawn again"


async def test_a_kept_token_is_not_given_to_one_who_draws_otherwise(
    route: ScriptedRoute, session: ClientSession
) -> None:
    answer = session.generate([1, 2, 3])
    route.holding = True
    await cancelled_after(session, answer)
    route.cancels.clear()
    route.holding = False
    route.release()
    del route.sent[:]
    await take(session.generate(sampling=SamplingParams(temperature=1.0, seed=1)), 1)
    assert [frame.expect.position for frame in route.sent] == [0], "its logits are gone: everything is run again"
    assert RePrefilled in map(type, route.events)


async def test_cancelled_chunks_that_were_not_started_leave_the_session_where_it_stands(
    route: ScriptedRoute, session: ClientSession
) -> None:
    route.holding = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.prefill, list(range(17)))
        await trio.testing.wait_all_tasks_blocked()
        route.release(1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert route.cancels == [route.sent[-1].seq]
    assert session.in_flight > 0
    route.holding = False
    route.release()
    assert session.in_flight == 0, "replies that have come are in flight no more, taken or not"
    del route.sent[:]
    await take(session.generate(), 1)
    assert GenerationCancelled(1, CHUNK) in route.events
    assert route.sent[0].expect.position == CHUNK
    assert session.transcript[-1] == undisturbed(list(range(17)), 1)[0]


@pytest.mark.parametrize("same", [6, 2])
async def test_a_transcript_rewritten_while_it_drains_counts_as_far_as_it_was_sent(
    route: ScriptedRoute, session: ClientSession, same: int
) -> None:
    """``same``: tokens that both transcripts begin with; the chunk of four that was committed counts only with six."""
    route.holding = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.prefill, list(range(8)))
        await trio.testing.wait_all_tasks_blocked()
        route.release(1)
        nursery.cancel_scope.cancel()
    other = [*range(same), 30, 31, 32, 33, 34]
    answer = session.generate(transcript=other)
    assert session.state is ClientState.DIVERGING
    route.holding = False
    route.release()
    del route.sent[:]
    assert await take(answer, 1) == undisturbed(other, 1)
    assert route.sent[0].expect.position == (CHUNK if same >= CHUNK else 0)


async def test_two_callers_at_once_are_refused(route: ScriptedRoute, session: ClientSession) -> None:
    route.holding = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.prefill, [1, 2, 3])
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(SessionBusy):
            session.generate([4])
        route.holding = False
        route.release()


async def test_an_older_answer_is_over_once_another_turn_began(route: ScriptedRoute, session: ClientSession) -> None:
    old = session.generate([1])
    await take(old, 1)
    session.generate([2])
    with pytest.raises(SessionBusy):
        await take(old, 1)


# --- decode runs ---


async def test_a_run_brings_its_tokens_without_being_asked_for_each(
    route: ScriptedRoute, session: ClientSession
) -> None:
    answer = session.generate([1, 2, 3], max_tokens=8, ahead=3)
    assert await take(answer, 8) == undisturbed([1, 2, 3], 8)
    granted = [0 if frame.run is None else frame.run.tokens for frame in route.sent]
    assert granted == [3, 3], "two runs of a token and three further ones"
    seqs = [frame.seq for frame in route.sent]
    assert seqs[1] == seqs[0] + 4, "the numbers of what the tail sends are the run's"
    assert session.state is ClientState.READY
    assert session.committed == len(session.transcript) - 1


@pytest.mark.parametrize("taken", [1, 2, 3, 4])
async def test_who_leaves_a_run_and_comes_back_gets_the_same_and_nothing_is_run_again(
    route: ScriptedRoute, session: ClientSession, taken: int
) -> None:
    said = await take(session.generate([1, 2, 3], ahead=3), taken)
    assert session.committed == len(session.transcript) - 1 + 4 - taken
    n_held = len(route.held)
    assert said + await take(session.generate(), 4 - taken) == undisturbed([1, 2, 3], 4)
    assert len(route.held) == n_held
    assert await take(session.generate(ahead=2), 5) == undisturbed([*session.transcript[:-5]], 5)
    assert not [event for event in route.events if isinstance(event, StateLost)]


@pytest.mark.parametrize(("ahead", "due"), [(1, []), (2, ["overrun"]), (3, ["overrun"])])
async def test_an_overrun_is_dropped_with_the_state_that_holds_it(
    route: ScriptedRoute, session: ClientSession, ahead: int, due: list[str]
) -> None:
    """One token that is drawn and not read is in no state yet."""
    said = await take(session.generate([1, 2, 3], ahead=ahead), 1)
    other = [1, 2, 3, *said, (undisturbed([1, 2, 3], 2)[1] + 1) % N_VOCAB]
    assert await take(session.generate(transcript=other), 2) == undisturbed(other, 2)
    lost = [event.reason for event in route.events if isinstance(event, StateLost)]
    assert lost == due
    assert route.held == [*other, *undisturbed(other, 1)]


async def test_what_is_said_next_may_be_what_was_drawn(route: ScriptedRoute, session: ClientSession) -> None:
    """A server that is given its own unread answer back has nothing to run again."""
    said = await take(session.generate([1, 2, 3], ahead=3), 1)
    whole = [1, 2, 3, *undisturbed([1, 2, 3], 3)]
    assert said == whole[3:4]
    assert await take(session.generate(transcript=whole), 2) == undisturbed(whole, 2)
    assert await take(session.generate([4]), 1) == undisturbed([*whole, *undisturbed(whole, 2), 4], 1)
    assert not [event for event in route.events if isinstance(event, StateLost)]


async def test_other_sampling_than_the_runs_draws_anew(route: ScriptedRoute, session: ClientSession) -> None:
    await take(session.generate([1, 2, 3], ahead=3), 2)
    await take(session.generate(sampling=SamplingParams(temperature=1.0, seed=1)), 1)
    assert [event.reason for event in route.events if isinstance(event, StateLost)] == ["overrun"]


@pytest.mark.parametrize("released", [0, 1, 2])
async def test_a_cancelled_run_stops_where_the_head_skips_it(
    route: ScriptedRoute, session: ClientSession, released: int
) -> None:
    first = await take(session.generate([1, 2, 3]), 1)
    answer = session.generate(max_tokens=6, ahead=5)
    route.holding = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, answer, 6)
        await trio.testing.wait_all_tasks_blocked()
        route.release(released)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert route.cancels == [route.sent[-1].seq + 5], "the numbers of the whole run"
    assert session.state is ClientState.DRAINING
    route.holding = False
    route.release()
    read = session.transcript[4:]
    assert first + read + await take(session.generate(), 3) == undisturbed([1, 2, 3], 4 + len(read))
    assert not [event for event in route.events if isinstance(event, StateLost)]


async def test_a_route_change_in_a_run_drops_what_was_not_read(route: ScriptedRoute, session: ClientSession) -> None:
    answer = session.generate([1, 2, 3], max_tokens=6, ahead=5)
    said = await take(answer, 2)
    session.lose("route change")
    assert said + await take(answer, 4) == undisturbed([1, 2, 3], 6)
    assert [event.tokens for event in route.events if isinstance(event, RePrefilled)] == [5]


async def test_an_answer_of_a_known_length_and_one_that_is_ended_by_a_token_run_no_further(
    route: ScriptedRoute, session: ClientSession
) -> None:
    rest = undisturbed([1, 2, 3], 6)
    ending = next(token for token in rest[1:] if rest.index(token) == rest[1:].index(token) + 1)
    said = [token.id async for token in session.generate([1, 2, 3], stop=[ending], ahead=30)]
    assert said == rest[: rest.index(ending)]
    assert route.held == session.transcript[:-1], "the stages hold what is before the end, and no more"
    assert len([token async for token in session.generate([7], max_tokens=3, ahead=30)]) == 3
    assert session.committed == len(session.transcript) - 1


async def test_a_full_context_ends_a_run(route: ScriptedRoute, session: ClientSession) -> None:
    prompt = list(range(N_CTX - 3))
    answer = session.generate(prompt, ahead=30)
    assert [token.id async for token in answer] == undisturbed(prompt, 4)
    assert answer.finish_reason == "context"


# --- losing ----------------------------------------------------------------------------------------------------------


async def test_a_miss_is_told_and_re_prefilled_with_the_same_text(route: ScriptedRoute, session: ClientSession) -> None:
    prompt = list(range(6))
    answer = session.generate(prompt, max_tokens=4)
    got = await take(answer, 2)
    route.held = route.held[:-1]  # a stage forgot a token
    assert got + await take(answer, 2) == undisturbed(prompt, 4)
    told = [type(event) for event in route.events if not isinstance(event, PrefillProgress)]
    assert told == [Prefilled, StateLost, RePrefilled]
    assert [type(request) for request in route.requests] == [frames.Open, frames.Close, frames.Open]


async def test_a_route_change_in_mid_answer_is_re_prefilled_without_a_close(
    route: ScriptedRoute, session: ClientSession
) -> None:
    answer = session.generate([1, 2], max_tokens=2)
    got = await take(answer, 1)
    route.epoch += 1
    route.held = []
    session.lose("route change")
    assert got + await take(answer, 1) == undisturbed([1, 2], 2)
    assert [type(request) for request in route.requests] == [frames.Open, frames.Open], "the fence dropped it already"
    assert [event.reason for event in route.events if isinstance(event, RePrefilled)] == ["route change"]


async def test_a_session_lost_again_and_again_is_given_up(route: ScriptedRoute, session: ClientSession) -> None:
    route.twist = lambda frame: frames.CacheMiss(frame.key, frame.seq, frames.Miss.EVICTED, 0)
    with pytest.raises(PrefillFailed, match="lost 3 times"):
        await session.prefill([1, 2, 3])
    route.twist = None
    await session.prefill([])
    assert session.committed == 3, "the same call may be made again"


@pytest.mark.parametrize(
    ("code", "error"),
    [(frames.Refusal.NON_FINITE, NonFinite), (frames.Refusal.INPUT, DgrError), (frames.Refusal.ENGINE, PrefillFailed)],
)
async def test_a_refusal_of_work_means_what_it_says(
    route: ScriptedRoute, session: ClientSession, code: frames.Refusal, error: type[DgrError]
) -> None:
    route.twist = lambda frame: frames.Refused(frame.key, frame.seq, code, "because")
    with pytest.raises(error, match="because"):
        await session.prefill([1])
    assert session.state is ClientState.LOST


async def test_a_stage_without_a_slot_is_told_as_overloaded_and_asked_again_later(
    route: ScriptedRoute, session: ClientSession
) -> None:
    route.opened = lambda frame: frames.Refused(frame.key, frame.seq, frames.Refusal.OVERLOADED, "no slot")
    with pytest.raises(Overloaded):
        await session.prefill([1])
    route.opened = None
    await session.prefill([])
    assert session.committed == 1


async def test_a_head_that_cannot_be_reached_loses_the_session_and_no_token(
    route: ScriptedRoute, session: ClientSession
) -> None:
    answer = session.generate([1], max_tokens=2)
    got = await take(answer, 1)
    route.broken = True
    with pytest.raises(PrefillFailed):
        await take(answer, 1)
    route.broken = False
    assert got + await take(answer, 1) == undisturbed([1], 2)


# --- closing ---------------------------------------------------------------------------------------------------------


async def test_a_closed_session_refuses_everything_and_its_waits_end(
    route: ScriptedRoute, session: ClientSession
) -> None:
    route.holding = True
    async with trio.open_nursery() as nursery:

        async def waits() -> None:
            with pytest.raises(SessionError):
                await session.prefill([1])

        nursery.start_soon(waits)
        await trio.testing.wait_all_tasks_blocked()
        await session.aclose()
    calls: list[Callable[[], object]] = [lambda: session.generate([1]), lambda: session.generate()]
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()
    await session.aclose()
    assert [type(request) for request in route.requests] == [frames.Open, frames.Close]


# --- the table is what happens ---------------------------------------------------------------------------------------


def record(session: ClientSession, rows: set[tuple[ClientState, ClientEvent]]) -> None:
    """Note every row of the table that the session fires."""

    class Recording(StateMachine[ClientState, ClientEvent]):
        def fire(self, event: ClientEvent) -> ClientState:
            rows.add((self.state, event))
            return super().fire(event)

    session._machine = Recording(CLIENT_SESSION)


async def bring_to(route: ScriptedRoute, session: ClientSession, state: ClientState) -> Generation | None:
    """Bring a cold session to a state, the ordinary way; gives the answer that is being read there."""
    if state in (ClientState.COLD, ClientState.CLOSED):
        return None
    await session.prefill([1, 2])
    answer: Generation | None = None
    match state:
        case ClientState.AHEAD:
            answer = session.generate([3], ahead=3)
            await take(answer, 1)
        case ClientState.LOST:
            session.lose("a test")
        case ClientState.DRAINING | ClientState.DIVERGING | ClientState.DRAWN:
            route.holding = True
            await cancelled_after(session, session.generate([3]))
            if state is ClientState.DIVERGING:
                session.generate(transcript=[9])
            if state is ClientState.DRAWN:
                route.cancels.clear()
                route.holding = False
                route.release()
                await session._ensure_ready()
    assert session.state is state
    return answer


async def test_every_row_of_the_table_happens_and_no_other() -> None:
    """Every state, then every thing that can be done to a session in it; the rows fired are the table's, all of them."""
    rows: set[tuple[ClientState, ClientEvent]] = set()
    deeds: deque[tuple[ClientState, str]] = deque(
        (state, deed)
        for state in ClientState
        for deed in (
            "lose",
            "close",
            "draw",
            "draw again",
            "rewrite",
            "wait for the reply",
            "refuse the open",
            "cancel",
            "go on",
        )
        if state not in (ClientState.WORKING, ClientState.CLOSED)
    )
    for state, deed in deeds:
        route = ScriptedRoute()
        session = ClientSession(route, 1, retries=2)
        record(session, rows)
        answer = await bring_to(route, session, state)
        match deed:
            case "go on" if answer is not None:
                await take(answer, 2)
            case "lose":
                session.lose("a test")
            case "close":
                await session.aclose()
            case "draw" | "wait for the reply":
                if deed == "wait for the reply":
                    route.cancels.clear()
                route.holding = False
                route.release()
                await take(session.generate(() if session.transcript else [5]), 1)
            case "draw again":
                route.holding = False
                route.release()
                await take(session.generate([6, 7, 8, 9, 10]), 2)
            case "rewrite":
                session.generate(transcript=[40, 41])
                session.generate(transcript=[42])
            case "refuse the open":
                route.opened = lambda frame: frames.Refused(frame.key, frame.seq, frames.Refusal.OVERLOADED, "no")
                session.lose("a test")
                route.holding = False
                route.release()
                with pytest.raises(Overloaded):
                    await take(session.generate([5]), 1)
                with pytest.raises(Overloaded):
                    await take(session.generate([5]), 1)
            case "cancel":
                route.holding = True
                await cancelled_after(session, session.generate([7]))
                route.cancels.clear()
                session.generate(transcript=[1])
                route.holding = False
                route.release()
                await take(session.generate([3]), 1)
        await session.aclose()
    # What can happen only while somebody waits.
    for during in ("lose", "close"):
        route = ScriptedRoute(holding=True)
        session = ClientSession(route, 1, retries=0)
        record(session, rows)
        async with trio.open_nursery() as nursery:

            async def waits(session: ClientSession = session) -> None:
                with pytest.raises((PrefillFailed, SessionError, SessionLost, ClosedError)):
                    await session.prefill([1])

            nursery.start_soon(waits)
            await trio.testing.wait_all_tasks_blocked()
            assert session.state is ClientState.WORKING
            if during == "lose":
                session.lose("a test")
            else:
                await session.aclose()
        await session.aclose()
    missing = set(CLIENT_SESSION.transitions) - rows
    assert not missing, f"rows that nothing fires: {sorted(f'{s.value} on {e.value}' for s, e in missing)}"
    assert rows <= set(CLIENT_SESSION.transitions)
