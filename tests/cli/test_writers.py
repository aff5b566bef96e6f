"""Every command that writes a file, held against every kind of place it may be sent to."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from attrs import frozen
from cli.commands import Result
from fixture_types import Model

import dgr.cli.fixture
import dgr.cli.logits
import dgr.cli.plan
import dgr.cli.trace
from dgr.artifact.artifact import Artifact
from dgr.errors import WireError
from dgr.testing.limits import limited_files
from dgr.testing.waits import until

Run = Callable[..., Result]
N_TOKENS = 5


@frozen
class Writer:
    """A command line, the output's name to be appended or put in its place."""

    words: tuple[str, ...]
    #: Whether it writes into what is not a file; it refuses otherwise.
    streams: bool = True


WRITERS = {
    "logits": Writer(("logits", "--model", "MODEL", "--tokens", "TOKENS", "--ctx", "256", "--out", "OUT")),
    "slice": Writer(("slice", "MODEL", "--layers", "1:3", "-o", "OUT")),
    "manifest": Writer(("inspect", "MODEL", "--identity", "--manifest", "OUT")),
    "plan": Writer(("plan", "MODEL", "--stages", "2", "--ctx", "64", "-o", "OUT")),
    "trace": Writer(("trace", "--model", "MODEL", "--ctx", "256", "--prompt", "x", "-n", "1", "-o", "OUT")),
    "fixture": Writer(("fixture", "OUT", "--preset", "min", "--layers", "1"), streams=False),
}
#: What costs: it must not have begun when a place is refused.
WORK = {
    "logits": (dgr.cli.logits, "open_local"),
    "slice": (Artifact, "manifest"),
    "manifest": (Artifact, "read_manifest"),
    "plan": (dgr.cli.plan, "estimate_memory"),
    "trace": (dgr.cli.trace, "open_either"),
    "fixture": (dgr.cli.fixture, "write_fixture"),
}
STREAMS = [name for name, writer in WRITERS.items() if writer.streams]


@pytest.fixture(scope="module")
def words(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """``words(writer, out)``: the command line of a writer that writes to ``out``."""
    tokens = tmp_path_factory.mktemp("tokens") / "t.i32"
    tokens.write_bytes(array("i", range(N_TOKENS)).tobytes())

    def line(name: str, out: object) -> list[str]:
        # A route file's paths are relative to it, so every file that a test writes lies in the same folder.
        facts = {"MODEL": str(model("f32", preset="min", layers=4)), "TOKENS": str(tokens), "OUT": str(out)}
        return [facts.get(word, word) for word in WRITERS[name].words]

    return line


@pytest.fixture(autouse=True)
def the_same_trace_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two requests take the same time."""
    monkeypatch.setattr(dgr.cli.trace, "perfetto_json", lambda _: b'{"traceEvents": []}' * 9)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The folder that is written into."""
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def write(run: Run, words: Callable[..., list[str]], there: Path) -> Callable[..., bytes]:
    """``write(writer, out, file)``: run a writer well, and what it wrote into ``file``."""

    def to(name: str, out: Path, file: Path | None = None) -> bytes:
        result = run(*words(name, out))
        assert result.code == 0, result.err
        return (file or out).read_bytes()

    return to


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def node(path: Path, kind: int, device: tuple[int, int] = (0, 0)) -> Path:
    try:
        os.mknod(path, kind | 0o666, os.makedev(*device))
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as refused:
        if refused.errno not in (errno.ENXIO,):  # a pipe without a reader
            pytest.skip(f"no device node can be made and used here: {refused}")
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_links_stay_and_what_they_lead_to_is_replaced(name: str, there: Path, write: Callable[..., bytes]) -> None:
    expected = write(name, there / "plain")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((there / "plain").stat().st_mode) == 0o666 & ~umask
    (there / "old").write_bytes(b"old content")
    (there / "old").chmod(0o640)
    (there / "first").symlink_to("second")  # relative to its own folder
    (there / "second").symlink_to(there / "old")
    (there / "dangling").symlink_to("new")
    for out, file in (("first", "old"), ("dangling", "new")):
        assert write(name, there / out, there / file) == expected
        assert not (there / file).is_symlink()
    assert all((there / link).is_symlink() for link in ("first", "second", "dangling"))
    assert stat.S_IMODE((there / "old").stat().st_mode) == 0o640 or name == "fixture"
    assert entries(there) == ["dangling", "first", "new", "old", "plain", "second"]


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "full device", "open descriptor"])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_no_file_is_written_into_or_refused_and_stays(
    name: str, kind: str, there: Path, run: Run, words: Callable[..., list[str]], write: Callable[..., bytes]
) -> None:
    expected = write(name, there / "plain") if WRITERS[name].streams else b""
    (there / "plain").unlink(missing_ok=True)
    out, got = there / "out", bytearray()
    reader, writer = os.pipe()
    if kind == "pipe":
        os.mkfifo(out)
        os.close(reader)
        reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        holder = os.open(out, os.O_WRONLY)  # the reader sees its end when this is closed, too
        os.close(writer)
        writer = holder
    elif kind == "open descriptor":
        out.symlink_to(f"/proc/self/fd/{writer}")
    elif kind == "full device":
        node(out, stat.S_IFCHR, (1, 7))
    else:
        node(there / "null", stat.S_IFCHR, (1, 3))
        (there / "null").rename(out) if kind == "device" else out.symlink_to("null")
    before = (out.lstat().st_mode, out.lstat().st_rdev, out.lstat().st_ino, entries(there))

    def read() -> None:
        while part := os.read(reader, 1 << 16):
            got.extend(part)

    taking = threading.Thread(target=read)
    taking.start()
    result = run(*words(name, out))
    os.close(writer)
    taking.join()
    os.close(reader)
    assert (out.lstat().st_mode, out.lstat().st_rdev, out.lstat().st_ino, entries(there)) == before
    if not WRITERS[name].streams or kind == "full device":
        assert result.code == 2
        assert f"{out} cannot be written" in result.err
        assert got == b""
    else:
        assert result.code == 0, result.err
        assert got == (expected if kind in ("pipe", "open descriptor") else b"")


