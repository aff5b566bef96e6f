"""Valid cuts as data: all of them, what each needs, and a reason for everything refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from attrs import evolve

from dgr.cli import inspect as command
from dgr.core.route import LayerRange, check_cover
from dgr.errors import DgrError
from dgr.v4.cuts import needs_token_ids, restrictions, valid_cuts
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.tensors import range_tensors


def test_every_place_between_two_layers_is_a_cut() -> None:
    cuts = valid_cuts(V4_FLASH)
    assert [cut.layer for cut in cuts] == list(range(1, 43))
    assert {cut.width for cut in cuts} == {16384}
    for cut in cuts:
        check_cover([LayerRange(0, cut.layer), LayerRange(cut.layer, 43)], 43)
    kinds = [(cut.before, cut.after) for cut in cuts]
    assert kinds[:3] == [("SWA", "SWA"), ("SWA", "CSA"), ("CSA", "HCA")]
    assert set(kinds[3:]) == {("HCA", "CSA"), ("CSA", "HCA")}


def test_only_what_routes_by_token_id_needs_the_ids() -> None:
    assert [cut.layer for cut in valid_cuts(V4_FLASH) if cut.needs_token_ids] == [1, 2]
    for begin in range(43):
        layers = LayerRange(begin, 43)
        tables = any("tid2eid" in spec.name for spec in range_tensors(V4_FLASH, layers))
        assert needs_token_ids(V4_FLASH, layers) == tables


def test_no_cut_shares_tensors_between_its_sides() -> None:
    everything = {spec.name for spec in range_tensors(V4_FLASH, V4_FLASH.whole)}
    for cut in valid_cuts(V4_FLASH):
        sides = [
            {spec.name for spec in range_tensors(V4_FLASH, layers)}
            for layers in (LayerRange(0, cut.layer), LayerRange(cut.layer, 43))
        ]
        assert not sides[0] & sides[1]
        assert sides[0] | sides[1] == everything


def test_a_single_layer_has_no_cut() -> None:
    one = evolve(
        V4_FLASH, n_layers=1, compress_ratios=(0,), swiglu_clamp_exp=(1.0,), swiglu_clamp_shexp=(1.0,), hash_layers=1
    )
    assert valid_cuts(one) == ()


def test_everything_refused_has_a_reason_and_a_place() -> None:
    with_mtp = evolve(V4_FLASH, n_mtp_layers=1, swiglu_clamp_exp=(10.0,) * 44, swiglu_clamp_shexp=(10.0,) * 44)
    found = restrictions(with_mtp)
    assert all(item.reason and item.refused_at in ("open", "load", "route") for item in found)
    text = " ".join(item.what + item.reason for item in found)
    for word in (
        "layer 43, the MTP block",
        "kv_source_layer_ids",
        "V4.1",
        "compress ratios",
        "inside a layer",
        "*.scale",
    ):
        assert word in text
    assert "43, the MTP block" not in " ".join(item.what for item in restrictions(V4_FLASH))


@pytest.mark.parametrize(
    "ranges",
    [
        [LayerRange(0, 43), LayerRange(43, 44)],
        [LayerRange(0, 44)],
        [LayerRange(1, 43)],
        [LayerRange(0, 20), LayerRange(21, 43)],
        [LayerRange(0, 20), LayerRange(19, 43)],
        [LayerRange(0, 42)],
    ],
    ids=str,
)
def test_splits_that_the_restrictions_name_are_refused(ranges: list[LayerRange]) -> None:
    with pytest.raises(DgrError):
        check_cover(ranges, 43)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["inspect", *argv])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_command(capsys: pytest.CaptureFixture[str], min_model: Path) -> None:
    found = json.loads(run(capsys, "v4-flash", "--cuts", "--json"))
    assert len(found["cuts"]) == 42
    assert found["cuts"][0] == {"layer": 1, "before": "SWA", "after": "SWA", "needs_token_ids": True, "width": 16384}
    assert {item["refused_at"] for item in found["restrictions"]} == {"open", "load", "route"}
    text = run(capsys, str(min_model), "--cuts")
    assert "4 main layers; a cut before any of layers 1-3" in text
    assert "stages that begin at 1-2 route by the ids" in text
    assert "layer 4, the MTP block" in text
