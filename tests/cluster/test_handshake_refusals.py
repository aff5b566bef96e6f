"""What does not belong together parts at the handshake, and each side is told both values."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from cluster.remote_stages import (
    CONTEXT,
    HANDSHAKE,
    SHORT,
    THREE,
    TWO,
    Authority,
    Hosts,
    answer_of,
    assert_closed,
    client,
    connected,
    denied,
    failure,
    greeted,
    identity,
    impostor,
    is_pong,
    open_hosts,
    read_to_end,
    reference,
    stage,
)
from msgspec.structs import replace
from narrow import as_a, present

from dgr.client.pipeline import open_pipeline_on
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.core.prefix import PrefixDigest
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.values import Expectation, Key, LogitsWanted, Numerics, Wire
from dgr.errors import FrameError, InvalidRoute, LinkBroken, PeerRefused
from dgr.testing.engines.fake import FakeEngine, FakeModel
from dgr.testing.waits import until
from dgr.wire import frames
from dgr.wire.credentials import Credentials
from dgr.wire.frames import Boundary, Denied, Fence, Hello, Refusal, Refused, Role, Welcome
from dgr.wire.framing import encode
from dgr.wire.handshake import HANDSHAKE_LIMITS, exchange_preamble
from dgr.wire.links import Link, open_link
from dgr.wire.tcp import dial, names_host, parse_address

NAME = "127.0.0.1:7701"
_PREAMBLE = struct.Struct("<6sH16s")


async def examine(hosts: Hosts, route: Route) -> Exception:
    """Why a pipeline cannot be opened over a route."""
    return await failure(lambda: _open(hosts, route))


async def _open(hosts: Hosts, route: Route) -> None:
    async with open_pipeline_on(hosts.connector(), route):
        pass


# --- the preamble ---


OURS = _PREAMBLE.pack(b"dgr\r\n\0", frames.SCHEMA_VERSION, bytes.fromhex(frames.SCHEMA_HASH))
OTHER_SCHEMA = _PREAMBLE.pack(b"dgr\r\n\0", 7, bytes(range(16)))
OTHER_HASH = _PREAMBLE.pack(b"dgr\r\n\0", frames.SCHEMA_VERSION, bytes(range(16)))


@pytest.mark.parametrize(("preamble", "version"), [(OTHER_SCHEMA, 7), (OTHER_HASH, frames.SCHEMA_VERSION)])
async def test_a_stage_refuses_another_schema(preamble: bytes, version: int, caplog: pytest.LogCaptureFixture) -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        with caplog.at_level(logging.WARNING, "dgr.links"):
            async with connected(head.address) as stream:
                await stream.send_all(preamble)
                answer = await read_to_end(stream)
        assert _PREAMBLE.unpack(answer)[1:] == (frames.SCHEMA_VERSION, bytes.fromhex(frames.SCHEMA_HASH))
        assert f"schema {version} ({bytes(range(16)).hex()})" in caplog.text
        assert f"this one {frames.SCHEMA_VERSION} ({frames.SCHEMA_HASH})" in caplog.text
        await hosts.assert_serving([head, tail])


async def connect(address: str, handshake: float = HANDSHAKE, **options: Any) -> None:
    async with RemoteConnector(LinkPolicy(handshake=handshake), **options)(address):
        pass


async def test_a_client_refuses_another_schema() -> None:
    async with impostor(OTHER_SCHEMA) as address:
        error = await failure(lambda: connect(address))
    assert isinstance(error, FrameError)
    assert f"schema 7 ({bytes(range(16)).hex()})" in str(error)
    assert f"this one {frames.SCHEMA_VERSION} ({frames.SCHEMA_HASH})" in str(error)
    assert "install the same dgr on both" in str(error)


async def test_a_client_knows_what_is_no_stage() -> None:
    async with impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        error = await failure(lambda: connect(address))
    assert isinstance(error, FrameError)
    assert "not dgr: its first bytes are b'HTTP/1.1'" in str(error)


@pytest.mark.parametrize(
    ("said", "problem"),
    [(b"", "did not say what it speaks within 0.4 s"), (OURS, "no Welcome within 0.4 s")],
    ids=["mute", "mute after the preamble"],
)
async def test_a_client_does_not_wait_for_a_mute_stage(said: bytes, problem: str) -> None:
    async with impostor(said) as address:
        error = await failure(lambda: connect(address, handshake=SHORT))
    assert problem in str(error)


# --- what stages of a route share ---


@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("adapter", "fake/2", "fake/1"),
        ("architecture", "deepseek5", "fake"),
        ("artifact", "00ff" * 8, FakeModel().identity),
        ("runtime", "0.0.9 llama.cpp abc", ""),
        ("n_layers", 7, "6"),
        ("n_vocab", 258, "257"),
        ("token_sideband", True, "False"),
        ("kernel_fingerprint", "another", "fake"),
        ("width_out", 4, "3"),
        ("layers", LayerRange(0, 3), "2:6"),
        ("layers", LayerRange(1, 3), "2:6"),
    ],
)
async def test_a_stage_of_another_kind_is_refused_naming_both_values(field: str, value: Any, ours: str) -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        message = await denied(tail.address, stage(NAME, **{field: value}))
        assert ours in message
        assert str(value) in message
        await hosts.assert_serving([head, tail])


@pytest.mark.parametrize(
    "changes",
    [
        {"n_ctx": 128},
        {"n_batch": 8},
        {"n_ubatch": 4},
        {"n_seq_max": 2},
        {"type_k": "f32"},
        {"flash_attn": False},
        {"numerics": Numerics.NATIVE},
        {"wire": Wire.BF16, "numerics": Numerics.SAME_CUTS},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_another_context_is_refused_naming_both_values(changes: dict[str, Any]) -> None:
    other = replace(CONTEXT, **changes)
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        hello = Hello(Role.STAGE, NAME, identity("0:2", context=other))
        message = await denied(tail.address, hello)
        assert "its context parameters: " in message
        for field in changes:
            assert f"{field} {getattr(other, field)} is not {getattr(CONTEXT, field)}" in message
        await hosts.assert_serving([head, tail])


async def test_kernel_fingerprints_may_differ_in_native_numerics() -> None:
    native = replace(CONTEXT, numerics=Numerics.NATIVE)
    async with open_hosts(context=native) as hosts:
        engines = [FakeEngine(LayerRange.parse(layers), native, kernel_fingerprint=f"of {layers}") for layers in TWO]
        stages = [await hosts.start("", engine=engine) for engine in engines]
        async with hosts.pipeline(stages) as pipeline:
            assert await answer_of(pipeline) == reference()


async def test_kernel_fingerprints_must_not_differ_in_exact_numerics() -> None:
    async with open_hosts() as hosts:
        engines = [FakeEngine(LayerRange.parse(layers), CONTEXT, kernel_fingerprint=f"of {layers}") for layers in TWO]
        stages = [await hosts.start("", engine=engine) for engine in engines]
        error = await examine(hosts, hosts.route(stages))
        assert "kernel fingerprint of 2:6, not of 0:2: exact numerics need equal ones" in str(error)


async def test_a_client_compares_the_stages_before_any_is_fenced() -> None:
    async with open_hosts() as hosts:
        head = await hosts.start("0:2")
        other = FakeEngine(LayerRange(2, 6), CONTEXT, model=FakeModel(seed=1))
        tail = await hosts.start("", engine=other)
        error = await examine(hosts, hosts.route([head, tail]))
        assert isinstance(error, InvalidRoute)
        assert FakeModel(seed=1).identity in str(error)
        assert FakeModel().identity in str(error)
        assert head.server.statistics().leaving == {}


async def test_layers_other_than_the_routes_are_refused() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        refs = StageRef(head.address, LayerRange(0, 3)), StageRef(tail.address, LayerRange(3, 6))
        error = await examine(hosts, Route(refs))
        assert isinstance(error, InvalidRoute)
        assert f"stage {head.address} owns layers 0:2; the route says 0:3" in str(error)
        error = await examine(hosts, hosts.route([tail]))
        assert "leaves out layers from 0 on" in str(error)


async def test_stages_check_each_other_whatever_the_client_says() -> None:
    """A client that compares nothing gets the stages' own word for it."""
    async with open_hosts() as hosts:
        head = await hosts.start("0:2")
        alien = await hosts.start("", engine=FakeEngine(LayerRange(2, 6), replace(CONTEXT, n_ctx=64)))
        not_next = await hosts.start("4:6")
        async with hosts.connector()(head.address) as (link, _):
            for epoch, (successor, problem) in enumerate(
                [(alien.address, "n_ctx 96 is not 64"), (not_next.address, "layers 0:2 cannot be followed by 4:6")], 1
            ):
                link.send_nowait(Fence(b"r" * 16, epoch, head.address, "", successor))
                answer = (await anext(link)).frame
                assert isinstance(answer, Refused)
                assert answer.code is Refusal.SUCCESSOR
                assert f"cannot reach the next stage {successor}" in answer.message
                assert problem in answer.message
        await hosts.assert_empty()


