"""The right outputs of a step: its graph in float64, computed by ONNX's reference implementation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, GraphProto, TensorProto
from onnx.numpy_helper import from_array, to_array
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]
Feeds = dict[str, Array]
FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def reference_outputs(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Feeds:
    """Return the outputs in float64 of a model in float32 or half precision."""
    wide = in_forward_scans(model)
    _widen(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
    wanted = {n: _wide(a) for n, a in feeds.items()}
    names = [value.name for value in wide.graph.output]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return dict(zip(names, ReferenceEvaluator(wide).run(None, wanted)))


def _wide(array: Array) -> Array:
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return array.astype(np.float64) if is_float else array


def _widen(graph: GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(graph.node)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(from_array(to_array(tensor).astype(np.float64), tensor.name))


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _widen(attribute.g)
            elif attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.name in ("to", "dtype", "output_dtype") and attribute.i in FLOATS:
                attribute.i = TensorProto.DOUBLE


def in_forward_scans(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which each Scan goes forward, over reversed tensors.

    The reference implements no other direction.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    nodes = []
    for node in graph.node:
        attributes = {a.name: a for a in node.attribute}
        given, made = (attributes.get(f"scan_{k}_directions") for k in ("input", "output"))
        if node.op_type != "Scan" or not (given or made):
            nodes.append(node)
            continue
        scanned = attributes["num_scan_inputs"].i
        states = len(node.input) - scanned
        after = []
        for offset, directions, names, beside in (
            (states, given, node.input, nodes),
            (states, made, node.output, after),
        ):
            for i, backward in enumerate(directions.ints if directions else ()):
                if backward:
                    name = names[offset + i]
                    reversed_name = f"{name}/reversed/{node.output[-1]}"
                    names[offset + i] = reversed_name
                    pair = (name, reversed_name) if beside is nodes else (reversed_name, name)
                    beside.append(_reversal(*pair))
        for attribute in (given, made):
            if attribute:
                node.attribute.remove(attribute)
        nodes += [node, *after]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    ends = (("first", -1), ("last", np.iinfo(np.int64).min + 1), ("axis", 0), ("backward", -1))
    graph.initializer.extend(
        from_array(np.array([value], np.int64), f"reversal/{name}") for name, value in ends
    )
    return copy


def _reversal(source: str, target: str) -> onnx.NodeProto:
    bounds = [f"reversal/{name}" for name in ("first", "last", "axis", "backward")]
    return onnx.helper.make_node("Slice", [source, *bounds], [target])
