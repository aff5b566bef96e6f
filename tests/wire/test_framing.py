"""The framer: the same frames however bytes are chopped, and nothing hostile costs more than the limits say."""

from __future__ import annotations

import functools
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import psutil
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.wire_samples import (
    DIGEST,
    FLASH,
    MEMBERS,
    SMALL,
    boundary,
    extreme,
    flat,
    interleaved,
    key,
    logits,
    raw,
    sendable,
    type_of,
)

from dgr.core.values import Expectation, LogitsWanted
from dgr.errors import FrameError
from dgr.wire import frames, framing
from dgr.wire.frames import Boundary, Frame, Logits, Ping, Pong, Tokens
from dgr.wire.framing import HEADER_SIZE, Framer, Limits, Received, encode, encode_message

MESSAGE, FRAGMENT = 1, 2
HEADER = struct.Struct("<IBBH")
steady = settings(derandomize=True, deadline=None, max_examples=80)


def packet(kind: int, body: bytes, stream: int = 0, *, length: int | None = None, reserved: int = 0) -> bytes:
    """A packet as the wire has it, with any header one likes."""
    return HEADER.pack(len(body) if length is None else length, kind, reserved, stream) + body


def announcement(frame: Frame, stream: int) -> bytes:
    """The message of a frame alone, unchecked."""
    return packet(MESSAGE, encode_message(frame), stream)


def reasons(value: object) -> str:
    """Name a case by what it is refused for."""
    return value if isinstance(value, str) else type(value).__name__


def most_held(limits: Limits) -> int:
    """Bytes a framer may hold at the very most: payloads under way, one message and two headers."""
    payloads = max(limits.under_way, 4 * limits.n_batch * limits.n_vocab)
    return payloads + limits.message + 2 * HEADER_SIZE


def feed(framer: Framer, data: bytes, sizes: Callable[[], int]) -> tuple[list[Received], str | None]:
    """Frames, and the error that ended them."""
    got: list[Received] = []
    begin = 0
    try:
        while begin < len(data):
            end = begin + sizes()
            got += framer.receive(data[begin:end])
            begin = end
            assert framer.pending <= most_held(framer.limits)
        framer.receive(b"")
    except FrameError as error:
        reason = str(error)
    else:
        return got, None
    assert str(framer.error) == reason
    assert framer.pending == 0
    return got, reason


def feed_in_place(framer: Framer, data: bytes, sizes: Callable[[], int]) -> tuple[list[Received], str | None]:
    """As :func:`feed`, but bytes of payloads are written where they belong."""
    got: list[Received] = []
    begin = 0
    try:
        while begin < len(data):
            part = data[begin : begin + sizes()]
            room = framer.room
            if room is not None:
                part = part[: room.nbytes]
                room[: len(part)] = part
                got += framer.filled(len(part))
            else:
                got += framer.receive(part)
            begin += len(part)
        framer.receive(b"")
    except FrameError as error:
        return got, str(error)
    return got, None


def feed_all(framer: Framer, data: bytes) -> None:
    """Raise what ends the stream, behind the frames that came before it."""
    framer.receive(data)
    framer.receive(b"")


def same(got: Received, frame: Frame, payload: bytes | None) -> bool:
    return got.frame == frame and (None if got.payload is None else bytes(got.payload)) == payload


def refused(limits: Limits, data: bytes, match: str) -> None:
    """The bytes are refused, and so is everything after them."""
    framer = Framer(limits)
    with pytest.raises(FrameError, match=match):
        framer.receive(data)
    assert framer.pending == 0
    with pytest.raises(FrameError, match=match):
        framer.receive(raw(Pong(1)))


# --- the same frames, however they are chopped -----------------------------------------------------------------------

sequences = st.lists(sendable(), min_size=1, max_size=8)


