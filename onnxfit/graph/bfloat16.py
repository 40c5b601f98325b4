"""Operators that take bfloat16 in later opsets than the one in which steps are built."""

from __future__ import annotations

import onnx
import onnx_ir as ir


def refuses_bfloat16(node: ir.Node, schema: onnx.defs.OpSchema) -> bool:
    """Return whether an operator that takes float16 gets bfloat16, which its schema lacks.

    Conv, MaxPool and others take bfloat16 from opset 22 on. A step in mixed precision has such
    nodes until they are computed between Casts.
    """
    if not any(v is not None and v.dtype == ir.DataType.BFLOAT16 for v in node.inputs):
        return False
    types = {type_ for parameter in schema.inputs for type_ in parameter.types}
    return "tensor(float16)" in types and "tensor(bfloat16)" not in types
