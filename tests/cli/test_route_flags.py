"""Flags of stages beside `--route`: what the stages elsewhere decide is refused here, whatever its value."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.commands import Result

from dgr.cli.options import add_context_arguments

COMMANDS = {
    "generate": ("--prompt", "x"),
    "serve": ("--listen", "127.0.0.1:0"),
    "trace": ("--prompt", "x"),
}


def stage_flags() -> list[tuple[str, ...]]:
    """Every flag of a stage, with its default or a value where it takes one."""
    parser = argparse.ArgumentParser(add_help=False)
    add_context_arguments(parser)
    found = []
    for action in parser._actions:
        if action.default is not argparse.SUPPRESS:  # those are refused everywhere
            value = () if action.nargs == 0 else (str(1 if action.default is None else action.default),)
            found.append((action.option_strings[0], *value))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_stage_is_refused_beside_a_route(run: Callable[..., Result], command: str) -> None:
    assert len(stage_flags()) >= 13
    for flag in stage_flags():
        result = run(command, *COMMANDS[command], "--route", "none.toml", *flag)
        assert result.code == 2
        assert f"{flag[0]} beside --route" in result.err
    several = run(command, *COMMANDS[command], "--route", "none.toml", "--wire", "q8", "--mlock", "--ctx=99")
    assert "--wire, --mlock, --ctx beside --route" in several.err


@pytest.mark.parametrize(
    "flags",
    [
        ("generate", "--chunk", 4, "--chunk-seconds", 2, "--model", "x.gguf"),
        ("generate", "--verify", "--threads", 2, "--mmap", "--device", "CPU", "--gpu-layers", 0),
        ("trace", "--chunk", 4),
        ("serve", "--sessions", 2, "--prefixes", 1, "--chunk", 4),
    ],
    ids=str,
)
def test_what_means_something_with_a_route_is_taken(run: Callable[..., Result], flags: tuple[object, ...]) -> None:
    command, *others = map(str, flags)
    result = run(command, *COMMANDS[command], "--route", "none.toml", *others)
    assert "cannot read none.toml" in result.err


def test_a_rounded_wire_is_verified_over_what_it_promises(run: Callable[..., Result], small: Path) -> None:
    words = ("generate", "--model", small, "--split", "0:3,3:7", "--ctx", 16, "--prompt", "The quick brown", "-n", 2)
    exact = run(*words, "--verify", "--json").json()["verified"]
    assert (exact["equal"], exact["with"], exact["promised"]) == (True, "the whole model's", True)
    rounded = run(*words, "--numerics", "same-cuts", "--wire", "q8", "--verify", "--json").json()["verified"]
    assert (rounded["equal"], rounded["promised"]) == (True, True)
    assert "the same cuts in chunks of" in rounded["with"]
    assert rounded["digest"] != exact["digest"]


def test_numbers_are_refused_before_anything_is_loaded(run: Callable[..., Result], tmp_path: Path) -> None:
    absent = ("--model", tmp_path / "absent.gguf", "--prompt", "x")
    assert "at `seed`" in run("generate", *absent, "--seed", -1).err
    assert "top_p is 2" in run("generate", *absent, "--top-p", 2).err
    for command in ("generate", "trace"):
        assert "max_tokens is -1" in run(command, *absent, "-n", -1).err
    said = run("logits", "--model", tmp_path / "absent.gguf", "--tokens", "none.i32", "--out", tmp_path / "o.f32").err
    assert "cannot read token ids from none.i32: No such file or directory" in said


def test_a_type_that_is_none_is_said_to_be_none(run: Callable[..., Result], small: Path) -> None:
    said = run("generate", "--model", small, "--prompt", "x", "--type-k", "zz").err
    assert "'zz' is no K-cache type; choose one of f32, f16, q8_0" in said
