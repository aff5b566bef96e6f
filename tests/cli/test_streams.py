"""Every command with the streams, names and terminals that people and parent processes give it."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import shutil
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli.commands import CONTEXT, Result
from cli.forks import Ended, begin, ended, forked, pipe

import dgr.cli.selftest
import dgr.cli.stage
import dgr_bench.cli
from dgr.cli import progress, streams
from dgr.cli.command_line import _parser, main
from dgr.cli.exit_codes import exit_code, run_command
from dgr.cli.up import _Reporter
from dgr.core.route import LayerRange, StageRef
from dgr.engine.numerics import ExactnessRecord
from dgr.errors import ArtifactError, DgrError, EngineError, InputError, LinkBroken
from dgr.selftest.cases import K_TYPES, WEIGHT_TYPES

Command = Callable[[Path, Path], list[object]]

NOWHERE = '[[stage]]\naddress = "127.0.0.1:1"\nlayers = "0:7"\n'


def _route(folder: Path) -> Path:
    path = folder / "nowhere.toml"
    path.write_text(NOWHERE)
    return path


def _tokens(folder: Path) -> Path:
    path = folder / "tokens.i32"
    path.write_bytes(array("i", range(20)).tobytes())
    return path


#: Every command of ``dgr`` on a model, in a folder of its own, with the exit code it ends with.
COMMANDS: dict[str, tuple[int, Command]] = {
    "generate": (0, lambda m, f: ["generate", "--model", m, "--prompt", "fox é漢", "-n", 4, *CONTEXT]),
    "logits": (0, lambda m, f: ["logits", "--model", m, "--tokens", _tokens(f), "--out", f / "o.f32", *CONTEXT]),
    "plan": (0, lambda m, f: ["plan", m, "--stages", 2, "--ctx", 256]),
    "benchmark": (0, lambda m, f: ["benchmark", m, "--ubatch", 32, "--sequences", 1, "--depth", 1]),
    "slice": (0, lambda m, f: ["slice", m, "--layers", "0:3", "-o", f / "slice.gguf"]),
    "stage": (0, lambda m, f: ["stage", m, "--layers", "0:7", "--listen", "127.0.0.1:0", "--until-stdin-closes", *CONTEXT]),
    "serve": (0, lambda m, f: ["serve", "--model", m, "--listen", "127.0.0.1:0", "--until-stdin-closes", *CONTEXT]),
    "up": (2, lambda m, f: ["up", _route(f), "--model", m, "--only", "127.0.0.1:2"]),
    "drain": (1, lambda m, f: ["drain", "127.0.0.1:1"]),
    "trace": (0, lambda m, f: ["trace", "--model", m, "--prompt", "x", "-n", 2, "--ignore-eos", *CONTEXT]),
    "top": (1, lambda m, f: ["top", "http://127.0.0.1:1", "--once", "--every", 0.1]),
    "doctor": (1, lambda m, f: ["doctor", "--route", _route(f)]),
    "keys": (0, lambda m, f: ["keys", "127.0.0.1", "--out", f / "keys"]),
    "inspect": (0, lambda m, f: ["inspect", m]),
    "fixture": (0, lambda m, f: ["fixture", f / "new.gguf", "--preset", "min", "--layers", 1]),
    "completion": (0, lambda m, f: ["completion", "bash"]),
    "selftest": (0, lambda m, f: ["selftest", "numerics", "--if-missing"]),
}  # fmt: skip
#: Of these, those that end here before they have anything to print.
SILENT = "up", "drain"
EVERY = pytest.mark.parametrize("name", COMMANDS)


def _later(*values: object) -> list[object]:
    """Cases of the long suite."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


#: Of the commands above those that print something for whoever reads their standard output.
PRINTING = pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SILENT])


def test_every_command_is_here() -> None:
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(commands.choices) == set(COMMANDS)


