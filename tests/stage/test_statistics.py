"""What a stage counts of its batches: a value is in the bucket whose bound it does not exceed, and nowhere else."""

from __future__ import annotations

import pytest

from dgr.stage.statistics import BatchCounts, Counts


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (0.5, 0), (1, 0), (1.01, 1), (2, 1), (4, 2), (4.5, 3), (1e9, 3)])
def test_a_bound_belongs_to_its_bucket(value: float, bucket: int) -> None:
    counts = Counts((1, 2, 4))
    counts.add(value)
    seen = counts.snapshot()
    assert [index for index, count in enumerate(seen.counts) if count] == [bucket]
    assert seen.cumulative() == [0] * bucket + [1] * (4 - bucket)
    assert (seen.count, seen.total) == (1, value)


def test_a_snapshot_does_not_change_any_more() -> None:
    counts = BatchCounts()
    before = counts.snapshot()
    counts.tokens.add(3)
    assert (before.tokens.count, counts.snapshot().tokens.total) == (0, 3)
