"""What is fuzzed with coverage as the guide: readers of bytes that strangers send or leave, each with objects to begin with.

A target takes any bytes and raises only what is a fault: refusals of dgr's own are caught here. None of them knows a fuzzer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import msgspec
from attrs import frozen
from wire.wire_samples import MEMBERS, SMALL, boundary, extreme, logits, raw, type_of

from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import decode_manifest, encode_manifest
from dgr.cluster.route_file import format_route_file, read_route_file
from dgr.errors import ArtifactError, DgrError, FrameError, InputError
from dgr.gguf.reader import MetaArray, read_gguf
from dgr.selftest.fixture.writer import write_fixture
from dgr.serving.api.errors import ApiError
from dgr.serving.api.fields import (
    ChatFields,
    CompletionFields,
    MessagesFields,
    ResponsesFields,
    decode_body,
    read_fields,
)
from dgr.testing.hostile_files.kinds import ROUTE
from dgr.wire import frames
from dgr.wire.framing import HEADER_SIZE, Framer, decode_message, encode_message


@frozen
class Target:
    """A reader, and whole objects that it reads."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


# --- the wire ---------------------------------------------------------------------------------------------------------


@cache
def _frames() -> list[frames.Frame]:
    """The least and the greatest of every frame there is."""
    found: list[frames.Frame] = []
    for member in MEMBERS:
        found += [extreme(type_of(member), greatest, 3) for greatest in (False, True)]
    return found


def _spoken() -> list[bytes]:
    """Frames as packets, with their payloads, alone and one after another."""
    with_payload: list[tuple[frames.Frame, bytes]] = [boundary(n_tokens=3), logits(n_rows=2), boundary(session=2)]
    said = [raw(frame, payload) for frame, payload in with_payload]
    for frame in _frames():
        try:
            said.append(raw(frame))
        except FrameError:
            continue  # one with a payload, or larger than these limits
    return [*said, b"".join(said)]


#: Payload bytes that may be under way beside each other, or in one payload.
_MOST_HELD = max(SMALL.under_way, SMALL.n_batch * SMALL.n_vocab * 4)


def run_framer(data: bytes) -> None:
    """What comes out does not depend on how the bytes were chopped, and no more is held than was agreed on."""
    step = 1 + (data[0] if data else 0)
    whole, chopped = Framer(SMALL), Framer(SMALL)
    once = _received(whole, [data])
    again = _received(chopped, [data[begin : begin + step] for begin in range(0, len(data), step)])
    assert once == again, "another chopping, other frames"
    assert (whole.error is None) == (chopped.error is None)
    assert whole.pending <= SMALL.message + HEADER_SIZE + _MOST_HELD


def _received(framer: Framer, parts: list[bytes]) -> list[tuple[frames.Frame, bytes | None]]:
    found = []
    try:
        for part in parts:
            found += framer.receive(part)
    except FrameError:
        pass
    return [(one.frame, None if one.payload is None else bytes(one.payload)) for one in found]


def run_frames(data: bytes) -> None:
    """A frame that was read is written as what reads the same."""
    try:
        frame = decode_message(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    again = decode_message(encode_message(frame))
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(frame)  # NaN is not equal to itself


def _bodies() -> list[bytes]:
    return [encode_message(frame) for frame in _frames()]


# --- files ------------------------------------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="dgr-guided-"))


def _there(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def run_route(data: bytes) -> None:
    try:
        file = read_route_file(_there("route.toml", data))
        text = format_route_file(file)
    except DgrError:
        return
    again = read_route_file(_there("again.toml", text.encode()))
    assert (again.stages, again.context) == (file.stages, file.context)


def run_manifest(data: bytes) -> None:
    try:
        manifest = decode_manifest(data, Path("m"))
    except ArtifactError:
        return
    assert decode_manifest(encode_manifest(manifest), Path("m")) == manifest
    assert len(manifest.identity) == 64


@cache
def _model() -> Path:
    path = _folder() / "seed.gguf"
    write_fixture(path, preset="min", layers=1, sparse=True)
    return path


def _headers() -> list[bytes]:
    """A header, and what is left of it with fewer weights: the reader does not read them."""
    data, end = _model().read_bytes(), read_gguf(_model()).data_offset
    return [data[:end], data[: end + 4096], b"GGUF\3\0\0\0" + bytes(16)]


def run_gguf(data: bytes) -> None:
    try:
        file = read_gguf(_there("m.gguf", data))
    except ArtifactError:
        return
    for stored in file.metadata.values():
        if isinstance(stored.value, MetaArray):
            assert len(stored.value.values()) == len(stored.value)
    assert all(tensor.offset + tensor.n_bytes <= file.file_bytes for tensor in file.tensors.values())


def _manifests() -> list[bytes]:
    path = _folder() / "whole.gguf"
    write_fixture(path, preset="min", layers=1)
    return [encode_manifest(Artifact.open(path).read_manifest()), b'{"metadata":"","tensors":[],"version":1}']


# --- HTTP -------------------------------------------------------------------------------------------------------------


def run_bodies(data: bytes) -> None:
    """A body is fields, or a refusal of the client's act."""
    for kind in (ChatFields, CompletionFields, ResponsesFields, MessagesFields):
        try:
            fields = read_fields(decode_body(data), kind)
            sampling = fields.sampling(fields.seed_or_random(), 0)
            msgspec.msgpack.encode(sampling)
        except ApiError as error:
            told = error
        except InputError:
            continue
        else:
            continue
        assert 400 <= told.status < 500, "not the client's act"
        told.body()


def _requests() -> list[bytes]:
    return [
        b'{"messages":[{"role":"user","content":"hi"}],"n":2,"temperature":0.5,"stop":["a","b"],"logprobs":true}',
        b'{"prompt":["a",[1,2]],"max_tokens":3,"top_p":0.9,"seed":1,"stream":true,"stream_options":{"include_usage":true}}',
        b'{"input":"hi","include":["message.output_text.logprobs"],"max_output_tokens":3,"min_p":0.1}',
        b'{"messages":[],"stop_sequences":["x"],"max_tokens":1,"top_k":-1,"stop_token_ids":[1]}',
    ]


TARGETS: Mapping[str, Target] = {
    "framer": Target(run_framer, _spoken),
    "frames": Target(run_frames, _bodies),
    "route": Target(run_route, lambda: [ROUTE]),
    "manifest": Target(run_manifest, _manifests),
    "gguf": Target(run_gguf, _headers),
    "bodies": Target(run_bodies, _requests),
}
