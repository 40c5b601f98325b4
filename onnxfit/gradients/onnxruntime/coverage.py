"""The operators that onnxruntime's gradient builder differentiates correctly.

An operator is in the table only if its gradient matched finite differences for every kind of input
and attribute that its check allows: with fixed sizes, with a symbolic batch, and with all sizes
symbolic. An operator that is not in the table has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC, TYPED
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.inference import sizes_of
from onnxfit.graph.weights import FLOATS

BY_RULES = "use gradient='auto', whose rules need no builder"
FLOAT32_ONLY_REASON = "onnxruntime computes its gradient in float32 only"

Check = Callable[[PathNode], None]


def check(path_node: PathNode) -> None:
    """Raise NoGradientError unless the builder's gradient of this node is correct."""
    node = path_node.node
    key = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    if key not in CHECKS:
        raise NoGradientError(
            f"onnxruntime's builder has no correct gradient of it{REASONS.get(key, '')}", BY_RULES
        )
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.name and (value.type is None or value.dtype is None):
            raise NoGradientError(f"the element type of {value.name!r} is unknown", TYPED)
    inputs = [node.inputs[i] for i in path_node.inputs]
    outputs = [node.outputs[i] for i in path_node.outputs]
    for value in (*inputs, *outputs):
        _known_shape(value)
        if value is not None:
            _check_type(node, value)
    CHECKS[key](path_node)


def _check_type(node: ir.Node, value: ir.Value) -> None:
    """Raise NoGradientError unless gradients in the element type of this value are correct."""
    if value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and node.op_type != "Cast":
        raise NoGradientError(
            f"the element type of {value.name!r} is {value.dtype}, for which onnxruntime's"
            " gradients are unreliable",
            "use float32",
        )
    if value.dtype == ir.DataType.DOUBLE and node.op_type in FLOAT32_ONLY:
        raise NoGradientError(FLOAT32_ONLY_REASON, "use float32")


# The checks
# --------------------------------------------------------------------------------------------------


def always(path_node: PathNode) -> None:
    """Correct in every configuration."""


def all_of(*checks: Check) -> Check:
    """Return a check that runs all of these checks."""

    def check_all(path_node: PathNode) -> None:
        for each in checks:
            each(path_node)

    return check_all


def only(*positions: int) -> Check:
    """Correct with respect to the inputs at these positions only."""

    def check(path_node: PathNode) -> None:
        if not path_node.inputs <= set(positions):
            raise NoGradientError(
                "it has no gradient with respect to its parameters", "freeze the parameters"
            )

    return check


def attributes(**values: Any) -> Check:
    """Correct if these attributes have these values, or are absent."""

    def check(path_node: PathNode) -> None:
        for name, value in values.items():
            attribute = path_node.node.attributes.get(name)
            actual = value if attribute is None else attribute.value
            if actual != value:
                raise NoGradientError(f"it has {name}={actual}", f"use {name}={value}")

    return check


def static_sizes(start: int) -> Check:
    """Correct if the sizes of the first input are known, from axis `start` on."""

    def check(path_node: PathNode) -> None:
        if not all(isinstance(d, int) for d in _known_shape(path_node.node.inputs[0])[start:]):
            raise NoGradientError("a size is known only at run time", STATIC)

    return check


def broadcasting(path_node: PathNode) -> None:
    """Correct if known sizes determine what broadcasts: the builder assumes equal unknown sizes."""
    _compatible([_known_shape(v) for v in path_node.node.inputs])


def matrix_product(path_node: PathNode) -> None:
    """Correct for matrices, if known sizes determine how the axes before the last two broadcast."""
    shapes = [_known_shape(v) for v in path_node.node.inputs]
    if min(len(s) for s in shapes) < 2:
        raise NoGradientError("an operand has rank 1", BY_RULES)
    if max(len(s) for s in shapes) > 2 and path_node.node.outputs[0].dtype == ir.DataType.DOUBLE:
        raise NoGradientError(FLOAT32_ONLY_REASON, "use float32")
    _compatible([s[:-2] for s in shapes])


def general_product(path_node: PathNode) -> None:
    """Correct if known sizes determine how the third operand broadcasts to the product."""
    beta = path_node.node.attributes.get("beta")
    if beta is not None and beta.value == 0:
        raise NoGradientError("it has beta=0", "remove the third operand")
    if 2 in path_node.inputs:
        _compatible(
            [_known_shape(path_node.node.inputs[2]), _known_shape(path_node.node.outputs[0])]
        )


def expansion(path_node: PathNode) -> None:
    """Correct if known sizes determine which axes expand."""
    x = _known_shape(path_node.node.inputs[0])
    y = _known_shape(path_node.node.outputs[0])
    if None in y:
        raise NoGradientError("it may expand to a size known only at run time", STATIC)
    _compatible([x, y])


def without_broadcasting(path_node: PathNode) -> None:
    """Correct if no operand broadcasts: it would get a gradient of the wrong shape."""
    y = _known_shape(path_node.node.outputs[0])
    if any(_known_shape(path_node.node.inputs[i]) != y or None in y for i in path_node.inputs):
        raise NoGradientError("an operand may broadcast", STATIC)


def all_outputs(path_node: PathNode) -> None:
    """Correct if every output is on the path: the builder drops the others."""
    if len(path_node.outputs) < len(path_node.node.outputs):
        raise NoGradientError("an output is not used", BY_RULES)


def explicit_axes(path_node: PathNode) -> None:
    """Correct for constant axes."""
    axes = path_node.node.inputs[1] if len(path_node.node.inputs) > 1 else None
    constant = None if axes is None else ir.convenience.get_const_tensor(axes)
    if constant is None or constant.size == 0:
        raise NoGradientError("its axes are not constant", BY_RULES)


