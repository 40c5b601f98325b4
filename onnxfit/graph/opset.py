"""Convert a model to the opset that its graphs are built in.

Models of older opsets are raised to OPSET, mostly by the converter of the onnx package. This module
adds two operators whose meaning the converter changes. Models of newer opsets keep the operators
that the installed onnxruntime can run (`newer_operators.py`).
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter

from onnxfit.errors import ModelError
from onnxfit.graph.completion import move_runtime_operators, opset_of, restore_runtime_operators
from onnxfit.graph.inference import find_schema
from onnxfit.graph.newer_operators import PREVIEW, use_supported_operators
from onnxfit.graph.operator_versions import set_opset
from onnxfit.graph.subgraphs import nodes_of

# Graphs have this opset, or a newer one if an operator of the model needs it. Old runtimes,
# browsers and onnxruntime-training 1.19.2 read it.
OPSET = 21
IR_VERSION = 10  # likewise
# From MIN_KNOWN_OPSET on, new versions of these operators have only added element types.
MIN_KNOWN_OPSET = 13
# Before this opset, the second input of these operators could begin at an axis of the first.
OPSET_OF_BROADCASTING = 7
BROADCASTING = {
    "Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor",
}  # fmt: skip
MORE_TYPES = {
    "Cast", "Constant", "ConstantOfShape", "Flatten", "Identity", "Reshape", "Shape", "Size",
    "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip


def convert_opset(model: onnx.ModelProto, *, oldest: int = OPSET) -> onnx.ModelProto:
    """Return the model in the oldest opset, OPSET or later, that has its operators.

    A model of opset OPSET is returned itself.

    - `oldest`: a later opset to begin with, such as that of a graph to which the nodes are added.

    Raises ModelError if the conversion is impossible.
    """
    version = opset_of(model)
    if version is None:  # operators of other domains only
        version = OPSET
        model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    if version < OPSET:
        model = _raised(model, version)
        version = OPSET
    is_preview = any(node.domain == PREVIEW for node in nodes_of(model.graph))
    if version == oldest == OPSET and not is_preview:
        return model
    moved = move_runtime_operators(model)
    model = use_supported_operators(model, max(version, oldest), OPSET, oldest)
    restore_runtime_operators(model, moved)
    return model


def _raised(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Return a model of an older opset in opset OPSET."""
    if version >= MIN_KNOWN_OPSET and _is_same_in_both(model, version):
        set_opset(model, OPSET)
        return model
    if version < OPSET_OF_BROADCASTING:
        model = _aligned_at_the_end(model)
    moved = move_runtime_operators(model)
    try:
        converted = onnx.version_converter.convert_version(model, OPSET)
        restore_runtime_operators(converted, moved)
        if version < 11:
            _restore_resize(model, converted)
        if version >= 18:
            _restore_group_normalization(converted)
        return converted
    # The converter raises RuntimeError, ConvertError and plain C++ assertions alike.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[-1] if lines else type(error).__name__
        raise ModelError(
            f"The model has opset {version}, which onnx {onnx.__version__} cannot convert to opset"
            f" {OPSET}: {reason}. Export the model again with opset {MIN_KNOWN_OPSET} or later."
        ) from None


def _is_same_in_both(model: onnx.ModelProto, version: int) -> bool:
    """Return whether every operator of a model means the same in opset `version` and in OPSET."""
    own = {node.op_type for node in nodes_of(model.graph) if node.domain in ("", "ai.onnx")}
    for op_type in own - MORE_TYPES:
        schemas = [find_schema("", op_type, v) for v in (version, OPSET)]
        if None in schemas or len({s.since_version for s in schemas if s is not None}) > 1:
            return False
    return True


