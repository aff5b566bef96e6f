"""The one way to write a file: complete or not at all, under any name, whatever ends the writer."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dgr.core.files import outputs
from dgr.core.files.outputs import NewFile, removed_on_signals, write_file, write_new_files, writing
from dgr.core.files.targets import find_target
from dgr.errors import InputError
from dgr.testing.limits import limited_files

NOBODY = 65534


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_half(target: Path, failure: type[BaseException]) -> None:
    with writing(target) as out:
        out.write(b"new")
        raise failure


@contextmanager
def another_user() -> Iterator[None]:
    """Somebody without the rights of root."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# --- complete or not at all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_a_failed_block_leaves_nothing_and_the_old_file_stays(tmp_path: Path, failure: type[BaseException]) -> None:
    target = tmp_path / "x"
    for old in (None, b"old"):
        if old is not None:
            target.write_bytes(old)
        with pytest.raises(failure):
            write_half(target, failure)
        assert entries(tmp_path) == ([] if old is None else ["x"])
    assert target.read_bytes() == b"old"
    with writing(target) as out:
        out.write(b"new")
        assert target.read_bytes() == b"old"
    assert (entries(tmp_path), target.read_bytes()) == (["x"], b"new")


def test_writers_at_once_do_not_share_a_file(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with writing(target) as first, writing(target) as second:
        first.write(b"first" * 9999)
        second.write(b"second")
        with writing(target) as third:
            third.write(b"third")
        assert target.read_bytes() == b"third"
    assert (entries(tmp_path), target.read_bytes()) == (["x"], b"first" * 9999)


@pytest.mark.parametrize("name", ["x" * 255, "漢" * 85, os.fsdecode(b"\xff" * 255), "-rf", "a b\n'$x", ".hidden"])
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / name, b"new")
    write_file(tmp_path / name, b"newer")
    assert entries(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"newer"


def test_a_disk_that_fills_up_is_told_with_the_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    for n_bytes in (100, 100_000):  # kept in memory until the end, or not
        with (
            limited_files(64),
            pytest.raises(InputError, match=r"/x cannot be written: File too large; choose another"),
        ):
            write_file(tmp_path / "x", bytes(n_bytes))
    assert (entries(tmp_path), (tmp_path / "x").read_bytes()) == (["x"], b"old")


def test_a_disk_that_fails_at_the_end_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network file systems do: they take the bytes and say later that there is no room."""
    failures = iter([errno.EINVAL, errno.EINVAL, errno.EDQUOT])  # of file and folder; then of the file

    def fail(_descriptor: int) -> None:
        number = next(failures)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    write_file(tmp_path / "x", b"where nothing can be brought to the disk on demand")
    with pytest.raises(InputError, match="quota exceeded"):
        write_file(tmp_path / "x", b"new")
    assert (entries(tmp_path), (tmp_path / "x").read_bytes()[:5]) == (["x"], b"where")


@pytest.mark.parametrize("missing", ["fchmod", "fchown", "fsync"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_what_a_file_system_does_not_know_loses_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, number: int
) -> None:
    """As on network shares and memory cards: no owners, no modes, nothing brought to the disk on demand."""
    target = tmp_path / "x"
    target.write_bytes(b"old")
    target.chmod(0o640)
    if not os.geteuid():
        os.chown(target, NOBODY, NOBODY)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, missing, fail)
    write_file(target, b"new")
    assert (entries(tmp_path), target.read_bytes()) == (["x"], b"new")
    assert stat.S_IMODE(target.stat().st_mode) == (0o600 if missing == "fchmod" else 0o640)


def test_the_mode_of_a_file_stays_and_its_content_is_never_wider_open(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")
    for mode in (0o600, 0o640, 0o444, 0o755):
        target.chmod(mode)
        with writing(target) as out:
            (part,) = set(tmp_path.iterdir()) - {target}
            assert stat.S_IMODE(part.stat().st_mode) & ~mode == 0
            out.write(b"new")
        assert stat.S_IMODE(target.stat().st_mode) == mode
    write_file(tmp_path / "key", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="files can be given to others by root alone")
def test_a_file_of_another_user_stays_theirs(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")
    os.chown(target, NOBODY, NOBODY)
    target.chmod(0o640)
    write_file(target, b"new")
    found = target.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (NOBODY, NOBODY, 0o640)


def test_what_became_something_else_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(InputError, match="meanwhile it became something else"))
        stack.enter_context(writing(tmp_path / "x")).write(b"new")
        os.mkfifo(tmp_path / "x")
    assert entries(tmp_path) == ["x"]
    assert stat.S_ISFIFO((tmp_path / "x").stat().st_mode)


def test_a_pipe_that_does_not_block_is_waited_for(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    content, got = os.urandom(1 << 20), bytearray()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)

    def read() -> None:
        while part := os.read(reader, 1000):
            got.extend(part)

    taking = threading.Thread(target=read)
    taking.start()
    write_file(f"/dev/fd/{writer}", content)
    os.close(writer)
    taking.join()
    os.close(reader)
    assert got == content


def test_a_reader_that_went_away_is_a_broken_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        write_file(f"/proc/self/fd/{writer}", b"new")
    os.close(writer)


# --- rights -----------------------------------------------------------------------------------------------------------


def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with another_user(), pytest.raises(InputError, match=r"cannot be written: (no file can be made|Permission)"):
            find_target(tmp_path / "x")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="somebody else's file is needed")
def test_a_file_of_somebody_else_under_the_sticky_bit_is_refused() -> None:
    """A rename would fail, after the work."""
    folder = Path(tempfile.mkdtemp())  # a test's own folder lets nobody else through
    try:
        (folder / "x").write_bytes(b"old")
        folder.chmod(0o1777)
        with another_user(), pytest.raises(InputError, match="it belongs to another user"):
            find_target(folder / "x")
        find_target(folder / "x")
    finally:
        (folder / "x").unlink()
        folder.rmdir()


def test_a_file_that_is_mounted_by_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers are given single files; a rename onto one fails, after the work."""
    (tmp_path / "a b").write_bytes(b"old")
    line = f"36 35 0:32 /x {tmp_path}/a\\040b rw,relatime - ext4 /dev/vda rw\n"
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: line.encode() if "mountinfo" in str(self) else real(self))
    with pytest.raises(InputError, match="it is mounted by itself"):
        find_target(tmp_path / "a b")
    find_target(tmp_path / "b")