@pytest.mark.parametrize(
    "successor",
    ["a..b:7701", "x" * 70 + ":1", ".:1", "\0:1", "ü:1", "127.0.0.1", "127.0.0.1:65536", ":1", "[]:1", "a b:1"],
)
async def test_a_next_stage_that_is_no_address_is_a_refusal_and_not_the_end_of_the_stage(successor: str) -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with hosts.connector()(head.address) as (link, _):
            link.send_nowait(Fence(b"r" * 16, 1, head.address, "", successor))
            answer = (await anext(link)).frame
            assert isinstance(answer, Refused)
            assert "is not HOST:PORT" in answer.message
        assert head.server._dialing == {}
        await hosts.assert_serving([head, tail])


@asynccontextmanager
async def tar_pits(count: int) -> AsyncIterator[tuple[list[str], list[int]]]:
    """Addresses that take connections and say nothing, and how many connections each holds."""
    held = [0] * count

    async def hold(index: int, stream: trio.SocketStream) -> None:
        held[index] += 1
        try:
            await read_to_end(stream)
        finally:
            held[index] -= 1

    async with trio.open_nursery() as nursery:
        listeners = []
        for index in range(count):
            serve = partial(trio.serve_tcp, partial(hold, index), 0, host="127.0.0.1")
            listeners += await nursery.start(serve)
        yield ["{}:{}".format(*each.socket.getsockname()) for each in listeners], held
        nursery.cancel_scope.cancel()


