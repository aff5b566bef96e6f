"""Digests of tensor data: computed once per file, in parallel, and kept in the cache folder.

A record is kept under device, inode, size and times of the file: of its last modification, which anyone may set, and of its
last change, which nobody can. So a file that was renamed, linked or given other rights is read again, too. One that was
changed within two seconds of now is not recorded: another change within one tick of the file system's clock would go unseen.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from dgr.artifact.manifest import DIGEST_SIZE
from dgr.core.cache_dir import cache_dir, keep, one_at_a_time
from dgr.core.files.inputs import NOT_JSON, read_whole
from dgr.core.host import available_cpus
from dgr.core.units import human_bytes
from dgr.errors import ArtifactError, InputError
from dgr.gguf.reader import GgufFile, TensorInfo

__all__ = ["Progress", "digest_tensors", "known_digests", "new_digest"]

_log = logging.getLogger(__name__)

#: Called with (bytes done, bytes in all), from any thread, one call at a time.
Progress = Callable[[int, int], None]

_STEP = 1 << 20
#: A thread digests 0.75 to 1 GB/s: as many as the fastest disks of one host can feed.
_MOST_WORKERS = 16
#: Seconds within which a time of change may stand for two contents (network file systems count whole seconds).
_SETTLED = 2.0
#: Bytes of a record; one of V4 Flash has 0.2 MiB.
_MOST_BYTES = 64 << 20
#: Files whose records are kept.
_KEPT = 256
#: From here on reading everything takes long enough to be announced.
_LONG_READ = 4 << 30
#: From here on reading again at every start is worth a warning.
_COSTLY = 1 << 30

#: Seconds between two notes of how far the reading is.
_NOTE_EVERY = 0.2

#: Tests move them.
_now, _sleep = time.time, time.sleep

_Record = dict[str, str]
_Digest = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * DIGEST_SIZE}}}$")]
_Job = tuple[GgufFile, Sequence[TensorInfo]]


def new_digest() -> hashlib.blake2b:
    """The digest that tensor data goes into."""
    return hashlib.blake2b(digest_size=DIGEST_SIZE, person=b"dgr-tensor/1")


class _Meter:
    """Counts bytes of all threads, and passes on what other processes count that read the same."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()
        #: Leaves a note for whoever waits.
        self.note: Callable[[bytes], None] = lambda _: None
        self._noted = 0.0
        self.stop = threading.Event()

    def count(self, n_bytes: int) -> None:
        with self._lock:
            self._done += n_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)
            if (now := time.monotonic()) >= self._noted + _NOTE_EVERY:
                self._noted = now
                self.note(b"%d %d" % (self._done, self._total))

    def watch(self, note: bytes) -> None:
        """What another process has noted stands for the same share of our own work."""
        words = note.split()
        if self._progress is None or len(words) != 2 or not all(word.isdigit() for word in words):
            return
        done, total = map(int, words)
        if 0 < done <= total:
            with self._lock:
                self._progress(self._done + (self._total - self._done) * done // total, self._total)


def _digest_one(fd: int, path: Path, tensor: TensorInfo, meter: _Meter) -> str:
    digest = new_digest()
    buffer = memoryview(bytearray(min(_STEP, tensor.n_bytes)))
    done = 0
    while done < tensor.n_bytes and not meter.stop.is_set():
        count = os.preadv(fd, [buffer[: tensor.n_bytes - done]], tensor.offset + done)
        if not count:
            raise ArtifactError(f"{path}: the file became shorter while being read; fetch it again")
        digest.update(buffer[:count])
        done += count
        meter.count(count)
    return digest.hexdigest()


def _key(status: os.stat_result) -> str:
    facts = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _record_path(key: str) -> Path:
    return cache_dir() / "digests" / f"{key}.json"


def _read_record(key: str) -> _Record:
    try:
        text = read_whole(_record_path(key), _MOST_BYTES, "a record of digests")
        return msgspec.json.decode(text, type=dict[str, _Digest])
    except (OSError, InputError, *NOT_JSON):
        return {}


def _write_record(key: str, record: _Record) -> str | None:
    """Keep a record, and make room for it; says why it could not be kept."""
    path = _record_path(key)
    if why := keep(path, msgspec.json.encode(record)):
        return why
    with suppress(OSError):  # another process may make room at the same time
        known = sorted(path.parent.glob("*.json"), key=lambda entry: entry.stat().st_mtime_ns)
        for old in known[:-_KEPT]:
            old.unlink(missing_ok=True)
    return None


def _is_settled(status: os.stat_result) -> bool:
    """Whether a later change will show in the time of change. A file server's clock may be ahead of ours, or behind."""
    return abs(_now() - status.st_ctime) > _SETTLED


def _unsettled_for(status: os.stat_result) -> float:
    """Seconds until a file that was changed just now can be recorded; 0 where waiting does not help."""
    age = _now() - status.st_ctime
    return _SETTLED - age if 0 <= age <= _SETTLED else 0.0


def known_digests(file: GgufFile) -> Mapping[str, str]:
    """Digests of a file that are on record; nothing is read."""
    try:
        return _read_record(_key(file.path.stat()))
    except OSError:
        return {}


def digest_tensors(jobs: Sequence[_Job], progress: Progress | None = None, workers: int | None = None) -> _Record:
    """Digests of tensors, by name, read from the files where they are not on record.

    ``workers``: threads (default: one per CPU, at most sixteen). Raises :class:`~dgr.errors.ArtifactError` when a file
    cannot be read or changes meanwhile.
    """
    found: _Record = {}
    unknown: list[_Job] = []
    for file, tensors in jobs:
        known = known_digests(file)
        found |= {tensor.name: known[tensor.name] for tensor in tensors if tensor.name in known}
        if rest := [tensor for tensor in tensors if tensor.name not in known]:
            unknown.append((file, rest))
    total, began = sum(tensor.n_bytes for _, tensors in unknown for tensor in tensors), time.monotonic()
    if total >= _LONG_READ and progress is None:
        _log.warning("reading %s of weights, once, to know the model's identity", human_bytes(total))
    meter = _Meter(total, progress)
    for file, tensors in unknown:
        found |= _digest_file(file, tensors, meter, workers or min(available_cpus(), _MOST_WORKERS))
    if total >= _COSTLY:
        seconds = time.monotonic() - began
        rate = human_bytes(int(total / max(seconds, 1e-3)))
        _log.info("%s of weights are known after %.1f s (%s/s)", human_bytes(total), seconds, rate)
    return found


def _digest_file(file: GgufFile, tensors: Sequence[TensorInfo], meter: _Meter, workers: int) -> _Record:
    try:
        with file.path.open("rb", buffering=0) as data:
            before = os.fstat(data.fileno())
            if sum(tensor.n_bytes for tensor in tensors) > _COSTLY and (wait := _unsettled_for(before)):
                _sleep(wait)  # far less than reading it again at every start
                before = os.fstat(data.fileno())
            key = _key(before)
            lock = _record_path(key).with_suffix(".lock")
            with one_at_a_time(lock, f"the reading of {file.path.name}", meter.watch) as meter.note:
                record = _read_record(key)
                rest = []
                for tensor in tensors:  # another process may have been faster
                    if tensor.name in record:
                        meter.count(tensor.n_bytes)
                    else:
                        rest.append(tensor)
                settled = _is_settled(before)
                try:
                    _digest_all(data.fileno(), file.path, rest, meter, workers, record)
                finally:
                    unchanged = _key(os.fstat(data.fileno())) == key
                    if rest and unchanged:
                        why = _write_record(key, record) if settled else "it was changed just now, or at this very time"
                        if why is not None:
                            _tell_unkept(file.path, rest, why)
                if not unchanged or before.st_size != file.file_bytes:
                    raise ArtifactError(f"{file.path}: the file changed while being read; try again")
    except OSError as failed:
        raise ArtifactError(f"{file.path}: cannot be read: {failed.strerror or failed}; check the path") from failed
    return {tensor.name: record[tensor.name] for tensor in tensors}


def _tell_unkept(path: Path, tensors: Sequence[TensorInfo], why: str) -> None:
    """Say that a file will be read again; aloud, where that takes long."""
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    level = logging.WARNING if n_bytes > _COSTLY else logging.INFO
    _log.log(
        level, "the digests of %s are not kept (%s): the next start reads %s again", path, why, human_bytes(n_bytes)
    )


def _digest_all(
    fd: int, path: Path, tensors: Sequence[TensorInfo], meter: _Meter, workers: int, record: _Record
) -> None:
    """Fill ``record``; what was finished before a failure or an interrupt stays in it."""
    with ThreadPoolExecutor(workers) as pool:
        running = [(tensor, pool.submit(_digest_one, fd, path, tensor, meter)) for tensor in tensors]
        try:
            for tensor, future in running:
                record[tensor.name] = future.result()
        except BaseException:
            meter.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
