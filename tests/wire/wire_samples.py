"""Frames for the wire tests: the least, the greatest and any value of every member, made from the schema itself."""

from __future__ import annotations

import itertools
import random
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect
from narrow import as_a, members, present

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, Expectation, Key, LogitsWanted, Numerics, Wire
from dgr.wire import frames
from dgr.wire.frames import Boundary, Frame, Logits
from dgr.wire.framing import Limits, Packet, encode

MEMBERS: tuple[type[msgspec.Struct], ...] = typing.get_args(Frame)

#: Small enough that every limit is easy to reach.
SMALL = Limits(n_batch=8, boundary_width=4, n_vocab=6, fragment=16, streams=3)
#: As between stages of V4 Flash: four residual streams of 4096.
FLASH = Limits(n_batch=512, boundary_width=4 * 4096, n_vocab=129_280)

ROUTE = b"route-of-16-byte"
DIGEST = b"digest-of-tokens"


def key(session: int = 1, epoch: int = 1) -> Key:
    return Key(ROUTE, epoch, session)


def boundary(session: int = 1, seq: int = 1, n_tokens: int = 1, limits: Limits = SMALL) -> tuple[Boundary, bytes]:
    """A work frame and a payload that tells it from any other."""
    size = 4 * n_tokens * limits.boundary_width
    payload = random.Random(f"{session}/{seq}").randbytes(size)
    return Boundary(
        key(session), seq, Expectation(seq, DIGEST), (1,) * n_tokens, LogitsWanted.NONE, None, size
    ), payload


def logits(session: int = 1, seq: int = 1, n_rows: int = 1, limits: Limits = SMALL) -> tuple[Logits, bytes]:
    size = 4 * n_rows * limits.n_vocab
    payload = random.Random(f"{session}/{seq}/logits").randbytes(size)
    return Logits(key(session), seq, seq, n_rows, size), payload


def raw(frame: Frame, payload: bytes | None = None, stream: int = 1, limits: Limits = SMALL) -> bytes:
    """The bytes of a frame on a quiet link."""
    return b"".join(map(flat, encode(frame, payload, stream if payload else 0, limits)))


def flat(packet: Packet) -> bytes:
    head, body = packet
    return head + (b"" if body is None else bytes(body))


# --- values of a type ------------------------------------------------------------------------------------------------


def type_of(member: type[msgspec.Struct]) -> inspect.StructType:
    found = inspect.type_info(member)
    assert isinstance(found, inspect.StructType)
    return found


