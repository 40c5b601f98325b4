"""Compute the values that the sizes of a batch determine.

Exporters write shapes as arithmetic (Shape, Gather, Concat, Reshape), which ONNX's own inference
follows only in part. One walk over the graph replaces every node whose inputs are known by its
value, and gives every other node the shapes that follow. onnx-ir's passes lift constants but do not
compute; onnxruntime computes, but only inside a session, after the gradient has been built.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxfit.graph.inference import infer_outputs
from onnxfit.graph.shared_tensors import array_of
from onnxfit.graph.spec import known_sizes
from onnxfit.graph.subgraphs import graph_protos, nodes_of, subgraphs_of

Array = npt.NDArray[Any]
MAX_FOLDED_ELEMENTS = 1024  # elements of a value that is computed: shapes and axes, not weights
MAX_LENGTH = 2**24  # of a vector whose numbers ONNX's inference may propagate
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


# Operators whose output can be much larger than their inputs -> the inputs that decide its size
SIZE_INPUTS: dict[str, tuple[int, ...]] = {
    "BlackmanWindow": (0,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Resize": (2, 3),
    "Tile": (1,),
}

_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}
_ANY_TYPE = {"Cast", "Constant", "Identity"}  # operators that are also computed for floats


def makes_long_vectors(graph: onnx.GraphProto) -> bool:
    """Return whether a constant makes the output of an operator such as Expand very long."""
    constants: dict[str, onnx.TensorProto] = {}
    for inner in graph_protos(graph):
        constants.update({tensor.name: tensor for tensor in inner.initializer})
        for node in inner.node:
            tensors = [a.t for a in node.attribute if a.HasField("t")]
            constants.update(zip(node.output, tensors if node.op_type == "Constant" else ()))
    return any(
        _has_large_number(constants[node.input[position]])
        for node in nodes_of(graph)
        for position in SIZE_INPUTS.get(node.op_type, ())
        if position < len(node.input) and node.input[position] in constants
    )


def _has_large_number(tensor: onnx.TensorProto) -> bool:
    if math.prod(tensor.dims) > MAX_FOLDED_ELEMENTS:
        return False  # tensors of sizes are small
    array = array_of(tensor)
    return array.dtype.kind in "iuf" and bool(np.any(np.abs(array.astype(float)) > MAX_LENGTH))


def fold_shapes(model: ir.Model) -> None:
    """Fold the main graph in place; a node that cannot be computed stays."""
    graph = model.graph
    for node in list(graph):
        values = computed_values(node, graph)
        if values is None:
            before = [v.shape for v in node.outputs]
            infer_outputs(graph, node)
            for value, shape in zip(node.outputs, before):
                value.shape = known_sizes(value.shape, shape)
        elif not any(v.is_graph_output() for v in node.outputs):
            _replace_by_constants(graph, node, values)


def _replace_by_constants(graph: ir.Graph, node: ir.Node, values: list[Array]) -> None:
    for value, array in zip(node.outputs, values):
        tensor = ir.tensor(array, name=value.name)
        constant = ir.Value(
            name=value.name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        value.replace_all_uses_with(constant)
        value.name = None
        graph.register_initializer(constant)
    graph.remove(node, safe=True)


def computed_values(node: ir.Node, graph: ir.Graph) -> list[Array] | None:
    """Return the values of a node's outputs, None if they are unknown or not small."""
    if node.domain not in ("", "ai.onnx") or node.op_type in RANDOM:
        return None
    if subgraphs_of(node):
        return None
    if node.op_type in ("Shape", "Size"):
        return _computed_sizes(node)
    feeds = _constant_inputs(node)
    if feeds is None or not (feeds or node.op_type == "Constant"):
        return None
    if node.op_type in SIZE_INPUTS:
        infer_outputs(graph, node)  # the output could be too large to be computed
    if any(math.prod(_sizes(v) or [0]) > MAX_FOLDED_ELEMENTS for v in node.outputs):
        return None
    # The reference may differ from onnxruntime in details of an operator, so only arithmetic of
    # shapes is computed.
    if node.op_type not in _ANY_TYPE and not all(v.dtype in _INTEGERS for v in node.outputs):
        return None
    try:
        arrays = _evaluate(node, feeds, graph.opset_imports[""])
    # The reference may lack an operator, or the node may fail: then it fails when the model runs,
    # with a message of its own.
    except Exception:
        return None
    small = all(isinstance(a, np.ndarray) and a.size <= MAX_FOLDED_ELEMENTS for a in arrays)
    return arrays if small else None


def _computed_sizes(node: ir.Node) -> list[Array] | None:
    """Return the value of a Shape or Size, None if it is unknown."""
    sizes = _sizes(node.inputs[0])
    if sizes is None:
        return None
    if node.op_type == "Size":
        size = math.prod(sizes)
        return [np.array(size, np.int64)] if size < 2**63 else None
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else None
    return [np.array(sizes[start:end], np.int64)]


def _constant_inputs(node: ir.Node) -> dict[str, Array] | None:
    """Return the inputs of a node by name, None if one is unknown or large."""
    arrays: dict[str, Array] = {}
    for value in node.inputs:
        if value is None:
            continue
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or tensor.size > MAX_FOLDED_ELEMENTS:
            return None
        arrays[value.name or ""] = tensor.numpy()
    return arrays


def _sizes(value: ir.Value | None) -> list[int] | None:
    """Return the shape of a value, None if a size is unknown."""
    if value is None or value.shape is None:
        return None
    sizes = [d for d in value.shape if isinstance(d, int)]
    return sizes if len(sizes) == len(value.shape) else None


def _evaluate(node: ir.Node, feeds: dict[str, Array], opset: int) -> list[Array]:
    """Compute one node by ONNX's reference implementation."""
    # imported late: it reads the schemas of all operators, and many models have nothing to fold
    from onnx.reference import ReferenceEvaluator

    make = onnx.helper
    inputs = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=v.name or "") for v in node.outputs if v.name]
    graph = make.make_graph([ir.serde.serialize_node(node)], "node", inputs, outputs)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)], ir_version=10)
    return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, feeds)]
