"""dgr-bench: certificates and benchmarks of dgr, made with its public names only."""

# General layout. Arrows point down: a file imports from lines below its own.
#
#   cli             the commands
#   describe        profiles and the schema, printed        compare   two results held against each other
#   certify/        the long-context certificate             drill/    lost, cut, stalled and slow stages
#   frontier/       speed over context                       overhead/ dgr against upstream's programs; the cost of a hop
#   widths/         layers of the published widths beside the machine's limits
#   benchmark       what every benchmark is made of, and the one way to run it
#   reports, plots  Markdown and pictures
#   results         a result, its schema, and the journal that an interrupted run goes on from
#   verdicts        checks and goals                         quartiles   medians, lines, percentiles
#   subjects        who runs a prompt                        upstream/ upstream's binaries, and one run of each
#   environment     what a result carries of its machine

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 130 when interrupted, while it is still being loaded too.

    Without the extra ``bench`` it says so, in the two lines of every error.
    """
    try:
        from dgr_bench.cli import main as run
    except KeyboardInterrupt:
        if sys.stderr is not None:  # closed, as some starters of daemons do
            print("dgr-bench: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("dgr"):
            raise
        print(
            f"dgr-bench: error: it needs {missing.name}, which is not there\n"
            "dgr-bench: next: `make build` in its checkout, or pip install '.[bench]' there [InputError]",
            file=sys.stderr,
        )
        return 2
    return run(argv)
