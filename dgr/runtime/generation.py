"""The tokens of an answer, as its caller sees them."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from attrs import frozen

from dgr.engine.base import SamplingParams, TopLogprob
from dgr.errors import SessionBusy

if TYPE_CHECKING:
    from dgr.runtime.client import ClientSession

__all__ = ["GeneratedToken", "Generation"]


@frozen
class GeneratedToken:
    """One token of an answer."""

    id: int
    #: Its place in the transcript, 0-based.
    position: int
    #: The text that became certain with this token (UTF-8 may be split over tokens); empty without a vocabulary.
    text: str
    top: tuple[TopLogprob, ...] = ()


class Generation:
    """The tokens of one answer, drawn as they are asked for: between two of them nothing is in flight.

    Dropping it, or cancelling a wait in it, keeps the session. ``finish_reason`` is set at the end: ``stop``,
    ``length`` or ``context``.
    """

    def __init__(
        self, session: ClientSession, params: SamplingParams, max_tokens: int | None, stop: frozenset[int]
    ) -> None:
        self.finish_reason: str | None = None
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
            self.finish_reason = "length"
        if self.finish_reason is None and len(session.transcript) >= session._pipeline.context.n_ctx + 1:
            self.finish_reason = "context"
        if self.finish_reason is not None:
            raise StopAsyncIteration
        frame = await session.next_token(self._params)
        if frame.token in self._stop:
            self.finish_reason = "stop"
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        top = tuple(TopLogprob(token, logprob) for token, logprob in frame.top)
        return GeneratedToken(frame.token, frame.position, self._text(frame.token), top)

    def _text(self, token: int) -> str:
        vocabulary = self._session._pipeline.vocabulary
        return "" if vocabulary is None else self._decoder.decode(vocabulary.piece(token), final=self._left == 0)
