"""Links between processes of one host: whole frames through shared memory, and whatever a peer may do to it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve, frozen
from trio.testing import wait_all_tasks_blocked
from wire.wire_samples import FLASH, SMALL, boundary, key, raw

from dgr.errors import DgrError, FrameError, InputError, LinkBroken
from dgr.wire import links
from dgr.wire.frames import Boundary, Pong, Refusal, Refused
from dgr.wire.framing import Framer, Received
from dgr.wire.links import Link, open_link
from dgr.wire.samehost import handshake, memory
from dgr.wire.samehost.addresses import removing_files, socket_path
from dgr.wire.samehost.handshake import accept_shared
from dgr.wire.samehost.memory import RING, SharedMemory, make_memory, take_memory
from dgr.wire.samehost.stream import SharedStream, Sink
from dgr.wire.tcp import accept, address_of, dial, listen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="unix: addresses are there on Linux alone")

LIMITS = evolve(SMALL, n_batch=512, boundary_width=8192, fragment=2 << 20)
_RECORD = struct.Struct("<III")


def ends() -> tuple[trio.SocketStream, trio.SocketStream]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return (
        trio.SocketStream(trio.socket.from_stdlib_socket(one)),
        trio.SocketStream(trio.socket.from_stdlib_socket(other)),
    )


def descriptors() -> dict[str, str]:
    """What is open, by number; not the folder that is read for it."""
    found = {}
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = os.readlink(path)  # noqa: PTH115 (some lead to no path)
    return found


def mappings() -> int:
    return Path("/proc/self/maps").read_text("utf-8").count("memfd:dgr-link")


@frozen
class Raw:
    """The other end of a shared stream, in the hands of whoever may do with it what he likes."""

    socket: trio.SocketStream
    memory: SharedMemory

    async def say(self, inline: bytes = b"", placed: int = 0, given_back: int = 0) -> None:
        await self.socket.send_all(_RECORD.pack(len(inline), placed, given_back) + inline)


@asynccontextmanager
async def against(kind: type[SharedStream] = SharedStream) -> AsyncIterator[tuple[Link, Raw]]:
    """A link, and its other end by hand."""
    near, far = ends()
    ours, descriptor = make_memory()
    theirs = take_memory(descriptor)
    os.close(descriptor)
    try:
        async with open_link(kind(near, ours), LIMITS) as link:
            yield link, Raw(far, theirs)
    finally:
        theirs.close()
        await trio.aclose_forcefully(far)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Link]]:
    near, far = ends()
    ours, descriptor = make_memory()
    theirs = take_memory(descriptor)
    os.close(descriptor)
    async with (
        open_link(SharedStream(near, ours), LIMITS) as left,
        open_link(SharedStream(far, theirs), LIMITS) as right,
    ):
        yield left, right


# --- frames ----------------------------------------------------------------------------------------------------------


async def test_frames_of_every_length_pass_both_ways_at_once() -> None:
    """Some are longer than a ring, and both sides wait for room at the same time."""
    lengths = [1, 2, 65, 300]

    async def send(link: Link, session: int) -> None:
        order = lengths[:]
        random.Random(session).shuffle(order)
        for seq, n_tokens in enumerate(order, 1):
            await link.send(*boundary(session, seq, n_tokens, LIMITS))
            link.send_nowait(Pong(seq))

    missing = 2 * 2 * 2 * len(lengths)

    async def check(link: Link, scope: trio.CancelScope) -> None:
        nonlocal missing
        async for received in link:  # to the end: what is given back to this side is read here too
            if isinstance(received.frame, Boundary):
                frame = received.frame
                again = boundary(frame.key.session, frame.seq, len(frame.tokens), LIMITS)
                assert bytes(received.payload or b"") == again[1]
            missing -= 1
            if not missing:
                scope.cancel()

    with trio.fail_after(60):
        async with linked() as (left, right), trio.open_nursery() as nursery:
            for link in (left, right):
                nursery.start_soon(check, link, nursery.cancel_scope)
                for session in (1, 2):
                    nursery.start_soon(send, link, session)
    assert not missing
    assert 4 * max(lengths) * LIMITS.boundary_width > RING


async def anything(link: Link) -> None:
    """Hear what is given back."""
    async for _ in link:
        pass


async def _arrives() -> bool:
    """Whether a payload longer than a ring passes before nothing moves any more."""
    came: list[Received] = []
    async with linked() as (left, right), trio.open_nursery() as nursery:

        async def take() -> None:
            came.append(await anext(right))

        nursery.start_soon(take)
        nursery.start_soon(anything, left)
        await left.send(*boundary(n_tokens=512, limits=LIMITS))
        moved = -1
        while moved != (moved := right.statistics().bytes_received):
            await wait_all_tasks_blocked(0.05)
        nursery.cancel_scope.cancel()
    return bool(came)


async def test_room_is_given_back_before_the_ring_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, a payload longer than the ring would wait forever."""

    class Mutant(links.Link):
        async def _write(self) -> None:
            self._stream = _Forgetful(self._stream)  # type: ignore[assignment,arg-type]
            await super()._write()

    class _Forgetful:
        owes = False

        def __init__(self, stream: SharedStream) -> None:
            self.send, self.receive = stream.send, stream.receive

    assert await _arrives()
    monkeypatch.setattr(links, "Link", Mutant)
    assert not await _arrives()


