"""The invariance suite: it finds what is exact, sees what is not, and says what it could not test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from attrs import evolve

from dgr.cli import main
from dgr.engine.base import Numerics
from dgr.engine.native import kernel_fingerprint
from dgr.engine.numerics import Certificate, load_certificate, record_certificate
from dgr.errors import InputError
from dgr.testing import invariance
from dgr.testing.invariance import Case, Report, certificate, run_suite, select
from dgr.testing.models import cached_fixture


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


def test_exact_types_pass(exact: Report):
    assert [(verdict.case.kind, verdict.case.label) for verdict in exact.verdicts] == [
        ("k_cache", "q8_0"),
        ("weights", "q8_0"),
    ]
    assert all(verdict.exact for verdict in exact.verdicts), exact
    assert exact.passed
    assert exact.fingerprint == kernel_fingerprint()


def test_upstreams_fastest_kernels_do_not(native: Report):
    """The suite can fail: without the reference kernels rows differ, here as everywhere that llamafile's sgemm runs."""
    assert not native.passed
    found = {(verdict.case.kind, verdict.case.label): verdict.differences for verdict in native.verdicts}
    assert any("of 160 rows differ, the first at position" in text for text in found["weights", "f32"])
    assert all(found.values())


def test_every_type_that_exact_may_refuse_can_be_tested():
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


def test_a_record_keeps_what_was_not_tested_again(exact: Report, native: Report):
    first = certificate(exact)
    assert (first.weight_types, first.k_types, first.failures) == (("q8_0",), ("q8_0",), {})
    both = certificate(native, first)
    assert (both.weight_types, both.k_types) == (("q8_0",), ("q8_0",))
    assert set(both.failures) == {"K cache f32", "weights f32", "weights bf16"}
    worse = evolve(exact, verdicts=tuple(evolve(one, differences=("all",)) for one in exact.verdicts))
    assert (certificate(worse, both).weight_types, certificate(worse, both).k_types) == ((), ())
    assert set(certificate(exact, certificate(worse, both)).failures) == set(both.failures)
    other = Certificate("0" * 32, ("f16",), ("f16",))
    assert certificate(exact, other) == first


def test_threads_are_not_tested_on_busy_cpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(invariance, "_BUSY_SECONDS", 0.0)
    monkeypatch.setattr(invariance, "_BUSY_FACTOR", 0.0)
    monkeypatch.setattr(invariance, "available_cpus", lambda: 2)
    seen = []
    report = run_suite(["mxfp4"], finished=seen.append)
    assert report.notes == ("several threads: not tested for mxfp4: the CPUs are busy",)
    assert all(verdict.exact and verdict.threads == () for verdict in report.verdicts)
    assert tuple(seen) == report.verdicts


def test_threads_are_not_tested_on_one_cpu(exact: Report):
    assert exact.notes == ("several threads: not tested for q8_0: this process may use one CPU only",)


def test_a_type_that_does_not_run_is_not_exact(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(invariance, "_CONTEXT", evolve(invariance._CONTEXT, n_batch=100, n_ubatch=100))
    report = run_suite(["bf16"])
    (verdict,) = report.verdicts
    assert verdict.differences[0].startswith("does not run: ")
    assert certificate(report).failures == {"weights bf16": verdict.differences[0]}


def test_the_command(tmp_path, monkeypatch, capsys):
    model = cached_fixture("bf16", layers=5)
    monkeypatch.setattr(invariance, "cached_fixture", lambda *_, **__: model)  # it stays where it is
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    before = Certificate(kernel_fingerprint(), ("f32",), ("f16",))
    record_certificate(before)

    assert main(["selftest", "numerics", "--types", "bf16", "--json", "--no-record"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["record"] is None
    assert [(one["type"], one["exact"], one["differences"]) for one in found["verdicts"]] == [("bf16", True, [])]
    assert load_certificate() == before

    assert main(["selftest", "numerics", "--types", "bf16"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"weights +bf16 .* exact\n", text)
    assert str(tmp_path) in text
    recorded = load_certificate()
    assert recorded is not None
    assert (recorded.weight_types, recorded.k_types) == (("f32", "bf16"), ("f16",))


def test_the_command_fails_when_an_essential_type_is_not_exact(native: Report, monkeypatch, capsys):
    monkeypatch.setattr("dgr.cli.selftest.run_suite", lambda *_, **__: native)
    assert main(["selftest", "numerics", "--types", "f32,bf16", "--no-record", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_a_record_with_something_untested_is_made_again(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        "dgr.cli.selftest.run_suite", lambda *_, **__: ran.append(1) or Report(kernel_fingerprint(), (), (), 0.0)
    )
    command = ["selftest", "numerics", "--if-missing"]
    for notes, cpus, times in ((("several threads: not tested",), 2, 1), ((), 2, 0), (("one CPU",), 1, 0)):
        record_certificate(Certificate(kernel_fingerprint(), ("f32",), ("f16",), notes=notes))
        monkeypatch.setattr("dgr.cli.selftest.available_cpus", lambda cpus=cpus: cpus)
        ran.clear()
        assert main(command) == 0
        assert len(ran) == times
    assert "recorded already" in capsys.readouterr().out
