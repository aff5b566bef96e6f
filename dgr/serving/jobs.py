"""What is asked of a server, within which bounds, and what is counted of an answer."""

from __future__ import annotations

from enum import StrEnum

from attrs import define, field, frozen

from dgr.client.generation import MOST_AHEAD
from dgr.core.arguments import check_whole
from dgr.core.values import SamplingParams
from dgr.errors import InputError
from dgr.serving.shared import SharedPrompt

__all__ = ["Counters", "Job", "Phase", "ServingLimits", "Usage"]


@frozen
class ServingLimits:
    """Bounds of a server."""

    #: Conversations answered at once, and kept between requests; None: as many as the stages have slots (n_seq_max) beside
    #: those of ``prefixes``.
    sessions: int | None = None
    #: Slots for copies of states on the way; None: those that ``sessions`` leaves.
    prefixes: int | None = None
    #: Choices that may wait for a slot; a request is one, or as many as it asks for.
    max_waiting: int = 64
    #: Prompt tokens of all that wait; None: eight contexts' worth.
    max_waiting_tokens: int | None = None
    #: Seconds from admission to the last token.
    deadline: float = 1800.0
    #: Tokens of an answer that the stages may draw before they are asked for.
    ahead: int = 0

    def __attrs_post_init__(self) -> None:
        check_whole("ahead", self.ahead, 0, MOST_AHEAD)
        if min(self.max_waiting, self.max_waiting_tokens or 0, self.prefixes or 0) < 0 or not self.deadline > 0:
            raise InputError(f"limits of a server cannot be negative, and its deadline must be above 0: {self}")


@frozen
class Job:
    """What shall be answered."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(factory=SamplingParams)
    #: Token ids that end the answer; they are not part of it.
    stop: frozenset[int] = frozenset()
    #: Tokens drawn before one of ``stop`` ends the answer; an earlier one is part of it.
    min_tokens: int = 0
    #: Whether its reader may find it complete before one of those: what is drawn ahead would be drawn in vain.
    ends_early: bool = False
    #: Whether whoever asks chose the seed. If not, an answer that was left may be gone on with under its own.
    seeded: bool = True
    #: What it has in common with other jobs of the same prompt, which is evaluated once for all.
    shared: SharedPrompt | None = field(default=None, eq=False)


class Phase(StrEnum):
    """How far an answer is."""

    #: In the line, for a slot.
    WAITING = "waiting"
    #: Its prompt is being evaluated.
    PREFILL = "prefill"
    #: Its tokens are being drawn.
    DECODE = "decode"
    #: It is complete, refused or left.
    ENDED = "ended"


@define
class Usage:
    """Tokens of one answer."""

    prompt: int
    #: Of the prompt, those that no stage evaluated for this request.
    cached: int = 0
    #: Tokens drawn, without the one that ended the answer.
    completion: int = 0


@define
class Counters:
    """What a server counts over its life; prompts once their answer has ended, if it drew a token at all."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    #: Answers left before their end by whoever had asked.
    cancelled: int = 0
