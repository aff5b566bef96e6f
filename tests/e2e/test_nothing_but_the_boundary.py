"""What crosses between stages is the boundary and nothing else: every byte on every link is recorded and searched.

That no message *can* carry cache rows is shown on the schema, beside the wire's own tests. Here is what does travel: the
size of every frame over a conversation of growing context, and a search for the rows that the caches hold.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import trio
from attrs import evolve, frozen
from e2e.running import Mutate, Open
from fixture_types import Prompt
from msgspec.structs import replace

import dgr.cluster.local
from dgr.client.session import ClientSession
from dgr.core.values import ContextParams, Expectation, Key, LogitsWanted
from dgr.engine.base import Output, Work
from dgr.testing.engines.mutants import Mutant
from dgr.testing.state_inspector import InspectedEngine
from dgr.wire import frames, memory_transports
from dgr.wire.framing import decode_message

CONTEXT = ContextParams(n_ctx=512, n_batch=128, n_ubatch=128)
SPLIT = "0:2,2:4,4:7"
#: Bytes of a row that are searched for at a time.
PIECE = 16


class Tap(trio.abc.Stream):
    """A transport that keeps what is sent into it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.sent = bytearray()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self.stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self.stream.aclose()


@pytest.fixture
def taps(monkeypatch: pytest.MonkeyPatch) -> list[Tap]:
    """Every end of every link made from now on."""
    made: list[Tap] = []

    def tapped() -> tuple[Tap, Tap]:
        near, far = map(Tap, memory_transports())
        made.extend((near, far))
        return near, far

    monkeypatch.setattr(dgr.cluster.local, "memory_transports", tapped)
    return made


@frozen
class Crossing:
    """One frame as it went over a link."""

    frame: frames.Frame
    #: Bytes of the message packet, its header included.
    header: int
    #: The payload's fragments, put together.
    payload: bytes


def crossings(sent: bytes) -> Iterator[Crossing]:
    """The frames in a recording; read here from the packet layout itself, not with the product's framer."""
    at = 0
    payloads: dict[int | tuple[int, int], bytearray] = {}
    opened: list[tuple[frames.Frame, int, bytearray]] = []
    while at < len(sent):
        length, kind, zero, stream = struct.unpack_from("<IBBH", sent, at)
        body = sent[at + 8 : at + 8 + length]
        assert (len(body), zero) == (length, 0)
        at += 8 + length
        if kind == 1:
            opened.append((decode_message(body), 8 + length, payloads.setdefault((stream, len(opened)), bytearray())))
            if stream:
                payloads[stream] = opened[-1][2]
        else:
            assert kind == 2
            payloads[stream] += body
    for frame, header, payload in opened:
        yield Crossing(frame, header, bytes(payload))


def between_stages(taps: Iterable[Tap]) -> list[Crossing]:
    """Everything that went over the links between stages."""
    found = []
    for tap in taps:
        recording = list(crossings(bytes(tap.sent)))
        if any(isinstance(crossing.frame, frames.Boundary | frames.Ready) for crossing in recording):
            found += recording
    return found


def wrong_sizes(recording: Iterable[Crossing], width: int) -> list[str]:
    """Frames that are larger than the boundary of their own tokens allows."""
    wrong = []
    for crossing in recording:
        tokens = len(crossing.frame.tokens) if isinstance(crossing.frame, frames.Boundary) else 0
        if len(crossing.payload) != tokens * width * 4:
            wrong.append(f"{type(crossing.frame).__name__}: payload of {len(crossing.payload)} bytes, {tokens} tokens")
        if crossing.header > 256 + 5 * tokens:
            wrong.append(f"{type(crossing.frame).__name__}: header of {crossing.header} bytes, {tokens} tokens")
    return wrong


class Collector(Mutant):
    """Changes nothing; notes every row that any component of its stage holds after every run."""

    def __init__(self, engine: InspectedEngine | Collector, pieces: set[bytes]) -> None:
        super().__init__(engine)
        self.probed = engine
        self.pieces = pieces

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = self.engine.run(batch)
        for component, layer in self.probed.owned():
            for row in self.probed.rows(component, layer):
                if any(row):
                    self.pieces.update(row[at : at + PIECE] for at in range(0, len(row) - PIECE + 1, PIECE))
        return outputs


