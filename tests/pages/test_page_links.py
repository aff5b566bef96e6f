"""What pages lead to and name is there: links and their anchors, files, make targets, extras, commands and flags."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from pages.reading import PAGES, ROOT, anchors, links, named, slug, spans

#: Folders of the repository that pages name files in.
TOP = ("bench/", "cffi_build/", "deploy/", "dgr/", "docs/", "examples/", "tests/", "vendor/")
_BRACES = re.compile(r"\{([^{}]*)\}")
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=named)


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link}: there is no {path}")
        elif anchor and anchor not in anchors(target / "README.md" if target.is_dir() else target):
            found.append(f"{link}: {target.name} has no heading {anchor}")
    return found


@EACH_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_links_that_lead_nowhere_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, `with` code\n[a](#a-heading-with-code) [b](none.md) [c](#none) [d](https://x.y) `[e](no.md)`\n"
    )
    assert broken(page) == ["none.md: there is no none.md", "#none: page.md has no heading none"]
    assert slug("V4's widths: `f32` & more") == "v4s-widths-f32--more"


def files_named(page: Path) -> set[str]:
    """Paths of the repository in a page's code spans, braces expanded."""
    found = set()
    for span in spans(page):
        if span.startswith(TOP) and re.fullmatch(r"[\w./{},*+-]+", span):
            parts = _BRACES.split(span)
            choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
            found |= {"".join(choice) for choice in itertools.product(*choices)}
    return found


@EACH_PAGE
def test_files_that_are_named_are_there(page: Path) -> None:
    assert [path for path in sorted(files_named(page)) if not list(ROOT.glob(path))] == []


def test_braces_are_read() -> None:
    assert len(files_named(ROOT / "docs/architecture.md")) > 10


@EACH_PAGE
def test_make_targets_and_extras_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"`(?:[A-Z_]+=\S* )*make ([\w -]+)`", text):
        assert {*command.split()} <= targets, command
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"pip install '\.\[([\w,]+)\]'", text):
        assert {*extras.split(",")} <= {*project["optional-dependencies"]}, extras


def test_the_site_leads_to_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w.-]+\.md)$", nav, re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - listed == set()
