"""Convert a model to the opset that its graphs are built in.

Models of older opsets are raised to OPSET, mostly by the converter of the onnx package. This module
adds two operators whose meaning the converter changes; `old_operators.py` adds those that it
refuses. Models of newer opsets keep the operators that the installed onnxruntime can run
(`newer_operators.py`).
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.inference import MIN_KNOWN_OPSET, find_schema
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.completion import (
    import_domain,
    move_runtime_operators,
    opset_of,
    restore_runtime_operators,
)
from onnxfit.load.newer_operators import PREVIEW, use_supported_operators
from onnxfit.load.old_operators import use_newer_operators
from onnxfit.load.operator_versions import set_opset

# Graphs have this opset, or a newer one if an operator of the model needs it. Old runtimes,
# browsers and onnxruntime-training 1.19.2 read it.
OPSET = 21
IR_VERSION = 10  # likewise
# From MIN_KNOWN_OPSET on, new versions of these operators have only added element types.
MORE_TYPES = {
    "Cast", "Constant", "ConstantOfShape", "Flatten", "Identity", "Reshape", "Shape", "Size",
    "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip


def empty_graph(name: str, device: str = "cpu") -> GraphBuilder:
    """Return the builder of a new graph in OPSET; `device` is as for GraphBuilder."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    return GraphBuilder(graph, device=device)


def convert_opset(model: onnx.ModelProto, *, oldest: int = OPSET) -> onnx.ModelProto:
    """Return the model in the oldest opset, OPSET or later, that has its operators.

    A model of opset OPSET is returned itself.

    - `oldest`: a later opset to begin with, such as that of a graph to which the nodes are added.

    ModelError: the conversion is impossible.
    """
    version = opset_of(model)
    if version is None:  # operators of other domains only
        version = OPSET
        import_domain(model, "", OPSET)
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
    moved = move_runtime_operators(model)
    try:
        raised = use_newer_operators(model, version)
        converted = onnx.version_converter.convert_version(raised, OPSET)
        restore_runtime_operators(converted, moved)
        if version < 11:
            _restore_resize(model, converted)
        if version >= 18:
            _restore_group_normalization(converted)
        return converted
    except ModelError:
        raise
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
