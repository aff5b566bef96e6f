"""``dgr-bench report``: a result and its report as one HTML page that needs nothing beside it."""

from __future__ import annotations

import argparse
import base64
import itertools
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dgr.cli.options import require_extra
from dgr.cli.progress import progress_bar
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.units import human_bytes
from dgr.errors import InputError
from dgr_bench.benchmark import Command
from dgr_bench.results import Result, read_result

if TYPE_CHECKING:
    from markdown_it.renderer import RendererHTML
    from markdown_it.token import Token

#: How a picture of a report may be there, the best first: drawn in lines, or in dots.
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}

#: What a browser may load for the page: nothing but the pictures and the style that are in it.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #57606a; --line: #d0d7de; --shade: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9da7b1; --line: #30363d; --shade: #161b22; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
.verdict { border-radius: .4rem; padding: .6rem .8rem; color: #fff; }
.passed { background: #116329; } .failed { background: #a40e26; } .unfinished { background: #6e4a00; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top; overflow-wrap: normal; }
th { background: var(--shade); }
td:last-child, .scroll code { overflow-wrap: anywhere; min-width: 4rem; }
img { display: block; width: min(100%, 46rem); height: auto; margin: .8rem 0; background: #fff; border: 1px solid var(--line); }
code, pre { font: .8125rem/1.4 ui-monospace, monospace; }
code { background: var(--shade); padding: 0 .2em; }
pre { background: var(--shade); padding: .5rem; overflow-x: auto; max-height: 30rem; }
details { border-bottom: 1px solid var(--line); } summary { cursor: pointer; padding: .35rem 0; }
nav a { margin-right: .8rem; white-space: nowrap; } a { color: inherit; } footer { color: var(--faint); margin-top: 2rem; }
@media print {
  :root { color-scheme: light; --ink: #000; --paper: #fff; --line: #999; --shade: #eee; --faint: #333; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav, .raw { display: none; }
  .scroll { overflow: visible; } table { font-size: 8pt; } tr, img { break-inside: avoid; } h2 { break-after: avoid; }
  .verdict { color: #000; background: none; border: 2px solid #000; }
}
"""


def page(text: str, result: Result | None, folder: Path) -> str:
    """The page of a report: its Markdown with the pictures of ``folder`` in it, and the raw numbers of a result.

    Raises :class:`~dgr.errors.InputError` where the library that reads Markdown is missing.
    """
    body, title, headings = _body(text, folder)
    banner = "" if result is None else _banner(result)
    # The first heading, then the verdict in a colour.
    head, mark, rest = body.partition("</h1>")
    headings += [] if result is None else [("raw", "Raw numbers")]
    links = " ".join(f'<a href="#{anchor}">{escape(words)}</a>' for anchor, words in headings)
    raw = "" if result is None else "".join(_raw(result))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{head}{mark}\n{banner}<nav>{links}</nav>\n{rest}{raw}"
        f"<footer>{_footer(result)}</footer>\n</body>\n</html>\n"
    )


def _banner(result: Result) -> str:
    failed = sum(not check.passed for check in result.checks)
    kind = "unfinished" if not result.complete else "passed" if result.passed else "failed"
    words = {
        "unfinished": "Not complete: the run did not come to its end.",
        "passed": f"Passed: all {len(result.checks)} checks.",
        "failed": f"Not passed: {failed} of {len(result.checks)} checks failed.",
    }[kind]
    return f'<p class="verdict {kind}"><strong>{words}</strong></p>\n'


def _footer(result: Result | None) -> str:
    return "" if result is None else escape(f"{result.environment.runtime}, schema {result.schema}")


def _body(text: str, folder: Path) -> tuple[str, str, list[tuple[str, str]]]:
    """The Markdown as HTML, the words of its first heading, and (anchor, words) of the others."""
    require_extra("a page", "bench", ["markdown_it"])
    from markdown_it import MarkdownIt

    # No HTML of a report comes through: names of files and messages of stages are in it.
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")

    def picture(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        alt = renderer.renderInlineAsText(tokens[index].children or [], options, env)
        source = _picture(folder, str(tokens[index].attrGet("src") or ""))
        if source is None:
            return f"<em>{escape(alt)} (the picture is not beside the report)</em>"
        return f'<img src="{source}" alt="{escape(alt)}">'

    reader.add_render_rule("image", picture)
    reader.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    reader.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = reader.parse(text)
    title, headings = "dgr-bench", list[tuple[str, str]]()
    for opened, inline in itertools.pairwise(tokens):
        if opened.type == "heading_open" and opened.tag == "h1":
            title = inline.content
        elif opened.type == "heading_open":
            headings.append((f"part-{len(headings) + 1}", inline.content))
            opened.attrSet("id", headings[-1][0])
    return str(reader.renderer.render(tokens, reader.options, {})), title, headings


def _picture(folder: Path, name: str) -> str | None:
    """A picture of the folder as a ``data:`` URI; None where it is not there, or is none of a report's."""
    path = folder / name
    if path.suffix not in _KINDS or not path.resolve().is_relative_to(folder.resolve()):
        return None
    for suffix, kind in _KINDS.items():
        try:
            content = path.with_suffix(suffix).read_bytes()
        except OSError:
            continue
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return None


def _raw(result: Result) -> Iterator[str]:
    """What was measured, to be opened by whoever asks."""
    yield '<section class="raw"><h2 id="raw">Raw numbers</h2>\n'
    parts: list[tuple[str, Any]] = [("plan", result.plan), ("subject", result.subject), ("figures", result.metrics)]
    parts += [(f"unit {name}", unit) for name, unit in result.units.items()]
    for name, value in parts:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        size = human_bytes(len(text))
        yield f"<details><summary>{escape(name)} ({size})</summary><pre>{escape(text)}</pre></details>\n"
    yield "</section>\n"


# --- the command -----------------------------------------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a run: report.md, result.json and plots/")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE.html", help="the page (default: report.html in DIR)")


def _report(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    try:
        text = (folder / "report.md").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"cannot read {folder / 'report.md'}: {why}; give the folder of a finished run") from error
    has_result = any((folder / name).exists() for name in ("result.json", "result.json.xz"))
    target = find_target(folder / "report.html" if args.out is None else args.out)
    with progress_bar("writing the page"):
        # A comparison of two results has a report and no result of its own.
        content = page(text, read_result(folder) if has_result else None, folder).encode()
        write_file(target, content)
    if not target.is_standard_output:
        print(f"{target.path}: {human_bytes(len(content))}, nothing beside it is needed")
    return 0


COMMAND = Command(
    "report",
    "a finished run as one HTML page",
    "Write the report of a run as one HTML page: plots and verdicts, raw numbers on demand, no resource from outside.",
    _add_arguments,
    _report,
)
