"""The union of messages: it is closed, it is small, and no member can carry cache contents."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, inspect
from narrow import as_a, present
from wire.wire_samples import DIGEST, FLASH, MEMBERS, SMALL, boundary, extreme, key, raw, type_of, values

from dgr.core.values import ContextParams, Expectation, Key, LogitsWanted, SamplingParams, StageIdentity
from dgr.errors import FrameError
from dgr.wire import frames, framing
from dgr.wire.frames import Boundary, Frame, Logits, Tokens
from dgr.wire.framing import decode_message, encode, encode_message
from dgr.wire.schema import describe

members = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)
anything = st.one_of(*(values(type_of(member)) for member in MEMBERS))


# --- values come back as they went -----------------------------------------------------------------------------------


@members
@pytest.mark.parametrize("greatest", [False, True], ids=["least", "greatest"])
def test_least_and_greatest_values_come_back(member: type[msgspec.Struct], greatest: bool) -> None:
    frame = extreme(type_of(member), greatest, n_items=None if member is not Boundary else 512)
    back = decode_message(encode_message(frame))
    assert back == frame
    assert type(back) is member


@given(anything)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_any_frame_comes_back(frame: Frame) -> None:
    back = decode_message(encode_message(frame))
    assert back == frame
    assert type(back) is type(frame)


def test_frames_are_values() -> None:
    frame, _payload = boundary()
    assert hash(frame) == hash(boundary()[0])
    with pytest.raises(AttributeError):
        frame.seq = 2  # type: ignore[misc]  # that it cannot be set is what is tested


def test_a_sampling_of_whole_numbers_is_the_same_sampling() -> None:
    whole = SamplingParams(1, 0, 1, 0, 1, 0, 0, -1, 0, 0, 0)
    frame = Tokens(key(), 1, Expectation(0, DIGEST), (1,), LogitsWanted.LAST, whole)
    back = decode_message(encode_message(frame))
    assert isinstance(back, Tokens)
    assert back.sampling == whole
    assert isinstance(back.sampling.temperature, float)


# --- the union is closed ---------------------------------------------------------------------------------------------


def _wrong(schema: Any, value: Any) -> Iterator[Any]:
    """Values on the wire (lists for structs and tuples) that a field of this type must refuse, given a right one."""
    yield {"a": [b"x"]}
    yield msgspec.msgpack.Ext(5, b"x")
    match schema:
        case inspect.IntType():
            yield from (present(schema.ge) - 1, present(schema.le) + 1, 0.5, "1", b"1", None, True, [])
        case inspect.FloatType():
            yield from ("1", None, True, [])
            if schema.le is not None:
                yield from (math.nan, math.inf, -math.inf, 1e300)
        case inspect.BoolType():
            yield from (0, 1, "true", None)
        case inspect.BytesType():
            yield from ("A" * 24, bytes(present(schema.max_length) + 1), None, 1, [])
            if schema.min_length:
                yield bytes(schema.min_length - 1)
        case inspect.StrType():
            yield from ("x" * (present(schema.max_length) + 1), b"x", None, 1)
        case inspect.EnumType(cls=cls) if issubclass(cls, str):
            yield from ("no such member", "", 1, None)
        case inspect.EnumType():
            greatest = max(list[Any](schema.cls))
            yield from (greatest + 1, -1, greatest.name, None)
        case inspect.UnionType(types=types):
            yield from (1, "x", b"x")
            if all(not isinstance(one, inspect.StructType) or any(f.required for f in one.fields) for one in types):
                yield []  # not where every field has a default
            for one in types:
                if isinstance(one, inspect.StructType):
                    for bad in _wrong(one, value):
                        if bad is not None:
                            yield bad
        case inspect.VarTupleType(item_type=item):
            yield from (b"", "", None, 1)
            yield [value[0]] * (present(schema.max_length) + 1) if value else [None]
            if schema.min_length:
                yield []
            if value:
                for bad in _wrong(item, value[0]):
                    yield [bad, *value[1:]]
        case inspect.TupleType(item_types=items):
            yield from (None, 1, value[:-1], [*value, 0])
            for place, item in enumerate(items):
                for bad in _wrong(item, value[place]):
                    yield [*value[:place], bad, *value[place + 1 :]]
        case inspect.DictType():
            yield from (None, 1, [], {"x" * (present(as_a(inspect.StrType, schema.key_type).max_length) + 1): ""})
            yield {str(index): "" for index in range(present(schema.max_length) + 1)}
            for bad in _wrong(schema.value_type, ""):
                yield {"key": bad}
        case inspect.StructType():
            yield from (None, 1, [*value, 0], [*value, None])
            if any(field.required for field in schema.fields):
                yield []
            first = 0 if schema.tag is None else 1
            required = sum(field.required for field in schema.fields)
            if required:
                yield value[: first + required - 1]
            for place, field in enumerate(schema.fields, first):
                for bad in _wrong(field.type, value[place]):
                    yield [*value[:place], bad, *value[place + 1 :]]


@members
def test_every_wrong_value_of_every_field_is_refused(member: type[msgspec.Struct]) -> None:
    schema = type_of(member)
    frame = extreme(schema, True, n_items=2)
    wire = msgspec.msgpack.decode(encode_message(frame))
    assert decode_message(msgspec.msgpack.encode(wire)) == frame
    count = 0
    for bad in _wrong(schema, wire):
        data = msgspec.msgpack.encode(bad)
        with pytest.raises(msgspec.DecodeError):
            decode_message(data)
        count += 1
    assert count >= 7 * len(schema.fields)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("layers",), [0, 0]),  # a stage of no layers would fit before any head
        (("layers",), [3, 2]),
        (("context", "numerics"), "fast"),
        (("context", "n_ctx"), 0),
        (("context", "n_seq_max"), 2**31),
    ],
)
def test_an_identity_that_makes_no_sense_is_no_message(path: tuple[str, ...], value: object) -> None:
    hello = extreme(type_of(frames.Hello), True, n_items=2)
    wire = msgspec.msgpack.decode(encode_message(hello))
    part, names = wire[1 + frames.Hello.__struct_fields__.index("identity")], StageIdentity.__struct_fields__
    for name in path[:-1]:
        part, names = part[names.index(name)], ContextParams.__struct_fields__
    part[names.index(path[-1])] = value
    with pytest.raises(msgspec.DecodeError):
        decode_message(msgspec.msgpack.encode(wire))


def test_unknown_tags_are_refused() -> None:
    known = {type_of(member).tag for member in MEMBERS}
    assert len(known) == len(MEMBERS)
    for tag in {*range(-1, 300), 2**31, 2**64 - 1} - known:
        with pytest.raises(msgspec.DecodeError):
            decode_message(msgspec.msgpack.encode([tag, [bytes(16), 1, 1], 1, 1]))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x90", b"\xc0", b"\x80", b"\xc1", b"\x01", b"\x91\x02", b"\xdd\xff\xff\xff\xff\x02", b"\x91" * 100_000],
    ids=["nothing", "no tag", "nil", "map", "reserved", "int", "only a tag", "endless", "deep"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(data)


def test_bytes_after_a_message_are_refused() -> None:
    for data in (b"\x00", b"\xc0", b"\x91" * 1000):
        with pytest.raises(msgspec.DecodeError):
            decode_message(encode_message(frames.Pong(1)) + data)


_BAD: tuple[object, ...] = ("\udcff", 2**70, -1, b"short", None, ({},))


@pytest.mark.parametrize(
    "member", [one for one in MEMBERS if one not in framing._CHECKED_BY_THEIR_MAKERS], ids=lambda one: one.__name__
)
def test_the_sender_of_a_frame_that_breaks_the_schema_is_told(member: type[msgspec.Struct]) -> None:
    """A struct does not check its own fields, so that without this the other side would close the link."""
    good = extreme(type_of(member), False)
    for field in type_of(member).fields:
        for bad in _BAD:
            if bad is None and isinstance(field.type, inspect.UnionType):
                continue
            frame = msgspec.structs.replace(good, **{field.name: bad})
            with pytest.raises(FrameError):
                encode(frame, b"" if field.name == "payload" else None, 0, SMALL)


# --- no member can carry cache contents ------------------------------------------------------------------------------

#: Sequences a frame may hold, each with what one item is. Anything else that repeats could be rows.
SEQUENCES = {
    "Tokens.tokens": "token ids",
    "Boundary.tokens": "token ids",
    "Token.top": "log-probabilities beside one token",
    "DecodeRun.stop": "token ids",
    "StateSummary.components": "counts and a digest per component",
    "StageIdentity.components": "names",
    "StageIdentity.capabilities": "pairs of names",
    "StageIdentity.devices": "names",
    "Hello.wants": "names",
    "Distribution.bounds": "sizes",
    "Distribution.counts": "how many values were of each size",
    "StageLoad.epochs": "numbers by the beginning of a route session's id",
    "StageLoad.state": "bytes by component",
    "StageLoad.state_leased": "bytes by component",
    "StageLoad.links": "counters of a peer",
    "TraceReport.records": "times of one work frame",
}
#: Members that announce a payload; what it holds is checked by size.
PAYLOADS = {"Boundary", "Logits"}
#: Bytes that are no id or digest; the framer refuses every value but zeros (see test_framing).
ZEROS = {"Ping.zeros"}
#: Longest text, characters: a reason told to people.
TEXT = 4096


def could_carry_rows(union: Any) -> list[str]:
    """Every field of every member that could hold cache contents, with the reason."""
    schema = inspect.type_info(union)
    assert isinstance(schema, inspect.UnionType)
    return [problem for member in schema.types for problem in _suspects(member, "", False)]


def _suspects(schema: Any, where: str, repeated: bool) -> Iterator[str]:
    match schema:
        case inspect.StructType():
            if not (schema.array_like and schema.forbid_unknown_fields):
                yield f"{schema.cls.__name__}: takes unknown fields"
            for field in schema.fields:
                if field.name == "payload" and schema.cls.__name__ not in PAYLOADS:
                    yield f"{schema.cls.__name__}: announces a payload"
                yield from _suspects(field.type, f"{schema.cls.__name__}.{field.name}", repeated)
        case inspect.IntType():
            if schema.ge is None or schema.le is None or schema.le >= 2**63 or schema.ge < -1:
                yield f"{where}: a number without bounds"
        case inspect.FloatType() | inspect.BoolType() | inspect.NoneType() | inspect.EnumType():
            pass
        case inspect.BytesType():
            if not schema.min_length == schema.max_length == 16 and where not in ZEROS:
                yield f"{where}: bytes that are no id and no digest"
        case inspect.StrType():
            if schema.max_length is None or schema.max_length > TEXT:
                yield f"{where}: text without a bound"
        case inspect.VarTupleType():
            if where not in SEQUENCES or repeated:
                yield f"{where}: a sequence of something"
            if schema.max_length is None:
                yield f"{where}: a sequence without a bound"
            yield from _suspects(schema.item_type, where, True)
        case inspect.DictType():
            if where not in SEQUENCES or repeated:
                yield f"{where}: a map of something"
            if schema.max_length is None:
                yield f"{where}: a map without a bound"
            yield from _suspects(schema.key_type, where, True)
            yield from _suspects(schema.value_type, where, True)
        case inspect.TupleType():
            for item in schema.item_types:
                yield from _suspects(item, where, repeated)
        case inspect.UnionType():
            for one in schema.types:
                yield from _suspects(one, where, repeated)
        case _:
            yield f"{where}: a {type(schema).__name__}"


def test_no_member_has_a_field_that_could_carry_cache_rows() -> None:
    assert could_carry_rows(Frame) == []


def test_only_a_boundary_and_logits_have_a_payload() -> None:
    with_payload = {member.__name__ for member in MEMBERS if "payload" in member.__struct_fields__}
    assert with_payload == PAYLOADS
    for member in MEMBERS:
        if member.__name__ not in PAYLOADS:
            assert SMALL.payload(extreme(type_of(member), False)) == 0


def test_the_lists_of_exceptions_hold_nothing_that_is_gone() -> None:
    names = {
        f"{owner.cls.__name__}.{field.name}" for owner in _structs(inspect.type_info(Frame)) for field in owner.fields
    }
    assert set(SEQUENCES) | ZEROS <= names


def _structs(schema: Any) -> Iterator[inspect.StructType]:
    if isinstance(schema, inspect.StructType):
        yield schema
        for field in schema.fields:
            yield from _structs(field.type)
    for inner in (
        *getattr(schema, "types", ()),
        *getattr(schema, "item_types", ()),
        getattr(schema, "item_type", None),
    ):
        if inner is not None:
            yield from _structs(inner)


class Loose(msgspec.Struct, array_like=True):
    key: Key


_SMUGGLERS: dict[str, Any] = {
    "bytes": bytes,
    "bytes of a row": Annotated[bytes, Meta(max_length=1024)],
    "bytes of a fixed row": Annotated[bytes, Meta(min_length=1024, max_length=1024)],
    "bytearray": bytearray,
    "memoryview": memoryview,
    "text": str,
    "long text": Annotated[str, Meta(max_length=65536)],
    "floats": tuple[float, ...],
    "bounded floats": Annotated[tuple[float, ...], Meta(max_length=512)],
    "list": list[float],
    "digests": Annotated[tuple[Annotated[bytes, Meta(min_length=16, max_length=16)], ...], Meta(max_length=64)],
    "map": dict[str, float],
    "anything": Any,
    "raw": msgspec.Raw,
    "extension": msgspec.msgpack.Ext,
    "wide number": int,
    "maybe bytes": bytes | None,
    "loose struct": Loose,
    "pair of bytes": tuple[int, bytes],
}


@pytest.mark.parametrize("smuggler", _SMUGGLERS.values(), ids=_SMUGGLERS)
@pytest.mark.parametrize("nested", [False, True], ids=["field", "nested"])
def test_the_walk_catches_a_field_that_smuggles(smuggler: Any, nested: bool) -> None:
    options: dict[str, Any] = {"frozen": True, "array_like": True, "forbid_unknown_fields": True}
    inner = msgspec.defstruct("Inner", [("rows", smuggler)], **options)
    fields = [("key", Key), ("rows", inner if nested else smuggler)]
    mutant = msgspec.defstruct("Mutant", fields, tag=99, **options)
    caught = could_carry_rows(Frame | mutant)
    assert caught
    assert all(("Inner" if nested else "Mutant") in one or "Loose" in one for one in caught)


def test_the_walk_catches_a_new_payload_a_second_sequence_and_a_bound_taken_away() -> None:
    options: dict[str, Any] = {"frozen": True, "array_like": True, "forbid_unknown_fields": True}
    number = Annotated[int, Meta(ge=0, le=9)]
    third = msgspec.defstruct("Third", [("payload", number)], tag=99, **options)
    more = msgspec.defstruct("Token", [("more", Annotated[tuple[number, ...], Meta(max_length=9)])], tag=98, **options)
    unbounded = msgspec.defstruct("Token", [("top", tuple[number, ...])], tag=97, **options)
    for mutant, expected in ((third, "payload"), (more, "sequence of"), (unbounded, "without a bound")):
        assert [expected in one for one in could_carry_rows(Frame | mutant)] == [True]


# --- headers are small and do not grow with the context --------------------------------------------------------------


def _header(frame: Frame) -> int:
    """Bytes on the wire before the payload."""
    payload = bytes(frame.payload) if isinstance(frame, Boundary | Logits) else None
    return len(next(encode(frame, payload, 65535 if payload else 0, FLASH))[0])


def _greatest(member: type[msgspec.Struct], n_tokens: int) -> Any:
    frame = extreme(type_of(member), True, n_items=n_tokens)
    return frame if member is Tokens else msgspec.structs.replace(frame, payload=4 * n_tokens * FLASH.boundary_width)


@pytest.mark.parametrize("member", [Tokens, Boundary])
@pytest.mark.parametrize("n_tokens", [1, 2, 15, 16, 63, 64])
def test_a_work_header_is_at_most_256_bytes_and_5_per_token(member: type[msgspec.Struct], n_tokens: int) -> None:
    frame = _greatest(member, n_tokens)
    assert len(frame.tokens) == n_tokens
    assert frame.sampling is not None
    assert _header(frame) <= 256 + 5 * n_tokens


def test_the_header_of_the_longest_chunk_keeps_the_bound() -> None:
    assert _header(_greatest(Tokens, FLASH.n_batch)) <= 256 + 5 * FLASH.n_batch


def test_a_work_header_does_not_grow_with_the_context_but_for_the_width_of_a_number() -> None:
    def header(position: int) -> int:
        return _header(Tokens(key(), 7, Expectation(position, DIGEST), (5,), LogitsWanted.LAST, None))

    sizes = {position: header(position) for position in (0, 127, 128, 4096, 65536, 1_000_000, 2**32 - 1)}
    assert all(size - sizes[0] <= 4 for size in sizes.values())
    assert sizes[1_000_000] == sizes[2**32 - 1]


def test_an_answer_to_one_token_is_small() -> None:
    for member in (frames.Advanced, frames.CacheMiss, frames.StaleEpoch, frames.WorkSkipped, frames.Opened):
        assert _header(extreme(type_of(member), True)) <= 128
    assert len(raw(frames.Token(key(), 1, 1, 1))) <= 64


# --- the hash of the schema ------------------------------------------------------------------------------------------


def test_the_schema_hash_is_the_same_without_docstrings_and_for_any_hash_seed() -> None:
    code = "from dgr.wire.frames import SCHEMA_HASH as h; print(h)"
    for flags, seed in ((["-OO"], "1"), ([], "2")):
        done = subprocess.run(
            [sys.executable, *flags, "-c", code], env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == frames.SCHEMA_HASH


def test_the_schema_hash_sees_every_kind_of_change() -> None:
    base: dict[str, Any] = {"frozen": True, "array_like": True, "forbid_unknown_fields": True, "tag": 1}
    fields = [("a", Annotated[int, Meta(ge=0)]), ("b", str)]
    variants = [
        msgspec.defstruct("Member", fields, **base),
        msgspec.defstruct("Renamed", fields, **base),
        msgspec.defstruct("Member", fields[::-1], **base),
        msgspec.defstruct("Member", [*fields, ("c", int)], **base),
        msgspec.defstruct("Member", [*fields, ("c", int, 0)], **base),
        msgspec.defstruct("Member", [*fields, ("c", int, 1)], **base),
        msgspec.defstruct("Member", [("a", Annotated[int, Meta(ge=1)]), ("b", str)], **base),
        msgspec.defstruct("Member", [("a", Annotated[int, Meta(gt=0)]), ("b", str)], **base),
        msgspec.defstruct("Member", [("a", int), ("b", bytes)], **base),
        msgspec.defstruct("Member", [("a", Annotated[int, Meta(ge=0)]), ("b", frames.Miss)], **base),
        msgspec.defstruct("Member", [("a", Annotated[int, Meta(ge=0)]), ("b", frames.Refusal)], **base),
        msgspec.defstruct("Member", fields, **{**base, "tag": 2}),
        msgspec.defstruct("Member", fields, **{**base, "forbid_unknown_fields": False}),
    ]
    described = [repr(describe(inspect.type_info(variant))) for variant in variants]
    assert len(set(described)) == len(variants)
    commented = msgspec.defstruct("Member", fields, namespace={"__doc__": "Prose."}, **base)
    assert repr(describe(inspect.type_info(commented))) == described[0]
