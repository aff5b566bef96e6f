"""What a pipeline tells its caller about its own life, beside the tokens."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from dgr.model.route import Route

__all__ = ["Cancelled", "Event", "Prefilled", "RePrefilled", "RouteChanged", "RouteDown", "StateLost"]


@frozen
class Prefilled:
    """New tokens of a session were run through every stage for the first time."""

    session: int
    tokens: int
    #: From the first chunk sent to the last one answered.
    seconds: float


@frozen
class StateLost:
    """A session's state is gone; it will be re-prefilled when it is next used."""

    session: int
    reason: str


@frozen
class RePrefilled:
    """A session's transcript was run again from token 0."""

    session: int
    #: Why: ``route change``, ``evicted``, ``expired``, ``poisoned``, ``diverged``, ...
    reason: str
    tokens: int
    seconds: float


@frozen
class Cancelled:
    """A generation was given up; the session is kept at ``position``."""

    session: int
    position: int


@frozen
class RouteChanged:
    """Every stage of the new route fenced the new epoch."""

    epoch: int
    route: Route
    sessions_dropped: int
    bytes_released: int
    seconds: float


@frozen
class RouteDown:
    """A stage or a link of the route was lost; the pipeline tries to fence it anew until it answers."""

    epoch: int
    why: str


Event: TypeAlias = Prefilled | StateLost | RePrefilled | Cancelled | RouteChanged | RouteDown