def extreme(schema: Any, greatest: bool, n_items: int | None = None) -> Any:
    """The least or the greatest value of a type; ``n_items``: the length of its sequences, where they may have it."""
    match schema:
        case inspect.IntType():
            return schema.le if greatest else schema.ge
        case inspect.FloatType():
            return schema.le if greatest and schema.le is not None else 0.1
        case inspect.BoolType():
            return greatest
        case inspect.NoneType():
            return None
        case inspect.BytesType():
            return bytes(present(schema.max_length) if greatest else schema.min_length or 0)
        case inspect.StrType():
            return "\U0001f600" * present(schema.max_length) if greatest else ""
        case inspect.EnumType():
            return (max if greatest else min)(members(schema.cls))
        case inspect.UnionType(types=types):
            wanted = [one for one in types if isinstance(one, inspect.NoneType) != greatest]
            return extreme(wanted[0], greatest, n_items)
        case inspect.TupleType(item_types=items):
            return tuple(extreme(item, greatest, n_items) for item in items)
        case inspect.VarTupleType(item_type=item):
            count = present(schema.max_length) if greatest else schema.min_length or 0
            count = count if n_items is None else max(schema.min_length or 0, min(count, n_items))
            return (extreme(item, greatest, n_items),) * count
        case inspect.DictType():
            count = present(schema.max_length) if greatest else 0
            count = count if n_items is None else min(count, n_items)
            key, value = extreme(schema.key_type, greatest), extreme(schema.value_type, greatest)
            return {
                f"{index:04}{key}"[: as_a(inspect.StrType, schema.key_type).max_length]: value for index in range(count)
            }
        case inspect.StructType(cls=cls) if cls is LayerRange:  # of which not every pair of numbers is one
            return LayerRange(2**32 - 2, 2**32 - 1) if greatest else LayerRange(0, 1)
        case inspect.StructType(cls=cls) if cls is ContextParams:  # exact numerics go with f32 alone
            fields = {field.name: extreme(field.type, greatest, n_items) for field in schema.fields}
            return ContextParams(**fields | {"numerics": Numerics.SAME_CUTS})
        case inspect.StructType():
            return schema.cls(*(extreme(field.type, greatest, n_items) for field in schema.fields))
        case _:
            raise AssertionError(f"no rule for {schema}")


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, its sequences short."""
    match schema:
        case inspect.IntType():
            return st.integers(schema.ge, schema.le)
        case inspect.FloatType(ge=None):
            return st.floats(allow_nan=False)
        case inspect.FloatType():
            return st.floats(schema.ge, schema.le)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.BytesType():
            return st.binary(min_size=schema.min_length or 0, max_size=min(present(schema.max_length), 16))
        case inspect.StrType():
            return st.text(max_size=min(present(schema.max_length), 20))
        case inspect.EnumType():
            return st.sampled_from(list(schema.cls))
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), min_size=schema.min_length or 0, max_size=8).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=4)
        case inspect.StructType(cls=cls) if cls is LayerRange:
            ends = st.lists(values(schema.fields[0].type), min_size=2, max_size=2, unique=True).map(sorted)
            return ends.map(lambda pair: LayerRange(*pair))
        case inspect.StructType(cls=cls) if cls is ContextParams:
            fields = {field.name: values(field.type) for field in schema.fields}
            wires = st.sampled_from(
                [
                    (Numerics.EXACT, Wire.F32),
                    (Numerics.EXACT, Wire.F32_ZSTD),
                    *itertools.product(list(Numerics)[1:], Wire),
                ]
            )
            return st.builds(
                lambda promise, **others: ContextParams(**others | {"numerics": promise[0], "wire": promise[1]}),
                wires,
                **fields,
            )
        case inspect.StructType():
            return st.builds(schema.cls, *(values(field.type) for field in schema.fields))
        case _:
            raise AssertionError(f"no rule for {schema}")


def _sendable(frame: Frame, noise: random.Random, limits: Limits) -> tuple[Frame, bytes | None]:
    """The frame with what the link agreed on, and its payload."""
    if isinstance(frame, frames.Ping):
        frame = msgspec.structs.replace(frame, zeros=bytes(len(frame.zeros)))
    if isinstance(frame, Logits):
        n_rows = frame.n_rows % limits.n_batch + 1
        size = 4 * n_rows * limits.n_vocab
        frame = msgspec.structs.replace(frame, n_rows=n_rows, payload=size)
    elif isinstance(frame, Boundary):
        size = 4 * len(frame.tokens) * limits.boundary_width
        frame = msgspec.structs.replace(frame, payload=size)
    else:
        return frame, None
    return frame, noise.randbytes(size)


def sendable(limits: Limits = SMALL) -> st.SearchStrategy[tuple[Frame, bytes | None]]:
    """Any frame of the union, with its payload if it has one."""
    members = st.one_of(*(values(type_of(member)) for member in MEMBERS))
    return st.builds(_sendable, members, st.integers(0, 2**32).map(random.Random), st.just(limits))


def interleaved(
    sent: list[tuple[Frame, bytes | None]], choose: Callable[[int], int], limits: Limits = SMALL
) -> Iterator[tuple[Packet, int | None]]:
    """Packets of several frames, mixed as a link may mix them: (packet, index of the frame that it completes).

    ``choose(n)`` picks one of n: the packets under way, or the next frame.
    """
    waiting = list(enumerate(sent))
    under_way: dict[int, tuple[int, int, list[Packet]]] = {}
    while waiting or under_way:
        options = sorted(under_way)
        held = sum(size for _index, size, _packets in under_way.values())
        if waiting:
            size = len(waiting[0][1][1] or b"")
            if not size or (len(under_way) < limits.streams and (not held or held + size <= limits.under_way)):
                options.append(0)
        picked = options[choose(len(options))]
        if picked == 0:
            index, (frame, payload) = waiting.pop(0)
            stream = next(number for number in range(1, 65536) if number not in under_way)
            packets = list(encode(frame, payload, stream if payload else 0, limits))
            yield packets[0], None if payload else index
            if payload:
                under_way[stream] = index, len(payload), packets[1:]
        else:
            index, _size, packets = under_way[picked]
            packet = packets.pop(0)
            if not packets:
                del under_way[picked]
            yield packet, None if packets else index