@given(sequences, st.randoms(use_true_random=False), st.lists(st.integers(1, 40), min_size=1, max_size=20))
@steady
def test_any_interleaving_chopped_anyhow_gives_the_same_frames(
    sent: list[tuple[Frame, bytes | None]], chance: random.Random, sizes: list[int]
) -> None:
    data, order = b"", []
    for one, completes in interleaved(sent, lambda n: chance.randrange(n)):
        data += flat(one)
        order += [] if completes is None else [completes]
    assert sorted(order) == list(range(len(sent)))
    for size in (lambda: len(data), lambda: 1, lambda: chance.choice(sizes)):
        framer = Framer(SMALL)
        got, error = feed(framer, data, size)
        assert error is None
        assert framer.pending == 0
        assert len(got) == len(order)
        assert all(same(one, *sent[index]) for one, index in zip(got, order, strict=True))


@given(sequences, st.binary(min_size=1, max_size=60), st.randoms(use_true_random=False))
@steady
def test_frames_before_a_bad_byte_and_the_error_do_not_depend_on_the_chopping(
    sent: list[tuple[Frame, bytes | None]], garbage: bytes, chance: random.Random
) -> None:
    data = b"".join(flat(one) for one, _ in interleaved(sent, lambda n: chance.randrange(n)))
    place = chance.randrange(len(data) + 1)
    data = data[:place] + garbage + data[place:]
    whole = feed(Framer(SMALL), data, lambda: len(data))
    assert feed(Framer(SMALL), data, lambda: 1) == whole
    assert feed(Framer(SMALL), data, lambda: chance.randint(1, 50)) == whole
    for sizes in (lambda: 1, lambda: len(data), lambda: chance.randint(1, 50)):
        assert feed_in_place(Framer(SMALL), data, sizes) == whole


class _Untold(Framer):
    """A mutant that forgets what was written in place."""

    def filled(self, n_bytes: int) -> list[Received]:
        return []


def test_bytes_written_in_place_that_nobody_counts_are_noticed() -> None:
    frame, payload = boundary(n_tokens=4)
    data = raw(frame, payload) + raw(Pong(1))
    assert feed_in_place(Framer(SMALL), data, lambda: 7) == feed(Framer(SMALL), data, lambda: 7)
    assert feed_in_place(_Untold(SMALL), data, lambda: 7) != feed(Framer(SMALL), data, lambda: 7)


def test_a_payload_that_lasts_and_comes_in_one_piece_is_not_copied() -> None:
    frame, payload = boundary(n_tokens=8)
    limits = SMALL.unbroken()
    message, (_, fragment) = encode(frame, payload, 1, limits)
    assert fragment is not None
    for lasting in (True, False):
        framer = Framer(limits)
        framer.receive(flat(message))
        framer.receive(HEADER.pack(fragment.nbytes, FRAGMENT, 0, 1))
        [got] = framer.receive(fragment, lasting=lasting)
        assert same(got, frame, payload)
        assert got.payload is not None
        assert (got.payload.obj is payload) is lasting


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)
def test_every_member_passes_through_the_framer(member: type[msgspec.Struct]) -> None:
    frame, payload = extreme(type_of(member), False), None
    if member is Boundary:
        frame, payload = boundary(n_tokens=8)
    elif member is Logits:
        frame, payload = logits(n_rows=8)
    [got] = Framer(SMALL).receive(raw(frame, payload))
    assert same(got, frame, payload)


def test_control_messages_pass_between_the_fragments_of_a_payload() -> None:
    frame, payload = boundary(n_tokens=8)
    first, *fragments = encode(frame, payload, 9, SMALL)
    assert len(fragments) == len(payload) / SMALL.fragment
    framer = Framer(SMALL)
    assert framer.receive(flat(first)) == []
    for nonce, fragment in enumerate(fragments[:-1], 1):
        assert framer.receive(flat(fragment)) == []
        assert framer.receive(raw(Pong(nonce))) == [Received(Pong(nonce))]
    [got] = framer.receive(flat(fragments[-1]))
    assert same(got, frame, payload)


