"""A model that computes the gradient of another model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.checks import name_list
from onnxfit.errors import GradientError, SettingError, UnknownNameError
from onnxfit.gradients import gradient_source
from onnxfit.gradients.definitions import write_definitions
from onnxfit.gradients.paths import is_float, reachable_values, select_float_outputs
from onnxfit.graph.model import infer_shapes, initializers_to_inputs
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import all_weights
from onnxfit.load.normalize import normalize
from onnxfit.load.operator_versions import lower_opset
from onnxfit.load.opset import OPSET
from onnxfit.load.reading import ModelSource, read_model


def gradient_model(
    model_onnx: ModelSource,
    wrt: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
) -> onnx.ModelProto:
    r"""Return a model that also computes the vector-Jacobian product of a model.

    The product is $\sum_i g_i^T \partial y_i / \partial x$, for gradients $g_i$ that arrive at the
    outputs $y_i$. The new model has the inputs of the old one, and an input `<output>_grad` for
    each of `outputs`, in the type and shape of that output. It has the outputs of the old one, and
    an output `<name>_grad` for each name of `wrt`, in the type and shape of that tensor. If a name
    is already in use, for instance when a gradient is differentiated again, the new name ends in
    `_2`, `_3`, ... Dropout and BatchNormalization compute as in inference.

    - `model_onnx` is a path, bytes, or an `onnx.ModelProto`, which stays unchanged.
    - `wrt` names inputs or initializers. None selects every float input and every weight that the
      outputs depend on.
    - `outputs` names float outputs. None selects all of them.
    - `gradient` is the source of gradients, as in `Trainer`. "auto" and "onnx" use only ONNX's own
      operators, so the model runs in any onnxruntime that reads its opset: 21, or that of a newer
      operator in the model. "onnxruntime" also uses operators of the training build.

    Raises UnknownNameError for a name that the model does not have, and GradientError with every
    node that cannot be differentiated, or with the names in `wrt` that the outputs do not depend on
    in a differentiable way.

    >>> import numpy as np, onnx.parser, onnxruntime
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     cube (float[N] x) => (float[N] y) { s = Mul(x, x) y = Mul(s, x) }''')
    >>> once = gradient_model(model)
    >>> [i.name for i in once.graph.input], [o.name for o in once.graph.output]
    (['x', 'y_grad'], ['y', 'x_grad'])
    >>> twice = gradient_model(once, "x", outputs="x_grad")
    >>> session = onnxruntime.InferenceSession(twice.SerializeToString())
    >>> x = np.array([1, 2], np.float32)
    >>> one = np.ones(2, np.float32)
    >>> results = session.run(None, {"x": x, "y_grad": one, "x_grad_grad": one})
    >>> {output.name: array.tolist() for output, array in zip(twice.graph.output, results)}
    {'y': [1.0, 8.0], 'x_grad': [3.0, 12.0], 'x_grad_2': [6.0, 12.0]}
    """
    source = gradient_source(gradient)
    work = normalize(read_model(model_onnx))
    targets = _targets(work, outputs)
    leaves = _leaves(work, wrt, targets)
    initializers = work.graph.initializers
    tensors = {name: initializers[name].const_value for name in leaves if name in initializers}
    initializers_to_inputs(work.graph, tensors)  # sources differentiate by inputs
    if write_definitions(GraphBuilder(work.graph), leaves):
        work = infer_shapes(work)
    pullback = source.add_pullback(work, targets, leaves).model
    for value in [v for v in pullback.graph.inputs if v.name in tensors]:
        pullback.graph.inputs.remove(value)
        value.const_value = tensors[value.name or ""]
        pullback.graph.register_initializer(value)
    TopologicalSortPass()(pullback)
    RemoveUnusedNodesPass()(pullback)
    proto = ir.to_proto(pullback)
    lower_opset(proto, pullback.graph.opset_imports.get("", OPSET), OPSET)
    proto.producer_name = "onnxfit"
    return proto


def _targets(work: ir.Model, outputs: Sequence[str] | str | None) -> list[str]:
    """Return the outputs to differentiate."""
    selected = select_float_outputs(work.graph, outputs)
    if not selected:
        if outputs is None:
            raise GradientError("The model has no float output to differentiate.")
        raise SettingError(
            "outputs=[] selects nothing to differentiate. Pass None to select every float output."
        )
    return selected


def _leaves(work: ir.Model, wrt: Sequence[str] | str | None, targets: Sequence[str]) -> list[str]:
    """Return the inputs and initializers to differentiate with respect to."""
    inputs = [v.name or "" for v in work.graph.inputs if is_float(v)]
    floats = [*inputs, *(name for name, v in work.graph.initializers.items() if is_float(v))]
    if wrt is None:
        chosen = [*inputs, *all_weights(work)]
    else:
        chosen = name_list("wrt", wrt)
    for name in chosen:
        if name not in floats:
            raise UnknownNameError("float input or initializer", name, floats)
    reached = reachable_values(work, targets, chosen)
    unreached = [name for name in chosen if name not in reached]
    if reached and (wrt is None or not unreached):
        return reached
    subject = "any float input or weight" if wrt is None or not unreached else ", ".join(unreached)
    raise GradientError(
        f"{', '.join(targets)} does not depend on {subject} in a differentiable way."
    )
