"""The tokens of an answer, as its caller sees them."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from attrs import frozen

from dgr.engine.base import SamplingParams, TopLogprob
from dgr.errors import SessionBusy

if TYPE_CHECKING:
    from dgr.client.session import ClientSession

__all__ = ["GeneratedToken", "Generation"]


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
    what decoding the bytes of all its tokens gives, with U+FFFD for bytes that are not UTF-8.
    """

    def __init__(
        self, session: ClientSession, params: SamplingParams, max_tokens: int | None, stop: frozenset[int]
    ) -> None:
        self.finish_reason: str | None = None
        #: Text that no token carried, set at the end: what an answer ended in mid-character by a stop token holds back.
        self.tail = ""
        self._session = session
        self._turn = session.turn
        self._params = params
        self._left = max_tokens
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GeneratedToken:
        session = self._session
        if self.finish_reason is None and session.turn != self._turn:
            raise SessionBusy(f"session {session.id} has begun another turn; this answer is over")
        if self.finish_reason is None and self._left == 0:
            self._end("length")
        if self.finish_reason is None and self._is_full:
            self._end("context")
        if self.finish_reason is not None:
            raise StopAsyncIteration
        frame = await session.next_token(self._params)
        if frame.token in self._stop:
            self._end("stop")
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        top = tuple(TopLogprob(token, logprob) for token, logprob in frame.top)
        return GeneratedToken(frame.token, frame.position, self._text(frame.token), top)

    @property
    def _is_full(self) -> bool:
        return len(self._session.transcript) >= self._session._pipeline.context.n_ctx + 1

    def _text(self, token: int) -> str:
        vocabulary = self._session._pipeline.vocabulary
        if vocabulary is None:
            return ""
        return self._decoder.decode(vocabulary.piece(token), final=self._left == 0 or self._is_full)

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.tail = self._decoder.decode(b"", final=True)
