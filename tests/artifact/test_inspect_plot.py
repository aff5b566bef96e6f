"""``dgr inspect --plot``: the picture shows what the state map and the file say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dgr.artifact.artifact import Artifact
from dgr.cli import main
from dgr.cli.inspect_plot import draw_cut
from dgr.core.route import LayerRange, parse_split
from dgr.core.units import human_bytes
from dgr.selftest.fixture import write_fixture
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.state_map import ContextShape, state_map

SVG = "{http://www.w3.org/2000/svg}"
SHAPE = ContextShape(32768)


def boxes(picture: bytes) -> list[tuple[str, bool]]:
    """What every box says, and whether it is of a stage."""
    root = ElementTree.fromstring(picture)
    return [
        (title.text or "", box.get("fill-opacity") is None)
        for box in root.iter(f"{SVG}rect")
        for title in box.iter(f"{SVG}title")
    ]


def words(picture: bytes) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def wrong_facts(picture: bytes, stages: tuple[LayerRange, ...]) -> list[str]:
    """Where a picture of the published widths says otherwise than the state map."""
    said, found = boxes(picture), []
    whole = state_map(V4_FLASH, V4_FLASH.whole, SHAPE)
    owned = {layer for layers in stages for layer in layers.layers}
    for layer in range(V4_FLASH.n_layers):
        kind = next((line, is_owned) for line, is_owned in said if line.startswith(f"layer {layer}: "))
        state = [
            (line, is_owned) for line, is_owned in said if line.startswith(f"layer {layer}: ") and " of state: " in line
        ]
        size = human_bytes(whole.layer_bytes(layer))
        if V4_FLASH.kind(layer).value not in kind[0] or kind[1] != (layer in owned):
            found.append(f"the kind of layer {layer}")
        if not state or any(f"{size} of state" not in line or is_owned != (layer in owned) for line, is_owned in state):
            found.append(f"the state of layer {layer}")
    for number, layers in enumerate(stages, 1):
        total = human_bytes(state_map(V4_FLASH, layers, SHAPE).total_bytes)
        if not any(
            line.startswith(f"stage {number}: layers {layers}") and f"state {total}" in line for line in words(picture)
        ):
            found.append(f"stage {number}")
    return found


@pytest.mark.parametrize("split", ["0:43", "0:15,15:29,29:43"])
def test_every_layer_is_drawn_with_its_kind_and_its_state(split: str) -> None:
    stages = parse_split(split, 43)
    assert wrong_facts(draw_cut("v4-flash", V4_FLASH, SHAPE, stages), stages) == []


def test_what_no_stage_owns_is_pale() -> None:
    stages = (LayerRange(4, 9),)
    picture = draw_cut("v4-flash", V4_FLASH, SHAPE, stages)
    assert wrong_facts(picture, stages) == []
    assert wrong_facts(picture, (LayerRange(4, 10),)) == ["the kind of layer 9", "the state of layer 9", "stage 1"]


def test_a_picture_of_another_context_is_caught() -> None:
    picture = draw_cut("v4-flash", V4_FLASH, ContextShape(65536), (V4_FLASH.whole,))
    assert len(wrong_facts(picture, (V4_FLASH.whole,))) > 40


def test_the_command_draws_a_file_with_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "m<&>.gguf", tmp_path / "cut.svg"
    write_fixture(model, layers=7, sparse=True)
    command = ["inspect", str(model), "--plot", str(out), "--split", "0:3,3:7", "--ctx", "1024"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"plot": str(out), "stages": ["0:3", "3:7"]}
    artifact, picture = Artifact.open(model), out.read_bytes()
    for layers in parse_split("0:3,3:7", 7):
        assert any(f"weights {human_bytes(artifact.weight_bytes(layers))}" in line for line in words(picture))
    assert sum(" of weights" in line for line, _ in boxes(picture)) == 7
    assert str(model) in words(picture)[0]
    # Nothing is drawn beyond the paper, nor fetched.
    root = ElementTree.fromstring(picture)
    _, _, width, height = map(float, str(root.get("viewBox")).split())
    for box in list(root.iter(f"{SVG}rect"))[1:]:
        x, y, wide, high = (float(str(box.get(name))) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height
    assert not re.search(rb"href|<image|<script|url\(", picture)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--split", "0:43"], "give --plot with it"),
        (["--split", "0:43", "--layers", "0:3", "--plot", "x.svg"], "no --layers"),
        (["--plot", "x.svg", "--split", "0:3,4:43"], "leaves out layers"),
        (["--plot", "x.svg", "--layers", "40:44"], "44"),
        (["--plot", "no-such-folder/x.svg"], "no folder"),
    ],
)
def test_flags_that_make_no_picture_are_refused(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "v4-flash", *flags]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
