"""The parser of a command's arguments: what it refuses it tells as every other error is told, in two lines."""

from __future__ import annotations

import argparse
from typing import NoReturn

from dgr.cli.exit_codes import BAD_INPUT
from dgr.cli.streams import tell

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong and what to do, and repeats no control character; argparse makes those of commands of it too."""

    def error(self, message: str) -> NoReturn:
        tell(
            f"{self.prog}: error: {message}",
            f"{self.prog}: next: `{self.prog} --help` lists what it takes [arguments]",
        )
        self.exit(BAD_INPUT)
