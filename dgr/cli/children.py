"""Command lines of child processes: nothing in the working folder is taken for code, and no name for a flag."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["flags_of", "python_module", "spelled_out"]


def python_module(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """The command line of a module that is run by this interpreter, which looks for modules where they are installed.

    ``python``: the interpreter of another environment, which also looks nowhere that the present one's environment says.
    """
    return (
        [sys.executable, "-P", "-m", module, *arguments] if python is None else [python, "-I", "-m", module, *arguments]
    )


def spelled_out(path: str | Path) -> str:
    """A path that no program takes for a flag: absolute, its links and its ``..`` as they are."""
    return str(Path(path).absolute())


def flags_of(values: Mapping[str, object]) -> list[str]:
    """``--flag=value`` each: in one word, a value that begins with a dash is still a value."""
    return [f"{flag}={value}" for flag, value in values.items()]
