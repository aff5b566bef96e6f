"""Peers that do not mean well: each is refused within a deadline, and the stage serves on as if nothing had been."""

from __future__ import annotations

import gc
import logging
import random
import ssl
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import trio
from attrs import evolve
from cluster.recordings import mutated, of_another, preamble, record, spoken
from cluster.remote_stages import (
    HANDSHAKE,
    TWO,
    Authority,
    Host,
    answer_of,
    assert_closed,
    client,
    connected,
    denied,
    failure,
    greeted,
    is_pong,
    open_hosts,
    read_to_end,
    reference,
    stage,
)
from narrow import as_a

from dgr.cluster.connect import LinkPolicy
from dgr.core.values import Expectation, Key, LogitsWanted
from dgr.errors import DgrError, FrameError, LinkBroken
from dgr.testing.network.proxy import open_proxy
from dgr.testing.waits import until
from dgr.wire import frames
from dgr.wire.credentials import Credentials
from dgr.wire.frames import Hello, Ping, Welcome
from dgr.wire.framing import Limits, encode
from dgr.wire.handshake import exchange_preamble
from dgr.wire.links import Link
from dgr.wire.tcp import dial

#: Seconds within which any stranger is gone: for TLS, for the preamble and for Hello, each.
DEADLINE = 3 * HANDSHAKE + 5.0
#: Seconds for each of them where a test waits for it.
SHORT = 0.5
#: Bytes by which this process may grow under a flood: what waits is bounded by thousands of small messages.
MEMORY = 48 * 2**20
#: Bytes that may be allocated for a link that is refused for what it announces.
LITTLE = 2**20
#: Seconds for which a fuzzer waits for an answer.
_ANSWER = 0.01


async def refused(host: Host, *, but: int = 0) -> None:
    """Until the stage is rid of whoever came, ``but`` for so many links."""
    await until(lambda: host.server.statistics().handshaking == 0 and host.server.statistics().links == but, DEADLINE)


async def dial_and_speak(address: str, credentials: Credentials | None) -> None:
    stream = await dial(address, credentials=credentials, seconds=HANDSHAKE)
    try:
        await exchange_preamble(stream, HANDSHAKE)
    finally:
        await trio.aclose_forcefully(stream)


# --- certificates, and the lack of them ---


Refusal = Callable[[Authority, Authority], Credentials | None]

STRANGERS: dict[str, tuple[Refusal, str]] = {
    "the other CA's certificate": (
        lambda ours, theirs: evolve(theirs.credentials("127.0.0.1"), ca=ours.ca),
        "refused our certificate: unknown ca|refused our certificate: decrypt error",
    ),
    "an expired certificate": (
        lambda ours, _: ours.credentials("127.0.0.1", days=(-10, -1)),
        "refused our certificate: certificate expired",
    ),
    "a CA of its own": (lambda _, theirs: theirs.credentials("127.0.0.1"), "certificate verify failed"),
    "no TLS": (lambda _ours, _theirs: None, "not dgr|the other side closed the link"),
}


