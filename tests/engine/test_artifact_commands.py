"""``dgr inspect --identity``, ``dgr slice`` and ``dgr fixture --parts`` as people run them."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from narrow import present

from dgr.artifact.artifact import Artifact
from dgr.artifact.manifest import decode_manifest
from dgr.cli import main
from dgr.cli.progress import progress_bar
from dgr.engine.llama import ADAPTER
from dgr.engine.native import build_info, kernel_fingerprint
from dgr.selftest.fixture import write_fixture
from dgr.wire.frames import SCHEMA_HASH

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small, tmp_path / "m.gguf"))


def said(capsys: Capture, *argv: object) -> dict[str, Any]:
    assert main([*map(str, argv), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Capture, *argv: object) -> str:
    assert main([*map(str, argv)]) == 2
    return capsys.readouterr().err


def test_identity_tells_what_a_handshake_compares(small: Path, capsys: Capture) -> None:
    found = said(capsys, "inspect", small, "--identity")
    manifest = Artifact.open(small).manifest()
    assert found == {
        "model": str(small),
        "identity": manifest.identity,
        "manifest_digest": manifest.digest,
        "metadata_digest": manifest.metadata,
        "n_tensors": len(manifest.tensors),
        "layers": "0:7",
        "range_digest": found["range_digest"],
        "adapter": ADAPTER,
        "schema_version": found["schema_version"],
        "schema_hash": SCHEMA_HASH,
        "runtime": found["runtime"],
        "llama_cpp_commit": build_info()["llama_cpp_commit"],
        "patch_digest": build_info()["patch_digest"],
        "kernel_fingerprint": kernel_fingerprint(),
    }
    part = said(capsys, "inspect", small, "--identity", "--layers", "2:4")
    assert (part["identity"], part["layers"]) == (found["identity"], "2:4")
    assert part["range_digest"] != found["range_digest"]
    assert main(["inspect", str(small), "--identity"]) == 0
    assert f"identity            {manifest.identity}\n" in capsys.readouterr().out
    assert said(capsys, "inspect", small)["identity"] == manifest.identity


def test_a_manifest_travels_where_the_parts_do_not(tmp_path: Path, capsys: Capture) -> None:
    write_fixture(tmp_path / "m.gguf", preset="min", layers=5, parts=4)
    first, beside = tmp_path / "m-00001-of-00004.gguf", tmp_path / "m.manifest.json"
    written = beside.read_bytes()
    beside.unlink()
    found = said(capsys, "inspect", first, "--identity", "--manifest")
    assert found["manifest"] == str(beside)
    assert beside.read_bytes() == written
    elsewhere = tmp_path / "elsewhere.json"
    assert said(capsys, "inspect", first, "--identity", "--manifest", elsewhere)["manifest"] == str(elsewhere)
    assert decode_manifest(elsewhere.read_bytes(), elsewhere) == Artifact.open(first).manifest()
    (tmp_path / "m-00003-of-00004.gguf").unlink()
    assert said(capsys, "inspect", first, "--identity")["identity"] == found["identity"]
    shown = said(capsys, "inspect", first)
    assert shown["missing_files"] == [str(tmp_path / "m-00003-of-00004.gguf")]
    assert shown["identity"] == found["identity"]
    assert main(["inspect", str(first)]) == 0
    assert "tensors in 3 of 4 parts" in capsys.readouterr().out
    beside.unlink()
    assert "put the manifest here as m.manifest.json" in refused(capsys, "inspect", first, "--identity")
    assert said(capsys, "inspect", first)["identity"] is None


def test_a_manifest_that_the_weights_beside_it_contradict(copy: Path, capsys: Capture) -> None:
    said(capsys, "inspect", copy, "--identity", "--manifest")
    tensor = Artifact.open(copy).file.tensors["output.weight"]
    with copy.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\0\1\2\3")
    assert "but the weights beside it are" in refused(capsys, "inspect", copy, "--identity")
    renewed = said(capsys, "inspect", copy, "--identity", "--manifest")["identity"]
    assert said(capsys, "inspect", copy, "--identity")["identity"] == renewed


def test_slice(copy: Path, capsys: Capture) -> None:
    out = copy.with_name("s.gguf")
    found = said(capsys, "slice", copy, "--layers", "2:4", "-o", out)
    whole = said(capsys, "inspect", copy, "--identity", "--layers", "2:4")
    assert (found["path"], found["layers"], found["identity"]) == (str(out), "2:4", whole["identity"])
    assert found["file_bytes"] == out.stat().st_size
    part = said(capsys, "inspect", out, "--identity")
    assert {key: part[key] for key in part if key != "model"} == {key: whole[key] for key in whole if key != "model"}
    assert found["range_digest"] == part["range_digest"]
    assert said(capsys, "inspect", out)["slice"] == "2:4"
    assert main(["inspect", str(out)]) == 0
    assert "; a slice: layers 2:4" in capsys.readouterr().out
    assert main(["slice", str(copy), "--layers", "0:2", "-o", str(out)]) == 0
    assert "layers 0:2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("slice", "m.gguf", "--layers", "5:9", "-o", "s.gguf"),
            "5:9 ends beyond the last main layer; the model has 7",
        ),
        (("slice", "m.gguf", "--layers", "5-9", "-o", "s.gguf"), "is not of the form A:B"),
        (("slice", "m.gguf", "--layers", "0:2", "-o", "m.gguf"), "it is what is read, by this or another name"),
        (("slice", "absent.gguf", "--layers", "0:2", "-o", "s.gguf"), "cannot be read: No such file"),
        (("inspect", "v4-flash", "--identity"), "stands for widths, not for weights"),
        (("inspect", "m.gguf", "--manifest"), "give both"),
        (("inspect", "m.gguf", "--identity", "--layers", "6:8"), "6:8 ends beyond"),
        (("fixture", "x.gguf", "--parts", "0"), "0 parts asked for"),
        (("fixture", "x.gguf", "--preset", "min", "--layers", "1", "--parts", "99"), "can be written in 2 to 31"),
    ],
)
def test_refusals(
    copy: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(copy.parent)
    assert message in refused(capsys, *argv)
    assert [path.name for path in copy.parent.iterdir()] == ["m.gguf"]


def test_fixture_in_parts(tmp_path: Path, capsys: Capture) -> None:
    found = said(capsys, "fixture", tmp_path / "m.gguf", "--preset", "min", "--layers", "3", "--parts", "3")
    assert found["path"] == str(tmp_path / "m-00001-of-00003.gguf")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)), "m.manifest.json"]
    assert found["file_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.gguf"))
    again = said(
        capsys, "fixture", tmp_path / "m.gguf", "--preset", "min", "--layers", "3", "--parts", "3", "--seed", "4"
    )
    assert Artifact.open(again["path"]).identity == Artifact.open(again["path"]).read_manifest().identity


def test_a_new_single_file_forgets_the_manifest_of_the_old_one(copy: Path, capsys: Capture) -> None:
    said(capsys, "inspect", copy, "--identity", "--manifest")
    write_fixture(copy, preset="min", layers=3)
    assert not copy.with_name("m.manifest.json").exists()
    assert Artifact.open(copy).identity


def test_a_progress_bar_for_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with progress_bar("reading") as progress:
        assert progress is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("reading") as progress:
        assert progress is not None
        progress(1 << 20, 4 << 20)
        progress(4 << 20, 4 << 20)
    drawn = terminal.getvalue()
    assert "reading [#######" in drawn
    assert "25% of 4.00 MiB" in drawn
    assert "100% of 4.00 MiB" in drawn
    assert drawn.endswith("\r\x1b[K")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.slow
def test_hosts_that_have_only_their_slice_answer_as_the_whole_model(
    tiny: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Three processes, each with a file of its own layers and nothing else, as `dgr up` starts them."""
    stages = list(zip(("0:15", "15:29", "29:43"), free_ports(3), strict=True))
    lines = ['model = "0.gguf"', "[context]", "n_ctx = 512"]
    for layers, port in stages:
        name = f"{layers.split(':')[0]}.gguf"
        said(capsys, "slice", tiny, "--layers", layers, "-o", tmp_path / name)
        lines += ["[[stage]]", f'address = "127.0.0.1:{port}"', f'layers = "{layers}"', f'model = "{name}"']
    route = tmp_path / "route.toml"
    route.write_text("\n".join(lines))
    ask = ("--prompt", "The quick brown fox", "-n", 12)
    with subprocess.Popen(
        [sys.executable, "-m", "dgr", "up", route, "--json"], stdout=subprocess.PIPE, env=os.environ, text=True
    ) as up:
        try:
            ready = [json.loads(present(up.stdout).readline()) for _ in stages]
            assert {event["event"] for event in ready} == {"ready"}
            answer = said(capsys, "generate", "--route", route, *ask)
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(60)
    assert answer["tokens"] == said(capsys, "generate", "--model", tiny, *ask)["tokens"]
