"""Fields of a log record beside its text: whose state it is about.

A log in JSON has each under its name. Never a prompt or a token: a log is read by more people than a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LOG_FIELDS", "log_fields", "short_route"]

#: Every field there is, in the order in which they are shown.
LOG_FIELDS = ("route", "epoch", "session", "trace")

_ROUTE_DIGITS = 8


def short_route(route: bytes) -> str:
    """The beginning of a route session's id, in hex: enough to tell a stage's few apart, and no use to a stranger."""
    return route.hex()[:_ROUTE_DIGITS]


def log_fields(route: bytes, epoch: int | None = None, session: int | None = None) -> Mapping[str, object]:
    """``extra`` of a call of :mod:`logging`."""
    known = {"route": short_route(route), "epoch": epoch, "session": session}
    return {name: value for name, value in known.items() if value is not None}
