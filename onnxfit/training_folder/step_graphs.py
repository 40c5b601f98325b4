"""The graphs of a training folder, for the host that runs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import GradientError
from onnxfit.graph import names
from onnxfit.graph.model import spec_of
from onnxfit.graph.shared_tensors import whole_model
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.opset import empty_graph
from onnxfit.step.batch_specs import batch_specs
from onnxfit.step.finish import finish
from onnxfit.step.graphs import compact_train_graph, evaluate_graph, predict_graph
from onnxfit.step.host_scalars import cut_host_scalars
from onnxfit.step.precision import FLOAT32
from onnxfit.step.recipe import Batch, Recipe
from onnxfit.step.update import NO_FUSED_WEIGHTS, FusedWeights, limits_of
from onnxfit.training_folder.inference_operators import (
    require_inference_operators,
    with_inference_operators,
)
from onnxfit.training_folder.manifest import EVALUATE, EXPORT, GRAPHS, PREDICT, SCALARS, TRAIN

# Target -> the kind of device for whose kernels the step is built; None for the trainer's device.
DEVICES = {"onnxruntime": None, "web": "cpu", "webgpu": "webgpu", "npu": "npu"}
TARGETS = tuple(DEVICES)


def step_graphs(
    recipe: Recipe,
    target: str,
    include: Collection[str],
    rows: int | None,
    sample_weight: bool,
    fused: FusedWeights,
) -> dict[str, onnx.ModelProto]:
    """Return the graphs of a folder by name.

    - `target`: "onnxruntime" for the step of the trainer. For "web" and "webgpu", the host computes
      the numbers that depend only on learning rate, step and seed. A step for "webgpu" has only
      operators with kernels in that provider. The graphs for "npu" have only operators of
      inference, known sizes, and the masks of Dropout as inputs.
    - `include`: the names of the graphs.
    - `fused`: the weights that the step of the trainer updates as one tensor.
    - `rows`: the rows of a batch in the training step, and for "npu" in every graph; None for any
      number.
    - `sample_weight`: whether the losses have an input with a weight for each row.

    GradientError: the gradient needs the number of rows. SettingError: other sizes are missing.
    """
    graphs: dict[str, onnx.ModelProto] = {}
    # The host computes its own metrics, and its products in float32.
    recipe = replace(recipe, sums_metrics=False, precision=FLOAT32, built=None)
    device = DEVICES[target]
    if device is not None:
        recipe = recipe.for_device(device)
        fused = (
            NO_FUSED_WEIGHTS  # WebGPU limits the number of tensors that a kernel can concatenate
        )
    elif limits_of(recipe.device).alignment > 1:
        fused = NO_FUSED_WEIGHTS  # the hosts know nothing of the zeros between weights
    any_rows = batch_specs(recipe, rows if target == "npu" else None, sample_weight)
    if TRAIN in include:
        step = _train(recipe, batch_specs(recipe, rows, sample_weight), rows, fused)
        graphs[TRAIN] = with_inference_operators(step) if target == "npu" else step
        if device is not None:
            graphs |= _divided(graphs[TRAIN], masks=target == "npu")
    if EVALUATE in include:
        graphs[EVALUATE] = whole_model(evaluate_graph(recipe, any_rows))
    if PREDICT in include:
        graphs[PREDICT] = whole_model(predict_graph(recipe, any_rows))
    if target == "npu":
        for name in graphs.keys() & {EVALUATE, PREDICT}:
            graphs[name] = with_inference_operators(graphs[name])
        # predict.onnx comes first: it has the nodes of the model, under their own names
        ordered = [name for name in reversed(GRAPHS) if name in graphs]
        require_inference_operators({name: graphs[name] for name in ordered})
    op = empty_graph(EXPORT)
    computed = {} if recipe.trainable is None else recipe.trainable.add_export(op, recipe.state)
    for name, value in computed.items():
        op.output(names.exported(name), value)
    if computed:
        graphs[EXPORT] = finish(op)
    return graphs


def _train(recipe: Recipe, batch: Batch, rows: int | None, fused: FusedWeights) -> onnx.ModelProto:
    """Return the step. GradientError: the gradient needs the number of rows, if `rows` is None."""
    try:
        step = whole_model(compact_train_graph(recipe, batch, fused))
    except GradientError as error:
        if rows is not None:
            raise
        raise GradientError(
            f"{error}\nThe training step needs a fixed batch size. Pass the number of rows:"
            " export_training(folder, batch_size=...)."
        ) from None
    return _divide_fused(step, recipe, fused)


def _divided(step: onnx.ModelProto, *, masks: bool) -> dict[str, onnx.ModelProto]:
    """Return the step without the numbers that hosts compute, and their graph if there are any."""
    rest, scalars = cut_host_scalars(step, masks=masks)
    return {TRAIN: rest} if scalars is None else {TRAIN: rest, SCALARS: scalars}


def _divide_fused(step: onnx.ModelProto, recipe: Recipe, fused: FusedWeights) -> onnx.ModelProto:
    """Return a step that joins and divides fused tensors itself, so that hosts do not see them.

    The step updates the same fused tensors as the trainer's step. Separate updates of each weight
    could differ in the last bit: older versions of onnxruntime round a square root differently in
    the last elements of a tensor, which do not fill a vector register.
    """
    if not fused:
        return step
    op = GraphBuilder(ir.from_proto(step).graph)
    for name, weights in fused.items():
        _divide(op, name, {weight: _spec(recipe, weight) for weight in weights})
        for slot in recipe.slots[weights[0]]:
            slots = {names.slot(weight, slot): _spec(recipe, weight) for weight in weights}
            _divide(op, names.slot(name, slot), slots)
    return finish(op)


def _spec(recipe: Recipe, weight: str) -> TensorSpec:
    return spec_of(recipe.model.graph.initializers[weight])


def _divide(op: GraphBuilder, name: str, members: Mapping[str, TensorSpec]) -> None:
    """Replace a fused tensor, in place, by its members as inputs and outputs."""
    inputs = {value.name: value for value in op.graph.inputs}
    outputs = {value.name: value for value in op.graph.outputs}
    sizes, flat = [], []
    for member, spec in members.items():
        assert spec.shape is not None  # weights have known sizes
        if member in inputs:
            value = op.wrap(inputs[member])
        else:
            value = op.input(member, spec.dtype, spec.shape)
        flat.append(op.Reshape(value, [-1]))
        sizes.append(math.prod(size for size in spec.shape if isinstance(size, int)))
    joined = inputs[name]
    op.move_uses(op.wrap(joined), op.Concat(*flat, axis=0))
    op.graph.inputs.remove(joined)
    result = outputs[names.updated(name)]
    op.graph.outputs.remove(result)
    parts = op.Split(op.wrap(result), op.constant(sizes), axis=0, _outputs=len(sizes))
    for part, (member, spec) in zip(parts, members.items()):
        shape = [size for size in spec.shape or () if isinstance(size, int)]
        op.output(names.updated(member), op.Reshape(part, np.array(shape, np.int64)))
