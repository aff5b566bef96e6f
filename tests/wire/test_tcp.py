"""Links over real sockets, on loopback: what memory transports cannot show."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from wire.wire_samples import FLASH, boundary

from dgr.errors import DeadlineExceeded, InputError, LinkBroken
from dgr.testing.network.relay import Relay, open_relay
from dgr.wire.frames import Pong
from dgr.wire.links import Link, open_link
from dgr.wire.tcp import accept_tls, dial, listen, parse_address

#: Real sockets need real time: a guard against a hang, far above what a test takes.
GUARD = 20


@asynccontextmanager
async def sockets() -> AsyncIterator[tuple[trio.SocketStream, trio.SocketStream]]:
    listeners = await listen("127.0.0.1:0", credentials=None)
    port = listeners[0].socket.getsockname()[1]
    near = await dial(f"127.0.0.1:{port}", credentials=None)
    assert isinstance(near, trio.SocketStream)
    async with near, await listeners[0].accept() as far:
        await listeners[0].aclose()
        yield near, far


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Link, Link, Relay]]:
    with trio.fail_after(GUARD):
        async with (
            sockets() as (near, near_plug),
            sockets() as (far_plug, far),
            open_relay(near_plug, far_plug) as relay,
            open_link(near, FLASH) as left,
            open_link(far, FLASH) as right,
        ):
            yield left, right, relay


async def test_long_prefills_both_ways_at_once_arrive_whole_with_a_control_frame_between() -> None:
    async with relayed() as (left, right, _relay), trio.open_nursery() as nursery:
        sent = [boundary(session, 1, 64, FLASH) for session in (1, 2)]

        async def check(link: Link) -> None:
            got = {type(one.frame): one for one in [await anext(link), await anext(link)]}
            payload = got[type(sent[0][0])].payload
            assert payload is not None
            assert bytes(payload) in {payload for _frame, payload in sent}
            assert got[Pong].frame == Pong(1)

        for link, (frame, payload) in zip((left, right), sent, strict=True):
            nursery.start_soon(check, link)
            await link.send(frame, payload)
            link.send_nowait(Pong(1))


async def test_an_end_in_order_is_an_end_and_a_reset_is_a_broken_link() -> None:
    async with relayed() as (left, right, _relay):
        left.send_nowait(Pong(1))
        await left.flush()
        await left.aclose()
        assert [one.frame async for one in right] == [Pong(1)]
    async with relayed() as (left, _right, relay):
        await relay.cut()
        with pytest.raises(LinkBroken, match=r"cannot read: .*reset"):
            await anext(left)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.invalid", "[2001:db8::1]"])
async def test_plain_tcp_beyond_loopback_needs_an_explicit_word(host: str) -> None:
    for call in (listen, dial):
        with pytest.raises(InputError, match="not a loopback address"):
            await call(f"{host}:0", credentials=None)


async def test_a_client_that_never_begins_tls_is_refused_within_the_deadline() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    async with sockets() as (_near, far):
        with trio.fail_after(GUARD), pytest.raises(DeadlineExceeded, match="a client did not finish"):
            await accept_tls(far, context, 0.05)
        assert far.socket.fileno() == -1


async def test_a_tls_handshake_that_is_cancelled_leaves_no_socket_open() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    async with sockets() as (_near, far):
        with trio.move_on_after(0.05) as scope:
            await accept_tls(far, context, GUARD)
        assert scope.cancelled_caught
        assert far.socket.fileno() == -1


async def test_nothing_listens_is_a_broken_link_that_says_so() -> None:
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        with trio.fail_after(GUARD), pytest.raises(LinkBroken, match=r"cannot connect to 127\.0\.0\.1:.*refused"):
            await dial(f"127.0.0.1:{bound.getsockname()[1]}", credentials=None)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://h:1", "'http://h:1' is a URL"),
        ("tcp://10.0.0.1:7701", "is a URL"),
        ("h:1:2", "'h:1:2' is not HOST:PORT"),
        ("h:1:", "is not HOST:PORT"),
        ("user@h:1", "is not HOST:PORT"),
        ("h/path:1", "is not HOST:PORT"),
        ("[h]:x", "is not HOST:PORT"),
        ("[::1:1", "is not HOST:PORT"),
        ("1:2:3:4:5:6:7:8:9:1", "is not HOST:PORT"),
        ("h\n:1", "is not HOST:PORT"),
        ("h\udcff:1", "is not HOST:PORT"),
    ],
)
async def test_what_is_no_address_is_called_so_and_not_far_away(address: str, said: str) -> None:
    for call in (listen, dial):
        with pytest.raises(InputError) as refused:
            await call(address, credentials=None)
        assert said in str(refused.value)
        assert "loopback" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["::1:7701", "[::1]:7701", "[fe80::1%eth0]:1", "my_stage_1:7701", "10.0.0.1:0", "h-1.lan:1"]
)
def test_every_spelling_of_an_address_is_taken(address: str) -> None:
    host, port = parse_address(address)
    assert f"{host}:{port}" == address.replace("[", "").replace("]", "")


async def test_a_free_port_is_one_port_however_many_addresses_a_name_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, only one could be told; a client would then miss the other, or reach it by chance."""
    real = trio.open_tcp_listeners

    async def two(port: int, *, host: str) -> list[trio.SocketListener]:
        assert host == "localhost"
        return [listener for each in ("127.0.0.1", "127.0.0.2") for listener in await real(port, host=each)]

    monkeypatch.setattr(trio, "open_tcp_listeners", two)
    listeners = await listen("localhost:0", credentials=None)
    (listener,) = listeners
    host, port = listener.socket.getsockname()
    assert host == "127.0.0.1"
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))
    await listener.aclose()
    listeners = await listen(f"localhost:{port}", credentials=None)
    assert [each.socket.getsockname() for each in listeners] == [("127.0.0.1", port), ("127.0.0.2", port)]
    for each in listeners:
        await each.aclose()
