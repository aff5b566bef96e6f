"""The same schedule in every run: trio shuffles tasks that are ready, on purpose, and these tests must not depend on luck.

``DGR_TEST_SCHEDULE`` in the environment chooses another schedule, to look for races. A test that is about a race takes a
parameter ``schedule`` and is run in several.
"""

from __future__ import annotations

import os

import pytest
import trio


@pytest.fixture(autouse=True)
def same_schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    callspec = getattr(request.node, "callspec", None)
    own = 0 if callspec is None else callspec.params.get("schedule", 0)
    trio._core._run._r.seed(int(os.environ.get("DGR_TEST_SCHEDULE", "0")) + 1000 * own)