@pytest.fixture(autouse=True)
def tested_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on this machine's kernels is recorded, with nothing left to try: their test takes half a minute."""
    monkeypatch.setattr(dgr.cli.selftest, "load_exactness_record", lambda: ExactnessRecord("00", WEIGHT_TYPES, K_TYPES))


@pytest.fixture
def odd(small: Path, tmp_path: Path) -> Path:
    """The model under a name that is not UTF-8, in a folder that is neither."""
    folder = tmp_path / os.fsdecode(b"f\xfe")
    folder.mkdir()
    return Path(shutil.copy(small, folder / os.fsdecode(b"b\xff.gguf")))


# --- closed, full and impatient streams ---


@pytest.mark.parametrize("closed", [*_later((0,), (2,)), (1,), (0, 1, 2)], ids=str)
@EVERY
def test_a_closed_stream_changes_no_exit_code(name: str, closed: tuple[int, ...], small: Path, tmp_path: Path) -> None:
    code, command = COMMANDS[name]
    result = forked(command(small, tmp_path), out=tmp_path, closed=closed)
    assert result.code == code
    if 1 not in closed and name not in SILENT:
        assert result.out
        assert b"error" not in result.out


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("argv", "code"),
    [(["schema"], 0), (["certify", "--route", "none.toml"], 2), (["schema", os.fsdecode(b"\xff")], 2)],
    ids=["schema", "certify", "odd"],
)
def test_the_benchmark_has_the_same_streams(
    argv: list[object], code: int, closed: tuple[int, ...], tmp_path: Path
) -> None:
    result = forked(argv, out=tmp_path, closed=closed, encoding="ascii", entry=dgr_bench.cli.main)
    assert result.code == code
    assert (result.out != b"") is (code == 0 and 1 not in closed)
    assert (result.err != b"") is (code == 2 and 2 not in closed)


def test_an_error_never_goes_to_standard_output(tmp_path: Path) -> None:
    result = forked(["inspect", "nofile"], out=tmp_path, closed=(2,))
    assert (result.code, result.out) == (2, b"")


@pytest.mark.parametrize("prompt", [(), (0,)], ids=["empty", "closed"])
def test_no_prompt_on_standard_input_is_told(prompt: tuple[int, ...], small: Path, tmp_path: Path) -> None:
    result = forked(["generate", "--model", small, "--prompt", "-"], out=tmp_path, closed=prompt)
    assert result.code == 2
    assert b"standard input is empty: there is nothing to answer" in result.err


def _into_full(argv: list[object], folder: Path) -> Ended:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        return forked(argv, out=folder, stdout=full)
    finally:
        os.close(full)


@PRINTING
def test_output_that_cannot_be_written_is_a_failure(name: str, small: Path, tmp_path: Path) -> None:
    result = _into_full(COMMANDS[name][1](small, tmp_path), tmp_path)
    assert result.code == 1
    assert result.err.count(b"\n") in (0, 2)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["plan", "--help"]], ids=" ".join)
def test_even_help_that_cannot_be_written_is_a_failure(argv: list[object], tmp_path: Path) -> None:
    assert _into_full(argv, tmp_path).code == 1


def test_a_pipe_that_does_not_block_gets_every_byte(tmp_path: Path) -> None:
    argv = ["inspect", "v4-flash", "--ctx", 4096, "--json"]
    size = 4096
    whole = forked(argv, out=tmp_path).out
    assert len(whole) > size
    with pipe(size) as (read, write):
        pid = begin(argv, out=tmp_path, stdout=write)
        os.close(write)
        parts = []
        while part := os.read(read, 512):
            parts.append(part)
        assert b"".join(parts) == whole
        assert ended(pid, tmp_path).code == 0


