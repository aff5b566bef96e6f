"""A stage under siege: thousands of connections of every hostile kind, over plain links or TLS. Seeded."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio
from attrs import frozen
from cluster.recordings import PREAMBLE_SIZE, mutated, of_another, preamble, record
from cluster.remote_stages import Host, client, connected, stage
from hostile import Talker, raw, spoilt
from msgspec.structs import replace

from dgr.core.values import Key
from dgr.wire import frames
from dgr.wire.credentials import Credentials
from dgr.wire.tcp import Transport

__all__ = ["KINDS", "besiege"]

#: Seconds for one stranger; the stage ends the most patient one long before.
_PATIENCE = 30.0
#: Seconds for which an answer is waited for.
_ANSWER = 0.02
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


@frozen
class Siege:
    """What the besiegers know."""

    host: Host
    credentials: Credentials | None
    #: What honest peers said: a pipeline, and a stage to the one after it.
    of_client: Sequence[bytes]
    of_head: Sequence[bytes]
    preamble: bytes


Act = Callable[[Siege, random.Random, Transport], Awaitable[None]]


async def _answer(stream: Transport) -> bytes:
    with trio.move_on_after(_ANSWER):
        return bytes(await stream.receive_some(65536))
    return b""


async def _say(stream: Transport, *words: bytes) -> None:
    for word in words:
        await stream.send_all(word)
        await _answer(stream)


async def _end(stream: Transport, rng: random.Random) -> None:
    """Wait for the end that the stage makes, or go first: orderly, half, or by a reset."""
    how = rng.choice(["wait", "half", "leave", "reset"])
    plain = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    if how == "half" and isinstance(stream, trio.SocketStream):
        await stream.send_eof()
    if how == "reset" and isinstance(plain, trio.SocketStream):
        plain.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how in ("wait", "half"):
        with trio.move_on_after(0.1):
            while await stream.receive_some(65536):
                pass


async def _nothing(_: Siege, __: random.Random, stream: Transport) -> None:
    await stream.receive_some(1)


async def _garbage(_: Siege, rng: random.Random, stream: Transport) -> None:
    await _say(stream, *(rng.randbytes(rng.randrange(1, 3000)) for _ in range(rng.randint(1, 4))))


async def _other_words(_: Siege, rng: random.Random, stream: Transport) -> None:
    words = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01" + bytes(512), b"SSH-2.0-OpenSSH_9.6\r\n", b"\0" * 4096, b"dgr\r\n",
        b"*1\r\n$4\r\nPING\r\n",
    ]  # fmt: skip
    await _say(stream, rng.choice(words))


async def _half_a_preamble(about: Siege, rng: random.Random, stream: Transport) -> None:
    await _say(stream, about.preamble[: rng.randrange(PREAMBLE_SIZE)])


async def _other_schema(about: Siege, rng: random.Random, stream: Transport) -> None:
    said = bytearray(about.preamble)
    said[rng.randrange(6, PREAMBLE_SIZE)] ^= 1 << rng.randrange(8)
    await _say(stream, bytes(said), raw(client()))


async def _no_hello(about: Siege, rng: random.Random, stream: Transport) -> None:
    first: list[frames.Frame] = [
        frames.Ping(1), frames.Pong(1), frames.Fence(rng.randbytes(16), 1, "a", "", ""), frames.Denied("no"),
        frames.Open(Key(rng.randbytes(16), 1, 1), 1), frames.Credit(2**60),
    ]  # fmt: skip
    await _say(stream, about.preamble, raw(rng.choice(first)) * rng.choice([1, 50]))


async def _false_hello(about: Siege, rng: random.Random, stream: Transport) -> None:
    hellos = [
        stage("10.0.0.1:1"),
        stage("127.0.0.1:1", "2:6"),
        stage("x" * 300),
        stage("nobody"),
        replace(client(), name="y" * 5000),
        replace(client(), wants=("mtp", "decode")),
        replace(client(), wants=("w",) * 1000),
        replace(stage("127.0.0.1:1"), identity=None),
    ]
    await _say(stream, about.preamble, spoilt(rng, raw(rng.choice(hellos))))


async def _bad_frames(about: Siege, rng: random.Random, stream: Transport) -> None:
    """A pipeline like any other, whose frames are nearly right."""
    talker = Talker(rng, about.host.engine.describe(), [about.host.address, "127.0.0.1:1"])
    await _say(stream, about.preamble, raw(client()))
    for _ in range(rng.randrange(1, 30)):
        await stream.send_all(talker.next_bytes())
    await _answer(stream)


async def _changed_words(about: Siege, rng: random.Random, stream: Transport) -> None:
    words, _sound = mutated(of_another(about.of_client, rng) if rng.random() < 0.7 else about.of_head, rng)
    await _say(stream, *words)


async def _replayed(about: Siege, rng: random.Random, stream: Transport) -> None:
    """What somebody else said before, word for word: all of it, out of order, or twice."""
    words = list(about.of_client if rng.random() < 0.5 else about.of_head)
    begin = words[:2]
    rest = rng.sample(words[2:], len(words) - 2) if rng.random() < 0.3 else words[2:]
    await _say(stream, *begin, *rest, *(rest if rng.random() < 0.5 else ()))


async def _flood(about: Siege, rng: random.Random, stream: Transport) -> None:
    """More than anybody would say, and nothing is read."""
    key = Key(rng.randbytes(16), 1, 1)
    kinds: list[frames.Frame] = [
        frames.Ping(1), frames.QueryLoad(1), frames.Open(key, 1), frames.Close(key, 1), frames.QueryState(key, 1),
        frames.QueryTrace(key.route, 1), frames.Fence(key.route, 1, "a", "", ""),
    ]  # fmt: skip
    await _say(stream, about.preamble, raw(client()))
    await stream.send_all(raw(rng.choice(kinds)) * rng.choice([100, 3000]))


async def _slowly(about: Siege, rng: random.Random, stream: Transport) -> None:
    """A byte at a time."""
    for byte in (about.preamble + raw(client()))[: rng.randrange(2, 60)]:
        await stream.send_all(bytes([byte]))
        await trio.sleep(0.002)


async def _lengths(about: Siege, rng: random.Random, stream: Transport) -> None:
    head = struct.pack(
        "<IBBH", rng.choice([0, 1, 2**16, 2**31, 2**32 - 1]), rng.randrange(4), rng.randrange(2), rng.randrange(3)
    )
    await _say(stream, about.preamble, raw(client()), head + rng.randbytes(rng.randrange(200)))


#: What is done on a connection, by name.
KINDS: dict[str, Act] = {
    "nothing": _nothing,
    "garbage": _garbage,
    "other words": _other_words,
    "half a preamble": _half_a_preamble,
    "other schema": _other_schema,
    "no hello": _no_hello,
    "false hello": _false_hello,
    "bad frames": _bad_frames,
    "changed words": _changed_words,
    "replayed": _replayed,
    "flood": _flood,
    "slowly": _slowly,
    "lengths": _lengths,
}


async def _attack(about: Siege, kind: str, rng: random.Random) -> None:
    """One connection. Over TLS a part of them has no TLS, or leaves in the middle of its handshake."""
    credentials = None if rng.random() < 0.1 else about.credentials
    with suppress(*_GONE, OSError):
        async with connected(about.host.address, credentials) as stream:
            if isinstance(stream, trio.SSLStream) and rng.random() < 0.1:
                with trio.move_on_after(rng.random() * 0.005):
                    await stream.do_handshake()
                return
            await KINDS[kind](about, rng, stream)
            await _end(stream, rng)


async def besiege(
    host: Host, seed: int, count: int, credentials: Credentials | None = None, *, workers: int = 24
) -> Counter[str]:
    """So many connections, every kind in turn; how many of each there were."""
    of_client, of_head = await record()
    about = Siege(host, credentials, of_client, of_head, await preamble())
    done, left = Counter[str](), iter(range(count))

    async def work() -> None:
        for index in left:
            kind = [*KINDS][index % len(KINDS)]
            with trio.fail_after(_PATIENCE):
                await _attack(about, kind, random.Random(f"{seed}:{index}"))
            done[kind] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(work)
    return done
