"""A second reader of the golden episodes: positions only, written from docs/mtp-contract.md, with nothing of dgr's.

It knows where a session stands on a stage and which messages the stage refuses. It cannot draw tokens, so it takes what the
tail says of them from the file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

WORK, ROLLBACK, ADVANCED, PROPOSAL, ROLLED_BACK, REFUSED = range(64, 70)
STALE_EPOCH, UNKNOWN, EVICTED, POSITION, DIGEST, CANDIDATES, CONTEXT, RANGE, PLANES, PENDING, BUDGET, CANCELLED = range(
    12
)


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}i", *tokens), digest_size=16).digest()


class Stage:
    """One stage and one session."""

    def __init__(self, shape: dict[str, int], layers: str, epoch: int) -> None:
        self.shape, self.epoch = shape, epoch
        begin, end = (int(bound) for bound in layers.split(":"))
        self.has_csa = any(layer % 2 == 0 for layer in range(begin, end))
        self.has_hca = any(layer % 2 == 1 for layer in range(begin, end))
        self.opened: int | None = None
        self.evicted = False
        self.tokens: list[int] = []
        self.n_last = self.pending = 0
        self.decoded = False

    def open(self, session: int) -> None:
        self.opened, self.evicted, self.tokens, self.decoded = session, False, [], False
        self.n_last = self.pending = 0

    def evict(self) -> None:
        self.opened, self.evicted = None, True

    @property
    def budget(self) -> int:
        return min(self.shape["planes"], self.n_last) if self.decoded and not self.pending else 0

    def take(self, frame: bytes) -> int | None:
        """Take a message; gives the reason if it is refused."""
        tag, (_, epoch, session), _, at, *rest = msgspec.msgpack.decode(frame)
        if epoch != self.epoch:
            return STALE_EPOCH
        if session != self.opened:
            return EVICTED if self.evicted else UNKNOWN
        if at[0] != len(self.tokens):
            return POSITION
        if at[1] != digest(self.tokens):
            return DIGEST
        return self._work(*rest) if tag == WORK else self._rollback(*rest[0])

    def _work(self, tokens: list[int], _want: int, candidates: int, *_: object) -> int | None:
        if candidates > self.shape["planes"] or candidates >= len(tokens):
            return CANDIDATES
        if len(self.tokens) + len(tokens) > self.shape["n_ctx"]:
            return CONTEXT
        self.tokens += tokens
        if self.shape["n_seq_max"] == 1:
            self.n_last = (len(tokens) - 1) % self.shape["n_ubatch"] + 1
        else:
            self.n_last = min(len(tokens), self.shape["planes"] + 1)
        self.pending, self.decoded = 0, True
        return None

    def _rollback(self, to: int, wanted: bytes) -> int | None:
        k = len(self.tokens) - to
        if k < 1 or to < 1:
            return RANGE
        if k > self.shape["planes"]:
            return PLANES
        if self.pending:
            return PENDING
        if k > self.budget:
            return BUDGET
        if wanted != digest(self.tokens[:to]):
            return DIGEST
        del self.tokens[to:]
        self.pending = k
        return None

    def where(self) -> dict[str, object]:
        position = len(self.tokens)
        state = "pending" if self.pending else "settled" if self.decoded else "empty"
        return {
            "position": position,
            "n_last": self.n_last,
            "pending": self.pending,
            "budget": self.budget,
            "state": state,
            "csa_rows": position // 4 if self.has_csa else 0,
            "hca_rows": position // 128 if self.has_hca else 0,
            "csa_ring": [max(0, position - 8), position] if self.has_csa else None,
            "hca_ring": [max(0, position - 128), position] if self.has_hca else None,
        }
