"""Obtains, verifies, patches and builds the pinned llama.cpp; prints the prefix where the static libraries lie.

The prefix is in a cache outside the repository ($DGR_CACHE_DIR, else $XDG_CACHE_HOME/dgr, else ~/.cache/dgr), under a
key made of everything that decides what the libraries compute: pin, patches, compiler, flags and the CPU's features
(kernels are compiled for this very CPU). CMakeLists.txt runs this file; it needs pip, cmake, ninja and patch-ng.

    python llama_cpp.py                 # build unless cached, print the prefix
    python llama_cpp.py --unpatched     # upstream as it is, for tests that compare with it
    python llama_cpp.py --llama-bench   # upstream's llama-bench as it is; prints the path of the binary
    python llama_cpp.py --llama-server  # the same of llama-server
    python llama_cpp.py --rpc-server    # the same of rpc-server, with a llama-bench beside it that knows --rpc
    python llama_cpp.py source DIR      # only the patched source tree
    python llama_cpp.py digest DIR      # digest of the used paths of a tree; with a program's flag, of what that needs besides

DGR_LLAMA_CPP_ARCHIVE names the release archive of pin.toml, and DGR_LLAMA_CPP_SOURCE a checkout, to use in place of the
download; both must have the pinned digest. With either nothing is fetched.
DGR_LLAMA_CMAKE_ARGS are further CMake arguments for llama.cpp, for instance -DGGML_CUDA=ON. With a backend for devices the
key holds what compiles device code too: its tools, what the environment says of them, and the cards that are here.
DGR_EXACT_KERNELS=OFF leaves out the kernels of our patches: exact numerics then run on upstream's own, slower.
DGR_SANITIZE=address,undefined (or thread) compiles llama.cpp, and what is linked with it, under the compiler's sanitizers.
Objects go through ccache where it is installed (CCACHE_DISABLE=1 turns it off).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from watch import watched

VENDOR = Path(__file__).resolve().parent.parent / "vendor" / "llama.cpp"
PIN = tomllib.loads((VENDOR / "pin.toml").read_text(encoding="utf-8"))

#: Grows when this file builds something else from the same inputs.
RECIPE = 1

CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
    "-DCMAKE_C_VISIBILITY_PRESET=hidden",
    "-DCMAKE_CXX_VISIBILITY_PRESET=hidden",
    "-DCMAKE_INSTALL_LIBDIR=lib",
    "-DCMAKE_INSTALL_MESSAGE=NEVER",
    "-DGGML_NATIVE=ON",
    "-DGGML_LLAMAFILE=ON",
    "-DGGML_OPENMP=OFF",
    "-DGGML_CUDA_NCCL=OFF",  # linked privately where it is found, and then missing in the extension
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_NUMBER=0",
    f"-DLLAMA_BUILD_COMMIT={PIN['upstream']['commit']}",
)

#: Upstream's programs that are built on demand, and the CMake arguments that each needs besides; the last word counts.
PROGRAMS = {
    "llama-bench": ("-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON"),
    "llama-server": (
        "-DLLAMA_BUILD_COMMON=ON",
        "-DLLAMA_BUILD_TOOLS=ON",
        "-DLLAMA_BUILD_SERVER=ON",
        # No page to look at: it would be downloaded.
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
    ),
    # With a llama-bench beside it that reaches such servers.
    "rpc-server": ("-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DGGML_RPC=ON"),
}
#: CMake targets of a program, itself first, where they are not its name alone; a binary of each is kept.
TARGETS = {"rpc-server": ("ggml-rpc-server", "llama-bench")}

#: What DGR_SANITIZE may be: the runtimes of the two cannot be in one program.
SANITIZERS = ("address", "undefined", "address,undefined", "thread")
#: Optimised a little, or hours would go by; frame pointers and line numbers for the reports.
SANITIZER_FLAGS = "-O1 -g1 -fno-omit-frame-pointer"

#: By the option that turns a backend on: programs that decide its device code. ggml compiles for the cards that are here
#: where it is not told otherwise. Of several names for one thing, a variable first, the first that is set or found counts.
DEVICE_TOOLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "GGML_CUDA": (
        ("$CUDACXX", "nvcc", "/usr/local/cuda/bin/nvcc"),
        ("nvidia-smi --query-gpu=compute_cap --format=csv,noheader",),
    ),
    "GGML_HIP": (
        ("$HIPCXX", "hipcc", "/opt/rocm/bin/hipcc"),
        ("rocm_agent_enumerator", "/opt/rocm/bin/rocm_agent_enumerator"),
    ),
    "GGML_METAL": (("xcrun metal",),),
    "GGML_MUSA": (("mcc", "/usr/local/musa/bin/mcc"),),
    "GGML_SYCL": (("icpx",),),
    "GGML_VULKAN": (("glslc",), ("pkg-config --modversion vulkan",)),
}
DEVICE_VARIABLES = (
    "CUDAARCHS",
    "CUDAFLAGS",
    "CUDAHOSTCXX",
    "CUDA_PATH",
    "HIPFLAGS",
    "HIP_PATH",
    "ROCM_PATH",
    "VULKAN_SDK",
    "CMAKE_PREFIX_PATH",
)


class BuildError(Exception):
    """A step failed; the message says which and what to do."""


def say(text: str) -> None:
    """Tell a person; standard output is for the prefix alone."""
    print(f"llama.cpp: {text}", file=sys.stderr, flush=True)


def run(what: str, *command: str | Path) -> None:
    """Run a command and show how far it is; raise when it fails, after what it printed."""
    status = watched(f"llama.cpp: {what}", *command)
    if status != 0:
        raise BuildError(f"exit status {status} of: {shlex.join(str(part) for part in command)}")


# --- identity ---------------------------------------------------------------------------------------------------------


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_digest(tree: Path, part: str = "tree") -> str:
    """Return the digest of the used paths: SHA-256 over a sorted list of file digests and names.

    ``part``: the table of pin.toml that names the paths.
    """
    files = [path for used in PIN[part]["paths"] for path in _files(tree / used)]
    lines = sorted(f"{path.relative_to(tree).as_posix()} {file_digest(path)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def pin_table(program: str) -> str:
    """Return the table of pin.toml that names what a program is built from besides."""
    return program.replace("-", "_")


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (child for child in path.rglob("*") if child.is_file())
    elif path.is_file():
        yield path
    else:
        raise BuildError(f"{path} is missing")


def patches() -> list[Path]:
    return sorted((VENDOR / "patches").glob("*.patch"))


def patch_digest() -> str:
    """Return the digest of the patch series."""
    return hashlib.sha256("".join(file_digest(patch) for patch in patches()).encode()).hexdigest()


def cpu_features() -> str:
    """Return what this CPU can do, as far as it decides which instructions the compiler uses."""
    features = {platform.machine()}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        features.add(platform.processor())
    else:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in {"flags", "Features"}:
                features.update(value.split())
                break
    return " ".join(sorted(features))


def compiler_version(compiler: str) -> str:
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"no C++ compiler: {compiler}: {error}") from error
    return answer.stdout.splitlines()[0]


def is_on(option: str, cmake_args: list[str]) -> bool:
    """Whether CMake arguments turn an option on; the last word counts."""
    said = [value for name, _, value in (arg.removeprefix("-D").partition("=") for arg in cmake_args) if name == option]
    return bool(said) and said[-1].upper() in {"1", "ON", "TRUE", "Y", "YES"}


def tool_answer(names: tuple[str, ...]) -> list[str]:
    """Return a program by the first of its names that is here, and its version or, with arguments of its own, its answer."""
    for name in names:
        command = shlex.split(os.environ.get(name[1:], "") if name.startswith("$") else name)
        path = shutil.which(command[0]) if command else None
        if path is None:
            continue
        command[0] = path
        asked = command if len(command) > 1 or "enumerator" in path else [*command, "--version"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{shlex.join(asked)} does not answer: {error}") from error
        return [shlex.join(command), *sorted(set(answer.stdout.splitlines()))]
    return [names[-1], "not found"]  # CMake says what it misses


def device_code(cmake_args: list[str]) -> dict[str, object]:
    """Return what decides the code of the device backends that are on; nothing in a build for the CPU."""
    on = [option for option in DEVICE_TOOLS if is_on(option, cmake_args)]
    if not on:
        return {}
    return {
        "tools": {option: [tool_answer(names) for names in DEVICE_TOOLS[option]] for option in on},
        "environment": {name: os.environ.get(name, "") for name in DEVICE_VARIABLES},
    }


def sanitizing(chosen: str) -> list[str]:
    """Return CMake arguments that compile C and C++ under sanitizers, with their assertions on."""
    if not chosen:
        return []
    flags = f"{SANITIZER_FLAGS} -fsanitize={chosen}"
    return [f"-DCMAKE_{language}_FLAGS_RELEASE={flags}" for language in ("C", "CXX")]


def exact_kernels() -> str:
    """Return whether exact numerics get kernels of ours, as a CMake truth value."""
    chosen = os.environ.get("DGR_EXACT_KERNELS") or "ON"
    if chosen not in {"ON", "OFF"}:
        raise BuildError(f"DGR_EXACT_KERNELS is {chosen!r}: ON or OFF")
    return chosen


def sanitizers() -> str:
    """Return the sanitizers to compile with, as ``-fsanitize`` takes them; nothing for a build without."""
    chosen = os.environ.get("DGR_SANITIZE", "")
    if chosen and chosen not in SANITIZERS:
        raise BuildError(f"DGR_SANITIZE is {chosen!r}: nothing, or one of {' '.join(SANITIZERS)}")
    return chosen


class Flavour:
    """What to build: patched or not, libraries or a program of upstream's, with which compilers and options."""

    def __init__(self, *, patched: bool, cc: str, cxx: str, program: str | None = None) -> None:
        self.patched = patched
        self.program = program
        self.cc = shutil.which(cc) or cc
        self.cxx = shutil.which(cxx) or cxx
        self.patch_digest = patch_digest() if patched else "unpatched"
        self.sanitize = sanitizers()
        self.cmake_args = [
            *CMAKE_ARGS,
            *sanitizing(self.sanitize),
            *shlex.split(os.environ.get("DGR_LLAMA_CMAKE_ARGS", "")),
        ]
        if patched:
            self.cmake_args += [f"-DGGML_CPU_EXACT={exact_kernels()}", "-DLLAMA_DEEPSEEK4_ONLY=ON"]
        if program is not None:
            self.cmake_args += PROGRAMS[program]

    def identity(self) -> dict[str, object]:
        """Return everything that decides what the libraries compute."""
        return {
            "recipe": RECIPE,
            "tree": PIN["tree"]["sha256"],
            "patches": self.patch_digest,
            # By the file behind the name, which the version repeats: cc and gcc may be one compiler.
            "compilers": [[path, compiler_version(path)] for path in map(os.path.realpath, (self.cc, self.cxx))],
            "cmake_args": self.cmake_args,
            "environment": {name: os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")},
            "cpu": cpu_features(),
            "devices": device_code(self.cmake_args),
        }

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:20]


