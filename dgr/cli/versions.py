"""``dgr --version``: what this installation is; with ``--json`` every identity that something else may have to match."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dgr.core.host import cpu_name
from dgr.engine.instruction_sets import unused_sets
from dgr.engine.llama import ADAPTER
from dgr.engine.native import ABI_VERSION, build_info, default_native, is_portable, kernel_fingerprint, runtime_version
from dgr.wire.frames import SCHEMA_HASH, SCHEMA_VERSION

__all__ = ["version_line", "versions"]

#: What dgr needs, and what its extras bring, as their distributions are called.
_PACKAGES = (
    "attrs", "cffi", "msgspec", "numpy", "psutil", "trio",
    "anycorn", "cryptography", "deepseek-recipe", "matplotlib", "opentelemetry-sdk", "ray", "starlette",
)  # fmt: skip


def version_line() -> str:
    """The versions of dgr and of its llama.cpp."""
    return f"dgr {version('dgr')}, llama.cpp {build_info()['llama_cpp_commit'][:9]}"


def versions() -> dict[str, Any]:
    """Every identity of this installation.

    ``runtime`` and ``wire`` must be the same on all stages of a route, and for exact numerics ``kernels.fingerprint`` too.
    ``kernels.unused``: instruction sets of this CPU that the build has no kernels for.
    """
    info, built = build_info(), default_native().instruction_sets
    return {
        "version": version("dgr"),
        "runtime": runtime_version(),
        "wire": {"schema_version": SCHEMA_VERSION, "schema_hash": SCHEMA_HASH},
        "llama_cpp": {"commit": info["llama_cpp_commit"], "patch_digest": info["patch_digest"]},
        "native": {"abi_version": ABI_VERSION, "adapter": ADAPTER, "python_abi": "cp311-abi3"},
        "kernels": {
            "fingerprint": kernel_fingerprint(),
            "portable": is_portable(),
            "instruction_sets": built,
            "unused": unused_sets(built),
            "compiler": info["compiler"],
            "options": info["ggml_options"],
        },
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "system": {
            "name": platform.system(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()),
            "cpu": cpu_name(),
        },
        "packages": {name: found for name in _PACKAGES if (found := _installed(name)) is not None},
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
