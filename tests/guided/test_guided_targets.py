"""The targets of coverage-guided fuzzing: what they begin with, what they once fell over, and small changes of both."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from guided.targets import TARGETS, run_framer, run_frames

from dgr.testing.hostile_files.text_damage import damaged_bytes
from dgr.wire.framing import Framer

REGRESSIONS = Path(__file__).parent / "regressions"


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_reads_whole_objects_and_those_that_are_nearly(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    assert seeds
    for seed in seeds:
        target.run(seed)
    for _ in range(60):
        target.run(damaged_bytes(rng, rng.choice(seeds)))


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_once_found_is_found_no_more(path: Path) -> None:
    TARGETS[path.parent.name].run(path.read_bytes())


def test_a_framer_that_reads_otherwise_in_pieces_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a message that came in one piece is not looked at as closely."""
    (said,) = [seed for seed in TARGETS["framer"].seeds() if len(seed) == max(map(len, TARGETS["framer"].seeds()))]
    monkeypatch.setattr(Framer, "_whole_message", lambda self, view: view[8:] if view.nbytes == len(said) else None)
    with pytest.raises(AssertionError):
        run_framer(said)


def test_frames_that_are_written_otherwise_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = TARGETS["frames"].seeds()
    monkeypatch.setattr("guided.targets.encode_message", lambda _: bodies[1])
    with pytest.raises(AssertionError):
        run_frames(bodies[0])
