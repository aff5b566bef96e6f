"""Residuals in fewer bytes: every bit of every value comes back, and what was packed otherwise is refused unpacked."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st
from wire.wire_samples import SMALL, boundary

from dgr.core.values import ContextParams, Numerics, Wire
from dgr.errors import FrameError, InputError
from dgr.protocol import planes
from dgr.protocol.lossless import require_packer
from dgr.protocol.planes import pack, unpack
from dgr.wire.framing import Limits

#: Zeros, the least and the greatest subnormal, the least and the greatest normal value, the bound of residuals, what no
#: engine lets pass, and NaNs with something in them.
SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x58635FA9, 0x3F800000, 0x7F800000,
    0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF,
]  # fmt: skip


def floats(bits: Any) -> bytes:
    return np.asarray(bits, np.uint32).tobytes()


@pytest.mark.parametrize("bits", SPECIAL)
def test_every_special_value_comes_back(bits: int) -> None:
    data = floats([bits] * 64)
    packed = pack(data)
    assert packed is not None
    assert len(data) * 3 // 4 < packed.nbytes < len(data)
    assert unpack(packed, len(data)) == data


def test_every_exponent_and_sign_comes_back() -> None:
    data = floats(np.repeat(np.arange(512, dtype=np.uint32), 64) << 23 | 0x2AAAAA)
    packed = pack(data)
    assert packed is not None
    assert unpack(packed, len(data)) == data


@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from(SPECIAL)), st.integers(1, 3000), st.floats(0, 30))
@example(0, [], 1, 1.0)
def test_any_values_come_back(seed: int, special: list[int], count: int, spread: float) -> None:
    values = np.random.default_rng(seed).normal(0, 1, count) * np.exp(spread)
    data = floats([*special, *values.astype(np.float32).view(np.uint32)])
    packed = pack(data)
    if packed is not None:
        assert packed.nbytes < len(data)
        assert unpack(packed, len(data)) == data


def test_a_plane_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(0, 1, 512).astype(np.float32).tobytes()
    packed = pack(values)
    assert packed is not None
    monkeypatch.setattr(planes, "_bytes_of", lambda data: np.frombuffer(bytes(data), np.uint8).copy())
    assert unpack(packed, len(values)) != values


def test_what_does_not_pack_is_sent_as_it_is() -> None:
    assert pack(np.random.default_rng(0).bytes(4 * 4096)) is None
    assert pack(floats([1])) is None
    assert pack(b"") is None


def test_residuals_of_a_normal_spread_are_a_sixth_shorter() -> None:
    values = np.random.default_rng(0).normal(0, 1, 16384).astype(np.float32)
    packed = pack(values.tobytes())
    assert packed is not None
    assert packed.nbytes < 0.85 * values.nbytes


# --- what comes from elsewhere ---------------------------------------------------------------------------------------

N = 256
_REST = bytes(3 * N)


def _frame(data: bytes, **options: Any) -> bytes:
    return bytes(zstandard.ZstdCompressor(level=1, **options).compress(data))


def _skippable(n_bytes: int) -> bytes:
    return (0x184D2A50).to_bytes(4, "little") + n_bytes.to_bytes(4, "little") + bytes(n_bytes)


BAD = {
    "more values": (_frame(bytes(N + 1)), "257 bytes"),
    "fewer values": (_frame(bytes(N - 1)), "255 bytes"),
    "a bomb": (_frame(bytes(1 << 30)), f"{1 << 30} bytes"),
    "no size": (_frame(bytes(1 << 20), write_content_size=False), "zstd frame of"),
    "a size that lies": (_frame(bytes(1 << 16)), "65536"),
    "nothing": (b"", "no zstd frame"),
    "not zstd": (b"x" * 40, "no zstd frame"),
    "cut": (_frame(bytes(range(N)))[:-3], "a packed residual"),
    "a second frame": (_frame(bytes(N)) + _frame(bytes(N)), "a packed residual"),
    "more behind it": (_frame(bytes(N)) + b"x", "a packed residual"),
    "skippable": (_skippable(N), "a packed residual"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_was_packed_otherwise_is_refused(name: str) -> None:
    frame, said = BAD[name]
    with pytest.raises(FrameError, match=said):
        unpack(_REST + frame, 4 * N)


@pytest.mark.parametrize("mutant", [False, True])
def test_a_bomb_is_refused_before_it_is_unpacked(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = planes._codec()
    begun: list[int] = []

    class Watched:
        def decompress(self, data: bytes, **_options: Any) -> bytes:
            begun.append(len(data))
            return b""

    class Careless:
        content_size, dict_id = N, 0

    monkeypatch.setattr(codec, "unpacker", Watched())
    if mutant:
        monkeypatch.setattr(zstandard, "get_frame_parameters", lambda _: Careless)
    with pytest.raises(FrameError):
        unpack(_REST + BAD["a bomb"][0], 4 * N)
    assert bool(begun) is mutant


# --- what a link takes -----------------------------------------------------------------------------------------------

PACKS = evolve(SMALL, wire=Wire.F32_ZSTD)
ROW = 4 * SMALL.boundary_width


@pytest.mark.parametrize(
    ("limits", "size", "taken"),
    [
        (PACKS, 8 * ROW, True),
        (PACKS, 8 * ROW - 1, True),
        (PACKS, 6 * ROW + 1, True),
        (PACKS, 6 * ROW, False),
        (PACKS, 0, False),
        (PACKS, 8 * ROW + 1, False),
        (SMALL, 8 * ROW - 1, False),
    ],
)
def test_a_packed_payload_saves_less_than_a_quarter(limits: Limits, size: int, taken: bool) -> None:
    frame = msgspec.structs.replace(boundary(n_tokens=8, limits=SMALL)[0], payload=size)
    if taken:
        assert limits.payload(frame) == size
    else:
        with pytest.raises(FrameError, match="announces a payload"):
            limits.payload(frame)


def test_nothing_is_promised_less_for_it() -> None:
    for numerics in Numerics:
        assert ContextParams(numerics=numerics, wire=Wire.F32_ZSTD).wire.packs
    assert not Wire.F32_ZSTD.rounds
    assert [wire for wire in Wire if wire.rounds] == [Wire.BF16, Wire.F16, Wire.Q8]


def test_without_its_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_packer(Wire.F32_ZSTD)
    monkeypatch.delitem(sys.modules, "dgr.protocol.planes")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InputError, match=r"wire f32\+zstd needs zstandard: install dgr with its extra `zstd`"):
        require_packer(Wire.F32_ZSTD)
    require_packer(Wire.F32)
