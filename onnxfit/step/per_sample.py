"""The gradient of the loss of each row."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError
from onnxfit.gradients.gradient_model import gradient_model
from onnxfit.gradients.paths import reachable_values
from onnxfit.graph import names
from onnxfit.graph.model import spec_of
from onnxfit.graph.moving import move_nodes
from onnxfit.graph.steps import Stepped, Tensors, scan_steps
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.graph.weights import select_weights
from onnxfit.load.batch_axis import layout_of
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import OPSET
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.step.finish import finish
from onnxfit.step.graphs import add_loss
from onnxfit.step.objectives import Losses

ROWS = "batch"


def per_sample_gradient_model(
    model_onnx: ModelSource,
    loss: Losses,
    weights: Sequence[str] | str | None = None,
    *,
    gradient: str = "auto",
) -> onnx.ModelProto:
    r"""Return a model that computes the loss of each row, and its gradient.

    The model has the inputs of `model_onnx` and the labels `y_true/<output>`, as `add_loss` names
    them. It has an output `loss` of shape `(rows,)`, and for each weight an output `<weight>_grad`
    of shape `(rows, ...)`, the gradient of the loss of that row alone, as
    `torch.func.vmap(torch.func.grad(f))` computes it. Their mean is the gradient of a batch, unless
    the loss divides by weights or masks. Dropout and BatchNormalization compute as in inference.

    One graph loops over the rows, so the memory for activations is that of one row. The gradients
    take the memory of the weights times the rows, and the loop about the time of as many batches
    of one row.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which stays unchanged.
    - `loss`: as for `Trainer`. A loss that compares rows sees only one.
    - `weights`: names and patterns, as for `Trainer`; None for all weights that the loss depends
      on.
    - `gradient`: the source of gradients, as in `Trainer`.

    ModelError: the batch size of the model is fixed. SettingError: the batch is not the first axis
    of every input. The other errors are those of `add_loss` and `gradient_model`.

    >>> import numpy as np, onnx.parser, onnxruntime
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {2}>
    ...     { y = MatMul(x, slope) }''')
    >>> graph = per_sample_gradient_model(model, "mean_squared_error")
    >>> session = onnxruntime.InferenceSession(graph.SerializeToString())
    >>> x = np.array([[1], [2], [3]], np.float32)
    >>> loss, gradient = session.run(["loss", "slope_grad"], {"x": x, "y_true/y": 0 * x})
    >>> loss.tolist(), gradient.ravel().tolist()
    ([4.0, 16.0, 36.0], [4.0, 16.0, 36.0])
    """
    file = read_model(model_onnx).whole()
    layout = layout_of(file)
    if layout.changes_graph or layout.is_whole:
        raise SettingError(
            "per_sample_gradient_model needs a model whose inputs and outputs have the batch on the"
            f" first axis. This model has {'; '.join(layout.lines())}."
        )
    divided = [name for name, one in layout.inputs.items() if one.axis == 0]
    with_loss = _of_one_row(add_loss(file, loss), divided)
    work = normalize(with_loss)
    selected = select_weights(normalize(file), weights)
    if weights is None:
        selected = reachable_values(work, [names.TOTAL], selected)
    graph = ir.from_proto(
        gradient_model(with_loss, selected, outputs=names.TOTAL, gradient=gradient)
    ).graph
    return _over_rows(graph, selected, divided)


def _of_one_row(model: onnx.ModelProto, divided: Sequence[str]) -> onnx.ModelProto:
    """Return a model with a loss for batches of one row, in place.

    - `divided`: the inputs with rows. Labels have rows, too.
    """
    del model.graph.value_info[:]
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if not dims or not (value.name in divided or value.name.startswith("y_true/")):
            continue
        if dims[0].HasField("dim_value") and dims[0].dim_value != 1:
            raise ModelError(
                f"The input {value.name!r} has a fixed batch size of {dims[0].dim_value}. Use"
                " onnxfit.dynamic_batch(model) first."
            )
        dims[0].dim_value = 1
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def _over_rows(graph: ir.Graph, weights: Sequence[str], divided: Sequence[str]) -> onnx.ModelProto:
    """Return a graph that runs another graph, for one row, on each row of its inputs."""
    outer = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="per_sample")
    op = GraphBuilder(outer)
    rows: list[tuple[ir.Value, Value]] = []
    for value in list(graph.inputs):
        spec = spec_of(value)
        if spec.name == names.gradient(names.TOTAL):
            value.replace_all_uses_with(op.constant(1, spec.dtype).ir)
        elif spec.name in divided or spec.name.startswith("y_true/"):
            rows.append((value, op.input(spec.name, spec.dtype, (ROWS, *(spec.shape or ())[1:]))))
        else:
            value.replace_all_uses_with(op.input(spec.name, spec.dtype, spec.shape or ()).ir)
    outputs = {value.name: value for value in graph.outputs}
    wanted = [names.TOTAL, *map(names.gradient, weights)]
    for name in wanted:  # the outer graph has outputs of these names
        outputs[name].name = f"row/{name}"

    def step(body: GraphBuilder, states: Tensors, slices: Tensors) -> Stepped:
        for (value, _), own in zip(rows, slices):
            value.replace_all_uses_with(body.Unsqueeze(own, [0]).ir)
        move_nodes(body, graph, op)
        return [], [body.wrap(outputs[name]) for name in wanted]

    _, (losses, *gradients) = scan_steps(op, step, [], [value for _, value in rows])
    op.output(names.LOSS, losses)
    for weight, of_rows in zip(weights, gradients):
        op.output(names.gradient(weight), of_rows)
    return finish(op)
