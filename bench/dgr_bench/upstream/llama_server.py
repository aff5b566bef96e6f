"""Upstream's own llama-server, run with the settings that dgr uses on the other side."""

from __future__ import annotations

import http.client
import subprocess
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio
from attrs import frozen

from dgr.core.values import ContextParams
from dgr.errors import EngineError, InputError
from dgr.testing.network.processes import free_ports
from dgr.wire.nurseries import open_nursery
from dgr_bench.upstream.programs import commit_told, refuse_other_pin

__all__ = ["LlamaServer", "Timings", "timings_of"]

_PROGRAM = "llama-server"
#: Seconds for it to load a model.
_START = 600.0
#: Characters of the end of what it said that an error repeats.
_LAST_WORDS = 400


@frozen
class LlamaServer:
    """A binary of llama-server, and what it serves."""

    binary: Path
    #: Commit of the pin that dgr is built on.
    commit: str
    model: Path
    #: Of each slot; ``n_seq_max`` of them.
    context: ContextParams
    threads: int

    def command(self, port: int) -> list[str]:
        """The command line: as many slots as dgr has, each of the same context; weights read into memory; no cache beside."""
        context = self.context
        settings = {
            "--model": self.model,
            "--host": "127.0.0.1",
            "--port": port,
            "--parallel": context.n_seq_max,
            "--ctx-size": context.n_ctx * context.n_seq_max,
            "--batch-size": context.n_batch,
            "--ubatch-size": context.n_ubatch,
            "--threads": self.threads,
            "--threads-batch": self.threads,
            "--flash-attn": "on" if context.flash_attn else "off",
            "--cache-type-k": context.type_k,
            "--cache-type-v": context.type_k,
            "--load-mode": "none",
            "--cache-ram": 0,
        }
        return [str(self.binary), "--offline", *(str(word) for pair in settings.items() for word in pair)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address for the length of the block, once the model is loaded.

        Raises :class:`~dgr.errors.InputError` for a binary of another pin, :class:`~dgr.errors.EngineError` when it ends.
        """
        await self._check_pin()
        (port,) = free_ports(1)
        process = await trio.lowlevel.open_process(
            self.command(port), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        said = bytearray()
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(_listen, process, said)
                await _until_healthy(process, port, said)
                yield f"http://127.0.0.1:{port}"
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def _check_pin(self) -> None:
        try:
            told = await trio.run_process(
                [str(self.binary), "--version"], capture_stdout=True, capture_stderr=True, check=False
            )
        except OSError as error:
            raise InputError(
                f"cannot run {self.binary}: {error.strerror or error}; name another with --{_PROGRAM}"
            ) from error
        refuse_other_pin(self.binary, _PROGRAM, commit_told(told.stdout + told.stderr), self.commit)


class Timings(msgspec.Struct, frozen=True):
    """What it says of an answer: of the prompt's tokens, and of those drawn after the first."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class _Answer(msgspec.Struct, frozen=True):
    timings: Timings


async def timings_of(url: str, prompt: list[int], tokens: int) -> Timings:
    """Ask a server for a greedy answer of ``tokens`` tokens; what it measured itself.

    Raises :class:`~dgr.errors.EngineError` for anything but an answer to all of that.
    """
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    data = await trio.to_thread.run_sync(_post, urllib.parse.urlsplit(url).netloc, msgspec.json.encode(body))
    try:
        timings = msgspec.json.decode(data, type=_Answer).timings
    except msgspec.DecodeError as error:
        raise EngineError(
            f"{_PROGRAM} gave no timings that dgr-bench knows: {error}; {data[:_LAST_WORDS]!r}"
        ) from error
    if (timings.prompt_n, timings.predicted_n) != (len(prompt), tokens):
        raise EngineError(
            f"{_PROGRAM} ran {timings.prompt_n} and drew {timings.predicted_n} tokens, not {len(prompt)} and {tokens}"
        )
    return timings


def _post(host: str, body: bytes) -> bytes:
    connection = http.client.HTTPConnection(host, timeout=_START)
    try:
        connection.request("POST", "/completion", body, {"content-type": "application/json"})
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{_PROGRAM} gave no answer: {error}") from error
    finally:
        connection.close()


async def _listen(process: trio.Process, said: bytearray) -> None:
    """It must never wait because nobody reads what it says."""
    assert process.stderr is not None
    async for part in process.stderr:
        said += part
        del said[:-_LAST_WORDS]


async def _until_healthy(process: trio.Process, port: int, said: bytearray) -> None:
    with trio.move_on_after(_START):
        while not await _is_healthy(port):
            if process.poll() is not None:
                words = said.decode(errors="replace").strip()
                raise EngineError(f"{_PROGRAM} ended with exit status {process.returncode}: {words}")
            await trio.sleep(0.1)
        return
    raise EngineError(f"{_PROGRAM} was not ready within {_START:g} s")


async def _is_healthy(port: int) -> bool:
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /health HTTP/1.0\r\n\r\n")
            return (await stream.receive_some(64)).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False