def _refusals(there: Path) -> Iterator[tuple[str, object, str]]:
    (there / "folder").mkdir()
    (there / "link").symlink_to("folder")
    (there / "circle").symlink_to("circle")
    (there / "astray").symlink_to("absent/file")
    (there / "file").write_bytes(b"old")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(there / "socket"))
    listening.close()
    yield "a folder", there / "folder", "it is a folder"
    yield "a folder to be", f"{there}/new/", "it names a folder"
    yield "a link to a folder", there / "link", "it is a folder"
    yield "a missing folder", there / "absent" / "file", "there is no folder"
    yield "a link into a missing folder", there / "astray", "there is no folder"
    yield "a file as folder", there / "file" / "x", "Not a directory"
    yield "a circle", there / "circle", "Too many levels"
    yield "a socket", there / "socket", "it is a socket"
    yield "a long name", there / ("x" * 300), "File name too long"
    yield "a closed descriptor", "/proc/self/fd/987", "no such descriptor is open"
    yield "a block device", there / "block", "it is a block device"


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    name: str, there: Path, run: Run, words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*WORK[name], lambda *_, **__: pytest.fail("it began"))
    wrong = list(_refusals(there))
    if os.geteuid() == 0:
        os.mknod(there / "block", stat.S_IFBLK | 0o600, os.makedev(7, 250))
    else:
        wrong.pop()
    before = entries(there)
    for what, out, why in wrong:
        result = run(*words(name, out))
        assert result.code == 2, what
        assert why in result.err, what
        assert "cannot be written" in result.err, what
    assert entries(there) == before
    assert (there / "file").read_bytes() == b"old"


@pytest.mark.parametrize("how", ["its own name", "a symbolic link", "a hard link"])
@pytest.mark.parametrize("name", [name for name, writer in WRITERS.items() if "MODEL" in writer.words])
def test_what_is_read_is_not_written_over(
    name: str, how: str, there: Path, run: Run, words: Callable[..., list[str]], model: Model
) -> None:
    original = model("f32", preset="min", layers=4)
    copy, out = there / "model.gguf", there / "out"
    shutil.copy(original, copy)
    if how == "a symbolic link":
        out.symlink_to(copy)
    elif how == "a hard link":
        out.hardlink_to(copy)
    else:
        out = copy
    line = [str(copy) if word == str(original) else word for word in words(name, out)]
    result = run(*line)
    assert (result.code, "it is what is read" in result.err) == (2, True)
    assert copy.read_bytes() == original.read_bytes()
    if "TOKENS" in WRITERS[name].words:
        tokens = Path(line[line.index("--tokens") + 1])
        before = tokens.read_bytes()
        assert run(*words(name, tokens)).code == 2
        assert tokens.read_bytes() == before


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    name: str, there: Path, run: Run, words: Callable[..., list[str]], model: Model
) -> None:
    model("f32", preset="min", layers=4)
    out = there / "out"
    for old in (b"old content", None):
        if old is not None:
            out.write_bytes(old)
        with limited_files(64):
            result = run(*words(name, out))
        assert (result.code, "File too large" in result.err) == (2, True)
        assert entries(there) == (["out"] if old is not None else [])
        assert old is None or out.read_bytes() == old
        out.unlink(missing_ok=True)