@pytest.mark.parametrize("kind", STRANGERS)
async def test_who_has_no_certificate_of_ours_is_refused(
    kind: str, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, problem = STRANGERS[kind]
    credentials = make(authority, Authority(tmp_path / "other"))
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        stages = await hosts.start_all(TWO)
        with caplog.at_level(logging.WARNING, "dgr.links"):
            began = trio.current_time()
            error = await failure(lambda: dial_and_speak(stages[0].address, credentials))
            assert trio.current_time() - began < DEADLINE
            await refused(stages[0])
        assert isinstance(error, LinkBroken | FrameError)
        assert any(part in str(error).lower() for part in problem.lower().split("|")), error
        assert "from 127.0.0.1:" in caplog.text
        assert stages[0].server.statistics().refused == 1
        await hosts.assert_serving(stages)


async def test_who_shows_no_certificate_is_refused(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        stages = await hosts.start_all(TWO)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority.ca)
        async with connected(stages[0].address) as stream:
            secure = trio.SSLStream(stream, context, server_hostname="127.0.0.1")
            with pytest.raises(trio.BrokenResourceError) as caught:
                await secure.receive_some(1)  # in TLS 1.3 a client's own handshake is over before it is refused
            assert isinstance(caught.value.__cause__, ssl.SSLError)
            assert "CERTIFICATE_REQUIRED" in caught.value.__cause__.reason
        await refused(stages[0])
        await hosts.assert_serving(stages)


async def test_older_tls_is_refused(authority: Authority) -> None:
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        stages = await hosts.start_all(TWO)
        context = authority.credentials("127.0.0.1").context(server=False)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with connected(stages[0].address) as stream:
            secure = trio.SSLStream(stream, context, server_hostname="127.0.0.1")
            with pytest.raises(trio.BrokenResourceError):
                await secure.do_handshake()
        await refused(stages[0])
        await hosts.assert_serving(stages)


async def test_a_tls_client_on_a_plain_port_is_refused(authority: Authority) -> None:
    async with open_hosts() as hosts:
        stages = await hosts.start_all(TWO)
        error = await failure(lambda: dial_and_speak(stages[0].address, authority.credentials("127.0.0.1")))
        assert isinstance(error, LinkBroken)
        assert "TLS with" in str(error)
        await refused(stages[0])
        await hosts.assert_serving(stages)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\0" * 4096,
        b"dgr\r\n",
    ],
    ids=["http", "http2", "tls", "zeros", "part of a preamble"],
)
async def test_who_speaks_another_protocol_is_refused(policy: LinkPolicy, request_: bytes) -> None:
    async with open_hosts(evolve(policy, handshake=SHORT)) as hosts:
        stages = await hosts.start_all(TWO)
        async with connected(stages[0].address) as stream:
            await stream.send_all(request_)
            with trio.fail_after(DEADLINE):
                await read_to_end(stream)
        await refused(stages[0])
        await hosts.assert_serving(stages)


# --- slowness and silence ---


async def test_a_silent_connection_is_closed(policy: LinkPolicy) -> None:
    async with open_hosts(evolve(policy, handshake=SHORT)) as hosts:
        stages = await hosts.start_all(TWO)
        async with connected(stages[0].address) as stream:
            with trio.fail_after(DEADLINE):
                await read_to_end(stream)
        await refused(stages[0])
        await hosts.assert_serving(stages)


async def test_a_client_that_says_no_hello_is_closed(policy: LinkPolicy) -> None:
    async with open_hosts(evolve(policy, handshake=SHORT)) as hosts:
        stages = await hosts.start_all(TWO)
        async with connected(stages[0].address, policy.credentials) as stream:
            await exchange_preamble(stream, HANDSHAKE)
            with trio.fail_after(DEADLINE):
                await read_to_end(stream)
        await refused(stages[0])
        await hosts.assert_serving(stages)


@pytest.mark.parametrize("behind", ["nothing", "preamble"])
async def test_a_byte_a_moment_does_not_keep_a_connection_open(policy: LinkPolicy, behind: str) -> None:
    """Any byte counts as life; none counts as a handshake."""
    async with open_hosts(evolve(policy, handshake=SHORT)) as hosts:
        stages = await hosts.start_all(TWO)
        credentials = policy.credentials if behind == "preamble" else None
        async with open_proxy(stages[0].address) as proxy, connected(proxy.address, credentials) as stream:
            if behind == "preamble":
                await exchange_preamble(stream, HANDSHAKE)
            await until(lambda: proxy.relays)
            proxy.relays[0].rightward.trickle(1, interval=SHORT / 20)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_quietly, stream, bytes(range(256)) * 4)
                with trio.fail_after(DEADLINE):
                    await read_to_end(stream)
                nursery.cancel_scope.cancel()
        await refused(stages[0])
        await hosts.assert_serving(stages)


