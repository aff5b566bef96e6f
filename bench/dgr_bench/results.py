"""A result as JSON: its schema, and the journal in which a run keeps it.

A run is a list of *units*, each measured once and written down at once: an interrupted run goes on with the first unit
that is not there. Everything else in a result, metrics and verdicts, is computed from the units and can be computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import lzma
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from dgr.core.files.inputs import NOT_JSON, read_whole, too_long
from dgr.core.files.outputs import write_file
from dgr.errors import InputError
from dgr_bench.environment import Environment, Load, environment, load_now
from dgr_bench.verdicts import Check

#: Name and version of the schema; the number grows when a field changes its meaning. 2: the check "wire carries the boundary"
#: counts frames where there is one stage too; in version 1 it had one case there, which could not fail.
SCHEMA = "dgr-bench/2"
#: What is read: units mean the same in both.
_READABLE = ("dgr-bench/1", SCHEMA)
_FILE = "result.json"
#: A hundred times what a certificate takes, unpacked.
_MOST_BYTES = 64 << 20
#: Whoever holds it writes to the folder.
_LOCK = ".lock"

Kind = Literal[
    "certify",
    "frontier",
    "overhead",
    "drill",
    "hops",
    "sessions",
    "servers",
    "prefill",
    "plan",
    "wires",
    "lanes",
    "peers",
    "quality",
    "widths",
    "builds",
    "selftest",
    "compare",
]


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


def read_result(path: str | os.PathLike[str]) -> Result:
    """Read a result (``result.json``, or that compressed: ``result.json.xz``), or the folder that holds one.

    Raises :class:`~dgr.errors.InputError` saying what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        packed = path / f"{_FILE}.xz"
        path = packed if packed.exists() and not (path / _FILE).exists() else path / _FILE
    try:
        text = read_whole(path, _MOST_BYTES, "a result")
        result = msgspec.json.decode(_unpacked(path, text) if path.suffix == ".xz" else text, type=Result)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; give a result.json or its folder") from error
    except (lzma.LZMAError, EOFError, *NOT_JSON) as error:
        raise InputError(f"{path} is not a result of dgr-bench: {error}") from error
    if result.schema not in _READABLE:
        raise InputError(f"{path} has schema {result.schema!r}; this dgr-bench reads {' and '.join(_READABLE)}")
    if digest_of(result.plan) != result.plan_digest:
        raise InputError(
            f"{path}: the plan has digest {digest_of(result.plan)}, but the result says {result.plan_digest}"
        )
    return result


def _unpacked(path: Path, packed: bytes) -> bytes:
    """The content of a compressed result: a megabyte may stand for more than there is memory."""
    with lzma.open(io.BytesIO(packed)) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise too_long(str(path), _MOST_BYTES, "a result")
    return text


def write_result(result: Result, folder: Path) -> None:
    """Write ``result.json``, compact."""
    write_file(folder / _FILE, msgspec.json.encode(result) + b"\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and hold it for the length of the block, or until the process ends.

    Raises :class:`~dgr.errors.InputError` when it cannot be written to, and when another run holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("ab")
    except OSError as error:
        raise InputError(
            f"cannot write to the folder {folder}: {error.strerror or error}; give another --out"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another run of dgr-bench writes to {folder}; wait for it, or give another --out"
            ) from None
        yield


class Journal:
    """A result under way, kept in a folder that nobody else writes to meanwhile."""

    def __init__(self, folder: Path, result: Result) -> None:
        self.folder = folder
        self.result = result

    @property
    def units(self) -> dict[str, dict[str, Any]]:
        """What was measured, by name."""
        return self.result.units

    @classmethod
    @contextmanager
    def open(
        cls,
        folder: str | os.PathLike[str],
        kind: Kind,
        plan: msgspec.Struct | Mapping[str, Any],
        subject: Mapping[str, Any],
        command: str,
        *,
        fresh: bool = False,
    ) -> Iterator[Journal]:
        """Begin a result in ``folder``, or go on with the one that is there; ``fresh`` begins anew over it.

        Raises :class:`~dgr.errors.InputError` as :func:`locked` does, and when what is there is of another kind, plan, subject,
        kernels or version.
        """
        folder, builtins = Path(folder), msgspec.to_builtins(plan)
        with locked(folder):
            result = Result(
                schema=SCHEMA,
                kind=kind,
                plan=builtins,
                plan_digest=digest_of(builtins),
                subject=msgspec.to_builtins(subject),
                environment=environment(),
                commands=[command],
            )
            if not fresh and (folder / _FILE).exists():
                result = _resumed(folder, result)
            result.loads = [*result.loads, load_now()]
            yield cls(folder, result)

    def put(self, unit: str, raw: Any) -> None:
        """Write a measurement down."""
        self.units[unit] = msgspec.json.decode(msgspec.json.encode(raw))
        self.result.complete = False
        write_result(self.result, self.folder)

    def finish(self, metrics: Mapping[str, Any], checks: list[Check]) -> Result:
        """Add what follows from the units; the result is complete then."""
        result = self.result
        result.metrics, result.checks, result.complete = msgspec.to_builtins(metrics), checks, True
        result.schema, result.loads = SCHEMA, [*result.loads, load_now()]
        write_result(result, self.folder)
        return result


def _resumed(folder: Path, wanted: Result) -> Result:
    """The result that is there, when it is of what is asked for."""
    found = read_result(folder)
    for what, has, wants in (
        ("kind", found.kind, wanted.kind),
        ("plan digest", found.plan_digest, wanted.plan_digest),
        ("subject", digest_of(found.subject), digest_of(wanted.subject)),
        ("kernel fingerprint", found.environment.kernel_fingerprint, wanted.environment.kernel_fingerprint),
        ("runtime", found.environment.runtime, wanted.environment.runtime),
    ):
        if has != wants:
            raise InputError(
                f"{folder} holds a result of another {what}: {has}, not {wants}; give another --out, or --fresh to begin"
                " anew over it"
            )
    found.commands = [*found.commands, *wanted.commands]
    return found
