"""Upstream's RPC backend: its servers as processes, and a llama-bench that computes on them.

Both binaries are built from the unpatched source of the pin by ``cffi_build/llama_cpp.py --rpc-server``.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from attrs import frozen

from dgr.errors import DeadlineExceeded, EngineError, InputError
from dgr.testing.network.processes import free_ports
from dgr.testing.waits import until
from dgr_bench.upstream.llama_bench import LlamaBench

#: Seconds for a server to listen, and for a client to end once a server is gone.
_START = 60.0
END = 60.0
#: Characters of the end of what a program said.
_LAST_WORDS = 300
#: More layers than any model has: all of them go to the servers.
_ALL_LAYERS = 999


@frozen
class RpcBench(LlamaBench):
    """llama-bench on servers of the RPC backend; it holds no layer itself."""

    #: HOST:PORT each.
    servers: tuple[str, ...] = ()

    def command(self, *, prefill: int = 0, decode: int = 0, depth: int = 0, repetitions: int = 1) -> list[str]:
        words = super().command(prefill=prefill, decode=decode, depth=depth, repetitions=repetitions)
        return [*words, "-rpc", ",".join(self.servers), "-ngl", str(_ALL_LAYERS)]

    async def ended_by(self, decode: int, act: Server) -> RpcEnd:
        """Draw tokens; once they are being drawn, the server is killed. How the client ends."""
        words = self.command(decode=decode)
        process = await trio.lowlevel.open_process(
            [*words, "--progress"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            return await self._killed(process, act)
        finally:
            if process.returncode is None:
                process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _killed(self, process: trio.Process, act: Server) -> RpcEnd:
        assert process.stderr is not None
        said = b""
        killed: float | None = None
        with trio.move_on_after(_START + END):
            async for part in process.stderr:
                said += part
                if killed is None and b"generation run" in said:
                    act.process.kill()
                    killed = trio.current_time()
            await process.wait()
        words = said.decode(errors="replace").strip()
        if killed is None:
            raise EngineError(f"llama-bench drew no token over RPC: {words[-_LAST_WORDS:]}")
        code = process.returncode
        return RpcEnd(code, trio.current_time() - killed, words[-_LAST_WORDS:])


@frozen
class RpcEnd:
    """How a client ended whose server was killed."""

    #: Exit code, the negative number of a signal; None: it was still there after a minute.
    code: int | None
    seconds: float
    said: str


@frozen
class Server:
    """A server of the RPC backend."""

    address: str
    process: trio.Process


@asynccontextmanager
async def open_servers(binary: Path, count: int, threads: int) -> AsyncIterator[Sequence[Server]]:
    """Servers on loopback for the length of the block, of so many threads each."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_server(binary, port, threads)) for port in free_ports(count)]


@asynccontextmanager
async def _server(binary: Path, port: int, threads: int) -> AsyncIterator[Server]:
    words = [str(binary), "-H", "127.0.0.1", "-p", str(port), "-t", str(threads)]
    try:
        process = await trio.lowlevel.open_process(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise InputError(f"cannot run {binary}: {error.strerror or error}; name another with --rpc-server") from error
    try:
        await until(lambda: process.returncode is not None or _listens(port), _START, f"{binary.name} on port {port}")
        if process.returncode is not None:
            raise EngineError(f"{binary.name} ended with exit status {process.returncode} instead of listening")
        yield Server(f"127.0.0.1:{port}", process)
    except DeadlineExceeded as error:
        raise EngineError(str(error)) from error
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def _listens(port: int) -> bool:
    """Whether somebody listens on a port of loopback; no connection is made, of which a server takes one at a time."""
    wanted = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
    return any(line.split()[1] == wanted and line.split()[3] == "0A" for line in lines[1:])