async def test_what_is_said_before_there_are_frames_is_not_lost() -> None:
    near, far = ends()
    ours, descriptor = make_memory()
    stream = SharedStream(near, ours)
    raw_end = Raw(far, take_memory(descriptor))
    os.close(descriptor)
    await raw_end.say(b"hello" + raw(Pong(3)))
    assert await stream.receive_some(5) == b"hello"
    async with open_link(stream, LIMITS) as link:
        await raw_end.say(raw(Pong(4)))
        assert [(await anext(link)).frame for _ in range(2)] == [Pong(3), Pong(4)]
    raw_end.memory.close()
    await trio.aclose_forcefully(far)


# --- addresses, and who may connect ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("unix:stage", "whole path"),
        ("unix:", "whole path"),
        ("unix:/run/", "whole path"),
        ("unix:/a\0b", "whole path"),
        ("unix:/" + 107 * "x", "108 bytes"),
    ],
)
def test_addresses_that_are_none_are_refused(address: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        socket_path(address)


def test_there_are_no_such_addresses_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert socket_path("127.0.0.1:7701") is None
    with pytest.raises(InputError, match="Linux alone"):
        socket_path("unix:/run/stage")


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[str]:
    """A listener that takes links and keeps them; its address."""
    (listener,) = await listen(f"unix:{path}", credentials=None)

    async def take(stream: trio.SocketStream) -> None:
        with contextlib.suppress(DgrError):
            shared = await accept(stream, None, 5)
            with contextlib.suppress(trio.BrokenResourceError):
                await shared.receive_some()
            await trio.aclose_forcefully(shared)

    with removing_files([listener]):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, take, [listener])
            yield address_of(listener)
            nursery.cancel_scope.cancel()


async def test_a_socket_is_its_users_alone_and_goes_with_its_stage(tmp_path: Path) -> None:
    path = tmp_path / "stage"
    former = os.umask(0)
    try:
        async with serving(path) as address:
            assert address == f"unix:{path}"
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(InputError, match="in use"):
                await listen(address, credentials=None)
    finally:
        os.umask(former)
    assert not path.exists()


async def test_a_socket_that_was_left_behind_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "stage"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with serving(path) as address:
        stream = await dial(address, credentials=None)
        await trio.aclose_forcefully(stream)
        path.unlink()
        path.write_text("of whoever came after", "utf-8")
    assert path.read_text("utf-8")
    with pytest.raises(InputError, match="in use"):
        await listen(f"unix:{path}", credentials=None)
    with pytest.raises(LinkBroken, match="refused"):
        await dial(f"unix:{path}", credentials=None)
    with pytest.raises(LinkBroken, match="No such file"):
        await dial(f"unix:{tmp_path}/none", credentials=None)