# --- source -----------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    if chosen := os.environ.get("DGR_CACHE_DIR"):
        return Path(chosen).absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "dgr"
    except RuntimeError:  # no HOME, and a user id without an entry
        raise BuildError("there is no home folder to keep llama.cpp in; name a folder in DGR_CACHE_DIR") from None


def fetch_sdist() -> Path:
    """Return the sdist: the one that is named, else the cached one, else one that pip downloads under its hash."""
    sdist = PIN["sdist"]
    folder = cache_dir() / "sdist"
    path = folder / sdist["file"]
    if named := os.environ.get("DGR_LLAMA_CPP_ARCHIVE"):
        path = Path(named).absolute()
        if not path.is_file():
            raise BuildError(f"DGR_LLAMA_CPP_ARCHIVE is {named!r}, which is no file: it must be {sdist['file']}")
    elif not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as download:
            # pip insists on the sdist's metadata; without isolation it need not install a build backend for that.
            isolation = [] if find_spec("scikit_build_core") is None else ["--no-build-isolation"]
            try:
                run(
                    f"downloading {sdist['name']} {sdist['version']} from PyPI",
                    sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--no-binary", sdist["name"], "--require-hashes", *isolation,
                    "--requirement", VENDOR / "requirements.txt", "--dest", download,
                )  # fmt: skip
            except BuildError as error:
                raise BuildError(
                    f"{error}; without a network name the archive {sdist['file']} in DGR_LLAMA_CPP_ARCHIVE"
                ) from error
            (Path(download) / sdist["file"]).replace(path)
    if (found := file_digest(path)) != sdist["sha256"]:
        raise BuildError(f"{path} has SHA-256 {found}, the pin says {sdist['sha256']}: remove the file and try again")
    return path


