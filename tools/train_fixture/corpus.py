"""English text from what is installed anyway: the reference and the docstrings that come with CPython, PSF licence.

Paragraphs of prose are kept, from ``pydoc_data.topics`` (what ``help()`` shows) and from the docstrings of the standard
library; tables, code and lists of parameters are not.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["HELD_OUT", "english"]

#: One topic or module in so many is never trained on, in the order of their names.
HELD_OUT = 10

_PROSE = re.compile(r"[A-Z(\"'][^\x00-\x09\x0b-\x1f\x7f-\uffff]*[.:]")
_LETTERS = 0.80
_FEWEST = 50
#: Folders of the standard library that are not it, or not prose.
_NOT = frozenset({"__pycache__", "config", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"})


def _paragraphs(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        line = re.sub(r"[\"*`<>{}\[\]]", "", line)
        letters = sum(char.isalpha() or char == " " for char in line)
        lines = block.strip("\n").splitlines() or [""]
        indent = len(lines[0]) - len(lines[0].lstrip(" "))
        if indent <= 3 and len(line) >= _FEWEST and letters >= _LETTERS * len(line) and _PROSE.fullmatch(line):
            yield line


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a sample of what Python does not take
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in found if text)


def _sources() -> Iterator[tuple[str, str]]:
    """Names and texts, in the order of their names."""
    yield from sorted(topics.items())
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not any(part in _NOT or part.startswith("config-") for part in parts):
            yield "/".join(parts), _docstrings(path)


def english(*, held_out: bool) -> bytes:
    """Paragraphs, one a line: those that are trained on, or those that never are. Each stands once."""
    seen: set[str] = set()
    lines: list[str] = []
    for index, (_, text) in enumerate(_sources()):
        for line in _paragraphs(text):
            known = line in seen
            seen.add(line)
            if not known and (index % HELD_OUT == HELD_OUT - 1) == held_out:
                lines.append(line)
    return "\n".join(lines).encode("ascii", "ignore")
