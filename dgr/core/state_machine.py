"""State machines as flat tables: a pair of state and event is in the table, or refused.

The tables themselves are where the states are, :mod:`dgr.protocol.states` first of all; the documentation draws its diagrams
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from attrs import frozen

__all__ = ["InvalidTransition", "StateMachine", "Table"]

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class InvalidTransition(RuntimeError):
    """An event that its table does not allow in the present state: a defect of whoever fired it."""


@frozen
class Table(Generic[S, E]):
    """(state, event) -> state, and the state it begins with."""

    transitions: Mapping[tuple[S, E], S]
    first: S

    @property
    def states(self) -> type[S]:
        """The enum of its states."""
        return type(self.first)

    @property
    def events(self) -> type[E]:
        """The enum of its events."""
        _state, event = next(iter(self.transitions))
        return type(event)

    def follow(self, state: S, event: E) -> S:
        """The next state; raises :class:`InvalidTransition` for a pair that is not in the table."""
        following = self.transitions.get((state, event))
        if following is None:
            raise InvalidTransition(f"{type(state).__name__}: no transition from {state.name} on {event.name}")
        return following

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self.transitions


class StateMachine(Generic[S, E]):
    """A state, and the table that moves it."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table[S, E]) -> None:
        self._table = table
        self.state = table.first

    def fire(self, event: E) -> S:
        """Move along the table; a pair that is not in it is refused, and nothing moves."""
        self.state = self._table.follow(self.state, event)
        return self.state

    def can(self, event: E) -> bool:
        """Whether the table allows the event now."""
        return self._table.allows(self.state, event)