# --- what ends a writer -----------------------------------------------------------------------------------------------

# However the tests were started (nohup, in the background, under coverage), each signal is answered as in a fresh shell.
KILLED = """
import os, signal, sys
from dgr.core.files.outputs import writing
for number, answer in {{"TERM": signal.SIG_DFL, "HUP": signal.SIG_DFL, "INT": signal.default_int_handler}}.items():
    signal.signal(getattr(signal, "SIG" + number), answer)
{before}
with writing(sys.argv[1]) as out:
    out.write(bytes(100_000))
    os.kill(os.getpid(), {signal})
    {inside}
"""


def killed(target: Path, number: int, before: str = "", inside: str = "") -> int:
    script = KILLED.format(signal=number, before=before, inside=inside)
    return subprocess.run([sys.executable, "-c", script, str(target)], stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_writer_that_is_told_to_end_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "x").write_bytes(b"old")
    assert killed(tmp_path / "x", number) == -number
    assert (entries(tmp_path), (tmp_path / "x").read_bytes()) == (["x"], b"old")


def test_a_program_that_answers_the_signal_itself_is_left_to_it(tmp_path: Path) -> None:
    own = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    assert killed(tmp_path / "x", signal.SIGTERM, own) == 7
    assert entries(tmp_path) == []
    assert killed(tmp_path / "x", signal.SIGHUP, "signal.signal(signal.SIGHUP, signal.SIG_IGN)") == 0  # nohup
    assert entries(tmp_path) == ["x"]


def test_the_answer_to_signals_is_as_it_was(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in outputs._DEADLY]
    with writing(tmp_path / "x"), writing(tmp_path / "y"):
        pass
    assert [signal.getsignal(number) for number in outputs._DEADLY] == before


