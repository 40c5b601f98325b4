"""Rewrite operators of opsets 1 to 8 that the converter of the onnx package refuses.

The converter raises most operators. It has no adapter for Cast and Tile of opset 5, for recurrent
operators of opset 6, and for inputs that are broadcast from an axis on. onnx 1.19 writes a
wrong tensor for the shape of a Reshape of opset 4.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import onnx
import onnx.shape_inference
import onnx.version_converter
from onnx import helper, numpy_helper

from onnxfit.errors import ModelError
from onnxfit.graph.index import tensors_of
from onnxfit.load.completion import import_domain

# From this opset on, a Cast has a number as its type, a Tile one input of repeats, and a Reshape an
# input. Shape inference knows the elementwise operators of this opset.
OPSET_OF_INPUTS = 6
# Before this opset, the second input of these operators could begin at an axis of the first, and
# recurrent operators had an attribute `output_sequence`.
OPSET_OF_BROADCASTING = 7
BROADCASTING = {
    "Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor",
}  # fmt: skip
RECURRENT = {"GRU", "LSTM", "RNN"}
OPSET_WITHOUT_SPATIAL = 9  # from which on BatchNormalization has no attribute `spatial`
HIDDEN = "onnxfit.hidden"  # a domain of operators that the converter leaves unchanged


def use_newer_operators(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Return a model of opset `version` with operators that the converter raises.

    The result may have a later opset. `model` is returned itself if it has no other operators.
    ModelError: the ranks that an operator needs are unknown.
    """
    if version >= OPSET_WITHOUT_SPATIAL:
        return model
    raised = onnx.ModelProto()
    raised.CopyFrom(model)
    if version < OPSET_OF_INPUTS:
        raised = _converted(raised, OPSET_OF_INPUTS, {"Cast", "Reshape", "Tile"})
        _cast_by_number(raised)
        _reshape_by_input(raised)
        _tile_by_repeats(raised, version)
    if version < OPSET_OF_BROADCASTING:
        _align_at_the_end(raised, version)
        for node in raised.graph.node:
            if node.op_type in RECURRENT:
                # It says whether the first output is there, which the output's name says, too.
                _remove_attribute(node, "output_sequence")
        raised = onnx.shape_inference.infer_shapes(raised)  # unknown behind hidden operators
        raised = _converted(raised, OPSET_OF_BROADCASTING, RECURRENT)
    _normalize_channels(raised)
    return raised


def _shown_name(node: onnx.NodeProto) -> str:
    """Return the name of a node for messages; nodes of old files often have none."""
    return repr(node.name) if node.name else f"of output {node.output[0]!r}"


def _find_attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((each for each in node.attribute if each.name == name), None)


def _remove_attribute(node: onnx.NodeProto, name: str) -> None:
    for attribute in [each for each in node.attribute if each.name == name]:
        node.attribute.remove(attribute)


def _cast_by_number(model: onnx.ModelProto) -> None:
    """Let each Cast to a type that has a name, such as "FLOAT", have its number, in place."""
    for node in model.graph.node:
        to = _find_attribute(node, "to") if node.op_type == "Cast" else None
        if to is not None and to.type == onnx.AttributeProto.STRING:
            number = onnx.TensorProto.DataType.Value(to.s.decode().upper())
            _remove_attribute(node, "to")
            node.attribute.append(helper.make_attribute("to", number))


def _reshape_by_input(model: onnx.ModelProto) -> None:
    """Let each Reshape to a shape in an attribute have it as an input, in place."""
    for node in model.graph.node:
        shape = _find_attribute(node, "shape") if node.op_type == "Reshape" else None
        if shape is not None:
            sizes = np.array(shape.ints, np.int64)
            _remove_attribute(node, "shape")
            node.input.append(_add_integers(model, f"{node.output[0]}/shape", sizes))


def _add_integers(model: onnx.ModelProto, name: str, array: npt.NDArray[np.int64]) -> str:
    """Add an initializer, in old files also an input, and return its name."""
    model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.input.append(
        helper.make_tensor_value_info(name, onnx.TensorProto.INT64, array.shape)
    )
    return name


