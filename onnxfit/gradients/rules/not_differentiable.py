"""Operators without a derivative, each with the reason; and operators on quantized integers, which
block the gradient.

A float output of an operator without a derivative counts as a constant. So an operator belongs here
only if its derivative is zero by mathematics, not because a rule is missing.
"""

from __future__ import annotations

from onnxfit.gradients.table import (
    Gradients,
    NoGradientError,
    Values,
    not_differentiable,
    rule,
)
from onnxfit.graph.values import GraphBuilder, Value

ROUNDING = "it rounds: its derivative is zero wherever it exists"
BOOLEAN = "its result is true or false"
LOGIC = "it works on integers or truth values"
INDEX = "its result is an index or a count"
SHAPE_ONLY = "it uses only the shape and type of its input"
RANDOM = "its result is drawn at random"
CONSTANT = "its result is a constant"
TEXT = "it works on strings or bytes"

_REASONS = {
    ROUNDING: "Ceil Floor Round Sign Hardmax MelWeightMatrix",
    BOOLEAN: "Equal Greater GreaterOrEqual Less LessOrEqual IsInf IsNaN OptionalHasElement",
    LOGIC: "And Not Or Xor BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor",
    INDEX: "ArgMax ArgMin NonMaxSuppression NonZero SequenceLength TfIdfVectorizer",
    SHAPE_ONLY: "Shape Size EyeLike ConstantOfShape",
    RANDOM: "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    CONSTANT: "Constant SequenceEmpty BlackmanWindow HammingWindow HannWindow",
    TEXT: "ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit",
}
for _reason, _op_types in _REASONS.items():
    not_differentiable(__name__, _reason, *_op_types.split())


@rule("QLinearConv")
@rule("QLinearMatMul")
def quantized(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    """Its integers represent floats, so a gradient of zero would be silently wrong."""
    raise NoGradientError(
        "it works on quantized integers", "train the model in floats, and quantize it afterwards"
    )
