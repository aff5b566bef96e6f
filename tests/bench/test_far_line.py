"""A line between network namespaces: what it does to packets, and round trips over it where the machine allows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dgr.cli.children import python_module
from dgr_bench.links.line import _Line


def _pair() -> tuple[int, int]:
    """Two ends of pipes that stand for devices: what comes on one, and where it goes to."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    return reading, writing


@pytest.mark.skipif(sys.platform != "linux", reason="packets are those of Linux's devices")
def test_packets_are_late_lost_and_no_more_than_the_rate() -> None:
    came, into = _pair()
    out, goes = _pair()
    line = _Line(delay=0.02, loss=0.0, rate=1e9, devices=(came, goes))
    began = time.monotonic()
    os.write(into, b"p" * 1000)
    while not line._count or line._under_way:
        line.pass_on()
    assert time.monotonic() - began >= 0.02
    assert os.read(out, 2000) == b"p" * 1000
    line.loss = 1.0
    os.write(into, b"lost")
    line.pass_on()
    assert not line._under_way
    line.loss, line.rate, line.delay = 0.0, 1e6, 0.0
    line._take(b"x" * 1000, goes)
    line._take(b"x" * 1000, goes)
    first, second = sorted(line._under_way)
    assert second[0] - first[0] == pytest.approx(0.001, abs=1e-4)
    for descriptor in (came, into, out, goes):
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or not Path("/dev/net/tun").exists()
    or shutil.which("ip") is None
    or subprocess.run(["unshare", "--net", "true"], check=False).returncode != 0,
    reason="it needs root, a TUN device and network namespaces",
)
def test_round_trips_take_the_delay_of_the_line() -> None:
    command = python_module("dgr_bench.links.line", "--delay", "30", "--rounds", "4")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.fullmatch(r"([0-9.]+) ms \(.*\)", done.stdout.strip())
    assert found is not None, done
    assert float(found[1]) >= 60
