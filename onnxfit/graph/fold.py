"""Compute what the sizes of a batch already decide.

Exporters write shapes as arithmetic (Shape, Gather, Concat, Reshape), which ONNX's own inference
follows only a little way. Walking the graph once, in order, every node whose inputs are known is
replaced by its value, and every other gets the shapes that follow. onnx-ir's passes lift constants
but do not compute; onnxruntime's would, but only inside a session, after the gradient has been
built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.reference
import onnx_ir as ir

from onnxfit.graph.inference import infer_outputs

Array = npt.NDArray[Any]
MAX_FOLDED_ELEMENTS = 1024  # elements: shapes, axes and scalars, not weights
RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def fold_shapes(model: ir.Model) -> None:
    """Fold the main graph in place. What cannot be computed stays as it is."""
    graph = model.graph
    for node in list(graph):
        values = _computed(node, graph)
        if values is None:
            before = [v.shape for v in node.outputs]
            infer_outputs(graph, node)
            for value, shape in zip(node.outputs, before):
                value.shape = _both(value.shape, shape)
            continue
        if any(v.is_graph_output() for v in node.outputs):
            continue
        for value, array in zip(node.outputs, values):
            tensor = ir.tensor(array, name=value.name)
            known = ir.Value(
                name=value.name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            value.replace_all_uses_with(known)
            value.name = None
            graph.register_initializer(known)
        graph.remove(node, safe=True)


def _computed(node: ir.Node, graph: ir.Graph) -> list[Array] | None:
    """The values of a node's outputs, None where they are not known or not small."""
    if (
        node.domain not in ("", "ai.onnx")
        or node.op_type in RANDOM
        or any(a.type in _GRAPHS for a in node.attributes.values())
    ):
        return None
    if node.op_type in ("Shape", "Size"):
        sizes = _sizes(node.inputs[0])
        if sizes is None:
            return None
        if node.op_type == "Size":
            return [np.array(np.prod(sizes, dtype=np.int64))]
        start, end = (
            node.attributes[n].as_int() if n in node.attributes else default
            for n, default in (("start", 0), ("end", None))
        )
        return [np.array(sizes[start:end], np.int64)]
    feeds = {}
    for value in node.inputs:
        if value is not None:
            tensor = ir.convenience.get_const_tensor(value)
            if tensor is None or tensor.size > MAX_FOLDED_ELEMENTS:
                return None
            feeds[value.name or ""] = tensor.numpy()
    if not feeds and node.op_type != "Constant":
        return None
    if any(np.prod(_sizes(v) or [0]) > MAX_FOLDED_ELEMENTS for v in node.outputs):
        return None
    # the reference may differ from onnxruntime in an operator's corners, so what is computed is
    # arithmetic of shapes
    if not all(v.dtype in _WHOLE for v in node.outputs) and node.op_type not in (
        "Cast",
        "Constant",
        "Identity",
    ):
        return None
    try:
        found = _evaluate(node, feeds, graph.opset_imports[""])
    except Exception:  # the reference lacks an operator, or the node fails: then it fails at run time, with its own message
        return None
    return (
        found
        if all(isinstance(a, np.ndarray) and a.size <= MAX_FOLDED_ELEMENTS for a in found)
        else None
    )


def _both(now: ir.Shape | None, before: ir.Shape | None) -> ir.Shape | None:
    """What either knows; the inference of the whole model knows names of sizes that one operator's
    does not.
    """
    if now is None or before is None or len(now) != len(before):
        return now if now is not None else before
    return ir.Shape(
        [
            a if isinstance(a, int) or (isinstance(b, ir.SymbolicDim) and b.value is None) else b
            for a, b in zip(now, before)
        ]
    )


def _sizes(value: ir.Value | None) -> list[int] | None:
    """A value's shape, if all of it is known."""
    if value is None or value.shape is None:
        return None
    sizes = [d for d in value.shape if isinstance(d, int)]
    return sizes if len(sizes) == len(value.shape) else None


_WHOLE = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _evaluate(node: ir.Node, feeds: dict[str, Array], opset: int) -> list[Array]:
    make = onnx.helper
    inputs = [
        make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=v.name or "") for v in node.outputs if v.name]
    graph = make.make_graph([ir.serde.serialize_node(node)], "node", inputs, outputs)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)], ir_version=10)
    return [np.asarray(a) for a in onnx.reference.ReferenceEvaluator(model).run(None, feeds)]
