"""Says what ``make demo`` will do on this machine, and about how long that takes. Standard Python: nothing is installed yet.

python announce.py VENV MODEL
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llama_cpp

#: Processor seconds, as `time` told of each step on a server of 2023 (Zen 4) that was busy with other things; several cores
#: share the first two. A first run of its own takes less rather than more.
COMPILING_LLAMA_CPP, COMPILING_DGR, COMPRESSED = 190, 25, 5
#: Seconds, cores or not: a virtual environment and packages from a registry that is near; tests, model and answer.
INSTALLING, RUNNING = 25, 8


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def told(seconds: float) -> str:
    """A duration that nobody takes for a measurement."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    return f"about {round(seconds / 30) / 2:g} min"


def is_built(venv: Path) -> bool:
    """Whether dgr is in the environment, and nothing that it is built from has changed since."""
    stamp, build = venv / ".stamp-dgr", Path(__file__).parent
    sources = [build.parent / "pyproject.toml", *build.glob("*.*"), *llama_cpp.VENDOR.glob("*.*"), *llama_cpp.patches()]
    return stamp.exists() and all(path.stat().st_mtime <= stamp.stat().st_mtime for path in sources)


def steps(venv: Path, model: Path) -> list[tuple[str, float]]:
    """What is left to do, and seconds it takes."""
    n, found = cores(), list[tuple[str, float]]()
    written = "" if model.exists() else ", write a model of 20 MB"
    run = (f"test the kernels that it needs{written}, answer a prompt on three stages", float(RUNNING))
    if is_built(venv):
        return [run]
    if not (venv / ".stamp-tools").exists():
        found.append((f"install build tools and libraries into {venv}, from PyPI", INSTALLING))
    cc, cxx = os.environ.get("CC") or "cc", os.environ.get("CXX") or "c++"
    prefix = llama_cpp.prefix_of(llama_cpp.Flavour(patched=True, cc=cc, cxx=cxx))
    if not prefix.exists():
        where = prefix.parent.parent
        found.append((f"compile llama.cpp, once, into {where}", COMPILING_LLAMA_CPP / n + COMPRESSED))
    found.append(("compile what joins Python and llama.cpp", COMPILING_DGR / n))
    return [*found, run]


def main() -> None:
    venv, model = map(Path, sys.argv[1:])
    try:
        planned = steps(venv, model)
    except llama_cpp.BuildError as error:
        sys.exit(f"make demo: {error}")
    n = cores()
    total = told(sum(seconds for _, seconds in planned))
    print(f"make demo: {total} on the {n} core{'s' * (n > 1)} here, {len(planned)} step{'s' * (len(planned) > 1)}:")
    width = max(len(what) for what, _ in planned)
    for number, (what, seconds) in enumerate(planned, 1):
        print(f"  {number}. {what:<{width}}  {told(seconds)}")
    print(flush=True)


if __name__ == "__main__":
    main()