def unpack(sdist: Path, target: Path, paths: list[str]) -> None:
    """Write the regular files under some paths. (Python 3.11.2, Debian's, has no extraction filters yet.)"""
    root = f"{PIN['sdist']['root']}/"
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = PurePosixPath(member.name.removeprefix(root))
            used = member.name.startswith(root) and path.parts[0] in paths and ".." not in path.parts
            content = archive.extractfile(member) if used and member.isfile() else None
            if content is not None:
                file = target / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.read())


def copy_used_paths(target: Path, part: str = "tree") -> None:
    """Put the used paths of the pristine tree into `target` and check their digest; `part` as in `tree_digest`."""
    paths = PIN[part]["paths"]
    if checkout := os.environ.get("DGR_LLAMA_CPP_SOURCE"):
        origin = f"DGR_LLAMA_CPP_SOURCE ({checkout})"
        for used in paths:
            source = Path(checkout) / used
            if source.is_dir():
                shutil.copytree(source, target / used, symlinks=True)
            elif source.exists():
                shutil.copy2(source, target / used)
    else:
        origin = PIN["sdist"]["file"]
        unpack(fetch_sdist(), target, paths)
    if (found := tree_digest(target, part)) != PIN[part]["sha256"]:
        raise BuildError(f"the {part} of {origin} has digest {found}, the pin says {PIN[part]['sha256']}")


