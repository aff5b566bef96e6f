"""How large a chunk of prefill is: as large as the slowest stage evaluates in a stated time.

That time bounds what a chunk costs everyone else: the pause of a stream beside it, and how long a cancelled prompt goes on.
In exact numerics the answer does not depend on it. In native numerics it would, from run to run, so there a chunk is
always of the same size.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["CHUNK_SECONDS", "ChunkPace", "SessionLimits"]

#: Seconds of a chunk, unless told otherwise.
CHUNK_SECONDS = 0.5

#: Tokens of the first chunk, before anything is known; of the smallest; and the unit of all between.
_FIRST, _LEAST, _UNIT = 64, 32, 16
#: Weight of what was measured before, for each new chunk.
_OLDER = 0.5


class ChunkPace:
    """The size of a chunk, in tokens, for all sessions of a route. ``seconds``: None for always ``most``."""

    def __init__(self, most: int, seconds: float | None) -> None:
        self.tokens = most if seconds is None else min(_FIRST, most)
        self._most = most
        self._seconds = seconds
        self._passed = self._took = 0.0

    def passed(self, tokens: int, seconds: float) -> None:
        """A chunk of ``tokens`` came through ``seconds`` after the one before it, with which it was on its way."""
        if self._seconds is None:
            return
        self._passed = _OLDER * self._passed + tokens
        self._took = _OLDER * self._took + seconds
        fitting = self._most if self._took == 0 else int(self._passed / self._took * self._seconds)
        fitting = min(fitting, 2 * self.tokens)  # nobody knows yet how long one of twice the size takes
        self.tokens = self._most if fitting >= self._most else min(max(fitting // _UNIT * _UNIT, _LEAST), self._most)


@frozen
class SessionLimits:
    """What the present route lets a session do."""

    n_vocab: int
    #: Tokens a session can hold.
    n_ctx: int
    #: Most tokens of one prefill chunk.
    chunk: int
    #: Chunks of one session that may be in flight.
    window: int
    #: Whether every stage copies sessions.
    forks: bool = True
