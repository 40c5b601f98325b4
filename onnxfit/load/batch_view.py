"""The view of a model in which the batch is the first axis of each input and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from onnxfit.graph.names import unused
from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.subgraphs import graph_protos
from onnxfit.load.batch_axis import BatchLayout

AXES_AS_INPUT = 13  # the first opset whose Unsqueeze reads the axes


def batch_first(model: onnx.ModelProto, layout: BatchLayout) -> onnx.ModelProto:
    """Return the model with the batch on the first axis of each input and output that has rows.

    An output without rows, which is not a number, gets a first axis of size 1. A Transpose or
    Unsqueeze at the edge of the graph restores the layout of the file inside.

    - `model`: the model, which stays unchanged; it is returned itself if nothing moves.
    - `layout`: the result of `layout_of`.
    """
    if not layout.changes_graph:
        return model
    view = onnx.ModelProto()
    view.CopyFrom(model)
    graph = view.graph
    used = {name for node in graph.node for name in (*node.input, *node.output)}
    moved = {n: one for n, one in layout.inputs.items() if one.axis} | layout.moved_outputs
    inner = {name: unused(f"{name}/in_file", used.__contains__) for name in moved}
    _rename_values(graph, inner)
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    before, after = [], []
    for value in graph.input:
        if value.name in moved:
            perm = _permutation(moved[value.name].spec)
            _declare(value, moved[value.name].spec)
            back = [int(i) for i in np.argsort(perm)]
            before.append(_transpose(value.name, inner[value.name], back))
    for value in graph.output:
        if value.name not in moved:
            continue
        spec = moved[value.name].spec
        _declare(value, spec)
        if spec.batch_axis is None:
            after += _unsqueeze(inner[value.name], value.name, opset)
        else:
            after.append(_transpose(inner[value.name], value.name, _permutation(spec)))
    replace_nodes(graph, [*before, *graph.node, *after])
    return view


def _rename_values(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Rename values inside a graph and its subgraphs, but not its inputs and outputs, in place."""
    for one in graph_protos(graph):
        for node in one.node:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
        for value in one.value_info if one is graph else (*one.value_info, *one.output):
            value.name = renamed.get(value.name, value.name)


def _permutation(spec: TensorSpec) -> list[int]:
    """Return the axes of the file in the order of the view."""
    assert spec.shape is not None
    others = [axis for axis in range(len(spec.shape)) if axis != spec.batch_axis]
    return [spec.batch_axis or 0, *others]


def _declare(value: onnx.ValueInfoProto, spec: TensorSpec) -> None:
    """Declare the shape of a value in the view, in place."""
    first = spec.rows_first().shape
    if first is None:
        return
    del value.type.tensor_type.shape.dim[:]
    for size in first if spec.batch_axis is not None else (1, *first):
        dim = value.type.tensor_type.shape.dim.add()
        if isinstance(size, int):
            dim.dim_value = size
        elif size is not None:
            dim.dim_param = size


def _transpose(source: str, result: str, perm: Sequence[int]) -> onnx.NodeProto:
    return onnx.helper.make_node("Transpose", [source], [result], f"{result}/layout", perm=perm)


def _unsqueeze(source: str, result: str, opset: int) -> list[onnx.NodeProto]:
    name = f"{result}/layout"
    if opset < AXES_AS_INPUT:
        return [onnx.helper.make_node("Unsqueeze", [source], [result], name, axes=[0])]
    axes = onnx.numpy_helper.from_array(np.zeros(1, np.int64))
    constant = onnx.helper.make_node("Constant", [], [f"{name}/axes"], f"{name}/axes", value=axes)
    node = onnx.helper.make_node("Unsqueeze", [source, f"{name}/axes"], [result], name)
    return [constant, node]
