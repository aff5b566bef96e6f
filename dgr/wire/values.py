"""The enumerations inside messages: why state is missing, why a request is refused, who opens a link."""

from __future__ import annotations

import enum

__all__ = ["Miss", "Refusal", "Role"]


class Miss(enum.IntEnum):
    """Why a shard does not hold the state a frame expects."""

    #: No such session here: it was never opened, or the stage was restarted.
    UNKNOWN = 0
    #: The session holds another number of tokens.
    POSITION = 1
    #: The session holds other tokens.
    DIGEST = 2
    #: An idle session made room for another one.
    EVICTED = 3
    #: The session was idle for longer than its time to live.
    EXPIRED = 4
    #: Native code failed on this session, or its values were not finite.
    POISONED = 5
    #: The shard is between two epochs.
    FENCING = 6


class Refusal(enum.IntEnum):
    """Why a shard refuses a request that is not a cache miss."""

    #: No free sequence slot and no idle session to evict.
    OVERLOADED = 0
    #: A value broke a stated limit (token id, context, payload); nothing was changed.
    INPUT = 1
    #: NaN or Inf in a residual or in logits; the session is lost.
    NON_FINITE = 2
    #: Native code failed; the session is lost.
    ENGINE = 3
    #: The next stage cannot be reached.
    SUCCESSOR = 4
    #: The request makes no sense in this state.
    PROTOCOL = 5
    #: The stage is being drained and takes nobody new.
    DRAINING = 6
    #: The link from the tail to the head ended, and with it what a decode run had on it; the session is lost.
    RING = 7


class Role(enum.IntEnum):
    """Who opens a link, and so what the link is for."""

    #: A client: a control link.
    PIPELINE = 0
    #: The previous stage: a boundary link.
    STAGE = 1
