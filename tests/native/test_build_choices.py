"""What the native code is built with: the Makefile keeps it, and the key of the cache holds it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Stands for Python: makes the environment that it is asked for, and notes what llama.cpp would be built with.
PYTHON = """#!/bin/sh
case "$1 $2" in
"cffi_build/watch.py "*) shift 3 && exec "$@" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"cffi_build/llama_cpp.py "*) echo "[$DGR_LLAMA_CMAKE_ARGS] [$DGR_EXACT_KERNELS]${DGR_SANITIZE:+ [$DGR_SANITIZE]}" >> built ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


class Tree:
    """A tree with the project's Makefile and nothing to build."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = program(folder / "python", PYTHON)
        self.makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for name in ("constraints.txt", "pyproject.toml"):
            (folder / name).touch()

    def build(self, *arguments: str, **choices: str) -> list[str]:
        """What `make build` built."""
        (self.folder / "Makefile").write_text(self.makefile, encoding="utf-8")
        built = self.folder / "built"
        built.unlink(missing_ok=True)
        names = ("DGR_LLAMA_CMAKE_ARGS", "DGR_EXACT_KERNELS", "DGR_SANITIZE", "MAKEFLAGS", "MAKELEVEL")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        subprocess.run(
            ["make", "build", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env=environment | choices,
            check=True,
            capture_output=True,
        )
        return built.read_text(encoding="utf-8").splitlines() if built.exists() else []


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_another_choice_builds_again_and_none_keeps_what_there_is(tree: Tree) -> None:
    vulkan = "-DGGML_VULKAN=ON -DGGML_BLAS=OFF"
    assert tree.build() == ["[] []"]
    assert tree.build() == []
    assert tree.build(DGR_LLAMA_CMAKE_ARGS=vulkan) == [f"[{vulkan}] []"]
    assert tree.build(DGR_LLAMA_CMAKE_ARGS=vulkan) == []
    assert tree.build() == []
    assert tree.build(DGR_EXACT_KERNELS="OFF") == [f"[{vulkan}] [OFF]"]
    os.utime(tree.folder / "pyproject.toml", (2**31, 2**31))  # a change that builds anew
    assert tree.build() == [f"[{vulkan}] [OFF]"]
    os.utime(tree.folder / "pyproject.toml", (0, 0))
    assert tree.build(DGR_LLAMA_CMAKE_ARGS="", DGR_EXACT_KERNELS="") == ["[] []"]
    assert tree.build(DGR_LLAMA_CMAKE_ARGS="") == []


def test_another_environment_has_choices_of_its_own(tree: Tree) -> None:
    assert tree.build() == ["[] []"]
    assert tree.build("VENV=build/other", DGR_LLAMA_CMAKE_ARGS="-DGGML_VULKAN=ON") == ["[-DGGML_VULKAN=ON] []"]
    assert tree.build() == []
    assert tree.build("VENV=build/other") == []


def test_sanitizers_are_such_a_choice(tree: Tree) -> None:
    assert tree.build(DGR_SANITIZE="thread") == ["[] [] [thread]"]
    assert tree.build() == []
    assert tree.build(DGR_SANITIZE="") == ["[] []"]


def test_a_stamp_that_depends_on_files_alone_is_caught(tree: Tree) -> None:
    tree.makefile = tree.makefile.replace(" $(CHOICES:%=$(VENV)/.%)\n", "\n")
    assert tree.build() == ["[] []"]
    assert tree.build(DGR_LLAMA_CMAKE_ARGS="-DGGML_VULKAN=ON") == []


# --- the key of the cache --------------------------------------------------------------------------------------------


class Key(Protocol):
    """The key of a build with these arguments, tools (name -> what it says) and environment."""

    def __call__(self, args: str, tools: Mapping[str, str] | None = None, **environment: str) -> str: ...


@pytest.fixture
def key(build_scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Key]:
    llama_cpp, _ = build_scripts
    compilers = {name: shutil.which(name) for name in ("cc", "c++")}

    def of(args: str, tools: Mapping[str, str] | None = None, **environment: str) -> str:
        folder = tmp_path / "tools"
        shutil.rmtree(folder, ignore_errors=True)
        for name, answer in (tools or {}).items():
            program(folder / name, f"#!/bin/sh\necho '{answer}'\n")
        with monkeypatch.context() as patch:
            for name in (*llama_cpp.DEVICE_VARIABLES, "CUDACXX", "HIPCXX"):
                patch.delenv(name, raising=False)
            for name, value in (environment | {"PATH": str(folder), "DGR_LLAMA_CMAKE_ARGS": args}).items():
                patch.setenv(name, value)
            flavour = llama_cpp.Flavour(patched=True, cc=compilers["cc"], cxx=compilers["c++"])
            return str(flavour.key)

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "compiler_version", str)  # cc1 and as are not among these tools
        yield of


CUDA, HIP, VULKAN = "-DGGML_CUDA=ON", "-DGGML_HIP=1", "-DGGML_VULKAN=ON"
TOOLS = {"nvcc": "12.4", "nvidia-smi": "9.0", "hipcc": "6.2", "rocm_agent_enumerator": "gfx942", "glslc": "2023.2"}


def test_what_decides_device_code_is_in_the_key(key: Key) -> None:
    changes: list[tuple[str, dict[str, str], dict[str, str]]] = [
        (CUDA, {"nvcc": "12.6"}, {}),
        (CUDA, {"nvidia-smi": "10.0"}, {}),
        (CUDA, {}, {"CUDAARCHS": "90"}),
        (HIP, {"hipcc": "6.3"}, {}),
        (HIP, {"rocm_agent_enumerator": "gfx1100"}, {}),
        (HIP, {}, {"CMAKE_PREFIX_PATH": "/opt/rocm-6.3"}),
        (VULKAN, {"glslc": "2024.1"}, {}),
    ]
    for args, tools, environment in changes:
        assert key(args, TOOLS | tools, **environment) != key(args, TOOLS), (args, tools, environment)
        assert key(args, TOOLS) == key(args, TOOLS)
        off = f"{args} {args.partition('=')[0]}=OFF"  # the last word counts: nothing of devices matters then
        assert key(off, TOOLS | tools, **environment) == key(off, TOOLS), (args, tools, environment)


def test_every_backend_has_a_place_of_its_own(key: Key) -> None:
    assert len({key(args, TOOLS) for args in ("", CUDA, HIP, VULKAN, f"{CUDA} {VULKAN}")}) == 5


def test_the_tool_that_is_named_counts(key: Key, tmp_path: Path) -> None:
    named = str(program(tmp_path / "my nvcc", "#!/bin/sh\necho 11.8\n"))
    assert key(CUDA, TOOLS, CUDACXX=f"'{named}'") != key(CUDA, TOOLS)


def test_a_backend_without_its_tools_has_a_key_all_the_same(key: Key) -> None:
    """CMake says better what it misses."""
    assert key(VULKAN, {}) != key(VULKAN, TOOLS)


def test_sanitizers_have_a_place_of_their_own(key: Key) -> None:
    chosen = ("", "address", "undefined", "address,undefined", "thread")
    assert len({key("", DGR_SANITIZE=one) for one in chosen}) == len(chosen)


def test_sanitizers_that_are_none_are_refused(key: Key, build_scripts: tuple[ModuleType, ModuleType]) -> None:
    for wrong in ("adress", "thread,address", "address, undefined"):
        with pytest.raises(build_scripts[0].BuildError, match="DGR_SANITIZE is"):
            key("", DGR_SANITIZE=wrong)


# --- what ggml's package leaves out -----------------------------------------------------------------------------------

#: ggml's static library for CUDA as its package describes it, around stub libraries of CUDA's toolkit.
PACKAGE = """
cmake_minimum_required(VERSION 3.26)
project(stub LANGUAGES C)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_MODULE_PATH ${CMAKE_CURRENT_SOURCE_DIR})
foreach(name cudart cublas cuda_driver)
    add_library(${name} SHARED ${name}.c)
