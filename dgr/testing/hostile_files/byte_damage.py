"""Small changes of bytes, whatever they are."""

from __future__ import annotations

import random

__all__ = ["damage"]


def damage(data: bytearray, drawn: random.Random, odd: bytes, longest: int) -> None:
    """One change at one place: a bit, a byte of ``odd``, bytes less, more (``longest`` at most) or twice, or the end gone."""
    at = drawn.randrange(len(data) + 1)
    match drawn.randrange(6):
        case 0 if at < len(data):
            data[at] ^= 1 << drawn.randrange(8)
        case 1 if at < len(data):
            data[at] = drawn.choice(odd)
        case 2:
            del data[at : at + drawn.randint(1, longest)]
        case 3:
            data[at:at] = drawn.randbytes(drawn.randint(1, longest))
        case 4:
            data[at:at] = data[at : at + drawn.randint(1, 4 * longest)]
        case 5:
            del data[at:]
