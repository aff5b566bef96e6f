"""What a stage may say in a reply: exactly what the request implies. Anything else is refused, and its link is over.

A client believes no position, count or token id of a stage, as a stage believes none of a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dgr.client.pace import SessionLimits
from dgr.client.replies import control_error
from dgr.core.values import Expectation, LogitsWanted, SamplingParams
from dgr.errors import WireError
from dgr.protocol.runs import next_in_run
from dgr.wire import frames

__all__ = ["check_forked", "check_report", "check_work_reply", "checked_reports"]


def check_work_reply(
    work: frames.Tokens, reply: frames.Frame, *, is_head: bool, is_tail: bool, limits: SessionLimits
) -> None:
    """Raise :class:`WireError` for a reply that cannot be one to this work.

    ``is_head``, ``is_tail``: whether the stage that replies is the route's head or tail.
    """
    match reply:
        case frames.Advanced():
            _check_done(work, reply, is_tail, work.logits == LogitsWanted.NONE)
        case frames.Token():
            _check_done(work, reply, is_tail, work.sampling is not None)
            _check_token(reply, work.sampling, limits.n_vocab)
            _check_run(work, reply, limits.n_ctx)
        case frames.Logits():
            _check_done(work, reply, is_tail, work.logits == LogitsWanted.ALL)
            if reply.n_rows != len(work.tokens):
                raise WireError(f"{reply.n_rows} rows of logits came for {len(work.tokens)} tokens")
        case frames.WorkSkipped():
            if not is_head:
                raise WireError("a stage that is not the head says that it cancelled a work frame")
        case frames.CacheMiss() | frames.StaleEpoch() | frames.Refused():
            return
        case _:
            raise WireError(f"a work frame was replied to with {type(reply).__name__}")


def _check_done(
    work: frames.Tokens, reply: frames.Advanced | frames.Token | frames.Logits, is_tail: bool, wanted: bool
) -> None:
    kind, end = type(reply).__name__, work.expect.position + len(work.tokens)
    if not is_tail:
        raise WireError(f"{kind} came from a stage that is not the tail")
    if not wanted:
        raise WireError(f"{kind} came for a work frame that did not ask for it")
    if reply.position != end:
        raise WireError(f"{kind} says position {reply.position}; its work frame ends at {end}")


def _check_token(reply: frames.Token, sampling: SamplingParams | None, n_vocab: int) -> None:
    wanted = 0 if sampling is None else sampling.top_logprobs
    if reply.token >= n_vocab:
        raise WireError(f"token id {reply.token} came; the vocabulary has {n_vocab}")
    if len(reply.top) != wanted:
        raise WireError(f"{len(reply.top)} top log-probabilities came; {wanted} were asked for")
    ids = {candidate.token for candidate in reply.top}
    if len(ids) != wanted or any(token >= n_vocab for token in ids):
        raise WireError(f"top log-probabilities came for token ids {sorted(ids)}; the vocabulary has {n_vocab}")
    if not all(math.isfinite(candidate.logprob) for candidate in reply.top):
        raise WireError("a top log-probability came that is not finite")


def _check_run(work: frames.Tokens, reply: frames.Token, n_ctx: int) -> None:
    after = Expectation(reply.position, work.expect.digest)  # of which the position alone decides
    if reply.goes_on and next_in_run(work, reply.token, after, n_ctx) is None:
        granted = 0 if work.run is None else work.run.tokens
        raise WireError(
            f"the tail goes on with token {reply.token} at position {reply.position}; it was granted {granted} further tokens"
            f" and the context holds {n_ctx}"
        )


def check_forked(stage: str, expect: Expectation, reply: frames.Frame) -> None:
    """A stage that has no copy of what was expected holds something else. Raises :class:`WireError`."""
    match reply:
        case frames.Opened() | frames.StaleEpoch() | frames.Refused():
            return
        case frames.CacheMiss(reason=frames.Miss.POSITION, position=position) if position == expect.position:
            raise WireError(
                f"stage {stage} copies nothing for its position, which is the {position} that was asked for"
            )
        case frames.CacheMiss(reason=frames.Miss.DIGEST, position=position) if position != expect.position:
            raise WireError(f"stage {stage} holds other tokens than those asked for, and {position} of them")
        case frames.CacheMiss():
            return
        case _:
            raise WireError(f"stage {stage} replied to a fork with {type(reply).__name__}")


def checked_reports(
    replies: Sequence[tuple[str, frames.Frame]], position: int, digest: bytes
) -> dict[str, frames.StateReport]:
    """Address -> report, of stages that are where they should be. Raises what a refusal means, and :class:`WireError`."""
    found: dict[str, frames.StateReport] = {}
    for stage, frame in replies:
        if not isinstance(frame, frames.StateReport):
            raise control_error(stage, frame)
        check_report(stage, frame, position, digest)
        found[stage] = frame
    return found


def check_report(stage: str, report: frames.StateReport, position: int, digest: bytes) -> None:
    """A session that stands still is on every stage where its client has it. Raises :class:`WireError`."""
    who, state = f"stage {stage}", report.state
    if state.position != position:
        raise WireError(f"{who} says position {state.position}; the session has committed {position} tokens")
    if report.digest != digest:
        raise WireError(f"{who} holds other tokens than the session committed: their digests differ")
    names = [part.name for part in state.components]
    if len(set(names)) != len(names):
        raise WireError(f"{who} names a state component twice: {', '.join(names)}")
    for part in state.components:
        if not part.rows_min <= part.rows_max <= part.capacity:
            raise WireError(
                f"{who} says that component {part.name} has {part.rows_min} to {part.rows_max} rows of {part.capacity}"
            )
