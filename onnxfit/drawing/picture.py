"""A drawing as a picture, laid out and drawn by Graphviz."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any, NamedTuple

from onnxfit.drawing.labels import MAX_LITERAL_CHARACTERS, clean, count
from onnxfit.drawing.scene import KINDS, DrawnNode, Scene, Tensor
from onnxfit.drawing.text import summary
from onnxfit.errors import InstallationError, SettingError
from onnxfit.graph import names
from onnxfit.graph.scopes import MODEL, STAGES

MAX_BOXES = 1500  # boxes of a picture: their layout takes half a minute
# Edges are labelled with types in pictures with at most this many boxes. In larger pictures, the
# labels would take most of the area and nearly all of the time.
MAX_BOXES_WITH_EDGE_LABELS = 150
# Edges lead down from stage to stage in pictures with at most this many boxes. In others, stages
# are laid out one by one, which is faster.
MAX_BOXES_RANKED_TOGETHER = 600
MAX_ATTRIBUTES = 4  # attributes in a box
FONT = "Helvetica,Arial,sans-serif"
INK = "#1f2937"
FAINT = "#4b5563"
FAINT_ON_DARK = "#e5e7eb"


class StageColours(NamedTuple):
    """Colours of the boxes of a stage, of their borders, and of the background."""

    fill: str
    border: str
    background: str


class TensorStyle(NamedTuple):
    """Graphviz's shape of the box of a tensor, its colour, and that of its border."""

    shape: str
    fill: str
    border: str


class Edge(NamedTuple):
    """An edge that arrives at a box."""

    source: str  # Graphviz's name of the box where the edge begins
    label: str
    colour: str


COLOURS = {
    "model": StageColours("#dbeafe", "#2563eb", "#f5f9ff"),
    "distillation": StageColours("#fef3c7", "#d97706", "#fffdf5"),
    "loss": StageColours("#fee2e2", "#dc2626", "#fff6f6"),
    "penalty": StageColours("#f3e8ff", "#9333ea", "#fcf8ff"),
    "metrics": StageColours("#fce7f3", "#db2777", "#fff7fb"),
    "gradient": StageColours("#ffedd5", "#ea580c", "#fffaf4"),
    "accumulation": StageColours("#cffafe", "#0891b2", "#f3fdff"),
    "optimizer": StageColours("#dcfce7", "#16a34a", "#f5fef8"),
}
STYLES = {
    "input": TensorStyle("box", "#ffffff", "#374151"),
    "weight": TensorStyle("cylinder", "#fde68a", "#b45309"),
    "state": TensorStyle("cylinder", "#fef9e7", "#b45309"),
    "constant": TensorStyle("note", "#f3f4f6", "#6b7280"),
    "output": TensorStyle("box", "#374151", "#111827"),
}


def as_svg(scene: Scene) -> str:
    """Return an SVG document."""
    return _render(scene, "svg").decode()


def as_png(scene: Scene) -> bytes:
    """Return the bytes of a PNG file."""
    return _render(scene, "png")


def _render(scene: Scene, format: str) -> bytes:  # noqa: A002  (Graphviz's word)
    boxes = len(scene.nodes) + len(scene.inputs) + len(scene.outputs)
    if boxes > MAX_BOXES:
        raise SettingError(
            f"A picture of {boxes} boxes is too large; the limit is {MAX_BOXES} boxes. Pass"
            " depth=1 or more to draw one box per scope."
        )
    try:
        import pygraphviz
    except ImportError as error:
        raise InstallationError(
            f"Pictures need pygraphviz 2, which includes Graphviz ({error}): pip install"
            ' "onnxfit[draw]"'
        ) from error
    graph = pygraphviz.AGraph(strict=False, directed=True)
    _Picture(graph, scene, boxes).draw()
    if format == "png":
        graph.graph_attr.update(dpi=96, size="100,100")  # inches: a larger drawing shrinks to it
    drawn: bytes = graph.draw(format=format, prog="dot")
    return drawn


