"""The gradient of a model as a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from onnxfit.errors import GradientError, SettingError, UnknownNameError
from onnxfit.gradients import gradient_source
from onnxfit.gradients.paths import is_float, reachable_values
from onnxfit.graph.model import normalize
from onnxfit.graph.reading import ModelSource, read_model
from onnxfit.graph.weights import all_weights


def gradient_model(
    model_onnx: ModelSource,
    wrt: Sequence[str] | str | None = None,
    *,
    outputs: Sequence[str] | str | None = None,
    gradient: str = "auto",
) -> onnx.ModelProto:
    r"""The model that also computes its vector-Jacobian product, $\sum_i g_i^T \partial y_i /
    \partial x$, for gradients $g_i$ that arrive at $y_i$.

    Its inputs are the model's, and `<output>_grad` for each of `outputs` (default: every float
    output), in the output's type and shape. Its outputs are the model's, and `<name>_grad` for each
    name of `wrt`: inputs or initializers (default: every float input and every weight that the
    outputs depend on), in the type and shape of that. Where a name is taken, as it is when a
    gradient is differentiated again, the new one is followed by `_2`, `_3`, …

    It has no other operators than ONNX's own (opset 21), so it runs in any onnxruntime, unless
    `gradient="onnxruntime"` asks for those of the training build ("auto" does only where the table
    of rules does not suffice). Dropout and BatchNormalization are as in inference.

    Raises UnknownNameError for a name that the model has not, GradientError with every node that
    cannot be differentiated, or with the names in `wrt` that the outputs do not depend on smoothly.

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
    source = gradient_source(gradient)
    work = normalize(read_model(model_onnx))
    differentiated = _outputs(work, outputs)
    leaves = _leaves(work, wrt, differentiated)
    kept = {
        name: work.graph.initializers[name].const_value
        for name in leaves
        if name in work.graph.initializers
    }
    for name in kept:
        value = work.graph.initializers.pop(name)
        value.const_value = None
        work.graph.inputs.append(value)
    made = source.add_pullback(work, differentiated, leaves).model
    for value in [v for v in made.graph.inputs if v.name in kept]:
        made.graph.inputs.remove(value)
        value.const_value = kept[value.name or ""]
        made.graph.register_initializer(value)
    TopologicalSortPass()(made)
    RemoveUnusedNodesPass()(made)
    proto = ir.to_proto(made)
    proto.producer_name = "onnxfit"
    return proto


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
        raise SettingError(
            "outputs=[] leaves nothing to differentiate; None takes every float output."
        )
    return wanted


def _leaves(
    work: ir.Model, wanted: Sequence[str] | str | None, outputs: Sequence[str]
) -> list[str]:
    inputs = [v.name or "" for v in work.graph.inputs if is_float(v)]
    floats = [*inputs, *(n for n, v in work.graph.initializers.items() if is_float(v))]
    chosen = (
        [*inputs, *all_weights(work)]
        if wanted is None
        else [wanted]
        if isinstance(wanted, str)
        else list(wanted)
    )
    for name in chosen:
        if name not in floats:
            raise UnknownNameError("float input or initializer", name, floats)
    depends = reachable_values(work, outputs, chosen)
    lost = [n for n in chosen if n not in depends]
    if wanted is not None and lost:
        raise GradientError(
            f"{', '.join(outputs)} does not depend on {', '.join(lost)} in a differentiable way."
        )
    if not depends:
        raise GradientError(
            f"{', '.join(outputs)} does not depend on any float input or weight in a differentiable"
            " way."
        )
    return depends
