"""What both sides of a link count on."""

from __future__ import annotations

from dgr.core.values import StageIdentity
from dgr.wire.framing import Limits

__all__ = ["INBOX", "limits_of"]

#: Work frames that may wait for one session on a stage; a client keeps fewer in flight.
INBOX = 64


def limits_of(description: StageIdentity, *, within_host: bool = False) -> Limits:
    """Return what a link to or from a stage may carry. ``within_host``: as of the link."""
    width = max(description.width_in, description.width_out)
    context = description.context
    limits = Limits(context.n_batch, max(width, 1), description.n_vocab, wire=context.wire)
    return limits.within_host() if within_host else limits
