"""Links: a transport, a framer, one reader and one writer.

The reader is whoever iterates over the link, or takes all that has come at once (:meth:`Link.receive`): what several
sessions say in one moment costs one turn of the event loop. It must never wait for a caller, so that any byte is read as soon
as it comes. One writer task alone waits for the transport (a cancelled send would leave half a frame); what a transport takes
at once is handed to it by whoever sends, in the same order, without a turn of the event loop for the writer. Control
messages go first. Payloads take
turns, fragment by fragment, so that no session waits for another's long prefill; a session has one payload under way at a
time, so that its frames arrive in the order in which they were sent. On a slow link fragments are shorter. The payloads under
way are bounded in bytes and in number; :meth:`Link.send` waits for room, first come first served.

The receiver holds back the sender with *credits*: payload bytes may be sent only as far as the other side has granted
them, and it grants them again when it has consumed payloads, so that what waits at a slow stage stays bounded: not each
by itself, but as soon as a quarter of all credit is due. With a
*heartbeat* a side that has nothing to say, or hears nothing, asks for a sign of life now and then, and one that hears
nothing at all for three heartbeats gives the other up: any byte counts as life. Each side has a heartbeat of its own.

A link that breaks is closed at once: the other side sees it, and so does whoever iterates here. Only after a failed write
is it still read, because the other side may have said why it left.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
from attrs import frozen

from dgr.errors import ClosedError, FrameError, LinkBroken, Overloaded
from dgr.text import reason_of
from dgr.wire.clocks import ClockQuestions
from dgr.wire.frames import Boundary, Credit, Frame, Logits, Ping, Pong
from dgr.wire.framing import Framer, Limits, Received, encode
from dgr.wire.memory import MemoryTransport
from dgr.wire.nurseries import open_nursery
from dgr.wire.outbox import Outbox, Outgoing, Turn
from dgr.wire.streams import PacketStream, packet_stream

__all__ = ["Link", "LinkStatistics", "open_link"]

#: Control messages that may wait for the writer; more is a flood and breaks the link.
_CONTROL_QUEUE = 4096
#: Payloads that may wait for room; more is a flood of our own and is refused.
_WAITING = 4096
#: Heartbeats without a byte after which the other side is given up.
_SILENT_BEATS = 3
#: Nonce of a Ping that asks for a sign of life; the answer to it is nobody's business but the link's.
_KEEPALIVE = 2**63 - 1


@frozen
class LinkStatistics:
    """Counters of one link since it was opened."""

    frames_sent: int
    frames_received: int
    bytes_sent: int
    bytes_received: int
    #: Payload bytes under way: taken for sending, not written to the end. At most ``limits.under_way``, or one payload.
    bytes_queued: int
    #: Seconds from the last sign of life that was asked for to its answer; None before the first. Only an idle link asks.
    round_trip: float | None = None
    #: Seconds for which payloads waited for room, all of them together: the other side, or what is between, is the slower.
    seconds_waited: float = 0.0


class Link:
    """One end of a link. Made by :func:`open_link`; iterate over it to receive."""

    def __init__(self, transport: trio.abc.Stream, limits: Limits, name: str, heartbeat: float | None) -> None:
        self.name = name
        self.limits = limits
        #: What this side says when it is asked for the time.
        self.clock: Callable[[], float] = trio.current_time
        self.clock_questions = ClockQuestions()
        self._heartbeat = heartbeat
        self._transport = transport
        #: Whether the other end has this one's memory, or shares some with it: nothing that is sent leaves the host.
        self.within_host = isinstance(transport, MemoryTransport | PacketStream)
        self._stream = packet_stream(transport)
        self._framer = Framer(limits)
        self._outbox = Outbox(limits)
        #: A packet that the transport did not take at once; the writer goes on with it.
        self._left: Turn | None = None
        self._work = trio.Event()
        self._idle = trio.lowlevel.ParkingLot()
        #: When the last byte came, and when a sign of life was last asked for.
        self._heard = self._asked = trio.current_time()
        #: When the sign of life was asked for whose answer is awaited; and how long the last answer took.
        self._pinged: float | None = None
        self._round_trip: float | None = None
        self._seconds_waited = 0.0
        self._writing_now = False
        self._writing = trio.CancelScope()
        self._received: deque[Received] = deque()
        #: Payload bytes that were consumed and not granted again yet; and how many of them are granted together.
        self._due = self._due_at = 0
        #: What the iteration ends with.
        self._end: Exception | None = None
        self._closed = False
        self._broken: str | None = None
        self._frames_received = self._bytes_sent = self._bytes_received = 0

    def __repr__(self) -> str:
        return f"<Link {self.name}>"

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            self._outbox.frames,
            self._frames_received,
            self._bytes_sent,
            self._bytes_received,
            self._outbox.queued,
            self._round_trip,
            self._seconds_waited,
        )

    def apply_limits(
        self, limits: Limits, credit: int | None, granted: int | None = None, *, incoming: Limits | None = None
    ) -> None:
        """Take the limits and the first credits that a handshake settled; nothing with a payload may be under way.

        ``credit`` and ``granted`` as in :func:`open_link`. ``incoming``: what may come, where that is less than what may
        be sent.
        """
        self.limits = self._outbox.limits = limits
        self._framer.limits = limits if incoming is None else incoming
        self._outbox.credit = credit
        self._outbox.most_credit = credit or 0
        self._framer.allowance = granted
        if granted is not None:
            self._due_at = max(min(granted // 4, granted - self._framer.limits.under_way // 2), 0)

    @property
    def backlog(self) -> int:
        """Control messages that wait to be written."""
        return len(self._outbox.control)

    # --- sending ---

    def grant(self, n_bytes: int) -> None:
        """Let the other side send ``n_bytes`` of payload again, now or with the next: that many were consumed here."""
        self._due += n_bytes
        if self._due >= self._due_at:
            self._grant_due()
        else:
            self._grant_if_short()

    def _grant_if_short(self) -> None:
        """Hold nothing back that the largest payload may be waiting for: what was taken here may be kept for long."""
        allowance = self._framer.allowance
        if self._due and allowance is not None and allowance < self._framer.limits.under_way // 2:
            self._grant_due()

    def _grant_due(self) -> None:
        n_bytes, self._due = self._due, 0
        if self._framer.allowance is not None:
            self._framer.allowance += n_bytes
        if self._is_open:
            self.send_nowait(Credit(n_bytes))

    async def flush(self) -> None:
        """Wait until everything queued is written, or the link ends."""
        while (self._outbox or self._left or self._writing_now) and self._is_open:
            await self._idle.park()

    def send_nowait(self, frame: Frame) -> None:
        """Queue a frame that has no payload, ahead of all payloads."""
        self._check_open()
        packets = encode(frame, None, 0, self.limits)
        if len(self._outbox.control) >= _CONTROL_QUEUE:
            self._break(f"more than {_CONTROL_QUEUE} control messages wait; the other side does not read")
            raise Overloaded(f"link {self.name}: {self._broken}")
        self._outbox.add_control(packets)
        self._start_writing()

    async def send(self, frame: Frame, payload: bytes | bytearray | memoryview | None = None) -> None:
        """Queue a frame; with a payload, wait until there is room for it. Whoever finds room keeps its turn of the event loop.

        The payload is not copied, so it must not change any more. A send that is cancelled has
        queued nothing, or all of it if room came at that very moment.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if payload is None:
            self.send_nowait(frame)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        outgoing = self._prepare(frame, payload)
        self._outbox.add(outgoing)
        self._start_writing()
        if not outgoing.admitted:
            await self._wait_for_room(outgoing)

    def _prepare(self, frame: Frame, payload: bytes | bytearray | memoryview) -> Outgoing:
        self._check_open()
        stream = self._outbox.free_stream()
        packets = encode(frame, payload, stream, self.limits, self._outbox.fragment)
        if not isinstance(frame, Boundary | Logits):
            raise FrameError(f"{type(frame).__name__} has no payload; send it without one")
        if len(self._outbox.waiting) >= _WAITING:
            raise Overloaded(f"link {self.name}: {_WAITING} payloads wait for room already")
        return Outgoing(packets, frame.key, stream, frame.payload)

    async def _wait_for_room(self, outgoing: Outgoing) -> None:
        began = trio.current_time()
        try:
            await outgoing.settled.wait()
        except trio.Cancelled:
            # Between the cancellation and this line it may have got room (and is sent), or the link may have ended.
            self._outbox.withdraw(outgoing)
            self._start_writing()
            raise
        finally:
            self._seconds_waited += trio.current_time() - began
        if not outgoing.admitted:
            self._check_open()

    @property
    def _is_open(self) -> bool:
        return self._broken is None and not self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"link {self.name} was closed on this side")
        if self._broken is not None:
            raise LinkBroken(f"link {self.name}: {self._broken}")

    async def _write(self) -> None:
        while True:
            if self._heartbeat is not None and trio.current_time() >= max(self._heard, self._asked) + self._heartbeat:
                self._ask_keepalive()  # what is sent does not tell whether the other side lives
            if self._left or self._outbox:
                turn, self._left = self._left or self._outbox.next_packet(), None
                began = trio.current_time()
                self._writing_now = True
                await self._stream.send(turn.head, turn.body)
                self._writing_now = False
                self._written(turn, trio.current_time() - began)
            elif self._stream.owes:
                await self._stream.send(b"", None)
            else:
                self._idle.unpark_all()
                self._work = trio.Event()
                if self._heartbeat is None:
                    await self._work.wait()
                    continue
                said = self._bytes_sent
                with trio.move_on_after(self._heartbeat) as quiet:
                    await self._work.wait()
                if quiet.cancelled_caught and self._bytes_sent == said:
                    self._ask_keepalive()

    def _start_writing(self) -> None:
        """Write what waits, as far as the transport takes it at once; the writer does the rest."""
        if not self._writing_now and self._is_open:
            while self._outbox and self._left is None and self._stream.has_room:
                turn = self._outbox.next_packet()
                left = self._stream.send_nowait(turn.head, turn.body)
                if left is None:
                    self._written(turn)
                else:
                    self._left = turn.shortened(*left)
        if self._outbox or self._left:
            self._work.set()

    def _written(self, turn: Turn, seconds: float = 0.0) -> None:
        self._bytes_sent += turn.n_bytes
        self._outbox.written(turn.outgoing, turn.n_payload, seconds)

    def _ask_keepalive(self) -> None:
        self._asked = trio.current_time()
        if self._is_open and len(self._outbox.control) < _CONTROL_QUEUE:
            self.send_nowait(Ping(_KEEPALIVE))
            self._pinged = self._asked if self._pinged is None else self._pinged

    async def _run_writer(self) -> None:
        try:
            with self._writing:
                await self._write()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._stop_sending(f"cannot write: {reason_of(error)}")
        if self._writing.cancelled_caught:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._transport)

    def _stop_sending(self, why: str) -> None:
        if self._broken is None:
            self._broken = why
        self._settle_all()

    def _break(self, why: str) -> None:
        """The link is over both ways; the writer closes the transport."""
        self._stop_sending(why)
        self._writing.cancel()

    def _settle_all(self) -> None:
        self._idle.unpark_all()
        self._outbox.close()

    # --- receiving ---

    def __aiter__(self) -> Link:
        return self

    async def __anext__(self) -> Received:
        """The next frame; the iteration ends when the other side closed the link between two frames.

        Raises :class:`FrameError` on bytes that are not a frame, after the frames that came before them;
        :class:`LinkBroken` on a link cut inside a frame.
        """
        if self._received:
            await trio.lowlevel.checkpoint()
        while True:
            while not self._received:
                if self._end is not None:
                    raise self._end
                await self._fill()
            self._frames_received += 1
            received = self._received.popleft()
            if not self._handle_link_frame(received.frame):
                return received

    async def receive(self) -> list[Received]:
        """Every frame that has come, at least one; none when the other side closed the link between two frames.

        Raises as iterating does, after the frames that came before.
        """
        taken: list[Received] = []
        while not taken:
            if not self._received:
                if isinstance(self._end, StopAsyncIteration):
                    return taken
                if self._end is not None:
                    raise self._end
                await self._fill()
            while self._received:
                self._frames_received += 1
                received = self._received.popleft()
                if not self._handle_link_frame(received.frame):
                    taken.append(received)
        return taken

    def _handle_link_frame(self, frame: Frame) -> bool:
        """Deal with what concerns the link alone."""
        match frame:
            case Credit():
                self._take_credit(frame.bytes)
            case Ping():
                if frame.nonce and self._is_open:
                    self.send_nowait(Pong(frame.nonce, self.clock()))
            case Pong() if frame.nonce == _KEEPALIVE:
                if self._pinged is not None:
                    self._round_trip, self._pinged = trio.current_time() - self._pinged, None
            case Pong() if self.clock_questions.answer(frame.nonce, frame.clock, self.clock()):
                pass
            case _:
                return False
        return True

    def _take_credit(self, n_bytes: int) -> None:
        outbox = self._outbox
        if outbox.credit is None:
            return
        if n_bytes > (taken := outbox.most_credit - outbox.credit):
            self._refuse(FrameError(f"{n_bytes} bytes of credit came back; {taken} bytes of payload were sent on it"))
            return
        outbox.credit += n_bytes
        outbox.admit()
        self._start_writing()

    def _refuse(self, error: FrameError) -> None:
        """The other side broke the protocol: nothing more of it is taken."""
        self._received.clear()
        self._end = error
        self._break(f"the other side broke the protocol: {error}")

    async def _fill(self) -> None:
        """Read once."""
        patience = 0.0 if self._heartbeat is None else _SILENT_BEATS * self._heartbeat
        came: int | None = None
        try:
            with trio.move_on_after(patience) if patience else contextlib.nullcontext():
                came = await self._stream.receive(self._framer, self._received.extend)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            if self._closed:
                self._end = StopAsyncIteration()
            else:
                self._break(f"cannot read: {reason_of(error)}")
                self._end = LinkBroken(f"link {self.name}: {self._broken}")
                self._end.__cause__ = error
            return
        if came is None:
            self._break(f"the other side was silent for {patience:g} s")
            self._end = LinkBroken(f"link {self.name}: {self._broken}")
            return
        self._heard = trio.current_time()
        self._bytes_received += came
        if self._stream.owes:
            self._work.set()
        self._grant_if_short()
        if not came:
            self._break("closed by the other side")
            if self._framer.pending:
                self._end = LinkBroken(f"link {self.name}: cut inside a frame, {self._framer.pending} bytes held")
            else:
                self._end = StopAsyncIteration()
            return
        if self._framer.error is not None:
            self._end = self._framer.error
            self._break(f"the other side broke the protocol: {self._end}")

    async def aclose(self) -> None:
        """Close this end at once; what still waits for the writer is lost."""
        self._closed = True
        self._settle_all()
        await trio.aclose_forcefully(self._transport)


@asynccontextmanager
async def open_link(
    transport: trio.abc.Stream,
    limits: Limits,
    *,
    name: str = "link",
    credit: int | None = None,
    granted: int | None = None,
    heartbeat: float | None = None,
) -> AsyncIterator[Link]:
    """Run a link's writer for the length of the block; the link is closed on the way out.

    ``credit``: payload bytes that may be sent before the other side grants more (None: any number). ``granted``: the same
    for what comes; a peer that sends more breaks the protocol. ``heartbeat``: seconds after which an idle link shows a sign
    of life; three without a byte end it (None: a silent peer is waited for).
    """
    link = Link(transport, limits, name, heartbeat)
    link.apply_limits(limits, credit, granted)
    async with open_nursery() as nursery:
        nursery.start_soon(link._run_writer)
        try:
            yield link
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await link.aclose()
