"""``dgr plan``: buffers counted by the native allocator, a table, and a route file that the other commands read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from narrow import as_a

from dgr.artifact.artifact import Artifact
from dgr.artifact.slicing import write_slice
from dgr.cli import main
from dgr.cluster.route_file import format_route_file, read_route_file
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.llama import estimate_memory
from dgr.selftest.fixture import write_fixture

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "real.gguf"
    write_fixture(path, preset="real", weights="mixed", sparse=True)
    return path


def plan(*argv: object) -> int:
    return main(["plan", *map(str, argv)])


@pytest.mark.slow
def test_v4_flash_on_four_hosts(real: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "routes" / "route.toml"
    out.parent.mkdir()
    argv = ("--stages", 4, "--ctx", 1048576, "--memory", "64GiB,24GiB,48GiB,48GiB", "-o", out)
    assert plan(real, *argv, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["artifact"] is None  # that would read 146 GiB
    context = ContextParams(n_ctx=1048576)
    artifact = Artifact.open(real)
    for stage in found["stages"]:
        layers = LayerRange.parse(stage["layers"])
        report = estimate_memory(artifact, layers, context)
        assert stage["weights_bytes"] == artifact.weight_bytes(layers)
        assert stage["state_bytes"] == sum(report.state.values())
        assert stage["total_bytes"] == report.total <= stage["memory_bytes"]  # what `dgr stage --memory` counts
    file = read_route_file(out)
    file.route.check(43)
    assert [str(ref.layers) for ref in file.route.stages] == [stage["layers"] for stage in found["stages"]]
    assert [ref.address for ref in file.route.stages] == [f"127.0.0.1:{port}" for port in range(7701, 7705)]
    assert file.model is not None
    assert file.model.samefile(real)
    assert (file.context["n_ctx"], file.context["n_seq_max"]) == (1048576, 1)


@pytest.mark.slow
def test_hosts_that_are_too_small(real: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "route.toml"
    assert plan(real, "--stages", 4, "--ctx", 1048576, "--memory", "40GiB", "-o", out) == 2
    shown = capsys.readouterr()
    assert "lacks 1.11 GiB" in shown.out
    assert "no plan fits; in the best one, 127.0.0.1:7701 (layers 0:11): weights 40527324744 B + state" in shown.err
    assert "over its memory of 42949672960 B" in shown.err
    assert not out.exists()


@pytest.mark.slow
def test_more_sessions_take_more_state(real: Path, capsys: Capture) -> None:
    states = []
    for sessions in (1, 4):
        assert plan(real, "--stages", 2, "--ctx", 32768, "--sessions", sessions, "--json") == 0
        states.append(sum(stage["state_bytes"] for stage in json.loads(capsys.readouterr().out)["stages"]))
    assert states == [271466496, 4 * 271466496]


def test_a_route_that_runs(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    identity = Artifact.open(tiny).identity
    assert plan(tiny, "--ctx", 512, "--addresses", "10.0.0.1:7701,10.0.0.2:7702", "-o", "-") == 0
    text = capsys.readouterr().out
    (tmp_path / "route.toml").write_text(text)
    file = read_route_file(tmp_path / "route.toml")
    assert [ref.address for ref in file.route.stages] == ["10.0.0.1:7701", "10.0.0.2:7702"]
    assert file.artifact in (None, identity)
    layers = [len(ref.layers) for ref in file.route.stages]
    assert abs(layers[0] - layers[1]) <= 1


def test_a_slice_knows_enough_to_plan_the_whole(small: Path, tmp_path: Path, capsys: Capture) -> None:
    write_slice(Artifact.open(small), LayerRange(2, 4), tmp_path / "slice.gguf")
    answers = []
    for path in (small, tmp_path / "slice.gguf"):
        assert plan(path, "--stages", 3, "--ctx", 512, "--json") == 0
        answers.append(json.loads(capsys.readouterr().out)["stages"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--ctx", 512), "say how many stages"),
        (("--ctx", 512, "--stages", 9), "9 stages asked for, but the model has 7 layers"),
        (("--ctx", 512, "--stages", 2, "--memory", "1,2,3"), "3 memory sizes for 2 stages"),
        (("--ctx", 512, "--stages", 2, "--memory", "much"), "'much' is neither bytes"),
        (("--ctx", 512, "--stages", 2, "--addresses", "a:1"), "1 addresses for 2 stages"),
        (("--ctx", 512, "--addresses", "a:1,a:1"), "names stage 'a:1' twice"),
        (("--ctx", 0, "--stages", 2), "n_ctx is 0"),
        (("--ctx", 512, "--stages", 2, "-o", "absent/route.toml"), "absent/route.toml cannot be written"),
    ],
)
def test_bad_asks(small: Path, capsys: Capture, argv: tuple[object, ...], message: str) -> None:
    assert plan(small, *argv) == 2
    assert message in capsys.readouterr().err


def test_a_route_file_survives_its_text(tmp_path: Path) -> None:
    path = tmp_path / "a" / "route.toml"
    path.parent.mkdir()
    path.write_text(
        'artifact = "b5"\nmodel = "../m \\"q\\".gguf"\n[context]\nn_ctx = 8192\nflash_attn = false\ntype_k = "f16"\n'
        '[tls]\nca = "k/ca.pem"\ncertificate = "k/c.pem"\nkey = "/k/c.key"\n'
        '[[stage]]\naddress = "10.0.0.1:1"\nlayers = "0:22"\nmodel = "s.gguf"\n[[stage]]\naddress = "h:2"\nlayers = "22:43"\n'
    )
    file = read_route_file(path)
    assert file.stage_models == {"10.0.0.1:1": path.parent / "s.gguf"}
    path.write_text(format_route_file(file))
    again = read_route_file(path)
    assert again.route == file.route
    assert again.context == file.context
    assert again.artifact == file.artifact
    paths = [[each.model, *(each.tls or ()), *each.stage_models.values()] for each in (file, again)]
    assert [as_a(Path, path).resolve() for path in paths[0]] == [as_a(Path, path).resolve() for path in paths[1]]
    assert len(paths[0]) == 5
