"""Layers at the published widths: closed forms against published figures, what checks catch, and one run on narrow layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve

from dgr import LayerRange, Numerics
from dgr.core.host import available_memory
from dgr.engine.base import Output, Work
from dgr.gguf.writer import TensorForm
from dgr.selftest.fixture.presets import tensor_type
from dgr.testing.native_measurements import MeasuredEngine, Operation, Roof
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.tensors import range_tensors
from dgr_bench.cli import main
from dgr_bench.results import read_result
from dgr_bench.widths import command
from dgr_bench.widths.measurements import cut, run_range
from dgr_bench.widths.metrics import checks, metrics, unit_names
from dgr_bench.widths.parts import PARTS, REST, part_of
from dgr_bench.widths.plan import WidthsJob, WidthsPlan
from dgr_bench.widths.roofline import Demand, demand_of, output_demand, representatives

Units = dict[str, dict[str, Any]]


# --- what a layer takes at least -------------------------------------------------------------------------------------


def forms() -> dict[str, TensorForm]:
    """The tensors of the published model in the types of ``mixed``."""
    specs = range_tensors(V4_FLASH, V4_FLASH.whole)
    return {spec.name: TensorForm(spec.name, spec.ne, tensor_type(spec, "mixed")) for spec in specs if spec.required}


PUBLISHED = forms()


def demand(layer: int, n_tokens: int, position: int) -> Demand:
    return demand_of(V4_FLASH, PUBLISHED, layer, n_tokens, position)


def test_a_token_multiplies_by_13_g_parameters() -> None:
    """The published figure: 284 G parameters, of which 13 G are active."""
    demands = [demand(layer, 1, 0) for layer in range(43)] + [output_demand(V4_FLASH, PUBLISHED)]
    assert sum(sum(one.operations.values()) for one in demands) / 2 / 1e9 == pytest.approx(13, abs=0.5)


def test_experts_are_read_as_often_as_they_are_hit() -> None:
    one, two, many = (demand(3, n, 0).weight_bytes for n in (1, 2, 100_000))
    experts = 3 * 4096 * 2048 * 256 * 17 / 32
    dense = one - experts * 6 / 256
    assert 0 < dense < 0.3e9
    assert two - dense == pytest.approx(experts * (1 - (250 / 256) ** 2))
    assert many == pytest.approx(sum(form.n_bytes for name, form in PUBLISHED.items() if name.startswith("blk.3.")))


@pytest.mark.parametrize(
    ("layer", "per_token"),
    # Rows behind a position: CSA reads the indexer's, a quarter as many of 128 f16; HCA one of 512 f16 for 128 tokens.
    [(1, 0.0), (2, 256 / 4), (3, 1024 / 128)],
)
def test_state_grows_as_its_rows_do(layer: int, per_token: float) -> None:
    near, far = (demand(layer, 1, position) for position in (100_000, 900_000))
    assert far.state_bytes - near.state_bytes == pytest.approx(800_000 * per_token)
    assert far.weight_bytes == near.weight_bytes
    more = sum(far.operations.values()) - sum(near.operations.values())
    wanted = {1: 0.0, 2: 2 * 64 * 128 * 200_000, 3: 4 * 64 * 512 * 800_000 / 128}[layer]
    assert more == pytest.approx(wanted)


def test_a_roof_is_what_takes_longer() -> None:
    one = demand(2, 1, 0)
    roofs: dict[str, float] = {Roof.READ: one.n_bytes, Roof.F32: 1e12, Roof.BF16: 1e12, Roof.INT8: 1e12}
    memory, computing = one.seconds(roofs)
    assert memory == 1
    assert computing == pytest.approx(sum(one.operations.values()) / 1e12)
    assert one.seconds({**roofs, Roof.INT8: 0.0}) == (memory, computing)  # unknown: that of f32


def test_one_layer_of_each_kind_stands_for_it() -> None:
    assert representatives(LayerRange(0, 4), 4) == {"SWA": 1, "CSA": 2, "HCA": 3}
    assert representatives(LayerRange(0, 7), 7) == {"SWA": 1, "CSA": 2, "HCA": 3}
    assert representatives(LayerRange(41, 43), 43) == {"CSA": 42, "HCA": 41}
    assert representatives(LayerRange(0, 1), 43) == {"SWA": 0}
    assert cut(LayerRange(3, 6)) == (LayerRange(3, 4), LayerRange(4, 6))


@pytest.mark.parametrize(
    ("op", "name", "part"),
    [
        ("MUL_MAT_ID", "ffn_down_exps", "experts"),
        ("MUL", "ffn_moe_weighted", "experts"),
        ("MUL_MAT", "ffn_up_shexp", "shared expert"),
        ("MUL_MAT", "attn_q_b", "projections"),
        ("MUL", "attn_q_a_norm", REST),
        ("MUL_MAT", "indexer.attn_q_b", "indexer"),
        ("MUL_MAT", "indexer_compressor_kv", "indexer"),
        ("LIGHTNING_INDEXER", "lid_score_masked", "indexer"),
        ("TOP_K", "", "indexer"),
        ("MUL_MAT", "attn_compressor_gate", "compressor"),
        ("FLASH_ATTN_EXT", "attn_sinks", "attention"),
        ("DSV4_HC_POST", "l_last", "streams"),
        ("MUL_MAT", "output", "output head"),
        ("ROPE", "q", REST),
    ],
)
def test_operations_belong_to_parts(op: str, name: str, part: str) -> None:
    assert part_of(Operation(op=op, name=name, weight="", calls=1, seconds=1.0)) == part
    assert part in (*PARTS, REST)


# --- a run on narrow layers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and an interrupted one that was finished: its model was left and is gone now."""
    out = tmp_path_factory.mktemp("widths") / "out"
    assert main(["widths", "--quick", "--out", str(out), "--keep"]) == 0
    (model,) = out.glob("*.gguf")
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    del result["units"]["HCA/2048"]
    result["complete"] = False
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")
    assert main(["widths", "--quick", "--out", str(out)]) == 0
    assert not model.exists()
    return out


