"""Prepare a model for the propagation of batch axes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.inliner
import onnx.shape_inference
import onnx_ir as ir

from onnxfit.errors import ModelError, SettingError, UnknownNameError
from onnxfit.graph.fold import take_known_branches
from onnxfit.graph.model import large_tensors_as_inputs, to_ir
from onnxfit.graph.subgraphs import graph_protos, nodes_of, subgraphs_of
from onnxfit.load.batch_axis import BatchLayout, layout_of

INITIAL_STATES = {"GRU": (5,), "LSTM": (5, 6), "RNN": (5,)}
# operators that pass an initial state on, from its input of the model to its layer
PASSING = {"Cast", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"}


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


def without_known_ifs(
    model: onnx.ModelProto, given: Mapping[str, int | None]
) -> tuple[ir.Model, dict[str, int]]:
    """Return the model without Ifs whose condition is known, and the batch axis of its inputs."""
    layout = layout_of(model)
    work = _readable(model)
    axes = _batch_axes(work.graph, layout, given)
    while any(node.op_type == "If" for node in work.graph):
        work = _readable(_with_known_branches(model, axes))
        seen, axes = axes, _batch_axes(work.graph, layout, given)
        if axes == seen:  # otherwise the layer of an initial state was in a branch
            break
    return work, axes


def _with_known_branches(model: onnx.ModelProto, axes: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model with the taken branch in place of each If whose condition is known.

    A condition that depends on the size of the batch stays unknown.
    """
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    if not any(node.op_type == "If" for node in nodes_of(model.graph)):
        return model
    view = onnx.ModelProto()
    view.CopyFrom(model)
    for value in view.graph.input:
        if value.name in axes:
            name_dimension(value, axes[value.name], "onnxfit/any")
    takes_any = False
    while True:  # a branch may show the sizes on which the next condition depends
        for graph in graph_protos(view.graph):
            del graph.value_info[:]
            for value in graph.output:
                value.type.tensor_type.ClearField("shape")
        work = _readable(view)
        if not take_known_branches(work):
            break
        takes_any = True
        view = ir.to_proto(work)
    if not takes_any:
        return model
    for name in ("input", "output"):
        del getattr(view.graph, name)[:]
        getattr(view.graph, name).extend(getattr(model.graph, name))
    return view


def data_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs that a caller feeds: older files list initializers, too."""
    return [v for v in graph.inputs if v.name not in graph.initializers]


def _batch_axes(
    graph: ir.Graph, layout: BatchLayout, given: Mapping[str, int | None]
) -> dict[str, int]:
    """Return the batch axis of each input that has one."""
    inputs = {v.name or "": v for v in data_inputs(graph)}
    results = _results_of_branches(graph)
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
            is_state = len(value.shape) > 1 and _is_initial_state(value, results)
            found[name] = 1 if is_state else 0
            named = layout.inputs.get(name) if layout.batch else None
            if named is not None and named.axis is not None and not named.is_assumed:
                found[name] = named.axis
    if not found:
        raise ModelError(
            "The model has no input with a batch axis. Pass the axes: dynamic_batch(model,"
            " axes={'input': 0})."
        )
    return {name: found[name] for name in inputs if name in found}


def _results_of_branches(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Return, for each output of a branch of an If, the output of the If."""
    ifs = [n for n in ir.traversal.RecursiveGraphIterator(graph) if n.op_type == "If"]
    return {a: b for n in ifs for body in subgraphs_of(n) for a, b in zip(body.outputs, n.outputs)}


def _is_initial_state(value: ir.Value, results: Mapping[ir.Value, ir.Value]) -> bool:
    """Return whether an input of the model is the initial state of a recurrent layer."""
    waiting = [value]
    seen: set[ir.Value] = set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting += [results[current]] if current in results else []
        for node, position in current.uses():
            if position in INITIAL_STATES.get(node.op_type, ()):
                return not node.attributes.get_int("layout", 0)
            if node.op_type in PASSING and position == 0:
                waiting += node.outputs
    return False


def name_dimension(value: onnx.ValueInfoProto, axis: int, name: str) -> None:
    dimension = value.type.tensor_type.shape.dim[axis]
    dimension.ClearField("dim_value")
    dimension.dim_param = name
