"""The drill: what its checks catch, that it resumes, what it refuses; and one real run."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from dgr.core.route import LayerRange, Route, StageRef
from dgr.errors import LinkBroken
from dgr.testing.network.processes import ProgramEnded, is_gone, open_program
from dgr.testing.network.proxy import open_proxies
from dgr_bench import benchmark
from dgr_bench.cli import main
from dgr_bench.drill import command as drill_command
from dgr_bench.drill import fault_injection
from dgr_bench.drill import metrics as drill
from dgr_bench.drill.fault_injection import MOMENTS, DrillCase, Injection, Leftovers, Outcome, Scenario, survivors
from dgr_bench.drill.ring import Delays, RingRound, Times, points_of

SCENARIO = Scenario(split=("0:2", "2:5", "5:7"), n_vocab=512)
PLAN = drill.plan(SCENARIO)
ANSWER, NEXT = list(range(100, 100 + SCENARIO.answer)), list(range(200, 200 + SCENARIO.answer))


def good(case: DrillCase, scenario: Scenario = SCENARIO) -> Outcome:
    """An outcome with nothing wrong."""
    received = case.received(scenario)
    committed = 32 if case.moment == "prefill" else scenario.prompt + received - 1
    is_slow, is_cancelled, times = case.fault == "slow", case.moment == "cancel", 2 if case.moment == "twice" else 1
    detected = None if is_slow else 0.7 if case.fault == "stall" else 0.004
    injections = [Injection(committed=committed, received=received, detected=detected, recovered=0.9)]
    if times == 2:
        later = Injection(committed=335, received=16) if is_slow else Injection(committed=64, received=received)
        injections.append(msgspec.structs.replace(later, detected=detected, recovered=0.9))
    again = scenario.prompt + received + (scenario.next_prompt if is_cancelled else 0)
    return Outcome(
        answer=ANSWER[: scenario.late] if is_cancelled else ANSWER,
        next_answer=NEXT if is_cancelled else [],
        injections=injections,
        losses=0 if is_slow else times,
        reprefilled=[] if is_slow else [again],
        slow=[0.005 + drill.added_ms(scenario, case.stage) / 1e3] * 6 if is_slow else [],
        usual=[0.005] * 6,
        leftovers=Leftovers(exit_code=0, seen=3),
    )


def good_round(delays: Delays, scenario: Scenario = SCENARIO) -> RingRound:
    hops = len(scenario.split) + 1
    times = {
        f"{ms:g}": Times(usual=[0.010] * 9, rested=[0.012] * 9, delayed=[0.012 + hops * ms / 1e3] * 9)
        for ms in delays.delays_ms
    }
    return RingRound(times=times, leftovers=Leftovers(exit_code=0, seen=3))


def recorded(plan: drill.DrillPlan = PLAN) -> dict[str, Any]:
    """The units of a run in which everything went well, as a journal gives them."""
    assert plan.ring is not None
    units: dict[str, Any] = {"undisturbed": {"answer": ANSWER, "next_answer": NEXT}}
    units |= {case.name(plan.scenario): good(case, plan.scenario) for case in plan.cases}
    units |= {f"ring/{number}": good_round(plan.ring, plan.scenario) for number in range(plan.ring.rounds)}
    built: dict[str, Any] = msgspec.to_builtins(units)
    return built


def failing(units: dict[str, Any]) -> dict[str, str]:
    """Checks that are not passed, and why."""
    return {check.name: check.detail for check in drill.checks(PLAN, units) if not check.passed}


def test_the_plan_has_every_act_on_every_stage_at_every_moment() -> None:
    assert len(PLAN.cases) == 4 * 3 * 5
    assert len({case.name(SCENARIO) for case in PLAN.cases}) == len(PLAN.cases)
    quick = drill.plan(SCENARIO, quick=True)
    assert len(quick.cases) == 4 * 3
    assert {case.moment for case in quick.cases} == set(MOMENTS)
    assert drill.plan(SCENARIO, ["kill"]).ring is None


def test_what_went_well_passes_with_every_case_counted() -> None:
    found = {check.name: check for check in drill.checks(PLAN, recorded())}
    assert all(check.passed for check in found.values())
    cases = {name: check.cases for name, check in found.items()}
    assert cases["text is the undisturbed one"] == 60
    assert cases["what is lost is re-prefilled whole, and once"] == 45
    assert cases["a slow cable loses no session"] == 15
    assert cases["nothing is left"] == 66
    assert cases["a delayed ring takes compute + delays + 5% at most"] == 6


MUTANTS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "a text that goes on wrongly after the recovery": (
        "kill/middle/token n",
        lambda unit: unit["answer"].__setitem__(SCENARIO.late + 1, 7),
        "text is the undisturbed one",
    ),
    "a text that ends early": (
        "stall/tail/prefill",
        lambda unit: unit["answer"].pop(),
        "text is the undisturbed one",
    ),
    "a turn after a cancellation that says something else": (
        "cut/head/cancel",
        lambda unit: unit["next_answer"].__setitem__(0, 7),
        "text is the undisturbed one",
    ),
    "a cancelled token that stays in the text": (
        "slow/head/cancel",
        lambda unit: unit["answer"].append(ANSWER[SCENARIO.late]),
        "text is the undisturbed one",
    ),
    "too few tokens re-prefilled": (
        "kill/head/token 1",
        lambda unit: unit.update(reprefilled=[SCENARIO.prompt]),
        "what is lost is re-prefilled whole, and once",
    ),
    "a re-prefill more than needed": (
        "cut/tail/twice",
        lambda unit: unit["reprefilled"].append(327),
        "what is lost is re-prefilled whole, and once",
    ),
    "no re-prefill at all": (
        "cut/tail/prefill",
        lambda unit: unit.update(reprefilled=[]),
        "what is lost is re-prefilled whole, and once",
    ),
    "a loss that is told late": (
        "stall/head/token 1",
        lambda unit: unit["strikes"][0].update(detected=3 * SCENARIO.heartbeat + 1.5),
        "losses are reported in time",
    ),
    "a loss that is never told": (
        "kill/tail/cancel",
        lambda unit: unit["strikes"][0].update(detected=None),
        "losses are reported in time",
    ),
    "a slow cable that loses a session": (
        "slow/middle/prefill",
        lambda unit: unit.update(losses=1, reprefilled=[320]),
        "a slow cable loses no session",
    ),
    "an act after the prefill was over": (
        "kill/head/prefill",
        lambda unit: unit["strikes"][0].update(committed=SCENARIO.prompt),
        "faults strike at their moment",
    ),
    "an act a token late": (
        "kill/head/token n",
        lambda unit: unit["strikes"][0].update(received=SCENARIO.late + 1),
        "faults strike at their moment",
    ),
    "a second act that never came": (
        "stall/middle/twice",
        lambda unit: unit["strikes"].pop(),
        "faults strike at their moment",
    ),
    "a second act after the recovery": (
        "stall/middle/twice",
        lambda unit: unit["strikes"][1].update(committed=328),
        "faults strike at their moment",
    ),
    "an error": (
        "cut/middle/token 1",
        lambda unit: unit.update(error="PrefillFailed: session 1 was lost 3 times"),
        "every case ends with its answer",
    ),
    "a process that survives": (
        "kill/middle/prefill",
        lambda unit: unit["remains"].update(processes=[4711]),
        "nothing is left",
    ),
    "a session that is still held": (
        "slow/tail/twice",
        lambda unit: unit["remains"].update(sessions=1, bytes=4096),
        "nothing is left",
    ),
    "an end that nobody looked at": (
        "ring/0",
        lambda unit: unit.update(remains=msgspec.to_builtins(Leftovers())),
        "nothing is left",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str) -> None:
    name, mutate, check = MUTANTS[mutant]
    units = copy.deepcopy(recorded())
    mutate(units[name])
    found = failing(units)
    assert list(found) == [check]
    assert name in found[check]


def test_a_text_of_one_token_tells_nothing() -> None:
    units = recorded()
    units["undisturbed"]["answer"] = [5] * SCENARIO.answer
    assert "answers tell" in failing(units)


@pytest.mark.parametrize("share", [0.5, 1.4], ids=["too fast", "too slow"])
def test_a_slow_cable_must_cost_what_it_adds(share: float) -> None:
    units = recorded()
    for moment in MOMENTS:
        units[f"slow/tail/{moment}"]["slow"] = [0.005 + share * 2 * SCENARIO.delay_ms / 1e3] * 6
    (detail,) = failing(units).values()
    assert "slow/tail" in detail
    assert "head" not in detail


def test_a_ring_with_a_round_trip_too_many_is_caught() -> None:
    units = recorded()
    for number in range(6):
        units[f"ring/{number}"]["times"]["10"]["delayed"] = [0.012 + 5 * 0.010] * 9
    (detail,) = failing(units).values()
    assert detail == "1 of 6 fail; 10 ms: +19.2% (+24.0%)"
    units = recorded()
    units["ring/3"].update(error="LinkBroken: gone")
    assert list(failing(units).values()) == ["1 of 7 fail; ring/3: LinkBroken: gone"]
    units = {name: unit for name, unit in recorded().items() if not name.startswith("ring/")}
    assert list(failing(units)) == ["a delayed ring takes compute + delays + 5% at most"]


def test_figures_are_medians_and_worst() -> None:
    units = recorded()
    units["kill/head/cancel"]["strikes"][0].update(detected=0.050, recovered=2.0)
    metrics = drill.metrics(PLAN, units)
    assert metrics["losses"]["kill/head"] == {
        "detected_ms": {"median": pytest.approx(4.0), "worst": pytest.approx(50.0)},
        "recovered_ms": {"median": pytest.approx(900.0), "worst": pytest.approx(2000.0)},
    }
    assert metrics["slow"]["slow/tail"] == {"added_ms": 40.0, "usual_ms": 5.0, "slow_ms": pytest.approx(45.0)}
    (still, *_, last) = points_of([good_round(Delays())], Delays(), 3)
    assert (still.added_ms, last.added_ms, last.count) == (0, 600, 9)
    assert last.over_rested == pytest.approx(0)
    assert last.over == pytest.approx(612 / 610 - 1)


async def test_a_process_that_survives_is_seen() -> None:
    process = await trio.lowlevel.open_process([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert await survivors([process.pid], 0.01) == [process.pid]
    finally:
        process.kill()
        await process.wait()
    assert is_gone(process.pid)
    assert await survivors([process.pid], 5.0) == []


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cases and rounds that go well without a process; the names of those that were run."""
    ran: list[str] = []

    async def undisturbed(model: Path, scenario: Scenario) -> dict[str, list[int]]:
        ran.append("undisturbed")
        return {"answer": ANSWER, "next_answer": NEXT}

    async def run_case(case: DrillCase, model: Path, scenario: Scenario) -> Outcome:
        ran.append(case.name(scenario))
        return good(case, scenario)

    async def run_round(model: Path, scenario: Scenario, delays: Delays, number: int) -> RingRound:
        ran.append(f"ring/{number}")
        return good_round(delays, scenario)

    monkeypatch.setattr(drill_command, "undisturbed", undisturbed)
    monkeypatch.setattr(drill_command, "run_case", run_case)
    monkeypatch.setattr(drill_command, "run_round", run_round)
    return ran


