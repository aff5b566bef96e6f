"""The invariance suite: which weight and K-cache types give the same bits, however the same tokens are run.

A small model per type (five layers: window-only, CSA and HCA, routed by token id and by router) runs one prompt in
exact numerics as one batch, in chunks, token by token, in pieces of drawn lengths, beside other sequences, split into
stages, and on more threads. Every row of logits must have the same bytes. A type that passes is exact on these kernels;
``dgr selftest numerics`` adds it to the record of these kernels, which names the types that were tested.

Weight types are run with an f16 K cache, K-cache types with f32 weights: the two never meet in one kernel.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from attrs import frozen
from msgspec.structs import replace

from dgr.artifact.artifact import Artifact
from dgr.core.values import ContextParams, LogitsWanted, Numerics
from dgr.engine.base import Work
from dgr.engine.budget import available_cpus
from dgr.engine.native import kernel_fingerprint
from dgr.engine.numerics import ExactnessRecord
from dgr.errors import DgrError, NonFinite
from dgr.selftest.cases import ESSENTIAL, K_TYPES, WEIGHT_TYPES, Case, select
from dgr.selftest.chain import Chain, cut_at, some_tokens
from dgr.selftest.fixture import cached_fixture
from dgr.selftest.llama_chain import open_chain

__all__ = ["THREADS_NOTE", "Report", "Verdict", "exactness_record", "run_suite"]

#: SWA, SWA and CSA routed by token id; HCA and CSA routed by the router.
_LAYERS = 5
_CUT = 3
#: n_ubatch sets the ring of raw K: 512 cells here, enough for the kernels that upstream takes from 512 keys on.
_CONTEXT = ContextParams(n_ctx=1024, n_batch=1024, n_ubatch=256)
#: The longest of pieces of drawn lengths: past 64, where tiles of attention begin.
_ODD = 67
#: Tokens that end a threaded run one by one.
_TAIL = 4
#: A threaded run that takes this many times as long as a single thread has no core to itself: ggml's threads spin.
_BUSY_FACTOR = 10.0
_BUSY_SECONDS = 2.0
#: Seconds after which no further type is run on several threads.
_THREADS_BUDGET = 15.0

#: How the reason begins why a type was run on one thread alone; other reasons are why it was not run at all.
THREADS_NOTE = "several threads not tested"

_upstream_log = logging.getLogger("dgr.llama_cpp")


@frozen
class Verdict:
    """What the suite found for one type."""

    case: Case
    #: What differed from the prompt run as one batch; empty when the type is exact.
    differences: tuple[str, ...]
    #: Thread counts compared with one thread.
    threads: tuple[int, ...]
    seconds: float
    #: Why it was not run to the end: no disk, no memory, no right. That says nothing about the kernels.
    untested: str | None = None

    @property
    def exact(self) -> bool:
        return not self.differences and self.untested is None

    @property
    def is_known(self) -> bool:
        """Whether there is a verdict: bits differ, or everything was run and none does."""
        return bool(self.differences) or self.untested is None


@frozen
class Report:
    """The suite's findings on this machine."""

    fingerprint: str
    verdicts: tuple[Verdict, ...]
    #: What was not tested, and why, by :attr:`Case.name`.
    untested: Mapping[str, str]
    seconds: float

    @property
    def notes(self) -> tuple[str, ...]:
        """The same for people: a line for every reason."""
        whys = dict.fromkeys(self.untested.values())
        of = {why: ", ".join(name for name, found in self.untested.items() if found == why) for why in whys}
        return tuple(f"{names}: {why}" for why, names in of.items())

    @property
    def passed(self) -> bool:
        """Whether the essential types that were to be tested are exact."""
        return all(verdict.exact for verdict in self.verdicts if (verdict.case.kind, verdict.case.label) in ESSENTIAL)


# --- one way to run a prompt each -------------------------------------------------------------------------------------


def beside_others(chain: Chain, tokens: Sequence[int]) -> bytes:
    """The prompt in slot 1 between two others, of other lengths, that come and go; prefill and decode in one batch."""
    other = list(reversed(tokens))
    steps = ((1, 3, 0), (70, 1, 1), (1, 1, 64), (0, 5, 2), (0, 64, 1), (1, 1, 1), (2, 30, 7), (0, 1, 0))
    at = [0, 0, 0]
    rows = bytearray()
    for step in itertools.cycle(steps):
        batch = []
        for slot, size in enumerate(step):
            ids = (tokens if slot == 1 else other)[at[slot] : at[slot] + size]
            if ids:
                batch.append(Work(slot, at[slot], tuple(ids), logits=LogitsWanted.ALL))
                at[slot] += len(ids)
        for output in chain.run(batch):
            if output.slot == 1 and output.logits is not None:
                rows += output.logits
        if at[1] == len(tokens):
            return bytes(rows)
    raise AssertionError("the steps go on forever")


