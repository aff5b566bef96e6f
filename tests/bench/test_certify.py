"""A certificate of a small model, from end to end, and what can be done with it afterwards."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from attrs import evolve

from dgr import Artifact, Numerics
from dgr.core.route import parse_split
from dgr.errors import InputError
from dgr.selftest.fixture.cached import cached_fixture
from dgr_bench import benchmark
from dgr_bench.certify.mutants import PROFILE
from dgr_bench.certify.run import CertifyJob
from dgr_bench.cli import main
from dgr_bench.compare import compare
from dgr_bench.reports import write_report
from dgr_bench.results import SCHEMA, Journal, Result, digest_of, read_result, write_result

LAYERS, SPLIT = 7, "0:2,2:5,5:7"
#: Without several threads: they need cores of their own.
SMALL = msgspec.structs.replace(
    PROFILE, name="small", lengths=(1, 5, 129), chunkings=(PROFILE.chunkings[0],), threads=(), rerun=(5,)
)


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_fixture("mixed", layers=LAYERS)


@pytest.fixture(scope="module")
def job(model: Path) -> CertifyJob:
    return CertifyJob(SMALL, Artifact.open(model), parse_split(SPLIT, LAYERS))


@pytest.fixture(scope="module")
def folder(job: CertifyJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate, as the command leaves it."""
    out = tmp_path_factory.mktemp("certificate")
    result = run(job, out)
    write_report(out, job.title, result, job.tables(result), job.plots(result))
    return out


def run(job: CertifyJob, out: Path, **options: Any) -> Result:
    with Journal.open(out, job.kind, job.plan, job.subject(), "dgr-bench certify", **options) as journal:
        return trio.run(benchmark.run, job, journal)


