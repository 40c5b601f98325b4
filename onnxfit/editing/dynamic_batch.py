"""Allow any batch size in a model whose exporter fixed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.editing.batch_axes import REMEDY, BatchAxis, NodeInTheWayError
from onnxfit.editing.batch_walk import GROWTH, BatchWalk, walk
from onnxfit.editing.row_check import Arrays, ModelRun, different, random_rows, rows_of
from onnxfit.errors import ModelError, SettingError, StepError, UnknownNameError, warn_user
from onnxfit.graph.reading import ModelSource, large_tensors_as_inputs, load_model, to_ir
from onnxfit.graph.subgraphs import subgraph_protos
from onnxfit.graph.tensors import is_large
from onnxfit.graph.training_form import to_inference_form
from onnxfit.registry import check_arguments

__all__ = ["dynamic_batch"]

INITIAL_STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
# operators that pass an initial state on, from its input of the model to its layer
PASSING = {"Cast", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"}
TRIED_SIZES = (16, 64, 224)  # tried for an axis of dynamic size
TRIED_INTEGERS = (1, 0)  # tried as the largest value of an integer input, such as tokens or a mask


@check_arguments
def dynamic_batch(
    model_onnx: ModelSource,
    *,
    axes: Mapping[str, int | None] | None = None,
    name: str = "batch",
) -> onnx.ModelProto:
    """Return a model with a fixed batch size changed to allow any batch size.

    The batch dimension of inputs and outputs gets a name. Constants that contain the batch size are
    changed: the sizes of Reshape, Expand, Slice and Resize, and tensors that must be repeated for
    each row. The result is then compared with the original, row by row, on random inputs of one row
    and of several rows. A model that already allows any batch size is returned unchanged.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `axes`: input -> its batch axis, or None for an input without a batch, such as a table. The
      default is axis 0, and axis 1 for the initial state of a recurrent layer.
    - `name`: the name of the batch dimension.

    ModelError: the model cannot be read or run, the inputs have different batch sizes, or a node
    prevents another batch size; the message names the node. UnknownNameError or SettingError: the
    model does not have an input or axis.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     g (float[1, 2, 3] x) => (float[1, 6] y) <int64[2] s = {1, 6}> { y = Reshape(x, s) }''')
    >>> onnx.printer.to_text(dynamic_batch(model).graph).splitlines()[0]
    'g (float[batch,2,3] x) => (float[batch,6] y) '
    """
    original = load_model(model_onnx)
    work = _readable(original)
    batch_axes = _batch_axes(work.graph, axes or {})
    rows = _fixed_rows(work.graph, batch_axes)
    if rows is None and not _has_constant_rows(work, batch_axes):
        return original
    shapes, feeds, chunks = _run_original(original, work.graph, batch_axes, rows or 1)
    walked = walk(work, shapes, batch_axes, rows or 1)
    batched = [v.name or "" for v in work.graph.outputs if walked.axes.get(v.name or "")]
    if not batched:
        ends = [
            f"; the batch axis is lost at {node.op_type} {node.name!r}" for node in walked.ends[:1]
        ]
        raise ModelError(
            "The batch size cannot be changed, because no output has the batch axis of"
            f" {', '.join(batch_axes)}{''.join(ends)}. If another axis of an input is the batch,"
            " pass its number: dynamic_batch(model, axes={'input': 1})."
        )
    mended = _declared(original, work.graph, walked, batch_axes, rows or 1, name)
    if feeds is not None:
        _check(original, mended, walked, feeds, chunks, batch_axes, rows or 1, batched)
    return mended


# --------------------------------------------------------------------------------------------------
# The batch


def _readable(model: onnx.ModelProto) -> ir.Model:
    """Return the model as an onnx-ir model, with functions inlined and types inferred."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    proto = onnx.shape_inference.infer_shapes(large_tensors_as_inputs(model))
    typed = {v.name: v.type for v in (*proto.graph.value_info, *proto.graph.output)}
    work = to_ir(model)
    seen: set[str | None] = {None, ""}
    for node in work.graph:
        if node.name in seen:
            node.name = f"{node.op_type}_{node.outputs[0].name}"
        seen.add(node.name)
        for value in node.outputs:
            if value.name in typed:
                type_ = typed[value.name]
                value.type = value.type or ir.serde.deserialize_type_proto_for_type(type_)
                value.shape = ir.serde.deserialize_type_proto_for_shape(type_)
    return work


def _data_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs that a caller feeds: older files list initializers, too."""
    return [v for v in graph.inputs if v.name not in graph.initializers]


def _batch_axes(graph: ir.Graph, given: Mapping[str, int | None]) -> dict[str, int]:
    """Return the batch axis of each input that has one."""
    inputs = {v.name or "": v for v in _data_inputs(graph)}
    found: dict[str, int] = {}
    for name, axis in given.items():
        if name not in inputs:
            raise UnknownNameError("input", name, inputs)
        shape = inputs[name].shape
        rank = 0 if shape is None else len(shape)
        if axis is not None and (not isinstance(axis, int) or not -rank <= axis < rank):
            raise SettingError(
                f"axes[{name!r}] must be a whole number from {-rank} to {rank - 1}, or None, got"
                f" {axis!r}."
            )
        if axis is not None:
            found[name] = axis % rank
    for name, value in inputs.items():
        if name not in given and value.shape is not None and len(value.shape):
            found[name] = 1 if len(value.shape) > 1 and _is_initial_state(value) else 0
    if not found:
        raise ModelError(
            "The model has no input with a batch axis. Pass the axes: dynamic_batch(model,"
            " axes={'input': 0})."
        )
    return {name: found[name] for name in inputs if name in found}


def _is_initial_state(value: ir.Value) -> bool:
    """Return whether an input of the model is the initial state of a recurrent layer."""
    waiting = [value]
    seen: set[ir.Value] = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for node, position in current.uses():
            if position in INITIAL_STATES.get(node.op_type, ()):
                return not node.attributes.get_int("layout", 0)
            if node.op_type in PASSING and position == 0:
                waiting += node.outputs
    return False


def _fixed_rows(graph: ir.Graph, axes: Mapping[str, int]) -> int | None:
    """Return the fixed number of rows, or None if it is dynamic. ModelError: inputs disagree."""
    sizes: dict[str, int] = {}
    for value in _data_inputs(graph):
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
    """Return whether constants fix the batch at 1 although the inputs leave it open."""
    try:
        return walk(work, _shapes(work.graph, axes, 1, TRIED_SIZES[0]), axes, 1).mends > 0
    except NodeInTheWayError:
        return True


def _shapes(
    graph: ir.Graph, axes: Mapping[str, int], rows: int, open_size: int
) -> dict[str, tuple[int, ...]]:
    """Return a shape for each input, with `open_size` for sizes that the model leaves open."""
    shapes = {}
    for value in _data_inputs(graph):
        sizes = [s if isinstance(s, int) and s >= 0 else open_size for s in value.shape or ()]
        name = value.name or ""
        if name in axes:
            sizes[axes[name]] = rows
        shapes[name] = tuple(sizes)
    return shapes


# --------------------------------------------------------------------------------------------------
# Comparison with the original


def _run_original(
    original: onnx.ModelProto, graph: ir.Graph, axes: Mapping[str, int], rows: int
) -> tuple[dict[str, tuple[int, ...]], Arrays | None, list[dict[str, Any]]]:
    """Return the shapes of inputs, random rows, and the original model's outputs for these rows.

    The rows are None if the model is too large for a session in memory.
    """
    if is_large(original):
        warn_user(
            "The changed model was not compared with the original, because it is larger than 2 GB."
            " Compare their outputs for some rows yourself."
        )
        return _shapes(graph, axes, rows, TRIED_SIZES[0]), None, []
    try:
        run = ModelRun(_for_inference(original))
    except StepError as error:
        raise ModelError(f"onnxruntime cannot run the model: {error}") from None
    reason = ""
    for size in TRIED_SIZES:
        shapes = _shapes(graph, axes, rows, size)
        for max_integer in TRIED_INTEGERS:
            feeds = random_rows(_data_inputs(graph), shapes, axes, rows * GROWTH, max_integer)
            try:
                return shapes, feeds, [run(chunk) for chunk in _chunks(feeds, axes, rows)]
            except Exception as error:  # onnxruntime raises its own classes
                reason = reason or _first_line(error)
    raise ModelError(
        f"The model fails on random inputs, so the changed model cannot be checked: {reason}"
    )


def _chunks(feeds: Arrays, axes: Mapping[str, int], rows: int) -> Iterator[Arrays]:
    for i in range(GROWTH):
        yield rows_of(feeds, axes, i * rows, (i + 1) * rows)


def _for_inference(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without dropout, whose random numbers would differ between runs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    to_inference_form(copy)
    return copy


def _check(
    original: onnx.ModelProto,
    mended: onnx.ModelProto,
    walked: BatchWalk,
    feeds: Arrays,
    chunks: Sequence[Arrays],
    axes: Mapping[str, int],
    rows: int,
    outputs: Sequence[str],
) -> None:
    """Raise ModelError, with the node, unless the models agree on one row and on several."""
    inference = _for_inference(mended)
    try:
        run = ModelRun(inference)
        wrong = different(outputs, chunks, run(feeds), walked.axes)
        first = {name: _first_row(chunks[0][name], walked.axes[name], rows) for name in outputs}
        one = run(rows_of(feeds, axes, 0, 1))
        wrong += different(outputs, [first], one, walked.axes)
    except Exception as error:  # StepError, or a class of onnxruntime's own
        raise ModelError(
            "The batch size cannot be changed, because onnxruntime cannot run the changed model."
            f" {_first_line(error)}"
        ) from None
    if not wrong:
        return
    node = _first_difference(original, inference, walked, feeds, axes, rows)
    reason = f"{', '.join(dict.fromkeys(wrong))} would differ from the original"
    if node is not None:
        reason += f", first at {node.op_type} {node.name!r}"
    else:  # within the tolerance, no node before the output differs
        end = next(node for node in inference.graph.node if wrong[0] in node.output)
        reason += f"; {end.op_type} {end.name!r} computes it"
    raise ModelError(f"The batch size cannot be changed, because {reason}. {REMEDY}")


def _first_row(array: npt.NDArray[Any], origin: BatchAxis | None, rows: int) -> npt.NDArray[Any]:
    assert origin is not None
    size = array.shape[origin.axis] // rows
    return np.asarray(array.take(range(size), origin.axis))


def _first_difference(
    original: onnx.ModelProto,
    mended: onnx.ModelProto,
    walked: BatchWalk,
    feeds: Arrays,
    axes: Mapping[str, int],
    rows: int,
) -> onnx.NodeProto | None:
    """Return the first node whose outputs differ between the models, None if none is found."""
    own = {name for node in _for_inference(original).graph.node for name in node.output if name}
    nodes = [
        (node, [name for name in node.output if name in own and name in walked.axes])
        for node in mended.graph.node
    ]
    names = [name for _, outputs in nodes for name in outputs]
    try:
        old, new = ModelRun(_for_inference(original), names), ModelRun(mended, names)
        chunks = [old(chunk) for chunk in _chunks(feeds, axes, rows)]
        wrong = set(different(names, chunks, new(feeds), walked.axes))
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
    walked: BatchWalk,
    axes: Mapping[str, int],
    rows: int,
    name: str,
) -> onnx.ModelProto:
    """Return the mended model, whose inputs and outputs declare a batch called `name`."""
    for old, new in zip(graph.inputs, walked.mended.graph.inputs):
        new.shape = old.shape
    model = ir.to_proto(walked.mended)
    initializers = {tensor.name for tensor in model.graph.initializer}
    # Exporters note in the metadata of an initializer whether it was a parameter.
    notes = [info for info in original.graph.value_info if info.name in initializers]
    del model.graph.value_info[:]
    model.graph.value_info.extend(notes)
    for node in model.graph.node:
        for attribute in node.attribute:
            for body in subgraph_protos(attribute):
                del body.value_info[:]
    for value in model.graph.input:
        if value.name in axes:
            _name_dimension(value, axes[value.name], name)
    declared = {value.name: value for value in original.graph.output}
    for value in model.graph.output:
        value.type.CopyFrom(declared[value.name].type)
        _declare_output(value, walked.axes.get(value.name), rows, name)
    return model


def _name_dimension(value: onnx.ValueInfoProto, axis: int, name: str) -> None:
    dimension = value.type.tensor_type.shape.dim[axis]
    dimension.ClearField("dim_value")
    dimension.dim_param = name


def _declare_output(
    value: onnx.ValueInfoProto, origin: BatchAxis | None, rows: int, name: str
) -> None:
    """Name the batch dimension of an output; a multiple of the rows becomes an unnamed size."""
    if not value.type.tensor_type.HasField("shape") or origin is None:
        return
    shape = value.type.tensor_type.shape
    if origin.axis >= len(shape.dim):
        value.type.tensor_type.ClearField("shape")
        return
    size = shape.dim[origin.axis].dim_value
    if origin.outer == 1 and size in (0, rows):
        _name_dimension(value, origin.axis, name)
    else:
        shape.dim[origin.axis].Clear()
