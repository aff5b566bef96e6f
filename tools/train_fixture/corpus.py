"""English text about Python, PSF licence: what comes with CPython, and the sources of its documentation.

Paragraphs of prose are kept, from ``pydoc_data.topics`` (what ``help()`` shows), from the docstrings of the standard library
and from the documentation's reStructuredText, where there is any; tables, code and lists of parameters are not.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["HELD_OUT", "english", "held_out"]

#: One topic or module in so many is never trained on, in the order of their names.
HELD_OUT = 10

_PROSE = re.compile(r"[A-Z(\"'][^\x00-\x09\x0b-\x1f\x7f-\uffff]*[.:]")
_LETTERS = 0.80
_FEWEST = 50
#: Paragraphs that share so many words in a row with a held-out one are not trained on.
_SHARED = 8
#: What reStructuredText puts around words, and what is left of it.
_ROLE = re.compile(r":[a-zA-Z0-9:+-]+:`([^`]*)`")
_TARGET = re.compile(r"\s*<[^<>]*>$")
_PLAIN = (
    (re.compile(r"`([^`<]*?)\s*<[^<>`]*>`__?"), r"\1"),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r"`([^`]*)`__?"), r"\1"),
    (re.compile(r"\b([\w-]+)_(?=[\s.,;:)])"), r"\1"),
    (re.compile(r"\[#?\w*\]_"), ""),
    (re.compile(r"\|version\|"), "3"),
    (re.compile(r"::"), ":"),
)
_BULLET = re.compile(r"\s*(?:[*-]|\d+\.|#\.)\s+")
_DEEPEST = 6
#: Folders of the standard library that are not it, or not prose.
_NOT = frozenset({"__pycache__", "config", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"})


def _is_prose(line: str) -> bool:
    letters = sum(char.isalpha() or char == " " for char in line)
    return len(line) >= _FEWEST and letters >= _LETTERS * len(line) and _PROSE.fullmatch(line) is not None


def _blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Paragraphs: the first line, all lines as one, and how far the first is indented."""
    for block in re.split(r"\n\s*\n", text):
        first = (block.strip("\n").splitlines() or [""])[0]
        yield first, " ".join(block.split()), len(first) - len(first.lstrip(" "))


def _paragraphs(text: str) -> Iterator[str]:
    for _, line, indent in _blocks(text):
        plain = re.sub(r"[\"*`<>{}\[\]]", "", line)
        if indent <= 3 and _is_prose(plain):
            yield plain


def _role(match: re.Match[str]) -> str:
    inner = _TARGET.sub("", match[1])
    return inner.lstrip("!~").split(".")[-1] if match[1].startswith("~") else inner.lstrip("!~")


def _documentation(folder: Path) -> Iterator[str]:
    """Paragraphs of the documentation's sources, in the order of their names."""
    for path in sorted(folder.rglob("*.rst.txt")):
        for first, line, indent in _blocks(path.read_text(errors="ignore")):
            if first.lstrip().startswith(("..", ":", "|", "+", "=", "*  ")):
                continue
            plain = _ROLE.sub(_role, line)
            for pattern, left in _PLAIN:
                plain = pattern.sub(left, plain)
            plain = " ".join(plain.split())
            if _BULLET.match(first):
                plain = _BULLET.sub("", plain, count=1)
            plain = re.sub(r"[\"*`<>{}\[\]\\]", "", plain)
            if indent <= _DEEPEST and _is_prose(plain):
                yield plain


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


def _words(line: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z]+", line.lower()))


def _shared(line: str) -> set[tuple[str, ...]]:
    words = _words(line)
    return {words[at : at + _SHARED] for at in range(max(1, len(words) - _SHARED + 1))}


def _standard(*, held_out: bool) -> list[str]:
    seen: set[str] = set()
    lines: list[str] = []
    for index, (_, text) in enumerate(_sources()):
        for line in _paragraphs(text):
            known = line in seen
            seen.add(line)
            if not known and (index % HELD_OUT == HELD_OUT - 1) == held_out:
                lines.append(line)
    return lines


def english(documentation: Path | None = None) -> bytes:
    """What is trained on: paragraphs, one a line, each once; none of the documentation's shares words with held-out ones."""
    lines: dict[tuple[str, ...], str] = {}
    if documentation is not None:
        held = set[tuple[str, ...]]().union(*map(_shared, _standard(held_out=True)))
        for line in _documentation(documentation):
            lines.setdefault(_words(line), "" if _shared(line) & held else line)
    kept = [line for line in lines.values() if line]
    kept += [line for line in _standard(held_out=False) if _words(line) not in lines]
    return "\n".join(kept).encode("ascii", "ignore")


def held_out(trained: bytes) -> bytes:
    """Paragraphs that are never trained on: no eight words in a row of them are in ``trained``."""
    known = set[tuple[str, ...]]().union(*map(_shared, trained.decode().splitlines()))
    return "\n".join(line for line in _standard(held_out=True) if not _shared(line) & known).encode("ascii", "ignore")
