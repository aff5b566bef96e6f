"""``dgr completion``: completion of commands, flags and files for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from dgr.cli.options import require_extra
from dgr.cli.streams import print_json

__all__ = ["register", "run"]

_SHELLS = ("bash", "zsh", "tcsh")
#: Words of metavars that stand for a file, and for a folder.
_FILES = ("CRT", "FILE", "GGUF", "HTML", "JSON", "KEY", "MODEL", "OUT", "PEM", "SVG", "TOML")
_FOLDERS = ("DIR",)


def register(subparsers: argparse._SubParsersAction[Any], whole: argparse.ArgumentParser) -> None:
    """Add the command, which tells of the ``whole`` command line."""
    parser = subparsers.add_parser(
        "completion",
        help="print completion for a shell",
        description="Print a script that completes commands, flags and file names. In bash:"
        ' eval "$(dgr completion bash)"; in zsh into a file _dgr on $fpath; in tcsh into a file that ~/.tcshrc sources.',
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=partial(run, whole=whole))


def run(args: argparse.Namespace, *, whole: argparse.ArgumentParser) -> int:
    require_extra("dgr completion", "completion", ("shtab",))
    import shtab

    for action in _actions(whole):
        words = str(action.metavar).upper().replace(".", " ").split() if isinstance(action.metavar, str) else []
        if any(word in _FILES for word in words):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab is told
        elif any(word in _FOLDERS for word in words):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script = shtab.complete(whole, shell=args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
