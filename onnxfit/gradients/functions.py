"""A loss, a penalty or an optimizer's update as an ONNX model, which runs in any onnxruntime.

`Loss`, `Penalty` and `Optimizer` have a method `build_onnx_function(shape, dtype, ...)`. The inputs
and outputs always have these names, in this order; an axis named in `shape` may have any size:

- `Loss`: from `y_true`, `y_pred`, `sample_weight`* to `loss`, `losses`*, `y_pred_grad`*;
- `Penalty`: from `weight` to `penalty`, `weight_grad`*;
- `Optimizer`: from `weight`, `gradient`, `learning_rate`, `step`, and `weight/<slot>` for each slot
  to `weight/next`, and `weight/<slot>/next` for each slot.

Names with a star are optional: `sample_weight=True`, `by_row=True` and `gradient=True` add them.
The formulas are those of a training step; the gradients come from the table of rules.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.gradients import gradient_source
from onnxfit.graph import names
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.opset import IR_VERSION, OPSET
from onnxfit.graph.values import GraphBuilder, values_of
from onnxfit.registry import snake_case

__all__ = ["finished", "new_function"]


def new_function(piece: object) -> GraphBuilder:
    """A builder for an empty graph, named after the class of `piece`."""
    return GraphBuilder(
        ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=snake_case(type(piece).__name__))
    )


def finished(op: GraphBuilder, differentiate: tuple[str, str] | None = None) -> onnx.ModelProto:
    """The graph as a model.

    `differentiate` names a scalar output and an input: the model then has one more output, the
    gradient, called `<input>_grad`. Every input stays, used or not, so that a caller need not know
    which settings use it.
    """
    model = ir.Model(op.graph, ir_version=IR_VERSION)
    if differentiate is not None:
        scalar, wrt = differentiate
        source = gradient_source("onnx")
        model, gradient_names = source.add_gradients(infer_shapes(model), scalar, [wrt])
        op = GraphBuilder(model.graph)
        values = values_of(model.graph)
        op.output(names.gradient(wrt), op.wrap(values[gradient_names[wrt]]))
    TopologicalSortPass()(model)
    RemoveUnusedNodesPass()(model)
    proto = ir.to_proto(model)
    proto.producer_name = "onnxfit"
    return proto
