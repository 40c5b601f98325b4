"""The opset for which onnxruntime has kernels on CUDA, for integers on the CPU, and of new files.

A kernel without an upper bound runs only the version of its operator that it was written for. When
ONNX accepts a further element type, the operator has a new version, and onnxruntime computes it on
the CPU until the same kernel is registered again. In opset 21, CUDA has no Cast, Reshape or
Transpose up to onnxruntime 1.20, and no Identity, Flatten, Pad or Scan up to 1.24. In opset 18, it
has all of them. scripts/cuda_kernels.py compares. On the CPU, onnxruntime 1.19 has no kernel of
opset 21 for QLinearMatMul, into which it fuses the MatMul of a quantized file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx

from onnxfit.graph.inference import find_schema
from onnxfit.graph.subgraphs import nodes_of, subgraph_protos

KERNEL_OPSET = 18
# Operators whose later versions compute different results from the same inputs and attributes.
CHANGED = {"DFT", "GridSample", "GroupNormalization"}
# Form of Gelu, which is newer than KERNEL_OPSET -> onnxruntime's own operator for it.
GELUS = {b"none": "Gelu", b"tanh": "FastGelu"}

Types = Mapping[str, str]  # value -> element type, as schemas spell it


@contextmanager
def kernel_opset(model: onnx.ModelProto) -> Iterator[None]:
    """Write the model in KERNEL_OPSET inside the block, without a copy of tensors.

    A model stays unchanged if a node has no equivalent in that opset.
    """
    opsets = list(model.opset_import)
    newest = next((o.version for o in opsets if o.domain in ("", "ai.onnx")), KERNEL_OPSET)
    if newest <= KERNEL_OPSET or model.functions or not _has_equal(model.graph, newest):
        yield
        return
    gelus = [node for node in nodes_of(model.graph) if _is_gelu(node)]
    before = [onnx.NodeProto.FromString(node.SerializeToString()) for node in gelus]
    for node in gelus:
        form = next((a.s for a in node.attribute if a.name == "approximate"), b"none")
        node.op_type, node.domain = GELUS[form], "com.microsoft"
        del node.attribute[:]
    versions = {o.domain: o.version for o in opsets} | {"": KERNEL_OPSET, "com.microsoft": 1}
    versions.pop("ai.onnx", None)
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*item) for item in versions.items())
    try:
        yield
    finally:
        for node, old in zip(gelus, before):
            node.CopyFrom(old)
        del model.opset_import[:]
        model.opset_import.extend(opsets)


def _is_gelu(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gelu" and node.domain in ("", "ai.onnx")


def _has_equal(graph: onnx.GraphProto, opset: int) -> bool:
    """Return whether KERNEL_OPSET can express every node of a graph in `opset`."""
    types = dict(_types_in(graph))
    return all(
        _is_the_same(node, opset, types)
        for node in nodes_of(graph)
        if node.domain in ("", "ai.onnx") and not _is_gelu(node)
    )


def _is_the_same(node: onnx.NodeProto, opset: int, types: Types) -> bool:
    """Return whether a node means the same in KERNEL_OPSET as in `opset`."""
    new = find_schema("", node.op_type, opset)
    old = find_schema("", node.op_type, KERNEL_OPSET)
    if new is None or old is None:
        return new is old  # both None: onnxruntime's own operator, in every opset
    if new.since_version == old.since_version:
        return True
    return (
        node.op_type not in CHANGED
        and all(attribute.name in old.attributes for attribute in node.attribute)
        and len(node.input) <= old.max_input
        and len(node.output) <= old.max_output
        and _accepts(old.inputs, node.input, types)
        and _accepts(old.outputs, node.output, types)
    )


def _accepts(
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter], values: Sequence[str], types: Types
) -> bool:
    """Return whether the element types of values are among those of a schema's parameters."""
    if not values:
        return True
    # The last parameter of a variadic operator takes all remaining values.
    padded = [*parameters, *list(parameters[-1:]) * (len(values) - len(parameters))]
    return all(
        not name or types.get(name) in parameter.types for name, parameter in zip(values, padded)
    )


def _types_in(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yield each value of a graph and of its subgraphs with its type, as schemas spell it."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, _spelled(value.type)
    for tensor in graph.initializer:
        yield tensor.name, _tensor(tensor.data_type)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in subgraph_protos(attribute):
                yield from _types_in(inner)


def _spelled(type_: onnx.TypeProto) -> str:
    if type_.HasField("sequence_type"):
        return f"seq({_spelled(type_.sequence_type.elem_type)})"
    if type_.HasField("optional_type"):
        return f"optional({_spelled(type_.optional_type.elem_type)})"
    return _tensor(type_.tensor_type.elem_type)


def _tensor(element_type: int) -> str:
    return f"tensor({onnx.TensorProto.DataType.Name(element_type).lower()})"
