"""What a stage may say in an answer: exactly what the request implies. Anything else is refused, and its link is over.

A client believes no position, count or token id of a stage, as a stage believes none of a client.
"""

from __future__ import annotations

import math

from attrs import define, field

from dgr.client.replies import Answer
from dgr.core.prefix import PrefixDigest
from dgr.engine.base import LogitsWanted
from dgr.errors import WireError
from dgr.wire import frames

__all__ = ["Asked", "check_frontier"]


@define(eq=False)
class Asked:
    """A work frame in flight, and the place for its answer."""

    frame: frames.Tokens
    answer: Answer = field(factory=Answer)

    @property
    def end(self) -> int:
        """The position it brings every stage to."""
        return self.frame.expect.position + len(self.frame.tokens)

    def check(self, answer: frames.Frame, *, head: bool, tail: bool, n_vocab: int) -> None:
        """Raise :class:`WireError` for an answer that cannot be one to this frame.

        ``head``, ``tail``: whether the stage that answers is the route's head or tail.
        """
        match answer:
            case frames.Advanced():
                self._check_done(answer, tail, self.frame.logits == LogitsWanted.NONE)
            case frames.Token():
                self._check_done(answer, tail, self.frame.sampling is not None)
                _check_token(answer, self.frame.sampling, n_vocab)
            case frames.Logits():
                self._check_done(answer, tail, self.frame.logits == LogitsWanted.ALL)
                if answer.n_rows != len(self.frame.tokens):
                    raise WireError(f"{answer.n_rows} rows of logits came for {len(self.frame.tokens)} tokens")
            case frames.Cancelled():
                if not head:
                    raise WireError("a stage that is not the head says that it cancelled a work frame")
            case frames.CacheMiss() | frames.StaleEpoch() | frames.Refused():
                return
            case _:
                raise WireError(f"a work frame was answered with {type(answer).__name__}")

    def _check_done(self, answer: frames.Advanced | frames.Token | frames.Logits, tail: bool, wanted: bool) -> None:
        kind = type(answer).__name__
        if not tail:
            raise WireError(f"{kind} came from a stage that is not the tail")
        if not wanted:
            raise WireError(f"{kind} came for a work frame that did not ask for it")
        if answer.position != self.end:
            raise WireError(f"{kind} says position {answer.position}; its work frame ends at {self.end}")


def _check_token(answer: frames.Token, sampling: frames.Sampling | None, n_vocab: int) -> None:
    wanted = 0 if sampling is None else sampling.top_logprobs
    if answer.token >= n_vocab:
        raise WireError(f"token id {answer.token} came; the vocabulary has {n_vocab}")
    if len(answer.top) != wanted:
        raise WireError(f"{len(answer.top)} top log-probabilities came; {wanted} were asked for")
    ids = {token for token, _ in answer.top}
    if len(ids) != wanted or any(token >= n_vocab for token in ids):
        raise WireError(f"top log-probabilities came for token ids {sorted(ids)}; the vocabulary has {n_vocab}")
    if not all(math.isfinite(logprob) for _, logprob in answer.top):
        raise WireError("a top log-probability came that is not finite")


def check_frontier(address: str, frontier: frames.Frontier, prefix: PrefixDigest) -> None:
    """A session that stands still is on every stage where its client has it. Raises :class:`WireError`."""
    who = f"stage {address}"
    if frontier.position != prefix.position:
        raise WireError(f"{who} says position {frontier.position}; the session has committed {prefix.position} tokens")
    if frontier.digest != prefix.digest():
        raise WireError(f"{who} holds other tokens than the session committed: their digests differ")
    names = [part.name for part in frontier.components]
    if len(set(names)) != len(names):
        raise WireError(f"{who} names a state component twice: {', '.join(names)}")
    for part in frontier.components:
        if not part.rows_min <= part.rows_max <= part.capacity:
            raise WireError(
                f"{who} says that component {part.name} has {part.rows_min} to {part.rows_max} rows of {part.capacity}"
            )
