"""Allow any batch size in a model whose exporter fixed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.checks import check_arguments
from onnxfit.errors import ModelError, StepError, warn_user
from onnxfit.graph.subgraphs import subgraph_protos
from onnxfit.graph.tensors import is_large
from onnxfit.load.reading import ModelSource, load_model
from onnxfit.load.training_form import to_inference_form
from onnxfit.tools.editing.batch_axes import REMEDY, BatchAxis, BatchAxisError, hides_batch
from onnxfit.tools.editing.batch_axis_propagation import (
    GROWTH,
    BatchAxisPropagation,
    propagate_batch_axes,
)
from onnxfit.tools.editing.batch_inputs import data_inputs, name_dimension, without_known_ifs
from onnxfit.tools.editing.fixed_inputs import with_fixed_inputs
from onnxfit.tools.editing.row_check import ModelRun, Trial, accepts_any_batch, random_rows, rows_of

__all__ = ["dynamic_batch"]

TRIED_SIZES = (16, 64, 224)  # tried for an axis of dynamic size
# Tried as the largest value of an integer input, such as tokens or a mask; others follow if the
# models differ by little
TRIED_INTEGERS = (1, 0, 100)
MAY_BE_ROUNDING = 50  # times the tolerance


@check_arguments
def dynamic_batch(
    model_onnx: ModelSource,
    *,
    axes: Mapping[str, int | None] | None = None,
    name: str = "batch",
    fixed_inputs: Mapping[str, Any] | None = None,
) -> onnx.ModelProto:
    """Return a model with a fixed batch size changed to allow any batch size.

    The batch dimension of inputs and outputs gets a name. Constants that contain the batch size are
    changed: the sizes of Reshape, Expand, Slice and Resize, and tensors that must be repeated for
    each row. An If whose condition is known is replaced by the branch that it takes. The result is
    then compared with the original, row by row, on random inputs of one row and of several rows. A
    model that already allows any batch size is returned unchanged.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `axes`: input -> its batch axis, or None for an input without a batch, such as a table. The
      default is the axis whose name says that it is the batch, or else axis 0, and axis 1 for the
      initial state of a recurrent layer.
    - `name`: the name of the batch dimension.
    - `fixed_inputs`: input -> its value, such as `{"sr": 16000}`: an array of its shape, or a
      number that fills it. The result has a constant in place of the input, so that an If with this
      condition can be replaced by a branch.

    ModelError: the model cannot be read or run, the inputs have different batch sizes, or a node
    prevents another batch size; the message names the node. UnknownNameError or SettingError: the
    model does not have an input or axis. DataError: a fixed value does not fit its input.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[1, 2, 3] x) => (float[1, 6] y) <int64[2] s = {1, 6}> { y = Reshape(x, s) }''')
    >>> onnx.printer.to_text(dynamic_batch(model).graph).splitlines()[0]
    'g (float[batch,2,3] x) => (float[batch,6] y) '
    """
    original = with_fixed_inputs(load_model(model_onnx), fixed_inputs)
    work, batch_axes = without_known_ifs(original, axes or {})
    fixed_rows = _fixed_rows(work.graph, batch_axes)
    rows = fixed_rows or 1
    if fixed_rows is None and not _has_constant_rows(work, batch_axes):
        return original
    trials = None if is_large(original) else _trials(original, work.graph, batch_axes, rows)
    trial = None if trials is None else next(trials)
    shapes = _shapes(work.graph, batch_axes, rows, TRIED_SIZES[0]) if not trial else trial.shapes
    try:
        propagation = propagate_batch_axes(work, shapes, batch_axes, rows)
    except BatchAxisError:
        if fixed_rows is None and trial is not None and accepts_any_batch(trial, None):
            return original
        raise
    if fixed_rows is None and trial is not None and accepts_any_batch(trial, propagation.axes):
        return original
    for node in propagation.hidden:
        if node.op_type == "If":  # a comparison would run only one of its branches
            raise hides_batch(node, propagation.axes)
    outputs = [v.name or "" for v in work.graph.outputs]
    batched = [name for name in outputs if propagation.axes.get(name)]
    unknown = [name for name in outputs if name not in propagation.axes]
    if not batched and not (unknown and trial):
        raise _lost(propagation, batch_axes)
    edited = _declared(original, work.graph, propagation, batch_axes, rows, name)
    if trials is None or trial is None:
        warn_user(
            "The changed model was not compared with the original, because it is larger than 2 GB."
            " Compare their outputs for some rows yourself."
        )
    else:
        found = _compare(original, edited, propagation, chain([trial], trials))
        if not any(found.values()):
            raise _lost(propagation, batch_axes)
        for value in edited.graph.output:
            if value.name in unknown:
                _declare_output(value, found[value.name], rows, name)
        _correct_rank(edited.graph, trial, found, name)
    return edited


def _lost(propagation: BatchAxisPropagation, axes: Mapping[str, int]) -> ModelError:
    """Return the error for outputs that have no batch."""
    for node in propagation.hidden[:1]:
        return hides_batch(node, propagation.axes)
    ends = [
        f"; the batch axis is lost at {node.op_type} {node.name!r}" for node in propagation.ends[:1]
    ]
    return ModelError(
        "The batch size cannot be changed, because no output has the batch axis of"
        f" {', '.join(axes)}{''.join(ends)}. If another axis of an input is the batch,"
        " pass its number: dynamic_batch(model, axes={'input': 1})."
    )


# --------------------------------------------------------------------------------------------------
# The batch


def _fixed_rows(graph: ir.Graph, axes: Mapping[str, int]) -> int | None:
    """Return the fixed number of rows, or None if it is dynamic. ModelError: inputs disagree."""
    sizes: dict[str, int] = {}
    for value in data_inputs(graph):
        name = value.name or ""
        size = value.shape[axes[name]] if name in axes and value.shape else None
        if isinstance(size, int) and size >= 0:
            sizes[name] = size
    empty = next((name for name, size in sizes.items() if size == 0), None)
    if empty is not None:
        raise ModelError(
            f"The batch size of input {empty!r} is 0, along axis {axes[empty]}, so the model cannot"
            " be run. Export it with a batch size of at least 1."
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size} along axis {axes[name]}" for name, size in sizes.items())
        raise ModelError(
            f"The inputs have different batch sizes: {listed}. If the batch of an input is not axis"
            " 0, pass its axis, or None for an input without a batch: dynamic_batch(model,"
            " axes={'input': 1, 'table': None})."
        )
    return next(iter(sizes.values()), None)


def _has_constant_rows(work: ir.Model, axes: Mapping[str, int]) -> bool:
    """Return whether nodes may fix the batch at 1 although the inputs leave it open."""
    try:
        propagation = propagate_batch_axes(
            work, _shapes(work.graph, axes, 1, TRIED_SIZES[0]), axes, 1
        )
        return propagation.edits > 0 or bool(propagation.hidden)
    except BatchAxisError:
        return True


def _shapes(
    graph: ir.Graph, axes: Mapping[str, int], rows: int, open_size: int
) -> dict[str, tuple[int, ...]]:
    """Return a shape for each input, with `open_size` for sizes that the model leaves open."""
    shapes = {}
    for value in data_inputs(graph):
        sizes = [s if isinstance(s, int) and s >= 0 else open_size for s in value.shape or ()]
        name = value.name or ""
        if name in axes:
            sizes[axes[name]] = rows
        shapes[name] = tuple(sizes)
    return shapes


# --------------------------------------------------------------------------------------------------
# Comparison with the original


def _trials(
    original: onnx.ModelProto, graph: ir.Graph, axes: Mapping[str, int], rows: int
) -> Iterator[Trial]:
    """Yield random rows and the original model's outputs for them: small integers come first.

    ModelError: onnxruntime cannot run the model on any of them.
    """
    try:
        run = ModelRun(_for_inference(original))
    except StepError as error:
        raise ModelError(f"onnxruntime cannot run the model: {error}") from None
    reason = ""
    inputs = data_inputs(graph)
    for size in TRIED_SIZES:
        shapes = _shapes(graph, axes, rows, size)
        runs = False
        for max_integer in TRIED_INTEGERS:
            if runs and max_integer == 0:
                continue  # equal rows prove little
            feeds = random_rows(inputs, shapes, axes, rows * GROWTH, max_integer)
            batches = [rows_of(feeds, axes, i * rows, (i + 1) * rows) for i in range(GROWTH)]
            try:
                chunks = [run(batch) for batch in batches]
            except Exception as error:  # onnxruntime raises its own classes
                reason = reason or _first_line(error)
                continue
            runs = True
            yield Trial(run, shapes, axes, rows, feeds, chunks)
        if runs:
            return
    if reason:
        raise ModelError(
            f"The model fails on random inputs, so the changed model cannot be checked: {reason}"
        )


def _for_inference(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without dropout, whose random numbers would differ between runs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    to_inference_form(copy)
    return copy


def _compare(
    original: onnx.ModelProto,
    edited: onnx.ModelProto,
    propagation: BatchAxisPropagation,
    trials: Iterable[Trial],
) -> dict[str, BatchAxis | None]:
    """Return the batch axis of each output, after a comparison on one row and on several.

    ModelError, with the node: the models disagree.
    """
    inference = _for_inference(edited)
    error: ModelError | None = None
    try:
        run = ModelRun(inference)
        for trial in trials:
            axes = {**trial.found_axes(run(trial.feeds)), **propagation.axes}
            wrong = trial.differences(run, axes)
            if not wrong:
                return {name: axes[name] for name in trial.chunks[0]}
            error = error or _difference(original, inference, propagation, trial, wrong)
            # Larger integers may tell a wrong row from the rounding of a nearly singular input.
            if trial.differences(run, axes, MAY_BE_ROUNDING):
                break
    except Exception as failure:  # StepError, or a class of onnxruntime's own
        for node in propagation.hidden[:1]:
            raise hides_batch(node, propagation.axes) from None
        raise ModelError(
            "The batch size cannot be changed, because onnxruntime cannot run the changed model."
            f" {_first_line(failure)}"
        ) from None
    assert error is not None
    raise error


def _difference(
    original: onnx.ModelProto,
    inference: onnx.ModelProto,
    propagation: BatchAxisPropagation,
    trial: Trial,
    wrong: Sequence[str],
) -> ModelError:
    """Return the error that names the outputs that differ, and the first node that does."""
    for hiding in propagation.hidden[:1]:
        return hides_batch(hiding, propagation.axes)
    node = _first_difference(original, inference, propagation, trial)
    reason = f"{', '.join(dict.fromkeys(wrong))} would differ from the original"
    if node is not None:
        reason += f", first at {node.op_type} {node.name!r}"
    else:  # within the tolerance, no node before the output differs
        end = next(node for node in inference.graph.node if wrong[0] in node.output)
        reason += f"; {end.op_type} {end.name!r} computes it"
    return ModelError(f"The batch size cannot be changed, because {reason}. {REMEDY}")


def _first_difference(
    original: onnx.ModelProto,
    edited: onnx.ModelProto,
    propagation: BatchAxisPropagation,
    trial: Trial,
) -> onnx.NodeProto | None:
    """Return the first node whose outputs differ between the models, None if none is found."""
    own = {name for node in _for_inference(original).graph.node for name in node.output if name}
    nodes = [
        (node, [name for name in node.output if name in own and name in propagation.axes])
        for node in edited.graph.node
    ]
    names = [name for _, outputs in nodes for name in outputs]
    try:
        old, new = ModelRun(_for_inference(original), names), ModelRun(edited, names)
        wrong = set(trial.of(old).differences(new, propagation.axes))
    except Exception:  # the error is clear enough without the node
        return None
    return next((node for node, outputs in nodes if wrong.intersection(outputs)), None)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# --------------------------------------------------------------------------------------------------
# The result


def _declared(
    original: onnx.ModelProto,
    graph: ir.Graph,
    propagation: BatchAxisPropagation,
    axes: Mapping[str, int],
    rows: int,
    name: str,
) -> onnx.ModelProto:
    """Return the edited model, whose inputs and outputs declare a batch called `name`."""
    for old, new in zip(graph.inputs, propagation.edited.graph.inputs):
        new.shape = old.shape
    model = ir.to_proto(propagation.edited)
    initializers = {tensor.name for tensor in model.graph.initializer}
    # Exporters note in the metadata of an initializer whether it was a parameter.
    notes = [info for info in original.graph.value_info if info.name in initializers]
    del model.graph.value_info[:]
    model.graph.value_info.extend(notes)
    hidden = {node.name for node in propagation.hidden}
    for node in model.graph.node:
        for attribute in node.attribute:
            for body in subgraph_protos(attribute):
                del body.value_info[:]
                for value in body.output if node.name in hidden else ():
                    value.type.tensor_type.ClearField("shape")
    for value in model.graph.input:
        if value.name in axes:
            name_dimension(value, axes[value.name], name)
    declared = {value.name: value for value in original.graph.output}
    for value in model.graph.output:
        value.type.CopyFrom(declared[value.name].type)
        _declare_output(value, propagation.axes.get(value.name), rows, name)
    return model


def _declare_output(
    value: onnx.ValueInfoProto, origin: BatchAxis | None, rows: int, name: str
) -> None:
    """Name the batch dimension of an output; a multiple of the rows becomes an unnamed size."""
    if not value.type.tensor_type.HasField("shape") or origin is None:
        return
    shape = value.type.tensor_type.shape
    if origin.is_new:
        shape.dim.insert(origin.axis, onnx.TensorShapeProto.Dimension())
        for dimension in shape.dim:
            dimension.ClearField("dim_param")  # it could name the batch
    if origin.axis >= len(shape.dim):
        return  # `_correct_rank` declares it
    size = shape.dim[origin.axis].dim_value
    if origin.is_new or (origin.outer == 1 and size in (0, rows)):
        name_dimension(value, origin.axis, name)
    else:
        shape.dim[origin.axis].Clear()


def _correct_rank(
    graph: onnx.GraphProto, trial: Trial, axes: Mapping[str, BatchAxis | None], name: str
) -> None:
    """Declare again the outputs that have another rank than the file says."""
    for value in graph.output:
        array = np.asarray(trial.chunks[0].get(value.name))
        tensor, origin = value.type.tensor_type, axes.get(value.name)
        if origin is not None and origin.is_new:
            array = np.expand_dims(array, origin.axis)
        if not tensor.HasField("shape") or len(tensor.shape.dim) == array.ndim:
            continue
        tensor.ClearField("shape")
        if origin is None:
            continue
        tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in array.shape)
        if origin.outer == 1 and array.shape[origin.axis] == trial.rows:
            name_dimension(value, origin.axis, name)
