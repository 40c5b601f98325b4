"""Operators through which no derivative flows, each with the reason; and those on quantised
integers, which are refused.

A float that comes out of a flat operator counts as a constant. That is a statement about
mathematics only: an operator whose derivative somebody could expect not to be zero does not belong
here.
"""

from __future__ import annotations

from onnxfit.gradients.table import (
    Gradients,
    NoGradientError,
    Values,
    gradient,
    not_differentiable,
)
from onnxfit.graph.values import GraphBuilder, Value

STEPS = "it rounds: its derivative is zero wherever there is one"
TRUTH = "its result is true or false"
BITS = "it works on integers or truth values"
INDEX = "its result is an index or a count"
SHAPE = "of its input only the shape and type count"
RANDOM = "its result is drawn at random"
FIXED = "its result is a constant"
TEXT = "it works on strings or bytes"

_REASONS = {
    STEPS: "Ceil Floor Round Sign Hardmax MelWeightMatrix",
    TRUTH: "Equal Greater GreaterOrEqual Less LessOrEqual IsInf IsNaN OptionalHasElement",
    BITS: "And Not Or Xor BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor",
    INDEX: "ArgMax ArgMin NonMaxSuppression NonZero SequenceLength TfIdfVectorizer",
    SHAPE: "Shape Size EyeLike ConstantOfShape",
    RANDOM: "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    FIXED: "Constant SequenceEmpty BlackmanWindow HammingWindow HannWindow",
    TEXT: "ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit",
}
for _reason, _op_types in _REASONS.items():
    not_differentiable(__name__, _reason, *_op_types.split())


@gradient("QLinearConv")
@gradient("QLinearMatMul")
def quantised(op: GraphBuilder, xs: Values, y: Value, dy: Value) -> Gradients:
    """Its integers stand for numbers that somebody quantised: a zero would be a silent one."""
    raise NoGradientError(
        "it works on quantised integers", "train the model in floats and quantise it afterwards"
    )
