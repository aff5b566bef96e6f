"""What a run of the simulation reports, and how many faults it is to inject."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def wanted() -> tuple[str | None, int]:
    """The seed and the faults that ``make test-chaos SEED=… FAULTS=…`` was given; by default a new seed and 10 000 faults."""
    return os.environ.get("DGR_CHAOS_SEED") or None, int(os.environ.get("DGR_CHAOS_FAULTS") or 10_000)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Say something at once, whatever pytest captures."""
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None

    def say(what: object) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{what}", flush=True)

    return say
