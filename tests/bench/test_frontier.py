"""Speed over context: what its checks catch, what its metrics say, that it resumes, what it refuses; and one real run."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from attrs import evolve
from fixture_types import Model

from dgr import Artifact, ContextParams, Numerics, SamplingParams, ShardEngine
from dgr.errors import EngineError, InputError, LinkBroken
from dgr.testing.engines.mutants import Mutant
from dgr_bench import benchmark
from dgr_bench.cli import main
from dgr_bench.frontier import command as frontier
from dgr_bench.frontier.measurements import FrontierJob, Subject
from dgr_bench.frontier.metrics import (
    BASELINE,
    SUBJECTS,
    At,
    BesideUpstream,
    FrontierPlan,
    SubjectRun,
    checks,
    metrics,
    ratio_interval,
)
from dgr_bench.quartiles import line_over, median
from dgr_bench.results import Journal
from dgr_bench.upstream.llama_bench import LlamaBench

PLAN = FrontierPlan(name="test", lengths=(512, 1024, 2048, 4096), decode=32, chunk=512, split="0:2,2:5,5:7")
SLOPE = "decode through one stage grows as in the whole model, ± 3%"
TOKENS = "stages draw the whole model's tokens"
STATES = "no session lost its state"
#: What subjects take beyond the whole model, seconds a token.
EXTRA = {"one": 0.0004, "whole": 0.0, "split": 0.002, BASELINE: 0.0}


def whole_s(context: int) -> float:
    """8 ms and 1 ms for each thousand tokens of context."""
    return 0.008 + 1e-6 * context


def good(length: int, plan: FrontierPlan = PLAN) -> At:
    """A length at which everything went well; the machine's speed wanders, for all subjects alike."""
    weather = random.Random(length)
    day = 1 + weather.random()
    speeds = [day + 0.1 * weather.random() for _ in range(plan.decode)]
    runs = {
        name: SubjectRun(
            tokens=[(7 * at + length) % 100 for at in range(plan.decode + 1)],
            first_token_s=length / 200,
            last_chunk_s=2.0,
            token_s=[speed * (whole_s(plan.prompt(name, length)) + EXTRA[name]) for speed in speeds],
            positions=[plan.prompt(name, length) + plan.decode] * (3 if name == "split" else 1),
        )
        for name in plan.subjects
    }
    return At(length=length, runs=runs)


def recorded(plan: FrontierPlan = PLAN) -> dict[str, Any]:
    """The units of a run in which everything went well, as a journal gives them."""
    units: dict[str, Any] = msgspec.to_builtins({f"length/{length}": good(length, plan) for length in plan.lengths})
    return units


def failing(units: dict[str, Any], plan: FrontierPlan = PLAN) -> dict[str, str]:
    """Checks that are not passed, and why."""
    return {check.name: check.detail for check in checks(plan, units) if not check.passed}


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_what_went_well_passes_with_every_case_counted() -> None:
    found = {check.name: check for check in checks(PLAN, recorded())}
    assert all(check.passed for check in found.values())
    assert {name: check.cases for name, check in found.items()} == {
        "every length is measured": 4,
        "answers tell": 4,
        TOKENS: 8,
        STATES: 16,
        SLOPE: 4 * 32,
    }


def _other_token(units: dict[str, Any]) -> None:
    units["length/2048"]["runs"]["split"]["tokens"][31] += 1


def _ends_early(units: dict[str, Any]) -> None:
    units["length/512"]["runs"]["one"]["tokens"].pop()


def _says_little(units: dict[str, Any]) -> None:
    for run in units["length/1024"]["runs"].values():
        run["tokens"] = [5] * len(run["tokens"])


def _loses_state(units: dict[str, Any]) -> None:
    units["length/4096"]["runs"]["split"]["lost"] = ["evicted"]


def _stage_lags(units: dict[str, Any]) -> None:
    units["length/4096"]["runs"]["split"]["positions"][1] -= 1


def _stage_is_missing(units: dict[str, Any]) -> None:
    units["length/4096"]["runs"]["split"]["positions"].pop()


def _grows(share: float) -> Callable[[dict[str, Any]], None]:
    def mutate(units: dict[str, Any]) -> None:
        for unit in units.values():
            more = 1 + share * 1e-6 * unit["length"] / (whole_s(unit["length"]) + EXTRA["one"])
            unit["runs"]["one"]["token_s"] = [more * seconds for seconds in unit["runs"]["one"]["token_s"]]

    return mutate