def apply_patches(tree: Path) -> None:
    """Apply the series with a library, since git and patch need not be installed, and check what came of it."""
    import patch_ng  # the key of a build can be told without it

    for patch in patches():
        series = patch_ng.fromfile(str(patch))
        if not series or not series.apply(root=str(tree)):
            raise BuildError(f"{patch.name} does not apply")
    if (found := tree_digest(tree)) != PIN["tree"]["patched_sha256"]:
        raise BuildError(
            f"the patched tree has digest {found}, the pin says {PIN['tree']['patched_sha256']}: "
            "after a change of patches run vendor/llama.cpp/check_patches.py --write"
        )


def prepare_source(target: Path, *, patched: bool) -> None:
    copy_used_paths(target)
    if patched:
        apply_patches(target)


# --- build ------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes: two builds of one key would waste a machine. Not every file system has locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ccache(work: Path) -> list[str]:
    """Arguments that send every compilation through ccache, where it is installed; nothing of what is computed depends on it.

    The folder of a build is new each time: its name must not count. ggml would look for ccache too, and complain without it.
    """
    os.environ["CCACHE_BASEDIR"], os.environ["CCACHE_NOHASHDIR"] = str(work), "1"
    found = shutil.which("ccache")
    languages = ("C", "CXX") if found else ()
    return ["-DGGML_CCACHE=OFF", *(f"-DCMAKE_{language}_COMPILER_LAUNCHER={found}" for language in languages)]


def describe(flavour: Flavour, prefix: Path) -> None:
    """Leave for CMake what the shim tells of its llama.cpp, and for people what the key stands for."""
    (prefix / "identity.json").write_text(json.dumps(flavour.identity(), indent=2), encoding="utf-8")
    options = " ".join(arg.removeprefix("-D") for arg in flavour.cmake_args if "GGML_" in arg or "BUILD_TYPE" in arg)
    lines = {
        "DGR_LLAMA_CPP_COMMIT": PIN["upstream"]["commit"],
        "DGR_PATCH_DIGEST": flavour.patch_digest,
        "DGR_GGML_OPTIONS": options,
        "DGR_SANITIZE": flavour.sanitize,
        "DGR_SANITIZER_FLAGS": SANITIZER_FLAGS,
    }
    text = "".join(f'set({name} "{value}")\n' for name, value in lines.items())
    (prefix / "dgr-llama-cpp.cmake").write_text(text, encoding="utf-8")


