"""Draw docs/images/rooms.svg from the imports of onnxfit, and docs/images/step.svg.

python scripts/architecture_pictures.py
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pygraphviz

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs/images"
# modules of the root that are drawn as one box, from the highest to the lowest
GROUPS = {
    "sklearn, torch, flower": ("sklearn", "torch", "flower"),
    "losses, metrics, optimizers,\npenalties, schedules": (
        "losses", "metrics", "ctc", "optimizers", "penalties", "schedules",
    ),
    "checks, errors, environment,\nfiles, folders, registry": (
        "checks", "errors", "environment", "files", "folders", "registry",
    ),
}  # fmt: skip
HIDDEN = {"onnxfit", "__main__", "__version__"}  # they import everything
FONT = {"fontname": "Helvetica", "fontsize": "11"}
BOX = {"shape": "box", "style": "rounded,filled", "fillcolor": "#eef3fb", "color": "#4a6fa5"}


def box_of(module: str) -> str:
    """Return the box that a module of the package is drawn in."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else parts[0]
    return next((group for group, members in GROUPS.items() if room in members), room)


def imports() -> dict[str, set[str]]:
    """Return box -> boxes that it imports, without imports for type checkers and late ones."""
    edges: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "onnxfit").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "onnxfit"
            ):
                continue
            names = [node.module or ""]
            if node.module == "onnxfit":
                names = [f"onnxfit.{alias.name}" for alias in node.names]
            edges[box_of(module)].update(box_of(name) for name in names)
    return {box: targets - {box} for box, targets in edges.items() if box not in HIDDEN}


def rooms() -> pygraphviz.AGraph:
    """Draw the folders, and the imports that do not follow from others."""
    graph = pygraphviz.AGraph(directed=True, rankdir="TB", nodesep="0.25", ranksep="0.35")
    graph.node_attr.update(**FONT, **BOX)
    graph.edge_attr.update(color="#8a98ad", arrowsize="0.6")
    # sorted, so that the same imports give the same picture
    for box, targets in sorted(imports().items()):
        graph.add_node(box)
        for target in sorted(targets - HIDDEN):
            graph.add_edge(box, target)
    return graph.tred()


def step() -> pygraphviz.AGraph:
    """Draw the stages from a model file to a training step that runs."""
    graph = pygraphviz.AGraph(directed=True, rankdir="LR", nodesep="0.3", ranksep="0.35")
    graph.node_attr.update(**FONT, **BOX)
    graph.edge_attr.update(**FONT, color="#8a98ad", arrowsize="0.6")
    rows = (
        ("model.onnx", "normalize\n(load/)", "build_recipe\n(step/recipe_builder.py)"),
        (
            "add the loss\n(step/forward.py)",
            "differentiate\n(gradients/)",
            "update\n(step/update.py)",
        ),
        (
            "rewrite, finish\n(step/rewrites/)",
            "compile, bind\n(runtime/)",
            "run once per batch\n(training/)",
        ),
    )
    for number, row in enumerate(rows):
        for name in row:
            graph.add_node(name)
        graph.add_edge(row[0], row[1])
        graph.add_edge(row[1], row[2])
        if number:
            graph.add_edge(rows[number - 1][2], row[0], constraint="false", style="dashed")
    return graph


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, graph in {"rooms": rooms(), "step": step()}.items():
        graph.layout("dot")
        graph.draw(str(IMAGES / f"{name}.svg"))


if __name__ == "__main__":
    main()
