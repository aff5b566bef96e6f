"""The cache folder: without a home, without rights, without locks it costs time only."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgr.core import cache_dir as cache
from dgr.core.cache_dir import cache_dir, keep, one_at_a_time
from dgr.testing.limits import limited_files


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("DGR_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._homeless.cache_clear()
    yield
    cache._homeless.cache_clear()


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry, as containers run under."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/home/somebody/.cache/dgr")
    for relative in ("", "cache", "./cache"):  # such a value should be ignored
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_dir() == Path("/home/somebody/.cache/dgr")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_dir() == Path("/var/cache/dgr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DGR_CACHE_DIR", "own")
    assert cache_dir() == tmp_path / "own"


def test_without_a_home_it_is_under_the_temporary_folder_and_that_is_told_once(
    homeless: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tmp_path / f"dgr-{os.geteuid()}"
    assert [cache_dir(), cache_dir()] == [expected, expected]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "DGR_CACHE_DIR" in record.getMessage()
    assert str(expected) in record.getMessage()
    assert expected.stat().st_mode & 0o777 == 0o700
    assert keep(cache_dir() / "numerics" / "x", b"kept") is None
    cache._homeless.cache_clear()  # another process
    assert (cache_dir() / "numerics" / "x").read_bytes() == b"kept"


@pytest.mark.parametrize("theirs", ["a link", "a file", "writable by all", "of another user", "no temporary folder"])
def test_what_another_user_could_write_is_not_trusted(
    homeless: None, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / f"dgr-{os.geteuid()}"
    if theirs == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to("elsewhere")
    elif theirs == "a file":
        place.touch()
    elif theirs == "writable by all":
        place.mkdir()
        place.chmod(0o777)
    elif theirs == "of another user":
        other = os.geteuid() + 1
        (tmp_path / f"dgr-{other}").mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: other)
    else:

        def none() -> str:
            raise FileNotFoundError("No usable temporary directory found")

        monkeypatch.setattr(tempfile, "gettempdir", none)
    folder = cache_dir()
    assert not folder.is_relative_to(tmp_path)
    assert keep(folder / "numerics" / "x", b"lost") is not None
    assert not (folder / "numerics" / "x").exists()
    assert "nothing is kept for the next start" in caplog.text
    with one_at_a_time(folder / "x.lock", "some work"):
        pass


def test_a_cache_that_is_full_keeps_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    with limited_files(10):
        why = keep(tmp_path / "digests" / "x.json", bytes(100))
    assert why is not None
    assert "File too large" in why
    assert list((tmp_path / "digests").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EIO])
def test_where_there_are_no_locks_work_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    done = []
    with caplog.at_level(logging.INFO), one_at_a_time(tmp_path / "x.lock", "the reading of m.gguf"):
        done.append(True)
    assert done
    (record,) = caplog.records
    assert (record.levelno, "no lock for the reading of m.gguf" in record.getMessage()) == (logging.INFO, True)
    with pytest.raises(ZeroDivisionError), one_at_a_time(tmp_path / "x.lock", "what fails itself"):
        _ = 1 / 0


def test_one_waits_for_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with one_at_a_time(tmp_path / "x.lock", "some work"):
            inside.set()
            leave.wait(30)
            order.append("first")

    def second() -> None:
        with one_at_a_time(tmp_path / "x.lock", "some work"):
            order.append("second")

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for it" in record.getMessage():
                leave.set()

    told = Told()
    cache._log.addHandler(told)
    threads = [threading.Thread(target=work) for work in (first, second)]
    try:
        with caplog.at_level(logging.INFO):
            threads[0].start()
            assert inside.wait(30)
            threads[1].start()
            for thread in threads:
                thread.join(30)
    finally:
        cache._log.removeHandler(told)
    assert order == ["first", "second"]
    assert not (tmp_path / "x.lock").exists()


def test_a_lock_of_a_file_that_was_removed_is_none(tmp_path: Path) -> None:
    """Three in a row: whoever waits behind the first must not work beside the one who comes when that has gone."""
    path, most = tmp_path / "x.lock", [0]
    running: list[None] = []

    def work() -> None:
        for _ in range(40):
            with one_at_a_time(path, "some work"):
                running.append(None)
                most[0] = max(most[0], len(running))
                os.sched_yield()
                running.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_POLL", 0.0001)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert most == [1]


def test_whoever_waits_reads_the_notes_of_whom_it_waits_for(tmp_path: Path) -> None:
    path, notes = tmp_path / "x.lock", []
    leave = threading.Event()

    def watch(note: bytes) -> None:
        notes.append(note)
        leave.set()

    def second() -> None:
        with one_at_a_time(path, "some work", watch):
            notes.append(b"its own turn")

    with one_at_a_time(path, "some work") as note:
        note(b"a longer note than the next one")
        note(b"17 of 30")
        thread = threading.Thread(target=second)
        thread.start()
        assert leave.wait(30)
    thread.join(30)
    assert set(notes) == {b"17 of 30", b"its own turn"}
