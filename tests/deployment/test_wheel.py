"""The wheel and the sdist of ``make wheel``, in a clean environment outside of this checkout, with no network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The model that has learned is part of the package.
LEARNED = "dgr/selftest/learned/model.gguf"
PACKAGES = ROOT / "build" / "wheel" / "packages"
#: What x86-64-v3 has, in ggml's names: a portable wheel needs no more.
V3 = {"SSE3", "SSSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2"}

pytestmark = pytest.mark.wheel


def made(pattern: str) -> Path:
    """The one file of `make wheel` that is called so."""
    (found,) = (ROOT / "dist").glob(pattern)
    return found


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that knows nothing of this checkout, its environment and any package index."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(str(ROOT)))
    own = {"PATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(PACKAGES), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env=kept | own | environment, capture_output=True, text=True, check=False, timeout=3600
    )


def new_environment(folder: Path) -> Path:
    """A virtual environment; returns the folder of its programs."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the checkout, where commands run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    assert not folder.is_relative_to(ROOT)
    return folder


@pytest.fixture(scope="module")
def programs(place: Path) -> Path:
    """An environment with the wheel and what it needs, and nothing else."""
    found = new_environment(place / "clean")
    done = run(found / "python", "-m", "pip", "install", "--quiet", made("*.whl"), cwd=place)
    assert done.returncode == 0, done.stderr
    return found


@pytest.fixture(scope="module")
def dgr(programs: Path, place: Path) -> Callable[..., str]:
    """``dgr(arguments...)``: what a command of the installed wheel prints."""

    def call(*arguments: str) -> str:
        done = run(programs / "dgr", *arguments, cwd=place, DGR_CACHE_DIR=str(place / "cache"))
        assert done.returncode == 0, f"dgr {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    return call