def in_odd_pieces(chain: Chain, tokens: Sequence[int], seed: str, slot: int = 0) -> bytes:
    """The prompt in pieces of 1 to 67 tokens, drawn alike for a seed: counts at which no kernel was meant to change."""
    sizes = random.Random(seed)
    rows, at = bytearray(), 0
    while at < len(tokens):
        piece = tokens[at : at + sizes.randint(1, _ODD)]
        rows += chain.feed(piece, chunk=len(piece), slot=slot, begin=at)
        at += len(piece)
    return bytes(rows)


def in_pieces(chain: Chain, tokens: Sequence[int], tail: int = _TAIL) -> bytes:
    """The prompt as one batch but for its last tokens, which follow one by one."""
    head = len(tokens) - tail
    return chain.feed(tokens[:head], chunk=head) + chain.feed(tokens[head:], chunk=1, begin=head)


def difference(rows: bytes, reference: bytes, row_bytes: int) -> str | None:
    """How rows of logits differ from the reference; None when they are the same bytes."""
    if rows == reference:
        return None
    wrong = [
        begin // row_bytes
        for begin in range(0, len(reference), row_bytes)
        if rows[begin : begin + row_bytes] != reference[begin : begin + row_bytes]
    ]
    return f"{len(wrong)} of {len(reference) // row_bytes} rows differ, the first at position {wrong[0]}"


# --- the suite --------------------------------------------------------------------------------------------------------


class _Chains:
    """The chains that are open, so that all their runs can be ended at once from another thread."""

    def __init__(self) -> None:
        self.ended = False
        self._open: list[Chain] = []
        self._lock = threading.Lock()

    @contextmanager
    def open(self, *arguments: Any, **options: Any) -> Iterator[Chain]:
        """As :func:`~dgr.selftest.llama_chain.open_chain`, whatever the record says."""
        with open_chain(*arguments, certified_only=False, **options) as chain:
            with self._lock:
                self._open.append(chain)
                if self.ended:
                    chain.engines[0].abort()
            try:
                yield chain
            finally:
                with self._lock:  # before the engines are freed
                    self._open.remove(chain)

    def end(self) -> None:
        """Let every run in progress, and all later ones, fail."""
        with self._lock:
            self.ended = True
            for chain in self._open:
                for engine in chain.engines:
                    engine.abort()


