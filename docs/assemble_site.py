"""Gather what the site is built from: ``python docs/assemble_site.py FOLDER``.

README.md becomes its first page. Pages stay as they read in the repository: links that lead out of ``docs`` are made to lead to
copies of the files, under ``source/``, so that the site is whole without the repository. Pages with diagrams load Mermaid from
the site, where the theme would load it from elsewhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import posixpath
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folder of the site with what lies outside ``docs``.
SOURCE = "source"
#: Mermaid as its project releases it, ``dist/mermaid.min.js`` of that version, and the package that brings it.
MERMAID = "mermaid-11.16.0.min.js"
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
MERMAID_PACKAGE = ("mermaidx", "mermaidx/assets/mermaid.js")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def site_path(path: str) -> str:
    """Where a file of the repository lies on the site; a folder is shown by its README, and code as text."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.txt"


def leads_to(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page leads to; None for an address elsewhere."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if ":" not in link and not path.startswith("..") and (ROOT / path).exists() else None


def read(path: str) -> str:
    """A page as it is in the repository; a folder without a README is a list of its files."""
    source = ROOT / path
    if source.is_dir():
        readme = source / "README.md"
        if not readme.exists():
            return f"# {path}\n\n" + "".join(f"- `{each.name}`\n" for each in sorted(source.iterdir()))
        source = readme
    return source.read_text(encoding="utf-8")


def mermaid() -> bytes:
    """The script that draws diagrams; ends the program where it is another one than was chosen."""
    package, path = MERMAID_PACKAGE
    script = Path(str(importlib.metadata.distribution(package).locate_file(path))).read_bytes()
    if hashlib.sha256(script).hexdigest() != MERMAID_SHA256:
        sys.exit(f"{package}'s {path} is not {MERMAID}: its SHA-256 is not {MERMAID_SHA256}")
    return script


def assemble(folder: Path) -> None:
    """Write every page, and whatever pages lead to."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = [
        "README.md",
        *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.[ms][dv]*"))),
    ]
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        if (there := site_path(path)) in done:
            continue
        done.add(there)
        text = read(path)
        if there.endswith(".md"):

            def fitted(match: re.Match[str], path: str = path, there: str = there) -> str:
                before, link, anchor, after = match.groups()
                page = posixpath.join(path, "README.md") if (ROOT / path).is_dir() else path
                if (target := leads_to(page, link)) is None:
                    return match[0]
                waiting.append(target)
                return f"{before}{posixpath.relpath(site_path(target), posixpath.dirname(there) or '.')}{anchor or ''}{after}"

            text = _LINK.sub(fitted, text)
            if "\n```mermaid\n" in text:
                script = posixpath.relpath(MERMAID, posixpath.dirname(there) or ".")
                text += f'\n<script src="{script}"></script>\n'
        target = folder / there
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    (folder / MERMAID).write_bytes(mermaid())


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
