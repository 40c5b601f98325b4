"""Operators in half precision for which a device has no kernel: they compute between Casts.

On the CPU, onnxruntime computes almost nothing in half precision. So an operator there gets its
inputs as float32, and its outputs are rounded to the half type: the numbers are those of a kernel
that sums up in float32, as those of a GPU do.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxfit.graph.values import GraphBuilder

FLOAT = ir.DataType.FLOAT
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

# Operators for which CUDA has kernels in both half types, and those for float16 alone.
# tests/step/test_half_kernels.py looks them up in the tables of onnxruntime's kernels.
_IN_BOTH = """Add Cast Concat Div Expand Flatten Gather Gemm Identity MatMul Mul Neg ReduceSum Relu
    Reshape Sigmoid Slice Split Sqrt Squeeze Sub Sum Tanh Transpose Unsqueeze Where"""
_IN_FLOAT16 = "Abs AveragePool Clip Conv ConvTranspose GlobalAveragePool MaxPool Pad ReduceMean"
# Kind of device -> half type -> operators that compute in it; all others compute between Casts.
KERNELS: Mapping[str, Mapping[ir.DataType, frozenset[str]]] = {
    "cuda": {
        ir.DataType.BFLOAT16: frozenset(_IN_BOTH.split()),
        ir.DataType.FLOAT16: frozenset([*_IN_BOTH.split(), *_IN_FLOAT16.split()]),
    }
}


def use_half_kernels(op: GraphBuilder) -> None:
    """Put Casts around each node in half precision that the builder's device cannot run, in place.

    Bodies of If, Loop and Scan are in float32.
    """
    kernels = KERNELS.get(op.device, {})
    wide: dict[ir.Value, ir.Value] = {}  # value in half precision -> the same as float32
    for node in list(op.graph):
        values = (*node.inputs, *node.outputs)
        half = next((v.dtype for v in values if v is not None and v.dtype in HALVES), None)
        if half is None or node.op_type == "Cast" or node.op_type in kernels.get(half, ()):
            continue
        _widen_inputs(op, node, wide)
        _round_outputs(op, node)


def _widen_inputs(op: GraphBuilder, node: ir.Node, wide: dict[ir.Value, ir.Value]) -> None:
    """Let a node read its inputs as float32; each value in half precision is cast once."""
    with op.replacing(node):
        for i, value in enumerate(node.inputs):
            if value is None or value.dtype not in HALVES:
                continue
            if value not in wide:
                wide[value] = op.cast(op.wrap(value), FLOAT.numpy()).ir
            node.replace_input_with(i, wide[value])


def _round_outputs(op: GraphBuilder, node: ir.Node) -> None:
    """Let a node compute its outputs in float32, and round them to their type behind it."""
    for value in node.outputs:
        half = value.dtype
        if half not in HALVES or not value.name:
            continue
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(half))])
        cast.name = op.unique_name(f"{node.name}/Cast")
        rounded = cast.outputs[0]
        rounded.type, rounded.shape = value.type, value.shape
        value.type = ir.TensorType(FLOAT)  # not `value.dtype`: values share the object
        value.replace_all_uses_with(rounded, replace_graph_outputs=True)
        cast.replace_input_with(0, value)
        rounded.name = value.name
        value.name = op.unique_name(f"{value.name}/exact")
        op.graph.insert_after(node, cast)
