"""The tokens of an answer, as its caller sees them."""

from __future__ import annotations

import codecs
from typing import Protocol

from attrs import frozen

from dgr.core.values import TopLogprob
from dgr.wire import frames

__all__ = ["GeneratedToken", "Generation", "TokenSource", "Vocabulary"]


class Vocabulary(Protocol):
    """Text to token ids and back."""

    n_vocab: int
    eos: int | None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


class TokenSource(Protocol):
    """Where an answer's tokens come from: one turn of a session."""

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for a further token."""
        ...

    def check(self) -> None:
        """Raise :class:`~dgr.errors.SessionBusy` when the session has begun another turn."""
        ...

    async def next_token(self) -> frames.Token:
        """Commit the transcript on every stage and draw the token after it."""
        ...


@frozen
class GeneratedToken:
    """One token of an answer."""

    id: int
    #: Its place in the transcript, 0-based.
    position: int
    #: The text that became certain with this token (UTF-8 may be split over tokens); empty without a vocabulary. A token
    #: known to be the last (by ``max_tokens``, or because the context is full) has all that is left.
    text: str
    top: tuple[TopLogprob, ...] = ()


class Generation:
    """The tokens of one answer, drawn as they are asked for: between two of them nothing is in flight.

    Dropping it, or cancelling a wait in it, keeps the session. ``finish_reason`` is set at the end: ``stop``,
    ``length`` or ``context``. The text of the answer is that of its tokens and then :attr:`tail`: however it ends, it is
    what the bytes of all its tokens decode to, with U+FFFD for bytes that are not UTF-8.

    Iterating raises :class:`~dgr.errors.PrefillFailed` when the session was lost more often than the pipeline retries,
    :class:`~dgr.errors.NonFinite` for NaN or Inf in the model's values, :class:`~dgr.errors.Overloaded` when a stage has
    no slot, :class:`~dgr.errors.DeadlineExceeded` when a stage or the route does not answer in time,
    :class:`~dgr.errors.SessionBusy` when the session is answering already or has begun another turn,
    :class:`~dgr.errors.SessionError` when it is closed and :class:`~dgr.errors.ClosedError` when its pipeline is. After
    any of them but the last three the session goes on: the same call may be made again.
    """

    def __init__(
        self, source: TokenSource, vocabulary: Vocabulary | None, max_tokens: int | None, stop: frozenset[int]
    ) -> None:
        self.finish_reason: str | None = None
        #: Text that no token carried, set at the end: what an answer ended in mid-character by a stop token holds back.
        self.tail = ""
        self._source = source
        self._vocabulary = vocabulary
        self._left = max_tokens
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GeneratedToken:
        if self.finish_reason is None:
            self._source.check()
            if self._left == 0:
                self._end("length")
            elif self._source.is_full:
                self._end("context")
        if self.finish_reason is not None:
            raise StopAsyncIteration
        frame = await self._source.next_token()
        if frame.token in self._stop:
            self._end("stop")
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        return GeneratedToken(frame.token, frame.position, self._text(frame.token), frame.top)

    def _text(self, token: int) -> str:
        if self._vocabulary is None:
            return ""
        return self._decoder.decode(self._vocabulary.piece(token), final=self._left == 0 or self._source.is_full)

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.tail = self._decoder.decode(b"", final=True)
