"""Values of a known kind out of unions: what is of another kind fails the test and is shown."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


def as_a(kind: type[T], value: object) -> T:
    """The value, which must be of a kind."""
    assert isinstance(value, kind), f"not a {kind.__name__}: {value!r}"
    return value


def all_of(kind: type[T], values: Iterable[object]) -> list[T]:
    """Values which must all be of a kind."""
    return [as_a(kind, value) for value in values]


def only(kind: type[T], values: Iterable[object]) -> T:
    """The only value of some, which must be of a kind."""
    (value,) = all_of(kind, values)
    return value


def present(value: T | None) -> T:
    """A value that may be None, and here is not: a pipe that a process was started with, a limit that a schema has."""
    assert value is not None
    return value


def members(kind: type[Enum]) -> list[Any]:
    """All members of an enum, which is not known more closely."""
    return list(kind)