async def test_a_newer_fence_gives_up_the_dial_of_an_older_one() -> None:
    async with open_hosts(LinkPolicy(handshake=60)) as hosts, tar_pits(3) as (pits, held):
        head, tail = await hosts.start_all(TWO)
        async with hosts.connector()(head.address) as (link, _):

            def is_held(pit: int) -> bool:
                return held[pit] == 1

            for epoch, pit in enumerate(pits, 1):
                link.send_nowait(Fence(b"r" * 16, epoch, head.address, "", pit))
                await until(partial(is_held, epoch - 1), what="the dial")
                await until(lambda: sum(held) == 1, what="the end of the older dial")
            link.send_nowait(Fence(b"r" * 16, 9, head.address, "", ""))
            assert isinstance((await anext(link)).frame, frames.Fenced)
            await until(lambda: sum(held) == 0, what="the end of the last dial")
        await hosts.assert_serving([head, tail])


async def test_one_control_link_has_one_dial_made_at_a_time() -> None:
    async with open_hosts(LinkPolicy(handshake=60)) as hosts, tar_pits(8) as (pits, held):
        head, tail = await hosts.start_all(TWO)
        async with hosts.connector()(head.address) as (link, _):
            for number, pit in enumerate(pits):
                link.send_nowait(Fence(bytes([number]) * 16, 1, f"{NAME}{number % 4}", "", pit))
            await until(lambda: sum(held) == 1, what="a dial")
            await until(lambda: head.shard.statistics().routes == 8, what="every route session")
            assert sum(held) == 1
        await until(lambda: sum(held) == 0, what="the end of the dials")
        await hosts.assert_serving([head, tail])


