"""What a process may use of its host: the least of the host's and of every control group above it, in both versions."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from dgr.core import host
from dgr.core.host import available_cpus, available_memory, usable_memory
from dgr.engine.budget import parse_budget

MIB = 1 << 20
TOTAL, FREE = 64 << 30, 32 << 30
NO_LIMIT_V1 = 9223372036854771712

V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 25 0:27 {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{controllers}"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``tree(groups, mounts, files)``: a host of 16 CPUs and 64 GiB, half of it free, with these control groups."""
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    memory = psutil.virtual_memory()._replace(total=TOTAL, available=FREE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def make(groups: str, mounts: str, files: Mapping[str, object]) -> None:
        (tmp_path / "proc" / "self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
        (tmp_path / "proc" / "self" / "mountinfo").write_text(mounts)
        for name, content in files.items():
            path = tmp_path / "sys" / "fs" / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")

    return make


def test_without_control_groups_the_host_counts(tree: Callable[..., None]) -> None:
    assert (available_cpus(), usable_memory(), available_memory()) == (16, TOTAL, FREE)  # no /proc at all
    tree("", "", {})
    assert (available_cpus(), usable_memory(), available_memory()) == (16, TOTAL, FREE)


@pytest.mark.parametrize("limited", ["", "a/", "a/b/", "a/b/c/"])
def test_version_2_the_least_of_all_groups_above_counts(tree: Callable[..., None], limited: str) -> None:
    files: dict[str, object] = {
        f"{group}{name}": "max" for group in ("a/", "a/b/", "a/b/c/") for name in ("memory.max", "memory.high")
    }
    files |= {f"{group}cpu.max": "max 100000" for group in ("a/", "a/b/", "a/b/c/")}
    files |= {
        f"{limited}memory.max": 512 * MIB,
        f"{limited}memory.current": 100 * MIB,
        f"{limited}cpu.max": "250000 100000",
    }
    files |= {f"{limited}memory.stat": f"anon {50 * MIB}\ninactive_file {30 * MIB}"}
    tree("0::/a/b/c\n", V2.format(root="/"), files)
    assert usable_memory() == 512 * MIB
    assert available_memory() == 442 * MIB  # what files are cached in can be had
    assert available_cpus() == 3
    assert parse_budget("50%") == 256 * MIB


def test_a_sibling_does_not_count(tree: Callable[..., None]) -> None:
    tree("0::/a/b\n", V2.format(root="/"), {"a/c/memory.max": MIB, "a/b/c/memory.max": MIB, "d/cpu.max": "1 100000"})
    assert (available_cpus(), usable_memory()) == (16, TOTAL)


@pytest.mark.parametrize("groups", ["0::/\n", "0::/../../other\n"])
def test_in_a_container_the_root_that_is_mounted_is_its_own_group(tree: Callable[..., None], groups: str) -> None:
    tree(groups, V2.format(root="/"), {"memory.max": 512 * MIB, "cpu.max": "50000 100000"})
    assert (available_cpus(), usable_memory()) == (1, 512 * MIB)


def test_memory_that_slows_down_counts_as_memory_that_kills(tree: Callable[..., None]) -> None:
    tree("0::/a\n", V2.format(root="/"), {"a/memory.max": 512 * MIB, "a/memory.high": 300 * MIB})
    assert usable_memory() == 300 * MIB


@pytest.mark.parametrize(
    ("group", "root", "folder"),
    [
        ("/docker/1f", "/", "docker/1f/"),
        ("/docker/1f", "/docker/1f", ""),
        ("/docker/1f", "/docker", "1f/"),
        ("/", "/", ""),
    ],
)
def test_version_1(tree: Callable[..., None], group: str, root: str, folder: str) -> None:
    """A container sees its own group at the root of the mount, or the host's whole tree, or something between."""
    groups = f"5:cpu,cpuacct:{group}\n4:memory:{group}\n3:cpuset:{group}\n1:name=systemd:/x\n0::/\n"
    mounts = [V1.format(root=root, name=name, controllers=name) for name in ("memory", "cpu,cpuacct", "cpuset")]
    files: dict[str, object] = {
        f"memory/{folder}memory.limit_in_bytes": 512 * MIB,
        f"memory/{folder}memory.usage_in_bytes": 200 * MIB,
    }
    files |= {f"memory/{folder}memory.stat": f"cache 1\ninactive_file 0\ntotal_inactive_file {100 * MIB}"}
    files |= {f"cpu,cpuacct/{folder}cpu.cfs_quota_us": 150000, f"cpu,cpuacct/{folder}cpu.cfs_period_us": 100000}
    files |= {f"cpuset/{folder}cpuset.cpus": "0-3,8"}
    tree(groups, "\n".join(mounts), files)
    assert (available_cpus(), usable_memory(), available_memory()) == (2, 512 * MIB, 412 * MIB)


def test_version_1_without_limits(tree: Callable[..., None]) -> None:
    files: dict[str, object] = {
        "memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "cpu/cpu.cfs_quota_us": -1,
        "cpu/cpu.cfs_period_us": 100000,
    }
    mounts = [V1.format(root="/", name=name, controllers=name) for name in ("memory", "cpu")]
    tree("4:memory:/\n5:cpu:/\n", "\n".join(mounts), files)
    assert (available_cpus(), usable_memory()) == (16, TOTAL)


def test_both_versions_at_once(tree: Callable[..., None]) -> None:
    """As systemd's hybrid hierarchy: some controllers here, some there."""
    unified = V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    files: dict[str, object] = {
        "memory/a/memory.limit_in_bytes": 512 * MIB,
        "unified/b/cpu.max": "800000 100000",
        "unified/b/memory.max": "max",
    }
    tree("4:memory:/a\n0::/b\n", f"{V1.format(root='/', name='memory', controllers='memory')}\n{unified}", files)
    assert (available_cpus(), usable_memory()) == (8, 512 * MIB)


@pytest.mark.parametrize(
    ("quota", "cpus"), [(1, 1), (99_999, 1), (100_000, 1), (100_001, 2), (1_550_000, 16), (9_900_000, 16)]
)
def test_a_quota_is_rounded_up(tree: Callable[..., None], quota: int, cpus: int) -> None:
    tree("0::/\n", V2.format(root="/"), {"cpu.max": f"{quota} 100000"})
    assert available_cpus() == cpus


@pytest.mark.parametrize(("listed", "cpus"), [("0", 1), ("0-2", 3), ("1,3-4,7", 4), ("", 16), ("0-63", 16)])
def test_a_set_of_cpus_counts(tree: Callable[..., None], listed: str, cpus: int) -> None:
    tree("0::/a\n", V2.format(root="/"), {"a/cpuset.cpus.effective": listed})
    assert available_cpus() == cpus


def test_files_that_say_nothing_sensible_do_not_count(tree: Callable[..., None]) -> None:
    files: dict[str, object] = {
        "memory.max": "much",
        "cpu.max": "1",
        "cpuset.cpus.effective": "all",
        "memory.stat": "1 2 3",
        "memory.current": "",
    }
    tree("0::/\nnonsense\n:\n", f"nonsense\n1 2\n{V2.format(root='/')}\n", files)
    assert (available_cpus(), usable_memory(), available_memory()) == (16, TOTAL, FREE)


def test_a_folder_with_a_blank_is_found(tree: Callable[..., None]) -> None:
    tree("0::/\n", V2.format(root="/").replace("/sys/fs/cgroup", r"/sys/fs/cgroup/a\040b"), {"a b/memory.max": MIB})
    assert usable_memory() == MIB


def test_the_limit_of_the_process_itself_counts(tree: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict.fromkeys((resource.RLIMIT_AS, resource.RLIMIT_DATA), resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    assert usable_memory() == TOTAL
    for kind in limits:
        monkeypatch.setitem(limits, kind, 700 * MIB)
        assert usable_memory() == 700 * MIB
        monkeypatch.setitem(limits, kind, resource.RLIM_INFINITY)
