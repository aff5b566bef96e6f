"""The ledger: which bytes of a shard belong to whom."""

from __future__ import annotations

import re

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from dgr.engine.base import DeviceMemory, MemoryReport
from dgr.engine.budget import check_budget
from dgr.errors import BudgetExceeded
from dgr.stage.ledger import Ledger

MEMORY = MemoryReport(weights=1000, compute=50, state={"tape": 300, "tally": 30, "none": 0})


def test_leases_the_lowest_free_slot() -> None:
    ledger = Ledger(MEMORY, 3)
    one, two, three = (ledger.lease(owner) for owner in "abc")
    assert [lease.slot for lease in (one, two, three) if lease] == [0, 1, 2]
    assert ledger.lease("d") is None
    assert two is not None
    ledger.release(two)
    assert one is not None
    ledger.release(one)
    again = ledger.lease("d")
    assert again is not None
    assert again.slot == 0


def test_a_lease_knows_its_bytes() -> None:
    ledger = Ledger(MEMORY, 3)
    assert (ledger.leased_bytes, ledger.leased()) == (0, {"tape": 0, "tally": 0, "none": 0})
    lease = ledger.lease("a")
    assert lease is not None
    assert dict(lease.bytes) == {"tape": 100, "tally": 10, "none": 0}
    assert lease.total == 110
    ledger.lease("b")
    assert ledger.leased_bytes == 220
    assert ledger.leased() == {"tape": 200, "tally": 20, "none": 0}
    ledger.release(lease)
    assert ledger.leased_bytes == 110


def test_the_bytes_of_all_slots_are_all_bytes_of_state() -> None:
    ledger = Ledger(MEMORY, 3)
    for owner in range(3):
        ledger.lease(owner)
    assert ledger.leased() == dict(MEMORY.state)
    assert ledger.leased_bytes == sum(MEMORY.state.values())


def test_an_owner_holds_one_slot() -> None:
    ledger = Ledger(MEMORY, 3)
    ledger.lease("a")
    with pytest.raises(ValueError, match="'a' holds slot 0 already"):
        ledger.lease("a")


def test_only_the_holder_gives_back_and_once() -> None:
    ledger = Ledger(MEMORY, 3)
    first = ledger.lease("a")
    assert first is not None
    ledger.release(first)
    with pytest.raises(ValueError, match="slot 0 is not leased to 'a'"):
        ledger.release(first)
    second = ledger.lease("a")
    assert second is not None
    with pytest.raises(ValueError, match="is not leased"):
        ledger.release(first)
    assert ledger.leases == (second,)


def test_a_refusal_shows_the_arithmetic() -> None:
    ledger = Ledger(MemoryReport(0, 0, {"tape": 3 * 2**20}), 3)
    for owner in range(3):
        ledger.lease(owner)
    assert "all 3 sequence slots are leased (3 sessions x 1.00 MiB = 3.00 MiB)" in ledger.refusal()


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_the_sums_hold_over_any_history(n_slots: int, history: list[tuple[bool, int]]) -> None:
    ledger = Ledger(MemoryReport(0, 0, {"tape": 7 * n_slots, "tally": 2 * n_slots}), n_slots)
    held: dict[int, int] = {}
    leases = {}
    for takes, owner in history:
        if takes and owner not in held:
            lease = ledger.lease(owner)
            assert (lease is None) == (len(held) == n_slots)
            if lease is not None:
                assert lease.slot == min(set(range(n_slots)) - set(held.values()))
                held[owner], leases[owner] = lease.slot, lease
        elif not takes and owner in held:
            ledger.release(leases.pop(owner))
            del held[owner]
        assert ledger.leased_bytes == 9 * len(held)
        assert [lease.slot for lease in ledger.leases] == sorted(held.values())


# --- budgets ---


def test_a_budget_that_is_enough_is_enough() -> None:
    check_budget({"one": MEMORY, "two": MEMORY}, 3, 2 * 1380)
    check_budget({"one": MEMORY}, 3, None)


def test_a_budget_is_of_the_host_s_memory() -> None:
    """What lies on a device does not count, and the arithmetic says what does."""
    held = DeviceMemory(weights=100, compute=20, state=3)
    placed = evolve(MEMORY, devices={"CUDA0": held})
    assert placed.host == MEMORY.total - 123 == MEMORY.host - held.total
    check_budget({"one": placed}, 3, placed.host)
    with pytest.raises(
        BudgetExceeded, match=r"of which 123 B .* on CUDA0; in all \d+ B \(.*\) of the host's memory, over"
    ):
        check_budget({"one": placed}, 3, placed.host - 1)


def test_a_budget_that_is_exceeded_shows_the_arithmetic() -> None:
    with pytest.raises(BudgetExceeded) as caught:
        check_budget({"one": MEMORY, "two": MEMORY}, 3, 2 * 1380 - 1)
    text = str(caught.value)
    for name in ("one", "two"):
        numbers = re.search(
            rf"{name}: weights (\d+) B .* state (\d+) sessions x (\d+) B .* compute (\d+) B .* = (\d+) B", text
        )
        assert numbers is not None, text
        weights, sessions, per_session, compute, total = map(int, numbers.groups())
        assert (weights, sessions, compute) == (1000, 3, 50)
        assert weights + sessions * per_session + compute == total == 1380
    assert "in all 2760 B" in text
    assert "over the budget of 2759 B" in text
    assert "by 1 B" in text
