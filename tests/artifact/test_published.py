"""The table of published files says what their listings say."""

from __future__ import annotations

from collections import Counter

import pytest

from dgr.core.route import LayerRange
from dgr.gguf.types import GgmlType
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.published import PUBLISHED, inexact_types
from dgr.v4.tensors import TensorSpec, range_tensors

#: Tensors of the main model, without what is optional.
SPECS = [spec for spec in range_tensors(V4_FLASH, LayerRange(0, 43)) if spec.required]


def bytes_of(spec: TensorSpec, kind: GgmlType) -> int:
    return kind.row_bytes(spec.ne[0]) * (spec.n_elements // spec.ne[0])


def test_tensors_by_type_are_those_of_a_listing() -> None:
    """lvyufeng's file has 1328 tensors: 359 F16, 492 F32, 345 Q8_0, 123 IQ1_M, 6 Q2_K, 3 I32."""
    found = Counter(PUBLISHED["published_iq1_m"].type_of(spec) for spec in SPECS)
    assert found == {
        GgmlType.F16: 359,
        GgmlType.F32: 492,
        GgmlType.Q8_0: 345,
        GgmlType.IQ1_M: 123,
        GgmlType.Q2_K: 6,
        GgmlType.I32: 3,
    }


@pytest.mark.parametrize(
    ("name", "gib"),
    [("published_mxfp4", 145.7), ("published_q2", 80.8), ("published_q2_q4", 90.9), ("published_q4", 153.3)],
)
def test_a_file_is_as_large_as_published(name: str, gib: float) -> None:
    size = sum(bytes_of(spec, PUBLISHED[name].type_of(spec)) for spec in SPECS)
    assert size / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_type_of_a_file_is_somewhere_in_it(name: str) -> None:
    published = PUBLISHED[name]
    matrices = {
        published.type_of(spec) for spec in SPECS if spec.kind.is_matrix and published.type_of(spec) != GgmlType.I32
    }
    assert matrices | {GgmlType.F32} == published.matrix_types
    for spec in SPECS:
        bytes_of(spec, published.type_of(spec))  # rows are whole blocks


def test_types_that_are_not_exact_are_named() -> None:
    exact = ["f32", "f16", "q8_0", "q2_K"]
    assert inexact_types(PUBLISHED["published_q2"], exact) == ("iq2_xxs",)
    assert inexact_types(PUBLISHED["published_q2_k"], exact) == ()