@pytest.mark.parametrize("name", WRITERS)
def test_standard_output_takes_the_bytes_and_nothing_else(
    name: str,
    there: Path,
    run: Run,
    words: Callable[..., list[str]],
    write: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(there)  # where a printed route file is meant to be put
    expected = write(name, there / "plain") if WRITERS[name].streams else b""
    taken, ours = there / "taken", os.dup(1)
    with taken.open("wb") as stdout:
        stdout.write(b"before ")  # of whoever shares the descriptor
        stdout.flush()
        os.dup2(stdout.fileno(), 1)
        try:
            result = run(*words(name, "/dev/stdout"))
        finally:
            os.dup2(ours, 1)
            os.close(ours)
    if not WRITERS[name].streams:
        assert (result.code, "this is none" in result.err) == (2, True)
    elif name == "plan":  # as with -o -
        assert (result.code, result.out.encode()) == (0, expected)
        expected = b""
    else:
        assert (result.code, result.out) == (0, "")
        assert "/dev/stdout" in result.err
    assert taken.read_bytes() == b"before " + expected


async def test_a_run_that_is_told_to_end_leaves_nothing(
    there: Path, tmp_path: Path, words: Callable[..., list[str]]
) -> None:
    """In the middle of logits, which is the longest of the works; the old file stays."""
    many, out = tmp_path / "many.i32", there / "out"
    many.write_bytes(array("i", [1] * 100_000).tobytes())
    out.write_bytes(b"old")
    command = [word.replace("256", "131072") for word in words("logits", out)]
    command[command.index("--tokens") + 1] = str(many)
    # Nobody but dgr answers the signal there: coverage would.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "dgr", *command], stdout=subprocess.DEVNULL, env=environment
    )
    try:
        await until(lambda: len(entries(there)) > 1 or process.returncode is not None, 60, "the unfinished output")
        process.terminate()
        with trio.fail_after(60):
            assert await process.wait() == -signal.SIGTERM
    finally:
        process.kill()
    assert entries(there) == ["out"]
    assert out.read_bytes() == b"old"


@pytest.mark.slow
def test_two_at_once_leave_the_whole_of_one(
    there: Path, model: Model, words: Callable[..., list[str]], write: Callable[..., bytes]
) -> None:
    other = str(model("f32", preset="min", layers=4, seed=1))
    commands = [words("logits", there / "out"), words("logits", there / "out")]
    commands[1][commands[1].index("--model") + 1] = other
    running = [
        subprocess.Popen([sys.executable, "-m", "dgr", *command], stdout=subprocess.DEVNULL) for command in commands
    ]
    assert [process.wait(120) for process in running] == [0, 0]
    got = (there / "out").read_bytes()
    assert entries(there) == ["out"]
    ours = write("logits", there / "plain")
    if got != ours:  # then it is the other's
        assert len(got) == len(ours)
        run_other = [word if word != str(there / "out") else str(there / "theirs") for word in commands[1]]
        subprocess.run([sys.executable, "-m", "dgr", *run_other], check=True, stdout=subprocess.DEVNULL)
        assert got == (there / "theirs").read_bytes()


def test_rows_that_come_again_are_written_once_and_a_gap_is_an_error(tmp_path: Path) -> None:
    """After a loss a pipeline gives rows again, with the same bits; cut into other chunks, perhaps."""
    with (tmp_path / "x").open("wb") as file:
        rows = dgr.cli.logits._Rows(file, 4)
        for position, values in (
            (0, b"00001111"),
            (0, b"0000"),
            (1, b"11112222"),
            (3, b"3333"),
            (0, b"00001111"),
            (4, b""),
        ):
            rows.write(position, memoryview(values))
        with pytest.raises(WireError, match="rows of position 5 came, but those from 4 on are due"):
            rows.write(5, memoryview(b"5555"))
    assert (tmp_path / "x").read_bytes() == b"0000111122223333"
