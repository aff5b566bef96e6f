"""The version is in pyproject.toml; whatever repeats it says the same."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import dgr

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
#: What would be a copy of the version: an image, a file of a release, a dgr that is named with its number.
COPIES = re.compile(r"(?:\bdgr[:-]|\bdgr )(\d+\.\d+\.\d+)")


def wrong_copies(texts: dict[str, str]) -> list[str]:
    """Copies that say another version, with the file that they are in."""
    return [
        f"{name}: {found[0]}" for name, text in texts.items() for found in COPIES.finditer(text) if found[1] != VERSION
    ]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Every recipe and page, by its name; what was measured names the version that it was measured with."""
    listed = ["git", "ls-files", "*.md", "*.yaml", "*.toml", "*Dockerfile", "*.service", "*.html"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    past = ("CHANGELOG.md", ".scratch/", "docs/benchmarks.md", "docs/certificates.md", "vendor/")
    return {name: (ROOT / name).read_text() for name in names if not name.startswith(past)}


def test_every_copy_of_the_version_is_the_one_of_pyproject(texts: dict[str, str]) -> None:
    assert "deploy/docker/Dockerfile" in texts
    assert wrong_copies(texts) == []


def test_a_copy_that_was_left_behind_is_caught(texts: dict[str, str]) -> None:
    old = texts["deploy/docker/Dockerfile"].replace(f"dgr:{VERSION}", "dgr:0.0.9")
    assert wrong_copies({"Dockerfile": old}) == ["Dockerfile: dgr:0.0.9"] * old.count("dgr:0.0.9")


def test_the_package_says_it() -> None:
    assert dgr.__version__ == version("dgr") == VERSION


def test_the_changelog_has_a_section_of_it() -> None:
    assert re.search(rf"^## {re.escape(VERSION)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
