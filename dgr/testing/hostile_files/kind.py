"""What is known of a kind of file: how whole ones are made, how they are damaged, and who reads them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

__all__ = ["Door", "FileKind", "Mutation"]

#: Takes a source of chance, a folder with the whole files and one for the damaged ones; returns the path to open.
Mutation = Callable[[random.Random, Path, Path], Path]
#: A way of the product to read what lies at a path. Raises a :class:`~dgr.errors.DgrError`, or nothing.
Door = Callable[[Path], object]


@frozen
class FileKind:
    """A kind of file that the product reads."""

    #: Makes whole files in a folder.
    write: Callable[[Path], object]
    #: Kinds of damage, drawn in turn.
    damages: Mapping[str, Mutation]
    #: Every reader, by what it is called here.
    doors: Mapping[str, Door]
    #: What once went wrong, or would without a check; the same for every seed.
    directed: Mapping[str, Mutation] = field(factory=dict)
    #: Changes of the product, each taking a check out of it; the cases must find them.
    mutants: Mapping[str, Callable[[], None]] = field(factory=dict)
