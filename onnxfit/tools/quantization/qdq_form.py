"""Integer files of any form in QDQ form, with the value names of the float model."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from onnxfit.errors import ModelError, listed_names
from onnxfit.graph.index import NodeIndex
from onnxfit.tools.quantization.pairing import behind_clipping
from onnxfit.trainable.quantized.operators import is_dequantize, is_quantize
from onnxfit.trainable.quantized.packed_weights import packed_weights, unpack
from onnxfit.trainable.quantized.qoperators import remaining_qoperators, to_qdq

# onnxruntime's quantizer names the integers of a value `<value>_quantized`.
SUFFIX = "_quantized"


def in_qdq_form(integers: onnx.ModelProto, floats: onnx.ModelProto) -> onnx.ModelProto:
    """Return an integer model whose layers are float operators behind DequantizeLinear.

    A model in QDQ form is returned itself.

    - `integers`: the model, with operators of integers (QLinearConv, ...), MatMulNBits, or both.
    - `floats`: the float model. The outputs of converted layers get the names that they have in it.

    ModelError: an operator of integers cannot be converted.
    """
    unpacked = unpack(integers, packed_weights(integers))
    if unpacked.shifts:
        raise ModelError(
            f"The packed weights {listed_names(map(repr, unpacked.shifts))} have float zero points,"
            " which the report cannot compare. Quantize with zero points that are integers."
        )
    converted = to_qdq(unpacked.model)
    remaining = remaining_qoperators(converted)
    if remaining:
        name, reason = next(iter(remaining.items()))
        raise ModelError(
            f"The integer operators {listed_names(remaining)} cannot be compared with float layers."
            f" For {name!r}, the reason is: {reason}. Pass a file in QDQ format, for instance from"
            " quantize_static(..., quant_format=QuantFormat.QDQ)."
        )
    if converted is not integers:
        _restore_names(converted.graph, floats.graph)
    return converted


def _restore_names(graph: onnx.GraphProto, floats: onnx.GraphProto) -> None:
    """Give the values that are rounded to `<value>_quantized` their names in the float model.

    A layer has absorbed the Relu behind it if no other node computes the output of the Relu. Its
    output then is that of the Relu.
    """
    index = NodeIndex(floats.node)
    known = {name for node in floats.node for name in node.output}
    used = {name for node in graph.node for name in (*node.input, *node.output)}
    computed = {n for node in graph.node if not is_dequantize(node) for n in node.output}
    names = {}
    for node in filter(is_quantize, graph.node):
        new = node.output[0].removesuffix(SUFFIX)
        while (behind := behind_clipping(new, index)) and behind not in computed:
            new = behind
        if node.output[0].endswith(SUFFIX) and new in known - used and node.input[0] not in known:
            names[node.input[0]] = new
    names |= _products_before_bias(graph, floats, used)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _products_before_bias(
    graph: onnx.GraphProto, floats: onnx.GraphProto, used: Collection[str]
) -> dict[str, str]:
    """Return the output of each MatMul whose bias MatMulNBits adds -> its name in the float model.

    - `used`: the names of the integer model, which no value can get.
    """
    products = {n.output[0] for g in (graph, floats) for n in g.node if n.op_type == "MatMul"}
    sums = {node.output[0]: node for node in floats.node if node.op_type == "Add"}
    return {
        own: new
        for node in graph.node
        if node.op_type == "Add" and node.output[0] in sums
        for own, new in zip(node.input, sums[node.output[0]].input)
        if own != new and {own, new} <= products and new not in used
    }
