"""``dgr-bench profile`` and ``dgr-bench schema``: what a certificate locks, and what a result's JSON holds."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from dgr_bench.benchmark import Command, add_no_arguments
from dgr_bench.certify.measurements import Cancellation, CleanUp, LengthRun, MemoryAt
from dgr_bench.certify.profiles import PROFILES, Profile, profile_of
from dgr_bench.certify.refusals import Refusal
from dgr_bench.drill.fault_injection import Outcome
from dgr_bench.drill.ring import RingRound
from dgr_bench.results import SCHEMA, Result

#: Structs of raw units, by the name of the unit or its beginning.
_UNITS: dict[str, Any] = {
    "certify: whole/L, split/L, chunk-C/L, re-prefilled/L, threads-T/L": LengthRun,
    "certify: cancel/prefill, cancel/decode (in `cancellations`)": Cancellation,
    "certify: clean-up": CleanUp,
    "certify: memory/N": MemoryAt,
    "certify: refusals/I (in `refusals`)": Refusal,
    "drill: a case": Outcome,
    "drill: a delayed ring": RingRound,
}


def result_schema() -> dict[str, Any]:
    """JSON Schema of a result, of a profile and of the structs of raw units.

    A unit that ended in an error is an object with ``error`` alone. NaN is null.
    """
    types = [Result, Profile, *_UNITS.values()]
    references, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        **references[0],
        "units": {name: reference["$ref"] for name, reference in zip(_UNITS, references[2:], strict=True)},
        "$defs": components,
    }


def _print(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="P", help=f"{', '.join(PROFILES)}, or a JSON file")


def _print_profile(args: argparse.Namespace) -> int:
    profile = profile_of(args.profile)
    _print(profile)
    print(f"digest {profile.digest}, n_ctx {profile.n_ctx}", file=sys.stderr)
    return 0


def _print_schema(_: argparse.Namespace) -> int:
    _print(result_schema())
    return 0


PROFILE_COMMAND = Command(
    "profile",
    "print a profile of certify, and its digest",
    "Print a profile as JSON, to read or to make another one from. Its digest goes to standard error.",
    _add_profile,
    _print_profile,
)
SCHEMA_COMMAND = Command(
    "schema",
    "print the JSON Schema of results",
    "Print the JSON Schema of results, of profiles and of raw units.",
    add_no_arguments,
    _print_schema,
)
