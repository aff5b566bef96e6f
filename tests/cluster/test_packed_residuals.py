"""Stages that have agreed to pack residuals: the same bits, fewer bytes, and what a stage before may get wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from cluster.remote_stages import (
    CONTEXT,
    PROMPT,
    THREE,
    answer_of,
    denied,
    open_hosts,
    stage,
)
from msgspec.structs import replace

from dgr.cluster import server
from dgr.core.load import Side
from dgr.core.values import Wire
from dgr.errors import InputError
from dgr.protocol import lossless, planes
from dgr.testing.engines.fake import FakeModel

PACKED = replace(CONTEXT, wire=Wire.F32_ZSTD)
#: Its residuals are long enough to have something packed.
WIDE = FakeModel(width=96)


async def _rows(wire: Wire) -> tuple[bytes, int, list[int]]:
    """Logits over three stages, the bytes of residuals between them, and an answer."""
    async with open_hosts(context=replace(CONTEXT, wire=wire), model=WIDE) as hosts:
        stages = await hosts.start_all(THREE)
        rows = bytearray()
        async with hosts.pipeline(stages) as pipeline:
            async with pipeline.session() as session:
                await session.logits(PROMPT, lambda _position, values: rows.extend(values))
            sent = sum(
                traffic.bytes_sent
                for host in stages
                for (side, _), traffic in host.server.statistics().traffic.items()
                if side is Side.NEXT
            )
            return bytes(rows), sent, await answer_of(pipeline)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whether residuals are packed on the event loop, or in threads."""
    if request.param == "threads":
        monkeypatch.setattr(lossless, "_AT_ONCE", 0)


@pytest.mark.parametrize("at_once", ["loop", "threads"], indirect=True)
async def test_packed_residuals_give_the_same_bits(at_once: None) -> None:
    plain, packed = await _rows(Wire.F32), await _rows(Wire.F32_ZSTD)
    assert packed[0] == plain[0]
    assert packed[2] == plain[2]
    assert packed[1] < plain[1]


async def test_a_stage_that_packs_other_bits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = await _rows(Wire.F32)
    pack = planes.pack

    def mutant(payload: memoryview) -> memoryview | None:
        values = np.frombuffer(payload, np.uint32) ^ 0x10000
        return pack(values.tobytes())

    monkeypatch.setattr(planes, "pack", mutant)
    assert (await _rows(Wire.F32_ZSTD))[0] != plain[0]


def _spoilt(spoil: Callable[[bytearray], None], payload: bytes | memoryview) -> memoryview | None:
    packed = _PACK(payload)
    if packed is None:
        return None
    spoilt = bytearray(packed)
    spoil(spoilt)
    return memoryview(spoilt)


_PACK = planes.pack


def _magic(packed: bytearray) -> None:
    at = packed.index(b"\x28\xb5\x2f\xfd")
    packed[at] ^= 0xFF


def _size(packed: bytearray) -> None:
    packed[packed.index(b"\x28\xb5\x2f\xfd") + 5] ^= 1


@pytest.mark.parametrize("spoil", [_magic, _size])
async def test_what_does_not_unpack_ends_its_request_and_nothing_else(
    spoil: Callable[[bytearray], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_hosts(context=PACKED, model=WIDE) as hosts:
        stages = await hosts.start_all(THREE)
        async with hosts.pipeline(stages) as pipeline:
            with monkeypatch.context() as wrong:
                wrong.setattr(planes, "pack", partial(_spoilt, spoil))
                with pytest.raises(InputError, match="a packed residual"):
                    await answer_of(pipeline)
            assert await answer_of(pipeline) == (await _rows(Wire.F32))[2]
        await hosts.assert_empty()


async def test_stages_must_agree_on_it() -> None:
    async with open_hosts(context=PACKED) as hosts:
        host = await hosts.start("2:6")
        said = await denied(host.address, stage("127.0.0.1:7701"))
        assert "f32+zstd" in said
        assert "f32" in said


async def test_a_stage_without_the_library_does_not_begin_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_wire: Wire) -> None:
        raise InputError("no library")

    monkeypatch.setattr(server, "require_packer", refuse)
    with pytest.RaisesGroup(InputError, flatten_subgroups=True):
        async with open_hosts(context=PACKED) as hosts:
            await hosts.start("0:6")
