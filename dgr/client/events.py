"""What a pipeline tells its caller about its own life, beside the tokens."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TypeAlias

import trio
from attrs import frozen

from dgr.core.log_fields import log_fields
from dgr.core.route import Route
from dgr.wire.values import Miss

__all__ = [
    "FAILURE",
    "OVERRUN",
    "RE_PREFILL_REASONS",
    "Event",
    "EventHub",
    "GenerationCancelled",
    "PrefillProgress",
    "Prefilled",
    "RePrefilled",
    "RouteChanged",
    "RouteDown",
    "SessionForked",
    "StateLost",
    "drain",
]


@frozen
class Prefilled:
    """New tokens of a session were run through every stage for the first time."""

    session: int
    tokens: int
    #: From the first chunk sent to the last one answered.
    seconds: float


@frozen
class PrefillProgress:
    """One more chunk of a prefill (or re-prefill) of several chunks was committed on every stage.

    It counts what this prefill runs, not the whole transcript: ``committed`` of ``total`` tokens, after ``seconds``. A loss
    midway begins a new count.
    """

    session: int
    committed: int
    total: int
    #: Since the first chunk was sent.
    seconds: float


@frozen
class SessionForked:
    """A session began with a copy, on every stage, of the state of another one."""

    session: int
    source: int
    #: Committed in the copy, and not prefilled.
    tokens: int
    seconds: float


@frozen
class StateLost:
    """A session's state is gone; it will be re-prefilled when it is next used."""

    session: int
    reason: str


@frozen
class RePrefilled:
    """A session's transcript was run again from token 0."""

    session: int
    #: Why: ``route change``, ``evicted``, ``expired``, ``poisoned``, ``diverged``, ...
    reason: str
    tokens: int
    seconds: float


@frozen
class GenerationCancelled:
    """A generation was given up; the session is kept at ``position``."""

    session: int
    position: int


@frozen
class RouteChanged:
    """Every stage of the new route fenced the new epoch."""

    epoch: int
    route: Route
    sessions_dropped: int
    bytes_released: int
    seconds: float


@frozen
class RouteDown:
    """A stage or a link of the route was lost; the pipeline tries to fence it anew until it answers."""

    epoch: int
    why: str


Event: TypeAlias = (
    Prefilled
    | PrefillProgress
    | SessionForked
    | StateLost
    | RePrefilled
    | GenerationCancelled
    | RouteChanged
    | RouteDown
)

_log = logging.getLogger("dgr.route")

#: A re-prefill's reason where the event's own is the text of an error: a stage, a link or a batch failed.
FAILURE = "failure"
#: The stages have drawn further than the answer was read, and its session was gone on with in another way.
OVERRUN = "overrun"
#: Reasons of re-prefills as they are counted.
RE_PREFILL_REASONS = ("route change", "diverged", OVERRUN, *(miss.name.lower() for miss in Miss), FAILURE)

#: Events kept for a subscriber that does not read; later ones are dropped.
KEPT_EVENTS = 4096
#: Reports of progress kept for it: a long prefill must not push out what happened to the route.
_KEPT_PROGRESS = KEPT_EVENTS // 2


class EventHub:
    """Hands events to whoever subscribed; a subscriber that does not read loses events, and never holds the pipeline."""

    def __init__(self) -> None:
        #: The route session whose events they are, for the log.
        self.route_id = b""
        #: Re-prefills, and their tokens, by reason.
        self.re_prefills: Counter[str] = Counter()
        self.re_prefilled_tokens: Counter[str] = Counter()
        #: Times the route was lost.
        self.downs = 0
        self._is_down = False
        self._subscribers: list[trio.MemorySendChannel[Event]] = []

    def subscribe(self) -> trio.MemoryReceiveChannel[Event]:
        """A channel of everything from now on; it ends with the pipeline."""
        send, receive = trio.open_memory_channel[Event](KEPT_EVENTS)
        self._subscribers.append(send)
        return receive

    def emit(self, event: Event) -> None:
        self._note(event)
        for subscriber in list(self._subscribers):
            if isinstance(event, PrefillProgress) and subscriber.statistics().current_buffer_used >= _KEPT_PROGRESS:
                continue
            try:
                subscriber.send_nowait(event)
            except trio.WouldBlock:
                continue
            except trio.BrokenResourceError:
                self._subscribers.remove(subscriber)

    def _note(self, event: Event) -> None:
        """Count an event, and log what happened to the route or to a session's state."""
        match event:
            case RePrefilled():
                reason = event.reason if event.reason in RE_PREFILL_REASONS else FAILURE
                self.re_prefills[reason] += 1
                self.re_prefilled_tokens[reason] += event.tokens
                what, fields = "%d tokens re-prefilled in %.3f s: %s", log_fields(self.route_id, None, event.session)
                _log.info(what, event.tokens, event.seconds, event.reason, extra=fields)
            case StateLost():
                _log.info("state lost: %s", event.reason, extra=log_fields(self.route_id, None, event.session))
            case RouteDown():
                self.downs += 1
                self._is_down = True
                _log.warning("the route is down: %s", event.why, extra=log_fields(self.route_id, event.epoch))
            case RouteChanged():
                stages = ", ".join(f"{ref.address} ({ref.layers})" for ref in event.route.stages)
                level, again = (logging.WARNING, " again") if self._is_down else (logging.INFO, "")
                self._is_down = False
                _log.log(level, "the route is live%s: %s", again, stages, extra=log_fields(self.route_id, event.epoch))

    def close(self) -> None:
        for subscriber in self._subscribers:
            subscriber.close()
        self._subscribers = []


def drain(events: trio.MemoryReceiveChannel[Event]) -> list[Event]:
    """Take what a subscription holds by now, without waiting for more."""
    found: list[Event] = []
    while True:
        try:
            found.append(events.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return found
