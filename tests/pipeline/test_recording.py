"""What really crosses between stages: every byte of every memory link is recorded and accounted for.

Between stages a frame's payload is exactly the boundary, its header at most 256 bytes plus 5 per token id, and neither
grows with the context.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import trio
from attrs import define, field
from conversations import reference, seen, take
from msgspec.structs import replace
from pipeline.harness import CONTEXT, MODEL, THREE, kinds, open_stages

from dgr.client.pipeline import open_pipeline_on
from dgr.cluster import local
from dgr.cluster.local import open_cluster
from dgr.core.route import Route, StageRef, parse_split
from dgr.testing.engines.fake import FakeEngine, FakeModel
from dgr.wire import Limits, frames, memory_transports
from dgr.wire.framing import decode_message

PROMPT = [token % 250 for token in range(40)]
_MESSAGE, _FRAGMENT = 1, 2


@define
class Recording:
    """Bytes of one direction of one link."""

    data: bytearray = field(factory=bytearray)

    def packets(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, stream, body) of every packet; nothing may be left over."""
        at = 0
        while at < len(self.data):
            length, kind, stream = struct.unpack_from("<IBxH", self.data, at)
            body = bytes(self.data[at + 8 : at + 8 + length])
            assert len(body) == length
            yield kind, stream, body
            at += 8 + length

    def frames(self) -> list[tuple[frames.Frame, int, int]]:
        """(frame, bytes of its header, bytes of its payload)."""
        found: list[tuple[frames.Frame, int]] = []
        payloads: list[int] = []
        streams: dict[int, int] = {}
        for kind, stream, body in self.packets():
            if kind == _MESSAGE:
                if stream:
                    streams[stream] = len(found)
                found.append((decode_message(body), len(body)))
                payloads.append(0)
            else:
                assert kind == _FRAGMENT
                payloads[streams[stream]] += len(body)
        return [(frame, header, payload) for (frame, header), payload in zip(found, payloads, strict=True)]


class _Tee(trio.abc.Stream):
    """A transport whose sent bytes are kept."""

    def __init__(self, inner: trio.abc.Stream, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._recording.data += bytes(data)
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """All directions of all links that are made from now on."""
    made: list[Recording] = []

    def recorded() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        near, far = memory_transports()
        made.extend([Recording(), Recording()])
        return _Tee(near, made[-2]), _Tee(far, made[-1])

    monkeypatch.setattr(local, "memory_transports", recorded)
    return made


def between_stages(recordings: list[Recording]) -> list[tuple[frames.Frame, int, int]]:
    """Frames of links that carry boundaries, and those that come back on them."""
    pairs = zip(recordings[::2], recordings[1::2], strict=True)
    marks = (frames.Boundary, frames.AwaitReady)
    return [
        entry
        for there, back in pairs
        if any(isinstance(frame, marks) for frame, _, _ in there.frames())
        for entry in (*there.frames(), *back.frames())
    ]


async def test_between_stages_there_is_the_boundary_and_nothing_else(
    autojump_clock: trio.abc.Clock, recordings: list[Recording]
) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        answer = await take(session.generate(PROMPT, max_tokens=30))
        assert answer == reference(PROMPT, 30)
    crossed = between_stages(recordings)
    assert {type(frame) for frame, _, _ in crossed} == {
        frames.Boundary,
        frames.AwaitReady,
        frames.Ready,
        frames.Credit,
    }
    tokens = 0
    for frame, header, payload in crossed:
        if isinstance(frame, frames.Boundary):
            assert payload == frame.payload == len(frame.tokens) * MODEL.width * 4
            assert header <= 256 + 5 * len(frame.tokens)
            tokens += len(frame.tokens)
        else:
            assert payload == 0
            assert header <= 256
    assert tokens == 2 * (len(PROMPT) + 29)


async def test_neither_header_nor_payload_grows_with_the_context(
    autojump_clock: trio.abc.Clock, recordings: list[Recording]
) -> None:
    context = replace(CONTEXT, n_ctx=700)
    async with (
        open_stages(THREE, context=context) as stages,
        stages.pipeline(THREE) as pipeline,
        pipeline.session() as session,
    ):
        for _ in range(15):
            await take(session.generate(PROMPT, max_tokens=3, stop=()))
    decoded = [
        (frame.expect.position, header, payload)
        for frame, header, payload in between_stages(recordings)
        if isinstance(frame, frames.Boundary) and len(frame.tokens) == 1
    ]
    positions = [position for position, _, _ in decoded]
    assert max(positions) > 600
    assert {payload for _, _, payload in decoded} == {MODEL.width * 4}
    # The position is written as a msgpack integer: one to five bytes. Nothing else of a header depends on the past.
    sizes = {position: header for position, header, _ in decoded}
    assert max(sizes.values()) - min(sizes.values()) <= 4 + 4 + 4  # position, sequence number, token id
    assert max(sizes[position] for position in positions if position >= 256) <= min(sizes.values()) + 8


async def test_what_a_pipeline_sends_has_no_payload_at_all(
    autojump_clock: trio.abc.Clock, recordings: list[Recording]
) -> None:
    async with open_stages(THREE) as stages, stages.pipeline(THREE) as pipeline, pipeline.session() as session:
        await take(session.generate(PROMPT, max_tokens=3))
        await session.logits([1, 2], lambda _position, _rows: None)
        await session.state_summaries()
    payloads: dict[type, int] = {}
    for recording in recordings:
        for frame, _, payload in recording.frames():
            payloads[type(frame)] = payloads.get(type(frame), 0) + payload
    assert {kind for kind, size in payloads.items() if size} == {frames.Boundary, frames.Logits}
    assert payloads[frames.Logits] == 2 * MODEL.n_vocab * 4


async def test_long_boundaries_of_one_session_arrive_in_order(
    autojump_clock: trio.abc.Clock, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk is short, and fragments of all payloads under way take turns: it must not overtake."""
    monkeypatch.setattr(Limits, "unbroken", lambda limits: limits)  # cut up as between processes
    model = FakeModel(n_layers=2, n_vocab=64, width=3000)
    context = replace(CONTEXT, n_ctx=128, n_batch=48, n_ubatch=48, n_seq_max=2)
    route = Route(tuple(StageRef(str(layers), layers) for layers in parse_split("0:1,1:2", 2)))
    async with open_cluster() as cluster:
        for ref in route.stages:
            await cluster.start(ref.address, FakeEngine(ref.layers, context, model=model))
        async with open_pipeline_on(cluster.connect, route) as pipeline, pipeline.session() as session:
            events = pipeline.events()
            await session.prefill([token % 64 for token in range(97)])
            assert session.committed == 97
            assert kinds(seen(events)) == ["Prefilled"]
    sizes = [len(frame.tokens) for frame, _, _ in between_stages(recordings) if isinstance(frame, frames.Boundary)]
    assert sizes == [48, 48, 1]
    fragments = [len(body) for recording in recordings for kind, _, body in recording.packets() if kind == _FRAGMENT]
    assert max(fragments) <= 256 * 1024
    assert len(fragments) > 4