async def _send_quietly(stream: trio.abc.SendStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(data)


async def test_connections_that_say_nothing_are_bounded_and_make_room() -> None:
    async with open_hosts(LinkPolicy(handshake=SHORT, max_links=4)) as hosts:
        stages = await hosts.start_all(TWO)
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(_be_silent, stages[0].address)
            await until(lambda: stages[0].server.statistics().refused >= 8)
            assert stages[0].server.statistics().handshaking <= 4
        await refused(stages[0])
        assert stages[0].server.statistics().refused == 12
        await hosts.assert_serving(stages)


async def _be_silent(address: str) -> None:
    async with connected(address) as stream:
        await read_to_end(stream)


async def test_links_are_bounded_and_the_one_too_many_is_told_why() -> None:
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE, max_links=3)) as hosts:
        whole = await hosts.start("0:6")
        async with greeted(whole.address, client()), greeted(whole.address, client()):
            async with hosts.pipeline([whole]) as pipeline:
                message = await denied(whole.address, client())
                assert message == "this stage serves 3 links, and takes no more than 3"
                assert await answer_of(pipeline) == reference()
            await hosts_have_room(whole, 2)
            async with hosts.pipeline([whole]) as pipeline:
                assert await answer_of(pipeline) == reference()
        await hosts.assert_empty()


async def hosts_have_room(host: Host, links: int) -> None:
    await until(lambda: host.server.statistics().links <= links)


# --- floods ---


#: Bytes of answers that the kernel keeps on each side for someone who does not read them.
_ROOM = 16384


async def _flood(host: Host, link: Link, flood: Iterator[frames.Frame], *, but: int = 0) -> None:
    """Send without reading until the stage has had enough: of the flood, or of the kernel's letting nothing through."""

    async def send() -> None:
        for frame in flood:
            while len(link._outbox.control) > 1000:
                await trio.lowlevel.checkpoint()
                link._check_open()
            link.send_nowait(frame)
        raise AssertionError("the stage took the whole flood")

    async def send_in_vain() -> None:
        with suppress(DgrError):
            await send()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_in_vain)
        await refused(host, but=but)
        nursery.cancel_scope.cancel()


def _keys() -> Iterator[Key]:
    for number in range(10**9):
        yield Key(number.to_bytes(16, "little"), 1, 1)


FLOODS: dict[str, Callable[[], Iterator[frames.Frame]]] = {
    "pings": lambda: (Ping(number + 1) for number in range(10**9)),
    "opens": lambda: (frames.Open(key, 1) for key in _keys()),
    "probes": lambda: (frames.QueryState(key, 1) for key in _keys()),
    "loads": lambda: (frames.QueryLoad(number) for number in range(10**9)),
    "traces": lambda: (frames.QueryTrace(key.route, 1) for key in _keys()),
    "closes": lambda: (frames.Close(key, 1) for key in _keys()),
    "tokens": lambda: (
        frames.Tokens(key, 1, Expectation(0, bytes(16)), (1,) * 16, LogitsWanted.NONE, None) for key in _keys()
    ),
}


