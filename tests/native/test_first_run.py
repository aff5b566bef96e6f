"""What a first run shows: what it will do, that it goes on, and the output of what fails."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def watch(build_scripts: tuple[ModuleType, ModuleType]) -> ModuleType:
    import watch  # type: ignore[import-not-found]  # on sys.path while the fixture is there

    module: ModuleType = watch
    return module


@pytest.fixture
def announce(
    build_scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    import announce  # type: ignore[import-not-found]  # on sys.path while the fixture is there

    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setenv("DGR_CACHE_DIR", str(tmp_path / "cache"))
    module: ModuleType = announce
    return module


def said_by(watch: ModuleType, monkeypatch: pytest.MonkeyPatch, fifo: Path, lines: int, code: str) -> list[str]:
    """What is said while a silent command waits until so many lines have been said."""
    said: list[str] = []
    os.mkfifo(fifo)

    def say(_: object, text: str, end: str) -> None:
        said.append(text)
        if len(said) == lines:
            fifo.write_text("go on")

    monkeypatch.setattr(watch, "_PRINTED", 0.01)
    monkeypatch.setattr(watch._Line, "_say", say)
    assert watch.watched("a step", sys.executable, "-c", code, fifo) == 0
    return said


def test_a_silent_step_shows_that_it_goes_on(
    watch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = said_by(watch, monkeypatch, tmp_path / "fifo", 3, "import sys; open(sys.argv[1]).read()")
    assert len(said) >= 4
    assert all(re.fullmatch(r"a step: \d+ s", line) for line in said[:-1])
    assert said[-1] == "a step: done"


def test_nothing_is_silent_for_more_than_five_seconds(watch: ModuleType) -> None:
    assert max(watch._REDRAWN, watch._PRINTED) < 5


def test_ninjas_count_tells_how_far_it_is(watch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import sys; print('[30/80] Building', flush=True); open(sys.argv[1]).read()"
    said = said_by(watch, monkeypatch, tmp_path / "fifo", 40, code)
    assert any(re.fullmatch(r"a step: 30 of 80, \d+ s, about \d+ s left", line) for line in said)


def test_output_is_shown_of_what_fails_alone(watch: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('a warning'); sys.exit(int(sys.argv[1]))"
    assert watch.watched("a step", sys.executable, "-c", code, "0") == 0
    assert capfd.readouterr().err == "a step: done\n"
    assert watch.watched("a step", sys.executable, "-c", code, "3") == 3
    assert capfd.readouterr().err == "a step: FAILED with exit status 3\na warning\n"


def test_a_first_run_says_what_it_does_and_for_how_long(
    announce: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    venv, model = tmp_path / "venv", tmp_path / "m.gguf"
    took = []
    for cores in (1, 2, 8):
        monkeypatch.setattr(announce, "cores", lambda cores=cores: cores)
        steps = announce.steps(venv, model)
        assert all(
            word in what for (what, _), word in zip(steps, ("install", "llama.cpp", "joins", "test"), strict=True)
        )
        took.append(sum(seconds for _, seconds in steps))
    assert took == sorted(took, reverse=True)
    assert took[1] <= 240  # what docs promise of two cores
    monkeypatch.setattr(sys, "argv", ["announce.py", str(venv), str(model)])
    announce.main()
    said = capsys.readouterr().out
    assert re.match(r"make demo: about \S+ (s|min) on the 8 cores here, 4 steps:\n  1\. install", said)


def test_what_is_there_already_is_not_announced(announce: ModuleType, tmp_path: Path) -> None:
    venv, model = tmp_path / "venv", tmp_path / "m.gguf"
    venv.mkdir()
    (venv / ".stamp-tools").touch()
    prefix = announce.llama_cpp.prefix_of(announce.llama_cpp.Flavour(patched=True, cc="cc", cxx="c++"))
    prefix.mkdir(parents=True)
    assert next(what for what, _ in announce.steps(venv, model)).startswith("compile what joins")
    (venv / ".stamp-dgr").touch()
    model.touch()
    os.utime(venv / ".stamp-dgr", (0, 0))  # older than what it is built from
    assert len(announce.steps(venv, model)) == 2
    (venv / ".stamp-dgr").touch()
    ((what, seconds),) = announce.steps(venv, model)
    assert what == "test the kernels that it needs, answer a prompt on three stages"
    assert seconds <= 10


def test_the_archive_that_is_named_is_taken_and_nothing_fetched(
    build_scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llama_cpp, _ = build_scripts
    monkeypatch.setattr(llama_cpp, "run", lambda *_: pytest.fail("something was fetched"))
    archive = tmp_path / "other-name.tar.gz"
    monkeypatch.setenv("DGR_LLAMA_CPP_ARCHIVE", str(archive))
    with pytest.raises(llama_cpp.BuildError, match="which is no file: it must be llama_cpp_python"):
        llama_cpp.fetch_sdist()
    archive.write_bytes(b"something else")
    with pytest.raises(llama_cpp.BuildError, match="the pin says"):
        llama_cpp.fetch_sdist()
    monkeypatch.setitem(llama_cpp.PIN["sdist"], "sha256", llama_cpp.file_digest(archive))
    assert llama_cpp.fetch_sdist() == archive


def test_objects_go_through_ccache_where_it_is(
    build_scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llama_cpp, _ = build_scripts
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CCACHE_BASEDIR", "")
    monkeypatch.setenv("CCACHE_NOHASHDIR", "")
    assert llama_cpp.ccache(tmp_path / "work") == ["-DGGML_CCACHE=OFF"]  # and no word of it
    (tmp_path / "ccache").touch(mode=0o755)
    assert f"-DCMAKE_CXX_COMPILER_LAUNCHER={tmp_path / 'ccache'}" in llama_cpp.ccache(tmp_path / "work")
    assert os.environ["CCACHE_BASEDIR"] == str(tmp_path / "work")
    arguments = llama_cpp.Flavour(patched=True, cc="cc", cxx="c++").cmake_args
    assert "ccache" not in str(arguments).lower()  # nothing of the key: what is computed does not depend on it
