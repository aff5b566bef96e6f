"""What went over a stage's links, those that have ended included."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dgr.core.load import LINKS_MAX, LinkLoad, Side
from dgr.wire.links import Link, LinkStatistics

__all__ = ["Traffic"]

#: Peers whose ended links are remembered; what is older is forgotten, so that strangers cannot fill the memory.
_REMEMBERED = 64

_NOTHING = LinkStatistics(0, 0, 0, 0, 0)


class Traffic:
    """Counters of links by side and by the other stage's address (empty for pipelines, which have none)."""

    def __init__(self) -> None:
        self._open: dict[Link, tuple[Side, str]] = {}
        self._ended: OrderedDict[tuple[Side, str], LinkStatistics] = OrderedDict()

    @contextmanager
    def counting(self, side: Side, peer: str, link: Link) -> Iterator[None]:
        """Count a link for the length of the block."""
        key = side, peer
        self._open[link] = key
        try:
            yield
        finally:
            del self._open[link]
            self._ended[key] = _sum(self._ended.pop(key, _NOTHING), link.statistics())
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def statistics(self) -> Mapping[tuple[Side, str], LinkStatistics]:
        """What went over all links of each side and peer; bytes queued and round trips are those of open ones."""
        found = dict(self._ended)
        for link, key in self._open.items():
            found[key] = _sum(found.get(key, _NOTHING), link.statistics(), is_open=True)
        return found

    def load(self) -> tuple[LinkLoad, ...]:
        """The same of the peers over whose links most bytes went."""
        found = [
            LinkLoad(
                side=side,
                peer=peer,
                frames_sent=one.frames_sent,
                frames_received=one.frames_received,
                bytes_sent=one.bytes_sent,
                bytes_received=one.bytes_received,
                bytes_queued=one.bytes_queued,
                seconds_waited=one.seconds_waited,
                round_trip=one.round_trip or 0.0,
            )
            for (side, peer), one in self.statistics().items()
        ]
        return tuple(sorted(found, key=lambda one: one.bytes_sent + one.bytes_received, reverse=True)[:LINKS_MAX])


def _sum(before: LinkStatistics, one: LinkStatistics, *, is_open: bool = False) -> LinkStatistics:
    return LinkStatistics(
        before.frames_sent + one.frames_sent,
        before.frames_received + one.frames_received,
        before.bytes_sent + one.bytes_sent,
        before.bytes_received + one.bytes_received,
        before.bytes_queued + one.bytes_queued if is_open else 0,
        (before.round_trip if one.round_trip is None else one.round_trip) if is_open else None,
        before.seconds_waited + one.seconds_waited,
    )