#: What stages of these tests bear; a link on which nothing moves is given up like one that floods.
IMPATIENT = LinkPolicy(handshake=HANDSHAKE, heartbeat=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_whose_answers_nobody_reads_ends_its_link(kind: str) -> None:
    async with open_hosts(IMPATIENT) as hosts:
        whole = await hosts.start("0:6", room=_ROOM)
        with bounded_memory():
            async with greeted(whole.address, client(), room=_ROOM) as (link, welcome):
                assert isinstance(welcome, Welcome)
                await _flood(whole, link, FLOODS[kind]())
        await hosts.assert_serving([whole])


@pytest.mark.parametrize(
    ("hello", "flood"),
    [
        (client(), lambda: (frames.Fence(key.route, 1, "127.0.0.1:1", "", "") for key in _keys())),
        (stage("127.0.0.1:1"), lambda: (frames.AwaitReady(key.route, 1) for key in _keys())),
    ],
    ids=["route sessions", "waits"],
)
async def test_a_flood_of_what_a_stage_must_remember_ends_its_link(
    hello: Hello, flood: Callable[[], Iterator[frames.Frame]]
) -> None:
    async with open_hosts(IMPATIENT) as hosts:
        head, tail = await hosts.start_all(TWO, room=_ROOM)
        with bounded_memory():
            async with greeted(tail.address, hello, room=_ROOM) as (link, welcome):
                assert isinstance(welcome, Welcome)
                await _flood(tail, link, flood())
        assert not len(tail.shard._awaited)
        await hosts.assert_serving([head, tail])


async def test_a_flood_of_requests_of_a_route_session_ends_its_link_alone() -> None:
    async with open_hosts(IMPATIENT) as hosts:
        whole = await hosts.start("0:6", room=_ROOM)
        async with hosts.pipeline([whole]) as pipeline:
            with bounded_memory():
                async with greeted(whole.address, client(), room=_ROOM) as (link, _):
                    link.send_nowait(frames.Fence(b"r" * 16, 1, whole.address, "", ""))
                    assert isinstance((await anext(link)).frame, frames.Fenced)
                    opens = (frames.Open(Key(b"r" * 16, 1, number), 1) for number in range(1, 10**9))
                    await _flood(whole, link, opens, but=1)
                await until(lambda: whole.shard.statistics().routes == 1)
            assert await answer_of(pipeline) == reference()
        await hosts.assert_serving([whole])


async def test_requests_in_the_moment_in_which_a_route_session_changes_hands() -> None:
    """A pipeline comes back on another link while its state is still going, and does not wait for an answer."""
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        for number in range(40):
            key = Key(number.to_bytes(16, "little"), 1, 1)
            fence = frames.Fence(key.route, 1, whole.address, "", "")
            async with greeted(whole.address, client()) as (second, _):
                async with greeted(whole.address, client()) as (first, _):
                    first.send_nowait(fence)
                    assert isinstance((await anext(first)).frame, frames.Fenced)
                    second.send_nowait(fence)
                    second.send_nowait(Ping(1))
                    assert is_pong((await anext(second)).frame, 1)
                    close = b"".join(head for head, _ in encode(frames.Close(key, 1), None, 0, second.limits))
                    await second._transport.send_all(close * 500)  # one is read in every turn of the stage
                answer = None
                while not isinstance(answer, frames.Fenced):
                    answer = (await anext(second)).frame
        await hosts.assert_serving([whole])


async def test_an_honest_link_outlives_many_messages_that_are_read() -> None:
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        async with greeted(whole.address, client()) as (link, _):
            for nonce in range(1, 6_001):
                link.send_nowait(Ping(nonce))
                if nonce % 1000 == 0:
                    for expected in range(nonce - 999, nonce + 1):
                        assert is_pong((await anext(link)).frame, expected)
        await hosts.assert_serving([whole])


# --- bytes that are no session ---


@contextmanager
def bounded_memory() -> Iterator[None]:
    """This process, which holds both sides, does not grow by more than :data:`MEMORY` over the block."""
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    grown = process.memory_info().rss - before
    assert grown < MEMORY, f"{grown} bytes more"


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """Python allocates less than :data:`LITTLE` at any moment of the block."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < LITTLE, f"{peak} bytes at the peak"


async def _replay(address: str, words: Sequence[bytes], sound: int, credentials: Credentials | None) -> None:
    """Say one thing after another, as if to someone who answers; then the stage must end the connection.

    The first ``sound`` words make sense and are answered; of the others nobody can tell, and each is given a moment.
    """
    async with connected(address, credentials) as stream:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            for index, word in enumerate(words):
                await stream.send_all(word)
                with trio.move_on_after(HANDSHAKE / 2 if index < sound else _ANSWER):
                    if not await stream.receive_some(65536):
                        return
            if isinstance(stream, trio.SocketStream):
                await stream.send_eof()
            else:
                await stream.send_all(b"\xff" * 64)  # no half-close in TLS: a packet that nobody takes
            await read_to_end(stream)


async def _fuzz(
    host: Host,
    samples: Iterable[tuple[Sequence[bytes], int]],
    credentials: Credentials | None = None,
    *,
    before: Callable[[], None] = lambda: None,
    workers: int = 8,
) -> None:
    """Some connections at a time, each with words of which the first so many make sense: the stage ends every one of
    them, and its memory stays bounded."""
    held = host.server.statistics().links
    left = iter(samples)

    async def work() -> None:
        for words, sound in left:
            before()
            await _replay(host.address, words, sound, credentials)

    with bounded_memory():
        async with trio.open_nursery() as nursery:
            for _ in range(workers):
                nursery.start_soon(work)
        await refused(host, but=held)


async def _nobody(own: str, successor: str) -> Link:
    """Addresses must not be dialled because a byte of one was changed: such a stage reaches no one."""
    raise LinkBroken(f"{own} reaches nobody, and not {successor}")


@pytest.mark.slow
@pytest.mark.parametrize("known", ["nothing", "the preamble", "a Hello"])
async def test_a_thousand_random_byte_strings(known: str) -> None:
    rng = random.Random(f"random {known}")
    greeting = [] if known == "nothing" else [await preamble()]
    if known == "a Hello":
        greeting.append(b"".join(head for head, _ in encode(client(), None, 0, Limits(1, 1, 1))))
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6", dial=_nobody)
        samples = [([*greeting, rng.randbytes(rng.randrange(1, 400))], len(greeting)) for _ in range(334)]
        await _fuzz(whole, samples)
        await hosts.assert_serving([whole])


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(10)])
async def test_a_thousand_mutated_recordings(seed: int) -> None:
    """A real client's and a real stage's words with a few bytes changed."""
    of_client, of_head = await record()
    rng = random.Random(f"mutated {seed}")
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6", dial=_nobody)
        await _fuzz(whole, (mutated(of_another(of_client, rng), rng) for _ in range(500)))
        # The recordings themselves are fine; that is what makes them worth changing.
        assert whole.engine.tokens_run > 200
        await hosts.assert_serving([whole])

        tail = await hosts.start("2:6", dial=_nobody)
        hello, *rest = spoken(of_head)
        work = next(frame for frame in rest if isinstance(frame, frames.Boundary))
        async with greeted(tail.address, client()) as (control, _), trio.open_nursery() as nursery:
            control.send_nowait(frames.Fence(work.key.route, work.key.epoch, tail.address, as_a(Hello, hello).name, ""))
            assert isinstance((await anext(control)).frame, frames.Fenced)

            async def drain() -> None:
                async for _ in control:
                    pass

            def fresh() -> None:
                control.send_nowait(frames.Close(work.key, 1))
                control.send_nowait(frames.Open(work.key, 1))

            nursery.start_soon(drain)
            await _fuzz(tail, (mutated(of_head, rng) for _ in range(500)), before=fresh, workers=2)
            nursery.cancel_scope.cancel()
        assert tail.engine.tokens_run > 200
        await hosts.assert_serving([await hosts.start("0:2"), tail])


async def test_mutated_recordings_over_tls(authority: Authority) -> None:
    of_client, _ = await record()
    rng = random.Random("mutated over TLS")
    async with open_hosts(authority.policy("127.0.0.1")) as hosts:
        whole = await hosts.start("0:6", dial=_nobody)
        samples = [mutated(of_another(of_client, rng), rng) for _ in range(40)]
        await _fuzz(whole, samples, hosts.policy.credentials)
        await hosts.assert_serving([whole])


@pytest.mark.parametrize("length", [2**16 + 5 * 16 + 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", [1, 2])
async def test_a_length_above_the_limit_is_refused_before_any_byte_of_it(length: int, kind: int) -> None:
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        with nothing_allocated():
            async with greeted(whole.address, client()) as (link, _):
                await link._transport.send_all(length.to_bytes(4, "little") + bytes((kind, 0, 1, 0)))
                await assert_closed(link)
            await refused(whole)
        await hosts.assert_serving([whole])


async def test_a_boundary_too_large_is_refused_before_any_byte_of_it() -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        with nothing_allocated():
            async with greeted(tail.address, stage("127.0.0.1:1")) as (link, _):
                wide = Limits(n_batch=2**20, boundary_width=3, n_vocab=1)
                tokens = (1,) * 1000
                frame = frames.Boundary(
                    Key(b"r" * 16, 1, 1),
                    1,
                    Expectation(0, bytes(16)),
                    tokens,
                    LogitsWanted.NONE,
                    None,
                    12 * len(tokens),
                )
                for head_bytes, _ in encode(frame, bytes(frame.payload), 1, wide):
                    await link._transport.send_all(head_bytes)
                    break
                await assert_closed(link)
            await refused(tail)
        await hosts.assert_serving([head, tail])
