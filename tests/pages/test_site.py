"""The check of the built site: whatever a page would load from elsewhere, or not find, is seen."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from pages.reading import ROOT
from scripts import loaded

#: What a page has, and what is said of it.
FAULTY = {
    '<script src="https://cdn.example/m.js"></script>': "loads https://cdn.example/m.js from elsewhere",
    '<script src="//cdn.example/m.js"></script>': "loads //cdn.example/m.js from elsewhere",
    '<link rel="preload stylesheet" href="https://fonts.example/css">': "loads https://fonts.example/css from elsewhere",
    '<img alt="" srcset="a.png 1x, https://cdn.example/b.png 2x">': "loads https://cdn.example/b.png from elsewhere",
    "<style>@import 'https://fonts.example/css';</style>": "loads https://fonts.example/css from elsewhere",
    '<p style="background: url(https://cdn.example/b.png)">': "loads https://cdn.example/b.png from elsewhere",
    '<svg><use href="https://cdn.example/i.svg#a"/></svg>': "loads https://cdn.example/i.svg#a from elsewhere",
    '<iframe src="../outside.html"></iframe>': "loads ../outside.html from elsewhere",
    '<script src="/a.png"></script>': "loads /a.png from elsewhere",
    '<img alt="" src="b.png">': "loads b.png, which is not there",
    '<pre class="mermaid"></pre>': "has a diagram, and the theme would load Mermaid from elsewhere",
}


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return loaded(ROOT / "docs/check_site.py")


@pytest.mark.parametrize("markup", FAULTY)
def test_what_is_loaded_from_elsewhere_is_seen(check: ModuleType, markup: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "page.html").write_text(markup)
    assert list(check.faults(tmp_path)) == [f"page.html: {FAULTY[markup]}"]


def test_a_style_sheet_is_looked_at_too(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    assert list(check.faults(tmp_path)) == ["a.css: loads https://fonts.example/a.woff2 from elsewhere"]


def test_a_whole_site_passes(check: ModuleType, tmp_path: Path) -> None:
    for name in ("a.png", "mermaid-1.min.js", "a.css"):
        (tmp_path / name).touch()
    (tmp_path / "404.html").write_text('<script src="/a.png"></script>')
    (tmp_path / "page.html").write_text(
        '<link rel="stylesheet" href="./a.css"><link rel="canonical" href="https://dgr.example/"><pre class="mermaid"></pre>'
        '<script src="mermaid-1.min.js"></script><a href="https://dgr.example"><img alt="" src="a.png?v=1"></a>'
        '<img alt="" src="data:image/png;base64,"><svg><use href="#a"/></svg>'
    )
    assert list(check.faults(tmp_path)) == []
