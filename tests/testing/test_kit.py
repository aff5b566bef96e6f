"""The kit's public face, and how its folders are kept."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import dgr
import dgr.testing

PACKAGE = Path(dgr.__file__).parent
PAGE = PACKAGE.parent / "docs" / "testing.md"

#: Most modules of a folder, and most siblings that begin with the same word: what is more becomes a folder of its own.
MOST_MODULES, MOST_SIBLINGS = 13, 2


def promised(page: str) -> set[str]:
    """Names of the table of the kit, and those that the page's samples import from it."""
    page = page.partition("\n## Where is X tested?")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    imported = re.findall(r"^from dgr\.testing import (.+)$", page, re.MULTILINE)
    return {name for text in rows for name in re.findall(r"`(\w+)`", text)} | {
        name for text in imported for name in re.split(r",\s*", text)
    }


def test_what_the_page_promises_is_imported_from_the_kit_itself() -> None:
    names = promised(PAGE.read_text(encoding="utf-8"))
    assert len(names) > 20
    assert names <= set(dgr.testing.__all__)
    assert all(hasattr(dgr.testing, name) for name in dgr.testing.__all__)


def untidy(names: list[str]) -> list[str]:
    """What is wrong with a folder of modules of these names."""
    siblings = Counter(name.partition("_")[0] for name in names)
    return [f"{len(names)} modules"] * (len(names) > MOST_MODULES) + [
        f"{count} modules begin with {word!r}" for word, count in siblings.items() if count > MOST_SIBLINGS
    ]


@pytest.mark.parametrize("folder", ["testing", "selftest"])
def test_a_family_of_modules_is_a_folder(folder: str) -> None:
    for path in [PACKAGE / folder, *(PACKAGE / folder).rglob("*/")]:
        names = [file.stem for file in path.glob("*.py") if file.stem != "__init__"]
        assert untidy(names) == [], path


def test_an_untidy_folder_would_be_seen() -> None:
    assert untidy(["a", "fake", "fake_more"]) == []
    assert untidy(["mtp_a", "mtp_b", "mtp"]) == ["3 modules begin with 'mtp'"]
    assert untidy([chr(97 + index) for index in range(14)]) == ["14 modules"]
