"""The process of one stage, kept alive: started again when it ends, and killed when it is frozen or hangs."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

import psutil
import trio
from attrs import evolve

from dgr.cluster.connect import LinkPolicy
from dgr.cluster.diagnosis import causes, certificate_step
from dgr.cluster.occupancy import open_asking
from dgr.cluster.upkeep import Patience, RestartPolicy, Vitals
from dgr.core.route import StageRef
from dgr.errors import DeadlineExceeded, DgrError
from dgr.wire.frames import Drain, Occupancy
from dgr.wire.nurseries import open_nursery

__all__ = ["Keeper", "Report"]

_log = logging.getLogger("dgr.up")

#: Seconds a stage has to end by itself when told to.
_GRACE = 10.0
#: Seconds between two looks at a stage, at most.
_LOOK = 1.0
#: Exit code for a process that could not be started.
_FAILED = 1


class Report(Protocol):
    """Told what becomes of a stage: ``ready`` (``pid``), ``frozen`` (``why``), ``ended`` (``code``, ``again_in_seconds``),
    ``unreachable`` (``why``: its certificate is refused)."""

    def __call__(self, ref: StageRef, event: str, **facts: Any) -> None: ...


class Keeper:
    """One stage. :meth:`run` is its life; others may ask for a restart meanwhile.

    ``command``: prints a line when the stage is ready to take links at ``ref.address``. ``policy``: how it is asked for
    signs of life.
    """

    def __init__(
        self, ref: StageRef, command: Sequence[str], policy: LinkPolicy, patience: Patience, report: Report
    ) -> None:
        self.ref = ref
        self.policy = policy
        #: What it last told of itself; None before, and when it ended.
        self.occupancy: Occupancy | None = None
        self._command = list(command)
        self._patience = patience
        self._report = report
        self._restarts = RestartPolicy()
        self._process: trio.Process | None = None
        self._ready = trio.Event()
        self._ended = trio.Event()
        self._wanted = False

    async def run(self) -> None:
        """Run the stage again and again; returns only when it refuses its arguments as it starts for the first time."""
        while True:
            began: list[float] = []
            code = await self._run_once(began)
            ready_for = trio.current_time() - began[0] if began else None
            wanted, self._wanted = self._wanted, False
            pause = self._restarts.ended(code, ready_for, wanted=wanted)
            if pause is None:
                return
            level = logging.INFO if wanted else logging.WARNING
            _log.log(level, "stage %s ended with %d; again in %.1f s", self.ref.address, code, pause)
            self._report(self.ref, "ended", code=code, again_in_seconds=pause)
            await trio.sleep(pause)

    async def restart(self) -> None:
        """End the process in good order, if it runs, and wait until the next one is ready."""
        ended = self._ended
        if self._process is not None:
            self._wanted = True
            self._process.terminate()
            with trio.move_on_after(_GRACE):
                await ended.wait()
            if not ended.is_set() and self._process is not None:
                self._process.kill()
                await ended.wait()
        await self.ready()

    async def ready(self) -> None:
        """Wait until the stage takes links."""
        while not self._ready.is_set():
            await self._ready.wait()

    async def _run_once(self, began: list[float]) -> int:
        """Run a process to its end: its exit code. ``began`` gets the time at which it was ready."""
        try:
            process = await trio.lowlevel.open_process(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            _log.error("stage %s cannot be started: %s", self.ref.address, error)
            return _FAILED
        assert process.stdout is not None
        self._process = process
        self._ended = trio.Event()
        vitals = Vitals(self._patience, trio.current_time())
        try:
            async with open_nursery() as nursery:
                nursery.start_soon(self._look_after, process, vitals)
                nursery.start_soon(self._read, process, vitals, began)
                code = await process.wait()
                nursery.cancel_scope.cancel()
            return code
        finally:
            self.occupancy = None
            self._process = None
            if self._ready.is_set():
                self._ready = trio.Event()
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.terminate()
                    with trio.move_on_after(_GRACE):
                        await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                await process.stdout.aclose()
                if process.stdin is not None:
                    await process.stdin.aclose()
            self._ended.set()

    async def _read(self, process: trio.Process, vitals: Vitals, began: list[float]) -> None:
        """Take what the stage prints; its first line says that it is ready."""
        assert process.stdout is not None
        async for part in process.stdout:
            if b"\n" in part and not began:
                began.append(trio.current_time())
                vitals.ready(began[0])
                _log.info("stage %s is ready", self.ref.address)
                self._report(self.ref, "ready", pid=process.pid)
                self._ready.set()

    # --- signs of life ---

    async def _look_after(self, process: trio.Process, vitals: Vitals) -> None:
        every = min(_LOOK, self._patience.silence / 4)
        async with open_nursery() as nursery:
            nursery.start_soon(self._ask, vitals, every)
            while True:
                await trio.sleep(every)
                vitals.worked(_work_of(process.pid), trio.current_time())
                if (why := vitals.verdict(trio.current_time(), every)) is not None:
                    _log.warning("stage %s is killed and started again: %s", self.ref.address, why)
                    self._report(self.ref, "frozen", why=why)
                    process.kill()  # it hears nothing else
                    nursery.cancel_scope.cancel()
                    return

    async def _ask(self, vitals: Vitals, every: float) -> None:
        """Ask a stage that is ready how it is, again and again."""
        await self.ready()
        # Its own silence is judged here, and more patiently than that of a link.
        policy = evolve(self.policy, heartbeat=max(self.policy.heartbeat, self._patience.silence))
        said = ""
        while True:
            try:
                async with open_asking(self.ref.address, policy, "dgr up") as ask:
                    while True:
                        self.occupancy = seen = await ask(Drain(None))
                        now = trio.current_time()
                        vitals.heard(now, seen.batch_running_ms / 1000, seen.batch_longest_ms / 1000)
                        await trio.sleep(every)
            except DgrError as error:
                if not _is_silence(error):  # whoever refuses is alive
                    vitals.heard(trio.current_time())
                    _log.debug("stage %s does not say how it is: %s", self.ref.address, error)
                    if (step := certificate_step(error)) is not None and str(error) != said:
                        said = str(error)
                        why = f"{said}; {step}; its certificate is that of --tls-cert, or of [tls] in the route file"
                        _log.warning("stage %s runs, and no client can reach it: %s", self.ref.address, why)
                        self._report(self.ref, "unreachable", why=why)
            await trio.sleep(every)


def _is_silence(error: DgrError) -> bool:
    """Whether nobody answered: no kernel, or no process behind it."""
    return isinstance(error, DeadlineExceeded) or any(isinstance(one, ConnectionRefusedError) for one in causes(error))


def _work_of(pid: int) -> object:
    """What changes as long as a process does anything; nothing for one that cannot be looked at."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        read = process.io_counters().read_chars if hasattr(process, "io_counters") else 0
    except psutil.Error:
        return None
    return times.user, times.system, read
