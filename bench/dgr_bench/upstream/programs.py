"""Where the binaries of upstream's programs come from.

They are built from the unpatched source of the pin by ``cffi_build/llama_cpp.py --PROGRAM``, on demand and only in a checkout
of dgr; elsewhere a binary of the same pin is named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dgr.errors import InputError

__all__ = ["SCRIPT", "add_program_argument", "find_program", "refuse_other_pin"]

SCRIPT = Path("cffi_build", "llama_cpp.py")


def add_program_argument(parser: argparse.ArgumentParser, program: str) -> None:
    """``--llama-bench`` or ``--llama-server``."""
    words = "upstream's binary, of the same pin (default: built from the pin, which takes minutes once)"
    parser.add_argument(f"--{program}", type=Path, metavar="PATH", help=words)


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


def refuse_other_pin(binary: Path, program: str, theirs: str, ours: str) -> None:
    """Raises :class:`~dgr.errors.InputError` unless ``theirs``, which a binary says of itself, begins the commit ``ours``."""
    if not theirs or not ours.startswith(theirs):
        raise InputError(
            f"{binary} was built from llama.cpp {theirs or 'of no commit'}, dgr from {ours[:9]}; build one of the same pin"
            f" with {SCRIPT} --{program}"
        )
