"""What a command says of the file it wrote."""

from __future__ import annotations

import sys

from dgr.core.files.targets import Target

__all__ = ["print_beside"]


def print_beside(target: Target | None, text: str) -> None:
    """Print to standard output, or to standard error when the file itself went to standard output."""
    print(text, file=sys.stderr if target is not None and target.is_standard_output else sys.stdout)
