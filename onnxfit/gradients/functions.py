"""A loss, a penalty or an optimizer's update as an ONNX model that runs in any onnxruntime.

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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.gradients import gradient_source
from onnxfit.gradients.update import apply_update, initial_slots
from onnxfit.graph import names, scopes
from onnxfit.graph.model import infer_shapes
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, values_of
from onnxfit.load.opset import IR_VERSION, OPSET
from onnxfit.optimizers.base import WeightInfo
from onnxfit.registry import snake_case

if TYPE_CHECKING:
    from onnxfit.optimizers import Optimizer

__all__ = ["new_function", "to_model_proto", "update_function"]


def new_function(formula: object) -> GraphBuilder:
    """Return the builder of an empty graph, named after the class of `formula`."""
    return GraphBuilder(
        ir.Graph(
            [], [], nodes=[], opset_imports={"": OPSET}, name=snake_case(type(formula).__name__)
        )
    )


def to_model_proto(
    op: GraphBuilder, differentiate: tuple[str, str] | None = None
) -> onnx.ModelProto:
    """Return the graph as a model.

    `differentiate` names a scalar output and an input. The model then has one more output, the
    gradient, called `<input>_grad`. Unused inputs stay, so the inputs do not depend on the
    formula's settings.
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


def update_function(
    optimizer: Optimizer, shape: Sequence[Dim], dtype: npt.DTypeLike, name: str
) -> onnx.ModelProto:
    """Build the update of one weight as a model; `Optimizer.build_onnx_function` describes it."""
    op = new_function(optimizer)
    own = optimizer.for_weights([WeightInfo(name, tuple(shape), np.dtype(dtype))])
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    w = op.input("weight", dtype, shape)
    g = op.input("gradient", dtype, shape)
    lr = op.input("learning_rate", wide, ())
    updates = op.input("step", np.int64, ())
    slots = {
        spec.name: op.input(names.slot("weight", spec.name), spec.dtype, spec.shape or ())
        for spec in _slot_specs(own[name].optimizer, name, shape, w.dtype)
    }
    with op.scope(scopes.OPTIMIZER):
        step = op.cast(updates, np.float64) + 1
    weights, next_slots = apply_update(op, own, {name: w}, {name: g}, {name: slots}, lr, step)
    op.output(names.updated("weight"), weights[name])
    for slot, value in next_slots[name].items():
        op.output(names.updated(names.slot("weight", slot)), value)
    return to_model_proto(op)


def _slot_specs(
    optimizer: Optimizer, name: str, shape: Sequence[Dim], dtype: np.dtype[Any]
) -> list[TensorSpec]:
    """Return the specs of the slots of a weight whose sizes may be names.

    A size of a slot that changes with a size of the weight gets its name.
    """
    small, large = (
        initial_slots(
            optimizer, name, np.zeros([d if isinstance(d, int) else size for d in shape], dtype)
        )
        for size in (2, 3)
    )
    specs = []
    for slot, array in small.items():
        sizes: list[Dim] = []
        for axis, (size, other) in enumerate(zip(array.shape, large[slot].shape)):
            if size == other:
                sizes.append(size)
            else:
                sizes.append(shape[axis] if array.ndim == len(shape) else None)
        specs.append(TensorSpec(slot, array.dtype, tuple(sizes)))
    return specs
