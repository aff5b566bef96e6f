"""What lies where a file should: nothing, a folder, a pipe that nobody writes to, links in a circle, files without end."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from dgr.testing.hostile_files.kind import Mutation

__all__ = ["PLACES", "misplaced"]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            sock.bind(f"/proc/self/fd/{folder}/{path.name}")  # a whole path may be too long for an address
        finally:
            os.close(folder)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


#: By what it is: makes it at a path where nothing is.
PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("none"),
    "a link to a folder": lambda path: path.symlink_to("."),
    "zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "noise without end": lambda path: path.symlink_to("/dev/urandom"),
    "an empty device": lambda path: path.symlink_to(os.devnull),
    "an empty file": lambda path: path.touch(),
    "a tebibyte of holes": _sparse,
}


def misplaced(copy: Callable[[Path, Path], Path], place: str | None = None) -> Mutation:
    """Something else in a file's place, drawn unless it is named.

    ``copy(base, folder)``: brings the whole files over, and tells the one to replace.
    """

    def change(drawn: random.Random, base: Path, folder: Path) -> Path:
        path = copy(base, folder)
        path.unlink()
        PLACES[place or drawn.choice(list(PLACES))](path)
        return path

    return change