async def test_links_to_next_stages_are_as_many_as_links_may_be() -> None:
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE, max_links=2)) as hosts:
        head = await hosts.start("0:2")
        tails = [await hosts.start("2:6") for _ in range(3)]
        async with hosts.connector()(head.address) as (link, _):
            answers = []
            for number, tail in enumerate(tails):
                async with hosts.connector()(tail.address) as (other, _):
                    route = bytes([number]) * 16
                    link.send_nowait(Fence(route, 1, NAME, "", tail.address))
                    other.send_nowait(Fence(route, 1, tail.address, NAME, ""))
                    answers.append((await anext(link)).frame)
        assert [type(answer) for answer in answers] == [frames.Fenced, frames.Fenced, Refused]
        assert "takes no more than 2" in as_a(Refused, answers[2]).message


async def test_a_link_that_is_just_being_made_is_not_taken_for_an_unused_one() -> None:
    """Between its making and its first use a link belongs to the fence that had it made."""
    async with open_hosts() as hosts:
        head, one, two = await hosts.start_all(["0:2", "2:6", "2:6"])
        for name in (NAME, "127.0.0.1:7702"):
            async with head.server._dialing.setdefault((name, one.address), trio.Lock()):
                link = await present(head.server._nursery).start(head.server._hold, name, one.address)
                await head.server.dial(name, two.address)
                assert head.server._next[name, one.address] is link
        assert len(head.server.statistics().leaving) == 2  # the unused ones made room
        await head.server.dial("127.0.0.1:7703", two.address)
        assert len(head.server.statistics().leaving) == 1


# --- capabilities ---


@pytest.mark.parametrize("name", ["mtp", "telepathy"])
async def test_a_capability_that_is_not_executed_is_refused(name: str) -> None:
    async with open_hosts() as hosts:
        stages = await hosts.start_all(TWO)
        message = await denied(stages[0].address, client(wants=("decode", name)))
        assert f"capability {name!r} is unknown on this stage" in message
        assert "executable: decode" in message
        error = await failure(lambda: connect(stages[0].address, wants=(name,)))
        assert isinstance(error, PeerRefused)
        assert message in str(error)
        await hosts.assert_serving(stages)


# --- what a client knows of the stages it wants ---


async def test_a_client_that_knows_its_artifact_and_context_checks_them() -> None:
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        await connect(whole.address, artifact=FakeModel().identity, context={"n_ctx": 96, "numerics": "exact"})
        for options, problem in (
            ({"artifact": "00ff"}, f"runs artifact {FakeModel().identity}; the route is for 00ff"),
            ({"context": {"n_ctx": 128}}, "runs with n_ctx = 96; the route is for 128"),
            ({"context": {"type_k": "f32"}}, "runs with type_k = f16; the route is for f32"),
        ):
            error = await failure(partial(connect, whole.address, **options))
            assert isinstance(error, InvalidRoute)
            assert problem in str(error)


async def test_a_context_that_upstream_rounds_is_the_one_asked_for() -> None:
    async with open_hosts(context=replace(CONTEXT, n_ctx=1024)) as hosts:
        whole = await hosts.start("0:6")
        await connect(whole.address, context={"n_ctx": 1000})
        error = await failure(lambda: connect(whole.address, context={"n_ctx": 1025}))
        assert "runs with n_ctx = 1024; the route is for 1025" in str(error)


