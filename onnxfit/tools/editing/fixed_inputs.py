"""Inputs of a file that have one value for all batches: constants of every graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.checks import shortened
from onnxfit.data.convert import as_array, in_dtype
from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.graph.index import required_inputs
from onnxfit.graph.model import spec_of
from onnxfit.graph.spec import TensorSpec

Array = npt.NDArray[Any]


def input_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Return name, element type and shape of a graph input. ModelError: it is not a tensor."""
    return spec_of(ir.serde.deserialize_value_info_proto(value, None))


def with_fixed_inputs(model: onnx.ModelProto, fixed: Mapping[str, Any] | None) -> onnx.ModelProto:
    """Return a copy of the model in which some inputs are constants.

    A Constant is never a weight, so training and exports leave it alone.

    - `model`: the model, which stays unchanged. With nothing to fix, it is returned itself.
    - `fixed`: input -> an array of its shape, or a number that fills its shape. If a size of the
      shape has a name, the number fills as many entries as another input with that name has.

    UnknownNameError: the model has no such input. DataError: a value does not fit its input.
    SettingError: no input would remain, or a size is unknown.
    """
    if fixed is None:
        return model
    if not isinstance(fixed, Mapping) or not all(isinstance(name, str) for name in fixed):
        raise SettingError(
            f"fixed_inputs must be a mapping from inputs to their values, got {shortened(fixed)}."
        )
    if not fixed:
        return model
    inputs = required_inputs(model.graph)
    for name in fixed:
        if name not in inputs:
            raise UnknownNameError("input of the model", name, inputs)
    others = [input_spec(value) for name, value in inputs.items() if name not in fixed]
    if not others:
        raise SettingError(
            "fixed_inputs fixes every input of the model. Leave out at least one, which then gets"
            " the rows of the data."
        )
    nodes: list[onnx.NodeProto] = []
    for name, value in fixed.items():
        nodes += _nodes_of_input(input_spec(inputs[name]), value, others)
    view = onnx.ModelProto()
    view.CopyFrom(model)
    graph = view.graph
    kept = [value for value in graph.input if value.name not in fixed]
    old = [*graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(kept)
    graph.node.extend([*nodes, *old])
    return view


def _nodes_of_input(
    spec: TensorSpec, value: Any, others: Iterable[TensorSpec]
) -> list[onnx.NodeProto]:
    """Return the nodes that give an input its value."""
    array = np.asarray(in_dtype(as_array(value, f"fixed_inputs[{spec.name!r}]"), spec))
    shape = spec.shape
    if shape is None or spec.accepts(array.shape):
        return [_constant_node(spec.name, array)]
    if not array.shape:
        sizes = [size for size in shape if isinstance(size, int)]
        if len(sizes) == len(shape):
            return [_constant_node(spec.name, np.full(sizes, array))]
        return _filled(spec, array, others)
    raise DataError(
        f"fixed_inputs[{spec.name!r}] has shape {array.shape}, but the input is {spec}. Pass an"
        " array of this shape, or a number that fills it."
    )


def _filled(spec: TensorSpec, number: Array, others: Iterable[TensorSpec]) -> list[onnx.NodeProto]:
    """Return nodes that fill the shape of an input, whose sizes other inputs have."""
    places: dict[Any, tuple[str, int]] = {}
    for other in others:
        for axis, size in enumerate(other.shape or ()):
            places.setdefault(size, (other.name, axis))
    nodes, parts = [], []
    for axis, size in enumerate(spec.shape or ()):
        name = f"{spec.name}/fixed/size_{axis}"
        if isinstance(size, int):
            nodes.append(_constant_node(name, np.array([size])))
        elif size is None or size not in places:
            raise SettingError(
                f"fixed_inputs[{spec.name!r}] is one number, but the size of axis {axis} of {spec}"
                " is not a number, and no other input has a size of this name. Pass an array."
            )
        else:
            source, source_axis = places[size]
            whole, at = f"{name}/shape", f"{name}/axis"
            nodes.append(onnx.helper.make_node("Shape", [source], [whole], whole))
            nodes.append(_constant_node(at, np.array([source_axis])))
            nodes.append(onnx.helper.make_node("Gather", [whole, at], [name], name, axis=0))
        parts.append(name)
    sizes, value = f"{spec.name}/fixed/sizes", f"{spec.name}/fixed/value"
    nodes.append(onnx.helper.make_node("Concat", parts, [sizes], sizes, axis=0))
    nodes.append(_constant_node(value, number))
    nodes.append(onnx.helper.make_node("Expand", [value, sizes], [spec.name], f"{value}/filled"))
    return nodes


def _constant_node(name: str, array: Array) -> onnx.NodeProto:
    tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
    return onnx.helper.make_node("Constant", [], [name], f"constant_{name}", value=tensor)
