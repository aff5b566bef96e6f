"""`dgr benchmark`: what ranges took is split into calls, layers and ends; the file that it writes is one that plans read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from fixture_types import Model
from narrow import present

from dgr.artifact.artifact import Artifact
from dgr.artifact.slicing import write_slice
from dgr.artifact.speeds import HostSpeed, layer_kinds, read_speed, stage_seconds
from dgr.cli import main
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine import speeds
from dgr.engine.base import Output, ShardEngine, Work
from dgr.engine.llama import LlamaEngine
from dgr.engine.speeds import SpeedPlan, measure_speed

Capture = pytest.CaptureFixture[str]

#: What a call, a head and a tail take here, and a layer by the beginning of its kind; seconds, for each token.
CALL, HEAD, TAIL = 0.5, 3.0, 7.0
LAYER = {"SWA": 1.0, "CSA": 4.0, "HCA": 2.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class CostingEngine(LlamaEngine):
    """Runs nothing; what it would take passes on a clock."""

    clock: Clock
    kinds: Sequence[str]
    #: By how much a layer takes longer beside others, which share its cache.
    crowded = 1.0

    def run(self, batch: Sequence[Work]) -> list[Output]:
        layers, tokens = self.describe().layers, sum(len(work.tokens) for work in batch)
        for work in batch:
            assert (
                len(present(work.residual)) == 4 * len(work.tokens) * self.describe().width_in if layers.begin else True
            )
        each = sum(LAYER[self.kinds[layer][:3]] for layer in layers.layers)
        each *= self.crowded if len(layers) > 1 else 1.0
        ends = HEAD * (layers.begin == 0) + TAIL * (layers.end == len(self.kinds))
        self.clock.now += CALL + tokens * (each + ends)
        return [Output(work.slot) for work in batch]


def _measured(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> tuple[HostSpeed, list[LayerRange]]:
    clock, ranges = Clock(), []
    monkeypatch.setattr(speeds, "time", clock)

    def opened(artifact: Artifact, layers: LayerRange, context: ContextParams, threads: int) -> ShardEngine:
        engine = CostingEngine(artifact, layers, context, threads=threads)
        engine.clock, engine.kinds = clock, layer_kinds(artifact)
        ranges.append(layers)
        return engine

    context = ContextParams(n_ubatch=128, n_batch=128)
    return measure_speed(artifact, context, SpeedPlan(sequences=(1, 3), depth=8), open_engine=opened), ranges


@pytest.fixture(scope="module")
def host(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a host."""
    path = tmp_path_factory.mktemp("speeds") / "host.json"
    with pytest.MonkeyPatch.context() as patch:
        path.write_bytes(msgspec.json.encode(_measured(Artifact.open(small), patch)[0]))
    return path