# --- who may send boundaries ---


@pytest.mark.parametrize("name", ["", "nowhere", "127.0.0.1", "127.0.0.1:x", "\n:1"])
async def test_a_stage_without_an_address_is_refused(name: str) -> None:
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        assert "is not HOST:PORT" in await denied(tail.address, stage(name))


async def test_a_stage_that_does_not_say_what_it_is_is_refused() -> None:
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        assert "has no identity" in await denied(tail.address, Hello(Role.STAGE, NAME, None))


async def test_a_link_that_begins_with_anything_but_hello_is_refused() -> None:
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        message = await denied(tail.address, Fence(b"r" * 16, 1, tail.address, "", ""))
        assert message == "a link begins with Hello, not with Fence"


def _boundary(key: Key, seq: int) -> Boundary:
    return Boundary(key, seq, Expectation(0, PrefixDigest().digest()), (1, 2), LogitsWanted.ALL, None, 24)


async def test_a_boundary_from_someone_who_is_not_the_predecessor_is_refused() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        key = Key(b"r" * 16, 1, 1)
        async with (
            hosts.connector()(tail.address) as (control, _),
            greeted(tail.address, stage("127.0.0.1:6666")) as (stranger, welcome),
        ):
            assert isinstance(welcome, Welcome)
            control.send_nowait(Fence(key.route, 1, tail.address, head.address, ""))
            assert isinstance((await anext(control)).frame, frames.Fenced)
            control.send_nowait(frames.Open(key, 1))
            assert isinstance((await anext(control)).frame, frames.Opened)
            await stranger.send(_boundary(key, 2), bytes(24))
            answer = (await anext(control)).frame
            assert isinstance(answer, Refused)
            assert (answer.key, answer.seq, answer.code) == (key, 2, Refusal.PROTOCOL)
            assert "came from 127.0.0.1:6666, which is not the stage before this one" in answer.message
            # Nor is it told that the stage is ready: it is not the one who waits for it.
            stranger.send_nowait(frames.AwaitReady(key.route, 1))
            stranger.send_nowait(frames.Ping(1))
            assert is_pong((await anext(stranger)).frame, 1)
            assert tail.engine.tokens_run == 0
            async with greeted(tail.address, stage(head.address)) as (true_one, _):
                await true_one.send(_boundary(key, 3), bytes(24))
                assert isinstance((await anext(control)).frame, frames.Logits)
        await hosts.assert_empty()


async def test_a_stranger_who_waits_first_does_not_take_the_predecessors_place() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with (
            hosts.connector()(tail.address) as (control, _),
            greeted(tail.address, stage(head.address)) as (true_one, _),
            greeted(tail.address, stage("127.0.0.1:6666")) as (stranger, _),
        ):
            for link in (true_one, stranger):
                link.send_nowait(frames.AwaitReady(b"r" * 16, 1))
                link.send_nowait(frames.Ping(1))
                assert is_pong((await anext(link)).frame, 1)
            control.send_nowait(Fence(b"r" * 16, 1, tail.address, head.address, ""))
            assert isinstance((await anext(control)).frame, frames.Fenced)
            assert (await anext(true_one)).frame == frames.Ready(b"r" * 16, 1)
            stranger.send_nowait(frames.Ping(2))
            assert is_pong((await anext(stranger)).frame, 2)


async def announce(link: Link, frame: Boundary | frames.Logits) -> None:
    """Send a frame and nothing of its payload."""
    head, _ = next(encode(frame, bytes(frame.payload), 1, link.limits))
    await link._transport.send_all(head)


async def test_a_boundary_on_a_clients_link_ends_it_before_its_payload_comes() -> None:
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        async with greeted(tail.address, client()) as (link, welcome):
            assert isinstance(welcome, Welcome)
            await announce(link, _boundary(Key(b"r" * 16, 1, 1), 1))
            await assert_closed(link)
        await hosts.assert_serving([await hosts.start("0:2"), tail])


