"""From frames to bytes and back, without I/O.

Theory of operation. A link carries *packets*: an 8-byte header (length, kind, stream) and a body. A ``MESSAGE`` packet
holds one msgpack frame. A frame that announces a payload names a *stream*, and its payload follows in ``FRAGMENT``
packets of that stream, each at most :attr:`Limits.fragment` bytes, in order; packets of other streams may come between
them, so a long prefill never blocks a control message. The receiver knows a payload's size from the message alone, checks
it against what was negotiated (n_batch, boundary width, vocabulary), and only then takes fragments into one buffer of that
size: nothing is allocated for what was only announced, and no memory is touched before its bytes come. They are copied
once, or read straight into place (:attr:`Framer.room`), or not copied at all where whoever hands them over promises not
to change them. What all payloads under way may hold together is bounded too, so that a peer cannot make it hold many times
what an honest link ever holds.

The state of the framer depends on the bytes alone, never on how they were chopped: frames that came before a bad byte are
given out, and everything after it is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import msgspec
from attrs import evolve, frozen

from dgr.core.buffers import new_buffer
from dgr.core.values import Wire
from dgr.errors import FrameError
from dgr.wire import frames
from dgr.wire.frames import Boundary, Frame, Logits

__all__ = [
    "HEADER_SIZE",
    "Framer",
    "Limits",
    "Packet",
    "Received",
    "decode_message",
    "encode",
    "encode_message",
]

_HEADER = struct.Struct("<IBBH")
#: Bytes before every packet body.
HEADER_SIZE = _HEADER.size
_MESSAGE = 1
_FRAGMENT = 2
_FLOAT = 4
#: Fragments count their bytes in 32 bits.
_FRAGMENT_MAX = 2**32 - 1


@frozen
class Limits:
    """What a link has agreed to carry; every length is checked against it before anything is allocated."""

    #: Most tokens in one work frame.
    n_batch: int
    #: Floats per token of the boundary, both ways.
    boundary_width: int
    #: Floats per row of logits.
    n_vocab: int
    #: Largest payload fragment, bytes.
    fragment: int = 256 * 1024
    #: Payloads that may be under way at once.
    streams: int = 64
    #: How the boundary's floats travel.
    wire: Wire = Wire.F32

    def unbroken(self) -> Limits:
        """The same for a link inside a process: nothing waits there while a payload passes, so it need not be cut up."""
        return evolve(self, fragment=min(self.under_way, _FRAGMENT_MAX))

    def within_host(self) -> Limits:
        """The same for a link that shares memory: a longer fragment takes no more time there than a short one elsewhere."""
        return evolve(self, fragment=4 * self.fragment)

    @property
    def under_way(self) -> int:
        """Most payload bytes under way at once: two full boundaries. One payload of any legal size always fits."""
        return 2 * self.n_batch * self.wire.row_bytes(self.boundary_width)

    @property
    def message(self) -> int:
        """Largest message body, bytes: 5 per token id and room for every other field."""
        return 64 * 1024 + 5 * self.n_batch

    def payload(self, frame: Frame) -> int:
        """The payload a frame must announce, bytes. Raises :class:`FrameError` when it announces another."""
        match frame:
            case Boundary():
                _check_batch(frame.tokens, self.n_batch)
                expected = len(frame.tokens) * self.wire.row_bytes(self.boundary_width)
                if self.wire.packs and 3 * expected // 4 < frame.payload < expected:
                    return frame.payload  # a quarter of its bytes in fewer; what they unpack to is looked at then
                what = f"{len(frame.tokens)} tokens of {self.boundary_width} {self.wire}"
            case Logits():
                if frame.n_rows > self.n_batch:
                    raise FrameError(
                        f"logits frame holds {frame.n_rows} rows; the link agreed on at most {self.n_batch}"
                    )
                expected = frame.n_rows * self.n_vocab * _FLOAT
                what = f"{frame.n_rows} rows of {self.n_vocab} float32"
            case frames.Tokens():
                _check_batch(frame.tokens, self.n_batch)
                return 0
            case frames.Ping(zeros=zeros) if zeros.count(0) != len(zeros):
                raise FrameError("a Ping carries bytes other than zero")
            case _:
                return 0
        if frame.payload != expected:
            raise FrameError(
                f"{type(frame).__name__} announces a payload of {frame.payload} bytes; {what} are {expected} bytes"
            )
        return expected


def _check_batch(tokens: tuple[int, ...], n_batch: int) -> None:
    if len(tokens) > n_batch:
        raise FrameError(
            f"work frame holds {len(tokens)} tokens; the link agreed on n_batch {n_batch}: send smaller chunks"
        )


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_message(frame: Frame) -> bytes:
    """The msgpack bytes of a frame, without its payload."""
    return _encoder.encode(frame)


def decode_message(data: bytes | bytearray | memoryview) -> Frame:
    """Read one frame. Raises :class:`msgspec.ValidationError` or :class:`msgspec.DecodeError`."""
    return _decoder.decode(data)


#: One packet as (head, body): a message is all head, a fragment's body is a view of the payload.
Packet = tuple[bytes, memoryview | None]


@frozen
class Received:
    """A whole frame, with its payload if it has one."""

    frame: Frame
    payload: memoryview | None = None


#: Frames of every token. Their makers guarantee every field: token ids and sampling are checked where a caller gives them,
#: a drawn token where the engine gives it, and the rest is counted here or was decoded from another frame.
_CHECKED_BY_THEIR_MAKERS = (
    frames.Tokens,
    Boundary,
    frames.Token,
    frames.Advanced,
    Logits,
    frames.Credit,
)


def encode(
    frame: Frame,
    payload: bytes | bytearray | memoryview | None,
    stream: int,
    limits: Limits,
    fragment: Callable[[], int] | None = None,
) -> Iterator[Packet]:
    """Packets of a frame, in order. The frame is checked before the first one is asked for.

    ``fragment``: bytes of the fragment that is asked for next; at most, and by default, what the limits say.

    ``stream`` (1..65535) must not be in use by another payload under way on the link. Raises :class:`FrameError` for
    whatever the other side would refuse: the sender of a bad frame learns of it, and the link lives on. The fields of frames
    that go out for every token are not looked at again, but for their sizes: their makers have checked them, and
    decoding each would cost as much as encoding it.
    """
    try:
        body = encode_message(frame)
        if not isinstance(frame, _CHECKED_BY_THEIR_MAKERS):
            decode_message(body)  # a struct does not check its own fields when it is made
    except (msgspec.MsgspecError, OverflowError, UnicodeError) as error:
        raise FrameError(f"{type(frame).__name__} breaks the schema: {error}") from error
    size = limits.payload(frame)
    view = memoryview(payload).cast("B") if payload is not None else memoryview(b"")
    if view.nbytes != size:
        raise FrameError(f"{type(frame).__name__} was given a payload of {view.nbytes} bytes; its fields say {size}")
    if len(body) > limits.message:
        raise FrameError(f"{type(frame).__name__} is {len(body)} bytes; the link agreed on {limits.message}")
    return _packets(body, view, stream, fragment or (lambda: limits.fragment))


def _packets(body: bytes, payload: memoryview, stream: int, fragment: Callable[[], int]) -> Iterator[Packet]:
    yield _HEADER.pack(len(body), _MESSAGE, 0, stream if payload.nbytes else 0) + body, None
    while payload.nbytes:
        part = payload[: fragment()]
        payload = payload[part.nbytes :]
        yield _HEADER.pack(part.nbytes, _FRAGMENT, 0, stream), part


class _Assembly:
    """A payload under way."""

    __slots__ = ("_buffer", "_filled", "frame", "size")

    def __init__(self, frame: Frame, size: int) -> None:
        self.frame = frame
        self.size = size
        #: None until its first byte: an announcement alone, within limits that the other side itself stated, costs nothing.
        self._buffer: memoryview | None = None
        self._filled = 0

    @property
    def missing(self) -> int:
        return self.size - self._filled

    def room(self, n_bytes: int) -> memoryview:
        """Where its next bytes belong."""
        if self._buffer is None:
            try:
                self._buffer = new_buffer(self.size)
            except MemoryError as error:
                raise FrameError(f"a payload of {self.size} bytes cannot be taken: {error}") from error
        return self._buffer[self._filled : self._filled + n_bytes]

    def filled(self, n_bytes: int) -> None:
        """So many bytes were written where they belong."""
        self._filled += n_bytes

    def take(self, part: memoryview, lasting: bool) -> None:
        if lasting and part.nbytes == self.size:
            self._buffer = part.toreadonly()
        else:
            self.room(part.nbytes)[:] = part
        self._filled += part.nbytes

    def received(self) -> Received:
        assert self._buffer is not None
        return Received(self.frame, self._buffer)


class Framer:
    """Bytes in, frames out. Any :class:`FrameError` is final: the link must be closed."""

    def __init__(self, limits: Limits) -> None:
        #: What the bytes were refused for; nothing more is taken after it.
        self.error: FrameError | None = None
        self.limits = limits
        #: Payload bytes that may still be announced: what was granted and is not used up. None: any number.
        self.allowance: int | None = None
        self._header = bytearray()
        self._left = 0
        self._message: bytearray | None = None
        self._target: _Assembly | None = None
        self._stream = 0
        self._assemblies: dict[int, _Assembly] = {}

    @property
    def pending(self) -> int:
        """Bytes held for frames that are not whole yet; 0 exactly between two frames."""
        message = 0 if self._message is None else HEADER_SIZE + len(self._message)
        return len(self._header) + message + self._assembling

    @property
    def _assembling(self) -> int:
        return sum(assembly.size for assembly in self._assemblies.values())

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes belong, all of it in one payload; None while they are part of something else.

        Whoever reads into it says so with :meth:`filled`, before anything else is received. Raises :class:`FrameError`
        when there is no memory for the payload.
        """
        if self._target is None:
            return None
        try:
            return self._target.room(self._left)
        except FrameError as error:
            self._fail(error)
            raise

    def filled(self, n_bytes: int) -> list[Received]:
        """Take ``n_bytes`` that were read into :attr:`room`, and return the frame they completed, if any."""
        done: list[Received] = []
        if self._target is not None:
            self._target.filled(n_bytes)
            self._left -= n_bytes
            self._end_fragment(self._target, done)
        return done

    def receive(self, data: bytes | bytearray | memoryview, *, lasting: bool = False) -> list[Received]:
        """Take bytes as they came and return the frames they completed.

        ``lasting``: nobody will change ``data`` any more, so that a payload that is in it in one piece need not be copied.
        When bytes are refused, the frames completed before them are returned first: :attr:`error` is then set, and the next
        call raises it.
        """
        if self.error is not None:
            raise self.error
        done: list[Received] = []
        view = memoryview(data)
        try:
            while view.nbytes:
                if (whole := self._whole_message(view)) is not None:
                    self._end_message(whole, done)
                    view = view[HEADER_SIZE + whole.nbytes :]
                elif self._message is None and self._target is None:
                    view = self._take_header(view)
                else:
                    view = self._take_body(view, lasting, done)
        except FrameError as error:
            self._fail(error)
            if not done:
                raise
        return done

    def _whole_message(self, view: memoryview) -> memoryview | None:
        """The body of a message that came in one piece, with its header: it is read where it lies."""
        if self._message is not None or self._target is not None or self._header or view.nbytes < HEADER_SIZE:
            return None
        length, kind, reserved, stream = _HEADER.unpack_from(view)
        if kind != _MESSAGE or reserved or not 0 < length <= min(self.limits.message, view.nbytes - HEADER_SIZE):
            return None
        self._stream = stream
        return view[HEADER_SIZE : HEADER_SIZE + length]

    def refuse(self, error: FrameError) -> None:
        """Take nothing more: what carries the bytes broke its own rules."""
        self._fail(error)

    def _fail(self, error: FrameError) -> None:
        self.error = error
        self._header.clear()
        self._message = self._target = None
        self._assemblies.clear()

    def _take_header(self, view: memoryview) -> memoryview:
        missing = HEADER_SIZE - len(self._header)
        self._header += view[:missing]
        if len(self._header) == HEADER_SIZE:
            length, kind, reserved, stream = _HEADER.unpack(self._header)
            self._header.clear()
            if reserved:
                raise FrameError(f"the reserved byte of a packet header is {reserved}; this schema knows only 0")
            self._begin(length, kind, stream)
        return view[missing:]

    def _begin(self, length: int, kind: int, stream: int) -> None:
        limits = self.limits
        if kind == _MESSAGE:
            if not 0 < length <= limits.message:
                raise FrameError(f"a message of {length} bytes came; the link agreed on 1..{limits.message}")
            self._message = bytearray()
        elif kind == _FRAGMENT:
            assembly = self._assemblies.get(stream)
            if assembly is None:
                raise FrameError(f"a fragment came for stream {stream}, which no frame announced")
            room = assembly.missing
            if not 0 < length <= min(limits.fragment, room):
                raise FrameError(
                    f"a fragment of {length} bytes came; stream {stream} has room for {room}, fragments for {limits.fragment}"
                )
            self._target = assembly
        else:
            raise FrameError(f"a packet of kind {kind} came; this schema knows {_MESSAGE} and {_FRAGMENT}")
        self._left, self._stream = length, stream

    def _take_body(self, view: memoryview, lasting: bool, done: list[Received]) -> memoryview:
        part = view[: self._left]
        if self._message is not None:
            self._message += part
            self._left -= part.nbytes
            if not self._left:
                self._end_message(self._message, done)
                self._message = None
        elif self._target is not None:
            self._target.take(part, lasting)
            self._left -= part.nbytes
            self._end_fragment(self._target, done)
        return view[part.nbytes :]

    def _end_fragment(self, assembly: _Assembly, done: list[Received]) -> None:
        if not self._left:
            self._target = None
            if not assembly.missing:
                del self._assemblies[self._stream]
                done.append(assembly.received())

    def _end_message(self, body: bytearray | memoryview, done: list[Received]) -> None:
        try:
            frame = decode_message(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"a message of {len(body)} bytes is not a frame of this schema: {error}") from error
        size = self.limits.payload(frame)
        if not size:
            if self._stream:
                raise FrameError(f"{type(frame).__name__} has no payload but names stream {self._stream}")
            done.append(Received(frame))
            return
        if not self._stream or self._stream in self._assemblies:
            raise FrameError(f"{type(frame).__name__} names stream {self._stream}, which is taken or reserved")
        if len(self._assemblies) >= self.limits.streams:
            raise FrameError(f"more than {self.limits.streams} payloads are under way; the link agreed on that many")
        held = self._assembling
        if held and held + size > self.limits.under_way:
            raise FrameError(
                f"a payload of {size} bytes came beside {held} bytes under way; the link agreed on {self.limits.under_way}"
            )
        if self.allowance is not None:
            if size > self.allowance:
                raise FrameError(f"a payload of {size} bytes came; only {self.allowance} bytes of credit were left")
            self.allowance -= size
        self._assemblies[self._stream] = _Assembly(frame, size)