async def _strange() -> str | None:
    """What both sides say of a peer of another user, by who finds out."""
    near, far = ends()
    try:
        await accept_shared(near, 0.05)
    except LinkBroken as error:
        return str(error)
    except DgrError:
        return None
    finally:
        await trio.aclose_forcefully(near)
        await trio.aclose_forcefully(far)
    return None


async def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    us = os.geteuid()
    async with serving(tmp_path / "stage") as address:
        monkeypatch.setattr(os, "geteuid", lambda: us + 1)
        assert "run both as one user" in (await _strange() or "")
        with pytest.raises(LinkBroken, match=f"of user {us}, this one of user {us + 1}"):
            await dial(address, credentials=None)
        monkeypatch.setattr(handshake, "check_peer", lambda _: None)  # the mutant
        assert await _strange() is None


# --- memory that comes from the other side ---------------------------------------------------------------------------


def _memory(size: int, seals: int, flags: int = 0) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


_BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0

HOSTILE: dict[str, tuple[Callable[[], list[int]], str]] = {
    "no descriptor": (list, "passed 0 descriptors"),
    "two descriptors": (lambda: [_memory(2 * RING, _BOTH), _memory(2 * RING, _BOTH)], "passed 2 descriptors"),
    "no seals": (lambda: [_memory(2 * RING, 0)], "could be resized"),
    "it may shrink": (lambda: [_memory(2 * RING, fcntl.F_SEAL_GROW)], "could be resized"),
    "it may grow": (lambda: [_memory(2 * RING, fcntl.F_SEAL_SHRINK)], "could be resized"),
    "shorter": (lambda: [_memory(2 * RING - 4096, _BOTH)], "bytes of memory"),
    "longer": (lambda: [_memory(2 * RING + 4096, _BOTH)], "bytes of memory"),
    "a pipe": (lambda: list(os.pipe())[:1], "not memory"),
    "a file": (lambda: [os.open("/proc/self/exe", os.O_RDONLY)], "not memory"),
    "huge pages": (lambda: [_memory(2 * RING, _BOTH, os.MFD_HUGETLB)], "huge pages"),
}


async def _answer(passed: list[int], word: bytes = b"dgr-shm\1") -> DgrError | None:
    """How a link ends whose listener passes these descriptors, which are closed; None when it does not end."""
    near, far = ends()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
    await far.socket.sendmsg([word], rights)
    for descriptor in passed:
        os.close(descriptor)
    try:
        (await handshake._ask(near)).close()
    except DgrError as error:
        return error
    finally:
        await trio.aclose_forcefully(near)
        await trio.aclose_forcefully(far)
    return None


@pytest.mark.parametrize("name", HOSTILE)
async def test_memory_that_is_not_as_it_should_be_is_refused_and_given_back(name: str) -> None:
    make, said = HOSTILE[name]
    if name == "a pipe":  # its other end
        made = os.pipe()
        os.close(made[1])
        passed = [made[0]]
    else:
        passed = make()
    before = {number: what for number, what in descriptors().items() if int(number) not in passed}
    error = await _answer(passed)
    assert isinstance(error, FrameError)
    assert said in str(error)
    assert descriptors() == before
    assert not mappings()


async def test_a_listener_that_is_something_else_is_told_apart() -> None:
    error = await _answer([_memory(2 * RING, _BOTH)], b"SSH-2.0-")
    assert isinstance(error, FrameError)
    assert "not dgr" in str(error)


