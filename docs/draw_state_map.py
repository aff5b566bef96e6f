"""Write which state every layer of V4 Flash holds: ``python docs/draw_state_map.py`` writes docs/state-map.md."""

from __future__ import annotations

from pathlib import Path

from dgr.core.units import human_bytes
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.state_map import Component, ContextShape, state_map

PAGE = Path(__file__).with_name("state-map.md")
CONTEXTS = (32_768, 131_072, 1_048_576)
INTRODUCTION = """\
# State map of V4 Flash

Written from `dgr.v4.state_map` by `docs/draw_state_map.py`; a test keeps this page up to date. Which components a layer has,
and how many bytes they take for one session at each context (f16 K cache, n_ubatch 512). A stage owns the rows of its layers
and no others; add them up, or ask `dgr inspect v4-flash --layers A:B --ctx N`. What the components are:
[state-and-memory.md](state-and-memory.md#components).
"""


def page() -> str:
    maps = [state_map(V4_FLASH, V4_FLASH.whole, ContextShape(n_ctx)) for n_ctx in CONTEXTS]
    columns = " | ".join(f"{n_ctx:,} tokens".replace(",", " ") for n_ctx in CONTEXTS)
    lines = [INTRODUCTION, f"| layer | kind | components | {columns} |", f"|---:|---|---|{'---:|' * len(CONTEXTS)}"]
    for layer in V4_FLASH.whole.layers:
        held = ", ".join(f"`{each.value}`" for each in Component if layer in maps[0][each].layers)
        sizes = " | ".join(human_bytes(owned.layer_bytes(layer)) for owned in maps)
        lines.append(f"| {layer} | {V4_FLASH.kind(layer).value} | {held} | {sizes} |")
    lines.append(f"| all | | | {' | '.join(human_bytes(owned.total_bytes) for owned in maps)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
