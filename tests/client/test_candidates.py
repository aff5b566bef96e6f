"""Which stages a route is made of: the choice alone, at given times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgr.client.candidates import Candidates
from dgr.core.route import LayerRange, Route, StageRef
from dgr.errors import InvalidRoute


def ref(address: str, layers: str = "0:2") -> StageRef:
    return StageRef(address, LayerRange.parse(layers))


ROUTE = Route((ref("a"), ref("b", "2:4"), ref("c", "4:6")))
SPARES = (ref("a2"), ref("b2", "2:4"), ref("b3", "2:4"), ref("c2", "4:6"))


def chosen(candidates: Candidates, now: float) -> str:
    return " ".join(one.address for one in candidates.choose(now).stages)


def test_in_order_of_names_as_long_as_nothing_failed() -> None:
    candidates = Candidates(ROUTE, SPARES)
    assert (chosen(candidates, 0), candidates.rest(0), candidates.has_spares) == ("a b c", 0, True)
    assert not Candidates(ROUTE).has_spares


def test_what_failed_is_left_alone_for_longer_each_time_and_tried_again() -> None:
    candidates = Candidates(ROUTE, SPARES)
    candidates.fail("b", now=0, why="gone")
    assert [chosen(candidates, now) for now in (0, 0.9, 1.1)] == ["a b2 c", "a b2 c", "a b c"]
    candidates.fail("b", now=2, why="gone")
    assert [chosen(candidates, now) for now in (2, 3.9, 4.1)] == ["a b2 c", "a b2 c", "a b c"]
    for _ in range(20):
        candidates.fail("b", now=10, why="gone")
    assert [chosen(candidates, now) for now in (69.9, 70.1)] == ["a b2 c", "a b c"]
    candidates.serves(ROUTE)
    candidates.fail("b", now=100, why="gone")
    assert chosen(candidates, 101.1) == "a b c"


def test_a_way_between_two_that_failed_leaves_both_in_use_with_others() -> None:
    candidates = Candidates(ROUTE, SPARES)
    candidates.fail("a", "b", now=0, why="a firewall")
    assert chosen(candidates, 0.5) == "a b2 c"
    for after in ("b2", "b3"):
        candidates.fail("a", after, now=0.5, why="a firewall")
    assert (chosen(candidates, 0.6), candidates.rest(0.6)) == ("a2 b c", 0)


def test_who_wishes_to_be_left_is_taken_where_there_is_nobody_else() -> None:
    candidates = Candidates(ROUTE, SPARES)
    candidates.avoided = {"a", "b2"}
    candidates.fail("b", now=0, why="gone")
    assert chosen(candidates, 0.1) == "a2 b3 c"
    candidates.avoided = {"a", "a2"}
    assert chosen(candidates, 0.1) == "a b2 c"
    assert "(a: it is being drained; a2: it is being drained)" in str(candidates.error())
    candidates.avoided = set()
    assert (chosen(candidates, 2), candidates.rest(2)) == ("a b c", 0)


def test_when_all_failed_the_one_that_rested_most_is_next() -> None:
    candidates = Candidates(Route((ref("a"),)), (ref("a2"), ref("a3")))
    for now, address in enumerate(("a2", "a3", "a")):
        candidates.fail(address, now=now / 10, why="gone")
    assert chosen(candidates, 0.3) == "a2"
    assert candidates.rest(0.3) == pytest.approx(0.7)


def test_the_error_names_every_candidate_and_why() -> None:
    candidates = Candidates(ROUTE, SPARES)
    for address in ("b", "b2", "b3", "a"):
        candidates.fail(address, now=0, why=f"{address} is down")
    assert str(candidates.error()) == (
        "no stage of layers 2:4 can be had (b: b is down; b2: b2 is down; b3: b3 is down);"
        " start one of them, or name another in the route file"
    )
    only_ways = Candidates(ROUTE)
    only_ways.fail("a", "b", now=0, why="refused")
    assert "no stages reach each other (a -> b: refused)" in str(only_ways.error())


@pytest.mark.parametrize(
    ("spare", "said"),
    [
        (ref("x", "0:3"), "spare stage x owns layers 0:3; the route's ranges are 0:2, 2:4, 4:6"),
        (ref("b"), "stage b is named twice"),
    ],
)
def test_a_spare_must_fit(spare: StageRef, said: str) -> None:
    with pytest.raises(InvalidRoute, match=said):
        Candidates(ROUTE, (spare,))


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "a2", "b", "b2", "b3", "c", "c2"]),
        st.sampled_from(["", "b", "b2", "b3", "c", "c2"]),
        st.floats(0, 5),
    ),
    max_size=20,
)


@given(FAULTS)
def test_no_other_route_is_better_rested(faults: list[tuple[str, str, float]]) -> None:
    """The choice along the chain, against every combination."""
    candidates = Candidates(ROUTE, SPARES)
    for address, after, now in faults:
        candidates.fail(*filter(None, (address, after)), now=now, why="x")

    def cost(*path: str) -> float:
        ways = [(one,) for one in path] + list(itertools.pairwise(path))
        return sum(candidates._left(2.0, *what) for what in ways)

    every = [cost(a, b, c) for a in ("a", "a2") for b in ("b", "b2", "b3") for c in ("c", "c2")]
    assert candidates.rest(2.0) == pytest.approx(min(every))
    assert cost(*chosen(candidates, 2.0).split()) == pytest.approx(min(every))