def test_a_child_that_is_told_to_end_removes_nothing_of_its_parent(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as out:
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        out.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    assert killed(tmp_path / "x", signal.SIGKILL) == -signal.SIGKILL
    (left,) = entries(tmp_path)
    assert re.fullmatch(r"\.x\.[0-9a-f]{8}-\d+-[0-9a-f]{8}\.part", left)
    host, pid = left.split(".")[2].split("-")[:2]
    spared = [
        f".x.{'0' * 8}-{pid}-{'0' * 8}.part",  # of another host, whose process ids we do not know
        f".x.{host}-{os.getppid()}-{'0' * 8}.part",  # of a process that lives
        f".x.{pid}.part",  # not ours
        "x.part",
    ]
    for name in spared:
        (tmp_path / name).touch()
    (tmp_path / f".y.{host}-{os.getpid()}-{'0' * 8}.part").touch()  # our id, which was another's before a restart
    with writing(tmp_path / "first"), writing(tmp_path / "second"):
        assert len(entries(tmp_path)) == len(spared) + 2
    assert set(entries(tmp_path)) == {*spared, "first", "second"}


def test_what_a_writer_left_that_nobody_waited_for_is_removed(tmp_path: Path) -> None:
    """It is a zombie: its process id is taken, though it is dead. In containers that may be for ever."""
    script = KILLED.format(signal=signal.SIGKILL, before="", inside="")
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "x")])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    write_file(tmp_path / "y", b"")
    assert entries(tmp_path) == ["y"]
    child.wait()


def test_a_folder_of_files_goes_with_a_signal(tmp_path: Path) -> None:
    """What native code is given to open lies in such a folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").symlink_to("/nowhere")
    (folder / "b").write_bytes(b"x")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with removed_on_signals(folder):
            signal.raise_signal(signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert entries(tmp_path) == []


# --- several files ----------------------------------------------------------------------------------------------------


def pair(folder: Path) -> list[NewFile]:
    return [NewFile(folder / "ca.pem", b"certificate"), NewFile(folder / "ca.key", b"k" * 100, mode=0o600)]


def test_several_files_appear_together(tmp_path: Path) -> None:
    write_new_files(pair(tmp_path))
    assert entries(tmp_path) == ["ca.key", "ca.pem"]
    assert (tmp_path / "ca.pem").read_bytes() == b"certificate"
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    assert (tmp_path / "ca.key").stat().st_nlink == 1


@pytest.mark.parametrize("taken", ["file", "link", "dangling link", "folder"])
@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_a_name_that_is_taken_leaves_none(tmp_path: Path, name: str, taken: str) -> None:
    (tmp_path / "old").write_bytes(b"old")
    if taken == "file":
        (tmp_path / name).write_bytes(b"old")
    elif taken == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("old" if taken == "link" else "absent")
    with pytest.raises(InputError, match=f"{name} cannot be written: (File exists|it is a folder)"):
        write_new_files(pair(tmp_path))
    assert entries(tmp_path) == sorted(["old", name])
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_full_disk_leaves_none(tmp_path: Path) -> None:
    with limited_files(64), pytest.raises(InputError, match=r"ca.key cannot be written: File too large"):
        write_new_files(pair(tmp_path))
    assert entries(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_systems_without_hard_links_will_do(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_new_files(pair(tmp_path))
    assert entries(tmp_path) == ["ca.key", "ca.pem"]
    with pytest.raises(InputError, match="File exists"):
        write_new_files(pair(tmp_path))
    assert entries(tmp_path) == ["ca.key", "ca.pem"]
    (tmp_path / "ca.pem").unlink()
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(InputError, match="cannot be written"):
        write_new_files(pair(tmp_path)[:1])
    assert entries(tmp_path) == ["ca.key"]


def test_a_signal_waits_until_all_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.hardlink_to

    def interrupted(self: Path, other: Path) -> None:
        real(self, other)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Path, "hardlink_to", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_new_files(pair(tmp_path))
    assert entries(tmp_path) == ["ca.key", "ca.pem"]