def command(folder: Path, *flags: str) -> int:
    return main(["drill", "--quick", "--out", str(folder), *flags])


@pytest.mark.slow
def test_an_interrupted_drill_goes_on_where_it_was(
    faked: list[str], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_case: Callable[..., Awaitable[Outcome]] = vars(drill_command)["run_case"]  # what stands in for it

    async def interrupted(case: DrillCase, model: Path, scenario: Scenario) -> Outcome:
        if len(faked) == 5:
            raise KeyboardInterrupt
        return await run_case(case, model, scenario)

    with monkeypatch.context() as patch:
        patch.setattr(drill_command, "run_case", interrupted)
        assert command(tmp_path) == 130
    before = list(faked)
    assert command(tmp_path, "--json") == 0
    assert len(faked) == len(set(faked)) == 1 + 12 + 1
    assert faked[: len(before)] == before
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert said["figures"]["cases"] == 12
    for name in ("detection", "recovery", "ring"):
        assert (tmp_path / "plots" / f"{name}.png").exists()
    monkeypatch.setattr(benchmark, "write_report", lambda *_: None)  # it is written by now
    assert command(tmp_path) == 0
    assert len(faked) == 14  # nothing is measured twice
    assert command(tmp_path, "--fresh") == 0
    assert len(faked) == 28
    assert command(tmp_path, "--acts", "kill") == 2
    assert "another plan digest" in capsys.readouterr().err


def test_a_drill_that_fails_says_so(
    faked: list[str], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def forgets(case: DrillCase, model: Path, scenario: Scenario) -> Outcome:
        return msgspec.structs.replace(good(case, scenario), reprefilled=[1])

    monkeypatch.setattr(drill_command, "run_case", forgets)
    assert command(tmp_path, "--acts", "cut") == 1
    assert "FAIL  what is lost is re-prefilled whole, and once (3 cases)" in capsys.readouterr().out
    assert "**NOT PASSED**" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--acts", "kill,burn"), "--acts names 'burn'; an act is one of kill, cut, stall, slow"),
        (("--heartbeat", "0"), "--heartbeat is 0 s; give 0.05 to 10"),
        (("--split", "0:3"), "the split ends at layer 3, but the model has 7; end with 3:7"),
        (("--model", "nowhere.gguf"), "nowhere.gguf"),
    ],
    ids=["acts", "heartbeat", "split", "model"],
)
def test_bad_flags_are_refused(
    flags: tuple[str, ...], says: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "out", *flags) in (1, 2)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- what runs stages ------------------------------------------------------------------------------------------------


