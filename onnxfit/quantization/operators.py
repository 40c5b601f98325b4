"""The operators that quantized models have."""

from __future__ import annotations

import onnx

from onnxfit.graph.quantized import WEIGHT_INPUTS

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
DOMAINS = ("", "ai.onnx", "com.microsoft")  # that have both


def is_conversion(node: onnx.NodeProto) -> bool:
    """Return whether a node is a QuantizeLinear or a DequantizeLinear."""
    return node.op_type in (QUANTIZE, DEQUANTIZE) and node.domain in DOMAINS


def computes_with_integers(node: onnx.NodeProto) -> bool:
    """Return whether a node computes with quantized values, such as a QLinearConv."""
    if is_conversion(node):
        return False
    kind = node.op_type
    return kind in WEIGHT_INPUTS or kind.startswith(("QLinear", "QGemm", "DynamicQuantize"))


def is_quantized(node: onnx.NodeProto) -> bool:
    """Return whether a node makes integers of floats, or computes with them."""
    return is_conversion(node) or computes_with_integers(node)
