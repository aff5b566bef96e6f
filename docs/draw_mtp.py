"""Fill the tables and diagrams of docs/mtp-contract.md from the model behind it: ``python docs/draw_mtp.py``.

A block begins with ``<!-- drawn: NAME -->`` and ends with ``<!-- end -->``; what is between is written anew.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draw_states import comments, section

from dgr.core.route import LayerRange, parse_split
from dgr.testing.mtp_contract import messages
from dgr.testing.mtp_contract.ownership import (
    CROSSINGS,
    DUTIES,
    STATE,
    Origin,
    mtp_bytes,
    mtp_tensors,
    plane_bytes,
)
from dgr.testing.mtp_contract.states import MACHINES
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.state_map import ContextShape, state_map

HERE = Path(__file__).resolve().parent
PAGE = HERE / "mtp-contract.md"
ANCHORS = HERE.parent / "vendor" / "llama.cpp" / "mtp_anchors.toml"
#: What each machine is the state of.
TITLES = {
    "round": "A session's rounds, as its pipeline sees them",
    "trunk": "A session's main layers on one stage",
    "drafter": "A session's MTP block on the tail",
}
#: Depths of drafts, and a split of V4 Flash, for which memory is shown.
DEPTHS = (1, 3, 8)
SPLIT = "0:11,11:22,22:33,33:43"


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(heading) + " |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"


def quoted(anchors: Iterable[str]) -> str:
    return " ".join(f"`{anchor}`" for anchor in anchors)


def tensors() -> Iterator[str]:
    known = mtp_tensors(V4_FLASH)
    block = [one for one in known if one.origin is Origin.BLOCK and one.required]
    names = ", ".join(f"`{one.name.removeprefix('blk.43.')}`" for one in block)
    yield f"The block's {len(block)} tensors `blk.43.*` of a layer of ratio 0 (from {quoted(block[0].anchors)}): {names}."
    yield ""
    rows = []
    for one in known:
        if one.origin is not Origin.BLOCK:
            shape = " x ".join(map(str, one.ne))
            need = "yes" if one.required else "no"
            stand_in = f"`{one.fallback}`" if one.fallback else ""
            rows.append((f"`{one.name}`", shape, one.origin, need, stand_in, quoted(one.anchors)))
    yield from table(
        ("tensor of the MTP file", "shape in V4 Flash", "origin", "required", "if absent", "read from"), rows
    )


def duties() -> Iterator[str]:
    yield from table(("what", "who", "read from"), ((one.what, one.owner, quoted(one.anchors)) for one in DUTIES))


def state() -> Iterator[str]:
    rows = ((one.what, one.owner, one.ends, quoted(one.anchors)) for one in STATE)
    yield from table(("state of a session", "where", "how it ends", "read from"), rows)


def crossings() -> Iterator[str]:
    rows = ((one.what, one.way, f"`{one.field}`", one.n_bytes) for one in CROSSINGS)
    yield from table(("value", "way", "field", "bytes"), rows)


def fields() -> Iterator[str]:
    rows = []
    for kind in (*messages.TO_STAGE, *messages.TO_PIPELINE):
        names = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        rows.append(
            (kind.__struct_config__.tag, f"`{messages.message_name(kind)}`", names, str(kind.__doc__).splitlines()[0])
        )
    yield from table(("tag", "message", "fields, in order", "what it is"), rows)


def reasons() -> Iterator[str]:
    words = comments(messages.Reason)
    yield from table(
        ("number", "reason", "when"), ((one.value, f"`{one.name}`", words[one.name]) for one in messages.Reason)
    )


def machines() -> Iterator[str]:
    for name, title in TITLES.items():
        yield from section(f"### {title}", MACHINES[name])


def planes() -> Iterator[str]:
    ranges = (V4_FLASH.whole, *parse_split(SPLIT, V4_FLASH.n_layers))
    rows: list[tuple[object, ...]] = []
    for layers in ranges:
        rings = sum(_rings(layers))
        rows.append((str(layers), f"{rings:,}", *(f"{plane_bytes(V4_FLASH, layers, depth):,}" for depth in DEPTHS)))
    yield from table(("layers", "rings alone (R = 0)", *(f"planes, R = {depth}" for depth in DEPTHS)), rows)


def _rings(layers: LayerRange) -> Iterator[int]:
    owned = state_map(V4_FLASH, layers, ContextShape(1))
    return (one.n_bytes for one in owned.components if one.component.value.endswith("ring"))


def totals() -> Iterator[str]:
    rows = []
    for depth in DEPTHS:
        found = mtp_bytes(V4_FLASH, ContextShape(32768), depth)
        each = (found.planes, found.own_cache, found.rows, found.batch_rows, found.total)
        rows.append((f"R = {depth}", *(f"{n:,}" for n in each)))
    heading = ("", "planes, all stages", "MTP's own K and V", "final rows kept", "final rows of a batch", "together")
    yield from table(heading, rows)


def anchors() -> Iterator[str]:
    listed: list[dict[str, Any]] = tomllib.loads(ANCHORS.read_text(encoding="utf-8"))["anchor"]
    rows = []
    for one in listed:
        end = f"-{one['line'] + one['lines'] - 1}" if one["lines"] > 1 else ""
        rows.append((f"`{one['id']}`", f"{one['file']}:{one['line']}{end}", one["says"]))
    yield from table(("anchor", "place at the pin", "what it says"), rows)


BLOCKS: dict[str, Callable[[], Iterator[str]]] = {
    block.__name__: block
    for block in (tensors, duties, state, crossings, fields, reasons, machines, planes, totals, anchors)
}
_BLOCK = re.compile(r"(<!-- drawn: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def drawn(text: str) -> str:
    """The page with every block written anew."""
    return _BLOCK.sub(lambda match: match[1] + "\n".join(BLOCKS[match[2]]()).rstrip() + "\n" + match[3], text)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
