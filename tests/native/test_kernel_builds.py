"""Exact numerics on kernels that this machine would not choose: other instruction sets, and upstream's own reference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_VECTORS = "-DGGML_AVX=OFF -DGGML_AVX2=OFF -DGGML_BMI2=OFF -DGGML_FMA=OFF -DGGML_F16C=OFF"
#: What each build is made with. Without GGML_NATIVE every set up to AVX2 is on unless it is named.
BUILDS = {
    "avx2": {"DGR_LLAMA_CMAKE_ARGS": "-DGGML_NATIVE=OFF"},
    # With AVX2 upstream does not compile without FMA.
    "avx-without-fma": {"DGR_LLAMA_CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=OFF -DGGML_BMI2=OFF -DGGML_FMA=OFF"},
    "sse42": {"DGR_LLAMA_CMAKE_ARGS": f"-DGGML_NATIVE=OFF {NO_VECTORS}"},
    "upstream": {"DGR_EXACT_KERNELS": "OFF"},
    # Needs libopenblas-dev, or another; on a Mac BLAS is on by default. Exact numerics leave it alone.
    "blas": {"DGR_LLAMA_CMAKE_ARGS": "-DGGML_BLAS=ON -DGGML_BLAS_VENDOR=OpenBLAS"},
}
#: Types that published V4 files use.
TYPES = ("f32", "f16", "bf16", "q8_0", "mxfp4", "q4_k", "q2_k", "q6_k", "iq2_xxs")


def build(name: str) -> Path:
    """The folder with the native extension and the kernel test of a build, kept from run to run."""
    folder = ROOT / "build" / "kernel-builds" / name
    tools = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | BUILDS[name] | {"PATH": os.pathsep.join(tools)}
    configure = [
        "cmake",
        "-S",
        str(ROOT / "cffi_build"),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run(configure, check=True, env=environment)
    subprocess.run(["cmake", "--build", folder, "--target", "_native", "kernels_test"], check=True, env=environment)
    return folder


def run_dgr(folder: Path, staged: Path, *arguments: str) -> str:
    """What dgr prints on the kernels of a build: a copy of the package around another extension."""
    shutil.copytree(ROOT / "dgr", staged / "dgr", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy2(folder / "_native.abi3.so", staged / "dgr" / "engine")
    # -S: the editable installation would come first.
    path = [str(staged), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "XDG_CACHE_HOME": str(staged / "cache")}
    command = [sys.executable, "-S", "-m", "dgr", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=staged).stdout


@pytest.mark.kernel_builds
@pytest.mark.parametrize("name", BUILDS)
def test_exact_numerics_are_exact_on_every_build(name: str, tmp_path: Path) -> None:
    folder = build(name)
    # Upstream's own reference kernels need not be as good as its others.
    subprocess.run([next(folder.rglob("kernels_test")), *(["invariance"] if name == "upstream" else [])], check=True)
    report = json.loads(
        run_dgr(folder, tmp_path, "selftest", "numerics", "--no-record", "--json", "--types", ",".join(TYPES))
    )
    assert {verdict["type"].lower() for verdict in report["verdicts"]} == set(TYPES)
    assert [verdict for verdict in report["verdicts"] if not verdict["exact"]] == []
