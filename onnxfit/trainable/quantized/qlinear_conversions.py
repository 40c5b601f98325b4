"""Conversions of the operators whose inputs and outputs have fixed scales; see `qoperators`."""

from __future__ import annotations

from onnxfit.load.completion import MICROSOFT
from onnxfit.trainable.quantized.conversion import (
    NotConvertibleError,
    QdqBuilder,
    conversion,
)

# From this opset on, Softmax normalizes along one axis. Before, it normalized over this axis and
# all later ones.
FIRST_OPSET_OF_SOFTMAX_ALONG_AXIS = 13


@conversion("QLinearConv")
@conversion("QLinearConv", MICROSOFT)
def convert_convolution(op: QdqBuilder) -> None:
    """Weights are quantized per tensor or per output channel."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = op.inputs(9)
    real = [
        op.dequantize(x, x_scale, x_zero),
        op.dequantize(w, w_scale, w_zero, axis=0),
        op.dequantize_bias(bias, x_scale, w_scale),
    ]
    if op.take("channels_last", 0):
        rank = _rank_of(op, w)
        y = _channels_last(
            op, op.apply("Conv", _channels_first(op, real[0], rank), *real[1:]), rank
        )
    else:
        y = op.apply("Conv", *real)
    op.quantize(y, y_scale, y_zero, like=x)


@conversion("QLinearMatMul")
@conversion("QLinearMatMul", MICROSOFT)
def convert_matmul(op: QdqBuilder) -> None:
    """The right operand is quantized per tensor or per column."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = op.inputs(8)
    right = op.dequantize(b, b_scale, b_zero, axis=column_axis(op, b))
    op.quantize(op("MatMul", op.dequantize(a, a_scale, a_zero), right), y_scale, y_zero, like=a)


@conversion("QGemm", MICROSOFT)
def convert_gemm(op: QdqBuilder) -> None:
    """y = alpha (A B + C): the integer bias is multiplied by alpha as well.

    If the output has no scale, it is a float.
    """
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = op.inputs(9)
    real = (
        op.dequantize(a, a_scale, a_zero),
        op.dequantize(b, b_scale, b_zero, axis=0 if op.attributes.get("transB") else 1),
        op.dequantize_bias(c, a_scale, b_scale),
    )
    if c and "alpha" in op.attributes:
        op.attributes["beta"] = op.attributes["alpha"]
    if not y_scale:
        op.apply("Gemm", *real, output=op.node.output[0])
    else:
        op.quantize(op.apply("Gemm", *real), y_scale, y_zero, like=a)


@conversion("QLinearAdd", MICROSOFT)
@conversion("QLinearMul", MICROSOFT)
def convert_arithmetic(op: QdqBuilder) -> None:
    a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero = op.inputs(8)
    real = op.dequantize(a, a_scale, a_zero), op.dequantize(b, b_scale, b_zero)
    op.quantize(op.apply(_float_operator(op), *real), c_scale, c_zero, like=a)


@conversion("QLinearLeakyRelu", MICROSOFT)
@conversion("QLinearSigmoid", MICROSOFT)
def convert_activation(op: QdqBuilder) -> None:
    x, x_scale, x_zero, y_scale, y_zero = op.inputs(5)
    y = op.apply(_float_operator(op), op.dequantize(x, x_scale, x_zero))
    op.quantize(y, y_scale, y_zero, like=x)


@conversion("QLinearSoftmax", MICROSOFT)
def convert_softmax(op: QdqBuilder) -> None:
    """The attribute `opset` says by which opset the axis is meant."""
    x, x_scale, x_zero, y_scale, y_zero = op.inputs(5)
    real = op.dequantize(x, x_scale, x_zero)
    if op.take("opset", FIRST_OPSET_OF_SOFTMAX_ALONG_AXIS) >= FIRST_OPSET_OF_SOFTMAX_ALONG_AXIS:
        y = op.apply("Softmax", real)
    else:
        rows = op("Flatten", real, axis=op.take("axis", 1))
        y = op("Reshape", op("Softmax", rows, axis=1), op("Shape", real))
    op.quantize(y, y_scale, y_zero, like=x)


@conversion("QLinearAveragePool", MICROSOFT)
@conversion("QLinearGlobalAveragePool", MICROSOFT)
def convert_average_pool(op: QdqBuilder) -> None:
    x, x_scale, x_zero, y_scale, y_zero = op.inputs(5)
    real = op.dequantize(x, x_scale, x_zero)
    if op.take("channels_last", 0):
        is_global = op.node.op_type == "QLinearGlobalAveragePool"
        rank = _rank_of(op, x) if is_global else _kernel_rank(op)
        y = op.apply(_float_operator(op), _channels_first(op, real, rank))
        y = _channels_last(op, y, rank)
    else:
        y = op.apply(_float_operator(op), real)
    op.quantize(y, y_scale, y_zero, like=x)


