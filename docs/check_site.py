"""Check that a site is whole: ``python docs/check_site.py FOLDER`` fails where a page loads what the folder does not have.

Links may lead anywhere; what a browser loads by itself (scripts, styles, pictures, fonts, frames) must be a file of the site.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes whose addresses are loaded, whatever element has them.
LOADED = frozenset({"src", "srcset", "poster", "data", "background", "xlink:href"})
#: Elements whose ``href`` is loaded; that of others is followed.
LOADING = frozenset({"link", "image", "use", "feimage"})
#: What a ``link`` may name without loading it.
NAMED = frozenset({"alternate", "author", "canonical", "license", "next", "prev", "search"})
_STYLED = re.compile(r"""url\(\s*["']?(.*?)["']?\s*\)|@import\s*["'](.*?)["']""")


def styled(text: str) -> Iterator[str]:
    """Addresses that a style sheet loads."""
    for match in _STYLED.finditer(text):
        yield match[1] or match[2] or ""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.diagrams = 0
        self.in_style = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.in_style = tag == "style"
        self.diagrams += "mermaid" in given.get("class", "").split()
        self.loads += styled(given.get("style", ""))
        for name, value in given.items():
            if name == "srcset":
                self.loads += [each.split()[0] for each in value.split(",") if each.strip()]
            elif name in LOADED or (
                name == "href" and tag in LOADING and not NAMED.intersection(given.get("rel", "").split())
            ):
                self.loads.append(value)

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.loads += styled(data)

    def handle_endtag(self, tag: str) -> None:
        self.in_style = self.in_style and tag != "style"


def faults(site: Path) -> Iterator[str]:
    """What a browser would load for the pages and styles of a site and not find there."""
    for path in sorted(site.rglob("*")):
        if path.suffix == ".css":
            loads = list(styled(path.read_text(encoding="utf-8")))
        elif path.suffix in {".html", ".svg"}:
            page = _Page()
            page.feed(path.read_text(encoding="utf-8"))
            loads = page.loads
            if page.diagrams and not any(Path(load).name.startswith("mermaid-") for load in loads):
                yield f"{path.relative_to(site)}: has a diagram, and the theme would load Mermaid from elsewhere"
        else:
            continue
        for load in loads:
            address = urlsplit(load)
            if address.scheme == "data" or load.startswith("#"):
                continue
            # A server answers with this page wherever something is asked for that is not there, so it names the root.
            folder, inside = (
                (site, address.path.lstrip("/")) if path.name == "404.html" else (path.parent, address.path)
            )
            there = (folder / unquote(inside)).resolve()
            if address.scheme or address.netloc or not there.is_relative_to(site):
                yield f"{path.relative_to(site)}: loads {load} from elsewhere"
            elif not there.is_file():
                yield f"{path.relative_to(site)}: loads {load}, which is not there"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]).resolve()))
    sys.exit("\n".join(found) if found else 0)
