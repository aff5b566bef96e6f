"""Ways to damage JSON, TOML and other text: bytes, values, nesting, keys that stand there twice, numbers without end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dgr.testing.hostile_files.byte_damage import damage
from dgr.testing.hostile_files.kind import Mutation

__all__ = ["damaged_bytes", "damaged_json", "damaged_lines", "rewritten"]

#: Values as JSON has them, and as it has not.
_RAW = (
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"-0", b"1.5", b"1" + b"0" * 400,
    b"9" * 5000, b"18446744073709551616", b"-9223372036854775809", b"2147483648", b'""', b'"\\ud800"', b'"\\u0000"',
    b'"\xff"', b'"\xed\xa0\x80"', b'"' + b"x" * 70_000 + b'"', b'"../../../../etc/passwd"', b'"/dev/zero"', b"[]",
    b"{}", b"[[]]", b'{"a": 1, "a": 2}', b"[null]", b"[" * 100_000, b"[" * 2000 + b"]" * 2000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"":{}}', b"01", b"1e", b"'x'", b"",
)  # fmt: skip
_MARK = "\0here\0"


def damaged_bytes(drawn: random.Random, text: bytes) -> bytes:
    """A few bytes changed, cut, doubled, or another encoding."""
    data = bytearray(text)
    for _ in range(drawn.randint(1, 4)):
        match drawn.randrange(9):
            case 6:
                at = drawn.randrange(len(data) + 1)
                data[at:at] = drawn.choice((b" " * 100_000, b"\n" * 1000, b"[" * 5000, b"{" * 5000, b'"' * 999))
            case 7 if drawn.random() < 0.3:
                return drawn.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0\0")) + bytes(data)
            case 8 if drawn.random() < 0.3:
                return bytes(data).decode("utf-8", "replace").encode(drawn.choice(("utf-16", "utf-32")))
            case _:
                damage(data, drawn, b'\0"\\{}[],:=\n\r\x7f\x80\xff0-', 40)
    return bytes(data)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def damaged_json(drawn: random.Random, text: bytes) -> bytes:
    """One to three values, keys or elements that are not what they were."""
    if drawn.random() < 0.2:
        return damaged_bytes(drawn, text)
    value = json.loads(text)
    raw: list[bytes] = []
    for _ in range(drawn.randint(1, 3)):
        places = _places(value)
        if not places:
            break
        *outer, key = drawn.choice(places)
        holder = value
        for step in outer:
            holder = holder[step]
        match drawn.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder += [holder[key]] * drawn.choice((1, 3, 2000))
            case 1 | 2 if isinstance(holder, dict):
                odd = drawn.choice(("", "\0", "x" * 5000, "é", "__class__", str(key).upper(), "mtp", f"{key} "))
                holder[odd] = holder.pop(key)
            case 3:
                other = value
                for step in drawn.choice(places):
                    other = other[step] if isinstance(other, dict | list) and _has(other, step) else other
                holder[key] = json.loads(json.dumps(other))
            case _:
                holder[key] = _MARK
                raw.append(drawn.choice(_RAW))
    written = json.dumps(value, ensure_ascii=drawn.random() < 0.5).encode("utf-8", "surrogatepass")
    mark = json.dumps(_MARK).encode()
    for one in raw:
        written = written.replace(mark, one, 1)
    if drawn.random() < 0.1:  # every key of the outermost object twice
        written = written[:-1] + b"," + written[1:] if written[:1] == b"{" else written
    return written


def _has(holder: dict[Any, Any] | list[Any], step: Any) -> bool:
    return step in holder if isinstance(holder, dict) else isinstance(step, int) and step < len(holder)


def damaged_lines(*odd: str) -> Callable[[random.Random, bytes], bytes]:
    """A change of a text of lines: some are missing, doubled, in another order, or one of ``odd``; else their bytes."""

    def change(drawn: random.Random, text: bytes) -> bytes:
        if drawn.random() < 0.3:
            return damaged_bytes(drawn, text)
        lines = text.splitlines(keepends=True)
        for _ in range(drawn.randint(1, 4)):
            at = drawn.randrange(len(lines)) if lines else 0
            match drawn.randrange(6):
                case 0 if lines:
                    del lines[at]
                case 1 if lines:
                    lines.insert(at, lines[at])
                case 2 if len(lines) > 1:
                    other = drawn.randrange(len(lines))
                    lines[at], lines[other] = lines[other], lines[at]
                case 3 if lines and b"=" in lines[at]:
                    key = lines[at].partition(b"=")[0]
                    lines[at] = key + b"= " + drawn.choice(_RAW) + b"\n"
                case _:
                    lines.insert(at, drawn.choice(odd).encode("utf-8", "surrogatepass") + b"\n")
        return b"".join(lines)

    return change


def rewritten(name: str, damage: Callable[[random.Random, bytes], bytes]) -> Mutation:
    """The file ``name``, its text damaged."""

    def change(drawn: random.Random, base: Path, folder: Path) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damage(drawn, (base / name).read_bytes()))
        path.chmod(0o600)
        return path

    return change
