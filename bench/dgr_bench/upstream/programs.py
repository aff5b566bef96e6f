"""Where the binaries of upstream's programs come from.

They are built from the unpatched source of the pin by ``cffi_build/llama_cpp.py --PROGRAM``, on demand and only in a checkout
of dgr; elsewhere a binary of the same pin is named.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dgr.errors import InputError

__all__ = [
    "SCRIPT",
    "add_program_argument",
    "bench_beside",
    "check_pin",
    "commit_told",
    "find_program",
    "named_programs",
    "refuse_other_pin",
]

SCRIPT = Path("cffi_build", "llama_cpp.py")
#: Upstream's programs that a flag may name.
_PROGRAMS = ("llama-bench", "llama-server", "rpc-server")
_COMMIT = re.compile(rb"commit ([0-9a-f]{7,40})")
#: Seconds for a binary to tell its version.
_PATIENCE = 60.0


def add_program_argument(parser: argparse.ArgumentParser, program: str) -> None:
    """``--llama-bench``, ``--llama-server`` or ``--rpc-server``."""
    words = "upstream's binary, of the same pin (default: built from the pin, which takes minutes once)"
    parser.add_argument(f"--{program}", type=Path, metavar="PATH", help=words)
    parser.set_defaults(named_programs=named_programs)


def find_program(program: str, given: Path | None) -> Path:
    """The binary that was named, or the one built from the pin, which takes minutes the first time.

    Raises :class:`~dgr.errors.InputError` saying what to do when there is neither.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise InputError(f"--{program} {given} is not a program that can be run; give the path of the binary")
        return Path(found)
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / SCRIPT).is_file():
        raise InputError(
            f"{program} is built from a checkout of dgr, and {SCRIPT} is not beside the installed package; run"
            f" `python {SCRIPT} --{program}` in a checkout and name what it prints with --{program}"
        )
    # cmake and ninja may be wheels of this environment, which need not be active.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    built = subprocess.run(
        [sys.executable, checkout / SCRIPT, f"--{program}"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    if built.returncode != 0:
        raise InputError(
            f"{program} could not be built, exit status {built.returncode}; the reason stands above. Mend it, or name a"
            f" binary with --{program}"
        )
    return Path(built.stdout.strip())


def bench_beside(rpc_server: Path) -> Path:
    """The llama-bench that was built with a server of the RPC backend. Raises :class:`~dgr.errors.InputError`."""
    found = rpc_server.with_name("llama-bench")
    if not found.is_file():
        raise InputError(
            f"there is no llama-bench beside {rpc_server}; one with the RPC backend is built with the server"
        )
    return found


def commit_told(said: bytes) -> str:
    """The commit in what a binary says to ``--version``; empty for none."""
    found = _COMMIT.search(said)
    return "" if found is None else found[1].decode()


def check_pin(binary: Path, program: str, ours: str) -> None:
    """Raises :class:`~dgr.errors.InputError` unless ``binary`` says that it was built from the commit ``ours``."""
    try:
        told = subprocess.run([binary, "--version"], capture_output=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"it says nothing for {_PATIENCE:g} s"
        raise InputError(f"cannot run {binary}: {why}; name another with --{program}") from error
    refuse_other_pin(binary, program, commit_told(told.stdout + told.stderr), ours)


def named_programs(args: argparse.Namespace) -> dict[str, str]:
    """Digests of the binaries that the flags of :func:`add_program_argument` name."""
    given = {program: getattr(args, program.replace("-", "_"), None) for program in _PROGRAMS}
    paths = {
        program: Path(found) for program, path in given.items() if path is not None and (found := shutil.which(path))
    }
    if "rpc-server" in paths:  # and who asks it
        paths["llama-bench"] = bench_beside(paths["rpc-server"])
    return {program: hashlib.sha256(path.read_bytes()).hexdigest()[:32] for program, path in paths.items()}


def refuse_other_pin(binary: Path, program: str, theirs: str, ours: str) -> None:
    """Raises :class:`~dgr.errors.InputError` unless ``theirs``, which a binary says of itself, begins the commit ``ours``."""
    if not theirs or not ours.startswith(theirs):
        raise InputError(
            f"{binary} was built from llama.cpp {theirs or 'of no commit'}, dgr from {ours[:9]}; build one of the same pin"
            f" with {SCRIPT} --{program}"
        )
