"""Waiting for an answer, and what a refusal means to the caller."""

from __future__ import annotations

import trio

from dgr.errors import (
    CacheMissed,
    DeadlineExceeded,
    DgrError,
    InputError,
    NonFinite,
    Overloaded,
    PeerRefused,
    SessionLost,
    WireError,
)
from dgr.wire import frames
from dgr.wire.framing import Received

__all__ = ["Answer", "refused_request", "refused_work"]


class Answer:
    """A place where one answer will be put; the first one counts."""

    __slots__ = ("_event", "_value")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._value: Received | DgrError | None = None

    def set(self, value: Received | DgrError) -> None:
        if self._value is None:
            self._value = value
            self._event.set()

    async def wait(self, seconds: float, what: str) -> Received:
        """The answer; or raise the error put here, or :class:`DeadlineExceeded` after ``seconds``."""
        with trio.move_on_after(seconds):
            await self._event.wait()
        match self._value:
            case None:
                raise DeadlineExceeded(f"no answer to {what} within {seconds:g} s")
            case DgrError() as error:
                raise error
            case received:
                return received


def refused_request(address: str, frame: frames.Frame) -> DgrError:
    """The error that a stage's refusal of a control request means."""
    match frame:
        case frames.Refused(code=frames.Refusal.OVERLOADED):
            return Overloaded(f"stage {address}: {frame.message}")
        case frames.Refused():
            return PeerRefused(f"stage {address}: {frame.message}")
        case frames.CacheMiss():
            return CacheMissed(f"stage {address} holds no such session ({frame.reason.name.lower()})")
        case frames.StaleEpoch():
            return SessionLost(f"stage {address} is at epoch {frame.current}, not at the one asked for")
        case _:
            return WireError(f"stage {address} answered with {type(frame).__name__}")


def refused_work(frame: frames.Frame) -> DgrError:
    """The error that a refusal of a work frame means. :class:`SessionLost` alone is worth a re-prefill."""
    match frame:
        case frames.CacheMiss():
            return CacheMissed(frame.reason.name.lower())
        case frames.StaleEpoch():
            return SessionLost(f"stale epoch: a stage is at {frame.current}")
        case frames.Refused(code=frames.Refusal.NON_FINITE):
            return NonFinite(frame.message)
        case frames.Refused(code=frames.Refusal.INPUT):
            return InputError(frame.message)
        case frames.Refused():
            return SessionLost(f"{frame.code.name.lower()}: {frame.message}")
        case frames.Cancelled():
            return SessionLost(f"cancelled at position {frame.position}")
        case _:
            return WireError(f"a work frame was answered with {type(frame).__name__}")