def constant_axes(path_node: PathNode) -> None:
    """Correct for constant axes, or without axes if it then reduces all of them."""
    node = path_node.node
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    constant = None if axes is None else ir.convenience.get_const_tensor(axes)
    if axes is not None and constant is None:
        raise NoGradientError("its axes are not constant", BY_RULES)
    if constant is None or constant.size == 0:
        attributes(noop_with_empty_axes=0)(path_node)


def several_inputs(path_node: PathNode) -> None:
    """Correct with two inputs or more."""
    if len(path_node.node.inputs) < 2:
        raise NoGradientError("it has one input", "use Identity")


def undilated(path_node: PathNode) -> None:
    """Correct without dilations, which the builder ignores."""
    dilations = path_node.node.attributes.get("dilations")
    if dilations is not None and any(d != 1 for d in dilations.value):
        raise NoGradientError("it has dilations", BY_RULES)


def nonzero_exponent(path_node: PathNode) -> None:
    """Correct for a constant exponent of the base's type without zeros, whose gradient is NaN."""
    x, exponent = path_node.node.inputs
    assert x is not None  # neither input is optional
    assert exponent is not None
    constant = ir.convenience.get_const_tensor(exponent)
    if constant is None or (constant.numpy() == 0).any():
        raise NoGradientError(
            "its exponent may be 0, at which the builder's gradient is NaN", BY_RULES
        )
    if exponent.dtype != x.dtype:
        raise NoGradientError("its exponent has another type", BY_RULES)


def positive_steps(path_node: PathNode) -> None:
    """Correct for constant steps above 0."""
    steps = path_node.node.inputs[4] if len(path_node.node.inputs) > 4 else None
    constant = None if steps is None else ir.convenience.get_const_tensor(steps)
    if steps is not None and (constant is None or (constant.numpy() < 1).any()):
        raise NoGradientError("its steps are not constant and positive", BY_RULES)


def float_cast(path_node: PathNode) -> None:
    """Correct from one float type to another."""
    for value in (path_node.node.inputs[0], path_node.node.outputs[0]):
        if value is None or value.dtype not in FLOATS:
            raise NoGradientError("it casts between types without a gradient", "use float32")


def without_axes(path_node: PathNode) -> None:
    """Correct if the fourth input, the axes, is absent."""
    if len(path_node.node.inputs) > 3 and path_node.node.inputs[3] is not None:
        raise NoGradientError("its axes are an input", BY_RULES)


def _known_shape(value: ir.Value | None) -> tuple[int | str | None, ...]:
    if value is None:
        return ()
    if value.shape is None:
        raise NoGradientError(f"the rank of {value.name!r} is unknown", STATIC)
    return sizes_of(value.shape)


def _compatible(shapes: Sequence[tuple[int | str | None, ...]]) -> None:
    """Raise NoGradientError unless all sizes in each column, aligned at the right, are surely equal
    or 1.
    """
    for position in range(1, max(map(len, shapes)) + 1):
        sizes = [s[-position] for s in shapes if position <= len(s)]
        if len({*sizes} - {1}) > 1 or (None in sizes and len(sizes) > 1):
            raise NoGradientError("it may broadcast between sizes known only at run time", STATIC)


# The table
# --------------------------------------------------------------------------------------------------

WITHOUT_CONDITIONS = [
    "Abs", "Concat", "Cos", "Div", "Erf", "Exp", "Flatten", "Gather", "GatherElements", "GatherND",
    "Gelu", "GlobalAveragePool", "Identity", "LeakyRelu", "Log", "LogSoftmax", "Neg", "Reciprocal",
    "Relu", "Reshape", "Sigmoid", "Sin", "Softmax", "Sqrt", "Squeeze", "Tanh", "Tile", "TopK",
    "Transpose", "Trilu", "Unsqueeze",
]  # fmt: skip

CHECKS: dict[str, Check] = {
    **dict.fromkeys(WITHOUT_CONDITIONS, always),
    **dict.fromkeys(("Add", "Mul", "Sub"), broadcasting),
    **dict.fromkeys(("Max", "Min"), all_of(several_inputs, broadcasting)),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), constant_axes),
    **dict.fromkeys(("ReduceL2", "ReduceLogSumExp"), all_of(explicit_axes, attributes(keepdims=1))),
    **dict.fromkeys(("ScatterElements", "ScatterND"), attributes(reduction="none")),
    "AveragePool": all_of(static_sizes(0), undilated, attributes(auto_pad="NOTSET", ceil_mode=0)),
    "Cast": float_cast,
    "Clip": all_of(only(0), several_inputs),
    "Conv": attributes(auto_pad="NOTSET"),
    "Expand": expansion,
    "Gemm": general_product,
    "MatMul": matrix_product,
    "MaxPool": all_of(static_sizes(1), attributes(storage_order=0)),
    "Pad": all_of(only(0), attributes(mode="constant"), without_axes),
    "Pow": all_of(only(0), without_broadcasting, nonzero_exponent),
    "Slice": positive_steps,
    "Split": all_outputs,
    "Where": without_broadcasting,
}

# Operators whose gradient has no kernel for float64 on the CPU.
FLOAT32_ONLY = {
    "AveragePool", "Conv", "Cos", "Erf", "Gelu", "GlobalAveragePool", "LeakyRelu", "LogSoftmax",
    "MaxPool", "ReduceL2", "Relu", "Sin", "Softmax",
}  # fmt: skip

# Reasons to append to "no gradient".
REASONS = {
    "DynamicQuantizeLinear": ": rounding has derivative zero",
    "QuantizeLinear": ": rounding has derivative zero",
}
