"""Pages that are written from the code say what the code says, and all of it."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from pages.reading import ROOT, anchors
from scripts import loaded

import dgr
import dgr.errors
from dgr.errors import DgrError
from dgr.wire.frames import Frame

#: Tested where their tables are: states in tests/protocol, the MTP contract in tests/mtp.
ELSEWHERE = {"draw_states", "draw_mtp"}
SCRIPTS = [path for path in sorted((ROOT / "docs").glob("draw_*.py")) if path.stem not in ELSEWHERE]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_is_what_its_script_writes(script: Path) -> None:
    drawing = loaded(script)
    assert drawing.PAGE.read_text(encoding="utf-8") == drawing.page(), "run: make pages"


def test_the_scripts_are_those() -> None:
    assert {path.stem for path in SCRIPTS} == {"draw_data_path", "draw_errors", "draw_frames", "draw_state_map"}


def test_the_catalogue_has_every_error() -> None:
    errors = {
        name.lower() for name, found in inspect.getmembers(dgr.errors, inspect.isclass) if issubclass(found, DgrError)
    }
    assert {name.lower() for name in dgr.errors.__all__} == errors
    assert errors <= anchors(ROOT / "docs/errors.md")


def test_a_new_error_without_a_step_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    script = next(path for path in SCRIPTS if path.stem == "draw_errors")
    monkeypatch.setattr(dgr.errors.SessionLost, "__doc__", "Another cause.")
    drawing = loaded(script)
    assert drawing.PAGE.read_text(encoding="utf-8") != drawing.page()


def test_the_page_of_frames_has_every_frame_and_field() -> None:
    text = (ROOT / "docs/frames.md").read_text(encoding="utf-8")
    for frame in typing.get_args(Frame):
        section = text.split(f"\n### {frame.__name__}\n")[1].split("\n### ")[0]
        for field in msgspec.structs.fields(frame):
            assert f"| `{field.name}` |" in section, (frame, field.name)


def test_the_picture_is_a_picture() -> None:
    tree = ET.fromstring((ROOT / "docs/data-path.svg").read_text(encoding="utf-8"))
    words = [element.text for element in tree.iter() if element.tag.endswith("text")]
    for word in ("ClientSession", "Tokens", "Boundary", "Token", "LlamaEngine", "head, layers 0:15"):
        assert word in words
    _, _, width, height = map(float, tree.attrib["viewBox"].split())
    for element in tree.iter():
        if element.tag.endswith("text"):
            assert 0 <= float(element.attrib["x"]) <= width
            assert 0 <= float(element.attrib["y"]) <= height


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE))
    for name in listed:
        module, _, last = name.rpartition(".")
        is_module = (ROOT / f"{name.replace('.', '/')}.py").exists()
        assert is_module or hasattr(importlib.import_module(module), last), name
    homes = {name: getattr(dgr, name).__module__ for name in dgr.__all__}
    missing = [name for name, home in homes.items() if not {home, f"{home}.{name}"} & listed]
    assert missing == ["DgrError"], "errors have a page of their own"
