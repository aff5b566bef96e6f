"""A stage's word is not believed: a reply that its request cannot have had is refused, whatever in it is false."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dgr.client.claims import check_work_reply
from dgr.client.pace import SessionLimits
from dgr.core.prefix import EMPTY_DIGEST
from dgr.core.values import DecodeRun, Expectation, Key, LogitsWanted, SamplingParams, TopLogprob
from dgr.errors import WireError
from dgr.wire import frames

N_VOCAB = 50
LIMITS = SessionLimits(n_vocab=N_VOCAB, n_ctx=40, chunk=4, window=2)
KEY = Key(b"route-of-16-byte", 1, 1)
SAMPLING = SamplingParams(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, -1, 0, 0, 2)
TOP = (TopLogprob(3, -0.5), TopLogprob(4, -1.5))


def work(logits: LogitsWanted, sampling: SamplingParams | None = None) -> frames.Tokens:
    """Three tokens at positions 5 to 7."""
    return frames.Tokens(KEY, 9, Expectation(5, EMPTY_DIGEST), (1, 2, 3), logits, sampling)


DRAW, PLAIN, ROWS = work(LogitsWanted.LAST, SAMPLING), work(LogitsWanted.NONE), work(LogitsWanted.ALL)
RUN = replace(DRAW, run=DecodeRun(2, (6,)))
FULL = replace(RUN, expect=Expectation(37, EMPTY_DIGEST))
RIGHT = [
    (RUN, frames.Token(KEY, 9, 8, 7, TOP, goes_on=True)),
    (RUN, frames.Token(KEY, 9, 8, 7, TOP)),
    (DRAW, frames.Token(KEY, 9, 8, 7, TOP)),
    (PLAIN, frames.Advanced(KEY, 9, 8)),
    (ROWS, frames.Logits(KEY, 9, 8, 3, 600)),
    (DRAW, frames.CacheMiss(KEY, 9, frames.Miss.EVICTED, 0)),
    (DRAW, frames.StaleEpoch(KEY, 9, 2)),
    (DRAW, frames.Refused(KEY, 9, frames.Refusal.ENGINE, "it broke")),
]
FALSE = {
    "a position beyond the work": (DRAW, frames.Token(KEY, 9, 10_000, 7, TOP)),
    "a position before its end": (PLAIN, frames.Advanced(KEY, 9, 7)),
    "a token outside the vocabulary": (DRAW, frames.Token(KEY, 9, 8, N_VOCAB, TOP)),
    "no token where one was to be drawn": (DRAW, frames.Advanced(KEY, 9, 8)),
    "a token where none was to be drawn": (PLAIN, frames.Token(KEY, 9, 8, 7)),
    "rows of logits that nobody asked for": (DRAW, frames.Logits(KEY, 9, 8, 1, 200)),
    "too many rows": (ROWS, frames.Logits(KEY, 9, 8, 4, 800)),
    "too few rows": (ROWS, frames.Logits(KEY, 9, 8, 2, 400)),
    "too few candidates": (DRAW, frames.Token(KEY, 9, 8, 7, TOP[:1])),
    "a candidate twice": (DRAW, frames.Token(KEY, 9, 8, 7, (TOP[0], TOP[0]))),
    "a candidate outside the vocabulary": (DRAW, frames.Token(KEY, 9, 8, 7, (TOP[0], TopLogprob(N_VOCAB, -1.0)))),
    "a candidate without a finite probability": (
        DRAW,
        frames.Token(KEY, 9, 8, 7, (TOP[0], TopLogprob(5, float("nan")))),
    ),
    "a token that goes on without leave": (DRAW, frames.Token(KEY, 9, 8, 7, TOP, goes_on=True)),
    "a token that goes on after the end": (RUN, frames.Token(KEY, 9, 8, 6, TOP, goes_on=True)),
    "a token that goes on in a full context": (FULL, frames.Token(KEY, 9, 40, 7, TOP, goes_on=True)),
    "the reply to something else": (DRAW, frames.Opened(KEY, 9, 1)),
}


@pytest.mark.parametrize(("request_", "reply"), RIGHT, ids=lambda value: type(value).__name__)
def test_what_the_work_can_have_had_passes(request_: frames.Tokens, reply: frames.Frame) -> None:
    check_work_reply(request_, reply, is_head=False, is_tail=True, limits=LIMITS)


@pytest.mark.parametrize(("request_", "reply"), FALSE.values(), ids=FALSE.keys())
def test_what_it_cannot_have_had_is_refused(request_: frames.Tokens, reply: frames.Frame) -> None:
    with pytest.raises(WireError):
        check_work_reply(request_, reply, is_head=False, is_tail=True, limits=LIMITS)


@pytest.mark.parametrize(("request_", "reply"), RIGHT[:3], ids=lambda value: type(value).__name__)
def test_a_result_comes_from_the_tail_alone(request_: frames.Tokens, reply: frames.Frame) -> None:
    with pytest.raises(WireError, match="not the tail"):
        check_work_reply(request_, reply, is_head=True, is_tail=False, limits=LIMITS)


def test_only_the_head_skips_work() -> None:
    skipped = frames.WorkSkipped(KEY, 9, 5)
    check_work_reply(DRAW, skipped, is_head=True, is_tail=False, limits=LIMITS)
    with pytest.raises(WireError, match="not the head"):
        check_work_reply(DRAW, skipped, is_head=False, is_tail=True, limits=LIMITS)
