"""The gradient of a model as a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.errors import GradientError, SettingError, UnknownNameError
from onnxfit.gradients import SOURCES, Blocker, gradient_source, refuse
from onnxfit.gradients.backward import gradients
from onnxfit.gradients.paths import is_float, reachable_values
from onnxfit.graph import names
from onnxfit.graph.model import ModelSource, infer_shapes, read_model, working_form
from onnxfit.graph.values import Op, Value
from onnxfit.graph.weights import all_weights


def gradient_model(
    model_onnx: ModelSource,
    wrt: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
) -> onnx.ModelProto:
    r"""The model that also computes its vector-Jacobian product, $\sum_i g_i^T \partial y_i / \partial x$, for gradients $g_i$ that arrive at $y_i$.

    Its inputs are the model's, and `<output>_grad` for each of `outputs` (default: every float output), in the output's type and shape. Its
    outputs are the model's, and `<name>_grad` for each name of `wrt`: inputs or initializers (default: every float input and every weight
    that the outputs depend on), in the type and shape of that. Where a name is taken, as it is when a gradient is differentiated again, the
    new one is followed by `_2`, `_3`, …

    It has no other operators than ONNX's own (opset 21), so it runs in any onnxruntime, unless `gradient="onnxruntime"` asks for those of the
    training build ("auto" does only where the table of rules does not suffice). Dropout and BatchNormalization are as in inference.

    Raises UnknownNameError for a name that the model has not, GradientError with every node that cannot be differentiated, or with the names
    in `wrt` that the outputs do not depend on smoothly.

    >>> import numpy as np, onnx.parser, onnxruntime
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     cube (float[N] x) => (float[N] y) { s = Mul(x, x) y = Mul(s, x) }''')
    >>> once = gradient_model(model)
    >>> [i.name for i in once.graph.input], [o.name for o in once.graph.output]
    (['x', 'y_grad'], ['y', 'x_grad'])
    >>> twice = gradient_model(once, "x", outputs="x_grad")
    >>> session = onnxruntime.InferenceSession(twice.SerializeToString())
    >>> x, one = np.array([1, 2], np.float32), np.ones(2, np.float32)
    >>> {o.name: a.tolist() for o, a in zip(twice.graph.output, session.run(None, {"x": x, "y_grad": one, "x_grad_grad": one}))}
    {'y': [1.0, 8.0], 'x_grad': [3.0, 12.0], 'x_grad_2': [6.0, 12.0]}
    """
    if gradient not in SOURCES:
        raise UnknownNameError("gradient source", gradient, SOURCES)
    work = working_form(read_model(model_onnx))
    differentiated = _outputs(work, outputs)
    leaves = _leaves(work, wrt, differentiated)
    if gradient != "onnxruntime":
        made, blocking = _by_rules(work.clone(), differentiated, leaves)
        if not blocking or gradient == "onnx":
            refuse(blocking)
            return made
    return _through_a_loss(work, differentiated, leaves, gradient)


def _outputs(work: ir.Model, wanted: Sequence[str] | str | None) -> list[str]:
    floats = [v.name or "" for v in work.graph.outputs if is_float(v)]
    if wanted is None:
        if not floats:
            raise GradientError("The model has no float output to differentiate.")
        return floats
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in wanted:
        if name not in floats:
            raise UnknownNameError("float output", name, floats)
    if not wanted:
        raise SettingError("outputs=[] leaves nothing to differentiate; None takes every float output.")
    return wanted


def _leaves(work: ir.Model, wanted: Sequence[str] | str | None, outputs: Sequence[str]) -> list[str]:
    inputs = [v.name or "" for v in work.graph.inputs if is_float(v)]
    floats = [*inputs, *(n for n, v in work.graph.initializers.items() if is_float(v))]
    chosen = [*inputs, *all_weights(work)] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    for name in chosen:
        if name not in floats:
            raise UnknownNameError("float input or initializer", name, floats)
    depends = reachable_values(work, outputs, chosen)
    lost = [n for n in chosen if n not in depends]
    if wanted is not None and lost:
        raise GradientError(f"{', '.join(outputs)} does not depend on {', '.join(lost)} in a differentiable way.")
    if not depends:
        raise GradientError(f"{', '.join(outputs)} does not depend on any float input or weight in a differentiable way.")
    return depends


def _by_rules(work: ir.Model, outputs: Sequence[str], leaves: Sequence[str]) -> tuple[onnx.ModelProto, Sequence[Blocker]]:
    op = Op(work.graph)
    arriving = _seeds(op, outputs)
    values = {v.name: v for v in (*work.graph.inputs, *work.graph.initializers.values())}
    found, blocking = gradients(op, arriving, [values[n] for n in leaves])
    if not blocking:
        for name in leaves:
            op.output(_free(op, f"{name}_grad"), found[values[name]])
    return _finished(work), blocking


def _seeds(op: Op, outputs: Sequence[str]) -> dict[int, Value]:
    """An input for the gradient that arrives at each output, by the output's position."""
    arriving = {}
    for i, value in enumerate(list(op.graph.outputs)):
        if value.name in outputs:
            y = op.wrap(value)
            if y.shape is None:
                raise GradientError(f"The rank of output {value.name!r} is unknown, so is that of its gradient.")
            arriving[i] = op.input(_free(op, f"{value.name}_grad"), y.dtype, y.shape)
    return arriving


def _through_a_loss(work: ir.Model, outputs: Sequence[str], leaves: Sequence[str], gradient: str) -> onnx.ModelProto:
    """By a source that only knows scalars: the gradient of sum(y * dy)."""
    kept = {name: work.graph.initializers[name].const_value for name in leaves if name in work.graph.initializers}
    own = [v.name for v in work.graph.outputs]
    for name in kept:
        value = work.graph.initializers.pop(name)
        value.const_value = None
        work.graph.inputs.append(value)
    op = Op(work.graph)
    terms = [op.ReduceSum(op.wrap(work.graph.outputs[i]) * dy, keepdims=0) for i, dy in _seeds(op, outputs).items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    op.output(names.TOTAL, total)
    made, found = gradient_source(gradient).add_gradients(infer_shapes(work), names.TOTAL, leaves)
    values = {v.name: v for node in made.graph for v in node.outputs}
    for name in {f"{leaf}_grad" for leaf in leaves} & set(values):
        if not values[name].is_graph_output():
            values[name].name = f"{name}/value"  # the builder's own, which would take the output's name
    op = Op(made.graph)
    made.graph.outputs[:] = [v for v in made.graph.outputs if v.name in own]
    for name in leaves:
        op.output(_free(op, f"{name}_grad"), op.wrap(values[found[name]]))
    for value in [v for v in made.graph.inputs if v.name in kept]:
        made.graph.inputs.remove(value)
        value.const_value = kept[value.name or ""]
        made.graph.register_initializer(value)
    return _finished(made)


def _free(op: Op, name: str) -> str:
    """The name, with a number where it is taken."""
    found, count = name, 1
    while op.knows(found):
        count += 1
        found = f"{name}_{count}"
    return found


def _finished(work: ir.Model) -> onnx.ModelProto:
    TopologicalSortPass()(work)
    RemoveUnusedNodesPass()(work)
    proto = ir.to_proto(work)
    proto.producer_name = "onnxfit"
    return proto
