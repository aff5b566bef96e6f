"""The log as JSON lines: one object a record, whatever is in it, and errors of a command among them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cli.commands import Result

from dgr.cli.logs import _Json, _OneLine, log_format
from dgr.core.log_fields import log_fields
from dgr.errors import InputError

ROUTE = bytes.fromhex("00112233445566778899aabbccddeeff")


def record(message: str, *args: object, error: Exception | None = None, **fields: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("dgr.shard", logging.WARNING, "here.py", 1, message, args, info)
    vars(made).update(fields)
    return made


def test_a_record_has_when_how_bad_who_and_whose_state() -> None:
    fields: dict[str, Any] = {**log_fields(ROUTE, 3, 7)}
    line = json.loads(_Json().format(record("slot %d is gone", 5, **fields)))
    assert abs(datetime.fromisoformat(line.pop("time")).timestamp() - datetime.now().timestamp()) < 60
    assert line == {
        "level": "warning", "logger": "dgr.shard", "message": "slot 5 is gone", "route": "00112233", "epoch": 3, "session": 7,
    }  # fmt: skip
    text = _OneLine("%(levelname)s %(name)s: %(message)s").format(record("slot %d is gone", 5, **fields))
    assert text == "WARNING dgr.shard: slot 5 is gone [route 00112233, epoch 3, session 7]"


@pytest.mark.parametrize("odd", ["two\nlines", 'a "quote"', "\x1b[2J", "\udcff", "\u2028", "漢", "}{"])
def test_no_text_breaks_the_line(odd: str) -> None:
    try:
        raise ValueError(odd)
    except ValueError as error:
        line = _Json().format(record("%s", odd, error=error))
    assert line.isascii()
    assert "\n" not in line
    assert "ValueError" in json.loads(line)["exception"]
    assert "\x1b" not in json.loads(line)["message"]


def dgr(*arguments: str, **environment: str) -> Result:
    command = [sys.executable, "-m", "dgr", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("flags", [("--log-format", "json"), ()], ids=["flag", "environment"])
def test_an_error_of_a_command_is_a_record_too(flags: tuple[str, ...], tmp_path: Path) -> None:
    missing = str(tmp_path / "none.gguf")
    result = dgr("stage", missing, "--layers", "0:7", "--listen", "127.0.0.1:0", *flags, DGR_LOG_FORMAT="json")
    (line,) = result.err.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert (result.code, found["level"], found["logger"]) == (2, "error", "dgr")
    assert missing in found["message"]


def test_the_flag_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGR_LOG_FORMAT", "json")
    assert (log_format(None), log_format("text")) == ("json", "text")
    monkeypatch.setenv("DGR_LOG_FORMAT", "yaml")
    with pytest.raises(InputError, match="DGR_LOG_FORMAT 'yaml' is none of text, json"):
        log_format(None)
