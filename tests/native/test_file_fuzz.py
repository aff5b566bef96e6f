"""Damaged files at every door to native code: a typed refusal, or a load. The process lives, and so does its memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dgr
from dgr.testing.file_damage import DIRECTED, KINDS
from dgr.testing.file_fuzz import DOORS, fuzz


def test_damaged_files_are_refused_or_load() -> None:
    report = fuzz(seed=1, n_cases=4 * len(KINDS))
    assert report.findings == ()
    assert report.loaded > 20  # weights that differ, and bits that mean nothing
    assert report.refused > len(DIRECTED) * len(DOORS) // 2


@pytest.mark.parametrize("case", ["equal tokens", "a scale of integers"])
def test_a_file_that_ends_the_process_is_a_finding(case: str) -> None:
    """Without dgr's checks it does; so the cases above are not an empty threat."""
    report = fuzz(seed=1, n_cases=10, only=case, unchecked=True)
    assert [finding.case for finding in report.findings] == [case]
    assert "ended the process: -6" in report.findings[0].what


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_thousand_damaged_files_are_refused_or_load(seed: int) -> None:
    assert fuzz(seed, 1000).findings == ()


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