def test_a_pipe_that_does_not_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in poll, and not by trying again and again."""
    with pipe(4096) as (read, write):
        polls = []

        class Poll:
            def register(self, descriptor: int, events: int) -> None:
                assert (descriptor, events) == (write, select.POLLOUT)

            def poll(self) -> None:
                polls.append(os.read(read, 4096))

        monkeypatch.setattr(select, "poll", Poll)
        file = streams._PatientFile(write, "w", closefd=False)
        with io.BufferedWriter(file) as out:
            out.write(b"x" * 20_000)
        assert sum(map(len, polls)) + len(os.read(read, 8192)) == 20_000
        assert len(polls) >= 4


# --- names and characters ---


@pytest.mark.parametrize("encoding", [*_later("utf-8", "latin-1"), "ascii"])
@EVERY
def test_names_that_are_not_utf8_are_shown_escaped(name: str, encoding: str, odd: Path, tmp_path: Path) -> None:
    code, command = COMMANDS[name]
    result = forked(command(odd, odd.parent), out=tmp_path, encoding=encoding)
    assert result.code == code
    result.out.decode(encoding)
    if name in ("logits", "slice", "inspect", "fixture", "keys"):
        assert rb"f\udcfe" in result.out


@EVERY
def test_json_is_ascii_and_valid_whatever_the_name(name: str, odd: Path, tmp_path: Path) -> None:
    code, command = COMMANDS[name]
    result = forked([*command(odd, odd.parent), "--json"], out=tmp_path, encoding="ascii")
    assert result.code == code
    if name not in SILENT:
        assert isinstance(msgspec.json.decode(result.out), dict)
        assert result.out.isascii()


@pytest.mark.parametrize(
    "argv", [["inspect", os.fsdecode(b"no\xff")], ["up", os.fsdecode(b"no\xff")], [os.fsdecode(b"\xff")]]
)
def test_errors_name_it_too(argv: list[object], tmp_path: Path) -> None:
    result = forked(argv, out=tmp_path, encoding="ascii")
    assert result.code == 2
    assert rb"\udcff" in result.err


def test_a_route_file_is_not_touched_when_it_could_not_name_the_model(
    odd: Path, tmp_path: Path, run: Callable[..., Result]
) -> None:
    route = tmp_path / "route.toml"
    route.write_text("as it was")
    result = run("plan", odd, "--stages", 2, "--ctx", 256, "-o", route)
    assert result.code == 2
    assert r"cannot name" in result.err
    assert r"b\udcff.gguf" in result.err
    assert route.read_text() == "as it was"


def test_what_is_printed_for_a_terminal_moves_no_cursor(small: Path, tmp_path: Path) -> None:
    name = tmp_path / "m\x1b[31m\u061c\u202e\x07.gguf"
    shutil.copy(small, name)
    result = forked(["inspect", name], out=tmp_path)
    assert result.code == 0
    assert rb"m\x1b[31m\u061c\u202e\x07.gguf" in result.out
    assert b"\x1b" not in result.out
    missing = forked(["inspect", f"{name}\nERROR forged"], out=tmp_path)
    assert rb"m\x1b[31m\u061c\u202e\x07.gguf\nERROR forged" in missing.err
    assert missing.err.count(b"\n") == 2


def test_a_terminal_shows_no_control_characters_and_a_file_gets_them_all(tmp_path: Path) -> None:
    argv = ["fixture", tmp_path / "m\x1b[2J.gguf", "--preset", "min", "--layers", 1]
    assert b"m\x1b[2J.gguf: " in forked(argv, out=tmp_path).out
    terminal, end = os.openpty()
    try:
        assert forked(argv, out=tmp_path, stdout=end).code == 0
        shown = os.read(terminal, 4096)
    finally:
        os.close(terminal)
        os.close(end)
    assert rb"m\x1b[2J.gguf: " in shown
    assert b"\x1b" not in shown


@pytest.mark.parametrize("argv", [["inspect", "a", "\x1b[2J"], ["\x1b[2J"], ["stage", "m", "--numerics", "\x1b[2J"]])
def test_arguments_that_are_refused_move_no_cursor(argv: list[str], run: Callable[..., Result]) -> None:
    result = run(*argv)
    assert result.code == 2
    assert "\x1b" not in result.err


# --- prompts ---


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """``stdin(data)``: standard input is a file with that in it."""
    opened = []

    def give(data: bytes) -> None:
        path = tmp_path / "stdin.txt"
        path.write_bytes(data)
        opened.append(path.open())
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield give
    for file in opened:
        file.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"caf\xe9", "is not UTF-8: byte 0xe9 at offset 3"),
        (b"caf\xe9 au lait", "byte 0xe9 at offset 3"),
        ("😀".encode()[:3], "byte 0xf0 at offset 0 (unexpected end of data)"),
        (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5"),
        (b"ab\xed\xa0\x80", "byte 0xed at offset 2"),  # a surrogate, as some programs write it
        ("text".encode("utf-16"), "is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff\0t", "is UTF-16"),
        ("text".encode("utf-32"), "is UTF-32"),
        (b"", "standard input is empty"),
        (b"\xef\xbb\xbf", "standard input is empty"),
    ],
)
def test_a_prompt_that_is_not_utf8_is_refused_with_its_place(
    data: bytes, said: str, stdin: Callable[[bytes], None]
) -> None:
    stdin(data)
    with pytest.raises(InputError) as refused:
        streams.read_prompt("-")
    assert said in str(refused.value)


def test_an_input_without_an_end_is_refused(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result], small: Path, tmp_path: Path
) -> None:
    zeros = Path("/dev/zero")
    with zeros.open() as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(InputError, match="standard input is not a prompt: it has more than 67108864 bytes"):
            streams.read_prompt("-")
    result = run("logits", "--model", small, "--tokens", zeros, "--out", tmp_path / "x.f32")
    assert (result.code, "/dev/zero is not a file of token ids: it has more than" in result.err) == (2, True)
    assert run("keys", "a", "--out", tmp_path / "keys").code == 0
    (tmp_path / "keys" / "ca.pem").unlink()
    (tmp_path / "keys" / "ca.pem").symlink_to(zeros)
    result = run("keys", "b", "--out", tmp_path / "keys")
    assert (result.code, "is not a certificate: it has more than 1048576 bytes" in result.err) == (2, True)
    for command in (["up", zeros], ["doctor", "--route", zeros], ["generate", "--route", zeros, "--prompt", "x"]):
        assert run(*command).code == 2


def test_a_lack_of_memory_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise MemoryError

    assert run_command("dgr", command) == 1
    told = capsys.readouterr().err
    assert (told.count("\n"), "may take no more memory" in told, "free some" in told) == (2, True, True)


@pytest.mark.parametrize("text", ["é漢😀", "a\r\nb\rc\n", "nul\0", " ", "\ufeffa".encode()[3:].decode() + "\ufeff"])
def test_every_other_text_arrives_as_it_is(text: str, stdin: Callable[[bytes], None]) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        stdin(mark + text.encode())
        assert streams.read_prompt("-") == text
    assert streams.read_prompt(text) == text


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (os.fsdecode(b"caf\xe9"), "--prompt is not UTF-8: byte 0xe9 follows 3 characters"),
        ("\ud83d", "--prompt is not UTF-8: U+D83D follows 0 characters"),
        ("", "--prompt is empty"),
    ],
)
def test_so_is_one_on_the_command_line(prompt: str, said: str, run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("generate", "--model", tmp_path / "not looked for", "--prompt", prompt)
    assert result.code == 2
    assert said in result.err


async def test_so_is_an_empty_one_in_a_program_but_for_a_turn_that_has_something_before_it(small: Path) -> None:
    async with dgr.open_pipeline(small) as pipeline, pipeline.session() as session:
        nothing: tuple[dict[str, Any], ...] = ({}, {"transcript": []})
        for given in nothing:
            with pytest.raises(InputError, match="the prompt is empty, and there is nothing before it"):
                session.generate("", **given)
        assert session.transcript == []
        assert [token.id async for token in session.generate("fox", max_tokens=1)]
        assert [token.id async for token in session.generate("", max_tokens=1)]


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--temp", "-1", "temperature is -1; it must be 0 or more"),
        ("--temp", "nan", "temperature"),
        ("--top-p", "1.5", "top_p is 1.5; it must be above 0 and at most 1"),
        ("--top-p", "0", "top_p is 0"),
        ("--min-p", "2", "min_p is 2"),
        ("--repeat-penalty", "0", "repeat_penalty is 0"),
        ("--top-k", "-1", "top_k"),
        ("--seed", "-1", "seed"),
    ],
)
def test_a_sampling_flag_out_of_range_is_refused(
    flag: str, value: str, said: str, run: Callable[..., Result], small: Path
) -> None:
    result = run("generate", "--model", small, "--prompt", "fox", *CONTEXT, f"{flag}={value}", "--json")
    assert result.code == 2
    assert said in result.err
    assert result.out == ""


# --- one stream, one format ---


@pytest.mark.parametrize("out", ["-", "/dev/stdout", "/proc/self/fd/1"])
def test_json_is_alone_on_its_stream(out: str, small: Path, tmp_path: Path) -> None:
    result = forked([*COMMANDS["plan"][1](small, tmp_path), "-o", out, "--json"], out=tmp_path)
    assert result.code == 2
    assert result.out == b""
    assert b"--json and the route file would share standard output" in result.err


@pytest.mark.parametrize("out", ["-", "/dev/stdout"])
def test_a_route_file_on_standard_output_is_alone_there(out: str, small: Path, tmp_path: Path) -> None:
    import tomllib

    result = forked([*COMMANDS["plan"][1](small, tmp_path), "-o", out], out=tmp_path)
    assert result.code == 0
    assert len(tomllib.loads(result.out.decode())["stage"]) == 2


# --- logs ---


@EVERY
def test_the_log_level_may_stand_before_the_command_and_after_it(name: str, tmp_path: Path) -> None:
    argv = [str(word) for word in COMMANDS[name][1](tmp_path / "m", tmp_path)]
    assert _parser().parse_args(argv).log == "warning"
    assert _parser().parse_args(["--log", "info", *argv]).log == "info"
    assert _parser().parse_args([*argv, "--log", "debug"]).log == "debug"
    assert _parser().parse_args(["--log", "info", *argv, "--log=debug"]).log == "debug"


def test_a_level_that_is_none_is_refused(run: Callable[..., Result]) -> None:
    result = run("inspect", "v4-flash", "--log", "loud")
    assert result.code == 2
    assert "--log 'loud' is none of debug, info, warning, error" in result.err


# --- exit codes ---


def _because(error: DgrError, cause: BaseException) -> DgrError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), 2),
        (ArtifactError("damaged"), 2),
        (_because(ArtifactError("missing"), FileNotFoundError(2, "no")), 2),
        (_because(ArtifactError("bad disk"), OSError(5, "I/O")), 1),
        (_because(InputError("choose another place"), OSError(28, "full")), 2),
        (_because(EngineError("deep"), _because(ArtifactError("x"), OSError(24, "too many open files"))), 1),
        (_because(ArtifactError("deep"), _because(ArtifactError("x"), OSError(24, "too many open files"))), 1),
        (EngineError("native"), 1),
        (LinkBroken("gone"), 1),
        (FileNotFoundError(2, "no"), 2),
        (PermissionError(13, "no"), 2),
        (IsADirectoryError(21, "no"), 2),
        (OSError(28, "full"), 1),
        (ConnectionRefusedError(111, "no"), 1),
    ],
)
def test_an_exit_code_says_whose_act_it_was(error: DgrError | OSError, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"no model", "folder"])
@pytest.mark.parametrize("name", ["generate", "logits", "trace", "plan", "slice", "stage", "up", "inspect"])
def test_a_missing_or_damaged_model_is_bad_input(
    name: str, content: bytes | str | None, run: Callable[..., Result], tmp_path: Path
) -> None:
    model = tmp_path / "m.gguf"
    if content == "folder":
        model.mkdir()
    elif isinstance(content, bytes):
        model.write_bytes(content)
    result = run(*COMMANDS[name][1](model, tmp_path))
    assert result.code == 2
    said, step = result.err.splitlines()
    assert "m.gguf" in said or name == "up"
    assert step.startswith("dgr: next: ")


# --- signs of life ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Patient(progress.Activity):
    """A work that does not end before its clock has ticked once, unless what is printed shows that it goes on."""

    def __init__(self, *about: Any) -> None:
        self.drawn = threading.Event()
        super().__init__(*about)

    def _draw(self) -> None:
        super()._draw()
        self.drawn.set()

    def end(self) -> None:
        assert self._rests or self.drawn.wait(20)
        super().end()


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("generate", ("--chunk", 1, "--prompt", "The quick brown fox jumps"), "prefill [###"),
        ("generate", ("--json",), "% of 4 tokens"),
        ("generate", ("--verify",), "running the model again to compare: "),
        ("generate", (), "opening the stages: "),
        ("logits", ("--chunk", 2), "prefill [###"),
        ("plan", (), "counting the buffers: "),
        ("slice", (), "writing the slice"),
        ("stage", ("--memory", "1GiB"), "counting the buffers: "),
        ("stage", (), "loading the weights: "),
        ("doctor", (), "examining the stages: "),
        ("fixture", (), "writing the model"),
    ],
)
def test_a_terminal_shows_what_a_command_is_busy_with(
    name: str,
    flags: tuple[str, ...],
    said: str,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stdin: Callable[[bytes], None],
) -> None:
    """The clock of the display ticks a thousand times as fast, so that nothing has to take seconds."""

    async def at_once(*_: object) -> None: ...

    stdin(b"")
    terminal = Terminal()
    monkeypatch.setattr(dgr.cli.stage, "_until_told", at_once)
    monkeypatch.setattr(progress, "_PATIENCE", 0.001)
    monkeypatch.setattr(progress, "Activity", Patient)
    monkeypatch.setattr(sys, "stderr", terminal)
    argv = [str(word) for word in [*COMMANDS[name][1](small, tmp_path), *flags] if word != "--until-stdin-closes"]
    assert main(argv) == COMMANDS[name][0]
    drawn = terminal.getvalue()
    assert said in drawn
    assert drawn.endswith("\r\x1b[K")
    assert max(map(len, drawn.replace("\x1b[K", "").split("\r"))) < 80


def test_a_display_is_wiped_before_anything_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams on one terminal, as a person sees it: answers are never inside a bar."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    with progress.progress_bar("prefill", str) as activity:
        assert activity is not None
        activity(1, 2)
        activity.say("one", end="", rest=True)
        activity.say(" word", end="", rest=True)
        activity(1, 2)  # the route was lost: a prefill again, in mid-answer
        activity.say(" more", end="\n", rest=True)
    lines = [text for line in terminal.getvalue().split("\n") if (text := line.rpartition("\x1b[K")[2])]
    assert lines == ["one word", " more"]


def test_up_shows_that_stages_are_starting_until_all_are_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, tails = StageRef("h:1", LayerRange(0, 3)), StageRef("t:1", LayerRange(3, 7))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.progress_bar("starting the stages") as activity:
        assert activity is not None
        report = _Reporter(2, True, activity)
        rests = []
        for ref, event in ((heads, "ready"), (tails, "ready"), (heads, "ended"), (heads, "ready")):
            report(ref, event)
            rests.append(activity._rests)
    assert rests == [False, True, False, True]
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == [
        "ready",
        "ready",
        "ended",
        "ready",
    ]


def test_what_up_tells_is_json_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    report = _Reporter(1, True, None)
    report(StageRef("h:1", LayerRange(0, 7)), "ended", code=1, again_in_seconds=float("inf"))
    assert json.loads(capsys.readouterr().out) == {
        "stage": "h:1", "layers": "0:7", "event": "ended", "code": 1, "again_in_seconds": None,
    }  # fmt: skip
