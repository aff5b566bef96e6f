"""NOTICE.md names every holder of a copyright in what is compiled in."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What is compiled into an extension of the default build, in llama.cpp's tree: those of no other device and no other CPU.
BUILT_IN = ("src/*.cpp", "src/models/deepseek4.cpp", "include/*.h", "ggml/include/ggml*.h", "ggml/src/*.c*", "ggml/src/*.h",
            "ggml/src/ggml-cpu/*.*", "ggml/src/ggml-cpu/amx/*", "ggml/src/ggml-cpu/arch/**/*.c*",
            "ggml/src/ggml-cpu/llamafile/*", "ggml/src/ggml-cpu/tiled/*", "vendor/hash/xxhash/xxhash.h", "LICENSE")  # fmt: skip
#: Headers of backends for devices, which no build for the CPU includes.
DEVICES = re.compile(
    r"ggml-(cann|cuda|hexagon|metal|opencl|openvino|rpc|sycl|vulkan|virtgpu|webgpu|zdnn|zendnn|blas)\.h$"
)
HOLDER = re.compile(r"copyright\b[^\n]*?\b(?:19|20)\d\d\S*,?\s+([^\n*]+)", re.IGNORECASE)


def unnamed(tree: Path, notice: str) -> list[str]:
    """Holders in the built-in sources that a notice does not name, with their files."""
    words = " ".join(notice.split())
    found = []
    for path in sorted({path for pattern in BUILT_IN for path in tree.glob(pattern) if path.is_file()}):
        if DEVICES.search(path.name):
            continue
        for match in HOLDER.finditer(path.read_text(encoding="utf-8", errors="replace")):
            holder = match[1].strip().rstrip(".").removesuffix(" All rights reserved")
            if holder not in words:
                found.append(f"{path.relative_to(tree)}: {holder}")
    return found


@pytest.fixture(scope="module")
def tree(build_scripts: tuple[ModuleType, ModuleType]) -> Path:
    """The sources that this build was made from."""
    llama_cpp, _ = build_scripts
    folder = Path(llama_cpp.build(llama_cpp.Flavour(patched=True, cc="cc", cxx="c++"))) / "source"
    assert (folder / "src" / "llama-model.cpp").exists()
    return folder


def test_every_holder_is_named(tree: Path) -> None:
    assert unnamed(tree, (ROOT / "NOTICE.md").read_text()) == []


def test_a_holder_that_is_left_out_is_caught(tree: Path) -> None:
    notice = (ROOT / "NOTICE.md").read_text()
    for holder, path in (("Mozilla", "ggml/src/ggml-cpu/llamafile/sgemm.cpp"), ("Quesnelle", "ggml/src/ggml-cpu/ops.cpp"),
                         ("ggml authors", "LICENSE"), ("Yann Collet", "vendor/hash/xxhash/xxhash.h")):  # fmt: skip
        assert [one for one in unnamed(tree, notice.replace(holder, "somebody")) if one.startswith(path)]


def test_the_texts_of_the_licences_are_there(tree: Path) -> None:
    words = " ".join((ROOT / "NOTICE.md").read_text().split())
    for path in ("LICENSE", "vendor/hash/xxhash/LICENSE"):
        text = (tree / path).read_text()
        terms = " ".join(text[text.index("Permission" if path == "LICENSE" else "Redistribution") :].split())
        assert terms in words, path