async def test_a_case_that_ends_in_an_error_is_an_outcome(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise LinkBroken("no stage today")

    monkeypatch.setattr(fault_injection, "open_testbed", refuse)
    outcome = await fault_injection.run_case(PLAN.cases[0], small, SCENARIO)
    assert outcome.error == "LinkBroken: no stage today"


async def test_a_case_that_hangs_is_an_outcome(autojump_clock: trio.abc.Clock) -> None:
    outcome = Outcome()
    with fault_injection.into_error(outcome, 180.0):
        await trio.sleep_forever()
    assert outcome.error == "TooSlowError: not ended after 180 s"


async def test_a_program_that_ends_too_early_says_why() -> None:
    async with open_program("stage", "nowhere.gguf", "--layers", "0:7", "--listen", "127.0.0.1:0") as program:
        with pytest.raises(ProgramEnded, match=r"dgr ended with 2 before its first line came: .*nowhere\.gguf"):
            await program.first_line()


async def test_a_cable_delays_connections_to_come() -> None:
    async def echo(stream: trio.SocketStream) -> None:
        await stream.send_all(await stream.receive_some(1))

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, echo, 0)
        address = f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        async with open_proxies(Route((StageRef(address, LayerRange(0, 7)),))) as (route, (cable,)):
            cable.delay = 0.010
            assert route.stages[0].address == cable.address != address
            stream = await trio.open_tcp_stream("127.0.0.1", int(cable.address.split(":")[1]))
            began = trio.current_time()
            await stream.send_all(b"x")
            assert await stream.receive_some(1) == b"x"
            assert trio.current_time() - began >= 0.020
            assert cable.relays[0].leftward.delay == cable.delay == 0.010
        nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_a_quick_drill(exact_here: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = command(tmp_path)
    assert code == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"]
    assert result["figures"]["cases"] == 12