def occurrences(pieces: set[bytes], recording: bytes) -> list[bytes]:
    """Pieces that occur anywhere in a recording, at any offset; pieces of a few repeated bytes say nothing."""
    pieces = {piece for piece in pieces if len(set(piece)) > 4}
    heads = np.array(sorted({piece[:8] for piece in pieces}), dtype="S8").view("<u8")
    found = []
    for shift in range(8):
        words = np.frombuffer(recording, "<u8", offset=shift, count=(len(recording) - shift) // 8)
        for index in np.nonzero(np.isin(words, heads))[0]:
            at = 8 * int(index) + shift
            if recording[at : at + PIECE] in pieces:
                found.append(recording[at : at + PIECE])
    return found


def everything(taps: Sequence[Tap]) -> bytes:
    """All bytes of all links as sent, and all payloads put together."""
    return b"".join(bytes(tap.sent) for tap in taps) + b"".join(
        crossing.payload for tap in taps for crossing in crossings(bytes(tap.sent))
    )


async def converse(session: ClientSession, prompt: Prompt) -> None:
    """Turns that make the context grow to some hundreds of tokens."""
    for seed, size in enumerate((1, 5, 64, 130, 200)):
        async for _ in session.generate(prompt(size, seed=seed), max_tokens=4, stop=()):
            pass


async def test_frames_have_the_boundarys_size_and_do_not_grow(
    small: Path, prompt: Prompt, open_stages: Open, taps: list[Tap]
) -> None:
    async with open_stages(small, SPLIT, CONTEXT, chunk=64) as running, running.pipeline.session() as session:
        await converse(session, prompt)
        width = running.engines[0].describe().width_out
        committed = session.committed
    recording = between_stages(taps)
    boundaries = [
        (crossing.frame, crossing.header) for crossing in recording if isinstance(crossing.frame, frames.Boundary)
    ]
    others = frames.Boundary | frames.AwaitReady | frames.Ready | frames.Credit
    assert all(isinstance(crossing.frame, others) for crossing in recording)
    assert sum(len(frame.tokens) for frame, _ in boundaries) == 2 * committed  # two links
    assert wrong_sizes(recording, width) == []
    single = [header for frame, header in boundaries if len(frame.tokens) == 1]
    assert boundaries[-1][0].expect.position > 400
    assert max(single) - min(single) <= 8  # integers become wider, nothing else


def collecting(n_stages: int, pieces: set[bytes]) -> dict[int, Mutate]:
    return {stage: lambda engine: Collector(engine, pieces) for stage in range(n_stages)}


@pytest.mark.parametrize("type_k", ["f16", "f32"])
async def test_no_row_of_any_cache_occurs(
    small: Path, prompt: Prompt, open_stages: Open, taps: list[Tap], type_k: str
) -> None:
    pieces: set[bytes] = set()
    context = replace(CONTEXT, type_k=type_k)
    async with (
        open_stages(small, SPLIT, context, chunk=64, mutate=collecting(3, pieces)) as running,
        running.pipeline.session() as session,
    ):
        await converse(session, prompt)
        await session.state_summaries()
    assert len(pieces) > 10_000
    recording = everything(taps)
    assert len(recording) > 500_000
    assert occurrences(pieces, recording) == []


# --- the proof can fail -----------------------------------------------------------------------------------------------


class Smuggler(Mutant):
    """A head that hides one row of one component in what it hands on."""

    def __init__(
        self, engine: InspectedEngine | Collector, component: str, hide: Callable[[bytes, bytes], bytes]
    ) -> None:
        super().__init__(engine)
        self.probed = engine
        self.component = component
        self.hide = hide

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = self.engine.run(batch)
        if self.engine.position(0) < 200:  # every component holds rows by then
            return outputs
        component, layer = next(key for key in self.probed.owned() if key[0] == self.component)
        row = next(row for row in self.probed.rows(component, layer) if any(row))
        return [evolve(output, residual=self.hide(bytes(output.residual or b""), row)) for output in outputs]


def inside(residual: bytes, row: bytes) -> bytes:
    """At an odd offset, in place of other bytes."""
    return (residual[:13] + row[: len(residual) - 13] + residual[13 + len(row) :])[: len(residual)]


def behind(residual: bytes, row: bytes) -> bytes:
    return residual + row


@pytest.mark.parametrize("component", ["raw_swa", "csa", "hca", "indexer", "csa_ring", "hca_ring", "indexer_ring"])
async def test_a_smuggled_row_is_found(
    small: Path, prompt: Prompt, open_stages: Open, taps: list[Tap], component: str
) -> None:
    pieces: set[bytes] = set()
    mutate = {0: lambda engine: Smuggler(Collector(engine, pieces), component, inside)}
    async with (
        open_stages(small, "0:4,4:7", CONTEXT, chunk=64, mutate=mutate) as running,
        running.pipeline.session() as session,
    ):
        with contextlib.suppress(dgr.DgrError):  # some rows are no floats that a stage would take
            await converse(session, prompt)
    assert occurrences(pieces, everything(taps)) != []


async def test_a_row_behind_the_boundary_cannot_be_sent(
    small: Path, prompt: Prompt, open_stages: Open, taps: list[Tap]
) -> None:
    smuggle = {0: lambda engine: Smuggler(engine, "raw_swa", behind)}
    async with (
        open_stages(small, SPLIT, CONTEXT, chunk=64, mutate=smuggle) as running,
        running.pipeline.session() as session,
    ):
        with pytest.raises(dgr.DgrError):
            await session.prefill(prompt(250))
        width = running.engines[0].describe().width_out
    assert wrong_sizes(between_stages(taps), width) == []


def test_a_frame_that_grew_is_found() -> None:
    key = Key(bytes(16), 1, 1)
    boundary = frames.Boundary(key, 1, Expectation(0, bytes(16)), (1, 2), LogitsWanted.NONE, None, payload=2048)
    assert wrong_sizes([Crossing(boundary, 80, bytes(2048))], 256) == []
    assert wrong_sizes([Crossing(boundary, 80, bytes(2048 + 64))], 256) != []
    assert wrong_sizes([Crossing(boundary, 256 + 5 * 2 + 1, bytes(2048))], 256) != []
    assert wrong_sizes([Crossing(frames.Ready(bytes(16), 1), 30, bytes(64))], 256) != []
