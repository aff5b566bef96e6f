"""What the extensions are made of: exports, header, cdef, pin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from narrow import present

import dgr.engine._native as native
import dgr.engine.native as native_module
import dgr.testing._probe as probe
from dgr.core.values import ContextParams, Numerics
from dgr.engine.llama import LlamaEngine
from dgr.engine.native import ABI_VERSION, Native
from dgr.errors import EngineError

CFFI_BUILD = Path(__file__).resolve().parents[2] / "cffi_build"


def declared_functions(header: str) -> set[str]:
    """Names of the functions that a header declares."""
    text = re.sub(r"//.*", "", (CFFI_BUILD / header).read_text(encoding="utf-8"))
    return set(re.findall(r"\b(dgr_\w+)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*;", text))


@pytest.mark.parametrize("extension", [native, probe], ids=["native", "probe"])
def test_only_the_module_init_is_exported(extension: ModuleType) -> None:
    nm = shutil.which("nm")
    assert nm, "nm comes with the compiler that built the extension"
    listing = subprocess.run(
        [nm, "-D", "--defined-only", present(extension.__file__)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == [f"PyInit_{extension.__name__.rpartition('.')[2]}"]


def test_the_product_has_the_header_and_nothing_else() -> None:
    functions = declared_functions("dgr_native.h")
    assert {name for name in dir(native.lib) if name.startswith("dgr_")} == functions | {"dgr_py_log"}
    assert {name for name in dir(probe.lib) if name.startswith("dgr_")} == (
        functions | declared_functions("dgr_probe.h") | {"dgr_py_log"}
    )


def test_no_function_can_move_cache_rows() -> None:
    functions = declared_functions("dgr_native.h")
    assert len(functions) == 30
    words = {word for name in functions for word in name.split("_")}
    assert not words & {"save", "load", "state", "row", "rows", "cache", "copy", "export", "import", "poke"}
    assert {name for name in functions if "set" in name.split("_")} == {"dgr_log_set"}


def test_the_cdef_is_the_header(build_scripts: tuple[ModuleType, ModuleType]) -> None:
    _, build_native = build_scripts
    for header in ("dgr_native.h", "dgr_probe.h"):
        lines = (CFFI_BUILD / header).read_text(encoding="utf-8").splitlines()
        cdef = build_native.cdef_of(header).splitlines()
        left_out = list(lines)
        for line in cdef:
            left_out.remove(line)
        assert {line for line in left_out if line and not line.startswith("#")} == {'extern "C" {', "}"}


def test_the_bundled_declarations_suffice(tmp_path: Path, build_scripts: tuple[ModuleType, ModuleType]) -> None:
    """On machines without Python's headers the extension is compiled against stable_abi/Python.h."""
    _, build_native = build_scripts
    source = tmp_path / "native.c"
    build_native.native.emit_c_code(str(source))
    folders = [f"-I{CFFI_BUILD}", f"-I{CFFI_BUILD / 'stable_abi'}"]
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-DPy_LIMITED_API=0x030b0000", *folders, "-fsyntax-only", source], check=True
    )


def test_enums_and_structs_reach_python() -> None:
    assert native.lib.DGR_ERR_INTERNAL == -7
    assert native.lib.DGR_N_COMPONENTS == 7
    assert native.ffi.sizeof("dgr_component_summary") == 4 * 4 + 16
    assert native.lib.dgr_abi_version() == native.lib.DGR_ABI_VERSION == ABI_VERSION


@pytest.mark.parametrize(
    ("abi", "n_components", "problem"),
    [(ABI_VERSION - 1, 7, "ABI version"), (ABI_VERSION + 1, 7, "ABI version"), (ABI_VERSION, 6, "state components")],
)
def test_an_extension_of_other_sources_is_refused_at_load(abi: int, n_components: int, problem: str) -> None:
    stale = SimpleNamespace(
        __name__="stale",
        ffi=native.ffi,
        lib=SimpleNamespace(dgr_abi_version=lambda: abi, DGR_N_COMPONENTS=n_components),
    )
    with pytest.raises(EngineError, match=f"stale has .*{problem}.*build the extension again"):
        Native(stale)


