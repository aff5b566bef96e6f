"""The state machines as tables: every pair of state and event is a transition or refused, and the drawing is of today."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

from dgr.runtime import states
from dgr.runtime.states import MACHINES, InvalidTransition, Machine

DRAWING = Path(__file__).parents[2] / "docs" / "draw_states.py"
PAIRS = [
    (name, state, event)
    for name, (kinds, events, _table, _first) in MACHINES.items()
    for state in kinds
    for event in events
]


@pytest.mark.parametrize(
    ("name", "state", "event"), PAIRS, ids=lambda value: value.name if isinstance(value, Enum) else value
)
def test_every_pair_is_a_transition_or_refused(name: str, state: Enum, event: Enum) -> None:
    _states, _events, table, first = MACHINES[name]
    machine = Machine(table, first)
    machine.state = state
    allowed = (state, event) in table
    assert machine.can(event) == allowed
    if allowed:
        assert machine.fire(event) is table[state, event]
        assert machine.state is table[state, event]
    else:
        with pytest.raises(InvalidTransition, match=f"no transition from {state.name} on {event.name}"):
            machine.fire(event)
        assert machine.state is state


@pytest.mark.parametrize("name", MACHINES)
def test_tables_speak_of_their_own_states_and_events_only(name: str) -> None:
    kinds, events, table, first = MACHINES[name]
    assert first in kinds
    for (state, event), following in table.items():
        assert state in kinds
        assert event in events
        assert following in kinds
    assert {event for _, event in table} == set(events), "an event that nothing obeys"


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_is_reached(name: str) -> None:
    kinds, _events, table, first = MACHINES[name]
    reached, new = {first}, {first}
    while new:
        new = {following for (state, _), following in table.items() if state in new} - reached
        reached |= new
    assert reached == set(kinds)


@pytest.mark.parametrize(
    ("name", "last"), [("session", "closed"), ("epoch", "gone"), ("client", "closed"), ("route", "closed")]
)
def test_the_last_state_has_no_exit_and_every_other_leads_to_it(name: str, last: str) -> None:
    kinds, _events, table, _first = MACHINES[name]
    end = kinds(last)
    assert {state for state in kinds if state not in {left for left, _ in table}} == {end}
    ending = {end}
    while True:
        more = {state for (state, _), following in table.items() if following in ending} - ending
        if not more:
            break
        ending |= more
    assert ending == set(kinds)


def test_a_machine_begins_where_its_table_says() -> None:
    made = {
        "session": states.session_machine(),
        "epoch": states.epoch_machine(),
        "client": states.client_machine(),
        "route": states.route_machine(),
    }
    assert {name: machine.state for name, machine in made.items()} == {
        name: first for name, (_s, _e, _t, first) in MACHINES.items()
    }


def test_there_is_no_way_to_end_a_session_twice_or_to_work_a_poisoned_one() -> None:
    """Rules that the tables must keep whatever is added to them."""
    _s, _e, session, _f = MACHINES["session"]
    assert (states.SessionState.POISONED, states.SessionEvent.WORK) not in session
    assert (states.SessionState.CLOSING, states.SessionEvent.WORK) not in session
    assert (states.SessionState.RUNNING, states.SessionEvent.WORK) not in session, "one step at a time"
    _s, _e, client, _f = MACHINES["client"]
    for state in (states.ClientState.COLD, states.ClientState.LOST, states.ClientState.DRAINING):
        assert (state, states.ClientEvent.SEND) not in client, "only a session that every stage holds is sent work"
    _s, _e, epoch, _f = MACHINES["epoch"]
    admits = {state for (state, _), following in epoch.items() if following is states.EpochState.LIVE}
    assert admits == {states.EpochState.FENCING}, "no epoch is live that was not fenced"


@pytest.fixture
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_states", DRAWING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_diagrams_is_up_to_date(drawing: ModuleType) -> None:
    assert drawing.PAGE.read_text(encoding="utf-8") == drawing.page(), "run: python docs/draw_states.py"


def test_the_page_shows_every_transition(drawing: ModuleType) -> None:
    page = drawing.page()
    for kinds, events, table, first in MACHINES.values():
        assert f"[*] --> {first.value}" in page
        for (state, event), following in table.items():
            arrows = [
                line for line in page.splitlines() if line.startswith(f"    {state.value} --> {following.value}:")
            ]
            assert any(event.value in line.partition(": ")[2].split(", ") for line in arrows)
        for member in [*kinds, *events]:
            assert f"| {member.value} | " in page
