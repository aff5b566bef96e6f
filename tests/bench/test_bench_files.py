"""Damaged profiles, results and journals: a typed refusal, or a load, and no gigabytes for a few bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from bench.bench_files import CERTIFICATE, KINDS

from dgr import Artifact
from dgr.core.route import parse_split
from dgr.selftest.fixture.cached import cached_fixture
from dgr.testing.file_fuzz import fuzz
from dgr_bench import benchmark
from dgr_bench.certify.mutants import PROFILE
from dgr_bench.certify.run import CertifyJob
from dgr_bench.results import Journal


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_of_the_benchmark_are_refused_or_load(kind: str) -> None:
    report = fuzz(seed=1, n_cases=60, kind=f"bench.bench_files:{kind}")
    assert report.findings == ()
    assert report.refused > 20


@pytest.mark.slow
def test_a_gigabyte_in_a_kilobyte_would_be_a_finding() -> None:
    report = fuzz(seed=1, n_cases=1, kind="bench.bench_files:packed result", mutant="unpacks all", only="a bomb")
    assert report.findings[0].what.startswith("MemoryError")


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_damaged_files_of_the_benchmark(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results among them that are a whole certificate's."""
    if "result" in kind:
        job = CertifyJob(PROFILE, Artifact.open(cached_fixture("mixed", layers=7)), parse_split("0:2,2:5,5:7", 7))
        with Journal.open(tmp_path, job.kind, job.plan, job.subject(), "dgr-bench certify") as journal:
            assert trio.run(benchmark.run, job, journal).passed
        monkeypatch.setenv(CERTIFICATE, str(tmp_path))
    report = fuzz(seed=10, n_cases=2400, kind=f"bench.bench_files:{kind}")
    print(report)
    assert report.findings == ()
