"""A model that computes the gradient of another model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.checks import name_list, shortened
from onnxfit.errors import GradientError, SettingError, UnknownNameError
from onnxfit.gradients import Pullback, gradient_source
from onnxfit.gradients.broadcasting import zeros_like
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
    mode: str = "vjp",
) -> onnx.ModelProto:
    r"""Return a model that also computes the vector-Jacobian product of a model, or the
    Jacobian-vector product.

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
    - `mode` is "vjp", or "jvp" for the product $\sum_x \partial y / \partial x\; t_x$ with tangents
      $t_x$, as `torch.func.jvp` computes it. The new model then has an input `<name>_tangent` for
      each name of `wrt`, and an output `<output>_tangent` for each of `outputs`. The product is the
      derivative of the vector-Jacobian product by the vector, in which it is linear. A pass costs
      about as much as a forward and a backward pass. Applied to a model with gradients, it gives
      products with the Hessian.
    - `gradient` is the source of gradients, as in `Trainer`. "auto" and "onnx" use only ONNX's own
      operators, so the model runs in any onnxruntime that reads its opset: 21, or that of a newer
      operator in the model. "onnxruntime" also uses operators of the training build.

    UnknownNameError: a name is not in the model. GradientError: some nodes cannot be
    differentiated, or the outputs do not depend on some names in `wrt` in a differentiable way; the
    message lists these nodes or names.

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
    if mode not in ("vjp", "jvp"):
        raise SettingError(f"mode must be 'vjp' or 'jvp', got {shortened(mode)}.")
    proto, added = _with_pullback(model_onnx, wrt, outputs, gradient)
    return proto if mode == "vjp" else _with_tangents(proto, added, gradient)


def _with_pullback(
    model_onnx: ModelSource,
    wrt: Sequence[str] | str | None,
    outputs: Sequence[str] | str | None,
    gradient: str,
) -> tuple[onnx.ModelProto, Pullback]:
    """Return the model with the vector-Jacobian product, and the names that were added."""
    source = gradient_source(gradient)
    work = normalize(read_model(model_onnx))
    targets = _targets(work, outputs)
    leaves = _leaves(work, wrt, targets)
    initializers = work.graph.initializers
    tensors = {name: initializers[name].const_value for name in leaves if name in initializers}
    initializers_to_inputs(work.graph, tensors)  # sources differentiate by inputs
    if write_definitions(GraphBuilder(work.graph), leaves):
        work = infer_shapes(work)
    added = source.add_pullback(work, targets, leaves)
    pullback = added.model
    for value in [v for v in pullback.graph.inputs if v.name in tensors]:
        pullback.graph.inputs.remove(value)
        value.const_value = tensors[value.name or ""]
        pullback.graph.register_initializer(value)
    TopologicalSortPass()(pullback)
    RemoveUnusedNodesPass()(pullback)
    proto = ir.to_proto(pullback)
    lower_opset(proto, pullback.graph.opset_imports.get("", OPSET), OPSET)
    proto.producer_name = "onnxfit"
    return proto, added


def _with_tangents(proto: onnx.ModelProto, added: Pullback, gradient: str) -> onnx.ModelProto:
    """Return the model of Jacobian-vector products, from that of vector-Jacobian products.

    For J^T v, which is linear in v, the product of its transposed derivative with t is J t. No
    value of v matters.
    """
    vectors = list(added.output_gradients.values())
    products = list(added.input_gradients.values())
    twice, again = _with_pullback(proto, vectors, products, gradient)
    graph = ir.from_proto(twice).graph
    op = GraphBuilder(graph)
    inputs = {v.name or "": v for v in graph.inputs}
    results = {v.name or "": v for v in graph.outputs}
    for output, vector in added.output_gradients.items():
        zeros = zeros_like(op, op.wrap(results[output]))
        inputs[vector].replace_all_uses_with(zeros.ir)
        graph.inputs.remove(inputs[vector])
    tangents = {again.output_gradients[p]: name for name, p in added.input_gradients.items()}
    for tangent, name in tangents.items():
        inputs[tangent].name = op.unique_name(f"{name}_tangent")
    left_out = {*products, *again.input_gradients.values()}
    graph.outputs[:] = [v for v in graph.outputs if v.name not in left_out]
    for output, vector in added.output_gradients.items():
        product = results[again.input_gradients[vector]]
        product.name = op.unique_name(f"{output}_tangent")
        graph.outputs.append(product)
    model = ir.Model(graph, ir_version=twice.ir_version)
    TopologicalSortPass()(model)
    RemoveUnusedNodesPass()(model)
    result = ir.to_proto(model)
    result.producer_name = "onnxfit"
    return result


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
