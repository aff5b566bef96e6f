"""Every way to run the model that is measured, and which of them must give the bits of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from attrs import frozen

from dgr import Numerics, Placement
from dgr.core.values import Wire

__all__ = ["FAR", "REFERENCE", "QualityPlan", "Way", "ways"]

_CPU = Placement(("CPU",))
#: What all others are compared with: exact numerics, f32 weights and K, one thread, not split.
REFERENCE = "exact"
#: Distance beyond which a recital is asked for once.
FAR = 3000


class QualityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    name: str
    #: Tokens of held-out text.
    text_tokens: int
    #: From a stated value to its answer, tokens.
    distances: tuple[int, ...]
    #: Recitals of each kind at each distance; one alone beyond :data:`FAR` tokens, where a recital costs as many.
    recitals: int
    #: Distance at which the state is changed or damaged between statement and question, and recitals of each kind there.
    changed_at: int
    changed_recitals: int
    #: Tokens of a native call.
    chunk: int
    #: Layer ranges of the stages, where the model is split.
    split: str
    threads: tuple[int, ...]
    type_k: tuple[str, ...]
    weights: tuple[str, ...]
    wires: tuple[Wire, ...]


@frozen(kw_only=True)
class Way:
    """One way to run the model."""

    name: str
    weights: str = "f32"
    type_k: str = "f32"
    flash_attn: bool = True
    numerics: Numerics = Numerics.EXACT
    threads: int = 1
    chunk: int
    #: Layer ranges; the whole model in one stage by default.
    split: str | None = None
    wire: Wire = Wire.F32
    placement: Placement = _CPU
    #: Name of the way whose bits these must be; none by default.
    equals: str = ""


def ways(plan: QualityPlan, devices: Sequence[str]) -> Iterator[Way]:
    """The reference first, then every way beside it."""
    chunk, native = plan.chunk, Numerics.NATIVE
    yield Way(name=REFERENCE, chunk=chunk)
    yield Way(name="exact, other chunks", chunk=max(1, chunk // 3), equals=REFERENCE)
    for threads in plan.threads:
        yield Way(name=f"exact, {threads} threads", chunk=chunk, threads=threads, equals=REFERENCE)
    yield Way(name="exact, split", chunk=chunk, split=plan.split, equals=REFERENCE)
    yield Way(name="native", chunk=chunk, numerics=native)
    for threads in plan.threads:
        yield Way(name=f"native, {threads} threads", chunk=chunk, numerics=native, threads=threads)
    for name in devices:
        yield Way(name=f"native on {name}", chunk=chunk, numerics=native, placement=Placement((name,)))
    for kind in plan.type_k:
        yield Way(name=f"K {kind}", chunk=chunk, type_k=kind, numerics=Numerics.EXACT if kind == "f16" else native)
        # With flash attention llama.cpp rounds K to float16 before it is used: f32 and f16 then differ in the indexer alone.
        if kind == "f16":
            for stored in ("f32", kind):
                yield Way(name=f"K {stored}, no flash attention", chunk=chunk, type_k=stored, flash_attn=False)
    for weights in plan.weights:
        yield Way(name=f"weights {weights}", chunk=chunk, weights=weights)
        yield Way(
            name=f"weights {weights}, split",
            chunk=chunk,
            weights=weights,
            split=plan.split,
            equals=f"weights {weights}",
        )
    for wire in plan.wires:
        numerics, equals = (Numerics.SAME_CUTS, "") if wire.rounds else (Numerics.EXACT, REFERENCE)
        yield Way(name=f"wire {wire}", chunk=chunk, split=plan.split, wire=wire, numerics=numerics, equals=equals)
