"""Where a stage sends work in one epoch: to the next stage, and from the tail to the head again."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import trio

from dgr.errors import DgrError, WireError
from dgr.wire import frames
from dgr.wire.frames import Tokens
from dgr.wire.links import Link

__all__ = ["NextStage", "WayToHead"]

_log = logging.getLogger("dgr.shard")

#: Seconds until a head that could not be reached is dialed again.
_REST = 10.0

#: Opens the link to a stage, or gives the one that is open. Raises :class:`DgrError`.
Dial = Callable[[str], Awaitable[Link]]


class NextStage:
    """The way to the stage that a fence names as the next one."""

    def __init__(self, fence: frames.Fence, dial: Dial) -> None:
        self.dial = dial
        self._fence = fence
        #: None before it is reached, after it is lost, and on a tail.
        self.link: Link | None = None
        self._ready = trio.Event()
        self._scope = trio.CancelScope()

    def give_up(self) -> None:
        """A newer fence has come: whoever dials or waits gives way."""
        self.link = None
        self._scope.cancel()

    async def reach(self, seconds: float) -> str | None:
        """Connect to it, if there is one, and wait until it admits the epoch; returns what went wrong."""
        fence = self._fence
        if not fence.successor or self._scope.cancel_called:
            return None
        self._scope.deadline = trio.current_time() + seconds
        with self._scope:
            try:
                link = await self.dial(fence.successor)
                if not self._scope.cancel_called:
                    self.link = link
                    await link.send(frames.AwaitReady(fence.route, fence.epoch))
                    await self._ready.wait()
            except DgrError as error:
                return f"cannot reach the next stage {fence.successor}: {error}"
        if not self._ready.is_set():
            return f"the next stage {fence.successor} was not ready within {seconds:g} s"
        return None

    def is_ready(self, link: Link, epoch: int) -> None:
        """Whoever is behind ``link`` admits an epoch."""
        if link is self.link and epoch == self._fence.epoch:
            self._ready.set()

    def lost(self, link: Link) -> bool:
        """A link has ended; returns whether it was the one to this stage."""
        if link is not self.link:
            return False
        self.link = None
        return True


class WayToHead:
    """The way from a tail to the head of its route: a link, made when the first decode run asks for it; or none where both are
    one stage, which takes its own work.

    Nothing depends on it. Without it the pipeline sends the next token's work itself.
    """

    def __init__(
        self,
        fence: frames.Fence,
        dial: Dial,
        *,
        start: Callable[[Callable[[], Awaitable[None]]], None],
        here: Callable[[Tokens], None],
    ) -> None:
        """``start`` starts a task; ``here`` takes work on this stage."""
        self._head = "" if fence.successor else fence.ring
        self._is_here = not fence.predecessor
        self._dial = dial
        self._start = start
        self._here = here
        self.link: Link | None = None
        #: A link that took no more, and whose end has not been told yet.
        self._broken: Link | None = None
        self._dialing = False
        #: When the head may be dialed again.
        self._again = -math.inf

    def send(self, frame: Tokens) -> bool:
        """Give the head work; returns whether it is on its way."""
        if not self._head:
            return False
        if self._is_here:
            self._here(frame)
            return True
        if self.link is None:
            if not self._dialing and trio.current_time() >= self._again:
                self._dialing = True
                self._start(self._reach)
            return False
        try:
            self.link.send_nowait(frame)
        except WireError:
            self.link, self._broken = None, self.link
            return False
        return True

    def lost(self, link: Link) -> bool:
        """A link has ended; returns whether it was one to the head."""
        if link is self.link:
            self.link = None
        elif link is self._broken:
            self._broken = None
        else:
            return False
        return True

    async def _reach(self) -> None:
        try:
            self.link = await self._dial(self._head)
        except DgrError as error:
            _log.warning("no decode runs, pipelines ask for every token: no link to head %s: %s", self._head, error)
        finally:
            self._dialing = False
            self._again = trio.current_time() + _REST
