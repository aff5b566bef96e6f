"""The journal: what is measured is written down at once, and an interrupted run goes on where it stopped."""

from __future__ import annotations

import lzma
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrow import present

from dgr.errors import InputError
from dgr_bench.quartiles import median
from dgr_bench.results import SCHEMA, Journal, Kind, Result, digest_of, read_result
from dgr_bench.verdicts import Check

PLAN = {"name": "test", "lengths": [1, 2]}
SUBJECT = {"artifact": "a" * 32}


def begin(
    folder: Path,
    plan: dict[str, Any] | None = None,
    *,
    subject: dict[str, Any] | None = None,
    kind: Kind = "certify",
    fresh: bool = False,
) -> AbstractContextManager[Journal]:
    return Journal.open(folder, kind, plan or PLAN, subject or SUBJECT, "dgr-bench test", fresh=fresh)


def record(folder: Path) -> None:
    with begin(folder) as journal:
        journal.put("unit/1", {"seconds": 0.25})


def check(passed: bool) -> Check:
    return Check(name="one", passed=passed, cases=1, detail="")


def test_what_is_put_is_on_disk_at_once(tmp_path: Path) -> None:
    record(tmp_path)
    found = read_result(tmp_path)
    assert found.units == {"unit/1": {"seconds": 0.25}}
    assert not found.complete
    assert not found.passed


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    record(tmp_path)
    with begin(tmp_path) as again:
        assert again.units == {"unit/1": {"seconds": 0.25}}
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
def test_another_run_is_not_resumed_unless_told_to(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    record(tmp_path)
    with pytest.raises(InputError, match=f"another {words}.*--fresh"), begin(tmp_path, **change):
        pass
    with begin(tmp_path, **change, fresh=True) as journal:
        assert journal.units == {}


def test_a_failed_check_is_no_pass_and_neither_is_an_unfinished_run(tmp_path: Path) -> None:
    with begin(tmp_path) as journal:
        assert not journal.finish({}, [check(True), check(False)]).passed
        assert journal.finish({}, [check(True)]).passed
        journal.put("unit/3", {})
    assert not read_result(tmp_path).passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a result"),
        ("{}", "not a result"),
        ('{"schema": 1}', "not a result"),
    ],
)
def test_a_file_that_is_no_result(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_result(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_result(tmp_path / "none.json")


def _changed(folder: Path, **fields: object) -> Path:
    result = msgspec.json.decode((folder / "result.json").read_bytes(), type=Result)
    (folder / "result.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(result, **fields)))
    return folder


def test_a_result_of_another_schema(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(InputError, match=f"dgr-bench/99.*{SCHEMA}"):
        read_result(_changed(tmp_path, schema="dgr-bench/99"))


def test_a_plan_that_was_changed_afterwards(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(InputError, match="the plan has digest"):
        read_result(_changed(tmp_path, plan={**PLAN, "lengths": [1]}))


def test_a_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest_of({"a": 1, "b": [2, 3]}) == digest_of({"b": [2, 3], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with begin(tmp_path) as first:
        first.put("unit/1", {"seconds": 0.25})
        for fresh in (False, True):
            words = f"another run of dgr-bench writes to {tmp_path}; wait for it, or give another --out"
            with pytest.raises(InputError, match=words), begin(tmp_path, fresh=fresh):
                pass
        first.put("unit/2", {"seconds": 0.5})
    with begin(tmp_path) as again:
        assert set(again.units) == {"unit/1", "unit/2"}


_HOLDER = """
import sys
from dgr_bench.results import Journal
with Journal.open(sys.argv[1], "certify", {"name": "test"}, {}, "") as journal:
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["goes well", "is killed"])
def test_another_process_holds_its_folder_until_it_ends(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-P", "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert present(holder.stdout).readline() == b"holds\n"
        with pytest.raises(InputError, match="another run of dgr-bench"), begin(tmp_path):
            pass
        if end == "is killed":
            holder.kill()
    with begin(tmp_path, fresh=True) as journal:
        assert journal.units == {}


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = r"cannot write to the folder .*file/out: .*give another --out"
    with pytest.raises(InputError, match=words), begin(tmp_path / "file" / "out"):
        pass


def test_a_refused_run_lets_go_of_the_folder(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(InputError, match="another kind"), begin(tmp_path, kind="drill"):
        pass
    with begin(tmp_path) as journal:
        assert set(journal.units) == {"unit/1"}


def test_a_result_is_compact_and_may_be_packed(tmp_path: Path) -> None:
    record(tmp_path)
    before, text = read_result(tmp_path), (tmp_path / "result.json").read_bytes()
    assert text.count(b"\n") == 1
    assert b": " not in text.replace(b"dgr-bench test", b"").split(b'"commands"')[0].split(b'"environment"')[0]
    (tmp_path / "result.json.xz").write_bytes(lzma.compress(text))
    (tmp_path / "result.json").unlink()
    assert read_result(tmp_path) == read_result(tmp_path / "result.json.xz") == before
    (tmp_path / "result.json.xz").write_bytes(b"no archive")
    with pytest.raises(InputError, match="not a result"):
        read_result(tmp_path)


def test_a_result_of_the_schema_before_goes_on_in_this_one(tmp_path: Path) -> None:
    record(tmp_path)
    _changed(tmp_path, schema="dgr-bench/1")
    assert read_result(tmp_path).schema == "dgr-bench/1"
    with begin(tmp_path) as journal:
        assert journal.finish({}, [check(True)]).schema == SCHEMA


def test_medians() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