def _never_grows(units: dict[str, Any]) -> None:
    for unit in units.values():
        for run in unit["runs"].values():
            run["token_s"] = [0.008] * PLAN.decode


MUTANTS: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "a token that is another": (_other_token, TOKENS, "split after 2048 tokens: token 31 is"),
    "an answer that ends early": (_ends_early, TOKENS, "one after 512 tokens: 32 tokens, not 33"),
    "an answer of one token id": (_says_little, "answers tell", "after 1024 tokens: 1 different token ids"),
    "a session that is lost": (_loses_state, STATES, "split at 4096: evicted"),
    "a stage that is a token behind": (_stage_lags, STATES, "[4128, 4127, 4128] tokens committed"),
    "a stage that says nothing": (_stage_is_missing, STATES, "[4128, 4128] tokens committed"),
    "a slope 5 % steeper": (_grows(0.05), SLOPE, "ratio 1.05"),
    "a slope 5 % flatter": (_grows(-0.05), SLOPE, "ratio 0.95"),
    "a whole model that does not grow": (_never_grows, SLOPE, "no growth to compare with"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str) -> None:
    mutate, check, says = MUTANTS[mutant]
    units = copy.deepcopy(recorded())
    mutate(units)
    found = failing(units)
    assert list(found) == [check]
    assert says in found[check]


@pytest.mark.parametrize("unit", [None, {"length": 2048, "error": "LinkBroken: gone"}], ids=["missing", "failed"])
def test_a_length_that_was_not_measured_is_told(unit: dict[str, Any] | None) -> None:
    units = recorded()
    del units["length/2048"]
    if unit is not None:
        units["length/2048"] = unit
    found = failing(units)
    assert list(found) == ["every length is measured", SLOPE]
    assert found["every length is measured"].endswith("not measured" if unit is None else "LinkBroken: gone")


def test_nothing_measured_passes_nothing() -> None:
    assert len(failing({})) == 5
    assert metrics(PLAN, {})["lengths"] == []


def test_native_numerics_may_draw_other_tokens_and_quick_runs_have_any_slope() -> None:
    units = recorded()
    _other_token(units)
    _grows(0.5)(units)
    plan = msgspec.structs.replace(PLAN, numerics=Numerics.NATIVE, goal=None)
    assert failing(units, plan) == {}


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_lines_go_through_medians() -> None:
    found = line_over({1000: [0.009, 0.009, 0.5], 3000: [0.011, 0.011, 0.0]})
    assert found.slope_ms == pytest.approx(1.0)
    assert found.base_ms == pytest.approx(8.0)
    assert found.at(5000) == pytest.approx(13.0)
    assert math.isnan(line_over({1000: [0.009]}).slope_ms)


def test_a_constant_cost_is_no_slope_and_neither_is_the_weather() -> None:
    units = recorded()
    found = metrics(PLAN, units)["decode"]
    assert list(found) == ["whole", "one", "split"]
    assert "slope_ratio" not in found["whole"]
    usual = median([seconds for unit in units.values() for seconds in unit["runs"][BASELINE]["token_s"]])
    speed = usual / whole_s(64)
    assert found["whole"]["slope_ms_per_1000"] == pytest.approx(speed)
    assert found["whole"]["raw"]["slope_ms_per_1000"] != pytest.approx(speed, rel=0.1)
    for name in ("one", "split"):
        assert found[name]["slope_ratio"] == pytest.approx(1.0)
        assert found[name]["slope_ratio_interval"] == pytest.approx((1.0, 1.0))
        assert found[name]["slope_ratio_leaving_one_out"] == pytest.approx((1.0, 1.0))
        assert found[name]["base_ms"] - found["whole"]["base_ms"] == pytest.approx(1e3 * speed * EXTRA[name])


def test_speeds_of_prefill() -> None:
    (first, *_, last) = metrics(PLAN, recorded())["lengths"]
    assert (first["length"], last["length"]) == (512, 4096)
    assert last["subjects"]["one"]["prefill_tokens_per_s"] == pytest.approx(200)
    assert last["subjects"]["one"]["last_chunk_tokens_per_s"] == pytest.approx(256)
    assert last["subjects"]["whole"]["token_ratio"].median == 1
    plan = msgspec.structs.replace(PLAN, lengths=(512, 700))
    units = msgspec.to_builtins({f"length/{length}": good(length, plan) for length in plan.lengths})
    assert metrics(plan, units)["lengths"][1]["subjects"]["split"]["last_chunk_tokens_per_s"] == pytest.approx(94)


