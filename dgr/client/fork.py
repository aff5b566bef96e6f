"""A session that begins as another one stands: the same transcript, and on every stage a copy of what it has committed.

The copy spares a prefill and nothing else depends on it: where a stage has lost the source's state, or cannot copy, the
session begins without any and prefills at first use, with the same bits.
"""

from __future__ import annotations

import trio

from dgr.client.claims import check_forked
from dgr.client.events import SessionForked, StateLost
from dgr.client.replies import control_error
from dgr.client.session import ClientSession
from dgr.core.values import Expectation
from dgr.errors import CacheMissed, Overloaded, PeerRefused, SessionLost, WireError
from dgr.protocol.states import ClientEvent, ClientState
from dgr.wire import frames

__all__ = ["ForkedSession"]


class ForkedSession(ClientSession):
    """Made by :meth:`ClientSession.fork`."""

    async def begin_as(self, source: ClientSession) -> None:
        """Take the transcript of ``source`` and a copy of its state; see :meth:`ClientSession.fork` for the errors."""
        async with source._use():
            await source._settle()
            self.transcript = list(source.transcript)
            if source.committed and self._route.limits.forks:
                await self._route.wait_live()
                if source.committed:  # else the route changed meanwhile
                    await self._copy(source)

    async def _copy(self, source: ClientSession) -> None:
        began, committed, held = trio.current_time(), source.committed, source._held
        expect = Expectation(committed, source._work.digest)
        self._epoch = self._route.epoch
        request = frames.Fork(self._route.key(self.id), self._work.next_seq(), source.id, expect)
        try:
            for address, frame in await self._route.ask_all(request):
                check_forked(address, expect, frame)
                if isinstance(frame, frames.CacheMiss) and source.committed == committed:
                    source.lose(frame.reason.name.lower())
                if not isinstance(frame, frames.Opened):
                    raise control_error(address, frame)
            if self._epoch != self._route.epoch:
                raise SessionLost("the route changed while the session was being copied")
            self._check_open()
        except BaseException as error:
            # Some stages may have made a copy: they are told to drop it, before the first use or with the session.
            if self.state is ClientState.COLD:
                self._machine.fire(ClientEvent.LOSE)
            if isinstance(error, Overloaded) or not isinstance(
                error, CacheMissed | PeerRefused | SessionLost | WireError
            ):
                raise
            self._check_open()
            self._loss = str(error)
            self._route.emit(StateLost(self.id, self._loss))
            return
        self._work.stand_at(held)
        self._machine.fire(ClientEvent.OPENED)
        self._route.emit(SessionForked(self.id, source.id, committed, trio.current_time() - began))
