"""Damaged files of every kind at every door: a typed refusal, or a load. The process lives, and so does its memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dgr
from dgr.testing.file_fuzz import fuzz, kind_named
from dgr.testing.hostile_files.kinds import KINDS

#: Kinds that pass native code.
MODELS = ("model", "parts", "slice", "manifest", "mtp")
#: What has a test of its own, or its place in the default suite.
_LATER = tuple(kind for kind in KINDS if kind not in ("model", "route"))


def test_damaged_models_are_refused_or_load() -> None:
    kind = kind_named("model")
    report = fuzz(seed=1, n_cases=len(kind.damages))
    assert report.findings == ()
    assert report.loaded > 5  # weights that differ, and bits that mean nothing
    assert report.refused > len(kind.directed) * len(kind.doors) // 2


@pytest.mark.parametrize("kind", ["route", *(pytest.param(kind, marks=pytest.mark.slow) for kind in _LATER)])
def test_damaged_files_are_refused_or_load(kind: str) -> None:
    """A child for each takes longer than what it does."""
    report = fuzz(seed=1, n_cases=20 if kind in MODELS else 100, kind=kind)
    assert report.findings == ()
    assert report.refused > 0 or kind == "digests"  # what cannot be read is read anew


@pytest.mark.slow
@pytest.mark.parametrize("case", ["equal tokens", "a scale of integers"])
def test_a_file_that_ends_the_process_is_a_finding(case: str) -> None:
    """Without dgr's checks it does; so the cases above are not an empty threat."""
    report = fuzz(seed=1, n_cases=10, only=case, mutant="hands over")
    assert [finding.case for finding in report.findings] == [case]
    assert "ended the process: -6" in report.findings[0].what


@pytest.mark.parametrize(
    ("kind", "mutant", "case"),
    [
        ("model", "trusts counts", "a text of a tebibyte"),
        pytest.param("route", "reads all", "zeros without end", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_trusts_a_file_is_a_finding(kind: str, mutant: str, case: str) -> None:
    """Room is made for what a file announces, or all of it is read: there are not so many gigabytes."""
    report = fuzz(seed=1, n_cases=1, kind=kind, mutant=mutant, only=case)
    assert report.findings[0].what.startswith("MemoryError")


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_damaged_files_are_refused_or_load(kind: str) -> None:
    report = fuzz(seed=10, n_cases=2400, kind=kind)
    print(report)
    assert report.findings == ()


def test_one_module_alone_hands_files_to_native_code() -> None:
    """It checks them first, so no door can forget to."""
    root = Path(dgr.__file__).parent
    callers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("dgr_stage_open", "dgr_vocab_open")
    }
    assert callers == {"engine/files.py"}