class _Picture:
    """Adds the boxes and edges of a scene to a Graphviz graph."""

    def __init__(self, graph: Any, scene: Scene, boxes: int) -> None:
        self.graph = graph
        self.scene = scene
        self.boxes = boxes
        self.edge_labels = boxes <= MAX_BOXES_WITH_EDGE_LABELS
        self.input_names = {tensor.name for tensor in scene.inputs}  # their boxes show the types
        self.keys: set[str] = set()  # Graphviz's names of the boxes
        # for each tensor: the box that it comes from, and the colour of the edges from there
        self.origins: dict[str, tuple[str, str]] = {}

    def draw(self) -> None:
        self._set_defaults()
        for tensor in self.scene.inputs:
            key = self._add_tensor(tensor, tensor.kind)
            self.origins[tensor.name] = (key, STYLES[tensor.kind].border)
        boxes = [box for stage in self.scene.stages for box in self._add_stage(stage)]
        for key, node in boxes:
            for edge in self._arriving(node):
                label = edge.label if self.edge_labels else ""
                self.graph.add_edge(edge.source, key, label=label, color=edge.colour)
        for tensor in self.scene.outputs:
            self._add_output(tensor)

    def _set_defaults(self) -> None:
        self.graph.graph_attr.update(
            rankdir="TB",
            fontname=FONT,
            fontsize=13,
            fontcolor=INK,
            label=_legend(self.scene),
            labelloc="t",
            nodesep=0.3,
            ranksep=0.45,
            pad=0.3,
            newrank=self.boxes <= MAX_BOXES_RANKED_TOGETHER,
        )
        self.graph.node_attr.update(
            fontname=FONT,
            fontsize=12,
            fontcolor=INK,
            penwidth=1.2,
            margin="0.1,0.04",
            height=0.3,
            width=0.3,
        )
        self.graph.edge_attr.update(
            fontname=FONT,
            fontsize=10,
            fontcolor=FAINT,
            color="#6b7280",
            arrowsize=0.6,
            penwidth=1.0,
        )
        if not self.edge_labels:
            # Fewer iterations of the layout take seconds instead of minutes.
            self.graph.graph_attr.update(nslimit=2, nslimit1=2, mclimit=0.3)

    def _add_stage(self, stage: str) -> Iterator[tuple[str, DrawnNode]]:
        """Add the boxes of a stage; yield each node with Graphviz's name of its box."""
        colours = COLOURS[stage]
        nodes = [node for node in self.scene.nodes if node.stage == stage]
        graph = self.graph
        # A stage that is a single box needs no frame around it.
        if len(self.scene.stages) > 1 and any(node.name != stage for node in nodes):
            graph = self.graph.add_subgraph(
                name=f"cluster_{stage}",
                label=f"<<b>{STAGES[stage]}</b>>",
                fontcolor=colours.border,
                color=colours.border,
                style="rounded,filled",
                fillcolor=colours.background,
                labeljust="l",
                margin=10,
                penwidth=0.8,
            )
        for node in nodes:
            key = self._key(f"{node.operator or 'scope'} {node.name or ', '.join(node.outputs)}")
            types = "" if self.edge_labels else self._output_types(node)
            graph.add_node(
                key,
                label=_node_label(node, types),
                shape="box",
                style="rounded,filled",
                fillcolor=colours.fill,
                color=colours.border,
                penwidth=1.2 if node.operator else 2.4,
            )
            self.origins.update({name: (key, colours.border) for name in node.outputs if name})
            yield key, node

    def _add_tensor(self, tensor: Tensor, kind: str) -> str:
        """Add the box of a tensor in the style of `kind`; return Graphviz's name of the box."""
        style = STYLES[kind]
        key = self._key(f"{tensor.kind} {tensor.name}")
        ink, faint = ("#ffffff", FAINT_ON_DARK) if kind == "output" else (INK, FAINT)
        self.graph.add_node(
            key,
            label=_label_markup(tensor.name, [tensor.type], faint),
            shape=style.shape,
            style="filled",
            fillcolor=style.fill,
            color=style.border,
            fontcolor=ink,
            penwidth=2.4 if tensor.kind == "output" else 1.2,
        )
        return key

    def _add_output(self, tensor: Tensor) -> None:
        """Add the box of a graph output and its edge; the next value of a state looks like it."""
        state = next((t for t in self.scene.inputs if tensor.name == names.updated(t.name)), None)
        key = self._add_tensor(tensor, state.kind if state else "output")
        if tensor.name in self.origins:
            source, colour = self.origins[tensor.name]
            self.graph.add_edge(source, key, color=colour)

    def _arriving(self, node: DrawnNode) -> Iterator[Edge]:
        """Yield one edge for each box that a node reads from."""
        tensors: dict[tuple[str, str], list[str]] = {}
        for argument in node.arguments:
            if argument.tensor in self.origins:
                tensors.setdefault(self.origins[argument.tensor], []).append(argument.tensor)
        for (source, colour), read in tensors.items():
            label = _text(self._edge_text(read))
            yield Edge(source, f"<  {label}>" if label else "", colour)

    def _edge_text(self, read: list[str]) -> str:
        """Return the type of the tensor along an edge, or the number of tensors."""
        distinct = len(set(read))
        if distinct > 1:
            return f"{distinct} tensors"
        name = read[0]
        type_ = "" if name in self.input_names else self.scene.types.get(name, "")
        return f"{type_} ×{len(read)}".strip() if len(read) > 1 else type_

    def _output_types(self, node: DrawnNode) -> str:
        types = [self.scene.types[name] for name in node.outputs if name in self.scene.types]
        if not types:
            return ""
        return f"→ {types[0]}" if len(types) == 1 else f"→ {len(types)} tensors"

    def _key(self, title: str) -> str:
        """Return a unique name for a box, which browsers show as its tooltip.

        The name never begins with "<", which would be markup.
        """
        title = clean(title).replace("&", "&amp;")
        key = title
        n = 1
        while key in self.keys:
            n += 1
            key = f"{title} ({n})"
        self.keys.add(key)
        return key


