"""The parser of a command's arguments: what it refuses it tells as every other error is told, in two lines."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from dgr.cli.exit_codes import BAD_INPUT
from dgr.cli.streams import tell

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong and what to do, and repeats no control character; argparse makes those of commands of it too."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; what a command does not know is told by that command, and not by the program without its name."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            meant = f"; did you mean {near[0]}?" if near and unknown[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        tell(
            f"{self.prog}: error: {message}",
            f"{self.prog}: next: `{self.prog} --help` lists what it takes [arguments]",
        )
        self.exit(BAD_INPUT)
