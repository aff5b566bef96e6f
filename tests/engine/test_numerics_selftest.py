"""The invariance suite: it finds what is exact, sees what is not, and says what it could not test."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec.structs import replace

from dgr.artifact.artifact import Artifact
from dgr.cli import main
from dgr.core.values import Numerics
from dgr.engine.native import kernel_fingerprint
from dgr.engine.numerics import ExactnessRecord, check_exact_types, load_exactness_record, save_exactness_record
from dgr.errors import InputError, NonFinite, NumericsRefused
from dgr.selftest import invariance
from dgr.selftest.cases import K_TYPES, WEIGHT_TYPES, Case, cases_of, select
from dgr.selftest.chain import Chain
from dgr.selftest.fixture import cached_fixture
from dgr.selftest.invariance import Report, Verdict, exactness_record, run_suite
from dgr.testing.limits import limited_files

ONE = Verdict(Case("weights", "f32"), (), (), 0.1)


@pytest.fixture(autouse=True, scope="module")
def one_cpu() -> Iterator[None]:
    """No threaded runs here but where a test asks for them: other tests of exact numerics have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariance, "available_cpus", lambda: 1)
        yield


@pytest.fixture(scope="module")
def exact() -> Report:
    return run_suite(["q8_0"])


@pytest.fixture(scope="module")
def native() -> Report:
    return run_suite(["bf16", "f32"], numerics=Numerics.NATIVE)


def test_exact_types_pass(exact: Report) -> None:
    assert [(verdict.case.kind, verdict.case.label) for verdict in exact.verdicts] == [
        ("k_cache", "q8_0"),
        ("weights", "q8_0"),
    ]
    assert all(verdict.exact for verdict in exact.verdicts), exact
    assert exact.passed
    assert exact.fingerprint == kernel_fingerprint()


@pytest.mark.slow
def test_upstreams_fastest_kernels_do_not(native: Report) -> None:
    """The suite can fail: without the reference kernels rows differ, here as everywhere that llamafile's sgemm runs."""
    assert not native.passed
    found = {(verdict.case.kind, verdict.case.label): verdict.differences for verdict in native.verdicts}
    assert any("of 160 rows differ, the first at position" in text for text in found["weights", "f32"])
    assert all(found.values())


def test_every_type_that_exact_may_refuse_can_be_tested() -> None:
    assert {case.label for case in select() if case.kind == "weights"} >= {
        "f32",
        "bf16",
        "q4_K",
        "iq1_m",
        "mxfp4",
        "nvfp4",
    }
    assert select(["F32", "q4_k"]) == (Case("k_cache", "f32"), Case("weights", "f32"), Case("weights", "q4_K"))
    with pytest.raises(InputError, match="unknown tensor type 'q9'"):
        select(["q9"])
    with pytest.raises(InputError, match="no model can be written with weights of type i32"):
        select(["i32"])


def test_a_record_keeps_what_was_not_tested_again(exact: Report, native: Report) -> None:
    first = exactness_record(exact)
    assert (first.weight_types, first.k_types, first.failures) == (("q8_0",), ("q8_0",), {})
    both = exactness_record(native, first)
    assert (both.weight_types, both.k_types) == (("q8_0",), ("q8_0",))
    assert set(both.failures) == {"K cache f32", "weights f32", "weights bf16"}
    worse = evolve(exact, verdicts=tuple(evolve(one, differences=("all",)) for one in exact.verdicts))
    assert (exactness_record(worse, both).weight_types, exactness_record(worse, both).k_types) == ((), ())
    assert set(exactness_record(exact, exactness_record(worse, both)).failures) == set(both.failures)
    other = ExactnessRecord("0" * 32, ("f16",), ("f16",))
    assert exactness_record(exact, other) == first


def test_threads_are_not_tested_on_busy_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_BUSY_SECONDS", 0.0)
    monkeypatch.setattr(invariance, "_BUSY_FACTOR", 0.0)
    monkeypatch.setattr(invariance, "available_cpus", lambda: 2)
    seen: list[Verdict] = []
    report = run_suite(["mxfp4"], finished=seen.append)
    assert report.notes == ("weights mxfp4: several threads not tested: the CPUs are busy",)
    assert all(verdict.exact and verdict.threads == () for verdict in report.verdicts)
    assert tuple(seen) == report.verdicts


def test_threads_are_not_tested_on_one_cpu(exact: Report) -> None:
    why = "several threads not tested: this process may use one CPU only"
    assert exact.untested == {"K cache q8_0": why, "weights q8_0": why}
    assert exact.notes == (f"K cache q8_0, weights q8_0: {why}",)