@pytest.fixture
def plan(folder: Path) -> WidthsPlan:
    return msgspec.convert(read_result(folder).plan, WidthsPlan)


@pytest.fixture
def units(folder: Path) -> Units:
    return read_result(folder).units


def test_a_run_measures_everything_and_says_so(folder: Path, plan: WidthsPlan, units: Units) -> None:
    result = read_result(folder)
    assert result.passed
    assert set(units) == set(unit_names(plan))
    assert result.metrics["layers"].keys() == {"SWA", "CSA", "HCA"}
    for rows in result.metrics["layers"].values():
        assert [row["computed"] for row in rows] == [True, True, False]
        for row in rows:
            for what in ("decode", "prefill"):
                assert 0 < row[what]["of_roof"] < 1
                assert row[what]["parts_ms"].keys() <= {*PARTS, REST}
    (last,) = (row for row in result.metrics["all_layers"] if row["context"] == 2048)
    assert last["layers"] == {"SWA": 2, "CSA": 21, "HCA": 20}
    at = {kind: rows[-1]["decode"]["ms"] for kind, rows in result.metrics["layers"].items()}
    by_hand = 2 * at["SWA"] + 21 * at["CSA"] + 20 * at["HCA"] + result.metrics["output"]["ms"]
    assert last["decode_ms"] == pytest.approx(by_hand)
    report = (folder / "report.md").read_text(encoding="utf-8")
    assert "**Not measured: computed.**" in report
    assert (folder / "plots" / "decode.png").stat().st_size > 1000


def failing(plan: WidthsPlan, units: Units) -> dict[str, str]:
    return {check.name: check.detail for check in checks(plan, units) if not check.passed}


def _other_bits(units: Units) -> None:
    units["split"]["digests"][7] = "00" * 16


def _ends_early(units: Units) -> None:
    units["split"]["digests"].pop()


def _state_too_large(units: Units) -> None:
    units["load/CSA"]["state"]["indexer"] += 256


def _weights_of_more(units: Units) -> None:
    units["load/SWA"]["weights"] += 32


def _row_missing(units: Units) -> None:
    units["CSA/2048"]["rows"]["csa"][0] -= 1


def _component_missing(units: Units) -> None:
    del units["HCA/256"]["rows"]["hca_ring"]


def _not_measured(units: Units) -> None:
    del units["abort/HCA"]


def _ended_in_an_error(units: Units) -> None:
    units["CSA/1"] = {"error": "EngineError: the output of layers 2:3 is not finite"}


BITS, BYTES = "two stages give what one gives", "what is allocated is what the formulae say"
ROWS, ALL = "state has the rows of its tokens", "every unit is measured"


