"""What this process may use of its host: CPUs and memory, as the kernel would grant them.

A container sees the host's figures in most places and is bound by its control groups (cgroups, version 1 or 2, or both):
what exceeds their memory is killed, what exceeds their CPU quota is stopped for a while. A limit of any group above the
process counts. Files of the kernel: ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/``.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = [
    "available_cpus",
    "available_memory",
    "cpu_flags",
    "cpu_name",
    "memory_limits",
    "resident_memory",
    "usable_memory",
]

#: The file system in which ``proc`` and the mounts of control groups are looked up; tests have their own.
_ROOT = Path("/")
#: Version 1 says "no limit" by the largest multiple of a page.
_NO_LIMIT = 1 << 62
#: Blanks and backslashes in ``mountinfo``.
_ESCAPED = re.compile(r"\\(\d{3})")


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return (_ROOT / path).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return []


def _mounts(controller: str) -> Iterator[tuple[Path, str, str]]:
    """Where groups of a controller are mounted: folder, the group that is its root, and the process's own group."""
    own = [line.split(":", 2) for line in _lines("proc/self/cgroup")]
    groups = {name: path for _, names, path in (line for line in own if len(line) == 3) for name in names.split(",")}
    for line in _lines("proc/self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        kind, options = tail.split(" ")[:1], tail.split(" ")[2:]
        if kind == ["cgroup"] and controller in ",".join(options).split(","):
            group = groups.get(controller)
        elif kind == ["cgroup2"]:
            group = groups.get("")
        else:
            continue
        root, folder = (_ESCAPED.sub(lambda one: chr(int(one[1], 8)), part) for part in fields.split(" ")[3:5])
        if group is not None:
            yield _ROOT / folder.lstrip("/"), root, group


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the process's group and of all above it that can be seen, innermost first."""
    for folder, root, group in _mounts(controller):
        below = os.path.relpath(group, root) if group.startswith("/") else "."
        inner = (
            folder if below.startswith("..") else folder / below
        )  # outside of what is mounted: the root binds it, too
        yield inner
        if inner != folder:
            yield from (parent for parent in inner.parents if parent.is_relative_to(folder))


def _number(path: Path) -> int | None:
    """What a file says, None for no limit or no such file."""
    with suppress(OSError, ValueError):
        value = int(path.read_text())
        return value if 0 <= value < _NO_LIMIT else None
    return None


def _counted(path: Path) -> int | None:
    """CPUs in a list such as ``0-3,8``."""
    with suppress(OSError, ValueError):
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return sum(int(part[-1]) - int(part[0]) + 1 for part in ranges) or None
    return None


def _quota(group: Path) -> float | None:
    """CPUs that a group's quota pays for."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us else None


def available_cpus() -> int:
    """CPUs that this process may use: those it may run on, and no more than any quota above it pays for, rounded up."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    found += [math.ceil(quota) for group in _groups("cpu") if (quota := _quota(group)) is not None]
    for group in _groups("cpuset"):
        sizes = (_counted(group / name) for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"))
        found += [size for size in sizes if size is not None][:1]
    return max(1, min(found))


def _of_the_cpu(*names: str) -> str | None:
    """What ``/proc/cpuinfo`` says of the first CPU under the first of some names."""
    found = (line.partition(":") for line in _lines("proc/cpuinfo"))
    return next((value.strip() for name, _, value in found if name.strip() in names), None)


def cpu_name() -> str:
    """The CPU as its maker calls it, else its architecture."""
    return _of_the_cpu("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str] | None:
    """What the CPU can do, in the kernel's words (``avx2``, ``asimddp``); None where the kernel does not tell."""
    flags = _of_the_cpu("flags", "Features")
    return None if flags is None else frozenset(flags.split())


def _limits(group: Path) -> Iterator[int]:
    """Bytes at which a group's processes are killed, or slowed down until they free some."""
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        if (limit := _number(group / name)) is not None:
            yield limit


def usable_memory() -> int:
    """Bytes of memory that this process could ever have: the least of the host's, its own and of every limit above it."""
    found = [int(psutil.virtual_memory().total), *(limit for group in _groups("memory") for limit in _limits(group))]
    return min([*found, *memory_limits()])


def memory_limits() -> list[int]:
    """The limits of this process itself, bytes: of its address space (``ulimit -v``) and of its data (``ulimit -d``)."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def available_memory() -> int:
    """Bytes of memory that this process could have now, without anyone being killed or swapped out."""
    rooms = [int(psutil.virtual_memory().available)]
    rooms += [limit - _used(group) for group in _groups("memory") for limit in _limits(group)]
    return max(0, min(rooms))


def _used(group: Path) -> int:
    """Bytes that a group holds and cannot give back at once: cached pages of files can be dropped."""
    usage = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    cached = 0
    with suppress(OSError, ValueError):
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(facts.get("total_inactive_file", facts.get("inactive_file", 0)))
    return max(0, usage - cached)


def resident_memory() -> int:
    """Bytes of memory that this process holds; 0 when it cannot be told, as where no file can be opened any more."""
    with suppress(OSError, psutil.Error):
        return int(psutil.Process().memory_info().rss)
    return 0