def test_a_stream_number_is_free_again_once_its_payload_is_whole() -> None:
    framer = Framer(SMALL)
    for seq in range(1, 10):
        frame, payload = boundary(seq=seq)
        [got] = framer.receive(raw(frame, payload, stream=65535))
        assert same(got, frame, payload)


def test_pending_is_zero_exactly_between_two_frames() -> None:
    frame, payload = boundary(n_tokens=2)
    data = raw(Pong(1)) + raw(frame, payload) + raw(Pong(2))
    ends = {len(raw(Pong(1))), len(raw(Pong(1)) + raw(frame, payload)), len(data)}
    framer = Framer(SMALL)
    for place in range(len(data)):
        framer.receive(data[place : place + 1])
        assert (framer.pending == 0) == (place + 1 in ends), place


def test_a_payload_is_the_framers_own_copy_and_outlives_it() -> None:
    frame, payload = boundary()
    data = bytearray(raw(frame, payload))
    [got] = Framer(SMALL).receive(data)
    data[:] = bytes(len(data))
    assert same(got, frame, payload)


def test_the_limits_of_the_longest_legal_frames_are_met_exactly() -> None:
    for limits in (SMALL, evolve(FLASH, n_batch=64, n_vocab=512, boundary_width=16)):
        for frame, payload in (boundary(n_tokens=limits.n_batch, limits=limits), logits(1, 1, limits.n_batch, limits)):
            [got] = Framer(limits).receive(raw(frame, payload, limits=limits))
            assert same(got, frame, payload)
        tokens = Tokens(key(), 1, Expectation(0, DIGEST), (2**31 - 1,) * limits.n_batch, LogitsWanted.NONE, None)
        assert Framer(limits).receive(raw(tokens, limits=limits)) == [Received(tokens)]
        two = [boundary(session, n_tokens=limits.n_batch, limits=limits) for session in (1, 2)]
        framer = Framer(limits)
        for stream, (frame, _) in enumerate(two, 1):
            framer.receive(announcement(frame, stream))
        assert framer.pending == limits.under_way


# --- what the sender is told -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "payload", "match"),
    [
        (boundary()[0], None, "payload of 0 bytes; its fields say 16"),
        (boundary()[0], bytes(15), "payload of 15 bytes; its fields say 16"),
        (boundary()[0], bytes(17), "payload of 17 bytes; its fields say 16"),
        (msgspec.structs.replace(boundary()[0], payload=20), bytes(20), "announces a payload of 20 bytes"),
        (*boundary(n_tokens=9), "9 tokens; the link agreed on n_batch 8"),
        (*logits(n_rows=9), "9 rows; the link agreed on at most 8"),
        (Tokens(key(), 1, Expectation(0, DIGEST), (1,) * 9, LogitsWanted.NONE, None), None, "agreed on n_batch 8"),
        (Pong(1), b"x", "payload of 1 bytes; its fields say 0"),
        (Ping(1, b"\0\0x"), None, "other than zero"),
        (frames.Refused(key(), 1, frames.Refusal.INPUT, "x" * 4097), None, "breaks the schema"),
    ],
    ids=reasons,
)
def test_a_frame_that_breaks_a_limit_is_refused_to_its_sender(frame: Frame, payload: bytes | None, match: str) -> None:
    with pytest.raises(FrameError, match=match):
        encode(frame, payload, 1, SMALL)


def test_a_payload_may_be_any_flat_buffer() -> None:
    frame, payload = boundary(n_tokens=2)
    floats = memoryview(payload).cast("f", shape=[2, 4])
    buffers: tuple[Any, ...] = (payload, bytearray(payload), memoryview(payload), floats)
    for buffer in buffers:
        assert b"".join(map(flat, encode(frame, buffer, 1, SMALL))) == raw(frame, payload)


