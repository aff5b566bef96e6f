"""Write the wire protocol's frames field by field: ``python docs/draw_frames.py`` writes docs/frames.md from the structs."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dgr.core import scalars
from dgr.wire import frames

PAGE = Path(__file__).with_name("frames.md")
INTRODUCTION = f"""\
# Frames, field by field

Written from the structs in `dgr/wire/frames.py` by `docs/draw_frames.py`; a test keeps this page up to date. Schema version
{frames.SCHEMA_VERSION}. [protocol.md](protocol.md) says what the frames are for, and how they travel.

A frame is a msgpack array: its tag, then its fields in this order. Values inside a frame are arrays without a tag. A field that
has a default may be missing at the end. Unknown tags, further fields and values out of range are refused, and end the link.
"""
#: Bounded types by the name that the structs use.
_SCALARS = {name: getattr(scalars, name) for name in scalars.__all__ if not isinstance(getattr(scalars, name), int)}


def prose(text: str | None) -> str:
    """A docstring or comment as Markdown on one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text or "")
    return " ".join(text.replace("``", "`").split())


def cell(text: str) -> str:
    """Text that stays within a cell of a table."""
    return text.replace("|", r"\|")


def comments(cls: type) -> Mapping[str, str]:
    """The ``#:`` comments above the fields or members of a class."""
    found: dict[str, str] = {}
    lines: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if comment := re.match(r"\s*#: (.*)", line):
            lines.append(comment[1])
        elif field := re.match(r"    (\w+)(?:: | = )", line):
            found[field[1]], lines = prose(" ".join(lines)), []
    return found


def typed(cls: type, field: msgspec.inspect.Field) -> str:
    """A field's type, by the name that the struct gives it where that is one of the scalars."""
    names = str(cls.__annotations__[field.name]).split(" | ")
    if all(name in _SCALARS or name == "None" for name in names):
        return " or ".join("nil" if name == "None" else f"[{name}](#scalars)" for name in names)
    return plain(field.type)


def plain(kind: msgspec.inspect.Type) -> str:
    """A type in words."""
    name = next((name for name, alias in _SCALARS.items() if msgspec.inspect.type_info(alias) == kind), None)
    if name is not None:
        return f"[{name}](#scalars)"
    match kind:
        case msgspec.inspect.StructType() | msgspec.inspect.EnumType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case msgspec.inspect.UnionType():
            return " or ".join(plain(one) for one in kind.types)
        case msgspec.inspect.VarTupleType():
            return f"array of {plain(kind.item_type)}{bounds(kind)}"
        case msgspec.inspect.DictType():
            return f"map of {plain(kind.key_type)} to {plain(kind.value_type)}{bounds(kind)}"
        case msgspec.inspect.NoneType():
            return "nil"
        case _:
            return f"{type(kind).__name__.removesuffix('Type').lower()}{bounds(kind)}"


def bounds(kind: Any) -> str:
    """Limits of a value or of a length, as they are checked."""
    low, high = getattr(kind, "ge", None), getattr(kind, "le", None)
    shortest, longest = getattr(kind, "min_length", None), getattr(kind, "max_length", None)
    if low is not None or high is not None:
        return f", {low:g} to {high:g}" if isinstance(kind, msgspec.inspect.FloatType) else f", {low} to {high}"
    if longest is None:
        return ""
    return f", {longest} long" if shortest == longest else f", {shortest or 0} to {longest} long"


def default(field: msgspec.inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if field.default is msgspec.NODEFAULT:
        return ""
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    return f"`{value!r}`"


def section(kind: msgspec.inspect.StructType) -> Iterator[str]:
    """A frame or value: what it is, and its fields."""
    words, tag = comments(kind.cls), kind.tag
    yield from (f"### {kind.cls.__name__}", "")
    yield prose(inspect.getdoc(kind.cls)) + (f" Tag {tag}." if tag is not None else "")
    yield ""
    if kind.fields:
        yield from ("| field | type | default | |", "|---|---|---|---|")
    for field in kind.fields:
        yield f"| `{field.name}` | {typed(kind.cls, field)} | {default(field)} | {cell(words.get(field.name, ''))} |"
    yield ""


def inner(kind: msgspec.inspect.Type, found: dict[type, msgspec.inspect.Type]) -> None:
    """Gather the structs and enumerations that a type holds, in the order in which they are met."""
    match kind:
        case msgspec.inspect.StructType():
            for field in kind.fields:
                if isinstance(field.type, msgspec.inspect.StructType | msgspec.inspect.EnumType):
                    found.setdefault(field.type.cls, field.type)
                inner(field.type, found)
        case msgspec.inspect.UnionType():
            for one in kind.types:
                if isinstance(one, msgspec.inspect.StructType | msgspec.inspect.EnumType):
                    found.setdefault(one.cls, one)
                inner(one, found)
        case msgspec.inspect.VarTupleType():
            if isinstance(kind.item_type, msgspec.inspect.StructType):
                found.setdefault(kind.item_type.cls, kind.item_type)
            inner(kind.item_type, found)


def directions() -> Iterator[tuple[str, list[type]]]:
    """The headings of the module, from whom to whom, and the frames under each."""
    parts = re.split(r"^# --- (.+?) -+$", inspect.getsource(frames), flags=re.MULTILINE)[1:]
    for heading, source in zip(parts[::2], parts[1::2], strict=True):
        yield heading, [getattr(frames, name) for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE)]


def page() -> str:
    union = msgspec.inspect.type_info(frames.Frame)
    assert isinstance(union, msgspec.inspect.UnionType)
    members = {kind.cls: kind for kind in union.types if isinstance(kind, msgspec.inspect.StructType)}
    found: dict[type, msgspec.inspect.Type] = {}
    lines = [INTRODUCTION, "| from → to | frames |", "|---|---|"]
    for heading, classes in directions():
        named = ", ".join(f"[{cls.__name__}](#{cls.__name__.lower()}) {members[cls].tag}" for cls in classes)
        lines.append(f"| {heading.replace(' to ', ' → ')} | {named} |")
    for heading, classes in directions():
        lines += ["", f"## {heading.capitalize()}", ""]
        for cls in classes:
            lines += section(members[cls])
            inner(members[cls], found)
    lines += ["## Values", ""]
    for kind in found.values():
        if isinstance(kind, msgspec.inspect.StructType):
            lines += section(kind)
    lines += ["## Enumerations", ""]
    for kind in found.values():
        if isinstance(kind, msgspec.inspect.EnumType):
            words = comments(kind.cls)
            lines += [
                f"### {kind.cls.__name__}",
                "",
                prose(inspect.getdoc(kind.cls)),
                "",
                "| value | name | |",
                "|---|---|---|",
            ]
            lines += [f"| `{one.value!r}` | {one.name} | {cell(words.get(one.name, ''))} |" for one in kind.cls]
            lines.append("")
    lines += ["## Scalars", "", "| name | type |", "|---|---|"]
    for name, alias in _SCALARS.items():
        kind = msgspec.inspect.type_info(alias)
        is_array = isinstance(kind, msgspec.inspect.VarTupleType)
        what = "array of [TokenId](#scalars)" if is_array else type(kind).__name__.removesuffix("Type").lower()
        lines.append(f"| `{name}` | {what}{bounds(kind)} |")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
