"""A union of messages as plain lists, and their digest: what both ends of a link must have in common."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

__all__ = ["describe", "schema_hash"]


def describe(schema: Any) -> Any:
    """A type as plain lists: names, order, tags, bounds and defaults, but no prose.

    Docstrings stay out (and so does msgspec's own JSON schema, which has them): two hosts that differ in a comment, in
    ``-OO`` or in how their Python indents docstrings still speak the same schema.
    """
    match schema:
        case msgspec.inspect.StructType():
            settings = [schema.cls.__name__, schema.tag, schema.array_like, schema.forbid_unknown_fields]
            return [*settings, [[field.name, describe(field.type), repr(field.default)] for field in schema.fields]]
        case msgspec.inspect.EnumType():
            return [schema.cls.__name__, [[member.name, member.value] for member in schema.cls]]
        case msgspec.inspect.Type():
            return [type(schema).__name__, describe(msgspec.structs.asdict(schema))]
        case dict():
            return [[name, describe(value)] for name, value in sorted(schema.items()) if value is not None]
        case tuple():
            return [describe(item) for item in schema]
        case _:
            return repr(schema)


def schema_hash(union: Any) -> str:
    """Digest of a union's schema, hex."""
    described = msgspec.json.encode(describe(msgspec.inspect.type_info(union)))
    return hashlib.blake2b(described, digest_size=16).hexdigest()
