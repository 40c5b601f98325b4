"""The operators that quantized models have, and the constants that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

import numpy as np
import onnx
import onnx_ir as ir

from onnxfit.errors import ModelError
from onnxfit.graph.index import constant_of
from onnxfit.graph.quantized import WEIGHT_INPUTS
from onnxfit.graph.shared_tensors import ir_tensor
from onnxfit.load.completion import MICROSOFT
from onnxfit.trainable.quantized.parameters import LIMITS, Array, QuantizationParameters

Node = Union[onnx.NodeProto, ir.Node]

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
QUANTIZERS = (QUANTIZE, DEQUANTIZE)
DOMAINS = ("", "ai.onnx", MICROSOFT)  # with QuantizeLinear and DequantizeLinear
OPSET_OF_CHANNELS = 13  # the first opset with a scale for each channel
# Activations that quantizers remove, because clipping to integers does the same
CLIPPING = {"Clip", "Relu"}
# Suffixes of the names of weights, from onnxruntime's quantizers. `quantize_dynamic` transposes the
# weight of a Gemm with transB.
SUFFIX = "_quantized"
TRANSPOSED = "_Transposed"


def is_quantize(node: Node) -> bool:
    """Return whether a node is a QuantizeLinear, with its inputs and its output."""
    return _is(QUANTIZE, node)


def is_dequantize(node: Node) -> bool:
    """Return whether a node is a DequantizeLinear, with its inputs and its output."""
    return _is(DEQUANTIZE, node)


def _is(operator: str, node: Node) -> bool:
    if node.op_type != operator or node.domain not in DOMAINS:
        return False
    if isinstance(node, ir.Node):
        return len(node.inputs) >= 2 and len(node.outputs) == 1
    return len(node.input) >= 2 and len(node.output) == 1  # no checker covers com.microsoft


def is_dynamic_quantize(node: Node) -> bool:
    """Return whether a node is a DynamicQuantizeLinear, which computes its own scale."""
    return node.op_type == "DynamicQuantizeLinear" and node.domain in DOMAINS


def is_conversion(node: Node) -> bool:
    """Return whether a node is a QuantizeLinear or a DequantizeLinear."""
    return is_quantize(node) or is_dequantize(node)


def computes_with_integers(node: onnx.NodeProto) -> bool:
    """Return whether a node computes with quantized values, such as a QLinearConv."""
    if is_conversion(node):
        return False
    kind = node.op_type
    return kind in WEIGHT_INPUTS or kind.startswith(("QLinear", "QGemm", "DynamicQuantize"))


def is_quantized(node: onnx.NodeProto) -> bool:
    """Return whether a node converts floats to integers, or computes with integers."""
    return is_conversion(node) or computes_with_integers(node)


def numbers_of(tensor: onnx.TensorProto) -> Array:
    """Return the numbers of a tensor; integers have 64 bits."""
    array = np.asarray(ir_tensor(tensor).numpy())
    return array.astype(np.int64) if tensor.data_type in LIMITS else array


def wrong_type(node: onnx.NodeProto, element_type: int) -> ModelError:
    """Return the error for a node that reads integers or a scale of an unsupported type."""
    known = onnx.TensorProto.DataType
    name = known.Name(element_type) if element_type in known.values() else element_type
    return ModelError(
        f"{node.op_type} {node.name!r} has a tensor of type {name}. Expected integers of 4, 8, 16"
        " or 32 bits, and float scales. Quantize the float model again."
    )


def integer_type(zero_point: int, attributes: Mapping[str, int], default: int = 0) -> int:
    """Return the type of the integers of a QuantizeLinear or DequantizeLinear.

    - `zero_point`: the type of its zero point; 0 for none.
    - `attributes`: the node's whole numbers.
    - `default`: the type if neither tells it; 0 stands for that of QuantizeLinear, uint8.
    """
    return zero_point or attributes.get("output_dtype", 0) or default or int(onnx.TensorProto.UINT8)


def is_text(array: Array) -> bool:
    """Return whether the tensor of an array has strings."""
    return array.dtype.kind in "OSU"


def misfit(node: ir.Node, reason: str) -> ModelError:
    """Return the error for a node whose parameters do not fit its values."""
    return ModelError(
        f"The scale or the zero point of {node.op_type} {node.name!r} does not fit its values:"
        f" {reason}."
    )


def parameters_of(node: ir.Node, element_type: int = 0) -> QuantizationParameters | None:
    """Return the parameters of a QuantizeLinear or DequantizeLinear; None if they are computed.

    - `element_type`: the type of the integers, if neither the zero point nor an attribute has it;
      0 stands for the default of QuantizeLinear, uint8.

    ModelError: the scale or the zero point contains strings.
    """
    scale, zero_point = (constant_of(value) for value in [*node.inputs, None][1:3])
    has_zero_point = len(node.inputs) > 2 and node.inputs[2] is not None
    if scale is None or (has_zero_point and zero_point is None):
        return None
    attributes = {
        name: a.as_int() for name, a in node.attributes.items() if a.type == ir.AttributeType.INT
    }
    if any(array is not None and is_text(array) for array in (scale, zero_point)):
        raise misfit(node, "it is a string")
    own = 0 if zero_point is None else int(ir.DataType.from_numpy(zero_point.dtype))
    element_type = integer_type(own, attributes, element_type)
    return QuantizationParameters.of(scale, zero_point, element_type, attributes)
