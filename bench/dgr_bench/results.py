"""A result as JSON: its schema, and the journal in which a run keeps it.

A run is a list of *units*, each measured once and written down at once: an interrupted run goes on with the first unit
that is not there. Everything else in a result, metrics and verdicts, is computed from the units and can be computed again.
"""

from __future__ import annotations

import hashlib
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from dgr.errors import InputError
from dgr_bench.environment import Environment, Load, environment, load_now

__all__ = ["SCHEMA", "Check", "Journal", "Result", "digest_of", "median", "read_result", "write_result"]

#: Name and version of the schema; the number grows when a field changes its meaning.
SCHEMA = "dgr-bench/1"
_FILE = "result.json"

Kind = Literal["certify", "frontier", "overhead", "drill", "hops", "selftest", "compare"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict. ``cases``: comparisons behind it; a check of no case is not passed."""

    name: str
    passed: bool
    cases: int
    #: What was compared, or the first case that fails, with both values.
    detail: str


class Result(msgspec.Struct, kw_only=True):
    """Everything a command measured, and what follows from it."""

    #: See :data:`SCHEMA`.
    schema: str
    kind: Kind
    #: What was locked before the run. Another plan is another result.
    plan: dict[str, Any]
    #: :func:`digest_of` the plan.
    plan_digest: str
    #: What was run: artifact identity, split, route, context, descriptions of the stages.
    subject: dict[str, Any]
    environment: Environment
    #: The command lines: the first, and those that resumed it.
    commands: list[str]
    #: Load of the machine at every start and end.
    loads: list[Load] = []
    #: Raw measurements by unit name.
    units: dict[str, dict[str, Any]] = {}
    #: Derived from the units.
    metrics: dict[str, Any] = msgspec.field(name="figures", default_factory=dict)
    #: Derived from the units.
    checks: list[Check] = []
    complete: bool = False

    @property
    def passed(self) -> bool:
        """Whether the run is complete and every check passed."""
        return self.complete and all(check.passed for check in self.checks)


def digest_of(value: Any) -> str:
    """BLAKE2b-128 over canonical JSON (keys sorted), hex."""
    text = msgspec.json.encode(msgspec.to_builtins(value), order="sorted")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def median(values: Any) -> float:
    """The median of some figures; NaN of none."""
    numbers = list(values)
    return float(statistics.median(numbers)) if numbers else float("nan")


def read_result(path: str | os.PathLike[str]) -> Result:
    """Read a result, or the folder that holds one. Raises :class:`~dgr.errors.InputError` saying what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        path = path / _FILE
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; give a result.json or its folder") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is no result of dgr-bench: {error}") from error
    if result.schema != SCHEMA:
        raise InputError(f"{path} has schema {result.schema!r}; this dgr-bench reads {SCHEMA!r}")
    if digest_of(result.plan) != result.plan_digest:
        raise InputError(
            f"{path}: the plan has digest {digest_of(result.plan)}, but the result says {result.plan_digest}"
        )
    return result


def write_result(result: Result, folder: Path) -> Path:
    """Write ``result.json`` in one step."""
    path = folder / _FILE
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    part.replace(path)
    return path


class Journal:
    """A result under way, kept in a folder."""

    def __init__(self, folder: Path, result: Result) -> None:
        self.folder = folder
        self.result = result

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        kind: Kind,
        plan: Mapping[str, Any],
        subject: Mapping[str, Any],
        command: str,
        *,
        fresh: bool = False,
    ) -> Journal:
        """Begin a result in ``folder``, or go on with the one that is there.

        What is there must be of the same kind, plan, subject, kernels and version, or it is refused with
        :class:`~dgr.errors.InputError`; ``fresh`` begins anew over it.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {folder}: {error.strerror or error}; give another --out"
            ) from error
        now = environment()
        result = Result(
            schema=SCHEMA,
            kind=kind,
            plan=msgspec.to_builtins(plan),
            plan_digest=digest_of(plan),
            subject=msgspec.to_builtins(subject),
            environment=now,
            commands=[command],
        )
        if not fresh and (folder / _FILE).exists():
            found = read_result(folder)
            for what, has, wants in (
                ("kind", found.kind, kind),
                ("plan digest", found.plan_digest, result.plan_digest),
                ("subject", digest_of(found.subject), digest_of(subject)),
                ("kernel fingerprint", found.environment.kernel_fingerprint, now.kernel_fingerprint),
                ("runtime", found.environment.runtime, now.runtime),
            ):
                if has != wants:
                    raise InputError(
                        f"{folder} holds a result of another {what}: {has}, not {wants}; give another --out, or --fresh"
                        " to begin anew over it"
                    )
            found.commands = [*found.commands, command]
            result = found
        result.loads = [*result.loads, load_now()]
        return cls(folder, result)

    def get(self, unit: str) -> dict[str, Any] | None:
        """What was measured already under that name."""
        return self.result.units.get(unit)

    def put(self, unit: str, raw: Any) -> dict[str, Any]:
        """Write a measurement down; gives it as it will be read back."""
        value: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(raw))
        self.result.units[unit] = value
        self.result.complete = False
        write_result(self.result, self.folder)
        return value

    def finish(self, metrics: Mapping[str, Any], checks: list[Check]) -> Result:
        """Add what follows from the units; the result is complete then."""
        result = self.result
        result.metrics, result.checks, result.complete = msgspec.to_builtins(metrics), checks, True
        result.loads = [*result.loads, load_now()]
        write_result(result, self.folder)
        return result
