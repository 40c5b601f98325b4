"""Optimizers of onnxruntime that cannot change a graph.

onnxruntime tries about fifty optimizers on every graph, and each one sorts the graph anew. An
optimizer fuses a pattern of operators. Where the graph has none of the operators that the pattern
must contain, the optimizer has nothing to do.

Measured on a step of 12,000 nodes: the session takes 1.4 to 1.7 times as long with the optimizers
that this module finds (onnxruntime 1.19 and 1.32).
"""

from __future__ import annotations

import onnx

from onnxfit.graph.subgraphs import nodes_of

_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
_NORMALIZATIONS = {"ReduceMean", "LayerNormalization", "SimplifiedLayerNormalization"}
_SKIP_NORMALIZATIONS = {*_NORMALIZATIONS, "SkipLayerNormalization"}
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
# may also be found after another optimizer has run: that one's operators are listed as well.
# onnxruntime ignores names that a version of it does not have.
PATTERN_OPERATORS: dict[str, set[str]] = {
    "AttentionFusion": {"Softmax"},
    "BiasDropoutFusion": {"Dropout", "BitmaskDropout"},
    "BiasGeluFusion": {"Erf", "Tanh", "Sigmoid", "Gelu", "FastGelu", "QuickGelu"},
    "BiasSkipLayerNormFusion": _SKIP_NORMALIZATIONS,
    "BiasSoftmaxFusion": {"Softmax"},
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
    "GeluFusionL1": {"Erf"},
    "GeluFusionL2": {"Erf"},
    "GemmActivationFusion": {"Gemm", "MatMul"},
    "GroupQueryAttentionFusion": {"GroupQueryAttention"},
    "GroupQueryAttentionPreNormFusion": {"GroupQueryAttention"},
    "LayerNormFusionL1": {"ReduceMean"},
    "LayerNormFusionL2": {"ReduceMean"},
    "MatMulActivationFusion": _PRODUCTS,
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
    "SimplifiedLayerNormFusion": {"ReduceMean"},
    "SkipLayerNormFusion": _SKIP_NORMALIZATIONS,
    "SliceConcatToSpaceToDepthFusion": {"Slice"},
    "TransposeOptimizer": {"Transpose"},
    "TransposeOptimizer_CPUExecutionProvider": {"Transpose"},
    "WeightBiasQuantization": _QUANTIZERS,
    "WhereDummyDq": _QUANTIZERS,
}


def useless_optimizers(model: onnx.ModelProto) -> list[str]:
    """Return the optimizers of onnxruntime whose pattern cannot occur in the model, by name."""
    operators = {node.op_type for node in nodes_of(model.graph)}
    operators.update(node.op_type for function in model.functions for node in function.node)
    return [name for name, pattern in PATTERN_OPERATORS.items() if pattern.isdisjoint(operators)]
