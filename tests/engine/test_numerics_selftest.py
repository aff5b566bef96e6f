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

from dgr.cli import main
from dgr.core.values import Numerics
from dgr.engine.native import kernel_fingerprint
from dgr.engine.numerics import ExactnessRecord, load_exactness_record, save_exactness_record
from dgr.errors import InputError, NonFinite
from dgr.selftest import invariance
from dgr.selftest.chain import Chain
from dgr.selftest.fixture import cached_fixture
from dgr.selftest.invariance import Case, Report, Verdict, exactness_record, run_suite, select
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
    assert report.notes == ("several threads: not tested for mxfp4: the CPUs are busy",)
    assert all(verdict.exact and verdict.threads == () for verdict in report.verdicts)
    assert tuple(seen) == report.verdicts


def test_threads_are_not_tested_on_one_cpu(exact: Report) -> None:
    assert exact.notes == ("several threads: not tested for q8_0: this process may use one CPU only",)


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
        assert new.notes == report.notes


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
    report = Report(kernel_fingerprint(), (untested,), ("weights f32: not tested: no disk",), 0.0)
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
    monkeypatch.setattr("dgr.cli.selftest.run_suite", lambda *_, **__: Report(kernel_fingerprint(), (ONE,), (), 0.0))
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


def test_a_record_with_something_untested_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))

    def suite(*_: object, **__: object) -> Report:
        ran.append("once")
        return Report(kernel_fingerprint(), (), (), 0.0)

    monkeypatch.setattr("dgr.cli.selftest.run_suite", suite)
    command = ["selftest", "numerics", "--if-missing"]
    threads, disk = "several threads: not tested for f16", "weights f16: not tested: No space left on device"
    for notes, cpus, times in (((threads,), 2, 1), ((), 2, 0), ((threads,), 1, 0), ((disk,), 1, 1)):
        save_exactness_record(ExactnessRecord(kernel_fingerprint(), ("f32",), ("f16",), notes=notes))
        monkeypatch.setattr("dgr.cli.selftest.available_cpus", lambda cpus=cpus: cpus)
        ran.clear()
        assert main(command) == 0
        assert len(ran) == times
        said = capsys.readouterr().out
        assert (f"runs again: {'; '.join(notes)}\n" in said) == bool(times)
        assert ("recorded already" in said) != bool(times)
