"""Where the time between two tokens went, and where that of a prompt's chunks did: sums, and what they leave unexplained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from attrs import frozen

from dgr.client.tracing import Trace
from dgr.serving.tracing.spans import CLIENT, FrameLife, Part, lives_of

__all__ = ["Account", "account_of"]


@frozen
class Account:
    """Seconds by what they were spent with: of drawing tokens, or of evaluating a prompt."""

    #: Work frames: tokens drawn, or chunks.
    frames: int
    #: Measured on the client. Of tokens: from reply to reply, all of them together. Of chunks: from the first one sent to the
    #: last reply; chunks overlap, so that their parts are more than that.
    measured: float
    #: (where, what) -> seconds of all frames together. ``where`` is a stage's address or ``client``.
    parts: Mapping[tuple[str, Part], float]
    #: Frames of which something is not known: a stage had dropped its records, or its clock could not be compared.
    incomplete: int

    @property
    def explained(self) -> float:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def unexplained(self) -> float:
        """Seconds of drawing tokens that no part accounts for."""
        return self.measured - self.explained


def account_of(trace: Trace) -> tuple[Account, Account]:
    """Of a prompt's chunks, and of drawing tokens.

    The reply to a prompt's last chunk is the first token; every frame of one token that was sent after a reply had come is a
    decode step, and its time begins with that reply.
    """
    chunks: list[FrameLife] = []
    steps: list[tuple[FrameLife, float]] = []
    last: dict[int, float | None] = {}
    for life in lives_of(trace):
        work = life.work
        before = last.get(work.session)
        if work.tokens == 1 and before is not None and before <= work.sent:
            steps.append((life, before))
        else:
            chunks.append(life)
        last[work.session] = work.came if work.reply == "Token" else None
    return _of_chunks(chunks), _of_steps(steps)


def _of_chunks(lives: Sequence[FrameLife]) -> Account:
    answered = [life.work.came for life in lives if life.work.came is not None]
    measured = max(answered) - min(life.work.sent for life in lives) if answered else 0.0
    return Account(len(lives), measured, _sums(lives), sum(not life.is_complete for life in lives))


def _of_steps(steps: Sequence[tuple[FrameLife, float]]) -> Account:
    lives = [life for life, _ in steps]
    parts = _sums(lives)
    measured = 0.0
    for life, before in steps:
        if life.work.came is not None:
            measured += life.work.came - before
            parts[CLIENT, Part.CLIENT] += life.work.sent - before
    return Account(len(steps), measured, parts, sum(not life.is_complete for life in lives))


def _sums(lives: Sequence[FrameLife]) -> defaultdict[tuple[str, Part], float]:
    parts: defaultdict[tuple[str, Part], float] = defaultdict(float)
    for life in lives:
        for span in life.spans:
            parts[span.where, span.part] += span.seconds
    return parts
