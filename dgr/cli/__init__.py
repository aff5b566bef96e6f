"""The ``dgr`` command: one module per command group."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 130 when interrupted, while it is still being loaded too."""
    try:
        from dgr.cli.command_line import main as run
    except KeyboardInterrupt:
        if sys.stderr is not None:  # closed, as some starters of daemons do
            print("dgr: interrupted", file=sys.stderr)
        return 130
    return run(argv)