MUTANTS: dict[str, tuple[str, object]] = {
    "no seals": ("_SEALS", 0),
    "it may shrink": ("_SEALS", fcntl.F_SEAL_GROW if sys.platform == "linux" else 0),
    "it may grow": ("_SEALS", fcntl.F_SEAL_SHRINK if sys.platform == "linux" else 0),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_side_that_does_not_look_at_seals_takes_what_can_be_cut_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute, value = MUTANTS[name]
    monkeypatch.setattr(memory, attribute, value)
    assert await _answer(HOSTILE[name][0]()) is None


async def test_a_side_that_does_not_close_what_it_refuses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    before = descriptors()
    passed = HOSTILE["two descriptors"][0]()
    monkeypatch.setattr(handshake, "os", type("_", (), {"close": staticmethod(kept.append)}))
    await _answer(passed)
    assert descriptors() != before
    for descriptor in kept:
        os.close(descriptor)


async def test_memory_keeps_its_size_on_both_sides() -> None:
    ours, descriptor = make_memory()
    theirs = take_memory(descriptor)
    for size in (0, RING, 4 * RING):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(TypeError):
        theirs.incoming[0] = 1
    ours.outgoing[:3] = b"abc"
    assert bytes(theirs.incoming[:3]) == b"abc"
    theirs.outgoing[:3] = b"xyz"
    assert bytes(ours.incoming[:3]) == b"xyz"
    os.close(descriptor)
    ours.close()
    theirs.close()


# --- records that lie ------------------------------------------------------------------------------------------------

ONE = 64
PAYLOAD = 4 * ONE * LIMITS.boundary_width
HEADER = 8


def _announced() -> bytes:
    """A boundary and the header of its fragment, without its bytes."""
    return raw(*boundary(n_tokens=ONE, limits=LIMITS), limits=LIMITS)[:-PAYLOAD]


LIES: dict[str, tuple[Callable[[Raw], object], str]] = {
    "more than the ring": (lambda end: end.say(placed=RING + 1), "there is room for"),
    "all that 32 bits hold": (lambda end: end.say(placed=2**32 - 1), "there is room for"),
    "more given back than was written": (lambda end: end.say(given_back=1), "0 had been written"),
    "bytes of no payload": (lambda end: end.say(placed=HEADER), "belong to no payload"),
    "a message in the ring": (lambda end: end.say(raw(Pong(1))[:4], placed=len(raw(Pong(1))) - 4), "no payload"),
}


async def _end(lie: str, kind: type[SharedStream] = SharedStream) -> DgrError | Received:
    async with against(kind) as (link, end):
        end.memory.outgoing[:1024] = (raw(Pong(1)) * 1024)[4 : 4 + 1024]
        await LIES[lie][0](end)  # type: ignore[misc]
        await end.say(raw(Pong(2)))
        try:
            with trio.fail_after(10):
                return await anext(link)
        except DgrError as error:
            return error


@pytest.mark.parametrize("lie", LIES)
async def test_a_record_that_lies_ends_the_link(lie: str) -> None:
    found = await _end(lie)
    assert isinstance(found, FrameError)
    assert LIES[lie][1] in str(found)


class _Credulous(SharedStream):
    """It believes every number."""

    def _take_record(self, data: memoryview, sink: Sink) -> memoryview:
        self._inline, self._placed, given_back = _RECORD.unpack(data[: _RECORD.size])
        self._lent -= given_back
        return data[_RECORD.size :]

    def _take_placed(self, sink: Sink) -> list[Received]:
        size = min(self._placed, RING - self._read_at)
        lying = bytes(self._memory.incoming[self._read_at : self._read_at + size])
        self._read_at = (self._read_at + size) % RING
        self._placed -= size
        return sink.receive(memoryview(lying))


@pytest.mark.parametrize("lie", ["more given back than was written", "bytes of no payload", "a message in the ring"])
async def test_a_side_that_believes_a_record_takes_the_lie(lie: str) -> None:
    found = await _end(lie, _Credulous)
    assert not isinstance(found, FrameError) or LIES[lie][1] not in str(found)


async def test_a_side_that_does_not_count_reads_a_ring_twice() -> None:
    frame = raw(Refused(key(), 1, Refusal.INPUT, 4096 * "x"), limits=LIMITS)
    count = RING // len(frame)
    async with against(_Credulous) as (link, end):
        end.memory.outgoing[: count * len(frame)] = count * frame
        await end.say(placed=RING + count * len(frame))
        for _ in range(count):
            await anext(link)
        with pytest.raises(FrameError, match="packet"):  # what is left of the ring, and then all of it again
            await anext(link)


async def _changed(kind: type[SharedStream]) -> bool:
    """Whether a payload is another one after its sender wrote into the ring again."""
    async with against(kind) as (link, end):
        _, payload = boundary(n_tokens=ONE, limits=LIMITS)
        end.memory.outgoing[:PAYLOAD] = payload
        await end.say(_announced(), placed=PAYLOAD)
        received = await anext(link)
        assert received.payload is not None
        came = bytes(received.payload)
        end.memory.outgoing[:PAYLOAD] = bytes(PAYLOAD)
        assert came == payload
        return received.payload != payload


async def test_what_came_stays_what_it_was() -> None:
    assert PAYLOAD < RING
    assert not await _changed(SharedStream)


class _InPlace(SharedStream):
    """It reads a payload where its sender left it."""

    def _take_placed(self, sink: Sink) -> list[Received]:
        assert isinstance(sink, Framer)
        assert sink._target is not None
        size = sink._target.size
        sink._target._buffer = self._memory.incoming[:size]
        self._placed = 0
        return sink.filled(size)


async def test_a_payload_that_is_not_copied_can_be_changed() -> None:
    with pytest.raises(BufferError):  # nor could it be unmapped
        assert await _changed(_InPlace)


async def test_a_link_that_is_cut_within_a_record_says_so() -> None:
    async with against() as (link, end):
        await end.socket.send_all(_RECORD.pack(100, 0, 0)[:7])
        await end.socket.send_eof()
        with pytest.raises(LinkBroken, match="inside a record"):
            await anext(link)


async def test_descriptors_that_come_later_are_dropped() -> None:
    before = descriptors()
    async with against() as (link, end):
        with_link = descriptors()
        passed = _memory(4096, _BOTH)
        said = _RECORD.pack(len(raw(Pong(5))), 0, 0) + raw(Pong(5))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed]))]
        await end.socket.socket.sendmsg([said], rights)
        os.close(passed)
        assert (await anext(link)).frame == Pong(5)
        assert descriptors() == with_link
    assert descriptors() == before


