"""Pictures of the graphs of a training step: one with backend "full", five with "forward_backward".

    python examples/step_graphs.py [--out docs/gallery]

The example needs Graphviz, which `pip install "onnxfit[draw]"` installs. The model is a small
perceptron with a penalty on its first weight. Every graph becomes an SVG and a PNG:
step_graphs_full (a box for each stage), step_graphs_forward, ..._loss, ..._backward, ..._penalty,
..._update. step_graphs_full_nodes has a box for each node, as an SVG only. step_graphs.csv counts
the nodes of each operator.
"""

from __future__ import annotations

import io
import sys
from collections import Counter

import onnx
from figures import arguments, reduce_colors, write_csv
from models import dense

import onnxfit

WIDEST = 1700


def main() -> None:
    options = arguments(__doc__)
    graphs: dict[str, onnx.ModelProto] = {}
    for backend in ("full", "forward_backward"):
        trainer = onnxfit.Trainer(
            dense(4, 8, 1), loss="mse", penalty={"fc1.weight": 0.01}, optimizer=0.1, backend=backend
        )
        for name, serialized in trainer.save_onnx_graph(bytes).items():
            graphs[f"{backend}/{name}"] = onnx.ModelProto.FromString(serialized)

    step = {"full": ("full/train", 1), "full_nodes": ("full/train", None)}
    step |= {
        name: (f"forward_backward/{name}", None)
        for name in ("forward", "loss", "backward", "penalty", "update")
    }
    rows, fits = [], []
    for name, (key, depth) in step.items():
        path = options.out / f"step_graphs_{name}.svg"
        onnxfit.draw(graphs[key], path, depth=depth)
        if name != "full_nodes":
            picture = onnxfit.draw(graphs[key], format="png", depth=depth)
            fits.append(reduce_colors(io.BytesIO(picture), path.with_suffix(".png")))
        operators = Counter(node.op_type for node in graphs[key].graph.node)
        if depth is None:
            rows += [(name.removesuffix("_nodes"), op, n) for op, n in operators.most_common()]
            print(
                f"{path.name:26} {operators.total():2} nodes:"
                f" {', '.join(f'{op} x{n}' for op, n in operators.most_common())}"
            )
    write_csv(
        options.out / "step_graphs.csv", dict(zip(("graph", "operator", "nodes"), zip(*rows)))
    )

    print(f"pictures                   {len(fits)}, the widest of {max(fits)} pixels")
    if max(fits) > WIDEST:
        sys.exit(f"step_graphs: a picture of more than {WIDEST} pixels cannot be read on a page")


if __name__ == "__main__":
    main()
