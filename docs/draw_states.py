"""Draw every state machine of the runtime from its table: ``python docs/draw_states.py`` writes docs/state-machines.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from dgr.core.state_machine import Table
from dgr.protocol.states import MACHINES

PAGE = Path(__file__).with_name("state-machines.md")
#: What each machine is the state of.
TITLES = {
    "session": "A session on one shard",
    "epoch": "A route session on one shard",
    "client session": "A session as its client sees it",
    "route": "A route as its client sees it",
}
INTRODUCTION = """\
# State machines

Drawn from the tables in `dgr/protocol/states.py` by `docs/draw_states.py`; a test keeps this page up to date. A pair of state
and event that is not in the table is refused with `InvalidTransition`: it would be a defect of the runtime.
"""


def comments(members: type[Enum]) -> Mapping[str, str]:
    """The ``#:`` comment above each member."""
    found, lines = {}, []
    for line in inspect.getsource(members).splitlines():
        if comment := re.match(r"\s*#: (.*)", line):
            lines.append(comment[1])
        elif member := re.match(r"\s*([A-Z_]+) = ", line):
            found[member[1]], lines = " ".join(lines), []
    return found


def diagram(table: Table[Any, Any]) -> Iterator[str]:
    """Mermaid lines; events that lead from one state to the same other one share an arrow."""
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, event), following in table.transitions.items():
        arrows.setdefault((state, following), []).append(event.value)
    yield "stateDiagram-v2"
    yield f"    [*] --> {table.first.value}"
    for (state, following), events in arrows.items():
        yield f"    {state.value} --> {following.value}: {', '.join(events)}"
    left = {state for state, _ in table.transitions}
    for state in table.states:
        if state not in left:
            yield f"    {state.value} --> [*]"


def section(heading: str, table: Table[Any, Any]) -> Iterator[str]:
    """A machine: its diagram, and what its states and events mean."""
    yield from (heading, "", "```mermaid", *diagram(table), "```")
    for what, members in (("state", table.states), ("event", table.events)):
        yield ""
        yield f"| {what} | meaning |"
        yield "|---|---|"
        words = comments(members)
        for member in members:
            yield f"| {member.value} | {words[member.name]} |"
    yield ""


def page() -> str:
    lines = [INTRODUCTION]
    for name, table in MACHINES.items():
        lines += section(f"## {TITLES[name]}", table)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