def _node_label(node: DrawnNode, output_types: str) -> str:
    """Return the text in a box.

    Below the operator are small constants, attributes that differ from the operator's defaults, and
    the types of the outputs.
    """
    if not node.operator:
        title = node.name.removeprefix(f"{MODEL}/")
        return _label_markup(title, [*summary(node).split(": "), output_types])
    changed = [a for a in node.attributes if not a.default]
    lines = [f"{clean(a.name)} = {a.value}" for a in changed[:MAX_ATTRIBUTES]]
    if any(a.literal for a in node.arguments):
        arguments = ", ".join(a.literal or "·" for a in node.arguments if not a.captured)
        lines.insert(0, f"({arguments})")
    return _label_markup(node.operator, [*lines, output_types])


def _label_markup(title: str, lines: list[str], colour: str = FAINT) -> str:
    """Return Graphviz's markup of a bold title with smaller lines below it."""
    rows = [f"<tr><td><b>{_text(title)}</b></td></tr>"]
    rows += [
        f'<tr><td><font point-size="10" color="{colour}">'
        f"{_text(line, 2 * MAX_LITERAL_CHARACTERS)}</font></td></tr>"
        for line in lines
        if line
    ]
    return (
        '<<table border="0" cellborder="0" cellspacing="0"'
        f' cellpadding="1">{"".join(rows)}</table>>'
    )


def _text(text: str, max_characters: int = MAX_LITERAL_CHARACTERS) -> str:
    """Return text as markup, with the middle left out where it is long."""
    text = clean(text)
    if len(text) > max_characters:
        text = f"{text[: max_characters // 2]}…{text[-max_characters // 2 :]}"
    return html.escape(text).replace("\\", "\\\\")  # Graphviz replaces \N by the name of the box


def _legend(scene: Scene) -> str:
    """Return the name of the graph and the meaning of the colours."""
    cells = [
        _swatch(STAGES[stage], COLOURS[stage].fill, COLOURS[stage].border) for stage in scene.stages
    ]
    present = {tensor.kind for tensor in (*scene.inputs, *scene.outputs)}
    for kind, title in KINDS.items():
        if kind in present:
            ink = "#ffffff" if kind == "output" else INK
            cells.append(_swatch(title, STYLES[kind].fill, STYLES[kind].border, ink))
    title = f"{_text(scene.name) or 'graph'} · {count(scene.node_count, 'node')}"
    return (
        f'<<table border="0" cellspacing="6" cellpadding="4"><tr><td colspan="{len(cells)}"><font'
        f' point-size="16"><b>{title}</b></font></td></tr>'
        f"<tr>{''.join(cells)}</tr></table>>"
    )


def _swatch(text: str, fill: str, border: str, ink: str = INK) -> str:
    return (
        f'<td border="1" style="rounded" bgcolor="{fill}" color="{border}"><font point-size="10"'
        f' color="{ink}"> {text} </font></td>'
    )
