"""What waits to be written on a link, and whose turn it is: pure bookkeeping, without I/O.

Control messages go first. Payloads take turns, fragment by fragment; a session has one under way at a time. Those under way
are bounded in bytes and in number, and by the credit that the other side granted. A fragment is as long as the link agreed
on, or as short as it must be to take little time: what comes behind one waits for all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import trio

from dgr.core.values import Key
from dgr.wire.framing import Limits, Packet

__all__ = ["Outbox", "Outgoing", "Turn"]

#: Streams are numbered 1..65535 on the wire; 0 stands for "no payload".
_LAST_STREAM = 65535
#: Seconds that a fragment may take to be written, and bytes below which none is cut for it.
_FRAGMENT_SECONDS, _SHORTEST = 0.02, 16 * 1024
#: Bytes by which the pace of a link is known. Buffers take bytes in lumps, so that single fragments tell nothing.
_REMEMBERED = 1 << 20


class Outgoing:
    """A frame with its payload: first waiting for room, then under way."""

    __slots__ = ("admitted", "left", "packets", "session", "settled", "size", "stream")

    def __init__(self, packets: Iterator[Packet], session: Key, stream: int, size: int) -> None:
        self.packets = packets
        self.session = session
        self.stream = stream
        self.size = size
        #: Bytes of the payload that the writer has not written.
        self.left = size
        self.admitted = False
        #: Set when it is admitted, or when the link ends first.
        self.settled = trio.Event()


class Turn:
    """A packet, or a message and its first fragment, that is written next; or what is left of it."""

    __slots__ = ("body", "head", "n_bytes", "n_payload", "outgoing")

    def __init__(self, head: bytes, body: memoryview | None, outgoing: Outgoing | None) -> None:
        self.head = head
        self.body = body
        #: The frame with a payload that it belongs to.
        self.outgoing = outgoing
        #: Bytes of the whole, and those of a payload among them.
        self.n_payload = 0 if body is None else body.nbytes
        self.n_bytes = len(head) + self.n_payload

    def shortened(self, head: bytes, body: memoryview | None) -> Turn:
        """This one when no more than ``head`` and ``body`` of it are left to be written."""
        self.head, self.body = head, body
        return self


class Outbox:
    """The frames of one end of a link that are not written yet."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        #: Payload bytes the other side takes before it grants more; None: any number.
        self.credit: int | None = None
        #: What it took at first; it can never grant more than that.
        self.most_credit = 0
        self.control: deque[Packet] = deque()
        #: Payloads that wait for room.
        self.waiting: deque[Outgoing] = deque()
        #: Payloads under way.
        self.turns: deque[Outgoing] = deque()
        #: Their bytes.
        self.queued = 0
        #: Frames taken for sending.
        self.frames = 0
        #: Sessions with a payload under way.
        self._sessions: set[Key] = set()
        self._streams: set[int] = set()
        self._stream = 0
        #: What was written last, and in how long: bytes and seconds, the older the less.
        self._written_bytes = self._written_seconds = 0.0

    def fragment(self) -> int:
        """Bytes of the next fragment, by the pace of those before it."""
        longest = self.limits.fragment
        if self._written_seconds * longest <= _FRAGMENT_SECONDS * self._written_bytes:
            return longest
        return min(longest, max(_SHORTEST, int(_FRAGMENT_SECONDS * self._written_bytes / self._written_seconds)))

    def __bool__(self) -> bool:
        """Whether there is something to write now."""
        return bool(self.control or self.turns)

    def add_control(self, packets: Iterator[Packet]) -> None:
        self.control.extend(packets)
        self.frames += 1

    def add(self, outgoing: Outgoing) -> None:
        """Take a frame with a payload; it gets under way now or when there is room."""
        self._streams.add(outgoing.stream)
        self.waiting.append(outgoing)
        self.admit()

    def withdraw(self, outgoing: Outgoing) -> None:
        """Take back a frame that still waits for room; it may have stood before others."""
        if outgoing in self.waiting:
            self.waiting.remove(outgoing)
            self._streams.discard(outgoing.stream)
            self.admit()

    def close(self) -> None:
        """Nothing more is written: whoever waits for room is woken."""
        while self.waiting:
            self.waiting.popleft().settled.set()

    def free_stream(self) -> int:
        while True:
            self._stream = self._stream % _LAST_STREAM + 1
            if self._stream not in self._streams:
                return self._stream

    def admit(self) -> None:
        """Let waiting payloads get under way: in order, one per session, within the limits."""
        passed_over: list[Outgoing] = []
        behind = set(self._sessions)
        while self.waiting and len(self._sessions) < self.limits.streams:
            outgoing = self.waiting[0]
            if outgoing.session in behind:
                passed_over.append(self.waiting.popleft())
            elif self._lacks_room(outgoing.size):
                break  # nobody overtakes it for want of bytes, or it might wait forever
            else:
                self.waiting.popleft()
                self._sessions.add(outgoing.session)
                self.queued += outgoing.size
                if self.credit is not None:
                    self.credit -= outgoing.size
                self.frames += 1
                self.turns.append(outgoing)
                outgoing.admitted = True
                outgoing.settled.set()
            behind.add(outgoing.session)
        self.waiting.extendleft(reversed(passed_over))

    def _lacks_room(self, size: int) -> bool:
        if self.credit is not None and size > self.credit:
            return True
        return bool(self.queued) and self.queued + size > self.limits.under_way

    def next_packet(self) -> Turn:
        """What is written next. Something must wait."""
        if self.control:
            return Turn(*self.control.popleft(), None)
        outgoing = self.turns.popleft()
        head, body = next(outgoing.packets)
        if body is None and outgoing.left:  # the message; the first fragment goes with it
            more, body = next(outgoing.packets)
            head += more
        return Turn(head, body, outgoing)

    def written(self, outgoing: Outgoing | None, size: int, seconds: float = 0.0) -> None:
        """``size`` bytes of a payload were written, in so many seconds; the next in turn follows."""
        if outgoing is None:
            return
        kept = max(0.0, 1 - size / _REMEMBERED)
        self._written_bytes = kept * self._written_bytes + size
        self._written_seconds = kept * self._written_seconds + seconds
        outgoing.left -= size
        if outgoing.left:
            self.turns.append(outgoing)
        else:
            self._sessions.discard(outgoing.session)
            self._streams.discard(outgoing.stream)
            self.queued -= outgoing.size
            self.admit()