def test_fragments_are_views_of_the_payload_and_never_longer_than_agreed() -> None:
    frame, payload = boundary(n_tokens=7)
    limits = evolve(SMALL, fragment=30)
    _message, *fragments = encode(frame, payload, 1, limits)
    bodies = [body for _head, body in fragments if body is not None]
    assert [body.nbytes for body in bodies] == [30, 30, 30, 22]
    assert all(body.obj is payload for body in bodies)


# --- what is hostile is refused, before anything is allocated for it -------------------------------------------------


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (packet(0, b"x"), "kind 0"),
        (packet(3, b"x"), "kind 3"),
        (packet(255, b"x"), "kind 255"),
        (packet(MESSAGE, b"", length=0), "message of 0 bytes"),
        (packet(MESSAGE, b"", length=SMALL.message + 1), "agreed on 1.."),
        (packet(MESSAGE, b"", length=2**32 - 1), "message of 4294967295 bytes"),
        (packet(MESSAGE, b"\xc0"), "not a frame of this schema"),
        (packet(MESSAGE, encode_message(Pong(1)) + b"\0"), "not a frame of this schema"),
        (packet(MESSAGE, encode_message(Pong(1)), reserved=1), "reserved byte"),
        (packet(MESSAGE, encode_message(Pong(1)), 5), "Pong has no payload but names stream 5"),
        (packet(MESSAGE, encode_message(Ping(1, b"\0\1"))), "other than zero"),
        (packet(FRAGMENT, b"x", 1), "stream 1, which no frame announced"),
        (packet(FRAGMENT, b"x", 0), "stream 0, which no frame announced"),
        (announcement(boundary()[0], 0), "stream 0, which is taken or reserved"),
        (announcement(boundary(n_tokens=9)[0], 1), "n_batch 8"),
        (announcement(logits(n_rows=9)[0], 1), "9 rows"),
        (announcement(msgspec.structs.replace(boundary()[0], payload=0), 1), "announces a payload of 0 bytes"),
        (announcement(msgspec.structs.replace(boundary()[0], payload=2**63 - 1), 1), "announces a payload of 9"),
        (announcement(msgspec.structs.replace(logits()[0], payload=2**40), 1), "announces a payload of 1099511627776"),
    ],
    ids=reasons,
)
def test_hostile_bytes_are_refused_and_nothing_is_taken_after_them(data: bytes, match: str) -> None:
    refused(SMALL, data, match)


@pytest.mark.parametrize(
    ("after", "match"),
    [
        (packet(FRAGMENT, b"", 1, length=0), "fragment of 0 bytes"),
        (packet(FRAGMENT, bytes(17), 1), "fragment of 17 bytes"),
        (packet(FRAGMENT, b"", 1, length=2**32 - 1), "fragment of 4294967295 bytes"),
        (packet(FRAGMENT, bytes(16), 1) + packet(FRAGMENT, bytes(9), 1), "room for 8"),
        (packet(FRAGMENT, bytes(16), 2), "stream 2, which no frame announced"),
        (announcement(boundary(2)[0], 1), "stream 1, which is taken"),
        (
            packet(FRAGMENT, bytes(16), 1) + packet(FRAGMENT, bytes(8), 1) + packet(FRAGMENT, b"x", 1),
            "no frame announced",
        ),
        (announcement(boundary(2)[0], 2) + announcement(boundary(3)[0], 3) + announcement(boundary(4)[0], 4), "than 3"),
    ],
    ids=reasons,
)
def test_hostile_bytes_beside_a_payload_under_way_are_refused(after: bytes, match: str) -> None:
    limits = evolve(SMALL, n_vocab=6)
    begun = announcement(logits()[0], 1)
    framer = Framer(limits)
    assert framer.receive(begun) == []
    with pytest.raises(FrameError, match=match):
        feed_all(framer, after)


