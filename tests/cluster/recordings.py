"""What honest peers say, written down byte by byte, and changed a little."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import trio
from cluster.remote_stages import CONTEXT, HANDSHAKE, PROMPT, TWO, Hosts, answer_of, connected, open_hosts, reference

from dgr.client.pipeline import open_pipeline_on
from dgr.core.route import Route, StageRef
from dgr.testing.hostile_files.byte_damage import damage
from dgr.wire import frames
from dgr.wire.framing import Framer, Limits
from dgr.wire.handshake import exchange_preamble
from dgr.wire.memory import memory_transports

PREAMBLE_SIZE = 24


async def preamble() -> bytes:
    """What this side says first."""
    near, far = memory_transports()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exchange_preamble, near, HANDSHAKE)
        said = await far.receive_some(65536)
        await far.send_all(said)
    return bytes(said)


@asynccontextmanager
async def recorder(target: str) -> AsyncIterator[tuple[str, list[list[bytes]]]]:
    """An address before a stage's own, and what is said to the stage there: for each connection, answer by answer."""
    said: list[list[bytes]] = []

    async def join(near: trio.SocketStream) -> None:
        words: list[bytes] = []
        answered = True
        said.append(words)

        async def ask() -> None:
            nonlocal answered
            while part := await near.receive_some(65536):
                if answered:
                    words.append(b"")
                    answered = False
                words[-1] += part
                await far.send_all(part)
            await far.send_eof()

        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with connected(target) as far, trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                while part := await far.receive_some(65536):
                    answered = True
                    await near.send_all(part)
                nursery.cancel_scope.cancel()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, join, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}", said
        nursery.cancel_scope.cancel()


async def record() -> tuple[list[bytes], list[bytes]]:
    """What a client says to a whole stage, and what a head says to a tail, in a conversation that ends well."""
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        async with recorder(whole.address) as (address, said):
            await _converse(hosts, Route((StageRef(address, whole.layers),)))
            (of_client,) = said
        head, tail = await hosts.start_all(TWO)
        async with recorder(tail.address) as (address, said):
            await _converse(hosts, Route((StageRef(head.address, head.layers), StageRef(address, tail.layers))))
            of_head = next(words for words in said if b"fake/1" in b"".join(words))  # a client has no identity
    return of_client, of_head


async def _converse(hosts: Hosts, route: Route) -> None:
    async with open_pipeline_on(hosts.connector(), route) as pipeline:
        assert await answer_of(pipeline, PROMPT[:20], 4) == reference(PROMPT[:20], 4)


def mutated(words: Sequence[bytes], rng: random.Random) -> tuple[list[bytes], int]:
    """One to four small changes, behind the greeting mostly, where there is more to break; and how many words are as
    they were."""
    changed = [bytearray(word) for word in words]
    first = 2 if rng.random() < 0.75 else 0
    sound = len(words)
    for _ in range(rng.randint(1, 4)):
        index = rng.randrange(first, len(changed))
        sound = min(sound, index)
        if rng.randrange(7):
            damage(changed[index], rng, b"\0\1\x7f\x80\xc0\xcc\xcf\xdd\xff", 16)
        else:
            other = rng.randrange(first, len(changed))
            sound = min(sound, other)
            changed[index], changed[other] = changed[other], changed[index]
    return [bytes(word) for word in changed if word], sound


def of_another(words: Sequence[bytes], rng: random.Random) -> list[bytes]:
    """A client's words, as the client of another route session."""
    (fence,) = (frame for frame in spoken(words) if isinstance(frame, frames.Fence))
    route = rng.randbytes(16)
    return [word.replace(fence.route, route) for word in words]


def spoken(words: Sequence[bytes]) -> list[frames.Frame]:
    """The frames of a recording."""
    framer = Framer(Limits(CONTEXT.n_batch, 3, 257))
    return [received.frame for received in framer.receive(b"".join(words)[PREAMBLE_SIZE:])]