@pytest.mark.parametrize("layers", [7, 43])
def test_what_ranges_took_is_split_as_it_was_made_up(
    layers: int, small: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact.open({7: small, 43: tiny}[layers])
    kinds = layer_kinds(artifact)
    speed, ranges = _measured(artifact, monkeypatch)
    assert max(map(len, ranges)) == 4
    assert [timing.sequences for timing in speed.decode] == [1, 3]
    assert [timing.tokens for timing in speed.prefill] == [64, 128]
    for timing in (*speed.decode, *speed.prefill):
        tokens = timing.sequences * timing.tokens
        assert timing.call == pytest.approx(CALL)
        assert timing.layers == {kind: pytest.approx(tokens * LAYER[kind[:3]]) for kind in {*kinds}}
        assert [timing.head, timing.tail] == pytest.approx([tokens * HEAD, tokens * TAIL])
    for begin, end in ((0, layers), (2, 5), (0, 3), (4, layers)):
        whole = CALL + sum(LAYER[kinds[layer][:3]] for layer in range(begin, end))
        whole += HEAD * (begin == 0) + TAIL * (end == layers)
        assert stage_seconds(speed, kinds, LayerRange(begin, end)) == pytest.approx(whole)


def test_layers_that_are_slower_beside_others_are_taken_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostingEngine, "crowded", 2.0)
    artifact = Artifact.open(tiny)
    kinds = layer_kinds(artifact)
    speed, _ = _measured(artifact, monkeypatch)
    has = stage_seconds(speed, kinds, LayerRange(10, 30))
    assert has == pytest.approx(2 * sum(LAYER[kinds[layer][:3]] for layer in range(10, 30)), rel=0.05)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_models_of_few_layers_are_split_so_that_the_whole_is_right(
    layers: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = Artifact.open(model("f32", layers=layers))
    kinds = layer_kinds(artifact)
    speed, _ = _measured(artifact, monkeypatch)
    whole = CALL + sum(LAYER[kind[:3]] for kind in kinds) + HEAD + TAIL
    assert stage_seconds(speed, kinds, artifact.hp.whole) == pytest.approx(whole, rel=0.5)


def test_a_host_is_measured_and_a_plan_made_of_it(
    small: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "host.json"
    quick = ("--ubatch", "32", "--sequences", "1,2", "--depth", "4")
    assert main(["benchmark", str(small), *quick, "-o", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    speed = read_speed(out)
    assert (printed["host"], printed["threads"]) == (speed.host, 1)
    assert {*speed.decode[0].layers} == {*layer_kinds(Artifact.open(small))}
    kinds = layer_kinds(Artifact.open(small))
    assert all(stage_seconds(speed, kinds, LayerRange(layer, layer + 1)) > 0 for layer in range(7))

    argv = ["plan", str(small), "--ctx", "512", "--sessions", "4", "--speeds", f"{out},{out}", "--hops", "10ms/1MiB"]
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["stages"]) == 2
    assert plan["predicted"]["ring"] == pytest.approx(0.016 + sum(plan["predicted"]["decode"]), rel=0.2)
    assert plan["predicted"]["tokens_per_second"] > 1 / plan["predicted"]["ring"]
    assert "host.json was measured with at most 2 sequences" in caplog.text
    caplog.clear()
    assert main([*argv, "--sessions", "2", "--json"]) == 0
    assert "was measured with" not in caplog.text
    capsys.readouterr()
    assert main([*argv, "--memory", "1MiB"]) == 2
    assert "no plan fits" in capsys.readouterr().err
    assert main([*argv, "--goal", "prefill"]) == 0
    shown = capsys.readouterr().out
    assert "chunk, ms" in shown
    assert "tokens/s of one session" in shown
    assert "4 sessions together" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speeds", "none.json", "--stages", "2"), "cannot read none.json"),
        (("--speeds", "{host},{host},{host}", "--stages", "2"), "3 files of speeds for 2 stages"),
        (("--speeds", "{host}", "--stages", "2", "--hops", "fast"), "hop 'fast' is not like 0.5ms/1GiB"),
        (("--speeds", "{host}", "--stages", "2", "--hops", "1ms/much"), "'much' is neither bytes"),
        (
            ("--speeds", "{host}", "--stages", "2", "--hops", "1ms/1GiB,2ms/1GiB"),
            "2 hops for 2 stages; give one for all, or 3",
        ),
        (("--speeds", "{host}", "--stages", "2", "--prompt", "0"), "--prompt is 0"),
        (("--speeds", "{host}", "--stages", "2", "--numerics", "native"), "was measured with exact numerics"),
    ],
)
def test_bad_asks_of_a_plan(flags: tuple[str, ...], message: str, small: Path, host: Path, capsys: Capture) -> None:
    assert main(["plan", str(small), "--ctx", "512", *(flag.format(host=host) for flag in flags)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sequences", "one"), "--sequences is 'one'"),
        (("--sequences", "2,4"), "sequences are (2, 4); they must ascend from 1"),
        (("--depth", "0"), "depth is 0"),
        (("--threads", "0"), "threads is 0"),
        (("-o", "absent/host.json"), "absent/host.json cannot be written"),
    ],
)
def test_bad_asks_of_a_benchmark(flags: tuple[str, ...], message: str, small: Path, capsys: Capture) -> None:
    assert main(["benchmark", str(small), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_slice_lacks_what_must_be_measured(small: Path, tmp_path: Path, capsys: Capture) -> None:
    write_slice(Artifact.open(small), LayerRange(2, 4), tmp_path / "slice.gguf")
    assert main(["benchmark", str(tmp_path / "slice.gguf")]) == 2
    assert "slice" in capsys.readouterr().err
