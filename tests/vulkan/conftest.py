"""The lane of Vulkan devices (`make test-vulkan`): nothing here is skipped where a device is missing, it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vulkan.lane import LAYERS, PACKAGES, SOFTWARE

from dgr.engine.devices import Device, find_devices
from dgr.engine.native import build_info
from dgr.selftest.fixture import cached_fixture
from dgr.testing.state_inspector import inspector_native


@pytest.fixture(scope="session", autouse=True)
def device() -> Device:
    """The first device of this build, ready for both extensions; fails with what to install."""
    for name, value in SOFTWARE.items():
        os.environ.setdefault(name, value)
    if "GGML_VULKAN=ON" not in build_info()["ggml_options"].split():
        pytest.fail("this build has no Vulkan: run `make test-vulkan`, which makes one of its own", pytrace=False)
    found = find_devices()
    if not found or not find_devices(inspector_native()):
        pytest.fail(
            f"there is no Vulkan device here; without a card install a software one: apt-get install {PACKAGES}"
            f" (GGML_VK_VISIBLE_DEVICES is {os.environ['GGML_VK_VISIBLE_DEVICES']!r})",
            pytrace=False,
        )
    return found[0]


@pytest.fixture(scope="session")
def five(device: Device) -> Path:
    """The first five layers, f32 weights."""
    return cached_fixture("f32", layers=LAYERS)


@pytest.fixture
def alone() -> Callable[..., Any]:
    """``alone(script, **environment)``: what a script prints as JSON, in a process of its own that sees other devices.

    A variable that is empty is unset.
    """

    def run(script: str, *arguments: object, **environment: str) -> Any:
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
        merged = {name: value for name, value in (os.environ | environment).items() if value}
        done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
