"""The oldest opset in which an operator means the same.

Most versions of an operator differ only in the element types that it accepts. A node whose
attributes and types an older version has means the same there, so its model can be written in the
older opset, which more runtimes read and for which they have more kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import onnx

from onnxfit.graph.inference import find_schema
from onnxfit.graph.subgraphs import nodes_of, subgraph_protos

# Operator -> the version from which on it computes different results from the same inputs and
# attributes.
CHANGED = {"DFT": 20, "GridSample": 20, "GroupNormalization": 21}
FLOAT_MODULO = 28  # from this version on, Mod of floats also rounds the quotient down
# From this version on, ONNX gives pools with `ceil_mode` no window that starts behind the elements.
# onnxruntime never does, but the sizes that ONNX infers for older versions count such windows.
WINDOWS_START_INSIDE = 22

Types = Mapping[str, onnx.TypeProto]  # value -> type


def oldest_opset(node: onnx.NodeProto, opset: int, types: Types, oldest: int) -> int:
    """Return the oldest opset from `oldest` to `opset` in which a node of `opset` means the same.

    - `types`: the types of the values around the node. A value without a type keeps the opset.
    """
    candidates = range(oldest, opset)
    return next((v for v in candidates if is_the_same(node, opset, v, types)), opset)


def is_the_same(node: onnx.NodeProto, opset: int, older: int, types: Types) -> bool:
    """Return whether a node of `opset` means the same in an older opset.

    True for operators that ONNX does not define: onnxruntime has them in every opset.
    """
    if node.domain not in ("", "ai.onnx"):
        return True
    new = find_schema("", node.op_type, opset)
    old = find_schema("", node.op_type, older)
    if new is None or old is None:
        return new is old
    if new.since_version == old.since_version:
        return True
    return (
        not old.since_version < CHANGED.get(node.op_type, 0) <= new.since_version
        and not (older < FLOAT_MODULO and _rounds_down_floats(node, types))
        and not (older < WINDOWS_START_INSIDE <= opset and _may_start_behind(node))
        and all(attribute.name in old.attributes for attribute in node.attribute)
        and len(node.input) <= old.max_input
        and len(node.output) <= old.max_output
        and _accepts(_input_types(node.op_type, older), node.input, types)
        and _accepts(_output_types(node.op_type, older), node.output, types)
    )


def types_in(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    """Yield each typed value of a graph and of its subgraphs with its type."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, value.type
    for tensor in graph.initializer:
        yield tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in subgraph_protos(attribute):
                yield from types_in(inner)


def set_opset(model: onnx.ModelProto, opset: int) -> None:
    """Declare another opset for a model whose nodes all mean the same in it, in place."""
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx"):
            imported.version = opset


def lower_opset(model: onnx.ModelProto, opset: int, oldest: int) -> None:
    """Write a typed model of `opset` in the oldest opset from `oldest` on that has its operators.

    The model is changed in place.
    """
    if opset <= oldest:
        return
    types = dict(types_in(model.graph))
    nodes = nodes_of(model.graph)
    set_opset(model, max((oldest_opset(n, opset, types, oldest) for n in nodes), default=oldest))


def _rounds_down_floats(node: onnx.NodeProto, types: Types) -> bool:
    if node.op_type != "Mod" or any(a.name == "fmod" and a.i for a in node.attribute):
        return False
    type_ = types.get(node.input[0])
    return type_ is None or "float" in _spelled(type_) or "double" in _spelled(type_)


# ONNX copies the parameters of a schema, with all their types, whenever they are read.
@cache
def _input_types(op_type: str, opset: int) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(p.types) for p in onnx.defs.get_schema(op_type, opset, "").inputs)


@cache
def _output_types(op_type: str, opset: int) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(p.types) for p in onnx.defs.get_schema(op_type, opset, "").outputs)


def _may_start_behind(node: onnx.NodeProto) -> bool:
    """Return whether the rounded number of windows of a pool may add one behind the elements.

    The last window starts before the end of the padding, less a kernel, plus a stride.
    """
    if node.op_type not in ("AveragePool", "LpPool", "MaxPool"):
        return False
    attributes = {a.name: a.i or list(a.ints) for a in node.attribute if a.name != "auto_pad"}
    kernel = attributes.get("kernel_shape", [])
    if not attributes.get("ceil_mode") or not isinstance(kernel, list):
        return False
    ones = [1] * len(kernel)
    strides = attributes.get("strides") or ones
    dilations = attributes.get("dilations") or ones
    ends = (attributes.get("pads") or [0] * len(kernel) * 2)[len(kernel) :]
    return any(s + p > (k - 1) * d + 1 for k, s, d, p in zip(kernel, strides, dilations, ends))


def _accepts(parameters: Sequence[frozenset[str]], values: Sequence[str], types: Types) -> bool:
    """Return whether the element types of values are among those of an operator's parameters."""
    if not values:
        return True
    # The last parameter of a variadic operator takes all remaining values.
    padded = [*parameters, *list(parameters[-1:]) * (len(values) - len(parameters))]
    return all(
        not name or (name in types and _spelled(types[name]) in accepted)
        for name, accepted in zip(values, padded)
    )


def _spelled(type_: onnx.TypeProto) -> str:
    """Return a type as schemas spell it."""
    if type_.HasField("sequence_type"):
        return f"seq({_spelled(type_.sequence_type.elem_type)})"
    if type_.HasField("optional_type"):
        return f"optional({_spelled(type_.optional_type.elem_type)})"
    name = onnx.TensorProto.DataType.Name(type_.tensor_type.elem_type)
    return f"tensor({name.lower()})"
