"""Properties of the contract's model: stages agree, state is what a fresh prefill gives, and nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from narrow import members

from dgr.core.route import LayerRange
from dgr.core.state_machine import InvalidTransition
from dgr.errors import InputError
from dgr.testing.mtp_contract.messages import (
    HEADER_BYTES,
    ID_BYTES,
    TO_PIPELINE,
    TO_STAGE,
    MtpWork,
    Reason,
    Want,
    encode_message,
)
from dgr.testing.mtp_contract.reference import ReferenceTrunk, StageView
from dgr.testing.mtp_contract.rollback import CompressorRing, RollbackLedger, RollbackShape, rollback_exact
from dgr.testing.mtp_contract.route import ReferenceRoute
from dgr.testing.mtp_contract.states import MACHINES, RoundState, TrunkState

TOKENS = [3 + (at * at + 7 * at) % 500 for at in range(600)]

# --- one session on one stage ----------------------------------------------------------------------------------------

ACTS = st.one_of(
    st.tuples(st.just("run"), st.integers(1, 6)),
    st.tuples(st.just("run"), st.integers(100, 140)),
    st.tuples(st.just("back"), st.integers(0, 6)),
    st.tuples(st.just("back"), st.integers(1, 3)),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("replace"), st.just(0)),
)


def rows(begin: int, end: int) -> list[bytes]:
    return [token.to_bytes(4, "little") for token in TOKENS[begin:end]]


def trunk_of(shape: RollbackShape, ledger: type[RollbackLedger] = RollbackLedger) -> ReferenceTrunk:
    trunk = ReferenceTrunk.empty(LayerRange(0, 2), shape)
    trunk.ledger = ledger(shape)
    return trunk


def fresh(shape: RollbackShape, position: int) -> bytes:
    trunk = trunk_of(shape)
    if position:
        trunk.run(rows(0, position))
    return trunk.live()


def play(shape: RollbackShape, acts: Sequence[tuple[str, int]], ledger: type[RollbackLedger] = RollbackLedger) -> None:
    """Every act leaves the state of a fresh prefill; every refusal leaves everything as it was."""
    trunk = trunk_of(shape, ledger)
    for act, n in acts:
        position = trunk.ledger.position
        match act:
            case "run" if position + n <= len(TOKENS):
                trunk.run(rows(position, position + n))
            case "back":
                before = (trunk.live(), trunk.view(None))
                if trunk.ledger.refusal(n) is None:
                    assert rollback_exact(position, n, trunk.ledger.n_last, shape.planes)
                    trunk.roll_back(n)
                    assert trunk.ledger.position == position - n
                else:
                    assert (trunk.live(), trunk.view(None)) == before
            case "clear":
                trunk.clear()
                assert trunk.view(None) == trunk_of(shape).view(None), "a clear leaves nothing, no budget either"
            case "replace" if position:
                trunk.replace()
                assert trunk.ledger.budget == 0
                assert trunk.ledger.refusal(1) in (Reason.BUDGET, Reason.RANGE, Reason.PLANES)
        assert trunk.live() == fresh(shape, trunk.ledger.position), (act, n)
        view = trunk.view(None)
        assert (-1, -1) not in (view.csa_ring, view.hca_ring)
        assert view.budget <= min(shape.planes, view.n_last)


@settings(derandomize=True, max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(planes=st.integers(0, 5), n_seq_max=st.integers(1, 2), acts=st.lists(ACTS, max_size=12))
def test_whatever_a_stage_does_its_state_is_that_of_a_fresh_prefill(
    planes: int, n_seq_max: int, acts: list[tuple[str, int]]
) -> None:
    play(RollbackShape(planes, n_ubatch=32, n_seq_max=n_seq_max), acts)


class KeepsBudgetOverClear(RollbackLedger):
    def clear(self) -> None:
        n_last = self.n_last
        super().clear()
        self.n_last, self.state = n_last, TrunkState.SETTLED


class KeepsBudgetOverReplace(RollbackLedger):
    def replace(self, position: int) -> None:
        n_last = self.n_last
        super().replace(position)
        self.n_last, self.state = n_last, TrunkState.SETTLED


class ForgetsPending(RollbackLedger):
    def roll_back(self, k: int) -> None:
        super().roll_back(k)
        self.pending = 0


class NeverTakesPending(RollbackLedger):
    def decode(self, n_tokens: int) -> None:
        pending = self.pending
        super().decode(n_tokens)
        self.pending = pending


@pytest.mark.parametrize(
    ("ledger", "acts"),
    [
        (KeepsBudgetOverClear, [("run", 5), ("clear", 0)]),
        (KeepsBudgetOverReplace, [("run", 130), ("run", 5), ("replace", 0), ("back", 3), ("run", 1)]),
        (ForgetsPending, [("run", 122), ("run", 6), ("back", 3), ("run", 4)]),
        (NeverTakesPending, [("run", 122), ("run", 6), ("back", 3), ("run", 1), ("run", 8)]),
    ],
)
def test_a_ledger_with_a_defect_does_not_pass(ledger: type[RollbackLedger], acts: list[tuple[str, int]]) -> None:
    play(RollbackShape(4, n_ubatch=32), acts)
    with pytest.raises(AssertionError):
        play(RollbackShape(4, n_ubatch=32), acts, ledger)


# --- upstream's own rule ---------------------------------------------------------------------------------------------


def _ring_is_right(ring: CompressorRing, n_last: int, position: int, k: int) -> bool:
    """Whether a rollback by plane ``k`` gives the right rows at every later block."""
    truth = type(ring)(ring.ratio, ring.overlap, 0)

    def value(at: int) -> bytes:
        return at.to_bytes(8, "little")

    truth.run(0, [value(at) for at in range(position + 2 * ring.ratio)], 0)
    ring.run(0, [value(at) for at in range(position - n_last)], 0)
    ring.run(position - n_last, [value(at) for at in range(position - n_last, position)], 0)
    ring.run(position - k, [value(position - k)], k)
    ring.run(position - k + 1, [value(at) for at in range(position - k + 1, position + 2 * ring.ratio)], 0)
    n_rows = (position + 2 * ring.ratio) // ring.ratio
    return ring.rows[:n_rows] == truth.rows[:n_rows]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(position=st.one_of(st.integers(10, 40), st.integers(120, 300)), n_last=st.integers(1, 9), k=st.integers(1, 8))
def test_a_plane_is_right_exactly_when_the_closed_form_says_so(position: int, n_last: int, k: int) -> None:
    """The rings against the closed form of a simulation of upstream's plan; the contract's rule is within it."""
    exact = all(_ring_is_right(ring, n_last, position, k) for ring in (CompressorRing.csa(8), CompressorRing.hca(8)))
    assert exact == rollback_exact(position, k, n_last, 8)
    if k <= n_last:
        assert exact


def split_equal(counts: Sequence[int], n_ubatch: int, keep: int) -> list[dict[int, int]]:
    """``llama_batch_allocr::split_equal`` for sequences 0, 1, ..: tokens of each in every ubatch (batch:540-711)."""
    assert n_ubatch > keep
    left, ubatches = list(counts), []
    while any(left):
        chosen: list[int] = []
        for seq, n in enumerate(left):
            if n and (not chosen or seq == chosen[-1] + 1):
                chosen.append(seq)
                if len(chosen) > n_ubatch:
                    break
        each = 0
        while all(left[seq] > each for seq in chosen):
            each += 1
            if (each + 1) * len(chosen) > n_ubatch:
                break
        if keep:
            fits = [left[seq] == each or left[seq] - each >= keep for seq in chosen]
            n_keep = fits.index(False) if False in fits else len(fits)
            if n_keep == 0:
                first = chosen[0]
                each = left[first] if left[first] <= n_ubatch else left[first] - max(keep, left[first] - each)
                n_keep = 1
            chosen = chosen[:n_keep]
        for seq in chosen:
            left[seq] -= each
        ubatches.append(dict.fromkeys(chosen, each))
    return ubatches


@settings(derandomize=True, max_examples=200, deadline=None)
@given(counts=st.lists(st.integers(0, 90), min_size=2, max_size=5).filter(any), planes=st.integers(1, 8))
def test_the_tail_of_every_sequence_stays_together_whatever_is_merged(counts: list[int], planes: int) -> None:
    """n_last >= min(n, R + 1) with several slots: the bound that budgets are made from, as stages merge differently."""
    shape = RollbackShape(planes, n_ubatch=32, n_seq_max=len(counts))
    last: dict[int, int] = {}
    for ubatch in split_equal(counts, 32, planes + 1):
        last.update(ubatch)
    assert set(last) == {seq for seq, n in enumerate(counts) if n}
    for seq, n in enumerate(counts):
        if n:
            assert last[seq] >= shape.guaranteed_last(n) == min(n, planes + 1)
            assert shape.ubatches(n) == tuple(one[0] for one in split_equal([n, 0], 32, planes + 1))


def test_one_slot_is_cut_without_a_look_at_the_tail() -> None:
    assert RollbackShape(4, n_ubatch=64).ubatches(65) == (64, 1)
    assert RollbackShape(4, n_ubatch=64, n_seq_max=2).ubatches(65) == (60, 5)
    assert RollbackShape(0, n_ubatch=64, n_seq_max=2).ubatches(65) == (64, 1)


class OwnCache:
    """``llama_kv_cache`` with a sliding window, one sequence: which cells hold which positions (kvc:382-449, 985-1180)."""

    def __init__(self, size: int, window: int = 128) -> None:
        self.cells: list[int | None] = [None] * size
        self.head, self.window = 0, window

    def held(self) -> set[int]:
        return {at for at in self.cells if at is not None}

    def decode(self, positions: range) -> None:
        head, size, newest = self.head, len(self.cells), max(self.held(), default=-1)
        if head > len(self.held()) + 2 * len(positions):
            head = 0
        free: list[int] = []
        for tested in range(size):
            index = (head + tested) % size
            at = self.cells[index]
            if at is None or newest + 1 - at >= self.window:
                free.append(index)
            if len(free) == len(positions):
                break
        reused = -1
        for index, at in zip(free, positions, strict=True):
            held = self.cells[index]
            reused = max(reused, -1 if held is None else held)
            self.cells[index] = at
        self.cells = [None if at is not None and at <= reused else at for at in self.cells]
        self.head = free[-1] + 1

    def truncate(self, position: int) -> None:
        gone = [index for index, at in enumerate(self.cells) if at is not None and at >= position]
        for index in gone:
            self.cells[index] = None
        if gone and gone[0] < self.head:
            self.head = gone[0]


@settings(derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=st.integers(1, 300), rounds=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=40))
def test_the_blocks_own_cache_keeps_its_window_through_drafts_and_truncations(
    prompt: int, rounds: list[tuple[int, int]]
) -> None:
    """It has no planes and needs none: 256 cells hold the window of 128 after any draft is truncated."""
    cache, position = OwnCache(256), 0
    while position < prompt:
        n = min(64, prompt - position)
        cache.decode(range(position, position + n))
        position += n
    for k, right in rounds:
        m = min(right, k)
        for guess in range(k):
            cache.decode(range(position + guess, position + guess + 1))
        cache.truncate(position)
        assert cache.held() >= set(range(max(0, position - 127), position))
        cache.decode(range(position, position + k + 1))
        position += m + 1
        cache.truncate(position)
        assert cache.held() >= set(range(max(0, position - 127), position))
        assert max(cache.held()) == position - 1


# --- a route ---------------------------------------------------------------------------------------------------------

ROUTE_ACTS = st.one_of(
    st.tuples(st.just("prefill"), st.integers(0, 20)),
    st.tuples(st.just("round"), st.integers(0, 4)),
    st.tuples(st.just("round"), st.integers(1, 4)),
    st.tuples(st.just("wrong round"), st.integers(1, 4)),
    st.tuples(st.just("ticks"), st.integers(1, 9)),
    st.tuples(st.just("cancel"), st.just(0)),
    st.tuples(st.just("epoch"), st.integers(1, 4)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("back"), st.integers(0, 6)),
    st.tuples(st.just("settle"), st.just(0)),
)


def check_route(route: ReferenceRoute, session: int) -> None:
    """Nothing in flight: all stages agree with each other, with the pipeline, and with a fresh prefill."""
    client = route.sessions[session]
    assert client.state in (RoundState.READY, RoundState.LOST)
    if client.state is RoundState.LOST or not client.is_open:
        return
    views = route.views(session)
    if any(view is None for view in views):
        return  # evicted: the next message will tell
    positions = {view.position for view in views if isinstance(view, StageView)}
    assert positions == {client.committed}
    other = ReferenceRoute(len(route.shards), route.shape)
    again = other.open()
    if client.committed:
        other.prefill(again, client.transcript[: client.committed], want=Want.NOTHING)
        other.settle()
        assert route.live(session) == other.live(again)


@settings(derandomize=True, max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    begin=st.sampled_from([2, 9, 120, 125, 127]),
    acts=st.lists(st.tuples(st.integers(0, 1), ROUTE_ACTS), max_size=14),
)
def test_whatever_happens_to_a_route_its_stages_agree(begin: int, acts: list[tuple[int, tuple[str, int]]]) -> None:
    route = ReferenceRoute(3, RollbackShape(4, n_ubatch=32, n_batch=64, n_seq_max=2, n_ctx=256))
    sessions = [route.open(), route.open()]
    for session in sessions:
        route.prefill(session, TOKENS[session : session + begin], draft=3)
    route.settle()
    for which, (act, n) in acts:
        session, client = sessions[which], route.sessions[sessions[which]]
        is_idle = client.state in (RoundState.READY, RoundState.LOST)
        room = 250 - len(client.transcript)
        match act:
            case "prefill" if is_idle and n < room:
                route.prefill(session, TOKENS[:n], draft=2, chunk=8)
            case "round" if is_idle and room > 8:
                route.send_round(session, n)
            case "wrong round" if is_idle and room > 8:
                route.send_round(session, n, [at + 3 for at in range(n)])
            case "ticks":
                for _ in range(n):
                    route.tick()
            case "cancel":
                route.cancel(session)
            case "epoch":
                route.change_route(n)
            case "evict" if client.state is RoundState.READY:
                route.evict(min(n, len(route.shards) - 1), session)
            case "back" if client.state is RoundState.READY and n < client.committed:
                route.roll_back(session, n)
            case "settle":
                route.settle()
    route.settle()
    for session in sessions:
        check_route(route, session)
        assert not route.language.special.intersection(route.sessions[session].transcript)
    for one in route.sent:
        assert isinstance(one.message, TO_PIPELINE if one.receiver == "pipeline" else TO_STAGE)
        ids = len(one.message.tokens) if isinstance(one.message, MtpWork) else len(getattr(one.message, "drafts", ()))
        assert len(encode_message(one.message)) <= HEADER_BYTES + ID_BYTES * ids
        if isinstance(one.message, MtpWork):  # the only payload there is grows with the tokens of the message alone
            assert one.message.payload in (0, 16 * len(one.message.tokens))


def test_what_crosses_a_seam_does_not_grow_with_the_context() -> None:
    """A round at position 10 and one at 400 send the same number of bytes, but for the width of integers."""
    sizes = []
    for begin in (10, 200, 400):
        route = ReferenceRoute(3, RollbackShape(4, n_ctx=1024))
        session = route.open()
        route.prefill(session, TOKENS[:begin], draft=0)
        route.settle()
        route.sent = []
        route.send_round(session, 0, [3, 3, 3])
        route.settle()
        sizes.append([len(encode_message(one.message)) + getattr(one.message, "payload", 0) for one in route.sent])
    assert len({len(one) for one in sizes}) == 1
    assert all(max(column) - min(column) <= 10 for column in zip(*sizes, strict=True))


def test_a_session_closed_in_a_round_leaves_nothing_and_disturbs_nobody() -> None:
    for acts in range(12):
        route = ReferenceRoute(3, RollbackShape(3, n_seq_max=2))
        closing, staying = route.open(), route.open()
        for session in (closing, staying):
            route.prefill(session, TOKENS[:30], draft=3)
        route.settle()
        for session in (closing, staying):
            route.send_round(session, 3)
        for _ in range(acts):
            route.tick()
        route.close(closing)
        route.settle()
        assert all(set(shard.held) == {staying} for shard in route.shards)
        check_route(route, staying)
    with pytest.raises(InputError, match="slots are taken"):
        [route.open() for _ in range(2)]


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_every_pair_is_in_the_table_or_out_of_order(name: str) -> None:
    table = MACHINES[name]
    for state in table.states:
        for event in table.events:
            if table.allows(state, event):
                assert table.follow(state, event) in table.states
            else:
                with pytest.raises(InvalidTransition, match=state.name):
                    table.follow(state, event)
    reached, frontier = {table.first}, [table.first]
    while frontier:
        state = frontier.pop()
        for (begin, _), end in table.transitions.items():
            if begin is state and end not in reached:
                reached.add(end)
                frontier.append(end)
    assert reached == set(members(table.states)), "a state that nothing leads to"
    assert {event for _, event in table.transitions} == set(members(table.events)), "an event that no state takes"


@pytest.mark.parametrize(
    "wrong", [{"planes": -1}, {"planes": 4, "n_ubatch": 5}, {"planes": 1, "n_seq_max": 0}, {"planes": 1, "n_batch": 8}]
)
def test_a_shape_that_upstream_would_abort_on_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        RollbackShape(**wrong)