def test_the_interval_widens_with_what_pairs_do_not_share() -> None:
    def times(share: float, seed: int) -> dict[int, list[float]]:
        dice = random.Random(seed)
        return {
            context: [whole_s(context) * (1 + share * dice.random()) for _ in range(64)] for context in PLAN.lengths
        }

    low, high = ratio_interval(times(0.1, 1), times(0.1, 1))
    assert low == high == 1  # the same weather on both sides
    low, high = ratio_interval(times(0.1, 1), times(0.1, 2))
    assert low < 1 < high
    assert 0.01 < high - low < 0.2


def test_slopes_beside_upstream() -> None:
    plan = msgspec.structs.replace(PLAN, upstream=True)
    beside = {
        f"upstream/{length}": BesideUpstream(
            length=length, ours_s=[whole_s(length) + 0.0005] * 8, theirs_s=[whole_s(length)] * 8
        )
        for length in PLAN.lengths
    }
    units = recorded() | msgspec.to_builtins(beside)
    assert failing(units, plan) == {}
    assert len(failing(recorded(), plan)) == 1
    found = metrics(plan, units)["upstream"]
    assert found["slope_ratio"] == pytest.approx(1)
    assert found["ours"]["base_ms"] == pytest.approx(8.5)
    assert [row["theirs_ms"].count for row in found["lengths"]] == [8] * 4


# --- llama-bench -----------------------------------------------------------------------------------------------------


def llama_bench(folder: Path, **changes: Any) -> LlamaBench:
    """A program that prints what llama-bench printed once, but for some changes."""
    answer = json.loads(Path(__file__).with_name("llama_bench.json").read_text())[0]
    answer |= {"n_prompt": 0, "n_gen": 4, "n_depth": 300, "samples_ns": [8_000_000, 4_000_000]} | changes
    (folder / "answer.json").write_text(json.dumps([answer]))
    binary = folder / "llama-bench"
    binary.write_text(f'#!/bin/sh\necho "$@" > {folder}/flags\ncat {folder}/answer.json\n')
    binary.chmod(0o755)
    return LlamaBench(binary, answer["build_commit"], Path("model.gguf"), ContextParams(), threads=1)


