"""What a service manager hears: ready, signs of life, the end; over a datagram socket as systemd's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio
from cli.commands import CONTEXT

from dgr.cli.notify import open_notifier
from dgr.testing.network.processes import write_route

#: Seconds after which a test gives up.
PATIENCE = 60.0


class Manager:
    """The manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)
        self.heard: list[str] = []

    def listen(self) -> None:
        """Take what has come."""
        self._sock.setblocking(False)
        while True:
            try:
                self.heard += self._sock.recv(4096).decode().splitlines()
            except BlockingIOError:
                return

    def wait_for(self, line: str) -> None:
        """Take what comes until ``line`` is among it."""
        deadline = time.monotonic() + PATIENCE
        while line not in self.heard:
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            self.heard += self._sock.recv(4096).decode().splitlines()

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """One with a socket in the file system."""
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


@pytest.fixture
def asked(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """The manager, named in this process's environment."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    return manager


# --- the protocol ----------------------------------------------------------------------------------------------------


async def test_a_life_as_the_manager_hears_it(
    asked: Manager, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    async with open_notifier("loading\nlayers") as notifier:
        assert not os.environ.keys() & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}  # not for child processes
        await trio.sleep(25)
        asked.listen()
        assert asked.heard == ["STATUS=loading\\nlayers", *["EXTEND_TIMEOUT_USEC=60000000", "WATCHDOG=1"] * 3]
        asked.heard.clear()
        notifier.ready("serves")
        await trio.sleep(30)
        asked.listen()
        assert asked.heard == ["READY=1", "STATUS=serves", *["WATCHDOG=1"] * 3]
        asked.heard.clear()
    asked.listen()
    assert asked.heard == ["STOPPING=1", "STATUS=ending"]


async def test_an_event_loop_that_stands_still_gives_no_sign(asked: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    async with open_notifier("") as notifier:
        notifier.ready("")
        await trio.testing.wait_all_tasks_blocked()
        asked.listen()
        asked.heard.clear()
        time.sleep(0.1)  # noqa: ASYNC251 (that is the point)
        asked.listen()
        assert asked.heard == []
        await trio.sleep(0.02)
        asked.listen()
        assert "WATCHDOG=1" in asked.heard


async def test_what_could_not_be_told_is_told_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = str(tmp_path / "later")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    async with open_notifier("begins") as notifier:
        await trio.sleep(100)
        notifier.ready("serves")
        manager = Manager(path)
        await trio.sleep(2.5)
        manager.listen()
        manager.close()
    assert {"READY=1", "STATUS=serves"} <= {*manager.heard}
    assert len(manager.heard) <= 20
    assert len([record for record in caplog.records if "does not take" in record.message]) == 2  # before, and after


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({}, ""),
        ({"NOTIFY_SOCKET": ""}, ""),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, "NOTIFY_SOCKET"),
        ({"WATCHDOG_USEC": "1000000"}, ""),
        ({"NOTIFY_SOCKET": "@dgr-nobody-listens", "WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC"),
        ({"NOTIFY_SOCKET": "@dgr-nobody-listens", "WATCHDOG_USEC": "-5"}, "WATCHDOG_USEC"),
        ({"NOTIFY_SOCKET": "@dgr-nobody-listens", "WATCHDOG_USEC": "0"}, "WATCHDOG_USEC"),
        ({"NOTIFY_SOCKET": "@dgr-nobody-listens", "WATCHDOG_USEC": "9" * 500}, ""),
        ({"NOTIFY_SOCKET": "@dgr-nobody-listens", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}, ""),
        ({"NOTIFY_SOCKET": "/" + "x" * 300}, ""),
    ],
)
async def test_no_environment_keeps_a_command_from_running(
    variables: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with open_notifier("begins") as notifier:
        await trio.testing.wait_all_tasks_blocked()
        notifier.ready("serves")
    complaints = [record.message for record in caplog.records if "does not take" not in record.message]
    assert len(complaints) == bool(complaint)
    assert all(complaint in message for message in complaints)


# --- the commands ----------------------------------------------------------------------------------------------------


def _started(manager: Manager, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "300000"}
    return subprocess.Popen([sys.executable, "-m", "dgr", *arguments], env=environment, stdout=subprocess.DEVNULL)


def _lived(manager: Manager, process: subprocess.Popen[bytes], *, children: int = 0) -> None:
    """It becomes ready, gives signs of life, and says that it ends when told to."""
    try:
        manager.wait_for("READY=1")
        assert "EXTEND_TIMEOUT_USEC=60000000" in manager.heard
        manager.heard.clear()
        manager.wait_for("WATCHDOG=1")
        offspring = psutil.Process(process.pid).children(recursive=True)
        assert len(offspring) == children
        assert all("NOTIFY_SOCKET" not in child.environ() for child in offspring)
        process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert process.wait(PATIENCE) == 0
        manager.listen()
        assert "READY=1" not in manager.heard
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_stage_tells_its_manager(small: Path) -> None:
    manager = Manager(f"@dgr-test-{os.getpid()}")
    try:
        _lived(manager, _started(manager, "stage", str(small), "--layers=0:7", "--listen=127.0.0.1:0", *CONTEXT))
    finally:
        manager.close()


@pytest.mark.slow
def test_a_set_of_stages_is_ready_when_all_are(manager: Manager, small: Path, tmp_path: Path) -> None:
    file = write_route(tmp_path / "route.toml", small, ("0:3", "3:7"), n_ctx=64, n_batch=32, n_ubatch=32)
    _lived(manager, _started(manager, "up", str(file.path), "--threads=1"), children=2)


@pytest.mark.slow
def test_a_server_tells_its_manager(manager: Manager, small: Path) -> None:
    _lived(manager, _started(manager, "serve", f"--model={small}", "--listen=127.0.0.1:0", *CONTEXT))
