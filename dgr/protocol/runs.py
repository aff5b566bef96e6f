"""Decode runs: which work follows a drawn token without the pipeline asking for it.

A work frame may grant further tokens (:class:`~dgr.core.values.DecodeRun`). The tail then makes the next work frame itself, as
the pipeline would have, and gives it to the head. One function says what that frame is: the tail sends it, the head compares
with it what comes from the tail, and the client waits for the answer to it. So a token beyond the grant, or one that comes
twice, is known to everybody for what it is.
"""

from __future__ import annotations

from dgr.core.values import DecodeRun, Expectation, LogitsWanted
from dgr.wire.frames import Boundary, Tokens

__all__ = ["next_in_run"]


def next_in_run(work: Tokens | Boundary, token: int, expect: Expectation, n_ctx: int) -> Tokens | None:
    """The work after ``work``, which has drawn ``token``; None where the run ends, or there is none.

    ``expect``: what every stage holds once ``work`` is committed. ``n_ctx``: tokens that a session can hold.
    """
    run = work.run
    if run is None or token in run.stop or expect.position >= n_ctx:
        return None
    return Tokens(
        work.key,
        work.seq + 1,
        expect,
        (token,),
        LogitsWanted.LAST,
        work.sampling,
        work.trace,
        DecodeRun(run.tokens - 1, run.stop) if run.tokens > 1 else None,
    )
