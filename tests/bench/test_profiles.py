"""Profiles lock a certificate before the run: a changed one has another digest, and another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dgr.errors import InputError
from dgr.v4.state_map import ContextShape
from dgr_bench.certify.profiles import PROFILES, Chunking, profile_of

#: Certificates name these. Whoever changes a profile gives it another name.
DIGESTS = {
    "fixture": "a9366d42ed46b62813d3499a9a0308b5",
    "quick": "f236035d6fd6993e944e06cd7c6381b2",
    "v4-flash": "6c8afbf84fd7f526d56e1e83d7f37be2",
    "fixture-2": "483d6335a0f03f09e570548f790aac86",
    "quick-2": "a17feb930e37deb6f5fc087f9ebb874d",
}


@pytest.mark.parametrize("name", PROFILES)
def test_the_digest_of_a_profile_is_locked(name: str) -> None:
    assert PROFILES[name].digest == DIGESTS[name]


@pytest.mark.parametrize("name", ["fixture", "quick"])
def test_a_second_profile_adds_sessions_beside_each_other_and_nothing_else(name: str) -> None:
    first, second = PROFILES[name], PROFILES[f"{name}-2"]
    assert msgspec.structs.replace(second, name=name, several=msgspec.UNSET) == first
    assert first.slots == 0 < second.slots == max(second.together)
    assert set(second.forked) <= set(second.lengths) - {1}
    assert all(len(second.lengths_together(sessions)) == sessions for sessions in second.together)


def test_the_fixture_profile_covers_both_sides_of_every_border() -> None:
    profile = PROFILES["fixture"]
    lengths = set(profile.lengths)
    ring = ContextShape(profile.n_ctx, profile.n_ubatch).raw_rows(128)
    for border in (4, 128, profile.chunk, 128 + profile.n_ubatch, ring, 2 * profile.chunk):
        assert {border - 1, border, border + 1} <= lengths, border
    assert 1 in lengths
    assert max(lengths) >= 16384
    assert max(lengths) >= 8 * profile.chunk


def test_the_real_profile_has_the_lengths_of_the_story() -> None:
    assert [round(length / 1024) for length in PROFILES["v4-flash"].lengths] == [4, 32, 120, 256, 1024]
    assert PROFILES["v4-flash"].n_ctx <= 1 << 20


def _file(folder: Path, **changes: object) -> str:
    path = folder / "mine.json"
    profile = msgspec.structs.replace(PROFILES["quick"], **{"name": "mine", **changes})
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    profile = profile_of(_file(tmp_path, lengths=(2, 9), rerun=(9,)))
    assert profile.lengths == (2, 9)
    assert profile.digest != PROFILES["quick"].digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": ()}, "must ascend"),
        ({"lengths": (9, 2), "rerun": ()}, "must ascend"),
        ({"lengths": (2, 9), "rerun": (3,)}, "not run"),
        ({"name": "quick", "decode": 7}, "name of its own"),
        ({"lengths": (0, 9), "rerun": ()}, "not a profile"),
        ({"decode": 1}, "not a profile"),
        ({"chunk": 129}, "more than n_batch, 128"),
        ({"chunkings": (Chunking(chunk=200, up_to=5),)}, "more than n_batch, 128"),
        ({"cancel_chunk": 129}, "more than n_batch, 128"),
        ({"threads": (1,)}, "not a profile"),
        ({"seed": -1}, "not a profile"),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        profile_of(_file(tmp_path, **changes))


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(PROFILES["quick"]), "name": "mine", "extra": 1}))
    with pytest.raises(InputError, match="extra"):
        profile_of(str(path))


@pytest.mark.parametrize("name", ["nothing", "no/such/file.json"])
def test_an_unknown_profile(name: str) -> None:
    with pytest.raises(InputError, match=r"choose fixture, quick, v4-flash|cannot read"):
        profile_of(name)
