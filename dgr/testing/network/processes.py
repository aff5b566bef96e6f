"""Stages as processes of their own: ``dgr up`` and ``dgr stage`` with the real engine, for tests and benchmarks.

    file = write_route(folder / "route.toml", model, ("0:3", "3:7"), n_ctx=512)
    async with open_up(file) as up:
        async with open_pipeline_on(RemoteConnector(LinkPolicy()), file.route) as pipeline:
            ...

Processes are ended by their own ids, never by a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import trio

from dgr.cli.children import python_module, spelled_out
from dgr.cluster.route_file import RouteFile, read_route_file
from dgr.errors import DgrError
from dgr.testing.waits import until
from dgr.wire.nurseries import open_nursery

__all__ = [
    "START",
    "Program",
    "ProgramEnded",
    "free_ports",
    "is_gone",
    "open_command",
    "open_program",
    "open_up",
    "write_route",
]

#: Seconds for a stage to start: an interpreter, imports, a small model.
START = 60.0


class ProgramEnded(DgrError):
    """A program ended before it told what was waited for; the message carries its exit code and the end of what it wrote."""


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def write_route(
    path: Path, model: Path, split: Sequence[str], addresses: Sequence[str] | None = None, **context: object
) -> RouteFile:
    """A route file over stages of this machine, by default on free ports.

    ``split``: layer ranges ``A:B``, head first. ``context``: what stands under ``[context]``, as ``n_ctx=512``.
    """
    if addresses is None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(len(split))]
    # A route file's paths are relative to it, those of a caller to where the caller is.
    lines = [f"model = {json.dumps(str(Path(model).absolute()))}", "", "[context]"]
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
    """A process that prints JSON lines. Made by :func:`open_program` and :func:`open_command`."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        #: What it printed, parsed.
        self.lines: list[dict[str, Any]] = []
        #: What it said on standard error.
        self.errors = ""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def wait(self, seconds: float = 30.0) -> int:
        """Its exit code. Raises :class:`trio.TooSlowError` when it has not ended within ``seconds``."""
        with trio.fail_after(seconds):
            return await self.process.wait()

    async def stop(self) -> int:
        """Tell it to end in good order, and wait: its exit code."""
        if self.process.returncode is None:
            self.process.terminate()
        return await self.wait()

    def events(self, address: str, event: str) -> list[dict[str, Any]]:
        """What ``dgr up`` told of a stage: ``ready`` (``pid``), ``ended`` (``code``), ``frozen`` (``why``), ``restarting``
        or ``live``."""
        return [line for line in self.lines if (line["stage"], line["event"]) == (address, event)]

    def stage_pids(self) -> list[int]:
        """Process ids of all stages that ``dgr up`` ever told to be ready, oldest first."""
        return [line["pid"] for line in self.lines if line["event"] == "ready"]

    async def first_line(self) -> dict[str, Any]:
        """What ``dgr stage`` tells when it is ready. Raises :class:`ProgramEnded`."""
        await self._reach(1, lambda: self.lines, "its first line")
        return self.lines[0]

    async def ready(self, address: str, times: int = 1) -> int:
        """The process id of a stage that ``dgr up`` tells to be ready for the nth time.

        Raises :class:`ProgramEnded`, :class:`~dgr.errors.DeadlineExceeded`.
        """
        await self._reach(times, lambda: self.events(address, "ready"), f"stage {address}, ready for time {times},")
        pid: int = self.events(address, "ready")[times - 1]["pid"]
        return pid

    async def _reach(self, count: int, lines: Callable[[], list[dict[str, Any]]], what: str) -> None:
        await until(lambda: len(lines()) >= count or self.process.returncode is not None, START, what)
        if len(lines()) < count:
            raise ProgramEnded(f"dgr ended with {self.process.returncode} before {what} came: {self.errors.strip()}")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        async for part in self.process.stdout:
            *whole, rest = (rest + part).split(b"\n")
            self.lines += [json.loads(line) for line in whole]

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        async for part in self.process.stderr:
            self.errors += part.decode(errors="replace")


def open_program(
    *arguments: str, stdin: int = subprocess.DEVNULL, stderr: int = subprocess.PIPE, python: str | None = None
) -> AbstractAsyncContextManager[Program]:
    """Run ``dgr`` with ``arguments`` for the length of the block; it is told to end, or killed if the block failed.

    ``stderr``: a descriptor for what it says there, and whatever it starts; by default it is kept in ``errors``.
    ``python``: the interpreter of another environment, whose dgr is run.
    """
    return open_command(*python_module("dgr", *arguments, python=python), stdin=stdin, stderr=stderr)


@asynccontextmanager
async def open_command(
    *command: str, stdin: int = subprocess.DEVNULL, stderr: int = subprocess.PIPE
) -> AsyncIterator[Program]:
    """Run a command that becomes, or is, one process, as :func:`open_program` does ``dgr``."""
    process = await trio.lowlevel.open_process(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    program = Program(process)
    try:
        async with open_nursery() as nursery:
            nursery.start_soon(program._read)
            if process.stderr is not None:
                nursery.start_soon(program._read_errors)
            yield program
            await program.stop()
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
                await process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    await stream.aclose()


@asynccontextmanager
async def open_up(file: RouteFile, *options: str, stderr: int = subprocess.PIPE) -> AsyncIterator[Program]:
    """``dgr up`` on a route file, with every stage ready; none is left when the block ends, whatever happened.

    ``options``: flags of ``dgr up``, as ``"--heartbeat", "0.25"``. A stage computes with one thread unless
    ``"--threads", "N"`` is among them. ``stderr``: see :func:`open_program`. Raises :class:`ProgramEnded`,
    :class:`~dgr.errors.DeadlineExceeded`.
    """
    pids: list[int] = []
    try:
        arguments = "up", spelled_out(file.path), "--json", "--threads", "1", *options
        async with open_program(*arguments, stderr=stderr) as program:
            try:
                for ref in file.stages:
                    await program.ready(ref.address)
                yield program
            finally:
                pids = program.stage_pids()
                for pid in pids:  # a frozen one would wait until it is killed
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        await until(lambda: all(map(is_gone, pids)), what="the end of every stage")
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
