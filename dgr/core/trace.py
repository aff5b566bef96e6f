"""What a stage notes of one work frame of a request that is traced: times on the stage's own clock, and never what was said."""

from __future__ import annotations

from msgspec import Struct

from dgr.core.scalars import U32, U63, Seconds, TraceId

__all__ = ["RECORDS_MAX", "WorkRecord"]

#: Records of one report.
RECORDS_MAX = 256


class WorkRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One work frame on one stage. Its times follow one another, in seconds of the stage's clock."""

    #: As the frame said.
    trace: TraceId
    epoch: U63
    session: U63
    seq: U63
    #: Of the first token, in the session's transcript; and how many there are.
    position: U32
    tokens: U32
    #: The frame was here, whole.
    came: Seconds
    #: Earlier frames of its session were done with.
    ready: Seconds
    #: The native batch that it was part of began, and ended.
    began: Seconds
    ended: Seconds
    #: The link to whom the result is for was about to be given it.
    sent: Seconds
    #: Sessions of that batch, and their tokens.
    batch_items: U32
    batch_tokens: U32