@pytest.mark.parametrize(
    ("spoil", "check", "says"),
    [
        (_other_bits, BITS, "step 7: 0000"),
        (_ends_early, BITS, "nothing, not"),
        (_state_too_large, BYTES, "CSA, indexer"),
        (_weights_of_more, BYTES, "SWA, weights"),
        (_row_missing, ROWS, "CSA/2048, csa"),
        (_component_missing, ROWS, "HCA/256, hca_ring: None rows"),
        (_not_measured, ALL, "abort/HCA: not measured"),
        (_ended_in_an_error, ALL, "not finite"),
    ],
)
def test_what_went_wrong_is_seen(
    plan: WidthsPlan, units: Units, spoil: Callable[[Units], None], check: str, says: str
) -> None:
    assert failing(plan, units) == {}
    spoil(units)
    found = failing(plan, units)
    assert found.keys() == {check}
    assert says in found[check]


class Crooked(MeasuredEngine):
    """Changes one value a little as it leaves the stage that ends before layer 2."""

    def run(self, batch: Sequence[Work]) -> list[Output]:
        outputs = super().run(batch)
        if self.describe().layers.end != 2:
            return outputs
        data = bytearray(outputs[0].residual or b"")
        data[2] ^= 0x40
        return [evolve(outputs[0], residual=bytes(data))]


@pytest.mark.parametrize(("engine", "equal"), [(MeasuredEngine, True), (Crooked, False)])
def test_one_value_at_the_seam_is_seen(
    tmp_path: Path, plan: WidthsPlan, engine: type[MeasuredEngine], equal: bool
) -> None:
    job = WidthsJob(plan, tmp_path / "m.gguf", engine=engine)
    whole, split = (run_range(job, ranges)["digests"] for ranges in ((plan.range,), cut(plan.range)))
    assert (whole == split) is equal
    assert len(whole) == len(split) == 2 + 2 * plan.decode + 1


def test_a_slice_gets_a_residual(tmp_path: Path, plan: WidthsPlan) -> None:
    sliced = msgspec.structs.replace(plan, layers="2:4")
    assert (sliced.kinds, sliced.n_layers) == ({"CSA": 2, "HCA": 3}, V4_FLASH.n_layers)
    job = WidthsJob(sliced, tmp_path / "m.gguf")
    whole, split = (run_range(job, ranges)["digests"] for ranges in ((sliced.range,), cut(sliced.range)))
    assert whole == split
    assert len(set(whole)) == len(whole)


def test_without_a_model_there_are_times_and_no_roofs(plan: WidthsPlan, units: Units) -> None:
    found = metrics(plan, units, None)
    assert all("of_roof" not in row["decode"] for rows in found["layers"].values() for row in rows)
    assert metrics(plan, {}, None)["all_layers"] == []


@pytest.mark.llama_bench
def test_llama_bench_runs_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["widths", "--quick", "--contexts", "1", "--upstream", "--out", str(out)]) == 0
    found = read_result(out).metrics["range"]
    assert found.keys() == {"whole", "split", "upstream"}
    assert found["upstream"]["decode_ms"] > 0 < found["upstream"]["prefill_ms"]


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--layers", "x"], "--layers is 'x'; give a number of layers, or a range"),
        (["--layers", "40:44"], "ends beyond the last main layer"),
        (["--layers", "44"], "the schedule has 1 to 43"),
        (["--contexts", "4,1"], "give numbers from 1 to 2048 that ascend"),
        (["--contexts", "1,4096"], "give numbers from 1 to 2048 that ascend"),
        (["--contexts", "a"], "give numbers of tokens"),
        (["--threads", "0"], "--threads 0: give 1 to"),
        (["--layers", "2:4", "--upstream"], "llama-bench runs whole models"),
        (["--layers", "2", "--upstream"], "give --layers 3 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert main(["widths", "--quick", "--out", str(tmp_path / "out"), *flags]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.glob("**/*.gguf")) == []


def test_layers_that_fit_no_memory_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_memory() > 0
    monkeypatch.setattr(command, "available_memory", lambda: 10 << 30)
    assert main(["widths", "--out", str(tmp_path / "out")]) == 2
    assert (
        "4 layers on one stage take about 17.32 GiB, over the available memory of 10.00 GiB" in capsys.readouterr().err
    )


def test_a_build_without_the_test_extension_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_EXTENSION", "dgr.testing._absent")
    assert main(["widths", "--quick", "--out", str(tmp_path / "out")]) == 2
    assert "install a checkout with `make build`" in capsys.readouterr().err


def test_the_default_plan_is_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command._FULL["n_ctx"] == V4_FLASH.context_length
    plan = WidthsPlan(
        name="x", layers="4", weights="mixed", threads=1, numerics=Numerics.EXACT, upstream=False, **command._FULL
    )
    assert plan.at(V4_FLASH.context_length) + plan.room == V4_FLASH.context_length
    assert [plan.at(context) for context in plan.contexts[:-1]] == list(plan.contexts[:-1])
