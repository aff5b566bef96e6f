"""schemathesis against a server: requests made from its own description, right ones and wrong ones, and what comes back."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest
import trio
from serving.http.hostile_http import Idle
from serving.http.http_servers import open_server

from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import ServingLimits
from dgr.serving.http.service import ServerOptions

#: Where `make test-http-hostile` installs it.
PROGRAM = Path(__file__).resolve().parents[3] / "build" / "http-hostile" / "bin" / "schemathesis"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
#: Seconds for one answer, which may fill the context on a busy machine; a guard against hanging alone.
HANG = 600
#: Requests of each kind for each path.
EXAMPLES = 50


async def _attack(address: str, seed: int, folder: Path) -> str:
    # One worker: `ast` of CPython 3.11, with which hypothesis describes strategies, fails in several threads at once.
    command = [
        PROGRAM, "run", f"http://{address}/openapi.json", "--checks", ",".join(CHECKS), "--max-examples", EXAMPLES,
        "--seed", seed, "--phases", "examples,coverage,fuzzing", "--workers", 1, "--request-timeout", HANG,
        "--no-color", "--continue-on-failure",
    ]  # fmt: skip
    environment = {**os.environ, "HOME": os.fspath(folder)}
    done = await trio.run_process(
        [*map(str, command)],
        env=environment,
        cwd=folder,
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()[-20_000:]
    return done.stdout.decode()


@pytest.mark.http_hostile
@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_its_description_allows_or_forbids_is_answered(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No status of 500 or above, and no answer that the description does not have."""
    assert PROGRAM.exists(), "schemathesis is not there; run `make test-http-hostile`"
    monkeypatch.setattr("serving.http.http_servers.HANG", 1800)
    caplog.set_level(logging.WARNING)
    options = ServerOptions(model="m", thinking=Thinking.OFF)
    limits = ServingLimits(sessions=4, max_waiting=64)
    async with open_server(options=options, n_ctx=1024, sessions=4, limits=limits) as server:
        idle = await Idle.now()
        print((await _attack(server.address, seed, tmp_path))[-3000:])
        await idle.again()
        assert (server.engine.line.running, server.engine.line.waiting) == (0, 0)
        assert server.engine.counters.completion_tokens > 100
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
