"""Write the catalogue of errors: ``python docs/draw_errors.py`` writes docs/errors.md from the classes of dgr.errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import dgr.errors
from dgr.cli.exit_codes import exit_code
from dgr.errors import DgrError
from dgr.serving.api.errors import api_error

PAGE = Path(__file__).with_name("errors.md")
INTRODUCTION = """\
# Errors

Written from the classes in `dgr/errors.py` by `docs/draw_errors.py`; a test keeps this page up to date and holds every class to
a cause and a next step.

A command that fails says so on standard error, on two lines, and the second one ends with the name that this page has:

```text
dgr: error: none.gguf: cannot be read: No such file or directory; check the path
dgr: next: check the path, and the file itself; `dgr inspect FILE` reads it without its weights [ArtifactError]
```

The first line names the value, the limit that it broke and what helps in this very case; the second helps whatever the
case is. `[arguments]` is a flag that the command does not take or that lacks its value. A name of Python's own
(`FileNotFoundError`, `PermissionError`, `OSError`, `MemoryError`) is the operating system's refusal: exit code 2 where a path
that was given is wrong, 1 where the machine lacks something that may be there in a moment. With `--log-format json` both
lines are one record.

From Python every class is in `dgr.errors`; `except dgr.DgrError` catches all of them, and `error.next_step` is the second
line. The branches say whose act it was, so a program can decide by branch: what the caller did is not worth trying again,
what a link or a server did may be. Over HTTP an error has OpenAI's or Anthropic's shape ([serving.md](serving.md#errors)).
Between stages it is a `Refused` or a `CacheMiss` ([frames.md](frames.md#refused)).
"""


def sections() -> Iterator[tuple[str, list[type[DgrError]]]]:
    """The headings of the module and the classes under each; the root of the tree comes first."""
    parts = re.split(r"^# --- (.+?) -+$", inspect.getsource(dgr.errors), flags=re.MULTILINE)
    for heading, source in zip(["the root", *parts[1::2]], parts[::2], strict=True):
        yield heading, [getattr(dgr.errors, name) for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE)]


def prose(text: str) -> str:
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def entry(error: type[DgrError]) -> Iterator[str]:
    """A class: what it is a kind of, why it is raised, what to do, and what a program sees of it."""
    over = api_error(error("x"))
    bases = [base for base in error.__bases__ if base is not Exception]
    kinds = " and ".join(
        f"[{base.__name__}](#{base.__name__.lower()})" if issubclass(base, DgrError) else f"`{base.__name__}`"
        for base in bases
    )
    yield from (f"### {error.__name__}", "", prose(inspect.getdoc(error) or ""), "")
    yield f"**Next:** {error.next_step}."
    yield ""
    about = f"Exit code {exit_code(error('x'))}; over HTTP {over.status} `{over.code}`."
    yield f"A kind of {kinds}. {about}" if kinds else about
    yield ""


def page() -> str:
    lines = [INTRODUCTION]
    for heading, classes in sections():
        lines += [f"## {heading.capitalize()}", ""]
        for error in classes:
            lines += entry(error)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