def _aligned_at_the_end(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of an opset before 7 whose operators broadcast as in NumPy.

    The second input of an operator in `BROADCASTING` could have the axes of the first from `axis`
    on, and the slopes of a PRelu belong to axis 1. Later opsets align the last axes, so the second
    input gets axes of size 1 at its end. Raises ModelError if the ranks are unknown.
    """
    ranks = _ranks(model)
    aligned = onnx.ModelProto()
    aligned.CopyFrom(model)
    nodes = list(aligned.graph.node)
    del aligned.graph.node[:]
    for node in nodes:
        attributes = {a.name: a.i for a in node.attribute if a.name in ("axis", "broadcast")}
        is_prelu = node.op_type == "PRelu"
        begins = 1 if is_prelu else attributes.get("axis", -1)
        if is_prelu or (node.op_type in BROADCASTING and "axis" in attributes and begins >= 0):
            rank, other = (ranks.get(name) for name in node.input[:2])
            if rank is None or other is None:
                raise ModelError(
                    f"{node.op_type} {node.name!r} of opset {opset_of(model)} aligns its second"
                    f" input at axis {begins}, but the ranks of its inputs are unknown. Declare the"
                    " shapes of the model's inputs."
                )
            name = f"{node.output[0]}/aligned"
            axes = list(range(other, rank - begins))
            if axes and not (is_prelu and other == 0):
                aligned.graph.node.append(
                    onnx.helper.make_node("Unsqueeze", [node.input[1]], [name], axes=axes)
                )
                node.input[1] = name
            for attribute in [a for a in node.attribute if a.name == "axis"]:
                node.attribute.remove(attribute)
        aligned.graph.node.append(node)
    return aligned


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Return the rank of each value of the main graph whose rank can be inferred."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    return ranks | {tensor.name: len(tensor.dims) for tensor in graph.initializer}


def _restore_resize(model: onnx.ModelProto, converted: onnx.ModelProto) -> None:
    """Let Resize compute positions as in opset 10, in place.

    Positions were counted from the corner. Later opsets have another default, and the converter
    does not set the attribute.
    """
    old = {
        name
        for node in model.graph.node
        if node.op_type in ("Upsample", "Resize")
        for name in node.output
    }
    settings = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    for node in converted.graph.node:
        if node.op_type == "Resize" and old.intersection(node.output):
            for attribute in [a for a in node.attribute if a.name in settings]:
                node.attribute.remove(attribute)
            node.attribute.extend(
                onnx.helper.make_attribute(name, value) for name, value in settings.items()
            )


def _restore_group_normalization(converted: onnx.ModelProto) -> None:
    """Repeat scale and bias of every GroupNormalization for the channels of a group, in place.

    From opset 21 on, each channel has its own scale and bias. Opset 18 had one of each per group,
    which the converter leaves unchanged.
    """
    nodes = list(converted.graph.node)
    del converted.graph.node[:]
    for node in nodes:
        if node.op_type == "GroupNormalization" and node.domain == "":
            converted.graph.node.extend(_repeat_for_channels(node))
        converted.graph.node.append(node)


def _repeat_for_channels(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes that repeat scale and bias, and let a GroupNormalization use them."""
    make = onnx.helper.make_node
    prefix = f"{node.output[0]}/per_group"
    groups = next(a.i for a in node.attribute if a.name == "num_groups")
    nodes = []
    for key, value in {"groups": groups, "last": -1, "axis": 1}.items():
        tensor = onnx.numpy_helper.from_array(np.array([value], np.int64), f"{prefix}/{key}")
        nodes.append(make("Constant", [], [tensor.name], value=tensor))
    channels = f"{prefix}/channels"
    times = f"{prefix}/times"
    sizes = f"{prefix}/sizes"
    nodes += [
        make("Shape", [node.input[0]], [channels], start=1, end=2),
        make("Div", [channels, f"{prefix}/groups"], [times]),
        make("Concat", [f"{prefix}/groups", times], [sizes], axis=0),
    ]
    for i in (1, 2):
        repeated = f"{prefix}/wide_{i}"
        column = f"{repeated}/column"
        flat = f"{prefix}/channels_{i}"
        nodes += [
            make("Unsqueeze", [node.input[i], f"{prefix}/axis"], [column]),
            make("Expand", [column, sizes], [repeated]),
            make("Reshape", [repeated, f"{prefix}/last"], [flat]),
        ]
        node.input[i] = flat
    return nodes