@contextmanager
def changed(folder: Path, out: Path, change: Callable[[Result], None]) -> Iterator[Path]:
    """A copy of a certificate with something changed in it."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    result = read_result(out)
    change(result)
    write_result(result, out)
    yield out


def test_it_passes(folder: Path) -> None:
    result = read_result(folder)
    assert [check.name for check in result.checks if not check.passed] == []
    assert result.passed
    assert {
        "split equals whole",
        "chunkings agree",
        "re-prefilled equals cold",
        "forked equals cold",
        "batched equals alone",
    } <= {one.name for one in result.checks}
    assert result.metrics["not_certified"] == []


def test_report_and_plots_are_there(folder: Path) -> None:
    report = (folder / "report.md").read_text()
    assert report.startswith("# Long-context certificate")
    assert "**PASSED**" in report
    for stem in ("state", "memory", "first-token", "inter-token"):
        assert f"(plots/{stem}.png)" in report
        assert (folder / "plots" / f"{stem}.png").stat().st_size > 1000


def test_the_canary_names_every_component_of_every_stage(folder: Path) -> None:
    canary = read_result(folder).metrics["canary"]
    assert set(canary) == {"1", "5", "129"}
    assert set(canary["129"]) == set(SPLIT.split(","))
    assert set(canary["129"]["2:5"]) == {"raw_swa", "csa", "hca", "indexer", "csa_ring", "hca_ring", "indexer_ring"}
    assert all(len(digest) == 32 for stage in canary["129"].values() for digest in stage.values())


def test_a_finished_run_is_not_measured_again(job: CertifyJob, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    before = read_result(folder)
    again = run(job, tmp_path / "copy")
    assert again.units == before.units
    assert len(again.commands) == 2


@pytest.mark.slow
def test_an_interrupted_run_measures_what_is_missing(job: CertifyJob, folder: Path, tmp_path: Path) -> None:
    kept = {"whole/1", "whole/5", "whole/129", "split/1", "split/5"}

    def interrupt(result: Result) -> None:
        result.units = {name: unit for name, unit in result.units.items() if name in kept}
        result.complete = False

    before = read_result(folder)
    with changed(folder, tmp_path / "copy", interrupt) as copy:
        again = run(job, copy)
    assert again.passed
    assert all(again.units[name] == before.units[name] for name in kept)
    assert again.units["split/129"]["rows_digest"] == before.units["split/129"]["rows_digest"]
    assert again.units["split/129"]["first_token_s"] != before.units["split/129"]["first_token_s"]


def test_what_ended_in_an_error_is_measured_again(job: CertifyJob, folder: Path, tmp_path: Path) -> None:
    def fail(result: Result) -> None:
        result.units["split/5"]["error"] = "LinkBroken: it was"
        result.units["clean-up"] = {"error": "LinkBroken: it was"}

    with changed(folder, tmp_path / "copy", fail) as copy:
        again = run(job, copy)
    assert again.passed


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_runs_lengths_again(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert "lengths 5 run again" in said
    assert said.endswith("VERIFIED\n")


def flip(text: str) -> str:
    return ("1" if text[0] == "0" else "0") + text[1:]


def _figure(result: Result) -> None:
    result.metrics["lengths"][1]["token_s"] *= 0.5


def _canary(result: Result) -> None:
    stage = result.metrics["canary"]["129"]["2:5"]
    stage["csa"] = flip(stage["csa"])


def _verdict(result: Result) -> None:
    result.checks[0] = msgspec.structs.replace(result.checks[0], cases=result.checks[0].cases + 1)


def _hidden_failure(result: Result) -> None:
    result.units["split/129"]["rows_digest"] = flip(result.units["split/129"]["rows_digest"])


def _dropped_unit(result: Result) -> None:
    del result.units["chunk-33/129"]


def _unreadable(result: Result) -> None:
    result.units["memory/256"]["state"] = "much"


@pytest.mark.parametrize("change", [_figure, _canary, _verdict, _hidden_failure, _dropped_unit, _unreadable])
def test_verify_sees_what_was_changed(
    folder: Path, tmp_path: Path, change: Callable[[Result], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with changed(folder, tmp_path, change) as copy:
        assert main(["verify", str(copy), "--no-rerun"]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out


def _consistent_forgery(result: Result) -> None:
    """Every run of a length claims the same other state: only measuring again tells."""
    for name, unit in result.units.items():
        if name.endswith("/5"):
            unit["rows_digest"] = "0" * 32
        for run in unit.get("runs", ()):
            if run["length"] == 5:
                run["rows_digest"] = "0" * 32


def test_only_a_second_run_tells_a_consistent_forgery(
    folder: Path, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with changed(folder, tmp_path, _consistent_forgery) as copy:
        assert main(["verify", str(copy), "--no-rerun"]) == 0
        assert main(["verify", str(copy), "--model", str(model)]) == 1
    assert "rows_digest" in capsys.readouterr().out


def test_verify_wants_the_same_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = cached_fixture("mixed", layers=LAYERS, seed=1)
    assert main(["verify", str(folder), "--model", str(other)]) == 2
    assert "the certificate is of" in capsys.readouterr().err


# --- compare ----------------------------------------------------------------------------------------------------------


def _component(result: Result) -> None:
    """Another digest in the raw units; the metrics still say the right one."""
    (part,) = (one for one in result.units["split/129"]["at_end"][1]["components"] if one[0] == "csa")
    part[5] = flip(part[5])


def test_two_certificates_of_the_same_are_alike(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(folder), str(folder), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("ALIKE\n")
    assert (tmp_path / "plots" / "ratios.png").exists()


def test_a_comparison_does_not_write_where_a_run_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.open(tmp_path, "certify", {}, {}, ""):
        assert main(["compare", str(folder), str(folder), "--out", str(tmp_path)]) == 2
    assert "another run of dgr-bench writes to" in capsys.readouterr().err
    assert not (tmp_path / "report.md").exists()


def test_a_differing_component_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with changed(folder, tmp_path, _component) as copy:
        assert main(["compare", str(folder), str(copy)]) == 1
    said = capsys.readouterr().out
    assert "differs: 129 tokens, stage 2:5, csa" in said
    assert "NOT ALIKE" in said


def test_other_kernels_are_not_held_against_it(folder: Path, tmp_path: Path) -> None:
    def other_kernels(result: Result) -> None:
        _component(result)
        result.environment = msgspec.structs.replace(result.environment, kernel_fingerprint="0" * 32)

    with changed(folder, tmp_path, other_kernels) as copy:
        found = compare(read_result(folder), read_result(copy))
    assert found["verdict"] == "not comparable"
    assert found["not_comparable_because"] == ["other kernels"]
    assert not found["must_be_equal"]
    assert len(found["parts_differing"]) == 1


def _no_states(result: Result) -> None:
    result.units = {name: unit for name, unit in result.units.items() if not name.startswith("split/")}


def _other_split(result: Result) -> None:
    result.subject["split"] = "0:3,3:7"
    for unit in result.units.values():
        for state in unit.get("at_end", ()):
            state["layers"] = "0:3"


def _failed(result: Result) -> None:
    result.checks[0] = msgspec.structs.replace(result.checks[0], passed=False)


def test_a_split_that_does_not_fit_is_refused_with_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", "--quick", "--split", "1:43", "--out", str(tmp_path)]) == 2
    assert "of 43 layers: layer range 1:43 leaves out layers from 0 on" in capsys.readouterr().err


def test_native_numerics_are_said_to_be_why(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def native(result: Result) -> None:
        result.plan["numerics"] = "native"
        result.plan_digest = digest_of(result.plan)

    with changed(folder, tmp_path, native) as copy:
        assert main(["compare", str(copy), str(copy)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "NOT COMPARABLE bit for bit: native numerics, which promise equal bits for equal batches alone"


@pytest.mark.parametrize("change", [_no_states, _other_split])
def test_nothing_in_common_is_not_alike(
    folder: Path, tmp_path: Path, change: Callable[[Result], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with changed(folder, tmp_path, change) as copy:
        assert main(["compare", str(folder), str(copy)]) == 1
    assert "NOT COMPARABLE" in capsys.readouterr().out


def test_a_result_that_has_not_passed_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with changed(folder, tmp_path, _failed) as copy:
        main(["compare", str(folder), str(copy)])
    assert "the second result has not passed" in capsys.readouterr().out


def test_an_unfinished_result_is_not_compared(folder: Path, tmp_path: Path) -> None:
    def unfinished(result: Result) -> None:
        result.complete = False

    with changed(folder, tmp_path, unfinished) as copy, pytest.raises(InputError, match="the second result is not"):
        compare(read_result(folder), read_result(copy))


def test_verify_wants_the_same_split(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--model", str(model), "--split", "0:7"]) == 2
    assert f"the certificate is of the split {SPLIT}" in capsys.readouterr().err


def test_results_of_two_commands_are_not_compared(folder: Path, tmp_path: Path) -> None:
    def other_kind(result: Result) -> None:
        result.kind = "drill"

    with changed(folder, tmp_path, other_kind) as copy, pytest.raises(InputError, match="two of one command"):
        compare(read_result(folder), read_result(copy))


# --- native numerics --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_native_numerics_are_measured_and_not_promised(job: CertifyJob, tmp_path: Path) -> None:
    native = evolve(job, plan=msgspec.structs.replace(SMALL, numerics=Numerics.NATIVE, cancels=0, refusals=0))
    result = run(native, tmp_path)
    names = {check.name: check.passed for check in result.checks}
    assert names["split equals whole"]
    assert "chunkings agree" not in names
    assert "native numerics" in " ".join(result.metrics["not_certified"])
    distances = {(one["variant"], one["length"]): one for one in result.metrics["distances"]}
    assert distances["chunk-33", 129]["logits_max_difference"] is not None
    assert distances["re-prefilled", 5]["tokens"] == SMALL.decode


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "huge"], "choose fixture, quick, v4-flash"),
        (["--model", "no-such.gguf"], "no-such.gguf"),
        (["--split", "0:3,4:43"], "leaves out layers from 3 on"),
        (["--split", "0:43", "--route", "route.toml"], "give one of them"),
        (["--split", ""], "is not of the form A:B"),
        (["--quick", "--profile", "fixture"], "give one of them"),
        (["--route", "no-such.toml"], "no-such.toml"),
    ],
)
def test_bad_input_is_told_and_what_to_do(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", "--out", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_whole_split_is_certified_too(job: CertifyJob, tmp_path: Path) -> None:
    whole = evolve(
        job,
        ranges=parse_split("0:7", LAYERS),
        plan=msgspec.structs.replace(SMALL, lengths=(5,), cancels=1, refusals=2, reprefill_up_to=5),
    )
    result = run(whole, tmp_path)
    assert result.passed
    # What crosses no boundary is counted: a frame that one stage sends is a failure.
    for field, value in (("frames", 1), ("bytes", 1)):
        units = msgspec.to_builtins(result.units)
        units["split/5"]["decode_traffic"][field] += value
        assert [check.name for check in whole.checks(units) if not check.passed] == ["wire carries the boundary"]


@pytest.mark.parametrize("schema", ["dgr-bench/1", SCHEMA])
def test_a_verdict_of_another_schema_says_which(
    folder: Path, tmp_path: Path, schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def older(result: Result) -> None:
        result.schema = schema

    with changed(folder, tmp_path, older) as copy:
        assert main(["verify", str(copy), "--no-rerun"]) == 0
        assert "VERIFIED" in capsys.readouterr().out
        with changed(copy, tmp_path / "wrong", _verdict) as wrong:
            assert main(["verify", str(wrong), "--no-rerun"]) == 1
    assert (f"made by {schema}" in capsys.readouterr().out) is (schema != SCHEMA)


def test_a_packed_certificate_is_verified_and_compared(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "result.json.xz").write_bytes(lzma.compress((folder / "result.json").read_bytes()))
    assert main(["verify", str(tmp_path), "--no-rerun"]) == 0
    assert main(["compare", str(folder), str(tmp_path / "result.json.xz")]) == 0


def test_what_a_profile_does_not_try_is_not_certified(job: CertifyJob, tmp_path: Path) -> None:
    less = evolve(job, plan=msgspec.structs.replace(SMALL, lengths=(5,), cancels=0, refusals=0))
    result = run(less, tmp_path)
    assert result.passed
    assert len(result.metrics["not_certified"]) == 2
    assert "what must fail fails, always alike" not in {check.name for check in result.checks}


@pytest.mark.slow
def test_every_mutant_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--selftest", "--out", str(tmp_path)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_quick_certificate_of_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--quick", "--out", str(tmp_path), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["passed"]
