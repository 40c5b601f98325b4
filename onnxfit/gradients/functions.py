"""A loss, a penalty or an optimizer's update as an ONNX model of its own, which runs in a bare
onnxruntime.

`Loss`, `Penalty` and `Optimizer` have a method `build_onnx_function(shape, dtype, ...)`. The names
of inputs and outputs are always these, in this order; an axis named in `shape` may have any size:

| function of | inputs | outputs |
|---|---|---|
| `Loss` | `y_true`, `y_pred`, `sample_weight`* | `loss`, `losses`*, `y_pred_grad`* |
| `Penalty` | `weight` | `penalty`, `weight_grad`* |
| `Optimizer` | `weight`, `gradient`, `learning_rate`, `step`, `weight/<slot>` for each slot | `weight/next`, `weight/<slot>/next` for each slot |

What has a star is there if it is asked for, by `sample_weight=True`, `by_row=True`,
`gradient=True`. The formulas are those of a training step, gradients come from the same table of
rules.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.gradients import gradient_source
from onnxfit.graph import names
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.opset import IR_VERSION, OPSET
from onnxfit.graph.values import GraphBuilder
from onnxfit.registry import snake_case

__all__ = ["finished", "new_function"]


def new_function(piece: object) -> GraphBuilder:
    """An empty graph named after the class of `piece`."""
    return GraphBuilder(
        ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=snake_case(type(piece).__name__))
    )


def finished(op: GraphBuilder, differentiate: tuple[str, str] | None = None) -> onnx.ModelProto:
    """The graph as a model; with `differentiate`, a scalar output and an input, it also gives the
    gradient, as `<input>_grad`.

    Every input stays, needed or not, so that what has to be fed does not depend on settings.
    """
    model = ir.Model(op.graph, ir_version=IR_VERSION)
    if differentiate is not None:
        scalar, wrt = differentiate
        model, found = gradient_source("onnx").add_gradients(infer_shapes(model), scalar, [wrt])
        op = GraphBuilder(model.graph)
        values = {v.name: v for node in model.graph for v in node.outputs} | dict(
            model.graph.initializers
        )
        op.output(names.gradient(wrt), op.wrap(values[found[wrt]]))
    TopologicalSortPass()(model)
    RemoveUnusedNodesPass()(model)
    proto = ir.to_proto(model)
    proto.producer_name = "onnxfit"
    return proto
