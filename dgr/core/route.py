"""Layer ranges and the routes made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import field, frozen
from msgspec import Struct

from dgr.core.arguments import check_instance, instance, text
from dgr.core.scalars import U32
from dgr.errors import InvalidLayerRange, InvalidRoute

__all__ = ["LayerRange", "Route", "StageRef", "check_cover", "parse_split"]

_RANGE = re.compile(r"(\d{1,9}):(\d{1,9})")


class LayerRange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """Main layers ``begin <= layer < end``, written ``begin:end``."""

    begin: U32
    end: U32

    def __post_init__(self) -> None:
        if not type(self.begin) is type(self.end) is int:
            raise InvalidLayerRange(
                f"layer range {self.begin!r}:{self.end!r} is not made of two whole numbers; write A:B, for example 0:15"
            )
        if self.begin < 0 or self.end <= self.begin:
            raise InvalidLayerRange(
                f"layer range {self.begin}:{self.end} is empty; write A:B with 0 <= A < B, for example 0:15"
            )

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read ``A:B``."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise InvalidLayerRange(f"layer range {text!r} is not of the form A:B, for example 0:15")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.begin}:{self.end}"

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.begin <= layer < self.end

    @property
    def layers(self) -> range:
        return range(self.begin, self.end)


def check_cover(ranges: Sequence[LayerRange], n_layers: int) -> None:
    """Refuse ranges that do not cover ``0:n_layers`` exactly once, in order."""
    if not ranges:
        raise InvalidRoute(f"a split needs at least one layer range; the whole model is 0:{n_layers}")
    expected = 0
    for layers in ranges:
        if layers.begin != expected:
            what = (
                "overlaps the range before it" if layers.begin < expected else f"leaves out layers from {expected} on"
            )
            raise InvalidRoute(f"layer range {layers} {what}; the next range must begin at {expected}")
        if layers.end > n_layers:
            raise InvalidLayerRange(
                f"layer range {layers} ends beyond the last main layer; the model has {n_layers} (0:{n_layers})"
            )
        expected = layers.end
    if expected != n_layers:
        raise InvalidRoute(
            f"the split ends at layer {expected}, but the model has {n_layers}; end with {expected}:{n_layers}"
        )


def parse_split(text: str, n_layers: int) -> tuple[LayerRange, ...]:
    """Read ``0:15,15:29,29:43`` and check that it covers the model exactly once."""
    ranges = tuple(LayerRange.parse(part) for part in text.split(","))
    check_cover(ranges, n_layers)
    return ranges


@frozen
class StageRef:
    """A stage by its address and the layers it owns. In one process the address is a name."""

    address: str = field(validator=text())
    layers: LayerRange = field(validator=instance(LayerRange))


@frozen
class Route:
    """Ordered stages, head first. :meth:`check` proves that they cover the model exactly once."""

    stages: tuple[StageRef, ...] = field(validator=instance(tuple))

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise InvalidRoute("the route has no stage; give one or more, head first")
        for stage in self.stages:
            check_instance("a stage of the route", stage, StageRef)

    def check(self, n_layers: int) -> None:
        """Refuse a route that does not cover ``0:n_layers`` exactly once, or that names an address twice."""
        check_cover([stage.layers for stage in self.stages], n_layers)
        seen: set[str] = set()
        for stage in self.stages:
            if stage.address in seen:
                raise InvalidRoute(f"the route names stage {stage.address!r} twice; a stage owns one layer range")
            seen.add(stage.address)

    def predecessor(self, index: int) -> str:
        """Address of the stage before ``index``; empty for the head."""
        return self.stages[index - 1].address if index else ""

    def successor(self, index: int) -> str:
        """Address of the stage after ``index``; empty for the tail."""
        return self.stages[index + 1].address if index + 1 < len(self.stages) else ""

    def other_end(self, index: int) -> str:
        """Address of the tail for the head, and of the head for the tail; empty for a stage between them."""
        last = len(self.stages) - 1
        return self.stages[last - index].address if index in (0, last) else ""

    def __str__(self) -> str:
        return " -> ".join(f"{stage.address}[{stage.layers}]" for stage in self.stages)
