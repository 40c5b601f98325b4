"""The opset for which onnxruntime has kernels on CUDA, for integers on the CPU, and of new files.

A kernel without an upper bound runs only the version of its operator that it was written for. When
ONNX accepts a further element type, the operator has a new version, and onnxruntime computes it on
the CPU until the same kernel is registered again. In opset 21, CUDA has no Cast, Reshape or
Transpose up to onnxruntime 1.20, and no Identity, Flatten, Pad or Scan up to 1.24. In opset 18, it
has all of them. scripts/cuda_kernels.py compares. On the CPU, onnxruntime 1.19 has no kernel of
opset 21 for QLinearMatMul, into which it fuses the MatMul of a quantized file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx

from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.operator_versions import is_the_same, types_in

KERNEL_OPSET = 18
# Form of Gelu, which is newer than KERNEL_OPSET -> onnxruntime's own operator for it.
GELUS = {b"none": "Gelu", b"tanh": "FastGelu"}


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
    types = dict(types_in(graph))
    return all(
        _is_gelu(node) or is_the_same(node, opset, KERNEL_OPSET, types) for node in nodes_of(graph)
    )