def test_payloads_under_way_together_are_bounded_in_bytes() -> None:
    limits = evolve(SMALL, streams=64)
    framer = Framer(limits)
    for stream in (1, 2):
        framer.receive(announcement(boundary(stream, n_tokens=limits.n_batch)[0], stream))
    assert framer.pending == limits.under_way
    with pytest.raises(FrameError, match="beside 256 bytes under way; the link agreed on 256"):
        framer.receive(announcement(boundary(3)[0], 3))


def test_a_payload_greater_than_that_bound_comes_alone() -> None:
    limits = evolve(SMALL, n_vocab=1000)
    frame, payload = logits(1, 1, 8, limits)
    assert len(payload) > limits.under_way
    [got] = Framer(limits).receive(raw(frame, payload, limits=limits))
    assert same(got, frame, payload)
    framer = Framer(limits)
    framer.receive(announcement(boundary()[0], 1))
    with pytest.raises(FrameError, match="beside 16 bytes"):
        framer.receive(announcement(frame, 2))


def test_a_sender_without_credit_is_refused() -> None:
    framer = Framer(SMALL)
    framer.allowance = 40
    for seq in (1, 2):
        framer.receive(raw(*boundary(seq=seq)))
    with pytest.raises(FrameError, match="payload of 16 bytes came; only 8 bytes of credit were left"):
        framer.receive(raw(*boundary(seq=3)))


def test_without_the_bound_on_all_payloads_the_test_of_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "under_way", 2**40)
    with pytest.raises(AssertionError):
        test_payloads_under_way_together_are_bounded_in_bytes()


# --- noise -----------------------------------------------------------------------------------------------------------


@functools.cache
def recording(seed: int) -> bytes:
    """What a busy link carries: every member, payloads interleaved."""
    chance = random.Random(seed)
    sent: list[tuple[Frame, bytes | None]] = [
        (extreme(type_of(member), False), None) for member in MEMBERS if member not in (Boundary, Logits)
    ]
    sent += [boundary(session, n_tokens=session) for session in range(1, 9)]
    sent += [logits(session, n_rows=3) for session in range(1, 4)]
    chance.shuffle(sent)
    return b"".join(flat(one) for one, _ in interleaved(sent, chance.randrange))


def noise() -> Iterator[tuple[random.Random, bytes]]:
    """1000 random byte strings; those that begin with a legal header get further."""
    for seed in range(1000):
        chance = random.Random(seed)
        data = chance.randbytes(chance.randint(1, 2000))
        if seed % 2:
            data = packet(MESSAGE, data[:200]) + data
        yield chance, data


def mutated() -> Iterator[tuple[random.Random, bytes]]:
    """1000 recordings with a few bytes flipped, dropped, doubled or added."""
    for seed in range(1000):
        chance = random.Random(seed)
        data = bytearray(recording(seed % 20))
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[place] ^= 1 << chance.randrange(8)
                case 1:
                    del data[place : place + chance.randint(1, 30)]
                case 2:
                    data[place:place] = data[place : place + chance.randint(1, 300)]
                case 3:
                    data[place:place] = chance.randbytes(chance.randint(1, 9))
        yield chance, bytes(data)


def test_a_recording_as_it_was_is_taken() -> None:
    chance = random.Random(0)
    got, error = feed(Framer(SMALL), recording(0), lambda: chance.randint(1, 200))
    assert error is None
    assert len(got) == len(MEMBERS) - 2 + 8 + 3


@pytest.mark.parametrize("corpus", [noise, mutated])
def test_a_thousand_bad_byte_strings_end_in_frame_errors_alone_within_the_limits(
    corpus: Callable[[], Iterator[tuple[random.Random, bytes]]],
) -> None:
    errors = 0
    for chance, data in corpus():
        _got, error = feed(Framer(SMALL), data, partial(chance.randint, 1, 400))
        errors += error is not None
    assert errors > 700


# --- memory ----------------------------------------------------------------------------------------------------------