def test_a_type_that_could_not_be_run_keeps_its_old_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Want of disk, memory or rights says nothing about kernels."""
    monkeypatch.setattr(invariance, "_CONTEXT", replace(invariance._CONTEXT, n_batch=100, n_ubatch=100))
    report = run_suite(["bf16"])
    (verdict,) = report.verdicts
    assert (verdict.exact, verdict.is_known, verdict.differences) == (False, False, ())
    assert verdict.untested is not None
    assert report.notes == (f"weights bf16: not tested: {verdict.untested}",)
    for before in (("bf16",), ()):
        old = ExactnessRecord(report.fingerprint, before, ("f16",), {} if before else {"weights bf16": "1 of 160 rows"})
        new = exactness_record(report, old)
        assert (new.weight_types, new.k_types, new.failures) == (old.weight_types, old.k_types, old.failures)
        assert new.untested == report.untested


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), MemoryError(), InputError("no such place")]
)
def test_a_model_that_cannot_be_written_is_no_finding(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(invariance, "cached_fixture", fail)
    report = run_suite(["f32"])
    assert not report.passed  # essential, and nobody knows
    assert all(not verdict.is_known for verdict in report.verdicts)
    assert all(str(failure) in note or "MemoryError" in note for note in report.notes)
    assert exactness_record(report, ExactnessRecord(report.fingerprint, ("f32",), ("f32",))).weight_types == ("f32",)


def test_differing_bits_are_a_failure_whatever_came_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "beside_others", lambda *_: fail_for_want_of_memory())

    def fail_for_want_of_memory() -> bytes:
        raise MemoryError

    report = run_suite(["bf16"], numerics=Numerics.NATIVE)
    (verdict,) = report.verdicts
    assert verdict.differences
    assert verdict.untested == "MemoryError"
    assert set(exactness_record(report, ExactnessRecord(report.fingerprint, ("bf16",), ())).failures) >= {
        "weights bf16"
    }
    assert exactness_record(report, ExactnessRecord(report.fingerprint, ("bf16",), ())).weight_types == ()


def test_no_number_is_a_finding_about_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_number(*_: object) -> bytes:
        raise NonFinite("NaN or Inf in the logits")

    monkeypatch.setattr(invariance, "beside_others", no_number)
    (verdict,) = run_suite(["bf16"]).verdicts
    assert verdict.differences == ("NaN or Inf in the logits",)


def test_nothing_found_is_nothing_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "cache"))
    untested = evolve(ONE, untested="no disk")
    report = Report(kernel_fingerprint(), (untested,), {"weights f32": "not tested: no disk"}, 0.0)
    monkeypatch.setattr("dgr.cli.selftest.run_suite", lambda *_, **__: report)
    assert main(["selftest", "numerics"]) == 1
    text = capsys.readouterr().out
    assert "note: weights f32: not tested: no disk" in text
    assert "not recorded" in text
    assert load_exactness_record() is None


def test_a_verdict_that_cannot_be_kept_is_told_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    before = ExactnessRecord(kernel_fingerprint(), ("f32", "bf16"), ("f16",))
    save_exactness_record(before)
    monkeypatch.setattr("dgr.cli.selftest.run_suite", lambda *_, **__: Report(kernel_fingerprint(), (ONE,), {}, 0.0))
    with limited_files(64):
        assert main(["selftest", "numerics"]) == 1
    assert "note: the verdict on these kernels cannot be kept" in capsys.readouterr().out
    assert load_exactness_record() == before
    assert list((tmp_path / "numerics").iterdir()) == [tmp_path / "numerics" / f"{kernel_fingerprint()}.json"]


def test_a_place_without_room_for_a_verdict_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("dgr.cli.selftest.run_suite", lambda *_, **__: pytest.fail("it ran"))
    assert main(["selftest", "numerics"]) == 2
    assert "cannot be kept" in capsys.readouterr().err


def test_an_interrupt_ends_every_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told, each case would go on to its end, and those that wait would begin."""
    began, ended = threading.Event(), list[str]()
    real = Chain.feed

    def feed(self: Chain, *arguments: Any, **options: Any) -> bytes:
        began.set()
        while not ended:  # for ever, but for the abort
            real(self, *arguments, **options)
            self.close()
        return b""

    monkeypatch.setattr(Chain, "feed", feed)

    def interrupt_it() -> None:
        if began.wait(60):
            os.kill(os.getpid(), signal.SIGINT)

    interrupt = threading.Thread(target=interrupt_it)
    guard = threading.Timer(30, ended.append, ["nobody ended it"])
    guard.start()
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_suite(["bf16", "f16", "f32", "q8_0"])
        assert ended == []
    finally:
        ended.append("over")
        guard.cancel()
        guard.join()
        interrupt.join()
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_an_interrupted_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("dgr.cli.selftest.run_suite", interrupted)
    assert main(["selftest", "numerics"]) == 130
    assert capsys.readouterr().err == "dgr selftest: interrupted; nothing was recorded\n"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = cached_fixture("bf16", layers=5)
    monkeypatch.setattr(invariance, "cached_fixture", lambda *_, **__: model)  # it stays where it is
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    before = ExactnessRecord(kernel_fingerprint(), ("f32",), ("f16",))
    save_exactness_record(before)

    assert main(["selftest", "numerics", "--types", "bf16", "--json", "--no-record"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["record"] is None
    assert [(one["type"], one["exact"], one["differences"]) for one in found["verdicts"]] == [("bf16", True, [])]
    assert load_exactness_record() == before

    assert main(["selftest", "numerics", "--types", "bf16"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"weights +bf16 .* exact\n", text)
    assert str(tmp_path) in text
    recorded = load_exactness_record()
    assert recorded is not None
    assert (recorded.weight_types, recorded.k_types) == (("f32", "bf16"), ("f16",))


def test_the_command_fails_when_an_essential_type_is_not_exact(
    native: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dgr.cli.selftest.run_suite", lambda *_, **__: native)
    assert main(["selftest", "numerics", "--types", "f32,bf16", "--no-record", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


class Suite:
    """Stands for the suite: finds every type exact, and notes which it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, cases: tuple[Case, ...], **_: object) -> Report:
        self.asked = [case.name for case in cases]
        return Report(kernel_fingerprint(), tuple(evolve(ONE, case=case) for case in cases), {}, 0.0)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("dgr.cli.selftest.available_cpus", lambda: 2)
    suite = Suite()
    monkeypatch.setattr("dgr.cli.selftest.run_suite", suite)
    return suite


def recorded() -> ExactnessRecord:
    found = load_exactness_record()
    assert found is not None
    return found


WHOLE = ExactnessRecord("", WEIGHT_TYPES, K_TYPES)
THREADS, DISK = "several threads not tested: the CPUs are busy", "not tested: No space left on device"


def test_what_a_record_lacks_is_tested_alone(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = replace(WHOLE, fingerprint=kernel_fingerprint())
    fewer = replace(whole, weight_types=tuple(label for label in WEIGHT_TYPES if label != "f16"))
    f16 = ["weights f16"]
    for record, cpus, asked in (
        (whole, 2, []),
        (fewer, 2, f16),
        (replace(fewer, failures={"weights f16": "3 of 160 rows differ"}), 2, []),
        (replace(whole, untested={"weights f16": THREADS}), 2, f16),
        (replace(whole, untested={"weights f16": THREADS}), 1, []),
        (replace(fewer, untested={"weights f16": DISK}), 1, f16),
    ):
        save_exactness_record(record)
        monkeypatch.setattr("dgr.cli.selftest.available_cpus", lambda cpus=cpus: cpus)
        suite.asked = []
        assert main(["selftest", "numerics", "--if-missing"]) == 0
        assert suite.asked == asked
        said = capsys.readouterr().out
        why = record.untested.get("weights f16", "not tested yet")
        assert (f"the record lacks it: weights f16 ({why})\n" in said) == bool(asked)
        assert ("recorded already" in said) != bool(asked)


def test_a_first_run_tests_what_a_model_needs_and_the_rest_on_demand(
    suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(cached_fixture("mixed", layers=7))
    needed = {"K cache f16", *(f"weights {label}" for label in ("bf16", "mxfp4", "q8_0"))}
    command = ["selftest", "numerics", "--model", model, "--if-missing"]
    assert main(command) == 0
    assert needed <= set(suite.asked) < {case.name for case in select()}
    first = set(suite.asked)
    assert f"the other {len(select()) - len(first)}: dgr selftest numerics --if-missing" in capsys.readouterr().out
    suite.asked = []
    assert main(command) == 0
    assert suite.asked == []
    assert main([*command, "--type-k", "q8_0"]) == 0
    assert suite.asked == ["K cache q8_0"]
    assert main(["selftest", "numerics", "--if-missing"]) == 0
    assert set(suite.asked) == {case.name for case in select()} - first - {"K cache q8_0"}
    assert (recorded().weight_types, recorded().k_types) == (WEIGHT_TYPES, K_TYPES)
    assert main([*command, "--type-k", "q4_0"]) == 2
    assert "no K cache is of type q4_0; choose from f16, f32, q8_0" in capsys.readouterr().err


def test_a_gap_stays_in_the_record_while_other_types_are_tested() -> None:
    fingerprint = kernel_fingerprint()
    before = ExactnessRecord(fingerprint, ("f16",), (), untested={"weights f16": THREADS, "weights bf16": DISK})
    after = exactness_record(Report(fingerprint, (ONE,), {"weights f32": THREADS}, 0.0), before)
    assert after.untested == {**before.untested, "weights f32": THREADS}
    f16 = evolve(ONE, case=Case("weights", "f16"))
    assert exactness_record(Report(fingerprint, (f16,), {}, 0.0), after).untested == {
        "weights bf16": DISK,
        "weights f32": THREADS,
    }


def test_exact_numerics_ask_for_the_types_that_nobody_tested(tiny: Path, suite: Suite) -> None:
    """What the refusal says to run is all that is needed, whatever the suite was run for before."""
    artifact = Artifact.open(cached_fixture("mixed", layers=7))
    assert main(["selftest", "numerics", "--model", str(tiny)]) == 0
    labels = [kind.label for kind in artifact.matrix_types(artifact.layers)]
    with pytest.raises(NumericsRefused, match="have not been tested") as refused:
        check_exact_types(labels, "f16")
    command = re.search("`dgr ([^`]*)`", str(refused.value))
    assert command is not None
    assert main(command[1].split()) == 0
    check_exact_types(labels, "f16")
    assert {case.name for case in cases_of(artifact, "f16")} < {case.name for case in select()}
