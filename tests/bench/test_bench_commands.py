"""``dgr-bench`` as people meet it: its commands, its defaults, its schema."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest

from dgr_bench.certify.profiles import PROFILES, Profile
from dgr_bench.cli import main
from dgr_bench.describe import result_schema
from dgr_bench.results import SCHEMA

COMMANDS = (
    "certify",
    "verify",
    "compare",
    "real",
    "profile",
    "schema",
    "drill",
    "frontier",
    "overhead",
    "hops",
    "sessions",
    "servers",
    "prefill",
    "plan",
    "report",
    "builds",
    "quality",
    "widths",
)


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert [name for name in COMMANDS if f"    {name} " not in said and f"    {name}\n" not in said] == []


def test_the_version_names_the_schema_of_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dgr-bench {version('dgr')}, results {SCHEMA}\n"


@pytest.mark.parametrize("arguments", [[], ["certif"], ["certify", "--no-such-flag"], ["verify"], ["compare", "one"]])
def test_a_wrong_command_line_is_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said, step = capsys.readouterr().err.splitlines()
    assert said.startswith("dgr-bench")
    assert "--help` lists what it takes" in step


def test_without_its_extra_it_says_so() -> None:
    program = "import sys; sys.modules['tqdm'] = None; import dgr_bench; sys.exit(dgr_bench.main(['schema']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said, step = done.stderr.splitlines()
    assert said == "dgr-bench: error: it needs tqdm, which is not there"
    assert "pip install '.[bench]'" in step


@pytest.mark.parametrize("command", ["verify", "compare"])
def test_what_is_no_result_is_told(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path)] * (2 if command == "compare" else 1)
    assert main([command, *paths]) == 2
    said, step = capsys.readouterr().err.splitlines()
    assert "give a result.json or its folder" in said
    assert step.startswith("dgr-bench: next: ")


def test_a_profile_is_printed_as_it_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "fixture"]) == 0
    said = capsys.readouterr()
    assert msgspec.json.decode(said.out, type=Profile) == PROFILES["fixture"]
    assert PROFILES["fixture"].digest in said.err


def test_the_schema_describes_result_profile_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = msgspec.json.decode(capsys.readouterr().out)
    assert schema == msgspec.json.decode(msgspec.json.encode(result_schema()))
    assert (schema["title"], schema["$ref"]) == (SCHEMA, "#/$defs/Result")
    assert {"Result", "Profile", "LengthRun", "Refusal", "MemoryAt", "Outcome"} <= set(schema["$defs"])
    assert all(reference.removeprefix("#/$defs/") in schema["$defs"] for reference in schema["units"].values())
