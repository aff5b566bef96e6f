"""A build has kernels for some CPUs, and says so before one of them ends the process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgr.core import host
from dgr.engine import instruction_sets
from dgr.engine.instruction_sets import check_cpu, missing_sets, unused_sets
from dgr.engine.native import ABI_VERSION, Native, build_info, default_native, is_portable
from dgr.errors import EngineError

#: Of /proc/cpuinfo: a server of 2014, one of 2022, an ARM one.
HASWELL = frozenset(["pni", "ssse3", "avx", "avx2", "f16c", "fma", "bmi2"])
GENOA = HASWELL | {f"avx512{what}" for what in ("f", "cd", "vl", "dq", "bw", "vbmi", "_vnni", "_bf16")}
GRAVITON = frozenset(["asimd", "asimdhp", "asimddp", "i8mm", "sve"])
NATIVE = ("SSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512", "AVX512_VNNI")
V3 = ("SSE3", "SSSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2")


def test_sets_are_compared_with_what_the_cpu_has() -> None:
    assert missing_sets(NATIVE, GENOA) == ()
    assert missing_sets(NATIVE, HASWELL) == ("AVX512", "AVX512_VNNI")
    assert missing_sets(("AVX512",), GENOA - {"avx512bw"}) == ("AVX512",)
    assert unused_sets(V3, GENOA) == ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    assert unused_sets(V3, HASWELL) == ()
    assert missing_sets(("NEON", "DOTPROD", "SME"), GRAVITON) == ("SME",)
    assert missing_sets(("A_SET_OF_NEXT_YEAR",), HASWELL) == ()  # nobody can tell


def test_this_build_fits_this_cpu_and_tells_the_same_twice() -> None:
    built = default_native().instruction_sets
    flags = host.cpu_flags()
    assert built
    assert flags is None or missing_sets(built, flags) == ()
    # ggml says it again, once its backend is there.
    features = {name for name, value in build_info()["cpu_features"].items() if value == "1"}
    assert set(built) <= features
    assert is_portable() == ("GGML_NATIVE=OFF" in build_info()["ggml_options"])


def test_a_build_for_another_cpu_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: HASWELL)
    ffi = default_native().ffi
    names = ffi.new("char[]", b"SSE3 AVX2 AVX512")
    foreign = SimpleNamespace(
        __name__="foreign",
        ffi=ffi,
        lib=SimpleNamespace(
            dgr_abi_version=lambda: ABI_VERSION, DGR_N_COMPONENTS=7, dgr_instruction_sets=lambda: names
        ),
    )
    with pytest.raises(EngineError, match=r"has kernels for AVX512, which this CPU .* lacks; install the portable"):
        Native(foreign)
    monkeypatch.setattr(instruction_sets, "cpu_flags", lambda: None)
    check_cpu(NATIVE)  # where the kernel does not tell, nothing is refused


def test_the_kernel_tells_what_the_cpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["processor\t: 0", "model name\t: A CPU", "flags\t\t: fpu avx2", "processor\t: 1", "flags\t\t: fpu"]
    monkeypatch.setattr(host, "_lines", lambda _: lines)
    assert (host.cpu_name(), host.cpu_flags()) == ("A CPU", frozenset({"fpu", "avx2"}))
    monkeypatch.setattr(host, "_lines", lambda _: ["Features : fp asimd"])
    assert host.cpu_flags() == frozenset({"fp", "asimd"})
    monkeypatch.setattr(host, "_lines", lambda _: [])
    assert host.cpu_flags() is None
    assert host.cpu_name()


# --- on a CPU that is another one, emulated ---------------------------------------------------------------------------

QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
#: The emulator shows the host's /proc/cpuinfo: what the emulated CPU can do is said here. ``mutant``: nobody asks.
ON_HASWELL = """
import site, sys
site.addsitedir(sys.argv[1])
from dgr.engine import instruction_sets, native
flags = frozenset(sys.argv[2].split())
instruction_sets.cpu_flags = lambda: flags
if sys.argv[3] == "mutant":
    native.check_cpu = lambda built: None
try:
    print(native.kernel_fingerprint())
except native.EngineError as refused:
    print(refused)
"""


def on_haswell(kind: str) -> subprocess.CompletedProcess[str]:
    """The extension of this build on an emulated server of 2014."""
    assert QEMU is not None
    python = str(Path(sys.executable).resolve())
    arguments = [sysconfig.get_path("purelib"), " ".join(sorted(HASWELL)), kind]
    command = [QEMU, "-cpu", "Haswell-noTSX", python, "-c", ON_HASWELL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


needs_another_cpu = pytest.mark.skipif(
    QEMU is None or "AVX512" not in default_native().instruction_sets,
    reason="needs qemu-user, and a build with AVX-512",
)


@pytest.mark.slow
@needs_another_cpu
def test_an_older_cpu_is_told_in_words() -> None:
    """Nothing of the extension runs what that CPU lacks before the question is asked, its static objects included."""
    done = on_haswell("asked")
    assert done.returncode == 0, done.stderr
    assert "has kernels for AVX512" in done.stdout


@pytest.mark.slow
@needs_another_cpu
def test_without_the_question_the_process_ends() -> None:
    assert "Illegal instruction" in on_haswell("mutant").stderr
