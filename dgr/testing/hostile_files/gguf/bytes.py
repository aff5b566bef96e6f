"""Ways to damage the bytes of any GGUF: bits, numbers, lies in its fields, pieces that stand there twice."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

from dgr.testing.hostile_files.gguf.fields import header_fields

__all__ = ["CHANGES", "NUMBERS", "WIDE", "Change"]

#: Numbers that counts, sizes and ids break on.
NUMBERS = (0, 1, 2, 3, 7, 8, 127, 255, 256, 511, 512, 1024, 65535, 2**31 - 1, 2**31, 2**32 - 1)
WIDE = (*NUMBERS, 2**32, 2**40, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


#: A change of a whole file's bytes.
Change = Callable[[random.Random, bytes], bytes]


def _end_of_header(data: bytes) -> int:
    """Where the fields end; what follows are weights."""
    last = header_fields(data)[-1]
    return last.at + last.size


def _flip_bits(drawn: random.Random, data: bytes) -> bytes:
    """One to three bits of the header."""
    changed, end = bytearray(data), _end_of_header(data)
    for _ in range(drawn.randint(1, 3)):
        changed[drawn.randrange(end)] ^= 1 << drawn.randrange(8)
    return bytes(changed)


def _overwrite(drawn: random.Random, data: bytes) -> bytes:
    """A number anywhere in the header."""
    at = drawn.randrange(_end_of_header(data))
    new = struct.pack("<Q", drawn.choice(WIDE)) if drawn.random() < 0.5 else struct.pack("<I", drawn.choice(NUMBERS))
    return data[:at] + new + data[at + len(new) :]


def _cut(drawn: random.Random, data: bytes) -> bytes:
    return data[: drawn.randrange(_end_of_header(data) if drawn.random() < 0.6 else len(data))]


def _lie(drawn: random.Random, data: bytes) -> bytes:
    """Counts, lengths, types, shapes and offsets that are not so: far from it, or by one."""
    changed, fields = bytearray(data), header_fields(data)
    wanted = drawn.choice(sorted({one.what for one in fields}))
    for _ in range(drawn.randint(1, 2)):
        field = drawn.choice([one for one in fields if one.what == wanted])
        code = "<Q" if field.size == 8 else "<I"
        (now,) = struct.unpack_from(code, data, field.at)
        near = (now - 1, now + 1, now * 2, now + 32, now ^ 1 << drawn.randrange(8 * field.size))
        new = drawn.choice((*near, *(WIDE if field.size == 8 else NUMBERS)))
        struct.pack_into(code, changed, field.at, new % (1 << 8 * field.size))
    return bytes(changed)


def _twice(drawn: random.Random, data: bytes) -> bytes:
    """A piece of the header a second time, or moved to another place: keys and tensors that are there twice among them."""
    fields = header_fields(data)
    begin, end = sorted(drawn.sample(range(len(fields)), 2))
    piece = data[fields[begin].at : fields[min(end, begin + 12)].at]
    at = drawn.choice(fields).at
    new = bytearray(data[:at] + piece + data[at:])
    if drawn.random() < 0.7:  # counted, too
        where = 8 if drawn.random() < 0.5 else 16
        struct.pack_into("<Q", new, where, struct.unpack_from("<Q", new, where)[0] + 1)
    return bytes(new)


#: What is done to the bytes of any GGUF.
CHANGES: Mapping[str, Change] = {
    "bits": _flip_bits,
    "number": _overwrite,
    "cut": _cut,
    "lie": _lie,
    "twice": _twice,
}
