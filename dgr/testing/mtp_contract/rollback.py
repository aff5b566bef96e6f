"""When a rollback is exact, and the compressor rings that decide it, position by position.

Theory. A compressed row is made of the last 4 (CSA, indexer: 8) or 128 (HCA) tokens' compressor inputs, which lie in rings:
row ``r`` holds the last position that is ``r`` modulo the ring's rows. A token overwrites what a rollback would need, so
llama.cpp keeps R snapshots of each ring, *planes*. While an ubatch of n tokens of a sequence runs, plane ``d`` becomes the
ring as it was ``d`` tokens before the ubatch's end, but for ``d > n`` it becomes the ring *before the ubatch*, n tokens
back. ``seq_rm`` takes any ``k <= R`` all the same, and plane ``k > n`` is then the wrong one: with luck the difference is
overwritten before it is read, else a wrong row is committed and nothing tells. So the contract allows ``k <= n`` only.
Nothing fills the planes but a decode: after a clear, a restore or a copy they are zero, or another history's.

Sources at the pin: ``dsv4_build_comp_plan`` (plan of one ubatch), ``llama_kv_cache_dsv4::seq_rm``, ``init_batch`` (how a
batch is cut into ubatches) and ``state_read`` in ``src/llama-kv-cache-dsv4.cpp``; ``split_equal`` in ``src/llama-batch.cpp``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from attrs import define, field, frozen

from dgr.errors import InputError
from dgr.testing.mtp_contract.messages import Reason
from dgr.testing.mtp_contract.states import TRUNK, TrunkEvent, TrunkState
from dgr.v4.hyper_parameters import CSA_RATIO, HCA_RATIO

__all__ = [
    "LOST",
    "CompressorRing",
    "RollbackLedger",
    "RollbackShape",
    "mix",
    "rollback_exact",
]

#: Value of a row that was read where nothing sound was: it spoils everything made of it.
LOST = b"\xff" * 8
#: What the window before position 0 counts as.
_NOTHING = bytes(8)

#: A ring row: the position whose compressor input it holds, and that input; None when it was never written.
Cell: TypeAlias = tuple[int, bytes] | None


def mix(*parts: bytes) -> bytes:
    """Eight bytes that stand for a value computed from others; a lost part makes a lost whole."""
    if LOST in parts:
        return LOST
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


@frozen
class RollbackShape:
    """The context parameters that decide which rollbacks are exact. Every stage of a route has the same."""

    #: Rollback planes per sequence, ``n_rs_seq`` (R): the most tokens one rollback can take back.
    planes: int
    #: Most tokens in one native sub-batch.
    n_ubatch: int = 512
    #: Most tokens in one native call, which is cut into sub-batches.
    n_batch: int = 512
    #: Sequence slots; with a single one llama.cpp cuts batches without looking at the tail.
    n_seq_max: int = 1
    #: Tokens a sequence can hold.
    n_ctx: int = 4096

    def __attrs_post_init__(self) -> None:
        if self.planes < 0 or self.n_seq_max < 1 or self.n_ctx < 1:
            raise InputError(f"{self}: planes must be at least 0, n_seq_max and n_ctx at least 1")
        if self.n_batch < self.n_ubatch:
            raise InputError(f"n_batch is {self.n_batch}, but must be at least n_ubatch ({self.n_ubatch})")
        if self.n_ubatch <= self.planes + 1:
            raise InputError(
                f"n_ubatch is {self.n_ubatch}, but must be above the {self.planes} rollback planes + 1: llama.cpp aborts"
            )

    def ubatches(self, n_tokens: int) -> tuple[int, ...]:
        """How a batch of one sequence's ``n_tokens`` is cut."""
        sizes = []
        while n_tokens > self.n_ubatch:
            size = self.n_ubatch
            if self.n_seq_max > 1 and self.planes and n_tokens - size < self.planes + 1:
                size = n_tokens - (self.planes + 1)  # the last R + 1 tokens stay together
            sizes.append(size)
            n_tokens -= size
        return (*sizes, n_tokens)

    def guaranteed_last(self, n_tokens: int) -> int:
        """Tokens of the sequence in the last ubatch of such a batch, whatever other sequences were merged into it.

        Stages merge what happens to be ready, so the cut differs between them; this bound does not.
        """
        return self.ubatches(n_tokens)[-1] if self.n_seq_max == 1 else min(n_tokens, self.planes + 1)


