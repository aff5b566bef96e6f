"""``dgr inspect --plot``: which layers and which state the stages of a cut own, as a picture (SVG)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from xml.etree import ElementTree

from dgr.artifact.artifact import Artifact
from dgr.cli.streams import print_json
from dgr.cli.summary import print_beside
from dgr.core.files.outputs import write_file
from dgr.core.files.targets import find_target
from dgr.core.route import LayerRange, parse_split
from dgr.core.units import human_bytes
from dgr.text import one_line
from dgr.v4.hyper_parameters import HyperParameters, LayerKind
from dgr.v4.state_map import Component, ContextShape, StateMap, state_map

__all__ = ["draw_cut", "show_plot"]

#: Pixels: the drawing is as wide as its page, and this is what the numbers below are parts of.
_WIDTH, _LEFT, _RIGHT = 960, 90, 20
_TOP, _ROW, _CELL, _BAR = 64, 22, 26, 120
#: Colours that people with any colour vision tell apart; the stages between them differ in shade alone.
_OF_KIND = {LayerKind.SWA: "#bbbbbb", LayerKind.CSA: "#56b4e9", LayerKind.HCA: "#e69f00"}
_OF_COMPONENT = {
    Component.RAW_SWA: "#999999",
    Component.CSA: "#0072b2",
    Component.INDEXER: "#56b4e9",
    Component.HCA: "#e69f00",
    Component.CSA_RING: "#009e73",
    Component.INDEXER_RING: "#cc79a7",
    Component.HCA_RING: "#d55e00",
}
_WEIGHTS = "#666666"
_STAGES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


class _Drawing:
    """An SVG that grows downwards."""

    def __init__(self, n_layers: int, title: str) -> None:
        self.root = ElementTree.Element(
            "svg",
            {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", "font-size": "12", "role": "img"},
        )
        ElementTree.SubElement(self.root, "title").text = title
        self.step = (_WIDTH - _LEFT - _RIGHT) / n_layers
        self.y = 0.0

    def x(self, layer: float) -> float:
        return _LEFT + layer * self.step

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, said: str = "", shown: bool = True
    ) -> None:
        """A rectangle, which says more to whoever points at it."""
        values = (("x", x), ("y", y), ("width", width), ("height", height))
        attributes = {name: f"{value:.2f}" for name, value in values} | {"fill": fill}
        one = ElementTree.SubElement(self.root, "rect", attributes | ({} if shown else {"fill-opacity": "0.15"}))
        if said:
            ElementTree.SubElement(one, "title").text = said

    def text(self, x: float, y: float, words: str, anchor: str = "start", **look: str) -> None:
        attributes = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor} | look
        ElementTree.SubElement(self.root, "text", attributes).text = one_line(words)

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        x = float(_LEFT)
        for words, colour in entries:
            self.box(x, self.y - 9, 10, 10, colour)
            self.text(x + 14, self.y, words)
            x += 30 + 6.6 * len(words)
        self.y += _ROW

    def done(self) -> bytes:
        self.root.set("viewBox", f"0 0 {_WIDTH} {self.y:.0f}")
        paper = ElementTree.Element("rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
        self.root.insert(1, paper)
        ElementTree.indent(self.root)
        return b"%s\n" % ElementTree.tostring(self.root, encoding="utf-8", xml_declaration=True)


def draw_cut(
    name: str, hp: HyperParameters, shape: ContextShape, stages: Sequence[LayerRange], artifact: Artifact | None = None
) -> bytes:
    """The picture as SVG: kinds of layers, state of every layer by component, weights where a file has them, by stage.

    ``stages`` need not cover the model: what no stage owns is pale.
    """
    owned = {layer for layers in stages for layer in layers.layers}
    whole = state_map(hp, hp.whole, shape)
    sessions = "1 session" if shape.n_seq_max == 1 else f"{shape.n_seq_max} sessions"
    cut = "1 stage" if len(stages) == 1 else f"{len(stages)} stages"
    title = f"{name}: {cut}, state of {sessions} of {shape.n_ctx_seq} tokens"
    drawing = _Drawing(hp.n_layers, title)
    drawing.text(_LEFT, 24, title, **{"font-size": "16"})
    _draw_stages(drawing, hp, shape, stages, artifact)
    _draw_kinds(drawing, hp, owned)
    _draw_state(drawing, hp, whole, owned)
    if artifact is not None:
        _draw_weights(drawing, hp, artifact, owned)
    return drawing.done()


def _draw_stages(
    drawing: _Drawing, hp: HyperParameters, shape: ContextShape, stages: Sequence[LayerRange], artifact: Artifact | None
) -> None:
    """A bar over the layers of every stage, and what it owns in words."""
    drawing.y = float(_TOP)
    for number, layers in enumerate(stages, 1):
        colour = _STAGES[(number - 1) % len(_STAGES)]
        state = state_map(hp, layers, shape).total_bytes
        ends = [end for end, has in (("embedding", layers.begin == 0), ("output", layers.end == hp.n_layers)) if has]
        facts = [f"layers {layers}", *ends, f"state {human_bytes(state)}"]
        facts += [] if artifact is None else [f"weights {human_bytes(artifact.weight_bytes(layers))}"]
        left, width = drawing.x(layers.begin), len(layers.layers) * drawing.step
        drawing.box(left, drawing.y, width, 5, colour, f"stage {number}: {', '.join(facts)}")
        # Words that begin in the right half end where the stage does.
        on_the_right = layers.begin > hp.n_layers / 2
        anchor, at = ("end", left + width) if on_the_right else ("start", left)
        drawing.text(at, drawing.y + 18, f"stage {number}: {', '.join(facts)}", anchor, fill=colour)
        drawing.text(_LEFT - 8, drawing.y + 9, f"stage {number}", "end")
        drawing.y += _ROW + 8
    drawing.y += 6


def _draw_kinds(drawing: _Drawing, hp: HyperParameters, owned: set[int]) -> None:
    """A box for every layer, by what it attends to; a dot where token ids choose the experts."""
    drawing.text(_LEFT - 8, drawing.y + 17, "layers", "end")
    for layer in range(hp.n_layers):
        kind = hp.kind(layer)
        routed = "token id" if hp.is_hash_routed(layer) else "router"
        said = f"layer {layer}: {kind.value}, experts by {routed}"
        drawing.box(drawing.x(layer), drawing.y, drawing.step - 1, _CELL, _OF_KIND[kind], said, layer in owned)
        if hp.is_hash_routed(layer):
            drawing.box(drawing.x(layer + 0.5) - 2, drawing.y + _CELL - 8, 4, 4, "#000000")
        if layer % max(1, hp.n_layers // 8) == 0:
            drawing.text(drawing.x(layer + 0.5), drawing.y + _CELL + 14, str(layer), "middle")
    drawing.y += _CELL + 34
    entries = [(kind.value, colour) for kind, colour in _OF_KIND.items()]
    drawing.legend([*entries, ("experts by token id", "#000000"), ("pale: of no stage here", "#e8e8e8")])


def _draw_state(drawing: _Drawing, hp: HyperParameters, whole: StateMap, owned: set[int]) -> None:
    """Bytes of state of every layer, component upon component."""
    parts: dict[int, list[tuple[Component, int]]] = {layer: [] for layer in range(hp.n_layers)}
    for state in whole.owned:
        for layer in state.layers:
            size = sum(tensor.n_bytes for tensor in state.tensors if tensor.layer == layer)
            parts[layer].append((state.component, size))
    most = max(sum(size for _, size in layer) for layer in parts.values())
    floor = _axis(drawing, "state", most)
    for layer, components in parts.items():
        said = ", ".join(f"{component.value} {human_bytes(size)}" for component, size in components)
        total = human_bytes(sum(size for _, size in components))
        bottom = floor
        for component, size in components:
            height = _BAR * size / most
            bottom -= height
            words = f"layer {layer}: {total} of state: {said}"
            drawing.box(
                drawing.x(layer), bottom, drawing.step - 1, height, _OF_COMPONENT[component], words, layer in owned
            )
    drawing.legend([(state.component.value, _OF_COMPONENT[state.component]) for state in whole.owned])


def _draw_weights(drawing: _Drawing, hp: HyperParameters, artifact: Artifact, owned: set[int]) -> None:
    """Bytes of weights of every layer, as far as they are known here."""
    sizes = [artifact.block_bytes(layer) for layer in range(hp.n_layers)]
    most = max(sizes)
    if not most:
        return
    floor = _axis(drawing, "weights", most)
    for layer, size in enumerate(sizes):
        height = _BAR * size / most
        words = f"layer {layer}: {human_bytes(size)} of weights"
        drawing.box(drawing.x(layer), floor - height, drawing.step - 1, height, _WEIGHTS, words, layer in owned)
    ends = f"beside them the embedding, {human_bytes(artifact.head_bytes)}, and the output, {human_bytes(artifact.tail_bytes)}"
    drawing.text(_LEFT, drawing.y, ends)
    drawing.y += _ROW


def _axis(drawing: _Drawing, what: str, most: int) -> float:
    """Room for bars, with what the highest stands for; returns where they stand."""
    drawing.text(_LEFT - 8, drawing.y + 10, human_bytes(most), "end")
    drawing.text(_LEFT - 8, drawing.y + 26, what, "end")
    drawing.text(_LEFT - 8, drawing.y + 40, "a layer", "end")
    floor = drawing.y + _BAR
    drawing.box(_LEFT, floor, _WIDTH - _LEFT - _RIGHT, 1, "#000000")
    drawing.y = floor + 24
    return floor


def show_plot(args: argparse.Namespace, hp: HyperParameters, shape: ContextShape, artifact: Artifact | None) -> int:
    """Draw what the flags ask for, into the file that they name."""
    target = find_target(args.plot)
    if artifact is not None:
        target.check_apart(*artifact.parts.paths)
    if args.split is not None:
        stages: tuple[LayerRange, ...] = parse_split(args.split, hp.n_layers)
    else:
        stages = (hp.whole if args.layers is None else LayerRange.parse(args.layers),)
        hp.check_range(stages[0])
    write_file(target, draw_cut(args.model, hp, shape, stages, artifact))
    if args.json:
        print_json({"plot": str(target.path), "stages": [str(layers) for layers in stages]})
    else:
        print_beside(target, f"{target.path}: {', '.join(map(str, stages))}; any browser shows it")
    return 0
