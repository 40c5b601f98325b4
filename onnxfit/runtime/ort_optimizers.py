"""Find the optimizers of onnxruntime that cannot change a graph.

onnxruntime tries about fifty optimizers on every graph, and each one sorts the graph anew. An
optimizer fuses a pattern of operators. If the graph lacks the operators of the pattern, the
optimizer has nothing to do.

The time of the search for equal expressions grows with the square of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import onnx

from onnxfit.graph.fold import RANDOM
from onnxfit.graph.subgraphs import nodes_of, read_by, subgraph_protos

# In smaller graphs, this module's search for equal expressions takes longer than onnxruntime's.
MIN_NODES_TO_COMPARE = 1000

_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
_NORMALIZATIONS = {"LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"}
_CONVOLUTIONS = {"Conv", "FusedConv", "QLinearConv", "ConvInteger", "ConvTranspose"}
_SPATIAL = {
    *_CONVOLUTIONS,
    "MaxPool",
    "AveragePool",
    "GlobalMaxPool",
    "GlobalAveragePool",
    "BatchNormalization",
    "Resize",
    "Upsample",
}
_PRODUCTS = {"MatMul", "FusedMatMul", "TransposeMatMul"}

# The name of an optimizer -> the operators of which its pattern contains at least one. The pattern
# may also appear after another optimizer has run, whose operators are then listed as well.
# onnxruntime ignores unknown names; some names end in the level of optimization in only one
# version.
PATTERN_OPERATORS: dict[str, set[str]] = {
    "AttentionFusion": {"Softmax"},
    "BiasDropoutFusion": {"Dropout", "BitmaskDropout"},
    "BiasGeluFusion": {"Erf", "Tanh", "Sigmoid", "Gelu", "FastGelu", "QuickGelu"},
    "BiasSkipLayerNormFusion": _NORMALIZATIONS,
    "BiasSoftmaxDropoutFusion": {"Dropout"},
    "BiasSoftmaxFusion": {"Softmax"},
    "BitmaskDropoutReplacement": {"Dropout"},
    "ConvActivationFusion": _CONVOLUTIONS,
    "ConvAddActivationFusion": _CONVOLUTIONS,
    "DoubleQDQPairsRemover": _QUANTIZERS,
    "DynamicQuantizeMatMulFusion": {"DynamicQuantizeLinear", "MatMulInteger", *_QUANTIZERS},
    "EmbedLayerNormFusion": {"Gather"},
    "EnsureUniqueDQForNodeUnit": _QUANTIZERS,
    "FastGeluFusion": {"Tanh"},
    "FreeDimensionOverrideTransformer": set(),  # a step overrides no dimension
    "GatherSliceToSplitFusion": {"Gather", "Slice"},
    "GatherToSliceFusion": {"Gather"},
    "GatherToSplitFusion": {"Gather"},
    "GeluFusion": {"Erf"},
    "GeluFusionL1": {"Erf"},
    "GeluFusionL2": {"Erf"},
    "GemmActivationFusion": {"Gemm", "MatMul"},
    "GroupQueryAttentionFusion": {"GroupQueryAttention"},
    "GroupQueryAttentionPreNormFusion": {"GroupQueryAttention"},
    "MatMulActivationFusion": set(),  # for DirectML alone
    "MatMulAddFusion": {"MatMul"},
    "MatMulIntegerToFloatFusion": {"MatMulInteger", "DynamicQuantizeLinear", *_QUANTIZERS},
    "MatMulNBitsFusion": {"MatMulNBits", "DequantizeLinear"},
    "MatMulScaleFusion": _PRODUCTS,
    "MatmulTransposeFusion": {"Transpose"},
    "NchwcTransformer": _SPATIAL,
    "NhwcTransformer": _SPATIAL,
    "QDQFinalCleanupTransformer": _QUANTIZERS,
    "QDQPropagationTransformer": _QUANTIZERS,
    "QDQS8ToU8Transformer": _QUANTIZERS,
    "QDQSelectorActionTransformer": _QUANTIZERS,
    "QuickGeluFusion": {"Sigmoid"},
    "ReshapeFusion": {"Reshape"},
    "RocmBlasAltImpl": set(),  # for ROCm alone
    "SceLossGradBiasFusion": {"SoftmaxCrossEntropyLossInternalGrad"},
    "SkipLayerNormFusion": _NORMALIZATIONS,
    "SliceConcatToSpaceToDepthFusion": {"Slice"},
    "TransposeOptimizer": {"Transpose"},
    "TransposeOptimizer_CPUExecutionProvider": {"Transpose"},
    "WeightBiasQuantization": _QUANTIZERS,
    "WhereDummyDq": _QUANTIZERS,
}
# Gelu's approximation is 0.5 x (1 + tanh(sqrt(2 / pi) (x + CUBIC_FACTOR x^3))).
CUBIC_FACTOR = 0.044715
_FLOATS = {
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
}
# Optimizers whose pattern contains both of these operators; they write a LayerNormalization.
LAYER_NORM_FUSIONS = (
    "LayerNormFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
)
LAYER_NORM_OPERATORS = {"ReduceMean", "Sqrt"}
# Optimizers that write FusedMatMul, which has no kernel for float64 on the CPU. onnxruntime 1.19
# ignores the type and then finds no kernel.
FUSIONS_OF_PRODUCTS = ("MatMulScaleFusion", "MatmulTransposeFusion")
# Rewrites that remove a Relu or Clip before a QuantizeLinear that clips the same numbers. The value
# before gets the name of the value after: if it was an output of the graph, onnxruntime 1.19
# returns nothing for that output.
REMOVALS_OF_ACTIVATIONS = ("ReluQuantRewrite", "ClipQuantRewrite")
# With these rules, onnxruntime 1.19 crashes where a body of an If reads a Cast of a float16.
REMOVAL_OF_CASTS = "Level1_RuleBasedTransformer"
# It also replaces an If by the branch that a constant condition takes. Where such Ifs are nested,
# onnxruntime (1.19 to 1.32) then refuses the graph, or crashes.
REPLACEMENT_OF_IFS = "ConstantFolding"


def useless_optimizers(model: onnx.ModelProto) -> list[str]:
    """Return the optimizers of onnxruntime, by name, whose pattern cannot occur in the model, or
    whose result onnxruntime could not run.
    """
    operators = {node.op_type for node in nodes_of(model.graph)}
    operators.update(node.op_type for function in model.functions for node in function.node)
    if "Constant" not in operators and not _has_cubic_gelu(model.graph):
        operators.discard("Tanh")  # in the patterns, only Gelu has a Tanh
    useless: list[str] = []
    if operators.issuperset(LAYER_NORM_OPERATORS):
        operators.add("LayerNormalization")
    else:
        useless += LAYER_NORM_FUSIONS
    useless += [n for n, pattern in PATTERN_OPERATORS.items() if pattern.isdisjoint(operators)]
    if _multiplies_float64(model.graph):
        useless += FUSIONS_OF_PRODUCTS
    if "Cast" in operators and _rounds_to_float16(model.graph):
        useless.append(REMOVAL_OF_CASTS)
    if "QuantizeLinear" in operators and _cuts_an_output_off(model.graph):
        useless += REMOVALS_OF_ACTIVATIONS
    if "If" in operators and _has_constant_condition(model.graph):
        useless.append(REPLACEMENT_OF_IFS)
    if len(model.graph.node) >= MIN_NODES_TO_COMPARE and not _has_equal_nodes(model.graph):
        useless.append("CommonSubexpressionElimination")
    return useless


def _rounds_to_float16(graph: onnx.GraphProto) -> bool:
    """Return whether a Cast of the main graph makes float16."""
    casts = (node for node in graph.node if node.op_type == "Cast")
    return any(a.i == onnx.TensorProto.FLOAT16 for cast in casts for a in cast.attribute)


def _has_constant_condition(
    graph: onnx.GraphProto, changing: Iterable[str] = (), resized: Iterable[str] = ()
) -> bool:
    """Return whether the condition of an If may be the same in every run.

    `fold_shapes` removes most of these Ifs. onnxruntime also computes arithmetic of floats.

    - `changing`: the values outside the graph that change from run to run.
    - `resized`: the values outside the graph whose sizes may change from run to run.
    """
    changing = {*changing, *(value.name for value in graph.input)}
    declared = (*graph.input, *graph.output, *graph.value_info)
    resized = {*resized, *(value.name for value in declared if _has_free_size(value))}
    for node in graph.node:
        if node.op_type == "If" and node.input[0] not in changing:
            return True
        bodies = [body for attribute in node.attribute for body in subgraph_protos(attribute)]
        if any(_has_constant_condition(body, changing, resized) for body in bodies):
            return True
        read = resized if node.op_type in ("Shape", "Size") else changing
        if node.op_type in RANDOM or not read.isdisjoint(read_by(node)):
            changing.update(node.output)
    return False


def _has_free_size(value: onnx.ValueInfoProto) -> bool:
    return not all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)


def _has_cubic_gelu(graph: onnx.GraphProto) -> bool:
    """Return whether a constant of the main graph may belong to Gelu's approximation by Tanh."""
    scalars = [tensor for tensor in graph.initializer if math.prod(tensor.dims) == 1]
    floats = [onnx.numpy_helper.to_array(t) for t in scalars if t.data_type in _FLOATS]
    return any(math.isclose(array.item(), CUBIC_FACTOR, rel_tol=0.01) for array in floats)