def cost(data: bytes, limits: Limits = FLASH) -> int:
    """Most bytes allocated while a fresh framer takes ``data``."""
    framer = Framer(limits)
    tracemalloc.start()
    try:
        framer.receive(data)
    except FrameError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def _endless_tokens() -> bytes:
    """A message of 100 bytes that says it holds 2**20 token ids."""
    frame = Tokens(key(), 1, Expectation(0, DIGEST), (1,), LogitsWanted.NONE, None)
    body = encode_message(frame)
    place = body.rindex(b"\x91\x01")
    return packet(MESSAGE, body[:place] + b"\xdd" + struct.pack(">I", 2**20) + bytes(40))


@pytest.mark.parametrize(
    "data",
    [
        packet(MESSAGE, b"", length=2**32 - 1),
        packet(MESSAGE, b"", length=FLASH.message),
        packet(FRAGMENT, b"", 1, length=2**32 - 1),
        announcement(msgspec.structs.replace(boundary(limits=FLASH)[0], payload=2**62), 1),
        announcement(msgspec.structs.replace(logits(limits=FLASH)[0], payload=2**62), 1),
        announcement(msgspec.structs.replace(logits(limits=FLASH)[0], n_rows=2**32 - 1), 1),
        _endless_tokens(),
    ],
    ids=["endless", "longest", "fragment", "boundary", "logits", "rows", "tokens"],
)
def test_a_hostile_header_costs_less_than_64_kib(data: bytes) -> None:
    assert cost(data) < 64 * 1024


def test_an_announced_payload_costs_nothing_until_it_comes() -> None:
    """Also within the limits: it may be the other side itself that stated them."""
    wide = evolve(FLASH, n_batch=2**20)
    frame = Boundary(
        key(), 1, Expectation(0, DIGEST), (1,) * 600, LogitsWanted.NONE, None, 600 * 4 * FLASH.boundary_width
    )
    with pytest.raises(FrameError, match="n_batch 512"):
        Framer(FLASH).receive(announcement(frame, 1))
    for limits in (FLASH, wide):
        assert cost(announcement(frame, 1), limits) < 64 * 1024
    huge = packet(MESSAGE, encode_message(msgspec.structs.replace(frame, tokens=(1,) * 2**20)), 1)
    assert cost(huge) < 64 * 1024


@pytest.mark.parametrize("n_tokens", [1, 8, 64])
def test_a_payload_costs_its_own_size_once(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(n_bytes: int) -> memoryview:
        made.append(n_bytes)
        return memoryview(bytearray(n_bytes))

    monkeypatch.setattr(framing, "new_buffer", counted)
    frame, payload = boundary(n_tokens=n_tokens, limits=FLASH)
    assert len(payload) <= cost(raw(frame, payload, limits=FLASH)) < len(payload) + 64 * 1024
    assert made == [len(payload)]


def test_a_long_payload_takes_memory_as_it_comes() -> None:
    """Its buffer is a mapping, of which the system gives what is written."""
    frame, payload = boundary(n_tokens=512, limits=FLASH)
    data = raw(frame, payload, limits=FLASH)
    framer, resident = Framer(FLASH), psutil.Process().memory_info
    before = resident().rss
    framer.receive(data[:10_000])
    assert resident().rss - before < 3 << 20  # one huge page, and what else moves
    [got] = framer.receive(data[10_000:])
    assert same(got, frame, payload)


def test_a_payload_that_finds_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(n_bytes: int) -> memoryview:
        raise MemoryError("all is taken")

    monkeypatch.setattr(framing, "new_buffer", full)
    frame, payload = boundary(n_tokens=4)
    refused(SMALL, raw(frame, payload), "payload of 64 bytes cannot be taken: all is taken")
    framer = Framer(SMALL)
    framer.receive(raw(frame, payload)[:-88])
    with pytest.raises(FrameError, match="cannot be taken"):
        _ = framer.room
    assert framer.error is not None
    assert framer.pending == 0
