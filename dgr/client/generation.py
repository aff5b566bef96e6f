"""The tokens of an answer, as its caller sees them."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from attrs import frozen

from dgr.core.arguments import token_ids
from dgr.core.scalars import STOP_MAX
from dgr.core.values import DecodeRun, SamplingParams, TopLogprob
from dgr.errors import InputError, SessionBusy
from dgr.wire import frames

__all__ = [
    "AHEAD",
    "MOST_AHEAD",
    "AnsweringSession",
    "GeneratedToken",
    "Generation",
    "Turn",
    "Vocabulary",
    "encode_prompt",
    "ending_of",
]

#: Tokens that stages draw before they are asked for where answers are read to their ends; and most that they may.
AHEAD, MOST_AHEAD = 16, 1024


class Vocabulary(Protocol):
    """Text to token ids and back."""

    n_vocab: int
    eos: int | None

    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


class AnsweringSession(Protocol):
    """Whose answer it is."""

    id: int
    transcript: list[int]
    #: Grows when another answer begins.
    turn: int

    @property
    def n_ctx(self) -> int: ...


#: Commits the transcript on every stage and draws the token after it; the transcript grows by it. The run is leave for the
#: stages to draw as many more, which the next calls bring.
Draw = Callable[[SamplingParams, DecodeRun | None], Awaitable[frames.Token]]


@frozen
class Turn:
    """One turn of a session: where the tokens of one answer come from."""

    session: AnsweringSession
    draw: Draw
    number: int
    sampling: SamplingParams
    #: Ids that end the answer.
    stop: frozenset[int]
    #: Tokens that the stages may draw before they are asked for.
    ahead: int

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for a further token."""
        return len(self.session.transcript) > self.session.n_ctx

    def check(self) -> None:
        """Raise :class:`~dgr.errors.SessionBusy` when the session has begun another turn."""
        if self.session.turn != self.number:
            raise SessionBusy(f"session {self.session.id} has begun another turn; this answer is over")

    async def next_token(self, left: int | None) -> frames.Token:
        """The next token of at most ``left`` that will be asked for."""
        further = self.ahead if left is None else min(self.ahead, left - 1)
        run = None
        if further > 0 and len(self.stop) <= STOP_MAX:
            run = DecodeRun(further, tuple(sorted(self.stop)))
        return await self.draw(self.sampling, run)


def ending_of(stop: Sequence[int] | None, vocabulary: Vocabulary | None, n_vocab: int) -> frozenset[int]:
    """Ids that end an answer: those given, or the vocabulary's end-of-text. Raises :class:`~dgr.errors.InvalidToken`."""
    if stop is not None:
        return frozenset(token_ids("stop", stop, n_vocab))
    eos = None if vocabulary is None else vocabulary.eos
    return frozenset(() if eos is None else (eos,))


def encode_prompt(prompt: str, vocabulary: Vocabulary | None, *, begins: bool, follows: bool) -> list[int]:
    """Token ids of a text. ``begins``: nothing is before it; ``follows``: something is, or is given beside it.

    Raises :class:`~dgr.errors.InputError`.
    """
    if vocabulary is None:
        raise InputError("a text prompt needs a vocabulary; give token ids, or open the pipeline with one")
    if not (prompt or follows):  # the begin-of-text token alone is not a question
        raise InputError("the prompt is empty, and there is nothing before it: give at least one character")
    return vocabulary.encode(prompt, add_special=begins)


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
    """The tokens of one answer, drawn as they are asked for: between two of them nothing is in flight, unless stages may draw
    some ahead (``ahead`` of :meth:`~dgr.client.session.ClientSession.generate`).

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

    def __init__(self, turn: Turn, vocabulary: Vocabulary | None, max_tokens: int | None) -> None:
        self.finish_reason: str | None = None
        #: Text that no token carried, set at the end: what an answer ended in mid-character by a stop token holds back.
        self.tail = ""
        self._turn = turn
        self._vocabulary = vocabulary
        self._left = max_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GeneratedToken:
        if self.finish_reason is None:
            self._turn.check()
            if self._left == 0:
                self._end("length")
            elif self._turn.is_full:
                self._end("context")
        if self.finish_reason is not None:
            raise StopAsyncIteration
        frame = await self._turn.next_token(self._left)
        if frame.token in self._turn.stop:
            self._end("stop")
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= 1
        return GeneratedToken(frame.token, frame.position, self._text(frame.token), frame.top)

    def _text(self, token: int) -> str:
        if self._vocabulary is None:
            return ""
        return self._decoder.decode(self._vocabulary.piece(token), final=self._left == 0 or self._turn.is_full)

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        self.tail = self._decoder.decode(b"", final=True)
