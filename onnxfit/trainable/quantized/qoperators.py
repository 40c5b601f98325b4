r"""Convert operators of integers (the QOperator form) to operators of floats (the QDQ form).

An integer q with the scale s and the zero point z represents the real number s (q - z). With

- D(q) = s (q - z), which is DequantizeLinear, and
- Q(y) = clamp(round(y / s) + z), which is QuantizeLinear,

every operator of integers stands for an operator of floats between them. The conversions are:

| operator | conversion |
|---|---|
| QLinearConv | Q(Conv(D(x), D(w), sx sw b)); w and sw per tensor or per output channel |
| QLinearMatMul | Q(D(a) @ D(b)); b per tensor or per column |
| QGemm | Q(alpha (D(A) @ D(B) + sA sB C)), without Q where the output has no scale |
| QLinearAdd, QLinearMul | Q(D(a) + D(b)), Q(D(a) * D(b)) |
| QLinearSigmoid, QLinearLeakyRelu, QLinearSoftmax | Q(f(D(x))) |
| QLinearAveragePool, QLinearGlobalAveragePool | Q(f(D(x))) |
| QLinearConcat, QLinearWhere | Q(Concat(D(x1), D(x2), ...)), Q(Where(condition, D(x), D(y))) |
| NhwcMaxPool | MaxPool of the integers between two Transpose |
| QEmbedLayerNormalization, QAttention | f(..., D(table or weights), ...), a float |
| Gather of integers | Gather(D(table), indices), for D(Gather(table, indices)) |
| MatMulInteger, ConvInteger | D(a) @ D(b), Conv(D(x), D(w)), for Mul(Cast(·), sa sb) |
| MatMulIntegerToFloat | D(a) @ D(b) + bias |
| DynamicQuantizeMatMul | D(q) @ D(b) + bias, with q = DynamicQuantizeLinear(a) |
| DynamicQuantizeLSTM | LSTM(D(q), D(W)^T, D(R)^T, ...), with q = DynamicQuantizeLinear(x) |

The integers are exact, so both forms compute the same real number before the last rounding. The
results differ by one level if this number lies closer to a half than float32 resolves. One
conversion differs by more: DynamicQuantizeLSTM rounds the hidden state before every step, and LSTM
does not.

The scale of an int32 bias b is the product sx sw. It becomes an initializer called `<bias>/scale`,
which must be recomputed if sx or sw changes. If sw has an entry for each channel, the product has
one as well.
"""

from __future__ import annotations

import onnx

from onnxfit.graph.replacement import replace_nodes
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.completion import opset_of
from onnxfit.load.opset import IR_VERSION, convert_opset
from onnxfit.trainable.quantized import dynamic_conversions, qlinear_conversions
from onnxfit.trainable.quantized.conversion import (
    CONVERSIONS,
    Conversion,
    IntegerGraph,
    NotConvertibleError,
    QdqBuilder,
)
from onnxfit.trainable.quantized.operators import OPSET_OF_CHANNELS

__all__ = ["remaining_qoperators", "to_qdq"]

MODULES = (dynamic_conversions, qlinear_conversions)  # importing them registers their conversions


def to_qdq(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose operators of integers are operators of floats between Q and D.

    Q and D stand for QuantizeLinear and DequantizeLinear. The names of inputs, outputs and all
    initializers stay. A quantized value that several nodes use is dequantized once. An operator
    that cannot be converted stays; `remaining_qoperators` lists them with reasons.

    - `model`: the model, which stays unchanged. Without an integer operator, the model itself is
      returned. A model of an opset before 13 is converted to the opset of training, 21.

    ModelError: the opset cannot be converted.

    >>> text = '<ir_version: 8, opset_import: ["": 17]> g (uint8[N, 1] x) => (uint8[N, 1] y)'
    >>> values = "<float s = {0.5}, uint8 z = {128}, int8[1, 1] w = {3}, int8 wz = {0}>"
    >>> node = "{ y = QLinearMatMul(x, s, z, w, s, wz, s, z) }"
    >>> model = to_qdq(onnx.parser.parse_model(text + values + node))
    >>> [node.op_type for node in model.graph.node]
    ['DequantizeLinear', 'DequantizeLinear', 'MatMul', 'QuantizeLinear']
    """
    if not any(_conversion_of(node) for node in model.graph.node):
        return model
    builders, _ = _convert_nodes(model)
    if not builders:
        return model
    converted = onnx.ModelProto()
    converted.CopyFrom(model)
    if (opset_of(model) or 0) < OPSET_OF_CHANNELS:
        converted = convert_opset(converted)
        converted.ir_version = max(converted.ir_version, IR_VERSION)
        builders, _ = _convert_nodes(converted)
    graph = converted.graph
    nodes = _nodes_with(graph, builders)
    replace_nodes(graph, nodes)
    for builder in builders.values():
        graph.initializer.extend(builder.initializers)
    return converted


def remaining_qoperators(model: onnx.ModelProto) -> dict[str, str]:
    """Return the integer operators that `to_qdq` does not convert, each with the reason.

    The key is the name of the node, or of its output if the node has no name.

    - `model`: a model in either form, which stays unchanged.
    """
    _, reasons = _convert_nodes(model)
    own = {_first_output(node) for node in model.graph.node}
    for node in nodes_of(model.graph):
        if (
            _first_output(node) not in own
            and _conversion_of(node)
            and node.op_type != "DequantizeLinear"
        ):
            reasons[node.name or _first_output(node)] = (
                "it is in the body of an If, a Loop or a Scan"
            )
    return reasons


def _convert_nodes(model: onnx.ModelProto) -> tuple[dict[str, QdqBuilder], dict[str, str]]:
    """Return the replacements by the node's first output, and the reasons why other nodes stay."""
    graph = IntegerGraph(model.graph)
    builders: dict[str, QdqBuilder] = {}
    reasons: dict[str, str] = {}
    for node in model.graph.node:
        convert = _conversion_of(node)
        if convert is None or not _first_output(node):
            continue
        builder = QdqBuilder(node, graph)
        try:
            convert(builder)
        except NotConvertibleError as reason:
            reasons[node.name or _first_output(node)] = str(reason)
            continue
        if builder.nodes:
            builder.commit()
            builders[_first_output(node)] = builder
    return builders, reasons


def _nodes_with(graph: onnx.GraphProto, builders: dict[str, QdqBuilder]) -> list[onnx.NodeProto]:
    """Return the nodes of a graph after the replacements."""
    replaced = {_first_output(node) for builder in builders.values() for node in builder.replaced}
    for builder in builders.values():
        for node in builder.bypassed:
            readers = {
                _first_output(reader) for reader in builder.graph.readers[_first_output(node)]
            }
            if builder.graph.outputs.isdisjoint(node.output) and readers <= replaced:
                replaced.add(_first_output(node))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if _first_output(node) in builders:
            nodes += builders[_first_output(node)].nodes
        elif _first_output(node) not in replaced:
            nodes.append(node)
    return nodes


def _conversion_of(node: onnx.NodeProto) -> Conversion | None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    return CONVERSIONS.get((domain, node.op_type))


def _first_output(node: onnx.NodeProto) -> str:
    """Return the node's first output, which is unique in the model."""
    return next(iter(node.output), "")
