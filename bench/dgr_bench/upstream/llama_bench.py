"""Upstream's own llama-bench: one run of it, and what it said.

Starting it and loading the model are not part of what it times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import frozen

from dgr.core.values import ContextParams
from dgr.errors import EngineError, InputError
from dgr_bench.upstream.programs import SCRIPT, refuse_other_pin

__all__ = ["LlamaBench", "Sample", "parse_samples"]

#: Characters of the end of a program's output that an error repeats.
_LAST_WORDS = 400


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One test of llama-bench's JSON, as far as it is looked at."""

    #: Of the source it was built from.
    build_commit: str
    n_prompt: int
    n_gen: int
    n_depth: int
    n_threads: int
    n_batch: int
    n_ubatch: int
    type_k: str
    flash_attn: bool | int
    #: How the model was loaded: ``none`` reads it into memory, as dgr does by default.
    load_mode: str
    #: Nanoseconds of each repetition.
    samples_ns: list[int]


def parse_samples(output: bytes) -> Sample:
    """The only test in llama-bench's ``-o json``. Raises :class:`~dgr.errors.EngineError`."""
    try:
        (sample,) = msgspec.json.decode(output, type=list[Sample])
    except (msgspec.DecodeError, ValueError) as error:
        raise EngineError(
            f"llama-bench did not print the JSON list of one test that dgr-bench knows: {error}; use the binary that"
            f" {SCRIPT} --llama-bench builds"
        ) from error
    if not sample.samples_ns or min(sample.samples_ns) <= 0:
        raise EngineError(f"llama-bench measured {sample.samples_ns} ns; at least one positive number was expected")
    return sample


@frozen
class LlamaBench:
    """A binary of llama-bench, and the settings that dgr uses on the other side."""

    binary: Path
    #: Commit of the pin that dgr is built on.
    commit: str
    model: Path
    context: ContextParams
    threads: int

    def command(self, *, prefill: int = 0, decode: int = 0, depth: int = 0, repetitions: int = 1) -> list[str]:
        """The command line of a test of so many tokens after ``depth`` others, after the usual warm-up."""
        context = self.context
        settings: dict[str, Any] = {
            "-m": self.model,
            "-p": prefill,
            "-n": decode,
            "-d": depth,
            "-r": repetitions,
            "-t": self.threads,
            "-b": context.n_batch,
            "-ub": context.n_ubatch,
            "-ctk": context.type_k,
            "-ctv": context.type_k,
            "-fa": int(context.flash_attn),
            "-lm": "none",
            "-o": "json",
        }
        return [str(self.binary), *(str(word) for pair in settings.items() for word in pair)]

    async def seconds(self, *, prefill: int = 0, decode: int = 0) -> float:
        """Run one test; seconds for all of its tokens, without start, load and warm-up. Raises as :meth:`blocks` does."""
        return (await self._run(prefill=prefill, decode=decode))[-1]

    async def blocks(self, depth: int, tokens: int, count: int) -> list[float]:
        """Seconds a token of ``count`` blocks of ``tokens``, each drawn after ``depth`` tokens.

        Raises :class:`~dgr.errors.InputError` for a binary of another pin, :class:`~dgr.errors.EngineError` when it fails.
        """
        return [seconds / tokens for seconds in await self._run(decode=tokens, depth=depth, repetitions=count)]

    async def _run(self, **test: int) -> list[float]:
        """Seconds of each repetition."""
        try:
            process = await trio.run_process(
                self.command(**test), capture_stdout=True, capture_stderr=True, check=False
            )
        except OSError as error:
            raise InputError(
                f"cannot run {self.binary}: {error.strerror or error}; name another with --llama-bench"
            ) from error
        if process.returncode != 0:
            words = process.stderr.decode(errors="replace").strip()[-_LAST_WORDS:]
            raise EngineError(f"{self.binary.name} ended with exit status {process.returncode}: {words}")
        sample = parse_samples(process.stdout)
        self._compare(sample, **test)
        return [nanoseconds / 1e9 for nanoseconds in sample.samples_ns]

    def _compare(self, sample: Sample, *, prefill: int = 0, decode: int = 0, depth: int = 0, **_: int) -> None:
        """Hold what it says of itself against what it was asked for."""
        refuse_other_pin(self.binary, "llama-bench", sample.build_commit, self.commit)
        context = self.context
        wanted = {
            "n_prompt": prefill,
            "n_gen": decode,
            "n_depth": depth,
            "n_threads": self.threads,
            "load_mode": "none",
        }
        wanted |= {name: getattr(context, name) for name in ("n_batch", "n_ubatch", "type_k", "flash_attn")}
        for name, value in wanted.items():
            if (found := getattr(sample, name)) != value:
                raise EngineError(f"llama-bench ran with {name} {found}, not {value} as dgr; nothing can be compared")
