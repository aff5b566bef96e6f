"""What the invariance suite can test: weight and K-cache types, and which of them a model needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

from dgr.artifact.artifact import Artifact
from dgr.engine.numerics import name_of
from dgr.errors import InputError
from dgr.gguf.types import GgmlType, parse_type
from dgr.selftest.fixture.presets import BLOCK_TYPES

__all__ = ["ESSENTIAL", "K_TYPES", "WEIGHT_TYPES", "Case", "cases_of", "select"]

#: What the files consist of that most people run.
_COMMON = (
    GgmlType.F32, GgmlType.F16, GgmlType.BF16, GgmlType.Q8_0, GgmlType.MXFP4, GgmlType.IQ2_XXS, GgmlType.Q2_K,
    GgmlType.Q4_K, GgmlType.Q6_K,
)  # fmt: skip
#: Every weight type a model can be written in, the common ones first.
WEIGHT_TYPES = tuple(kind.label for kind in (*_COMMON, *sorted(BLOCK_TYPES.difference(_COMMON))))
#: K-cache types the engine knows.
K_TYPES = ("f16", "f32", "q8_0")
#: (kind, type) that must be exact, or dgr is broken on this machine.
ESSENTIAL = (("weights", "f32"), ("k_cache", "f16"))

#: Tokens for a weight type: more than 64 rows in a batch, more compressed rows than the indexer selects, an HCA block.
_SHORT = 160
#: Tokens for a K-cache type: the ring of raw K wraps, and there are several HCA blocks.
_LONG = 544


@frozen
class Case:
    """One type under test."""

    kind: Literal["weights", "k_cache"]
    #: The type, as :attr:`dgr.gguf.types.GgmlType.label` says it.
    label: str

    @property
    def name(self) -> str:
        """As a record calls it."""
        return name_of(self.kind, self.label)

    @property
    def weights(self) -> str:
        return self.label.lower() if self.kind == "weights" else "f32"

    @property
    def n_tokens(self) -> int:
        return _SHORT if self.kind == "weights" else _LONG

    @property
    def chunks(self) -> tuple[int, ...]:
        return (5, 1) if self.kind == "weights" else (64, 5, 1)

    @property
    def runs_without_flash(self) -> bool:
        """Whether attention without the flash kernels is run too; upstream cannot with a quantised cache."""
        return self.kind == "k_cache" and self.label in ("f16", "f32")

    @property
    def type_k(self) -> str:
        return self.label if self.kind == "k_cache" else "f16"


#: Every case there is.
_CASES = (*(Case("k_cache", label) for label in K_TYPES), *(Case("weights", label) for label in WEIGHT_TYPES))


def select(types: Iterable[str | Case] | None = None) -> tuple[Case, ...]:
    """The cases for some types (all by default); a name that is both a weight and a K type stands for two."""
    if types is None:
        return _CASES
    wanted, unknown = set[Case](), set[str]()
    for one in types:
        label = one.label if isinstance(one, Case) else parse_type(one).label
        found = {one} if isinstance(one, Case) else {case for case in _CASES if case.label == label}
        wanted |= found
        unknown |= set() if found else {label}
    if unknown:
        raise _no_such_case("no model can be written with weights of type", unknown, WEIGHT_TYPES)
    return tuple(case for case in _CASES if case in wanted)


def cases_of(artifact: Artifact, type_k: str) -> tuple[Case, ...]:
    """The cases that decide whether exact numerics run a model with a K cache of a type."""
    wanted = {("weights", kind.label) for kind in artifact.matrix_types(artifact.layers)} | {("k_cache", type_k)}
    cases = tuple(case for case in _CASES if (case.kind, case.label) in wanted)
    if missing := wanted - {(case.kind, case.label) for case in cases}:
        if ("k_cache", type_k) in missing:
            raise _no_such_case("no K cache is of type", {type_k}, K_TYPES)
        labels = {label for _, label in missing}
        raise _no_such_case(
            f"{artifact.parts.paths[0]}: the suite has no model with weights of type", labels, WEIGHT_TYPES
        )
    return cases


def _no_such_case(what: str, labels: Iterable[str], known: Iterable[str]) -> InputError:
    return InputError(f"{what} {', '.join(sorted(labels))}; choose from {', '.join(known)}")
