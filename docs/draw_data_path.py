"""Draw the way of a token: ``python docs/draw_data_path.py`` writes docs/data-path.svg from classes, frames and state map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from dgr.client.pipeline import Pipeline
from dgr.client.route_client import RouteClient
from dgr.client.session import ClientSession
from dgr.core.route import LayerRange
from dgr.core.units import human_bytes
from dgr.core.values import Wire
from dgr.engine.llama import LlamaEngine
from dgr.stage.engine_thread import EngineThread
from dgr.stage.scheduler import Scheduler
from dgr.stage.session import SessionActor
from dgr.stage.shard import Shard
from dgr.stage.supervisor import EpochSupervisor
from dgr.v4.hyper_parameters import HC_STREAMS, V4_FLASH
from dgr.v4.state_map import ContextShape, state_map
from dgr.wire.frames import Boundary, Token, Tokens

PAGE = Path(__file__).with_name("data-path.svg")
#: The split of the README, and the context for which bytes are told.
SPLIT = (("head", LayerRange(0, 15)), ("middle", LayerRange(15, 29)), ("tail", LayerRange(29, 43)))
N_CTX = 32_768
CLIENT = (Pipeline, ClientSession, RouteClient)
STAGE = (Shard, EpochSupervisor, SessionActor, Scheduler, EngineThread, LlamaEngine)

WIDTH, HEIGHT = 1010, 470
BOX, GAP, LEFT, TOP = 205, 50, 15, 78
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1c1e21 } .small { font-size: 11px; fill: #5a6067 }
.name { font-weight: 600 } .title { font-size: 15px; font-weight: 600 }
.box { fill: #f4f6f8; stroke: #9aa3ad } .state { fill: #e6f0e9; stroke: #7fa88b }
.way { fill: none; stroke: #3564a8; stroke-width: 1.6 }
.head { fill: #3564a8 } .frame { fill: #3564a8; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e6e8 } .small { fill: #a3abb3 }
  .box { fill: #23272c; stroke: #59626b } .state { fill: #223329; stroke: #55765f }
  .way { stroke: #85b0ee } .head, .frame { fill: #85b0ee }
}"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def where(cls: type) -> str:
    """The module of a class, as one would open it."""
    return f"{cls.__module__.replace('.', '/')}.py"


def box(x: float, height: float, title: str, classes: Sequence[type]) -> Iterator[str]:
    yield f'<rect x="{x:g}" y="{TOP}" width="{BOX}" height="{height:g}" rx="8" class="box"/>'
    yield text(x + 12, TOP + 24, title, "title")
    for index, cls in enumerate(classes):
        y = TOP + 48 + 34 * index
        yield text(x + 12, y, cls.__name__, "name")
        yield text(x + 12, y + 14, where(cls), "small")


def arrow(path: str) -> str:
    return f'<path d="{path}" class="way" marker-end="url(#head)"/>'


def fields(frame: type[Tokens | Boundary | Token], *without: str) -> str:
    return ", ".join(name for name in frame.__struct_fields__ if name not in without)


def picture() -> Iterator[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">'
    yield '<title id="title">The way of a token: from the client through the stages, and from the tail back</title>'
    yield f"<style>{STYLE}</style>"
    yield '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4.5" orient="auto">'
    yield '<path d="M0,0 L9,4.5 L0,9 z" class="head"/></marker></defs>'
    at = [LEFT + index * (BOX + GAP) for index in range(4)]
    height = 48 + 34 * len(STAGE) + 66
    yield from box(at[0], height, "client", CLIENT)
    said = ("The transcript lives here, and", "whatever is lost is prefilled", "from it again.")
    for index, line in enumerate(said):
        yield text(at[0] + 12, TOP + 176 + 16 * index, line, "small")
    for x, (name, layers) in zip(at[1:], SPLIT, strict=True):
        yield from box(x, height, f"{name}, layers {layers}", STAGE)
        owned = state_map(V4_FLASH, layers, ContextShape(N_CTX))
        y = TOP + 48 + 34 * len(STAGE)
        yield f'<rect x="{x + 8}" y="{y - 6}" width="{BOX - 16}" height="62" rx="6" class="state"/>'
        names = [component.component.value for component in owned.owned]
        yield text(x + 16, y + 11, f"state: {human_bytes(owned.total_bytes)}", "name")
        yield text(x + 16, y + 28, ", ".join(names[:4]), "small")
        yield text(x + 16, y + 43, ", ".join(names[4:]), "small")
    values = HC_STREAMS * V4_FLASH.n_embd
    residual = f"{HC_STREAMS} x {V4_FLASH.n_embd} floats, {human_bytes(Wire.F32.row_bytes(values))} a token"
    for index, (frame, line) in enumerate(((Tokens, "token ids"), (Boundary, residual), (Boundary, residual))):
        left, right = at[index] + BOX / 2, at[index + 1] + BOX / 2
        yield arrow(f"M{left + 8:g},{TOP} V52 H{right - 8:g} V{TOP - 2}")
        yield text((left + right) / 2, 25, frame.__name__, "frame", "middle")
        yield text((left + right) / 2, 42, line, "small", "middle")
    bottom = TOP + height
    yield arrow(f"M{at[3] + BOX / 2:g},{bottom} V{bottom + 24} H{at[0] + BOX / 2:g} V{bottom + 2}")
    yield text(WIDTH / 2, bottom + 18, Token.__name__, "frame", "middle")
    yield text(
        WIDTH / 2, bottom + 40, f"drawn at the tail, straight back to the client: {fields(Token)}", "small", "middle"
    )
    shared = f"{Tokens.__name__} and {Boundary.__name__} both carry {fields(Tokens)}."
    shared += f" State, here of a session of {N_CTX} tokens, never leaves."
    yield text(WIDTH / 2, bottom + 57, shared, "small", "middle")
    yield "</svg>"


def page() -> str:
    assert {*Tokens.__struct_fields__} <= {*Boundary.__struct_fields__}
    return "\n".join(picture()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
