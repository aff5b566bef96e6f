"""The repository's pages as tests read them: their headings, links, code blocks and what they name in code spans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
#: What people read: everything that the site has.
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "vendor/llama.cpp/README.md",
]
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_HEADING = re.compile(r"^#{1,6} (.+?)(?: \{#([\w-]+)\})?$", re.MULTILINE)


@frozen
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(*languages: str) -> Iterator[Block]:
    """Every block of some languages, on all pages."""
    for page in PAGES:
        yield from blocks_of(page, *languages)


def blocks_of(page: Path, *languages: str) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        words = fence[2].split()
        if words and words[0] in languages:
            line = text.count("\n", 0, fence.start()) + 2
            yield Block(page, line, words[0], fence[3])


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """The code spans of a page."""
    return _SPAN.findall(prose(page))


def links(page: Path) -> list[str]:
    return _LINK.findall(_SPAN.sub("", prose(page)))


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """What a link to the page may name after its ``#``; a heading that comes twice has a number the second time."""
    found: set[str] = set()
    for match in _HEADING.finditer(prose(page)):
        anchor, count = match[2] or slug(match[1]), 0
        while (anchor if not count else f"{anchor}-{count}") in found:
            count += 1
        found.add(anchor if not count else f"{anchor}-{count}")
    return found
