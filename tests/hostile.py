"""Peers that mean harm: frames that are nearly right, as bytes, and answers that are nearly true. All from one seed."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from dgr.client.control_links import Connector
from dgr.core.prefix import PrefixDigest
from dgr.core.values import (
    DecodeRun,
    Expectation,
    Key,
    LogitsWanted,
    SamplingParams,
    StageIdentity,
    StateSummary,
    TopLogprob,
)
from dgr.protocol.limits import limits_of
from dgr.wire import frames, memory_transports
from dgr.wire.framing import Framer, Limits
from dgr.wire.links import Link, open_link
from dgr.wire.nurseries import open_nursery

_HEADER = struct.Struct("<IBBH")
_MESSAGE, _FRAGMENT = 1, 2
#: Numbers at which something ends, and some beyond what a field holds.
EDGES = [0, 1, 2, 7, 15, 16, 17, 255, 256, 257, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -1]


def raw(frame: frames.Frame, payload: bytes = b"", stream: int = 1) -> bytes:
    """A frame as packets, whatever its fields hold."""
    body = msgspec.msgpack.encode(frame)
    data = _HEADER.pack(len(body), _MESSAGE, 0, stream if payload else 0) + body
    return data + (_HEADER.pack(len(payload), _FRAGMENT, 0, stream) + payload if payload else b"")


def spoilt(rng: random.Random, data: bytes) -> bytes:
    """Bytes, and now and then not quite those."""
    how = rng.random()
    if how < 0.03:
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if how < 0.045:
        return data[: rng.randrange(len(data))]
    if how < 0.06:
        return struct.pack("<I", rng.choice([0, 2**16, 2**31, 2**32 - 1])) + data[4:]
    if how < 0.08:
        return data + data
    if how < 0.09:
        return data + rng.randbytes(rng.randrange(1, 40))
    return data


class Talker:
    """What a hostile pipeline, or a hostile stage before, says: mostly sense, so that it gets somewhere."""

    def __init__(self, rng: random.Random, about: StageIdentity, names: list[str], route: bytes | None = None) -> None:
        self.rng = rng
        self.about = about
        self.names = names
        self.route = route or rng.randbytes(16)
        self.epoch = 0
        self.seq = 0
        self.sessions: dict[int, PrefixDigest] = {}

    def next_bytes(self) -> bytes:
        frame, payload = self._next()
        try:
            return spoilt(self.rng, raw(frame, payload, self.rng.choice([1, 1, 1, 2, 65535])))
        except (OverflowError, UnicodeError):  # an edge that msgpack itself does not hold
            return raw(frames.Ping(1))

    def _near(self, value: int) -> int:
        return value if self.rng.random() < 0.93 else self.rng.choice([value - 1, value + 1, *EDGES])

    def _key(self) -> Key:
        rng = self.rng
        route = self.route if rng.random() < 0.95 else rng.randbytes(rng.choice([16, 15, 0]))
        return Key(route, self._near(self.epoch), self._near(rng.choice(list(self.sessions) or [1])))

    def _next(self) -> tuple[frames.Frame, bytes]:
        rng = self.rng
        self.seq += rng.choice([1, 1, 1, 1, 0, 5])
        if not self.epoch or rng.random() < 0.08:
            return self._fence(), b""
        if not self.sessions or rng.random() < 0.12:
            session = rng.randrange(1, 5)
            self.sessions[session] = PrefixDigest()
            return frames.Open(Key(self.route, self.epoch, session), self._near(self.seq)), b""
        key, seq = self._key(), self._near(self.seq)
        kind = rng.choices(["work", "fork", "close", "cancel", "probe", "link", "alien"], [10, 2, 1, 2, 2, 2, 1])[0]
        match kind:
            case "work":
                return self._work(key, seq)
            case "fork":
                return self._fork(key, seq), b""
            case "close":
                return frames.Close(key, seq), b""
            case "cancel":
                return frames.Cancel(key, self._near(seq)), b""
            case "probe":
                return frames.QueryState(key, seq), b""
            case "link":
                words: list[frames.Frame] = [
                    frames.Ping(7), frames.Pong(5), frames.Credit(rng.choice(EDGES)), frames.Ping(1, b"x"),
                    frames.QueryLoad(rng.choice(EDGES)), frames.QueryTrace(key.route, seq),
                ]  # fmt: skip
                return rng.choice(words), b""
            case _:
                return rng.choice(any_answer(rng, key, seq, self.about.n_vocab)), b""

    def _fork(self, source: Key, seq: int) -> frames.Fork:
        rng = self.rng
        session, held = rng.randrange(1, 5), self.sessions.get(source.session) or PrefixDigest()
        digest = held.digest() if rng.random() < 0.9 else rng.randbytes(16)
        expect = Expectation(self._near(held.position), digest)
        if rng.random() < 0.8:
            self.sessions[session] = held.copy()
        return frames.Fork(Key(source.route, source.epoch, session), seq, source.session, expect)

    def _fence(self) -> frames.Fence:
        rng = self.rng
        self.epoch += rng.choice([1, 1, 1, 0, 3])
        self.sessions.clear()
        own, before, after = (rng.choice([*self.names, "", "nowhere:1", "x" * 256]) for _ in range(3))
        after, ring = after if rng.random() < 0.6 else "", rng.choice([*self.names, "", "nowhere:1"])
        return frames.Fence(self.route, self._near(self.epoch), own, before, after, 2, ring)

    def _work(self, key: Key, seq: int) -> tuple[frames.Frame, bytes]:
        rng, about = self.rng, self.about
        count = rng.choice([1, 1, 2, 5, 8, 16, 17, 200])
        tokens = tuple(rng.randrange(about.n_vocab) if rng.random() < 0.99 else rng.choice(EDGES) for _ in range(count))
        prefix = self.sessions.get(key.session) or PrefixDigest()
        digest = prefix.digest() if rng.random() < 0.95 else rng.randbytes(16)
        expect = Expectation(self._near(prefix.position), digest)
        wanted, sampling = LogitsWanted(rng.randrange(3)), odd_sampling(rng) if rng.random() < 0.5 else None
        run = None if sampling is None or rng.random() < 0.5 else DecodeRun(rng.choice([1, 3, *EDGES]), (7,))
        if about.is_head or rng.random() < 0.1:
            if all(0 <= token < about.n_vocab for token in tokens):
                prefix.extend(tokens)
            return frames.Tokens(key, seq, expect, tokens, wanted, sampling, None, run), b""
        value = struct.pack("<f", rng.choice([1.0, 5.0, 0.0, float("nan"), float("inf"), 1e38, 1e-45]))
        payload = value * (len(tokens) * about.width_in)
        frame = frames.Boundary(key, seq, expect, tokens, wanted, sampling, self._near(len(payload)), None, run)
        return frame, payload[: len(payload) - rng.choice([0] * 20 + [1, 4])]


def odd_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        rng.choice([0.0, 0.7, 1e-45, -1.0, 3e38, float("nan")]),
        rng.choice([0, 40, 2**31 - 1, -1]),
        rng.choice([1.0, 0.9, 1e-46, 0.0, 2.0]),
        rng.choice([0.0, 0.05, 2.0]),
        rng.choice([1.0, 1.1, 1e-46, 3e38, 0.0]),
        rng.choice([0.0, 0.5, -3e38]),
        rng.choice([0.0, 0.5, 3e38]),
        rng.choice([-1, 0, 5, -2]),
        rng.choice([0, 5, 2**63 - 1]),
        rng.choice([0, 1, 2**32 - 1]),
        rng.choice([0, 0, 3, 64, 65]),
    )


def any_answer(rng: random.Random, key: Key, seq: int, n_vocab: int) -> list[frames.Frame]:
    """Every kind of frame that a stage, or the other side of a link, may say."""
    number = rng.choice(EDGES[:16])
    u32 = min(number, 2**32 - 1)
    return [
        frames.Fenced(key.route, key.epoch, u32, number),
        frames.Opened(key, seq, number),
        frames.Closed(key, seq, number),
        frames.Advanced(key, seq, u32),
        frames.Token(key, seq, u32, n_vocab + 1),
        frames.CacheMiss(key, seq, rng.choice(list(frames.Miss)), u32),
        frames.StaleEpoch(key, seq, number),
        frames.Refused(key, seq, rng.choice(list(frames.Refusal)), "x" * rng.choice([1, 4096, 5000])),
        frames.WorkSkipped(key, seq, u32),
        frames.StateReport(key, seq, bytes(16), StateSummary(u32, ())),
        frames.Ready(key.route, key.epoch),
        frames.AwaitReady(key.route, key.epoch),
        frames.Hello(frames.Role.PIPELINE, "x", None),
        frames.Denied("no"),
        frames.Open(key, seq),
        frames.Fork(key, seq, number, Expectation(u32, bytes(16))),
        frames.Credit(number),
        frames.TraceReport(seq, (), True, number),
    ]


# --- a stage that lies ---


def lies(rng: random.Random, frame: frames.Frame, n_vocab: int) -> list[frames.Frame]:
    """An answer, made untrue in a way that its client can tell."""
    near = rng.choice([-1, 1, 8, 2**20])
    replace = msgspec.structs.replace
    choices: list[frames.Frame]
    match frame:
        case frames.Token():
            choices = [
                replace(frame, position=frame.position + near),
                replace(frame, token=rng.choice([n_vocab, 2**31 - 1, 2**31])),
                replace(frame, top=(TopLogprob(0, -1.0), *frame.top)),
                replace(frame, top=(TopLogprob(n_vocab, -1.0), *frame.top[1:])),
                replace(frame, top=(TopLogprob(0, float("nan")), *frame.top[1:])),
                replace(frame, top=(TopLogprob(0, -1.0),) * 70),
                replace(frame, goes_on=not frame.goes_on),
                frames.Advanced(frame.key, frame.seq, frame.position),
            ]
        case frames.Advanced():
            position = max(0, frame.position + near)
            choices = [replace(frame, position=position), frames.Token(frame.key, frame.seq, frame.position, 1)]
        case frames.StateReport():
            elsewhere = replace(frame.state, position=frame.state.position + 1)
            choices = [replace(frame, state=elsewhere), replace(frame, digest=rng.randbytes(16))]
        case frames.Fenced():
            choices = [replace(frame, route=rng.randbytes(16)), replace(frame, epoch=frame.epoch + 1)]
        case frames.Opened() | frames.Closed():
            stale = frames.StaleEpoch(frame.key, frame.seq, 2**63 - 1)
            untrue = frames.StateReport(frame.key, frame.seq, bytes(16), StateSummary(5, ()))
            choices = [replace(frame, seq=frame.seq + near), stale, untrue]
        case _:
            return [frame]
    lie = rng.choice(choices)
    how = rng.random()
    if how < 0.7:
        return [lie]
    if how < 0.8:
        return []
    key, seq = getattr(frame, "key", Key(bytes(16), 1, 1)), getattr(frame, "seq", 1)
    other = rng.choice(any_answer(rng, key, seq, n_vocab))
    return [other] if how < 0.9 else [other, frame]


def lying(connect: Connector, rng: random.Random, share: float) -> Connector:
    """A way to stages that lie in a ``share`` of their answers, and spoil some bytes."""

    @asynccontextmanager
    async def through(address: str) -> AsyncIterator[tuple[Link, StageIdentity]]:
        async with connect(address) as (inner, about):
            limits = limits_of(about)
            near, far = memory_transports()
            async with open_link(near, limits, name=f"to {address}") as link, open_nursery() as nursery:
                nursery.start_soon(_pass_on, far, inner, limits)
                nursery.start_soon(_answer, far, inner, about, rng, share)
                yield link, about
                nursery.cancel_scope.cancel()

    return through


async def _pass_on(far: trio.abc.Stream, inner: Link, limits: Limits) -> None:
    framer = Framer(limits)
    try:
        while data := await far.receive_some(65536):
            for received in framer.receive(data):
                await inner.send(received.frame)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return


async def _answer(far: trio.abc.Stream, inner: Link, about: StageIdentity, rng: random.Random, share: float) -> None:
    try:
        async for received in inner:
            told = [received.frame]
            if rng.random() < share:
                told = lies(rng, received.frame, about.n_vocab)
            for frame in told:
                payload = bytes(received.payload) if frame is received.frame and received.payload is not None else b""
                data = raw(frame, payload)
                await far.send_all(spoilt(rng, data) if rng.random() < share / 4 else data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return


async def talk(stream: trio.abc.Stream, say: Callable[[], bytes], rng: random.Random, most: int) -> None:
    """Say up to ``most`` things, hear nothing of the answers, and hang up at some moment."""

    async def drain() -> None:
        try:
            while await stream.receive_some(65536):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async with trio.open_nursery() as nursery:
        if rng.random() < 0.8:
            nursery.start_soon(drain)
        with trio.move_on_after(1):
            try:
                for _ in range(rng.randrange(1, most)):
                    await stream.send_all(say())
                    if rng.random() < 0.2:
                        await trio.lowlevel.checkpoint()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await trio.aclose_forcefully(stream)
