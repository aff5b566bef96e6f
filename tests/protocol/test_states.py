"""The state machines as tables: every pair of state and event is a transition or refused, and the drawing is of today."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import pytest
from narrow import members
from scripts import loaded

from dgr.core.state_machine import InvalidTransition, StateMachine
from dgr.protocol import states
from dgr.protocol.states import MACHINES

DRAWING = Path(__file__).parents[2] / "docs" / "draw_states.py"


@pytest.mark.parametrize("name", MACHINES)
def test_a_pair_outside_the_table_is_refused_and_moves_nothing(name: str) -> None:
    table = MACHINES[name]
    absent = [
        pair
        for pair in itertools.product(members(table.states), members(table.events))
        if pair not in table.transitions
    ]
    assert absent, "a table that allows everything guards nothing"
    for state, event in absent:
        machine = StateMachine(table)
        machine.state = state
        assert not machine.can(event)
        with pytest.raises(InvalidTransition, match=f"no transition from {state.name} on {event.name}"):
            machine.fire(event)
        assert machine.state is state


@pytest.mark.parametrize("name", MACHINES)
def test_tables_speak_of_their_own_states_and_events_only(name: str) -> None:
    table = MACHINES[name]
    for (state, event), following in table.transitions.items():
        assert state in table.states
        assert event in table.events
        assert following in table.states
    assert {event for _, event in table.transitions} == set(members(table.events)), "an event that nothing obeys"


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_is_reached(name: str) -> None:
    table = MACHINES[name]
    reached, new = {table.first}, {table.first}
    while new:
        new = {following for (state, _), following in table.transitions.items() if state in new} - reached
        reached |= new
    assert reached == set(members(table.states))


@pytest.mark.parametrize(
    ("name", "last"), [("session", "closed"), ("epoch", "gone"), ("client session", "closed"), ("route", "closed")]
)
def test_the_last_state_has_no_exit_and_every_other_leads_to_it(name: str, last: str) -> None:
    table = MACHINES[name]
    end = table.states(last)
    assert {state for state in members(table.states) if state not in {left for left, _ in table.transitions}} == {end}
    ending = {end}
    while True:
        more = {state for (state, _), following in table.transitions.items() if following in ending} - ending
        if not more:
            break
        ending |= more
    assert ending == set(members(table.states))


def test_a_machine_begins_where_its_table_says() -> None:
    first = {"session": "idle", "epoch": "unfenced", "client session": "cold", "route": "fencing"}
    assert {name: StateMachine(table).state.value for name, table in MACHINES.items()} == first


def test_there_is_no_way_to_end_a_session_twice_or_to_work_a_poisoned_one() -> None:
    """Rules that the tables must keep whatever is added to them."""
    session = states.SESSION.transitions
    assert (states.SessionState.POISONED, states.SessionEvent.WORK) not in session
    assert (states.SessionState.CLOSING, states.SessionEvent.WORK) not in session
    assert (states.SessionState.RUNNING, states.SessionEvent.WORK) not in session, "one step at a time"
    client = states.CLIENT_SESSION.transitions
    refusing = (
        states.ClientState.COLD,
        states.ClientState.LOST,
        states.ClientState.DRAINING,
        states.ClientState.DIVERGING,
    )
    for state in refusing:
        assert (state, states.ClientEvent.SEND) not in client, "only a session that every stage holds is sent work"
    epoch = states.EPOCH.transitions
    admits = {state for (state, _), following in epoch.items() if following is states.EpochState.LIVE}
    assert admits == {states.EpochState.FENCING}, "no epoch is live that was not fenced"


@pytest.fixture
def drawing() -> ModuleType:
    return loaded(DRAWING)


def test_the_page_of_diagrams_is_up_to_date(drawing: ModuleType) -> None:
    assert drawing.PAGE.read_text(encoding="utf-8") == drawing.page(), "run: python docs/draw_states.py"


def test_the_page_shows_every_transition(drawing: ModuleType) -> None:
    page = drawing.page()
    for table in MACHINES.values():
        assert f"[*] --> {table.first.value}" in page
        for (state, event), following in table.transitions.items():
            arrows = [
                line for line in page.splitlines() if line.startswith(f"    {state.value} --> {following.value}:")
            ]
            assert any(event.value in line.partition(": ")[2].split(", ") for line in arrows)
        for member in [*members(table.states), *members(table.events)]:
            assert f"| {member.value} | " in page
