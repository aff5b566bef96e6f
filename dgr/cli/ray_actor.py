"""A stage as the child process of a Ray actor: whoever of the two ends takes the other along.

Ray restarts actors and knows nothing of their children, so an actor ends when its stage does. A stage ends when its standard
input does, which the actor alone holds, so none outlives an actor that was killed. What Ray carries is where a stage is;
boundaries go over dgr's own links from stage to stage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

import ray

from dgr.cli.children import python_module
from dgr.cli.exit_codes import BAD_INPUT
from dgr.errors import InputError

__all__ = ["StageActor"]

#: Seconds between two starts of a stage that does not come up: at first, and at most.
_FIRST_PAUSE, _LAST_PAUSE = 0.5, 10.0


class StageActor:
    """Starts its stage when it is made, and answers when the stage is ready.

    ``command``: what ``dgr`` is run with, but for addresses; the stage ends with its standard input and says in JSON that it is
    ready. ``port``: where it listens at its node's address; 0 is any free one. ``metrics_port``: of ``/metrics`` there; None:
    nowhere.

    Raises :class:`~dgr.errors.InputError` when a stage that is started for the first time refuses its arguments; Ray then does
    not make the actor again. Later a refusal is a state of the node, and is waited for.
    """

    def __init__(self, command: Sequence[str], port: int, metrics_port: int | None) -> None:
        host = str(ray.util.get_node_ip_address())
        self._host = f"[{host}]" if ":" in host else host
        self._metrics = None if metrics_port is None else f"{self._host}:{metrics_port}"
        addresses = [f"--listen={self._host}:{port}"]
        if self._metrics is not None:
            addresses.append(f"--metrics={self._metrics}")
        words = python_module("dgr", *command, *addresses)
        self._process, ready = self._started(
            words, again=bool(ray.get_runtime_context().was_current_actor_reconstructed)
        )
        self._address: str = json.loads(ready)["address"]
        threading.Thread(target=self._end_with_it, name="dgr-stage", daemon=True).start()

    def where(self) -> dict[str, Any]:
        """``address`` and ``metrics`` of the stage, ``pid`` of its process, ``node`` of Ray."""
        node = ray.get_runtime_context().get_node_id()
        return {"address": self._address, "metrics": self._metrics, "pid": self._process.pid, "node": node}

    def _started(self, words: Sequence[str], *, again: bool) -> tuple[subprocess.Popen[bytes], bytes]:
        """The process of a stage that is ready, and what it said then."""
        pause = _FIRST_PAUSE
        while True:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stderr is not None
            last: deque[bytes] = deque(maxlen=2)  # an error and what to do about it
            log = threading.Thread(target=_copy, args=(process.stderr, last), name="dgr-stage-log", daemon=True)
            log.start()
            if line := process.stdout.readline():
                return process, line
            code = process.wait()
            log.join()
            if code == BAD_INPUT and not again:
                said = b" ".join(line.strip() for line in last if b": error: " in line or b": next: " in line)
                raise InputError(f"a stage refuses its arguments: {said.decode(errors='replace')}")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _end_with_it(self) -> None:
        self._process.wait()
        os._exit(1)  # there is no other way to end an actor from a thread; Ray makes it anew


def _copy(log: IO[bytes], last: deque[bytes]) -> None:
    """A stage's log goes where Ray keeps that of its actor."""
    for line in log:
        last.append(line)
        sys.stderr.write(line.decode(errors="replace"))
