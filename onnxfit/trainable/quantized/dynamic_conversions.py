"""Conversions of the operators that quantize their input when the model runs; see `qoperators`."""

from __future__ import annotations

import onnx

from onnxfit.load.completion import MICROSOFT
from onnxfit.trainable.quantized.conversion import NotConvertibleError, QdqBuilder, conversion
from onnxfit.trainable.quantized.qlinear_conversions import column_axis

# operators that move integers without changing their quantization
_MOVING = {"Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}


@conversion("MatMulInteger")
@conversion("ConvInteger")
def convert_product(op: QdqBuilder) -> None:
    """Cast(a ∘ b) times both scales, ∘ being a product of matrices or a convolution.

    The nodes that multiply by the scales are replaced as well. The scale of an operand that the
    model quantizes is known from the quantizing node; the other scale belongs to the weights. Where
    both operands are initializers, or rows of one, the scales are in the order of the operands, as
    onnxruntime's tool writes them; in either order, their product is the same.
    """
    a, b, a_zero, b_zero = op.inputs(4)
    is_matmul = op.node.op_type == "MatMulInteger"
    y, scales = _scaled_output(op)
    computed = [_computed_scale(op, name) for name in (a, b)]
    constant = list(scales)
    for scale in computed:
        if scale in constant:
            constant.remove(scale)
    if len(constant) != computed.count(None):
        raise NotConvertibleError("its output is not multiplied by the scales of its operands")
    axes = (None, column_axis(op, b) if is_matmul else None)
    real = [
        op.dequantize_by(name, scale, zero)
        if scale is not None
        else op.dequantize(name, constant.pop(0), zero, axis=axis)
        for name, scale, zero, axis in zip((a, b), computed, (a_zero, b_zero), axes)
    ]
    op.apply("MatMul" if is_matmul else "Conv", *real, output=y)


@conversion("MatMulIntegerToFloat", MICROSOFT)
def convert_product_to_float(op: QdqBuilder) -> None:
    """A MatMulInteger that multiplies by the scales and adds a float bias itself."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = op.inputs(7)
    if op.graph.array(a_scale) is not None:
        left = op.dequantize(a, a_scale, a_zero)
    elif _computed_scale(op, a) == a_scale:
        left = op.dequantize_by(a, a_scale, a_zero)
    else:
        raise NotConvertibleError(f"the origin of the scale {a_scale!r} of {a!r} is unknown")
    _matmul(op, left, op.dequantize(b, b_scale, b_zero, axis=column_axis(op, b)), bias)


@conversion("DynamicQuantizeMatMul", MICROSOFT)
def convert_dynamic_matmul(op: QdqBuilder) -> None:
    """A MatMulIntegerToFloat that quantizes its left operand itself."""
    a, b, b_scale, b_zero, bias = op.inputs(5)
    left = _round_dynamically(op, a)
    _matmul(op, left, op.dequantize(b, b_scale, b_zero, axis=column_axis(op, b)), bias)


@conversion("DynamicQuantizeLSTM", MICROSOFT)
def convert_lstm(op: QdqBuilder) -> None:
    """Weights have the shape (directions, inputs, 4 hidden), and scales for their directions.

    A weight of one direction may have a scale for each column instead, of shape (1, 4 hidden).
    The operator also quantizes the hidden state before each step; a float LSTM does not.
    """
    x, w, r, *others = op.inputs(8)
    w_scale, w_zero, r_scale, r_zero = op.inputs(12)[8:]
    weights = [
        op("Transpose", _dequantized_weight(op, *quantized), perm=[0, 2, 1])
        for quantized in ((w, w_scale, w_zero), (r, r_scale, r_zero))
    ]
    inputs = (_round_dynamically(op, x), *weights, *others)
    op.add("LSTM", inputs, list(op.node.output), **op.attributes)


def _dequantized_weight(op: QdqBuilder, weight: str, scale: str, zero_point: str) -> str:
    """Return a weight of an LSTM in floats."""
    scales, zeros = op.graph.array(scale), op.graph.array(zero_point)
    if scales is None or scales.ndim != 2 or scales.dtype.kind != "f":
        return op.dequantize(weight, scale, zero_point, axis=0)
    if len(scales) > 1:
        raise NotConvertibleError(
            f"its weight {weight!r} has a scale for each column of each of {len(scales)}"
            " directions, but DequantizeLinear takes scales along one axis. Quantize it with"
            " per_channel=False"
        )
    if zero_point and (zeros is None or zeros.size != scales.size or zeros.dtype.kind not in "iu"):
        raise NotConvertibleError(
            f"the zero point {zero_point!r} of {weight!r} is not a constant with the"
            f" {scales.size} integers that its scale needs"
        )
    scale = op.initializer(f"{scale}/columns", scales.reshape(-1))
    if zeros is not None:
        zero_point = op.initializer(f"{zero_point}/columns", zeros.reshape(-1))
    return op.dequantize_by(weight, scale, zero_point, axis=2)


def _scaled_output(op: QdqBuilder) -> tuple[str, list[str]]:
    """Return the output times both scales, and the scales; note the nodes that compute it.

    The nodes are Cast, and one Mul by the product of the scales or two by a scale each.
    """
    cast = op.graph.only_reader(op.node.output[0])
    targets = [a.i for a in cast.attribute if a.name == "to"] if cast is not None else []
    if cast is None or cast.op_type != "Cast" or targets != [onnx.TensorProto.FLOAT]:
        raise NotConvertibleError("its output does not go into one Cast to float32")
    op.replaced.append(cast)
    y = cast.output[0]
    scales: list[str] = []
    while len(scales) < 2:
        multiply = op.graph.only_reader(y)
        if multiply is None or multiply.op_type != "Mul":
            raise NotConvertibleError("its output is not multiplied by two scales")
        factor = next((name for name in multiply.input if name != y), "")
        producer = op.graph.producers.get(factor)
        if producer is not None and producer.op_type == "Mul" and len(producer.input) == 2:
            scales += producer.input
            op.bypassed.append(producer)
        else:
            scales.append(factor)
        op.replaced.append(multiply)
        y = multiply.output[0]
    return y, scales


def _computed_scale(op: QdqBuilder, name: str) -> str | None:
    """Return the scale of a value that the model quantizes; None for an initializer or its rows.

    The scale is one number, as DynamicQuantizeLinear always computes one.
    """
    if name in op.graph.tensors or op.graph.gather_of_initializer(name) is not None:
        return None
    node = op.graph.origin(name, _MOVING)
    if node is not None and node.op_type == "DynamicQuantizeLinear" and len(node.output) == 3:
        return str(node.output[1])
    # a QuantizeLinear per channel has an axis
    if (
        node is not None
        and node.op_type == "QuantizeLinear"
        and not node.attribute
        and len(node.input) > 1
    ):
        return str(node.input[1])
    raise NotConvertibleError(f"the scale of {name!r} is unknown")


def _round_dynamically(op: QdqBuilder, x: str) -> str:
    names = [op.unique_name(f"{x}/{part}") for part in ("quantized", "scale", "zero_point")]
    q, scale, zero_point = op.add("DynamicQuantizeLinear", (x,), names)
    return op.dequantize_by(q, scale, zero_point)


def _matmul(op: QdqBuilder, left: str, right: str, bias: str) -> None:
    y = op.node.output[0]
    if bias:
        op("Add", op("MatMul", left, right), bias, output=y)
    else:
        op("MatMul", left, right, output=y)
