"""Find integer weights that training does not change.

Integers that can be written behind DequantizeLinear are trained: trainable/quantized converts them
to floats before a model reaches this module.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxfit.errors import warn_user

MAX_NAMES = 5
SMALL_INTEGERS = {
    ir.DataType.INT4,
    ir.DataType.UINT4,
    ir.DataType.INT8,
    ir.DataType.UINT8,
}
# operator -> the inputs that are weights if they are initializers of small integers
WEIGHT_INPUTS: dict[str, tuple[int, ...]] = {
    "ConvInteger": (1,),
    "DequantizeLinear": (0,),
    "DynamicQuantizeLSTM": (1, 2),
    "DynamicQuantizeMatMul": (1,),
    "GatherBlockQuantized": (0,),
    "MatMulBnb4": (1,),
    "MatMulInteger": (1,),
    "MatMulIntegerToFloat": (1,),
    "MatMulNBits": (1,),
    "QAttention": (1,),
    "QGemm": (3,),
    "QLinearConv": (3,),
    "QLinearMatMul": (0, 3),
}
REMEDY = (
    "Fix: train the float model, and quantize it afterwards (onnxfit.dequantize converts a model"
    " with DequantizeLinear to floats). For MatMulNBits, train the integers with"
    " quantization=onnxfit.Quantization(), or their scales with weights=. Or train float weights"
    " in addition to the integers, such as adapters"
)


def quantized_weights(model: ir.Model) -> list[str]:
    """Return the initializers of small integers that are weights, in the model's order."""
    return [
        name
        for name, value in model.graph.initializers.items()
        if value.dtype in SMALL_INTEGERS and value.shape is not None and len(value.shape)
        if any(use.idx in WEIGHT_INPUTS.get(use.node.op_type, ()) for use in value.uses())
    ]


def describe_quantized(names: list[str]) -> str:
    """Return a sentence that lists at most five integer weights, and how to train the model."""
    listed = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        listed += f", … ({len(names)} in all)"
    return (
        f"The model is quantized: its weights {listed} are integers, which training does not"
        f" change. {REMEDY}."
    )


def warn_of_quantized(model: ir.Model) -> None:
    """Warn of integer weights that training does not change."""
    names = quantized_weights(model)
    if names:
        warn_user(describe_quantized(names))
