"""Kernels in half precision: what a device has none for computes between Casts."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxfit.graph.values import GraphBuilder
from onnxfit.runtime.kernel_opset import KERNEL_OPSET
from onnxfit.step.half_kernels import KERNELS, use_half_kernels
from scripts import cuda_kernels

TYPES = {ir.DataType.BFLOAT16: "bfloat16", ir.DataType.FLOAT16: "float16"}


@pytest.mark.parametrize("half", TYPES, ids=TYPES.get)
def test_cuda_has_the_kernels_of_the_table(half: ir.DataType) -> None:
    for version, kernels in cuda_kernels.tables().items():
        for operator in KERNELS["cuda"][half]:
            since = onnx.defs.get_schema(operator, KERNEL_OPSET).since_version
            found = [k for k in kernels["", operator] if k.is_for(since)]
            assert any(
                TYPES[half] in types for kernel in found for types in kernel.types.values()
            ), f"onnxruntime {version} has no {operator} in {TYPES[half]}"


def built(device: str) -> ir.Graph:
    """z = Tan(half(x)) + half(x), in bfloat16 throughout."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = GraphBuilder(graph, device=device)
    x = op.cast(op.input("x", np.float32, (3,)), ir.DataType.BFLOAT16.numpy())
    tangent = op.Tan(op.cast(x, np.float32))
    half = op.cast(tangent, x.dtype)
    op.output("z", op.Add(half, x))
    use_half_kernels(op)
    return graph


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_node_computes_in_half_precision_only_where_the_device_can(device: str) -> None:
    graph = built(device)
    (add,) = (node for node in graph if node.op_type == "Add")
    expected = ir.DataType.BFLOAT16 if device == "cuda" else ir.DataType.FLOAT
    assert {v.dtype for v in (*add.inputs, *add.outputs) if v is not None} == {expected}
    (z,) = graph.outputs
    assert (z.name, z.dtype) == ("z", ir.DataType.BFLOAT16)
    onnx.checker.check_model(ir.to_proto(ir.Model(graph, ir_version=10)), full_check=True)
