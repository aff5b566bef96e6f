"""The journal: what is measured is written down at once, and an interrupted run goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dgr.errors import InputError
from dgr_bench.results import SCHEMA, Check, Journal, Result, digest_of, median, read_result

PLAN = {"name": "test", "lengths": [1, 2]}
SUBJECT = {"artifact": "a" * 32}


def begin(folder: Path, plan: dict | None = None, *, subject: dict | None = None, kind="certify", fresh: bool = False):
    return Journal.open(folder, kind, plan or PLAN, subject or SUBJECT, "dgr-bench test", fresh=fresh)


def check(passed: bool) -> Check:
    return Check(name="one", passed=passed, cases=1, detail="")


def test_what_is_put_is_on_disk_at_once(tmp_path: Path):
    begin(tmp_path).put("unit/1", {"seconds": 0.25})
    found = read_result(tmp_path)
    assert found.units == {"unit/1": {"seconds": 0.25}}
    assert not found.complete
    assert not found.passed


def test_an_interrupted_run_goes_on(tmp_path: Path):
    begin(tmp_path).put("unit/1", {"seconds": 0.25})
    again = begin(tmp_path)
    assert again.get("unit/1") == {"seconds": 0.25}
    assert again.get("unit/2") is None
    again.put("unit/2", {"seconds": 0.5})
    result = again.finish({"median_s": 0.375}, [check(True)])
    assert result.passed
    found = read_result(tmp_path)
    assert (found.complete, len(found.commands), len(found.loads)) == (True, 2, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": {**PLAN, "lengths": [1, 3]}}, "plan digest"),
        ({"subject": {"artifact": "b" * 32}}, "subject"),
        ({"kind": "drill"}, "kind"),
    ],
)
def test_another_run_is_not_resumed_unless_told_to(tmp_path: Path, change: dict, words: str):
    begin(tmp_path).put("unit/1", {"seconds": 0.25})
    with pytest.raises(InputError, match=f"another {words}.*--fresh"):
        begin(tmp_path, **change)
    assert begin(tmp_path, **change, fresh=True).get("unit/1") is None


def test_a_failed_check_is_no_pass_and_neither_is_an_unfinished_run(tmp_path: Path):
    journal = begin(tmp_path)
    assert not journal.finish({}, [check(True), check(False)]).passed
    assert journal.finish({}, [check(True)]).passed
    journal.put("unit/3", {})
    assert not read_result(tmp_path).passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no result"),
        ("{}", "no result"),
        ('{"schema": 1}', "no result"),
    ],
)
def test_a_file_that_is_no_result(tmp_path: Path, text: str, words: str):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_result(path)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(InputError, match="cannot read"):
        read_result(tmp_path / "none.json")


def _changed(folder: Path, **fields: object) -> Path:
    result = msgspec.json.decode((folder / "result.json").read_bytes(), type=Result)
    (folder / "result.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(result, **fields)))
    return folder


def test_a_result_of_another_schema(tmp_path: Path):
    begin(tmp_path).put("unit/1", {})
    with pytest.raises(InputError, match=f"dgr-bench/99.*{SCHEMA}"):
        read_result(_changed(tmp_path, schema="dgr-bench/99"))


def test_a_plan_that_was_changed_afterwards(tmp_path: Path):
    begin(tmp_path).put("unit/1", {})
    with pytest.raises(InputError, match="the plan has digest"):
        read_result(_changed(tmp_path, plan={**PLAN, "lengths": [1]}))


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest_of({"a": 1, "b": [2, 3]}) == digest_of({"b": [2, 3], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_medians():
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
