"""llama-bench: what its JSON says, what is refused, where the binary comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from dgr import ContextParams
from dgr.engine.native import build_info
from dgr.errors import EngineError, InputError
from dgr.selftest.fixture.cached import cached_fixture
from dgr_bench.upstream import programs
from dgr_bench.upstream.llama_bench import LlamaBench, parse_samples
from dgr_bench.upstream.programs import find_program

#: What a real one printed, on a fixture model.
RECORDED = Path(__file__).with_name("llama_bench.json").read_bytes()
COMMIT = json.loads(RECORDED)[0]["build_commit"]


def program(folder: Path, text: str) -> Path:
    """A shell script to run in place of llama-bench."""
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def answering(folder: Path, **changes: Any) -> LlamaBench:
    """One that prints what was recorded, but for some changes."""
    answer = folder / "answer.json"
    answer.write_text(json.dumps([json.loads(RECORDED)[0] | changes]))
    return LlamaBench(program(folder, f"cat {answer}"), COMMIT, Path("model.gguf"), ContextParams(), threads=1)


def test_a_recorded_answer() -> None:
    sample = parse_samples(RECORDED)
    assert sample.samples_ns == [64_193_476]
    assert (sample.n_prompt, sample.n_gen, sample.load_mode, sample.flash_attn) == (32, 0, "none", 1)


@pytest.mark.parametrize(
    "output",
    [b"", b"| model | size |", b"[]", b"[{}]", RECORDED.replace(b"[ 64193476 ]", b"[]"), RECORDED + RECORDED],
    ids=["nothing", "a table", "no test", "another schema", "no sample", "two answers"],
)
def test_an_answer_that_is_none(output: bytes) -> None:
    with pytest.raises(EngineError, match="llama-bench"):
        parse_samples(output)


def test_two_tests_are_not_one() -> None:
    with pytest.raises(EngineError, match="one test"):
        parse_samples(json.dumps(json.loads(RECORDED) * 2).encode())


def test_the_command_has_every_setting(tmp_path: Path) -> None:
    context = ContextParams(n_batch=256, n_ubatch=128, type_k="f32", flash_attn=False)
    command = evolve(answering(tmp_path), context=context, threads=2).command(decode=64)
    settings = dict(zip(command[1::2], command[2::2], strict=True))
    assert settings == {
        "-m": "model.gguf", "-p": "0", "-n": "64", "-d": "0", "-r": "1", "-t": "2", "-b": "256", "-ub": "128", "-ctk": "f32",
        "-ctv": "f32", "-fa": "0", "-lm": "none", "-o": "json",
    }  # fmt: skip


async def test_seconds_of_one_run(tmp_path: Path) -> None:
    assert await answering(tmp_path).seconds(prefill=32) == pytest.approx(0.064193476)


async def test_another_pin_is_refused(tmp_path: Path) -> None:
    other = answering(tmp_path, build_commit="abcdef012")
    with pytest.raises(InputError, match=r"abcdef012, dgr from 0c1e57098; build one of the same pin"):
        await other.seconds(prefill=32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_threads", 2),
        ("n_batch", 2048),
        ("n_ubatch", 256),
        ("type_k", "f32"),
        ("flash_attn", 0),
        ("load_mode", "mmap"),
    ],
)
async def test_other_settings_are_not_compared(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"with {name} {value}"):
        await answering(tmp_path, **{name: value}).seconds(prefill=32)


async def test_a_program_that_fails(tmp_path: Path) -> None:
    failing = evolve(answering(tmp_path), binary=program(tmp_path, "echo failed to load model >&2; exit 3"))
    with pytest.raises(EngineError, match="exit status 3: failed to load model"):
        await failing.seconds(prefill=32)


async def test_a_program_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("no program")
    with pytest.raises(InputError, match="name another with --llama-bench"):
        await evolve(answering(tmp_path), binary=path).seconds(prefill=32)


def test_a_binary_that_was_named(tmp_path: Path) -> None:
    path = program(tmp_path, "exit 0")
    assert find_program("llama-bench", path) == path
    with pytest.raises(InputError, match=r"--llama-bench .*nowhere is not a program"):
        find_program("llama-bench", tmp_path / "nowhere")


def test_outside_a_checkout_a_binary_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "bench" / "dgr_bench" / "upstream" / "programs.py"))
    with pytest.raises(InputError, match=r"checkout of dgr.*name what it prints with --llama-bench"):
        find_program("llama-bench", None)


def test_a_build_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cffi_build").mkdir()
    (tmp_path / "cffi_build" / "llama_cpp.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "bench" / "dgr_bench" / "upstream" / "programs.py"))
    with pytest.raises(InputError, match="could not be built, exit status 7"):
        find_program("llama-bench", None)


@pytest.mark.llama_bench
async def test_the_real_one() -> None:
    commit = build_info()["llama_cpp_commit"]
    real = LlamaBench(find_program("llama-bench", None), commit, cached_fixture("mixed"), ContextParams(), threads=1)
    assert await real.seconds(prefill=32) > 0
    assert await real.seconds(decode=4) > 0
