"""The loaded extension: status codes into exceptions, upstream's log into :mod:`logging`."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NoReturn

from dgr.engine.address_space import check_address_space
from dgr.engine.instruction_sets import check_cpu
from dgr.errors import (
    ArtifactError,
    BudgetExceeded,
    ContextLimitExceeded,
    DgrError,
    EngineError,
    InputError,
    NonFinite,
)
from dgr.v4.state_map import Component

__all__ = [
    "ABI_VERSION",
    "Native",
    "NativeHandle",
    "build_info",
    "default_native",
    "is_portable",
    "kernel_fingerprint",
    "runtime_version",
]

#: Address space of the probe graph, at most.
_PROBE_BYTES = 64 << 20

#: Options of ggml that add a backend beside the CPU's, or say how it is built.
_DEVICE_OPTIONS = tuple(
    f"GGML_{name}"
    for name in (
        "ACCELERATE", "BLAS", "CANN", "CUDA", "HEXAGON", "HIP", "METAL", "MUSA", "OPENCL", "OPENVINO", "RPC", "SYCL",
        "VIRTGPU", "VULKAN", "WEBGPU", "ZDNN", "ZENDNN",
    )
)  # fmt: skip

_log = logging.getLogger("dgr.llama_cpp")

#: The version of ``dgr_native.h`` that this package was written for.
ABI_VERSION = 7

# ggml_log_level: 1 debug, 2 info, 3 warn, 4 error (5 continues a line and is folded in by the shim).
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}


class Native:
    """A cffi extension that offers ``dgr_native.h``: the product's, or the test one, a second link of the same code."""

    def __init__(self, module: Any) -> None:
        self.ffi = module.ffi
        self.lib = module.lib
        _check_fit(module.__name__, "ABI version", self.lib.dgr_abi_version(), ABI_VERSION)
        _check_fit(module.__name__, "number of state components", self.lib.DGR_N_COMPONENTS, len(Component))
        check_cpu(self.instruction_sets)

        @self.ffi.def_extern("dgr_py_log")  # type: ignore[untyped-decorator]
        def on_line(level: int, text: Any) -> None:
            line = self.ffi.string(text).decode("utf-8", "replace")
            _log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)

        self.lib.dgr_log_set(self.lib.dgr_py_log)

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """What the kernels were compiled for, in ggml's names: ``AVX2``, ``AVX512_VNNI``, ``DOTPROD``, ..."""
        return tuple(self.ffi.string(self.lib.dgr_instruction_sets()).decode().split())

    def check(self, status: int, what: str) -> None:
        """Raise the exception that a dgr_status means."""
        if status == self.lib.DGR_OK:
            return
        message = self.ffi.string(self.lib.dgr_last_error()).decode("utf-8", "replace")
        raise self._error(status)(f"{what}: {message}")

    def _error(self, status: int) -> type[DgrError]:
        lib = self.lib
        return {
            lib.DGR_ERR_ARGUMENT: InputError,
            lib.DGR_ERR_LOAD: ArtifactError,
            lib.DGR_ERR_MEMORY: BudgetExceeded,
            lib.DGR_ERR_FULL: ContextLimitExceeded,
            lib.DGR_ERR_NON_FINITE: NonFinite,
        }.get(status, EngineError)


class NativeHandle:
    """Something that owns native memory: a copy would free it a second time, and another process does not have it."""

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns native memory and cannot be copied or pickled; open another one")


def _check_fit(name: str, what: str, theirs: int, ours: int) -> None:
    """Refuse an extension that was built from other sources than these."""
    if theirs != ours:
        raise EngineError(f"{name} has {what} {theirs}, this dgr wants {ours}: build the extension again (make build)")


@lru_cache(maxsize=1)
def default_native() -> Native:
    """The extension the product runs on."""
    return Native(importlib.import_module("dgr.engine._native"))


@lru_cache(maxsize=1)
def build_info() -> dict[str, Any]:
    """llama.cpp commit, patch digest, compiler, flags and CPU features of the extension."""
    native = default_native()
    info: dict[str, Any] = json.loads(native.ffi.string(native.lib.dgr_build_info()).decode())
    return info


def is_portable() -> bool:
    """Whether the kernels are for a class of CPUs (GGML_NATIVE=OFF), and not for the one that they were compiled on."""
    said = [option for option in build_info()["ggml_options"].split() if option.startswith("GGML_NATIVE=")]
    return bool(said) and said[-1].partition("=")[2].upper() in {"0", "OFF", "FALSE", "N", "NO"}


def _of_the_cpu(info: dict[str, Any]) -> dict[str, Any]:
    """Build info without the options that only add a backend for devices: no bit of exact numerics depends on them."""
    options = [option for option in info["ggml_options"].split() if not option.startswith(_DEVICE_OPTIONS)]
    return {**info, "ggml_options": " ".join(options)}


@lru_cache(maxsize=1)
def kernel_fingerprint() -> str:
    """Hex digest of build info and of a fixed probe graph's output: equal digests, equal bits in exact numerics."""
    native = default_native()
    check_address_space(_PROBE_BYTES, "the probe of the kernels")
    out = native.ffi.new("char[33]")
    native.check(native.lib.dgr_kernel_probe(out, 33), "kernel probe")
    probe = native.ffi.string(out).decode()
    facts = json.dumps(_of_the_cpu(build_info()), sort_keys=True)
    return hashlib.blake2b(f"{probe}\n{facts}".encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1)
def runtime_version() -> str:
    """Version of dgr, the llama.cpp commit and the digest of our patches, in short."""
    info = build_info()
    return f"{version('dgr')} llama.cpp {info['llama_cpp_commit'][:9]}+{info['patch_digest'][:8]}"