@conversion("NhwcMaxPool", MICROSOFT)
def convert_max_pool(op: QdqBuilder) -> None:
    """The integers of a maximum are the maximum of the integers, so they stay integers."""
    (x,) = op.inputs(1)
    rank = _kernel_rank(op)
    _channels_last(op, op.apply("MaxPool", _channels_first(op, x, rank)), rank, op.node.output[0])


@conversion("QLinearConcat", MICROSOFT)
def convert_concat(op: QdqBuilder) -> None:
    y_scale, y_zero, *inputs = op.inputs(max(5, len(op.node.input)))
    real = [op.dequantize(*inputs[i : i + 3]) for i in range(0, len(inputs) // 3 * 3, 3)]
    op.quantize(op.apply("Concat", *real), y_scale, y_zero, like=inputs[0])


@conversion("QLinearWhere", MICROSOFT)
def convert_where(op: QdqBuilder) -> None:
    condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = op.inputs(9)
    real = op.dequantize(x, x_scale, x_zero), op.dequantize(y, y_scale, y_zero)
    op.quantize(op("Where", condition, *real), z_scale, z_zero, like=x)


@conversion("DequantizeLinear")
def convert_gathered(op: QdqBuilder) -> None:
    """D(Gather(table, indices)) is Gather(D(table), indices), if the table has one scale."""
    x, scale, zero_point = op.inputs(3)
    gather = op.graph.gather_of_initializer(x)
    scales = op.graph.array(scale)
    if gather is not None and scales is not None and scales.size == 1:
        op.gather(gather, scale, zero_point, output=op.node.output[0])


@conversion("QEmbedLayerNormalization", MICROSOFT)
def convert_embedding(op: QdqBuilder) -> None:
    """The three tables of embeddings, the scale and the bias are quantized; the output is not."""
    ids, segments, *tables, mask = op.inputs(8)
    names = op.inputs(18)
    real = [
        op.dequantize(*triple) if triple[0] or not is_optional else ""
        for is_optional, *triple in zip(
            (False, False, True, False, False), tables, names[8:13], names[13:18]
        )
    ]
    inputs = (ids, segments, *real, mask)
    outputs = list(op.node.output)
    op.add("EmbedLayerNormalization", inputs, outputs, MICROSOFT, **op.attributes)


@conversion("QAttention", MICROSOFT)
def convert_attention(op: QdqBuilder) -> None:
    """Input and weights are quantized, the weights per tensor or per column; the output is not."""
    x, w, bias, x_scale, w_scale, mask, x_zero, w_zero, past = op.inputs(9)
    x = op.dequantize(x, x_scale, x_zero)
    w = op.dequantize(w, w_scale, w_zero, axis=1)
    outputs = list(op.node.output)
    op.add("Attention", (x, w, bias, mask, past), outputs, MICROSOFT, **op.attributes)


@conversion("QLinearReduceMean", MICROSOFT)
def leave_mean(op: QdqBuilder) -> None:
    raise NotConvertibleError("onnxruntime 1.19 has no kernel to test a conversion with")


def column_axis(op: QdqBuilder, matrix: str) -> int:
    """Return the axis of the columns of a right operand of MatMul."""
    rank = op.graph.rank(matrix)
    return -1 if rank is None else max(rank - 1, 0)


def _float_operator(op: QdqBuilder) -> str:
    return op.node.op_type.removeprefix("QLinear")


def _rank_of(op: QdqBuilder, value: str) -> int:
    rank = op.graph.rank(value)
    if rank is None:
        raise NotConvertibleError(
            f"the rank of {value!r} is unknown, and its channels are the last axis"
        )
    return rank


def _kernel_rank(op: QdqBuilder) -> int:
    """Return the rank of the input of a pooling with a kernel."""
    kernel = op.attributes.get("kernel_shape")
    if not isinstance(kernel, list):
        raise NotConvertibleError("its attribute kernel_shape is not a list")
    return len(kernel) + 2


def _channels_first(op: QdqBuilder, x: str, rank: int) -> str:
    return op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])


def _channels_last(op: QdqBuilder, x: str, rank: int, output: str | None = None) -> str:
    return op("Transpose", x, output=output, perm=[0, *range(2, rank), 1])
