"""The two cffi extensions, as ``cffi-gen-src exec-python`` reads them: ``native`` and ``probe``.

The cdef is the C header itself, so that it cannot drift from the code.
"""

from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).resolve().parent

#: Python's side of ``dgr_log_set``: cffi makes it a C function that takes the GIL.
_LOG = 'extern "Python" void dgr_py_log(int32_t level, const char *text);'


def cdef_of(header: str) -> str:
    """Return the declarations of a header: its text without preprocessor lines and without the linkage braces."""
    lines = (_HERE / header).read_text(encoding="utf-8").splitlines()
    kept: list[str] = []
    skipping_linkage = False
    for line in lines:
        if line.startswith("#"):
            skipping_linkage = line == "#ifdef __cplusplus"
        elif not skipping_linkage:
            kept.append(line)
    return "\n".join(kept)


def _extension(module: str, *headers: str) -> FFI:
    ffi = FFI()
    for header in headers:
        ffi.cdef(cdef_of(header))
    ffi.cdef(_LOG)
    ffi.set_source(module, "\n".join(f'#include "{header}"' for header in headers), py_limited_api=True)
    return ffi


native = _extension("dgr.engine._native", "dgr_native.h")
probe = _extension("dgr.testing._probe", "dgr_native.h", "dgr_probe.h")
