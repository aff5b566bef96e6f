"""What a result carries of the machine and the software it was made with."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import psutil

from dgr.core.host import cpu_name
from dgr.engine.budget import available_cpus
from dgr.engine.native import build_info, kernel_fingerprint, runtime_version
from dgr.wire.frames import SCHEMA_HASH

_PACKAGES = ("dgr", "trio", "msgspec", "cffi", "attrs", "psutil", "numpy", "matplotlib")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the machine was."""

    #: UTC, ISO 8601.
    at: str
    #: Load averages over 1, 5 and 15 minutes.
    average: tuple[float, float, float]
    #: Bytes of memory that were available.
    available_bytes: int


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Versions, pins and hardware."""

    #: dgr's version, the llama.cpp pin and the digest of the patches.
    runtime: str
    #: Equal fingerprints give equal bits in exact numerics.
    kernel_fingerprint: str
    #: Digest of the wire schema.
    wire_schema: str
    #: Build of llama.cpp: commit, patch digest, compiler, flags, CPU features, backends.
    build: dict[str, Any]
    python: str
    packages: dict[str, str]
    system: str
    cpu: str
    #: CPUs this process may use.
    cpus: int
    memory_bytes: int


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> Environment:
    """This machine and this installation."""
    return Environment(
        runtime=runtime_version(),
        kernel_fingerprint=kernel_fingerprint(),
        wire_schema=SCHEMA_HASH,
        build=build_info(),
        python=sys.version.split()[0],
        packages={name: found for name in _PACKAGES if (found := _version(name)) is not None},
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cpus=available_cpus(),
        memory_bytes=psutil.virtual_memory().total,
    )


def load_now() -> Load:
    """How busy the machine is now."""
    return Load(
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        average=os.getloadavg(),
        available_bytes=psutil.virtual_memory().available,
    )
