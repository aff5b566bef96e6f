"""Shell blocks are commands: bash reads them, and those of dgr are read by their own parsers."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pages.reading import PAGES, Block, blocks, named, spans

from dgr.cli.command_line import _parser
from dgr.cli.parser import CommandParser
from dgr_bench.cli import _parser as _bench_parser

_PARSERS = {"dgr": cache(_parser), "dgr-bench": cache(_bench_parser)}
#: Between two commands of a line.
_BETWEEN = {"", ";", "&&", "||", "|", "&", "(", ")", ";;", "{", "}", "do", "then", "done"}
_PLACEHOLDERS = {"…", "...", "[...]"}
SHELL = [*blocks("sh", "bash")]


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a script, as words."""
    code = re.sub(r"<<'(\w+)'.*?\n\1\n", "\n", code, flags=re.DOTALL).replace("\\\n", " ")
    code = re.sub(r"\$\([^()]*(?:\([^()]*\))?[^()]*\)", "SUBSTITUTED", code)
    code = re.sub(r"(^|\s)#.*$", r"\1", code, flags=re.MULTILINE)
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " \t\r", ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word.strip("\n") in _BETWEEN:
            if words:
                yield words
            words = []
        else:
            words.append(word)


def ours(words: list[str]) -> tuple[str, list[str]] | None:
    """The program of ours that a command runs, and its arguments; None where it runs another."""
    rest = list(words)
    while rest and (re.match(r"[A-Z_]+=", rest[0]) or rest[0] in ("sudo", "-u", "exec")):
        rest = rest[2:] if rest[0] == "-u" else rest[1:]
    if not rest or (program := rest[0].rpartition("/")[2]) not in _PARSERS:
        return None
    arguments = rest[1:]
    for index, word in enumerate(arguments):
        if word in (">", "<", ">>", "2>"):
            return program, arguments[:index]
    return program, arguments


def problem(program: str, arguments: list[str]) -> str | None:
    """Why a command line would be refused. What stands for arguments that are left out may be missing, or be a value."""
    words = [word for word in arguments if not word.startswith("$")]
    shorter = [word for word in words if word not in _PLACEHOLDERS]
    refusal = refused(program, shorter)
    if refusal is None or len(shorter) == len(words) or "required" in refusal:
        return refusal if len(shorter) == len(words) else None
    return refused(program, words)


def refused(program: str, words: list[str]) -> str | None:
    """What the parser says of arguments that it does not take."""
    try:
        _PARSERS[program]().parse_args(words)
    except Refused as refusal:
        return str(refusal)
    return None


class Refused(Exception):
    """What a parser says of arguments that it does not take."""


@pytest.fixture(autouse=True)
def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(_: argparse.ArgumentParser, message: str) -> None:
        raise Refused(message)

    monkeypatch.setattr(CommandParser, "error", error)


def test_bash_reads_every_block() -> None:
    script = "\n".join(f"block_{index}() {{\n{block.code}\n}}" for index, block in enumerate(SHELL))
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_are_taken_by_their_parsers(block: Block) -> None:
    found = [ours(words) for words in commands(block.code)]
    assert {str(command): said for command in found if command is not None and (said := problem(*command))} == {}


def test_most_blocks_have_a_command() -> None:
    found = [command for block in SHELL for words in commands(block.code) if (command := ours(words)) is not None]
    assert len(found) > 40
    assert {program for program, _ in found} == {"dgr", "dgr-bench"} or {program for program, _ in found} == {"dgr"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("dgr generate --model m --split 0:1 --prompt x | head", None),
        ("FOO=1 .venv/bin/dgr stage M --layers 0:1 --listen h:1 … > log", None),
        ("dgr serve --rout route.toml2 --no-such", "unrecognized arguments: --no-such"),
        ("dgr none", "invalid choice"),
        ("dgr stage M …", None),
        ("dgr stage M", "required"),
    ],
)
def test_a_wrong_command_would_be_seen(code: str, said: str | None) -> None:
    (words,) = [words for words in commands(code) if ours(words) is not None]
    command = ours(words)
    assert command is not None
    found = problem(*command)
    assert (found is None) if said is None else (found is not None and said in found)


@cache
def flags_of(program: str) -> dict[str, set[str]]:
    """Command -> the flags that it takes; those of its own commands too."""

    def gathered(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for choice, inner in action.choices.items():
                    yield choice
                    yield from gathered(inner)

    (group,) = [one for one in _PARSERS[program]()._actions if isinstance(one, argparse._SubParsersAction)]
    return {name: set(gathered(parser)) for name, parser in group.choices.items()}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_within_a_line_have_such_flags(page: Path) -> None:
    known = {program: flags_of(program) for program in _PARSERS}
    for span in spans(page):
        for program, command, rest in re.findall(r"(?:^|\| )(dgr|dgr-bench) ([a-z]+)\b([^|]*)", span):
            assert command in known[program], span
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest))
            assert flags <= known[program][command], (span, flags - known[program][command])