async def test_llama_bench_decodes_at_a_depth(tmp_path: Path) -> None:
    assert await llama_bench(tmp_path).blocks(300, 4, 8) == [0.002, 0.001]
    assert "-n 4 " in (flags := (tmp_path / "flags").read_text())
    assert "-d 300 -r 8 " in flags


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"n_depth": 0}, EngineError, "ran with n_depth 0, not 300 as dgr"),
        ({"n_threads": 2}, EngineError, "ran with n_threads 2, not 1"),
    ],
    ids=["depth", "threads"],
)
async def test_llama_bench_that_did_something_else(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        await llama_bench(tmp_path, **changes).blocks(300, 4, 8)


async def test_llama_bench_of_another_pin(tmp_path: Path) -> None:
    other = evolve(llama_bench(tmp_path), commit="0123456789")
    with pytest.raises(InputError, match="dgr from 012345678; build one of the same pin"):
        await other.blocks(300, 4, 8)


async def test_llama_bench_that_fails_says_why(tmp_path: Path) -> None:
    theirs = llama_bench(tmp_path)
    theirs.binary.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(EngineError, match="ended with exit status 3: no such model"):
        await theirs.blocks(300, 4, 8)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths that go well without an engine; those that were run."""
    ran: list[int] = []

    async def run_length(job: FrontierJob, length: int, subjects: Sequence[Subject]) -> At:
        assert [subject.name for subject in subjects] == list(job.plan.subjects)
        ran.append(length)
        return good(length, job.plan)

    @asynccontextmanager
    async def open_subjects(job: FrontierJob) -> AsyncIterator[list[SimpleNamespace]]:
        yield [SimpleNamespace(name=name) for name in job.plan.subjects]

    monkeypatch.setattr(frontier, "run_length", run_length)
    monkeypatch.setattr(frontier, "open_subjects", open_subjects)
    return ran


def command(model: Path, folder: Path, *flags: str) -> int:
    return main(
        ["frontier", "--model", str(model), "--out", str(folder), "--lengths", "64,96,128", "--decode", "16", *flags]
    )


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(
    faked: list[int], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_length: Callable[..., Awaitable[At]] = vars(frontier)["run_length"]  # what stands in for it

    async def disturbed(job: FrontierJob, length: int, subjects: Sequence[Subject]) -> At:
        if length == 96:
            raise LinkBroken("gone")
        if length == 128:
            raise KeyboardInterrupt
        return await run_length(job, length, subjects)

    with monkeypatch.context() as patch:
        patch.setattr(frontier, "run_length", disturbed)
        assert command(small, tmp_path) == 130
    assert faked == [64]
    assert command(small, tmp_path, "--json") == 0
    assert faked == [64, 96, 128]  # what ended in an error is tried again
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert [row["length"] for row in said["figures"]["lengths"]] == [64, 96, 128]
    for name in ("prefill", "decode"):
        assert (tmp_path / "plots" / f"{name}.png").exists()
    monkeypatch.setattr(benchmark, "write_report", lambda *_: None)  # it is written by now
    monkeypatch.setattr(frontier, "open_subjects", pytest.fail)  # nothing is loaded for what is measured
    assert command(small, tmp_path) == 0
    assert command(small, tmp_path, "--decode", "64") == 2
    assert "another plan digest" in capsys.readouterr().err


def test_one_stage_is_not_measured_twice(
    faked: list[int], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "write_report", lambda *_: None)
    assert command(small, tmp_path, "--split", "0:7") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["plan"]["subjects"] == ["one", "whole", "yardstick"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lengths", "512,256"), "--lengths is 512,256; give lengths from 1 on that ascend, each once"),
        (("--lengths", "256,256"), "--lengths is 256,256; give lengths from 1 on that ascend"),
        (("--lengths", "0,256"), "--lengths is 0,256; give lengths from 1 on"),
        (("--lengths", "512"), "--lengths is 512; give two or more"),
        (("--lengths", "512,1k"), "--lengths is '512,1k'; give numbers of tokens"),
        (("--lengths", "64,500000"), "--lengths up to 500000 take "),
        (("--decode", "7"), "--decode is 7; give 8 to 1048576 tokens"),
        (("--chunk", "0"), "--chunk is 0; give 32 to 65536 tokens"),
        (("--split", "0:3"), "the split ends at layer 3, but the model has 7; end with 3:7"),
        (("--upstream", "--llama-bench", "nowhere"), "--llama-bench nowhere is not a program"),
    ],
    ids=lambda value: "=".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_bad_flags_are_refused(
    flags: tuple[str, ...],
    says: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(frontier, "available_memory", lambda: 128 << 20)
    assert command(small, tmp_path / "out", *flags) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- a real run ------------------------------------------------------------------------------------------------------


class OtherDraw(Mutant):
    """Late in the answer it draws the token after the right one."""

    def sample(self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams) -> Any:
        token, top = self.engine.sample(logits, history, params)
        return (token + (len(history) == 44)) % self.engine.describe().n_vocab, top


def _on_the_tail(_: int, engine: ShardEngine) -> ShardEngine:
    return OtherDraw(engine) if engine.describe().is_tail else engine


def measured(job: FrontierJob, folder: Path, *, fresh: bool = False) -> dict[str, Any]:
    with Journal.open(folder, "frontier", job.plan, {}, "", fresh=fresh) as journal:
        return trio.run(benchmark.run, frontier.Frontier(job), journal).units


def test_a_real_run_and_a_real_mistake(model: Model, tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, lengths=(33, 40), decode=8, chunk=32, goal=None)
    job = FrontierJob(plan, Artifact.open(model("mixed", layers=7)))
    units = measured(job, tmp_path)
    assert failing(units, plan) == {}
    runs = msgspec.convert(units["length/40"], At).runs
    assert list(runs) == list(SUBJECTS)
    for run in runs.values():
        assert 0 < run.last_chunk_s < run.first_token_s
        assert (len(run.tokens), len(run.token_s)) == (9, 8)
        assert min(run.token_s) > 0
    assert runs["split"].positions == [48, 48, 48]
    wrong = evolve(job, wraps={"split": _on_the_tail})
    units = measured(wrong, tmp_path, fresh=True)
    found = failing(units, plan)
    assert list(found) == [TOKENS]
    assert "1 of 4 fail; split after 40 tokens: token 4 is" in found[TOKENS]
