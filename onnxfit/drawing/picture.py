"""A scene as a picture: Graphviz lays it out and draws it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from onnxfit.drawing.scene import KINDS, LETTERS, PARTS, Call, Scene, Tensor, clean
from onnxfit.drawing.text import summary
from onnxfit.errors import InstallationError, SettingError
from onnxfit.graph import names

MAX_BOXES = 1500  # boxes of a picture: their layout takes half a minute
# up to so many boxes, types stand at the edges; beyond, labels of edges would take most of the room
# and nearly all of the time
ROOMY = 150
# up to so many boxes, edges lead down from part to part; beyond, parts are laid out one by one,
# which is faster
DOWNWARD = 600
LINES = 4  # attributes in a box
FONT = "Helvetica,Arial,sans-serif"
INK, FAINT = "#1f2937", "#4b5563"
# part -> the colours of a box, its border, and the ground of the part
COLOURS = {
    "model": ("#dbeafe", "#2563eb", "#f5f9ff"),
    "train": ("#cffafe", "#0891b2", "#f3fdff"),
    "loss": ("#fee2e2", "#dc2626", "#fff6f6"),
    "penalty": ("#f3e8ff", "#9333ea", "#fcf8ff"),
    "gradient": ("#ffedd5", "#ea580c", "#fffaf4"),
    "optimizer": ("#dcfce7", "#16a34a", "#f5fef8"),
}
# kind of tensor -> shape, fill, border
SHAPES = {
    "input": ("box", "#ffffff", "#374151"),
    "weight": ("cylinder", "#fde68a", "#b45309"),
    "state": ("cylinder", "#fef9e7", "#b45309"),
    "constant": ("note", "#f3f4f6", "#6b7280"),
    "output": ("box", "#374151", "#111827"),
}


def as_svg(scene: Scene) -> str:
    """An SVG document."""
    return _rendered(scene, "svg").decode()


def as_png(scene: Scene) -> bytes:
    """The bytes of a PNG file."""
    return _rendered(scene, "png")


def _rendered(scene: Scene, form: str) -> bytes:
    boxes = len(scene.calls) + len(scene.inputs) + len(scene.outputs)
    if boxes > MAX_BOXES:
        raise SettingError(
            f"A picture of {boxes} boxes is too large to be laid out (at most {MAX_BOXES}):"
            " depth=1, 2, … draws a box per scope."
        )
    try:
        import pygraphviz
    except ImportError as error:
        raise InstallationError(
            'Pictures need pygraphviz 2, which brings Graphviz along: pip install "onnxfit[draw]"'
            f" ({error})."
        ) from error
    graph = pygraphviz.AGraph(strict=False, directed=True)
    _fill(graph, scene, boxes)
    if form == "png":
        graph.graph_attr.update(dpi=96, size="100,100")  # inches: a larger drawing shrinks to it
    drawn: bytes = graph.draw(format=form, prog="dot")
    return drawn


def _fill(graph: Any, scene: Scene, count: int) -> None:
    roomy = count <= ROOMY
    graph.graph_attr.update(
        rankdir="TB", fontname=FONT, fontsize=13, fontcolor=INK, label=_legend(scene), labelloc="t", nodesep=0.3, ranksep=0.45, pad=0.3,
        newrank=count <= DOWNWARD,
    )  # fmt: skip
    graph.node_attr.update(
        fontname=FONT,
        fontsize=12,
        fontcolor=INK,
        penwidth=1.2,
        margin="0.1,0.04",
        height=0.3,
        width=0.3,
    )
    graph.edge_attr.update(
        fontname=FONT, fontsize=10, fontcolor=FAINT, color="#6b7280", arrowsize=0.6, penwidth=1.0
    )
    if not roomy:
        # rounds of the layout: seconds instead of minutes
        graph.graph_attr.update(nslimit=2, nslimit1=2, mclimit=0.3)
    keys: set[str] = set()
    # tensor -> its box and the colour of the edges that leave it
    makers: dict[str, tuple[str, str]] = {}
    for tensor in scene.inputs:
        makers[tensor.name] = (
            _add_tensor(graph, keys, tensor, tensor.kind),
            SHAPES[tensor.kind][2],
        )
    boxes = []
    for part in scene.parts:
        fill, line, ground = COLOURS[part]
        inside = graph
        if len(scene.parts) > 1 and any(
            call.part == part and call.name != part for call in scene.calls
        ):
            inside = graph.add_subgraph(
                name=f"cluster_{part}", label=f"<<b>{PARTS[part]}</b>>", fontcolor=line, color=line, style="rounded,filled", fillcolor=ground,
                labeljust="l", margin=10, penwidth=0.8,
            )  # fmt: skip
        for call in scene.calls:
            if call.part == part:
                key = _key(
                    keys, f"{call.operator or 'scope'} {call.name or ', '.join(call.results)}"
                )
                thick = 1.2 if call.operator else 2.4
                inside.add_node(
                    key,
                    label=_label(call, "" if roomy else _made(scene, call)),
                    shape="box",
                    style="rounded,filled",
                    fillcolor=fill,
                    color=line,
                    penwidth=thick,
                )
                makers.update({name: (key, line) for name in call.results if name})
                boxes.append((key, call))
    for key, call in boxes:
        for source, label, colour in _arriving(scene, call, makers):
            graph.add_edge(source, key, label=label if roomy else "", color=colour)
    for tensor in scene.outputs:
        base = next((t for t in scene.inputs if tensor.name == names.updated(t.name)), None)
        key = _add_tensor(graph, keys, tensor, base.kind if base else "output")
        if tensor.name in makers:
            graph.add_edge(makers[tensor.name][0], key, color=makers[tensor.name][1])


def _arriving(
    scene: Scene, call: Call, makers: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    """An edge from each box that the call reads: the box, what goes along the edge, its colour."""
    told = {tensor.name for tensor in scene.inputs}  # their boxes say their types
    tensors: dict[tuple[str, str], list[str]] = {}
    for argument in call.arguments:
        if argument.tensor in makers:
            tensors.setdefault(makers[argument.tensor], []).append(argument.tensor)
    for (source, colour), read in tensors.items():
        distinct = dict.fromkeys(read)
        if len(distinct) > 1:
            label = f"{len(distinct)} tensors"
        else:
            label = "" if read[0] in told else scene.types.get(read[0], "")
            if len(read) > 1:
                label = f"{label} ×{len(read)}".strip()
        yield source, f"<  {_text(label)}>" if label else "", colour


def _made(scene: Scene, call: Call) -> str:
    types = [scene.types[name] for name in call.results if name in scene.types]
    return f"→ {types[0]}" if len(types) == 1 else f"→ {len(types)} tensors" if types else ""


def _label(call: Call, made: str) -> str:
    """The operator, and beneath it small constants, attributes that differ from the operator's
    defaults, and what it makes.
    """
    if not call.operator:
        return _table(call.name.removeprefix("model/"), [*summary(call).split(": "), made])
    lines = [f"{clean(a.name)} = {a.value}" for a in call.attributes if not a.default][:LINES]
    if any(a.literal for a in call.arguments):
        lines.insert(
            0, f"({', '.join(a.literal or '·' for a in call.arguments if not a.captured)})"
        )
    return _table(call.operator, [*lines, made])


def _table(title: str, lines: list[str]) -> str:
    rows = [f"<tr><td><b>{_text(title)}</b></td></tr>"]
    rows += [
        f'<tr><td><font point-size="10" color="{FAINT}">{_text(line, 2 * LETTERS)}</font></td></tr>'
        for line in lines
        if line
    ]
    return (
        '<<table border="0" cellborder="0" cellspacing="0"'
        f' cellpadding="1">{"".join(rows)}</table>>'
    )


def _text(text: str, most: int = LETTERS) -> str:
    text = clean(text)
    text = text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"
    return html.escape(text).replace("\\", "\\\\")  # Graphviz puts the box's name for \N


def _add_tensor(graph: Any, keys: set[str], tensor: Tensor, kind: str) -> str:
    shape, fill, line = SHAPES[kind]
    key = _key(keys, f"{tensor.kind} {tensor.name}")
    ink = "#ffffff" if kind == "output" else INK
    label = _table(tensor.name, [tensor.type]).replace(
        FAINT, "#e5e7eb" if kind == "output" else FAINT
    )
    graph.add_node(
        key,
        label=label,
        shape=shape,
        style="filled",
        fillcolor=fill,
        color=line,
        fontcolor=ink,
        penwidth=2.4 if tensor.kind == "output" else 1.2,
    )
    return key


def _key(keys: set[str], text: str) -> str:
    """What Graphviz calls a box, and a browser shows when the mouse rests on it; it never begins
    with "<", which would be markup.
    """
    text = key = clean(text).replace("&", "&amp;")
    n = 1
    while key in keys:
        n += 1
        key = f"{text} ({n})"
    keys.add(key)
    return key


def _legend(scene: Scene) -> str:
    """The name of the graph, and what the colours mean."""
    cells = [_swatch(PARTS[part], *COLOURS[part][:2]) for part in scene.parts]
    kinds = [kind for kind in KINDS if any(t.kind == kind for t in (*scene.inputs, *scene.outputs))]
    cells += [
        _swatch(KINDS[kind], *SHAPES[kind][1:], "#ffffff" if kind == "output" else INK)
        for kind in kinds
    ]
    title = f"{_text(scene.name) or 'graph'} · {scene.nodes} node{'s' * (scene.nodes != 1)}"
    return (
        f'<<table border="0" cellspacing="6" cellpadding="4"><tr><td colspan="{len(cells)}"><font'
        f' point-size="16"><b>{title}</b></font></td></tr>'
        f"<tr>{''.join(cells)}</tr></table>>"
    )


def _swatch(text: str, fill: str, line: str, ink: str = INK) -> str:
    return (
        f'<td border="1" style="rounded" bgcolor="{fill}" color="{line}"><font point-size="10"'
        f' color="{ink}"> {text} </font></td>'
    )
