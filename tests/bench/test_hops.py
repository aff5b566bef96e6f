"""Hops: what is counted and judged, and real ones, a few."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dgr_bench import benchmark
from dgr_bench.benchmark import Group, Store
from dgr_bench.cli import main
from dgr_bench.links import hops
from dgr_bench.links.echo import LIMITS, open_echo, open_echo_link, payload_bytes
from dgr_bench.links.hops import Hops, HopsPlan
from dgr_bench.results import Journal

PAYLOAD = payload_bytes(1)


def timed(extra_ms: float) -> dict[str, Any]:
    """A unit in which every hop takes so much longer than its wire."""
    bare = [0.1, 0.3, 0.2, 0.15]
    return {
        "tokens": 1,
        "payload_bytes": PAYLOAD,
        "bare_ms": bare,
        "link_ms": [round_trip + 2 * extra_ms for round_trip in bare],
    }


def counted(extra: int) -> dict[str, Any]:
    return {"tokens": 1, "payload_bytes": PAYLOAD, "frames": 40, "wire_bytes": 40 * (PAYLOAD + extra)}


def units(memory: float = 0.1, tls: float = 0.3, extra: int = 290) -> dict[str, dict[str, Any]]:
    return {"memory, decode": timed(memory), "tls, decode": timed(tls), "tls, decode, bytes": counted(extra)}


HOPS = Hops(hops.plan(True))


async def measured(plan: HopsPlan, folder: Path) -> dict[str, Any]:
    with Journal.open(folder, "hops", plan, {}, "dgr-bench hops") as journal:
        return (await benchmark.run(Hops(plan), journal)).units


def test_goals_that_are_met() -> None:
    verdicts = HOPS.checks(units())
    assert [check.name for check in verdicts] == [
        "every round is measured",
        "extra time of a hop in process",
        "extra time of a hop over loopback TLS",
        "bytes of a frame over TLS",
    ]
    assert all(check.passed for check in verdicts)
    assert [check.cases for check in verdicts] == [3, 4, 4, 40]


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"memory": 0.26}, "extra time of a hop in process"),
        ({"tls": 0.61}, "extra time of a hop over loopback TLS"),
        ({"extra": 321}, "bytes of a frame over TLS"),
    ],
)
def test_a_goal_that_is_missed(bad: dict[str, Any], name: str) -> None:
    assert [check.name for check in HOPS.checks(units(**bad)) if not check.passed] == [name]


@pytest.mark.parametrize(("transport", "most"), [("memory", 1.3), ("tcp", 1.3), ("tls", 1.05)])
def test_a_prefill_chunk_is_judged_by_its_ratio(transport: str, most: float) -> None:
    for ratio in (0.5, most - 0.01, most + 0.01):
        unit = {"tokens": 512, "payload_bytes": 512 * PAYLOAD, "bare_ms": [40.0, 50.0]}
        unit["link_ms"] = [ratio * bare for bare in (40.0, 50.0)]
        (check,) = HOPS.checks({f"{transport}, prefill": unit})[1:]
        assert "prefill chunk" in check.name
        assert check.passed is (ratio < most)


def test_processes_of_one_host_are_judged_against_loopback_tcp() -> None:
    for speed in (1.9, 2.1):
        unit = {
            "tokens": 512,
            "payload_bytes": 512 * PAYLOAD,
            "tcp_ms": [20.0, 30.0],
            "link_ms": [20 / speed, 30 / speed],
        }
        found = {"unix, prefill": unit}
        (check,) = HOPS.checks(found)[1:]
        assert "one host" in check.name
        assert check.passed is (speed > 2)
        assert HOPS.metrics(found)["unix, prefill"]["speed"].median == pytest.approx(speed)
        [section] = HOPS.sections(HOPS.metrics(found), found)
        assert f"| prefill | 25.000 | {25 / speed:.3f} | {speed:.2f}" in section.parts[1]


@pytest.mark.slow
async def test_links_of_one_host_are_measured_beside_tcp(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(hops.plan(True, ("unix",)), rounds={"decode": 3, "prefill": 1})
    found = await measured(plan, tmp_path)
    assert len(found["unix, decode"]["tcp_ms"]) == len(found["unix, decode"]["link_ms"]) == 3
    assert len(found["unix, prefill"]["link_ms"]) == 1


def test_figures() -> None:
    found = HOPS.metrics(units(memory=0.05))["memory, decode"]
    assert found["extra_ms_per_hop"].median == pytest.approx(0.05)
    assert found["bare_ms"].median == pytest.approx(0.175)
    assert HOPS.metrics(units())["tls, decode, bytes"] == {"bytes_per_frame": PAYLOAD + 290, "extra_bytes": 290}


async def test_rounds_in_process_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = msgspec.structs.replace(hops.plan(True, ("memory",)), rounds={"decode": 5, "prefill": 1})
    found = await measured(plan, tmp_path)
    unit = found["memory, decode"]
    assert len(unit["bare_ms"]) == len(unit["link_ms"]) == 5
    assert len(found["memory, prefill"]["link_ms"]) == 1

    def fail(transport: str) -> None:
        raise AssertionError("everything was measured before")

    monkeypatch.setattr(hops, "open_echo", fail)
    assert await measured(plan, tmp_path) == found


async def test_bytes_on_the_wire(tmp_path: Path) -> None:
    found = await measured(msgspec.structs.replace(hops.plan(True, ("tls",)), rounds={"decode": 2}), tmp_path)
    assert found["tls, decode, bytes"]["frames"] == 4
    extra = HOPS.metrics(found)["tls, decode, bytes"]["extra_bytes"]
    # More than TLS records of at most 16 KiB, 22 bytes each, and within the goal: bytes are not a matter of chance.
    assert 5 * 22 < extra <= hops.GOALS["bytes"].value


def test_a_round_trip_that_failed_is_told() -> None:
    failed = units() | {"tls, decode": {"error": "LinkBroken: the echo went away"}}
    (check,) = (check for check in HOPS.checks(failed) if not check.passed)
    assert check.detail == "1 of 3 fail; tls, decode: LinkBroken: the echo went away"


async def test_an_echo_in_this_process_has_no_wire() -> None:
    async with open_echo("memory") as echo, echo.connect() as stream, open_echo_link(stream) as link:
        assert link.limits == LIMITS.unbroken()
        with pytest.raises(ValueError, match="no wire"):
            async with echo.counted():
                pass


@pytest.mark.parametrize(("extra", "code", "verdict"), [(100, 0, "PASSED"), (400, 1, "NOT PASSED")])
def test_the_command(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: int,
    code: int,
    verdict: str,
) -> None:
    def recorded(_: Hops, store: Store) -> Iterator[Group]:
        for name, unit in units(extra=extra).items():
            store.put(name, unit)
        yield from ()

    monkeypatch.setattr(Hops, "units", recorded)
    assert main(["hops", "--quick", "--transport", "memory", "tls", "--out", str(tmp_path)]) == code
    assert f"\n{verdict}: " in capsys.readouterr().out
    report = (tmp_path / "report.md").read_text()
    assert f"**{verdict}**" in report
    assert f"| tls | decode | {PAYLOAD} | {extra}.0 |" in report
    assert (tmp_path / "plots" / "hops.png").exists()
    assert (tmp_path / "plots" / "hops.svg").exists()
    assert json.loads((tmp_path / "result.json").read_text())["complete"]
