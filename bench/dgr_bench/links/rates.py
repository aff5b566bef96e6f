"""``--rates``, of benchmarks over cables that pass so many bits a second."""

from __future__ import annotations

import argparse

from dgr.errors import InputError

__all__ = ["add_rates_argument", "rates_of"]

#: Megabits a second, when none are given.
_RATES = (10.0, 50.0, 100.0, 1000.0)


def add_rates_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=_RATES,
        metavar="MBIT",
        help="megabits a second (default: 10 50 100 1000)",
    )


def rates_of(args: argparse.Namespace) -> tuple[float, ...]:
    """The rates of ``--rates``, each once, ascending. Raises :class:`~dgr.errors.InputError`."""
    for rate in args.rates:
        if not 0.1 <= rate <= 100_000:
            raise InputError(f"--rates {rate:g}: give megabits a second from 0.1 to 100000")
    return tuple(sorted(set(args.rates)))
