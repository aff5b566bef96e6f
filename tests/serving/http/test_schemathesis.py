"""schemathesis against a server: requests made from its own description, right ones and wrong ones, and what comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest
from serving.http.programs import served

#: Where `make test-http-hostile` installs it.
PROGRAM = Path(__file__).resolve().parents[3] / "build" / "http-hostile" / "bin" / "schemathesis"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
)


def _attack(url: str, seed: int, examples: int, folder: Path) -> str:
    command = [
        PROGRAM, "run", f"{url}/openapi.json", "--checks", CHECKS, "--mode", "all", "--max-examples", examples, "--seed", seed,
        "--phases", "examples,coverage,fuzzing", "--workers", 4, "--request-timeout", 60, "--no-color", "--continue-on-failure",
    ]  # fmt: skip
    environment = {**os.environ, "HOME": os.fspath(folder)}
    done = subprocess.run(
        [*map(str, command)], env=environment, cwd=folder, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.http_hostile
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_its_description_allows_or_forbids_is_answered(small: Path, tmp_path: Path, seed: int) -> None:
    """No status of 500 or above, and no answer that the description does not have."""
    assert PROGRAM.exists(), "schemathesis is not there; run `make test-http-hostile`"
    with served("--model", small, "--split", "0:3,3:7", "--name", "m", "--thinking", "off", "--max-queued", 64) as (
        process,
        line,
    ):
        told = _attack(line["url"], seed, 100, tmp_path)
        print(told[-3000:])
        with urllib.request.urlopen(f"{line['url']}/status") as status:
            found = json.load(status)
        with urllib.request.urlopen(f"{line['url']}/metrics") as metrics:
            counted = re.findall(
                r'^dgr_requests_total\{.*status="(\d+)"\} ([\d.]+)$', metrics.read().decode(), re.MULTILINE
            )
        assert process.poll() is None
        assert (found["load"]["running"], found["load"]["waiting"]) == (0, 0)
        assert sum(float(count) for status_, count in counted if status_ == "200") > 20
        assert not [status_ for status_, _ in counted if status_.startswith("5")]