endforeach()
add_library(ggml-cuda STATIC ggml.c)
target_link_libraries(ggml-cuda INTERFACE $<LINK_ONLY:cuda_driver>)
add_library(ggml::ggml-cuda ALIAS ggml-cuda)
set(GGML_CUDA ON)
include(${PART})
add_library(extension MODULE extension.c)
target_link_libraries(extension PRIVATE ggml::ggml-cuda)
"""
SOURCES = {
    "cudart.c": "int cudaMalloc(void) { return 1; }",
    "cublas.c": "int cublasCreate(void) { return 2; }",
    "cuda_driver.c": "int cuMemMap(void) { return 4; }",
    "ggml.c": "int cudaMalloc(void), cublasCreate(void), cuMemMap(void);"
    " int ggml(void) { return cudaMalloc() + cublasCreate() + cuMemMap(); }",
    "extension.c": "int ggml(void); int value(void) { return ggml(); }",
    "FindCUDAToolkit.cmake": "add_library(CUDA::cudart ALIAS cudart)\nadd_library(CUDA::cublas ALIAS cublas)\n"
    "set(CUDAToolkit_FOUND ON)\n",
}


def stub_extension(folder: Path, part: str) -> Path:
    """An extension linked against the stubs as ours is against ggml, with a part of our build."""
    # An alias takes no properties; the package's targets are imported ones.
    part = part.replace("TARGET ggml::ggml-cuda", "TARGET ggml-cuda")
    for name, text in (SOURCES | {"CMakeLists.txt": PACKAGE, "part.cmake": part}).items():
        (folder / name).write_text(text, encoding="utf-8")
    configure = ["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", f"-DPART={folder / 'part.cmake'}"]
    for command in (configure, ["cmake", "--build", folder / "build"]):
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return folder / "build" / "libextension.so"


@pytest.mark.slow
def test_an_extension_with_cuda_finds_its_libraries(tmp_path: Path) -> None:
    part = (ROOT / "cffi_build" / "device_libraries.cmake").read_text(encoding="utf-8")
    assert ctypes.CDLL(str(stub_extension(tmp_path, part))).value() == 7


@pytest.mark.slow
def test_an_extension_linked_by_the_package_alone_is_caught(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"undefined symbol: (cudaMalloc|cublasCreate)"):
        ctypes.CDLL(str(stub_extension(tmp_path, "")), mode=os.RTLD_NOW)
