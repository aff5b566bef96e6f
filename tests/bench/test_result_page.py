"""The page of a report: whole in one file, readable by a person and a phone, and nothing of a report is taken for HTML."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dgr_bench.cli import main
from dgr_bench.page import page
from dgr_bench.plots import Plot, curve
from dgr_bench.reports import Section, table, write_report
from dgr_bench.results import Journal, Result
from dgr_bench.verdicts import Check

HOSTILE = "</pre><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(1)>"


class Elements(HTMLParser):
    """Every element of a page with its attributes; unbalanced ones fail."""

    VOID = frozenset({"meta", "img", "br", "hr", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


def from_outside(text: str) -> list[str]:
    """What a page would fetch, run or be told by somebody else."""
    elements = Elements(text)
    found = [tag for tag, _ in elements.found if tag in {"script", "link", "iframe", "object", "embed", "base", "form"}]
    for tag, attributes in elements.found:
        found += [f"{tag} {name}" for name in attributes if name.startswith("on")]
        for name in ("src", "srcset", "poster", "data", "background"):
            value = attributes.get(name)
            found += [f"{tag} {name}={value}"] if value is not None and not value.startswith("data:image/") else []
    found += re.findall(r"@import[^;]*|url\([^)]*\)", "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL)))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Result]]:
    """``run(passed=..., complete=...)``: a folder with a result and its report, with hostile words wherever others write."""

    def make(*, passed: bool = True, complete: bool = True) -> tuple[Path, Result]:
        folder = tmp_path_factory.mktemp("run")
        with Journal.open(folder, "hops", {"name": "test"}, {"artifact": HOSTILE}, f"dgr-bench {HOSTILE}") as journal:
            journal.put("unit/1", {"seconds": 0.25, "said": HOSTILE})
            if complete:
                checks = [Check(name="one", passed=passed, cases=3, detail=HOSTILE)]
                journal.finish({"median_s": 0.25}, checks)
            result = journal.result
        rows = [{"x": 1, "y": 2.0}, {"x": 2, "y": 1.0}]
        plot = Plot(
            "Times", "times", "Time", "n", "seconds", lambda axes: curve(axes, rows, "x", "y", 1, "o", "measured")
        )
        write_report(folder, "A run", result, [Section("Times", (table(("n", "s"), [(1, 0.25)]),))], [plot])
        return folder, result

    return make


def written(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["report", str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    return (folder / "report.html").read_text(encoding="utf-8")


def test_a_run_is_one_page_that_needs_nothing_else(
    run: Callable[..., tuple[Path, Result]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = run()
    text = written(folder, capsys)
    assert from_outside(text) == []
    elements = Elements(text)
    (picture,) = elements.of("img")
    assert picture["alt"] == "Time: seconds"
    kind, _, content = str(picture["src"]).partition(";base64,")
    assert kind == "data:image/svg+xml"
    assert b"measured" in base64.b64decode(content)  # text is text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in elements.of("meta")
    anchors = {str(one["href"])[1:] for one in elements.of("a") if str(one["href"]).startswith("#")}
    assert anchors == {str(one["id"]) for one in elements.of("h2")}
    assert "Passed: all 1 checks." in text
    assert result.environment.runtime in text


def test_raw_numbers_are_there_for_whoever_asks(
    run: Callable[..., tuple[Path, Result]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = run()
    text = written(folder, capsys)
    assert all("open" not in one for one in Elements(text).of("details"))
    shown = dict(re.findall(r"<summary>(.*?) \([^)]*\)</summary><pre>(.*?)</pre>", text, re.DOTALL))
    assert set(shown) == {"plan", "subject", "figures", "unit unit/1"}
    assert json.loads(unescape(shown["unit unit/1"])) == result.units["unit/1"]


def test_a_verdict_is_seen_at_once(run: Callable[..., tuple[Path, Result]], capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        ({"passed": False}, 'class="verdict failed"><strong>Not passed: 1 of 1 checks failed.'),
        ({"complete": False}, 'class="verdict unfinished"><strong>Not complete'),
    ):
        folder, _ = run(**options)
        assert words in written(folder, capsys)


def test_what_others_wrote_is_text(run: Callable[..., tuple[Path, Result]]) -> None:
    folder, result = run()
    report = (folder / "report.md").read_text() + f"\n\n## {HOSTILE}\n\n![{HOSTILE}](https://example.org/x.png)\n"
    text = page(report, result, folder)
    assert from_outside(text) == []
    assert "the picture is not beside the report" in text


def test_a_page_that_lets_html_through_is_caught(
    run: Callable[..., tuple[Path, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, result = run()
    monkeypatch.setattr("dgr_bench.page.escape", lambda text, quote=True: text)
    text = page((folder / "report.md").read_text(), result, folder).replace("</pre><script>", "<script>")
    with pytest.raises(AssertionError):
        assert from_outside(text) == []


def test_pictures_are_those_of_the_folder_alone(run: Callable[..., tuple[Path, Result]], tmp_path: Path) -> None:
    folder, _ = run()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "plots" / "link.png").symlink_to(tmp_path / "secret.png")
    for source in ("../secret.png", str(tmp_path / "secret.png"), "plots/link.png", "result.json", "plots/none.png"):
        text = page(f"# A\n\n![x]({source})\n", None, folder)
        assert "the picture is not beside the report" in text, source
        assert base64.b64encode(b"secret").decode() not in text
    (folder / "plots" / "times.svg").unlink()
    assert "data:image/png;base64" in page("# A\n\n![x](plots/times.png)\n", None, folder)


def test_a_folder_without_a_report_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "give the folder of a finished run" in capsys.readouterr().err


def test_a_comparison_has_a_page_without_a_result(tmp_path: Path) -> None:
    text = page("# Two results\n\n## Alike\n\nYes.\n", None, tmp_path)
    assert from_outside(text) == []
    assert "Raw numbers" not in text
    assert "<title>Two results</title>" in text