def test_build_info_tells_the_pin(build_scripts: tuple[ModuleType, ModuleType]) -> None:
    llama_cpp, _ = build_scripts
    info = json.loads(native.ffi.string(native.lib.dgr_build_info()))
    assert info["llama_cpp_commit"] == llama_cpp.PIN["upstream"]["commit"]
    assert info["patch_digest"] == llama_cpp.patch_digest()
    assert info["compiler"].split()[0] in {"GNU", "Clang", "AppleClang"}
    assert "GGML_OPENMP=OFF" in info["ggml_options"]
    assert info["llamafile"] is True
    assert info["cpu_features"]


def test_the_runtime_of_an_identity_moves_with_version_pin_and_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handshake compares: stages of other sources do not share a route."""
    info = json.loads(native.ffi.string(native.lib.dgr_build_info()))
    monkeypatch.setattr(native_module, "build_info", lambda: info)
    before = native_module.runtime_version.__wrapped__()
    for name in ("llama_cpp_commit", "patch_digest"):
        other = info | {name: ("0" if info[name][0] != "0" else "1") + info[name][1:]}
        with monkeypatch.context() as patch:
            patch.setattr(native_module, "build_info", lambda other=other: other)
            assert native_module.runtime_version.__wrapped__() != before, name
    monkeypatch.setattr(native_module, "version", lambda _: "0.0.0")
    assert native_module.runtime_version.__wrapped__() != before


def test_the_requirement_is_the_pin(build_scripts: tuple[ModuleType, ModuleType]) -> None:
    llama_cpp, _ = build_scripts
    sdist = llama_cpp.PIN["sdist"]
    wanted = f"{sdist['name']}=={sdist['version']} --hash=sha256:{sdist['sha256']}\n"
    assert (llama_cpp.VENDOR / "requirements.txt").read_text(encoding="utf-8") == wanted


def test_the_kernel_probe_repeats_itself() -> None:
    digests = set()
    for _ in range(2):
        out = native.ffi.new("char[33]")
        assert native.lib.dgr_kernel_probe(out, 33) == 0
        digests.add(native.ffi.string(out))
    assert len(digests) == 1
    assert re.fullmatch(rb"[0-9a-f]{32}", digests.pop())
    assert native.lib.dgr_kernel_probe(native.ffi.new("char[32]"), 32) == native.lib.DGR_ERR_ARGUMENT


def test_log_lines_are_whole_and_skipped_tensors_are_silent(five_layers: Path) -> None:
    """In a process of its own: the log callback is one per process."""
    script = f"""
from dgr.engine._native import ffi, lib
@ffi.def_extern()
def dgr_py_log(level, text):
    print(level, ffi.string(text).decode())
lib.dgr_log_set(lib.dgr_py_log)
p = ffi.new("dgr_stage_params *", lib.dgr_stage_params_default())
p.layer_begin, p.layer_end, p.n_ctx = 2, 4, 256
stage = ffi.new("dgr_stage **")
assert lib.dgr_stage_open({str(five_layers)!r}.encode(), p, stage) == 0
lib.dgr_stage_close(stage[0])
lib.dgr_log_set(ffi.NULL)
assert lib.dgr_stage_open({str(five_layers)!r}.encode(), p, stage) == 0
lib.dgr_stage_close(stage[0])
"""
    lines = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert sum("constructing llama_context" in line for line in lines) == 1  # silent the second time
    assert all(re.match(r"[1-4] .", line) for line in lines)
    assert not any("unused tensor" in line for line in lines)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_stage_says_what_it_computes_on(five_layers: Path, numerics: Numerics) -> None:
    """Exact numerics on the CPU alone, whatever else the build knows; native ones on at least that."""
    engine = LlamaEngine(five_layers, None, ContextParams(n_ctx=256, numerics=numerics))
    try:
        devices = engine.describe().devices
    finally:
        engine.stop()
    on_cpu = [device.split()[0] == "CPU" for device in devices]
    assert any(on_cpu)
    assert all(on_cpu) or numerics is Numerics.NATIVE
