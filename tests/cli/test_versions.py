"""What an installation says of itself: ``dgr --version``, ``dgr doctor`` without a route, ``dgr completion``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import dgr.cli.doctor_here as doctor_here
from dgr.cli import main
from dgr.cli.versions import versions
from dgr.engine.native import ABI_VERSION, kernel_fingerprint, runtime_version
from dgr.engine.numerics import ExactnessRecord, save_exactness_record
from dgr.selftest.cases import K_TYPES, WEIGHT_TYPES
from dgr.wire.frames import SCHEMA_HASH, SCHEMA_VERSION

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("order", [("--version", "--json"), ("--json", "--version")])
def test_every_identity_is_told(order: tuple[str, str], capsys: Capture) -> None:
    found = json.loads(said(capsys, *order))
    assert found["version"] == version("dgr")
    assert found["runtime"] == runtime_version()
    assert found["wire"] == {"schema_version": SCHEMA_VERSION, "schema_hash": SCHEMA_HASH}
    assert found["native"]["abi_version"] == ABI_VERSION
    assert found["kernels"]["fingerprint"] == kernel_fingerprint()
    assert found["kernels"]["instruction_sets"]
    assert not set(found["kernels"]["instruction_sets"]) & set(found["kernels"]["unused"])
    assert found["llama_cpp"]["patch_digest"].startswith(found["runtime"].partition("+")[2])
    assert re.fullmatch(r"3\.\d+\.\d+\S*", found["python"]["version"])
    assert {"trio", "cffi"} <= set(found["packages"])


def test_people_are_told_in_a_line(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert re.fullmatch(rf"dgr {re.escape(version('dgr'))}, llama.cpp [0-9a-f]{{9}}\n", capsys.readouterr().out)


# --- this machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def findings(capsys: Capture, code: int = 0) -> list[dict[str, Any]]:
    found = json.loads(said(capsys, "doctor", "--json", code=code))
    assert found["healthy"] == (code == 0)
    listed: list[dict[str, Any]] = found["findings"]
    return listed


def record(**changes: Any) -> None:
    fields = {"weight_types": WEIGHT_TYPES, "k_types": K_TYPES} | changes
    save_exactness_record(ExactnessRecord(kernel_fingerprint(), **fields))


def test_doctor_without_a_route_says_what_to_do_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    known = versions()
    monkeypatch.setattr(doctor_here, "versions", lambda: known | {"kernels": known["kernels"] | {"unused": ()}})
    assert [one["what"] for one in findings(capsys)] == [
        "exact numerics have not been tested on these kernels, so they are refused"
    ]
    record(weight_types=("f32",))
    (one,) = findings(capsys)
    assert one["what"].startswith(f"{len(WEIGHT_TYPES) - 1} of ")
    assert one["next_step"] == "dgr selftest numerics --if-missing"
    record()
    assert findings(capsys) == []
    assert "healthy: nothing to do" in said(capsys, "doctor")
    record(k_types=("f32", "q8_0"), failures={"K cache f16": "3 of 544 rows differ"})
    (one,) = findings(capsys, code=1)
    assert one["problem"]
    assert one["what"].startswith("K cache f16")


def test_doctor_tells_of_kernels_that_the_build_does_not_have(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    record()
    known = versions()
    kernels = known["kernels"] | {"unused": ("AVX512",), "portable": True}
    monkeypatch.setattr(doctor_here, "versions", lambda: known | {"kernels": kernels})
    text = said(capsys, "doctor")
    assert (
        "note: this build has no kernels for AVX512, which this CPU has: it computes the same, slower\n  next: " in text
    )
    assert re.search(r"kernels +portable", text)


def test_doctor_tells_of_a_cache_that_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert any("cannot be written" in one["what"] for one in findings(capsys, code=1))


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_command_and_flag_can_be_completed(shell: str, capsys: Capture) -> None:
    script = said(capsys, "completion", shell)
    for word in ("generate", "selftest", "numerics", "--if-missing" if shell != "tcsh" else "if-missing", "completion"):
        assert word in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_what_is_begun(tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "dgr.bash"
    script.write_text(said(capsys, "completion", "bash"))
    asked = """
        source {script}
        complete -p dgr > /dev/null
        COMP_WORDS=({words}); COMP_CWORD={last}; _shtab_dgr
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    for words, wanted in ((["dgr", "gen"], "generate"), (["dgr", "generate", "--ver"], "--verify")):
        code = asked.format(script=script, words=" ".join(words), last=len(words) - 1)
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert wanted in done.stdout.split(), done.stderr


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("dgr.cli.options._lacks", lambda name: name == "shtab")
    assert main(["completion", "bash"]) == 2
    assert "pip install '.[completion]'" in capsys.readouterr().err