def _cuts_an_output_off(graph: onnx.GraphProto) -> bool:
    """Return whether a Relu or Clip of the main graph reads an output of the graph."""
    outputs = {value.name for value in graph.output}
    return any(node.input[0] in outputs for node in graph.node if node.op_type in ("Relu", "Clip"))


def _multiplies_float64(graph: onnx.GraphProto) -> bool:
    """Return whether a MatMul of the main graph has an input of float64."""
    values = (*graph.input, *graph.output, *graph.value_info)
    wide = {v.name for v in values if v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
    wide |= {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.DOUBLE}
    return bool(wide) and any(
        not wide.isdisjoint(node.input) for node in graph.node if node.op_type == "MatMul"
    )


def _has_equal_nodes(graph: onnx.GraphProto) -> bool:
    """Return whether two nodes of the main graph compute the same from the same values.

    If no two nodes are equal, no two longer expressions are. A graph with subgraphs may have equal
    nodes in them.
    """
    same = _equal_constants(graph.initializer)  # a value -> the first value that is equal to it
    seen: set[Any] = set()
    for node in graph.node:
        inputs = tuple(node.input)
        if not same.keys().isdisjoint(inputs):
            inputs = tuple([same.get(name, name) for name in inputs])
        if node.op_type == "Identity":  # onnxruntime removes it
            same[node.output[0]] = inputs[0]
            continue
        attributes: tuple[bytes, ...] = ()
        if node.attribute:
            if any(subgraph_protos(attribute) for attribute in node.attribute):
                return True
            attributes = tuple(sorted([a.SerializeToString() for a in node.attribute]))
        key = node.op_type, node.domain, inputs, attributes
        if key in seen:
            return True
        seen.add(key)
    return False


def _equal_constants(initializers: Iterable[onnx.TensorProto]) -> dict[str, str]:
    """Map each scalar to the first scalar with the same value; onnxruntime merges them."""
    first: dict[tuple[int, bytes], str] = {}
    same = {}
    for tensor in initializers:
        array = None if tensor.dims else onnx.numpy_helper.to_array(tensor)
        if array is not None:
            equal = first.setdefault((tensor.data_type, array.tobytes()), tensor.name)
            if equal != tensor.name:
                same[tensor.name] = equal
    return same