# --- everything is given back ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    before = descriptors()
    assert not mappings()
    yield
    assert descriptors() == before
    assert not mappings()


async def test_a_link_gives_back_its_memory_whichever_side_ends_it(tmp_path: Path) -> None:
    with leaving_nothing():
        async with serving(tmp_path / "stage") as address:
            for _ in range(3):
                async with open_link(await dial(address, credentials=None), LIMITS):
                    assert mappings() >= 1
                await wait_all_tasks_blocked()
        for end in ("left", "right"):
            async with linked() as (left, right):
                await left.send(*boundary(n_tokens=512, limits=LIMITS))  # more than there is room for
                await (left if end == "left" else right).aclose()


async def test_a_handshake_that_does_not_end_leaves_nothing(tmp_path: Path) -> None:
    with leaving_nothing():
        async with serving(tmp_path / "stage"):
            sock = trio.socket.socket(socket.AF_UNIX)
            await sock.connect(str(tmp_path / "stage"))
            await sock.send(b"dgr")
            sock.close()
            await wait_all_tasks_blocked()


_PEER = """
import sys, trio
from dgr.wire.tcp import dial

async def main():
    stream = await dial(sys.argv[1], credentials=None)
    print("here", flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


async def test_a_peer_that_is_killed_ends_the_link_and_leaves_nothing(tmp_path: Path) -> None:
    (listener,) = await listen(f"unix:{tmp_path}/stage", credentials=None)
    with trio.fail_after(60):
        async with listener:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-c", _PEER, f"unix:{tmp_path}/stage"], stdout=-1
            )
            assert process.stdout is not None
            shared = await accept(await listener.accept(), None, 30)
            assert await process.stdout.receive_some(16)
            assert mappings() == 1
            async with open_link(shared, FLASH) as link, trio.open_nursery() as nursery:
                nursery.start_soon(link.send, *boundary(n_tokens=512, limits=FLASH))  # it waits for room
                await wait_all_tasks_blocked()
                process.kill()
                with contextlib.suppress(LinkBroken):  # with bytes of ours unread it is a reset
                    assert [received async for received in link] == []
            await process.wait()
            await process.stdout.aclose()
    assert not mappings()