@define
class RollbackLedger:
    """Where one session's main layers stand on one stage, and how far they could go back."""

    shape: RollbackShape
    #: Tokens committed; the next position to run.
    position: int = 0
    #: Tokens of the session in the last ubatch, at least.
    n_last: int = 0
    #: Tokens of the rollback that the next decode will take (``rs_idx``).
    pending: int = 0
    state: TrunkState = TRUNK.first

    @property
    def budget(self) -> int:
        """The longest rollback that is exact now: ``min(R, n_last)``, and 0 without a decode since the last other act."""
        return min(self.shape.planes, self.n_last) if self.state is TrunkState.SETTLED else 0

    def refusal(self, k: int) -> Reason | None:
        """Why a rollback of ``k`` tokens is refused; None when it is exact."""
        if k < 1 or k >= self.position:
            return Reason.RANGE
        if k > self.shape.planes:
            return Reason.PLANES
        if self.state is TrunkState.PENDING:
            return Reason.PENDING
        if k > self.budget:
            return Reason.BUDGET
        return None

    def roll_back(self, k: int) -> None:
        """Take back ``k`` tokens; the caller has asked :meth:`refusal`."""
        self.state = TRUNK.follow(self.state, TrunkEvent.ROLL_BACK)
        self.position -= k
        self.pending = k

    def decode(self, n_tokens: int) -> None:
        """A batch with ``n_tokens`` of the session ran."""
        self.state = TRUNK.follow(self.state, TrunkEvent.DECODE)
        self.position += n_tokens
        self.n_last = self.shape.guaranteed_last(n_tokens)
        self.pending = 0

    def clear(self) -> None:
        """The whole sequence was removed."""
        self.state = TRUNK.follow(self.state, TrunkEvent.CLEAR)
        self.position = self.n_last = self.pending = 0

    def replace(self, position: int) -> None:
        """``position`` tokens came from a restored state or a copied sequence."""
        self.state = TRUNK.follow(self.state, TrunkEvent.REPLACE)
        self.position, self.n_last, self.pending = position, 0, 0


@define
class CompressorRing:
    """One compressor of one session: its ring in all planes, and the compressed rows it committed.

    ``ratio`` tokens make a row; the ring has as many rows, or twice as many where windows overlap (CSA and indexer).
    """

    ratio: int
    overlap: bool
    n_planes: int
    #: Plane 0 is the present, planes 1..R the snapshots. Each is ``n_rows`` cells.
    planes: list[list[Cell]] = field(init=False)
    #: Compressed rows by block, as they lie in the cache; those beyond the position are stale.
    rows: list[bytes] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.planes = [[None] * self.n_rows for _ in range(1 + self.n_planes)]

    @classmethod
    def csa(cls, n_planes: int) -> CompressorRing:
        return cls(CSA_RATIO, True, n_planes)

    @classmethod
    def hca(cls, n_planes: int) -> CompressorRing:
        return cls(HCA_RATIO, False, n_planes)

    @property
    def n_rows(self) -> int:
        return self.ratio * (2 if self.overlap else 1)

    def run(self, first: int, values: Sequence[bytes], pending: int) -> None:
        """One ubatch: positions ``first ..`` bring ``values``. Restore, snapshot, commit, persist: in this order."""
        base = self.planes[0] = self.planes[pending].copy()
        for d in range(1, 1 + self.n_planes):
            self.planes[d] = self._with(base, first, values[: self.snapshot_prefix(len(values), d)])
        for at in range(len(values)):
            end = first + at + 1
            if end % self.ratio == 0:
                block = end // self.ratio - 1
                self.rows += [LOST] * (block + 1 - len(self.rows))
                self.rows[block] = mix(*(self._source(q, first, values) for q in range(end - self.n_rows, end)))
        self.planes[0] = self._with(base, first, values)

    @staticmethod
    def snapshot_prefix(n_tokens: int, d: int) -> int:
        """Tokens of the ubatch that plane ``d`` has seen (dsv4:690-714)."""
        return n_tokens - d if d <= n_tokens else 0

    def clear(self) -> None:
        """Every plane and every row is zeroed."""
        self.__attrs_post_init__()
        self.rows = []

    def forget_planes(self, pending: int) -> None:
        """What a restore or a copy leaves: the present alone."""
        present = self.planes[pending]
        self.__attrs_post_init__()
        self.planes[0] = present

    def visible(self, position: int) -> list[bytes]:
        """Rows that a query at the position before ``position`` attends to."""
        n = position // self.ratio
        return self.rows[:n] + [LOST] * (n - len(self.rows))

    def held(self, pending: int = 0) -> list[tuple[int, bytes]]:
        """Cells of the plane that counts, in the order of positions."""
        return sorted(cell for cell in self.planes[pending] if cell is not None)

    def _with(self, base: list[Cell], first: int, values: Sequence[bytes]) -> list[Cell]:
        ring = base.copy()
        for position, value in enumerate(values, first):
            ring[position % self.n_rows] = (position, value)
        return ring

    def _source(self, position: int, first: int, values: Sequence[bytes]) -> bytes:
        """Compressor input of a position: of the ubatch itself, else whatever lies in its ring row (dsv4:473-488)."""
        if position < 0:
            return _NOTHING
        if position >= first:
            return values[position - first]
        cell = self.planes[0][position % self.n_rows]
        return cell[1] if cell is not None and cell[0] == position else LOST


def rollback_exact(position: int, k: int, n_last: int, planes: int) -> bool:
    """Whether upstream's own rule (``1 <= k <= R``) happens to give the right state after a decode of ``n_last`` tokens.

    Wider than the contract's ``k <= min(R, n_last)``: the wrong plane does no harm where no block ends among the positions
    it lacks. It depends on the position and is not a rule to build on; tests hold the rings above against it.
    """
    if not 1 <= k <= planes:
        return False
    if k <= n_last:
        return True
    missing = range(position - k, position - n_last - 1)
    return not any(
        position - n_last > n_rows and any((end + 1) % ratio == 0 for end in missing)
        for ratio, n_rows in ((CSA_RATIO, 2 * CSA_RATIO), (HCA_RATIO, HCA_RATIO))
    )
