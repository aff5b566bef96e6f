"""A relay between two streams that does what networks do: delay, stall, trickle, be slow, and cut within a frame.

It stands between two peers::

    left, left_plug = memory_transports()
    right_plug, right = memory_transports()
    async with open_relay(left_plug, right_plug) as relay:
        relay.rightward.delay = 0.010
        ...  # a link on ``left`` talks to a link on ``right``
        await relay.cut()

It knows nothing of frames and takes any :class:`trio.abc.Stream`: memory transports, TCP, TLS. All its times are trio's
clock, so that under an autojump clock a minute of delay costs nothing.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from dgr.wire.nurseries import open_nursery

__all__ = ["CAPACITY", "Flow", "Relay", "open_relay"]

#: Most bytes taken from a stream at once.
_READ = 65536
#: Bytes that a direction holds at most by default: enough for a fast network, little enough for back-pressure to be felt.
CAPACITY = 1024 * 1024
#: Seconds by which the event loop's timer may be late: epoll counts in whole milliseconds.
_LATE = 0.0015
#: Seconds of a slow direction's time that it may make up for when it comes late.
_SLICE = 0.005
#: ``SO_LINGER`` on, for zero seconds: closing a socket then sends a reset, as a host that died would.
_RESET = struct.pack("ii", 1, 0)
#: Seconds for an orderly goodbye: TLS waits for the other side's.
_GOODBYE = 1.0


class _End(enum.Enum):
    """How a direction ended."""

    #: The source ended its stream and everything was passed on.
    STREAM = enum.auto()
    #: The sink takes nothing any more.
    DEAF = enum.auto()
    #: A clean cut.
    CLEAN = enum.auto()
    #: An abrupt cut, or a source that was lost.
    ABRUPT = enum.auto()


class Flow:
    """One direction of a :class:`Relay`. What is set here holds for every byte not passed on yet."""

    def __init__(self, source: trio.abc.Stream, sink: trio.abc.Stream, capacity: int) -> None:
        self._source = source
        self._sink = sink
        self._capacity = capacity
        #: What came and was not passed on: (when it came, bytes). Empty bytes are the end of the stream.
        self._held: deque[tuple[float, memoryview]] = deque()
        self._held_bytes = 0
        self._forwarded = 0
        self._delay = 0.0
        self._stalled = False
        self._piece = _READ
        self._interval = 0.0
        self._rate: float | None = None
        #: With a rate: when what was passed on is through.
        self._through = 0.0
        #: Called when something is passed on.
        self._told: Callable[[Flow], None] = lambda _: None
        #: At how many forwarded bytes the relay is cut, and whether cleanly.
        self._cut_at: tuple[int, bool] | None = None
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def forwarded(self) -> int:
        """Bytes passed on since the relay was opened."""
        return self._forwarded

    @property
    def held(self) -> int:
        """Bytes that came and were not passed on yet."""
        return self._held_bytes

    @property
    def delay(self) -> float:
        """Seconds from the moment bytes reach the relay to the moment they leave it; may be set."""
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._delay = seconds
        self._changed.unpark_all()

    @property
    def rate(self) -> float | None:
        """Bytes a second that pass at most; None: as many as come. May be set."""
        return self._rate

    @rate.setter
    def rate(self, bytes_per_second: float | None) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"a rate of {bytes_per_second} bytes a second; must be above 0")
        self._rate = bytes_per_second
        self._changed.unpark_all()

    def stall(self) -> None:
        """Pass nothing on until :meth:`resume`; bytes are still taken in, up to the capacity, as kernel buffers do."""
        self._stalled = True

    def resume(self) -> None:
        """Go on after :meth:`stall`; nothing was lost."""
        self._stalled = False
        self._changed.unpark_all()

    def trickle(self, piece: int = 1, interval: float = 0.0) -> None:
        """Pass on ``piece`` bytes at a time, ``interval`` seconds apart."""
        if piece < 1:
            raise ValueError(f"a piece of {piece} bytes; must be at least 1")
        self._piece = piece
        self._interval = interval

    def cut_after(self, n_bytes: int, *, clean: bool = False) -> None:
        """Cut the relay once ``n_bytes`` more were passed on in this direction; see :meth:`Relay.cut`."""
        self._cut_at = self._forwarded + n_bytes, clean
        self._changed.unpark_all()

    async def _run(self) -> _End:
        end = _End.ABRUPT
        async with open_nursery() as nursery:
            nursery.start_soon(self._take_in, nursery.cancel_scope)
            end = await self._pass_on()
            nursery.cancel_scope.cancel()
        return end

    async def _take_in(self, passing_on: trio.CancelScope) -> None:
        data: bytes | bytearray = b"begin"
        while data:
            while self._held_bytes > self._capacity // 2:  # not for the last byte free, or it would go on byte by byte
                await self._changed.park()
            try:
                data = await self._source.receive_some(min(_READ, self._capacity - self._held_bytes))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                passing_on.cancel()  # raised, it could meet a cut and leave as a group with it
                return
            self._held.append((trio.current_time(), memoryview(data)))
            self._held_bytes += len(data)
            self._changed.unpark_all()

    async def _pass_on(self) -> _End:
        while True:
            if self._cut_at is not None and self._forwarded >= self._cut_at[0]:
                return _End.CLEAN if self._cut_at[1] else _End.ABRUPT
            if self._stalled or not self._held:
                await self._changed.park()
                continue
            came, data = self._held[0]
            if trio.current_time() < came + self._delay:
                await self._wait(came + self._delay)
                continue
            if self._rate is not None and trio.current_time() < self._through:
                await self._wait(self._through)
                continue
            if not data:
                return _End.STREAM
            size = min(len(data), self._piece)
            if self._rate is not None:
                size = min(size, max(1, int(self._rate * _SLICE)))
                self._through = max(self._through, trio.current_time() - _SLICE) + size / self._rate
            if self._cut_at is not None:
                size = min(size, self._cut_at[0] - self._forwarded)
            self._told(self)
            try:
                await self._sink.send_all(data[:size])
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return _End.DEAF
            self._held[0] = came, data[size:]
            if size == len(data):
                self._held.popleft()
            self._forwarded += size
            self._held_bytes -= size
            self._changed.unpark_all()
            if self._interval:
                await trio.sleep(self._interval)

    async def _wait(self, due: float) -> None:
        """Wait for a time, or less when something changed. The last stretch is spent looking at the clock."""
        now = trio.current_time()
        if now < due - _LATE:
            due -= _LATE
        else:
            await trio.lowlevel.checkpoint()
            if trio.current_time() > now:
                return
            # A mock clock: it moves only while everybody sleeps.
        with trio.move_on_at(due):
            await self._changed.park()


class Relay:
    """Two streams joined by a bad network. Made by :func:`open_relay`."""

    def __init__(self, left: trio.abc.Stream, right: trio.abc.Stream, capacity: int) -> None:
        #: From the left stream to the right one.
        self.rightward = Flow(left, right, capacity)
        #: From the right stream to the left one.
        self.leftward = Flow(right, left, capacity)
        self.rightward._told = self.leftward._told = self._tell
        self._last: Flow | None = None
        self._turns = 0
        self._streams = left, right
        self._scope = trio.CancelScope()
        self._reset = False
        self._orderly = False
        self._closed = trio.Event()

    @property
    def turns(self) -> int:
        """Times that bytes went the other way than those before them: a question and its answer are two."""
        return self._turns

    def _tell(self, flow: Flow) -> None:
        self._turns += flow is not self._last
        self._last = flow

    @property
    def is_closed(self) -> bool:
        """Whether both streams are closed: by a cut, or because a party closed its own end."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Wait until both streams are closed, for whatever reason."""
        await self._closed.wait()

    async def cut(self, *, clean: bool = False) -> None:
        """Close both streams; returns when they are closed.

        Abruptly by default: what is held is lost, and TCP peers see a reset. A ``clean`` cut first passes on what is
        held by now, as slowly as the directions are set to, and ends both streams in order.
        """
        if clean:
            self._cut_cleanly(self.rightward, self.leftward)
        else:
            self._cut_abruptly()
        await self._closed.wait()

    def _cut_cleanly(self, *flows: Flow) -> None:
        for flow in flows:
            flow.cut_after(flow.held, clean=True)

    def _cut_abruptly(self) -> None:
        self._reset = True
        self._scope.cancel()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with open_nursery() as nursery:
                    nursery.start_soon(self._watch, self.rightward, self.leftward)
                    nursery.start_soon(self._watch, self.leftward, self.rightward)
                self._orderly = True
            for stream in self._streams:
                await self._close(stream)
        finally:
            with trio.CancelScope(shield=True):
                for stream in self._streams:
                    await trio.aclose_forcefully(stream)
            self._closed.set()

    async def _watch(self, flow: Flow, opposite: Flow) -> None:
        match await flow._run():
            case _End.ABRUPT:
                self._cut_abruptly()
            case _End.CLEAN:
                if opposite._cut_at is None:
                    self._cut_cleanly(opposite)
            case _End.STREAM if isinstance(flow._sink, trio.abc.HalfCloseableStream):
                try:
                    await flow._sink.send_eof()
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    self._cut_abruptly()
            case _End.STREAM:
                self._orderly = True  # such a stream ends both ways or not at all
                self._scope.cancel()
            case _End.DEAF:
                pass  # whoever closed it shows in the other direction, behind the last bytes it sent

    async def _close(self, stream: trio.abc.Stream) -> None:
        if self._reset:
            transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
            if isinstance(transport, trio.SocketStream):
                transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await trio.aclose_forcefully(transport)
        elif self._orderly:
            with trio.move_on_after(_GOODBYE):
                await stream.aclose()


@asynccontextmanager
async def open_relay(
    left: trio.abc.Stream, right: trio.abc.Stream, *, capacity: int = CAPACITY
) -> AsyncIterator[Relay]:
    """Join two streams for the length of the block; both are closed on the way out.

    The relay owns the streams it is given: each must be the far end of what a party holds. ``capacity``: bytes that
    each direction holds at most; then it stops reading, and the sender feels it.
    """
    relay = Relay(left, right, capacity)
    async with open_nursery() as nursery:
        nursery.start_soon(relay._run)
        try:
            yield relay
        finally:
            relay._scope.cancel()
