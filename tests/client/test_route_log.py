"""What a log says of a route, at the level that commands have by default."""

from __future__ import annotations

import logging

import pytest

from dgr.client.events import EventHub, RouteChanged, RouteDown
from dgr.core.route import LayerRange, Route, StageRef

ROUTE = Route((StageRef("a:1", LayerRange(0, 6)),))


def test_a_route_that_is_lost_and_that_is_live_again_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dgr.route")
    hub = EventHub()
    live = [RouteChanged(epoch, ROUTE, 0, 0, 0.0) for epoch in (1, 2, 3)]
    for event in (live[0], RouteDown(1, "stage a:1: closed"), RouteDown(1, "no reply"), live[1], live[2]):
        hub.emit(event)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "the route is live: a:1 (0:6)"),
        ("WARNING", "the route is down: stage a:1: closed"),
        ("WARNING", "the route is down: no reply"),
        ("WARNING", "the route is live again: a:1 (0:6)"),
        ("INFO", "the route is live: a:1 (0:6)"),
    ]
