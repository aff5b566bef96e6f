"""Digest of a token prefix: what a frame says of the tokens it builds on."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable

__all__ = ["EMPTY_DIGEST", "PrefixDigest"]

#: Bytes of a prefix digest.
_SIZE = 16


class PrefixDigest:
    """Streaming blake2b-128 over token ids as int32 little-endian, from position 0.

    It depends on the ids alone, not on how they were chunked. ``position`` is the number of ids taken.
    """

    __slots__ = ("_hash", "position")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=_SIZE)
        self.position = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take the next ids. Each must fit an int32."""
        ids = array("i", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        self._hash.update(ids)
        self.position += len(ids)

    def copy(self) -> PrefixDigest:
        """A digest of the same ids, which goes on by itself."""
        made = PrefixDigest()
        made._hash, made.position = self._hash.copy(), self.position
        return made

    def digest(self) -> bytes:
        """The 16 bytes for the ids taken so far."""
        return self._hash.digest()


#: The digest of no token.
EMPTY_DIGEST = PrefixDigest().digest()
