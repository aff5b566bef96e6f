"""Children of `dgr up`: what their command lines are read as, and when one that ends is started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from cli.commands import Stage
from narrow import present

import dgr.cli.up
from dgr.cli.children import python_module
from dgr.cli.command_line import _parser
from dgr.cli.up import stage_command
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.keeper import Keeper
from dgr.cluster.route_file import RouteFile
from dgr.cluster.upkeep import Patience
from dgr.core.route import LayerRange, Route, StageRef
from dgr.wire.credentials import Credentials

REF = StageRef("127.0.0.1:7701", LayerRange(0, 7))


# --- command lines ---


@pytest.mark.parametrize(
    "odd", ["-m.gguf", "--json", "-", "a b", "é'\"$(x)", "x\n-y", os.fsdecode(b"\xff"), "=", "@file"]
)
def test_a_child_reads_every_name_as_what_it_is(odd: str, tmp_path: Path) -> None:
    file = RouteFile(tmp_path / "r.toml", Route((REF,)), {"n_ctx": 512, "type_k": odd})
    ref = StageRef(f"{odd}:1", LayerRange(0, 7))
    policy = LinkPolicy(credentials=Credentials(Path(odd), Path(odd), Path(odd)))
    command = stage_command(file, ref, Path(odd), 1, 4, policy, log="debug")
    assert command[:5] == [sys.executable, "-P", "-m", "dgr", "stage"]
    args = _parser().parse_args(command[4:])
    assert args.model == str(Path.cwd() / odd)
    assert (args.listen, args.type_k, args.log, args.json) == (f"{odd}:1", odd, "debug", True)
    assert (args.tls_ca, args.tls_cert, args.tls_key) == (args.model,) * 3


def test_no_child_is_started_any_other_way() -> None:
    """Whoever runs a module of ours as a process asks for the command line in one place, where the safe path is."""
    root = Path(dgr.__file__).parent.parent
    sources = [*root.glob("dgr/**/*.py"), *root.glob("bench/**/*.py")]
    assert len(sources) > 100
    found = [path.name for path in sources if '"-m", ' in path.read_text() or "'-m', " in path.read_text()]
    assert sorted(found) == ["children.py"]
    assert "-P" in python_module("dgr")


HOSTILE = ("json", "types", "queue", "secrets", "select", "logging", "trio", "dgr", "socket", "signal")


def test_a_stage_takes_no_code_from_the_working_folder_and_no_name_for_a_flag(small: Path, tmp_path: Path) -> None:
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    shutil.copy(small, tmp_path / "-m.gguf")
    (tmp_path / "-r.toml").write_text(
        f'model = "-m.gguf"\n[context]\nn_ctx = 256\n[[stage]]\naddress = "127.0.0.1:{_free_port()}"\nlayers = "0:7"\n'
    )
    command = python_module("dgr", "up", "--json", "--threads=1", "--log=info", "--", "-r.toml")
    with (
        (tmp_path / "errors").open("wb") as errors,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors) as up,
    ):
        assert up.stdout is not None
        try:
            assert json.loads(up.stdout.readline())["event"] == "ready"
        finally:
            up.send_signal(signal.SIGTERM)
            assert up.wait(30) == 0
    said = (tmp_path / "errors").read_text()
    assert "INFO dgr.stage: stage 0:7 with 4 slots of 256 tokens ended" in said  # the stage logs as it was told to


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


# --- starting again ---


async def _supervise(
    codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, list[tuple[str, dict[str, Any]]]]:
    """What becomes of a stage that ends with these codes and then runs for good: whether it was given up, what was told."""
    left, events = list(codes), []

    async def run_once(_keeper: Keeper, _began: list[float]) -> int:
        if not left:
            await trio.sleep_forever()
        return left.pop(0)

    def report(ref: StageRef, event: str, **facts: object) -> None:
        events.append((event, facts))

    monkeypatch.setattr(Keeper, "_run_once", run_once)
    with trio.move_on_after(1000) as patience:
        await Keeper(REF, [], LinkPolicy(), Patience(), report).run()
    return not patience.cancelled_caught, events


async def test_arguments_refused_at_the_first_start_are_final(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _supervise([2], monkeypatch) == (True, [])


@pytest.mark.parametrize("before", [[0], [1], [-9], [1, 0]], ids=str)
async def test_later_a_refusal_is_a_state_of_the_machine(
    before: list[int], autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [*before, 2, 2, 1, 2]
    gave_up, events = await _supervise(codes, monkeypatch)
    assert not gave_up
    assert [(event, facts["code"]) for event, facts in events] == [("ended", code) for code in codes]
    pauses = [facts["again_in_seconds"] for _, facts in events]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 8 * pauses[0]


async def test_a_process_that_cannot_be_started_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(trio.lowlevel, "open_process", none_left)
    keeper = Keeper(REF, ["x"], LinkPolicy(), Patience(), lambda *_, **__: None)
    assert await keeper._run_once([]) == 1
    assert "stage 127.0.0.1:7701 cannot be started: [Errno 11]" in caplog.text


@pytest.mark.slow
def test_a_stage_whose_port_is_taken_for_a_moment_comes_back(
    small: Path, tmp_path: Path, stages: Callable[..., list[Stage]]
) -> None:
    """A stage of a set is killed, and another process has its port: its neighbour serves on, and it comes back."""
    ports = [_free_port(), _free_port()]
    lines = [f'model = "{small}"', "[context]", "n_ctx = 256"]
    for port, layers in zip(ports, ("0:3", "3:7"), strict=True):
        lines += ["[[stage]]", f'address = "127.0.0.1:{port}"', f'layers = "{layers}"']
    (tmp_path / "route.toml").write_text("\n".join(lines))
    command = python_module("dgr", "up", "--json", "--threads=1", str(tmp_path / "route.toml"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as up:
        assert up.stdout is not None

        def told(event: str, port: int) -> dict[str, Any]:
            while line := present(up.stdout).readline():
                found: dict[str, Any] = json.loads(line)
                if (found["event"], found["stage"]) == (event, f"127.0.0.1:{port}"):
                    return found
            raise AssertionError(f"dgr up ended with {up.wait(30)}")

        try:
            ready: dict[str, int] = {}
            while len(ready) < 2:
                found = json.loads(up.stdout.readline())
                ready[found["stage"]] = found["pid"]
            os.kill(ready[f"127.0.0.1:{ports[0]}"], signal.SIGKILL)
            assert told("ended", ports[0])["code"] == -9
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", ports[0]))
                taken.listen()
                assert told("ended", ports[0])["code"] == 2
            assert told("ready", ports[0])
        finally:
            up.send_signal(signal.SIGTERM)
            up.stdout.read()
            assert up.wait(30) == 0