def test_the_wheel_holds_the_product_its_types_and_its_licences() -> None:
    with zipfile.ZipFile(made("*.whl")) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(info).decode()
    assert {"dgr/py.typed", "dgr_bench/py.typed", LEARNED} <= set(names)
    assert [name for name in names if name.endswith(".so")] == ["dgr/engine/_native.abi3.so"]
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE.md"}
    assert not [name for name in names if not re.match(r"dgr/|dgr_bench/|dgr-[\d.]+\.dist-info/", name)]
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_the_tag_is_what_auditwheel_finds() -> None:
    """One extension for every CPython from 3.11 on, and the oldest glibc that it can be loaded with."""
    tags = made("*.whl").name.removesuffix(".whl").split("-")
    assert tags[2:4] == ["cp311", "abi3"]
    assert tags[4].startswith("manylinux_2_")
    shown = subprocess.run(
        [ROOT / "build" / "wheel" / "bin" / "auditwheel", "show", made("*.whl")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r'consistent with.*"(manylinux_2_\d+_\w+)"', shown.replace("\n", " ")), shown
    assert re.findall(r"manylinux_2_\d+_\w+", shown)[0] in tags[4].split(".")


def test_a_portable_wheel_says_which_kernels_it_has(dgr: Callable[..., str]) -> None:
    found = json.loads(dgr("--version", "--json"))
    kernels = found["kernels"]
    assert kernels["portable"]
    assert set(kernels["instruction_sets"]) <= V3
    doctor = json.loads(dgr("doctor", "--json"))
    assert doctor["versions"]["kernels"] == kernels
    said = [finding["what"] for finding in doctor["findings"] if "has no kernels for" in finding["what"]]
    assert bool(said) == bool(kernels["unused"])


def test_a_model_runs_on_three_stages(dgr: Callable[..., str]) -> None:
    dgr("fixture", "m.gguf", "--layers", "7")
    assert "exact" in dgr("selftest", "numerics", "--model", "m.gguf")
    prompt = ("--prompt", "The quick brown fox", "-n", "8", "--ignore-eos")
    answer: dict[str, Any] = json.loads(
        dgr("generate", "--model", "m.gguf", "--split", "0:3,3:5,5:7", *prompt, "--verify", "--json")
    )
    assert len(answer["tokens"]) == 8
    assert answer["verified"]["equal"]


IMPORT = """
import sys, dgr
for name in dgr.__all__:
    getattr(dgr, name)
assert dgr.__file__.startswith(sys.prefix), dgr.__file__
assert dgr.__version__ == sys.argv[1], dgr.__version__
import importlib.metadata
print(*sorted(one.metadata["Name"].lower() for one in importlib.metadata.distributions()))
"""


def test_it_is_imported_without_any_extra(programs: Path, place: Path) -> None:
    done = run(programs / "python", "-I", "-c", IMPORT, made("*.whl").name.split("-")[1], cwd=place)
    assert done.returncode == 0, done.stderr
    there = set(done.stdout.split())
    assert {"attrs", "cffi", "dgr", "msgspec", "numpy", "psutil", "trio"} <= there
    assert not there & {"anycorn", "cryptography", "matplotlib", "prometheus-client", "starlette", "tqdm"}


CONSUMER = """
import trio
from dgr import ContextParams, SamplingParams, open_pipeline
from dgr.errors import ContextLimitExceeded


async def answer(model: str, prompt: str) -> str:
    context = ContextParams(n_ctx=4096)
    async with open_pipeline(model, "0:15,15:29,29:43", context=context) as pipeline, pipeline.session() as session:
        try:
            sampling = SamplingParams(temperature=0.7, seed=1)
            return "".join([token.text async for token in session.generate(prompt, max_tokens=64, sampling=sampling)])
        except ContextLimitExceeded as refused:
            return str(refused)


trio.run(answer, "model.gguf", "Once upon a time")
"""


def checked(programs: Path, place: Path, text: str) -> subprocess.CompletedProcess[str]:
    """What ``mypy --strict`` says of a program beside the installed wheel."""
    (place / "consumer.py").write_text(text)
    python = ("--python-executable", str(programs / "python"))
    return run(sys.executable, "-m", "mypy", "--strict", *python, "--cache-dir", "mypy", "consumer.py", cwd=place)


def test_a_consumer_is_checked_against_our_types(programs: Path, place: Path) -> None:
    done = checked(programs, place, CONSUMER)
    assert done.returncode == 0, done.stdout


def test_a_wrong_consumer_is_caught(programs: Path, place: Path) -> None:
    """And would not be, were there no py.typed."""
    wrong = CONSUMER.replace("n_ctx=4096", 'n_ctx="4096"').replace("token.text", "token.txt")
    done = checked(programs, place, wrong)
    assert 'Argument "n_ctx" to "ContextParams" has incompatible type "str"' in done.stdout
    assert '"GeneratedToken" has no attribute "txt"' in done.stdout
    package = next((programs.parent / "lib").glob("*/site-packages/dgr"))
    shutil.move(package / "py.typed", place)
    try:
        done = checked(programs, place, CONSUMER)
    finally:
        shutil.move(place / "py.typed", package)
    assert done.returncode == 1
    assert "missing library stubs or py.typed marker" in done.stdout


def test_the_sdist_holds_what_a_build_needs_and_no_more() -> None:
    with tarfile.open(made("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "NOTICE.md", "cffi_build/llama_cpp.py", "vendor/llama.cpp/pin.toml"} <= names
    left_out = re.compile(r"\.cache/|\.ci/|\.scratch/|build/|dist/|keys/|.*\.key$|.*\.so$|.*\.gguf$")
    assert [name for name in names if left_out.match(name)] == [LEARNED], "no model but the one that ships"


@pytest.fixture(scope="module")
def archive() -> Path:
    """llama.cpp's release archive, as anybody would have downloaded it."""
    code = "import llama_cpp; print(llama_cpp.fetch_sdist())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "cffi_build", capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def rebuilt(place: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A wheel of the sdist with an empty cache."""
    folder = place / name
    python = new_environment(folder / "environment") / "python"
    return run(
        python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, made("*.tar.gz"), cwd=place,
        # As `make wheel` names them: where there is ccache it has the objects, and a compiler's name is part of their key.
        DGR_CACHE_DIR=str(folder / "cache"), DGR_LLAMA_CMAKE_ARGS="-DGGML_NATIVE=OFF", CC="cc", CXX="c++", **environment,
    )  # fmt: skip


def test_the_sdist_builds_offline_when_given_the_archive(place: Path, archive: Path) -> None:
    done = rebuilt(place, "with", DGR_LLAMA_CPP_ARCHIVE=str(archive))
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (place / "with").glob("dgr-*.whl")
    python = new_environment(place / "with" / "installed") / "python"
    assert run(python, "-m", "pip", "install", "--quiet", wheel, cwd=place).returncode == 0
    done = run(python, "-m", "dgr", "--version", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dgr ")


def test_without_the_archive_an_offline_build_says_what_it_lacks(place: Path) -> None:
    done = rebuilt(place, "without")
    assert done.returncode != 0
    assert "DGR_LLAMA_CPP_ARCHIVE" in done.stdout + done.stderr
