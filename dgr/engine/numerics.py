"""Which weight and K-cache types are exact on this machine, as the invariance suite found.

``dgr selftest numerics`` runs the suite, for all types or for some, and adds its verdicts to the record of the kernel
fingerprint. Exact numerics run only with types the record names: a kernel that nobody tested here is not promised.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from dgr.core.cache_dir import cache_dir
from dgr.core.files.inputs import NOT_JSON, read_whole
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import Target, find_target
from dgr.engine.native import kernel_fingerprint
from dgr.errors import InputError, NumericsRefused

__all__ = [
    "ExactnessRecord",
    "cache_dir",
    "check_exact_types",
    "load_exactness_record",
    "name_of",
    "record_target",
    "save_exactness_record",
]


#: A thousand times what a record takes.
_MOST_BYTES = 4 << 20


class ExactnessRecord(msgspec.Struct, frozen=True):
    """The suite's verdicts for one kernel fingerprint. A type that is neither exact nor a failure has not been tested."""

    fingerprint: str
    #: Weight types whose results do not depend on split, chunk, batch or threads.
    weight_types: tuple[str, ...]
    #: Likewise K-cache types.
    k_types: tuple[str, ...]
    #: Types that were found not to be exact, with what differed.
    failures: dict[str, str] = {}
    #: Tests that could not be run, and why, by what they are of: ``weights bf16``, ``K cache f16``.
    untested: dict[str, str] = {}

    def knows(self, kind: Literal["weights", "k_cache"], label: str) -> bool:
        """Whether there is a verdict on a type, by its :attr:`~dgr.gguf.types.GgmlType.label`."""
        exact = self.weight_types if kind == "weights" else self.k_types
        return label in exact or name_of(kind, label) in self.failures


def name_of(kind: Literal["weights", "k_cache"], label: str) -> str:
    """What a record calls a type under test."""
    return f"{'weights' if kind == 'weights' else 'K cache'} {label}"


def _path(fingerprint: str) -> Path:
    return cache_dir() / "numerics" / f"{fingerprint}.json"


def load_exactness_record(fingerprint: str | None = None) -> ExactnessRecord | None:
    """The recorded verdict for this machine's kernels; None when the suite has not run (or its record is damaged)."""
    fingerprint = fingerprint or kernel_fingerprint()
    try:
        text = read_whole(_path(fingerprint), _MOST_BYTES, "a verdict on kernels")
        record = msgspec.json.decode(text, type=ExactnessRecord)
    except (OSError, InputError, *NOT_JSON):  # what cannot be read is as good as not there
        return None
    return record if record.fingerprint == fingerprint else None


def record_target(fingerprint: str) -> Target:
    """Where a verdict goes. Raises :class:`~dgr.errors.InputError` when none can be kept there."""
    path = _path(fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return find_target(path)
    except (OSError, InputError) as failed:
        raise _not_kept(failed) from failed


def save_exactness_record(record: ExactnessRecord) -> Path:
    """Keep a verdict; returns the file's path. Raises :class:`~dgr.errors.InputError`, and the old verdict stays."""
    target = record_target(record.fingerprint)
    try:
        write_file(target, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except InputError as failed:
        raise _not_kept(failed) from failed
    return target.path


def _not_kept(failed: Exception) -> InputError:
    return InputError(f"the verdict on these kernels cannot be kept: {failed}; name another folder in DGR_CACHE_DIR")


def check_exact_types(weight_types: Iterable[str], type_k: str) -> None:
    """Refuse types that are not known to be exact here, with the list of those that are."""
    record = load_exactness_record()
    if record is None:
        raise NumericsRefused(
            f"exact numerics have not been tested on these kernels (fingerprint {kernel_fingerprint()}); run"
            " `dgr selftest numerics` once (about half a minute; with --model MODEL seconds, for its types alone), or choose"
            " numerics = native"
        )
    if refused := sorted(set(weight_types) - set(record.weight_types)):
        failed = [label for label in refused if record.knows("weights", label)]
        raise NumericsRefused(_refusal("weight", failed, refused, record.weight_types))
    if type_k not in record.k_types:
        failed = [type_k] if record.knows("k_cache", type_k) else []
        raise NumericsRefused(_refusal("K-cache", failed, [type_k], record.k_types))


def _refusal(what: str, failed: list[str], refused: list[str], exact: tuple[str, ...]) -> str:
    """Why types are refused: some were found not to be exact, or nobody has looked."""
    if failed:
        verdict = ("is" if len(failed) == 1 else "are") + " not exact"
        step = "use one of these, or numerics = native"
    else:
        verdict = ("has" if len(refused) == 1 else "have") + " not been tested"
        step = f"run `dgr selftest numerics --types {','.join(refused)}` once (seconds), or choose numerics = native"
    which = failed or refused
    some = f"{what} type{'' if len(which) == 1 else 's'} {', '.join(which)}"
    return f"{some} {verdict} on this machine; exact are {', '.join(exact) or 'none'}; {step}"
