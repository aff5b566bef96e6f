"""Stages as processes of their own: `dgr up` and `dgr stage` with the real engine, and what may happen to them.

Processes are ended by their own ids, never by a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import trio
from remote_stages import Cable, open_cable, until

from dgr.model.route import Route, StageRef
from dgr.model.route_file import RouteFile, read_route_file

#: Seconds for a stage to start: an interpreter, imports, a small model.
START = 60.0
#: Seconds of a link's heartbeat; three are the time within which silence is noticed.
BEAT = 0.25


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def write_route(
    path: Path, model: Path, split: Sequence[str], addresses: Sequence[str] | None = None, **context: object
) -> RouteFile:
    """A route file over stages on free ports of this machine."""
    if addresses is None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(len(split))]
    lines = [f'model = "{model}"', "", "[context]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in context.items()]
    for address, layers in zip(addresses, split, strict=True):
        lines += ["", "[[stage]]", f'address = "{address}"', f'layers = "{layers}"']
    path.write_text("\n".join(lines) + "\n")
    return read_route_file(path)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have taken note of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Program:
    """A `dgr` process that prints JSON lines. Made by :func:`open_program`."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.lines: list[dict] = []
        #: What it said on standard error.
        self.errors = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        async for part in self.process.stdout:
            *whole, rest = (rest + part).split(b"\n")
            self.lines += [json.loads(line) for line in whole]

    async def read_errors(self) -> None:
        assert self.process.stderr is not None
        async for part in self.process.stderr:
            self.errors += part.decode(errors="replace")

    async def wait(self, seconds: float = 30.0) -> int:
        """Its exit code."""
        with trio.fail_after(seconds):
            return await self.process.wait()

    def events(self, address: str, event: str) -> list[dict]:
        """What `dgr up` told of a stage."""
        return [line for line in self.lines if (line["stage"], line["event"]) == (address, event)]

    async def first_line(self) -> dict:
        """What `dgr stage` tells when it is ready."""
        await until(lambda: self.lines or self.process.returncode is not None, START)
        assert self.lines, f"it ended with {self.process.returncode}: {self.errors}"
        return self.lines[0]

    async def ready(self, address: str, times: int = 1) -> int:
        """The process id of a stage that is ready for the so-manieth time."""

        def is_ready() -> bool:
            if self.process.returncode is not None:
                raise AssertionError(f"it ended with {self.process.returncode}: {self.errors}")
            return len(self.events(address, "ready")) >= times

        await until(is_ready, START)
        return self.events(address, "ready")[times - 1]["pid"]


@asynccontextmanager
async def open_program(*arguments: str, stdin: int | None = None) -> AsyncIterator[Program]:
    """Run `dgr` with arguments for the length of the block."""
    command = [sys.executable, "-m", "dgr", *arguments]
    process = await trio.lowlevel.open_process(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    program = Program(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(program.read)
            nursery.start_soon(program.read_errors)
            yield program
            if process.returncode is None:
                process.terminate()
            await program.wait()
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def open_up(route: RouteFile, *options: str) -> AsyncIterator[Program]:
    """`dgr up` with every stage ready; none is left when the block ends, whatever happened."""
    pids: set[int] = set()
    try:
        async with open_program("up", str(route.path), "--json", "--threads", "1", *options) as program:
            try:
                for ref in route.route.stages:
                    await program.ready(ref.address)
                yield program
            finally:
                pids = {line["pid"] for line in program.lines if line["event"] == "ready"}
                for pid in pids:  # a frozen one would wait until it is killed
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        await until(lambda: all(map(is_gone, pids)))
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def open_cables(route: Route) -> AsyncIterator[tuple[Route, list[Cable]]]:
    """A cable before each stage, and the route along the cables."""
    async with contextlib.AsyncExitStack() as stack:
        cables = [await stack.enter_async_context(open_cable(ref.address)) for ref in route.stages]
        refs = (StageRef(cable.address, ref.layers) for cable, ref in zip(cables, route.stages, strict=True))
        yield Route(tuple(refs)), cables


@asynccontextmanager
async def open_stage(model: Path, layers: str, *options: str, address: str = "127.0.0.1:0") -> AsyncIterator[Program]:
    """`dgr stage`; :meth:`Program.first_line` tells when it is ready."""
    flags = "--ctx", "512", "--batch", "32", "--ubatch", "32", "--json", *options
    async with open_program("stage", str(model), "--layers", layers, "--listen", address, *flags) as program:
        yield program