class _Run:
    """A case under way: the reference it is held against, and what differed."""

    def __init__(self, case: Case, numerics: Numerics, chains: _Chains) -> None:
        self.case = case
        self._chains = chains
        self.context = replace(_CONTEXT, type_k=case.type_k, numerics=numerics)
        self.differences: list[str] = []
        self.untested: str | None = None
        self.threads: list[int] = []
        self.seconds = 0.0
        self.single_seconds = 0.0
        self.reference = b""
        self._artifact: Artifact | None = None

    @property
    def artifact(self) -> Artifact:
        if self._artifact is None:
            self._artifact = Artifact.open(cached_fixture(self.case.weights, layers=_LAYERS))
        return self._artifact

    @property
    def tokens(self) -> list[int]:
        return some_tokens(self.case.n_tokens, self.artifact.hp.n_vocab)

    def hold(self, what: str, rows: bytes, reference: bytes | None = None) -> None:
        """Compare rows with the reference."""
        differs = difference(rows, self.reference if reference is None else reference, 4 * self.artifact.hp.n_vocab)
        if differs is not None:
            self.differences.append(f"{what}: {differs}")

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Count the time. What differs is a finding, and so are NaN and Inf; what could not be run is none."""
        began = time.monotonic()
        try:
            yield
        except NonFinite as error:
            self.differences.append(str(error))
        except (DgrError, OSError, MemoryError) as error:
            self.untested = str(error) or type(error).__name__
        finally:
            self.seconds += time.monotonic() - began

    def single_thread(self) -> None:
        """Everything that needs one thread."""
        with self.clocked():
            tokens, ranges = self.tokens, cut_at(_LAYERS, (_CUT,))
            with self._chains.open(self.artifact, None, self.context) as chain:
                began = time.monotonic()
                self.reference = chain.feed(tokens, chunk=len(tokens))
                self.single_seconds = time.monotonic() - began
                for chunk in self.case.chunks:
                    chain.close()
                    self.hold(f"chunks of {chunk}", chain.feed(tokens, chunk=chunk))
            with self._chains.open(self.artifact, None, replace(self.context, n_seq_max=3)) as chain:
                self.hold("beside other sequences", beside_others(chain, tokens))
                for slot in range(3):
                    chain.close(slot)
                rows = in_odd_pieces(chain, tokens, f"{self.case.kind} {self.case.label}", slot=2)
                self.hold(f"pieces of 1 to {_ODD} in the last slot", rows)
            with self._chains.open(self.artifact, ranges, self.context) as chain:
                self.hold(f"split at layer {_CUT}, chunks of 64", chain.feed(tokens, chunk=64))
            if self.case.runs_without_flash:
                self._without_flash(tokens)

    def _without_flash(self, tokens: Sequence[int]) -> None:
        """Without flash attention the numbers are others, and as steady."""
        context = replace(self.context, flash_attn=False)
        with self._chains.open(self.artifact, None, context) as chain:
            reference = chain.feed(tokens, chunk=len(tokens))
            chain.close()
            self.hold("without flash attention, chunks of 5", chain.feed(tokens, chunk=5), reference)
            chain.close()
            self.hold("without flash attention, single tokens", in_pieces(chain, tokens), reference)

    def several_threads(self, threads: int) -> str | None:
        """On several threads; says why there is no verdict when none came."""
        limit = _BUSY_SECONDS + _BUSY_FACTOR * self.single_seconds
        busy = threading.Event()
        rows: bytes | None = None
        with self.clocked(), self._chains.open(self.artifact, None, self.context, threads=threads) as chain:

            def give_up() -> None:
                busy.set()
                _upstream_log.disabled = True  # the abort is ours; it warns of nothing
                chain.engines[0].abort()

            timer = threading.Timer(limit, give_up)
            timer.start()
            try:
                rows = in_pieces(chain, self.tokens)
            except DgrError:
                if not busy.is_set():
                    raise
            finally:
                timer.cancel()
                timer.join()
                _upstream_log.disabled = False
        if rows is not None:
            self.hold(f"{threads} threads", rows)
            self.threads.append(threads)
            return None
        why, self.untested = self.untested, None  # what one thread found stands
        return "the CPUs are busy" if busy.is_set() else why

    def verdict(self) -> Verdict:
        return Verdict(self.case, tuple(self.differences), tuple(self.threads), self.seconds, self.untested)


def _run_threads(
    runs: Sequence[_Run], n_cpus: int, finished: Callable[[Verdict], None], pool: ThreadPoolExecutor
) -> dict[str, str]:
    """Run each case on several threads, alone on the machine; returns what was left out, and why.

    In the pool: the main thread only waits, so that it hears an interrupt.
    """
    counts = [count for count in (2, 3) if count == 2 or count < n_cpus]
    deadline = time.monotonic() + _THREADS_BUDGET
    why = None if n_cpus >= 2 else "this process may use one CPU only"
    untested = {}
    for run in runs:
        for threads in counts if run.reference and run.untested is None else ():
            if why is None and time.monotonic() > deadline:
                why = f"the types before them took over {_THREADS_BUDGET:.0f} s; the CPUs are busy"
            if why is None:
                why = pool.submit(run.several_threads, threads).result()
            if why is not None:
                untested[run.case.name] = f"{THREADS_NOTE}: {why}"
                break
        if run.untested is not None:
            untested[run.case.name] = f"not tested: {run.untested}"
        finished(run.verdict())
    return untested


def run_suite(
    types: Iterable[str | Case] | None = None,
    *,
    workers: int | None = None,
    finished: Callable[[Verdict], None] | None = None,
    numerics: Numerics = Numerics.EXACT,
) -> Report:
    """Run the suite for some types, or cases of them (all by default); ``finished`` is called with every verdict.

    ``workers``: cases run at a time (default: one per CPU, at most four). ``numerics`` other than exact shows what the
    suite would find without the reference kernels.
    """
    began, n_cpus = time.monotonic(), available_cpus()
    chains = _Chains()
    runs = [_Run(case, numerics, chains) for case in select(types)]
    with ThreadPoolExecutor(workers or min(n_cpus, 4)) as pool:
        try:
            for done in [pool.submit(run.single_thread) for run in runs]:
                done.result()
            untested = _run_threads(runs, n_cpus, finished or (lambda _: None), pool)
        except BaseException:  # an interrupt: leaving the pool would wait for all that was submitted
            _upstream_log.disabled = True
            chains.end()
            pool.shutdown(cancel_futures=True)
            _upstream_log.disabled = False
            raise
    return Report(kernel_fingerprint(), tuple(run.verdict() for run in runs), untested, time.monotonic() - began)


def exactness_record(report: Report, previous: ExactnessRecord | None = None) -> ExactnessRecord:
    """The record of a report. Types it did not test, or not to the end, keep the verdict of ``previous``.

    That counts only if it is of these kernels.
    """
    if previous is not None and previous.fingerprint != report.fingerprint:
        previous = None
    known = [verdict for verdict in report.verdicts if verdict.is_known]
    tested = {(verdict.case.kind, verdict.case.label) for verdict in known}
    exact = {(verdict.case.kind, verdict.case.label) for verdict in known if verdict.exact}
    failures = {verdict.case.name: "; ".join(verdict.differences) for verdict in known if verdict.differences}
    untested = dict(report.untested)
    if previous is not None:
        exact |= {("weights", label) for label in previous.weight_types} - tested
        exact |= {("k_cache", label) for label in previous.k_types} - tested
        again = {verdict.case.name for verdict in known}
        failures |= {name: text for name, text in previous.failures.items() if name not in again}
        again |= {verdict.case.name for verdict in report.verdicts}
        untested |= {name: why for name, why in previous.untested.items() if name not in again}
    return ExactnessRecord(
        report.fingerprint,
        tuple(label for label in WEIGHT_TYPES if ("weights", label) in exact),
        tuple(label for label in K_TYPES if ("k_cache", label) in exact),
        failures,
        untested,
    )