def prefix_of(flavour: Flavour) -> Path:
    """Return where the flavour is, or will be."""
    return cache_dir() / "llama.cpp" / flavour.key


def build(flavour: Flavour) -> Path:
    """Return the prefix of the flavour, built unless cached."""
    prefix = prefix_of(flavour)
    if prefix.exists():
        return prefix
    with locked(prefix.with_suffix(".lock")):
        if prefix.exists():  # another process has just built it
            return prefix
        what = "" if flavour.program is None else f"{flavour.program} of "
        kind = "patched" if flavour.patched else "unpatched"
        what = f"{what}{kind} {PIN['upstream']['commit'][:9]}"
        work = Path(tempfile.mkdtemp(prefix=f"{flavour.key}-", dir=prefix.parent))
        try:
            staged = work / "prefix"
            source = staged / "source"  # stays: the shim reads private headers
            source.mkdir(parents=True)
            prepare_source(source, patched=flavour.patched)
            if flavour.program is not None:
                copy_used_paths(source, pin_table(flavour.program))
            run(
                f"looking at compilers for {what}",
                "cmake", "-S", source, "-B", work / "build", "-G", "Ninja", "--log-level=WARNING",
                f"-DCMAKE_C_COMPILER={flavour.cc}", f"-DCMAKE_CXX_COMPILER={flavour.cxx}",
                f"-DCMAKE_INSTALL_PREFIX={staged}", *ccache(work), *flavour.cmake_args,
            )  # fmt: skip
            targets = TARGETS.get(flavour.program or "llama", (flavour.program or "llama",))
            run(f"compiling {what}, once", "cmake", "--build", work / "build", "--target", *targets)
            if flavour.program is not None:
                (staged / "bin").mkdir()
                for target in targets:
                    shutil.copy2(work / "build" / "bin" / target, staged / "bin")
                shutil.rmtree(source)  # nothing is built against it
            else:
                run("installing", "cmake", "--install", work / "build")
            describe(flavour, staged)
            with suppress(OSError):  # without a lock another build may have been faster
                staged.replace(prefix)
            if not prefix.exists():
                raise BuildError(f"{prefix} cannot be made; name another folder in DGR_CACHE_DIR")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return prefix


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the pinned llama.cpp and print its prefix.")
    parser.add_argument("--unpatched", action="store_true", help="upstream as it is")
    for name in PROGRAMS:
        words = f"build upstream's {name} instead, unpatched, and print its path"
        parser.add_argument(f"--{name}", dest="program", action="store_const", const=name, help=words)
    parser.add_argument("--cc", default=os.environ.get("CC") or "cc", help="C compiler")
    parser.add_argument("--cxx", default=os.environ.get("CXX") or "c++", help="C++ compiler")
    parser.add_argument("action", nargs="?", choices=("build", "source", "digest"), default="build")
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    if (options.folder is None) != (options.action == "build"):
        parser.error("source and digest take a folder, build takes none")
    if options.program and options.action == "source":
        parser.error(f"--{options.program} goes with build and digest")
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)  # patch-ng's
    try:
        if options.action == "digest":
            print(tree_digest(options.folder, "tree" if options.program is None else pin_table(options.program)))
        elif options.action == "source":
            options.folder.mkdir(parents=True)
            prepare_source(options.folder, patched=not options.unpatched)
        elif options.program is not None:
            prefix = build(Flavour(patched=False, program=options.program, cc=options.cc, cxx=options.cxx))
            print(prefix / "bin" / TARGETS.get(options.program, (options.program,))[0])
        else:
            print(build(Flavour(patched=not options.unpatched, cc=options.cc, cxx=options.cxx)))
    except BuildError as error:
        sys.exit(f"llama.cpp: {error}")


if __name__ == "__main__":
    main()