@pytest.mark.parametrize("hello", [client(), stage(NAME)], ids=["client", "stage"])
async def test_nobody_makes_a_stage_hold_room_for_logits(hello: Hello) -> None:
    """A row of logits is half a megabyte in the true model: a few bytes must not make a stage allocate a thousand."""
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        async with greeted(tail.address, hello) as (link, welcome):
            assert isinstance(welcome, Welcome)
            await announce(link, frames.Logits(Key(b"r" * 16, 1, 1), 1, 16, 16, 16 * 257 * 4))
            await assert_closed(link)
        await until(lambda: tail.server.statistics().links == 0)


# --- certificates and names ---


async def test_a_stage_must_be_named_in_its_certificate(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        head, tail = await hosts.start_all(TWO)
        other_host = authority.credentials("10.9.8.7", "stage-b.example")
        message = await denied(tail.address, stage(head.address), other_host)
        assert message == (
            f"the peer calls itself {head.address}, but its certificate is for 10.9.8.7, stage-b.example"
        )
        assert isinstance(await _answer(tail.address, stage("10.9.8.7:1"), other_host), Welcome)
        assert isinstance(await _answer(tail.address, stage("Stage-B.example:1"), other_host), Welcome)
        await hosts.assert_serving([head, tail])


async def _answer(address: str, hello: Hello, credentials: Credentials | None) -> frames.Frame:
    async with greeted(address, hello, credentials) as (_, answer):
        return answer


async def test_a_certificate_without_names_is_no_stages(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        head, tail = await hosts.start_all(TWO)
        nameless = authority.credentials(common_name="someone")
        assert "its certificate is for no host" in await denied(tail.address, stage(head.address), nameless)
        assert isinstance(await _answer(tail.address, client(), nameless), Welcome)  # a client has no name to prove


async def test_a_stage_dialled_by_a_name_that_is_not_its_own_is_not_trusted(authority: Authority) -> None:
    async with open_hosts(authority.policy("10.9.8.7")) as hosts:
        whole = await hosts.start("0:6")
        error = await failure(lambda: _dial(whole.address, hosts.policy))
        assert isinstance(error, LinkBroken)
        assert "certificate is not valid for '127.0.0.1'" in str(error)


async def _dial(address: str, policy: LinkPolicy) -> None:
    stream = await dial(address, credentials=policy.credentials, seconds=HANDSHAKE)
    await exchange_preamble(stream, HANDSHAKE)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback here")
async def test_ipv6_addresses_are_names_in_any_spelling(authority: Authority) -> None:
    async with open_hosts(authority.policy("::1")) as hosts:
        stages = await hosts.start_all(THREE, address="[::1]:0")
        await hosts.assert_serving(stages)


def test_names_have_two_cases_and_addresses_many_spellings() -> None:
    names = frozenset({"0:0:0:0:0:0:0:1", "stage-B.example", "10.0.0.1"})
    assert names_host(names, "::1")
    assert names_host(names, "STAGE-b.example")
    assert names_host(names, "10.0.0.1")
    assert not names_host(names, "example")
    assert not names_host(names, "10.0.0.10")
    assert not names_host(frozenset(), "::1")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("10.0.0.1:7701", ("10.0.0.1", 7701)), ("[::1]:0", ("::1", 0)), ("stage-a.lan:65535", ("stage-a.lan", 65535))],
)
def test_addresses_are_read(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


async def test_a_denied_link_says_why_even_when_more_was_sent() -> None:
    """Words that come too early do not swallow the reason."""
    async with open_hosts() as hosts:
        tail = await hosts.start("2:6")
        async with connected(tail.address) as transport:
            await exchange_preamble(transport, HANDSHAKE)
            async with open_link(transport, HANDSHAKE_LIMITS) as link:
                link.send_nowait(client(wants=("mtp",)))
                assert isinstance((await anext(link)).frame, Denied)
