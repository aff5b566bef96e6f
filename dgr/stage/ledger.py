"""The ledger: which bytes of a shard belong to whom.

State for every slot is allocated natively up front; a lease says whose it is. Pure bookkeeping: it awaits nothing and
touches no engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from types import MappingProxyType

from attrs import frozen

from dgr.core.units import human_bytes
from dgr.engine.base import MemoryReport

__all__ = ["Lease", "Ledger"]


@frozen
class Lease:
    """A sequence slot and its bytes, held by one owner."""

    owner: Hashable
    slot: int
    #: Component -> bytes of this slot.
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Ledger:
    """Leases the slots of one shard, lowest first (only adjacent ascending slots share a native sub-batch)."""

    def __init__(self, memory: MemoryReport, n_slots: int) -> None:
        self.memory = memory
        self.n_slots = n_slots
        self._per_slot = MappingProxyType({name: size // n_slots for name, size in memory.state.items()})
        self._free = list(range(n_slots))
        self._leases: dict[Hashable, Lease] = {}

    def lease(self, owner: Hashable) -> Lease | None:
        """The lowest free slot, or None when all are taken. One owner holds at most one."""
        if owner in self._leases:
            raise ValueError(f"{owner!r} holds slot {self._leases[owner].slot} already")
        if not self._free:
            return None
        lease = Lease(owner, heapq.heappop(self._free), self._per_slot)
        self._leases[owner] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Take a slot back. Its state must be cleared by then."""
        if self._leases.get(lease.owner) is not lease:
            raise ValueError(f"slot {lease.slot} is not leased to {lease.owner!r}")
        del self._leases[lease.owner]
        heapq.heappush(self._free, lease.slot)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases, by slot."""
        return tuple(sorted(self._leases.values(), key=lambda lease: lease.slot))

    @property
    def leased_bytes(self) -> int:
        return len(self._leases) * sum(self._per_slot.values())

    def leased(self) -> dict[str, int]:
        """Component -> bytes leased."""
        return {name: size * len(self._leases) for name, size in self._per_slot.items()}

    def refusal(self) -> str:
        """Why no slot can be had, with the arithmetic."""
        per_slot = sum(self._per_slot.values())
        return (
            f"all {self.n_slots} sequence slots are leased ({self.n_slots} sessions x {human_bytes(per_slot)} ="
            f" {human_bytes(self.leased_bytes)}) and none has been idle for long enough to make room; close a session, come"
            " again, or load the stage with a larger n_seq_max"
        )
