"""The places that the contract was read from: the list is sound, and a place that changes is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scripts import loaded

VENDOR = Path(__file__).parents[2] / "vendor" / "llama.cpp"
SCRIPT = VENDOR / "check_mtp_anchors.py"
SOURCE = "int one;\n    int two = 2;\nint three;\n\nint four;\n"
LIST = """\
[[anchor]]
id = "two"
file = "src/a.cpp"
line = 2
lines = 2
text = "int two = 2;"
digest = ""
says = "Two is \\"2\\"."

[[anchor]]
id = "four"
file = "src/a.cpp"
line = 5
lines = 1
text = "int four;"
digest = ""
says = "There is a four."
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(SCRIPT)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of one file, and a list of two recorded places in it."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "anchors.toml").write_text(LIST, encoding="utf-8")
    assert check(tmp_path, "--write").returncode == 0
    return tmp_path


def check(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--tree", str(tree), "--anchors", str(tree / "anchors.toml"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_has_not_changed_passes(tree: Path) -> None:
    found = check(tree)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("2 places in 1 files")
    (tree / "src" / "a.cpp").write_text(SOURCE.replace("    int", "\tint"), encoding="utf-8")
    assert check(tree).returncode == 0, "indentation does not count"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("int zero;\n" + SOURCE, ("two", "the text is now at line 3", "four", "the text is now at line 6")),
        (SOURCE.replace("= 2", "= 3"), ("two: src/a.cpp:2-3: the text is gone", "int two = 2;", 'Two is "2".')),
        (SOURCE.replace("three", "tree"), ("two: src/a.cpp:2-3: the lines behind it changed",)),
        (SOURCE.replace("int four;\n", ""), ("four: src/a.cpp:5: the text is gone",)),
        (None, ("two", "four", "the file is not there")),
    ],
    ids=["moved", "text", "behind", "gone", "file"],
)
def test_a_place_that_changed_is_told(changed: str | None, words: tuple[str, ...], tree: Path) -> None:
    source = tree / "src" / "a.cpp"
    if changed is None:
        source.unlink()
    else:
        source.write_text(changed, encoding="utf-8")
    found = check(tree)
    assert found.returncode == 1
    for word in (*words, "docs/mtp-contract.md", "--write"):
        assert word in found.stderr


def test_writing_records_what_moved_and_refuses_what_is_gone(tree: Path) -> None:
    (tree / "src" / "a.cpp").write_text("int zero;\n" + SOURCE, encoding="utf-8")
    assert check(tree, "--write").returncode == 0
    assert "line = 3\n" in (tree / "anchors.toml").read_text(encoding="utf-8")
    (tree / "src" / "a.cpp").write_text(SOURCE.replace("int four;\n", ""), encoding="utf-8")
    found = check(tree, "--write")
    assert found.returncode != 0
    assert "four: 'int four;' is not in src/a.cpp" in found.stderr


def test_the_list_is_sound(script: ModuleType) -> None:
    anchors = script.read_anchors()
    assert len(anchors) >= 60
    for anchor in anchors:
        assert anchor.text == anchor.text.strip() != ""
        assert anchor.line > 0
        assert anchor.lines > 0
        assert len(anchor.digest) == 16
        assert anchor.says.endswith(".")
        assert not Path(anchor.file).is_absolute()