def _tile_by_repeats(model: onnx.ModelProto, version: int) -> None:
    """Let each Tile with a number of tiles and an axis have the repeats of all axes, in place.

    - `version`: the opset of the file, for messages.
    """
    tiles = [node for node in model.graph.node if node.op_type == "Tile" and len(node.input) == 3]
    if not tiles:
        return
    ranks = _ranks(model)
    numbers = tensors_of(model.graph)
    for node in tiles:
        rank = ranks.get(node.input[0])
        if rank is None or not {*node.input[1:]} <= {*numbers}:
            raise ModelError(
                f"Tile {_shown_name(node)} of opset {version} needs an input of known rank, and"
                " constant tiles and axis. Export the model again with opset 13 or later."
            )
        times, axis = (int(numpy_helper.to_array(numbers[name]).item()) for name in node.input[1:])
        repeats = np.ones(rank, np.int64)
        repeats[axis] = times
        name = _add_integers(model, f"{node.output[0]}/repeats", repeats)
        node.input[:] = [node.input[0], name]


def _normalize_channels(model: onnx.ModelProto) -> None:
    """Remove spatial=0 from BatchNormalizations of matrices, for which it means nothing, in place.

    ModelError: an input has another rank, so that each of its elements has statistics of its own.
    """
    single = [
        node
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        and any(each.name == "spatial" and each.i == 0 for each in node.attribute)
    ]
    ranks = _ranks(model) if single else {}
    for node in single:
        rank = ranks.get(node.input[0])
        if rank != 2:
            raise ModelError(
                f"BatchNormalization {_shown_name(node)} has spatial=0, which means statistics for"
                f" each element of its input {node.input[0]!r}. onnxfit trains statistics for each"
                " channel. If its scale has one number for each channel, the exporter wrote 0 by"
                " mistake: set the attribute to 1."
            )
        _remove_attribute(node, "spatial")


def _converted(model: onnx.ModelProto, version: int, unchanged: Collection[str]) -> onnx.ModelProto:
    """Return a model in a later opset, which changes no operator of the types `unchanged`.

    `model` must not be used any more.
    """
    hidden = [node for node in model.graph.node if node.op_type in unchanged and not node.domain]
    for node in hidden:
        node.domain = HIDDEN
    if hidden:
        import_domain(model, HIDDEN)
    converted = onnx.version_converter.convert_version(model, version)
    for node in converted.graph.node:
        if node.domain == HIDDEN:
            node.domain = ""
    for entry in [entry for entry in converted.opset_import if entry.domain == HIDDEN]:
        converted.opset_import.remove(entry)
    return converted


def _align_at_the_end(model: onnx.ModelProto, version: int) -> None:
    """Let the operators of an opset before 7 broadcast as in NumPy, in place.

    - `version`: the opset of the file, for messages.

    The second input of an operator in `BROADCASTING` could have the axes of the first from `axis`
    on, and the slopes of a PRelu belong to axis 1. Later opsets align the last axes, so the second
    input gets axes of size 1 at its end. ModelError: the ranks are unknown.
    """
    ranks = _ranks(model)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        attributes = {a.name: a.i for a in node.attribute if a.name in ("axis", "broadcast")}
        is_prelu = node.op_type == "PRelu"
        begins = 1 if is_prelu else attributes.get("axis", -1)
        if is_prelu or (node.op_type in BROADCASTING and "axis" in attributes and begins >= 0):
            rank, other = (ranks.get(name) for name in node.input[:2])
            if rank is None or other is None:
                raise ModelError(
                    f"{node.op_type} {_shown_name(node)} of opset {version} aligns its second"
                    f" input at axis {begins}, but the ranks of its inputs are unknown. Declare the"
                    " shapes of the model's inputs."
                )
            name = f"{node.output[0]}/aligned"
            axes = list(range(other, rank - begins))
            if axes and not (is_prelu and other == 0):
                model.graph.node.append(
                    onnx.helper.make_node("Unsqueeze", [node.input[1]], [name], axes=axes)
                )
                node.input[1] = name
            _remove_attribute(node, "axis")
        model.graph.node.append(node)


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Return the rank of each value of the main graph whose rank can be inferred."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    return ranks | {tensor.name: len(tensor.dims) for tensor in graph.initializer}
