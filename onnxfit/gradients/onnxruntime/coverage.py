"""What onnxruntime's gradient builder differentiates correctly: one table, nothing that was not
measured against finite differences.

An operator is in the table only if the gradient of a node of it was found right for every kind of
input and attribute that its check lets pass: with fixed sizes, with a symbolic batch, and with all
sizes symbolic. What is not in the table has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC, TYPED
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError

REPLACE = "freeze the weights before it, or replace the operator"
IN_SINGLE = "onnxruntime computes its gradient in float32 only"


Check = Callable[[PathNode], None]


def check(path_node: PathNode) -> None:
    """Refused unless the builder's gradient of this node is right."""
    node = path_node.node
    key = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    if key not in TABLE:
        raise NoGradientError(f"no gradient{REASONS.get(key, '')}")
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.name and (value.type is None or value.dtype is None):
            raise NoGradientError(f"the element type of {value.name!r} is unknown", TYPED)
    differentiable_inputs = [
        *(node.inputs[i] for i in path_node.inputs),
        *(node.outputs[i] for i in path_node.outputs),
    ]
    for value in differentiable_inputs:
        _shape(value)
        if (
            value is not None
            and value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
            and node.op_type != "Cast"
        ):
            raise NoGradientError(
                f"{value.name!r} is {value.dtype}, in which onnxruntime's gradients are unreliable",
                "float32",
            )
        if value is not None and value.dtype == ir.DataType.DOUBLE and node.op_type in SINGLE:
            raise NoGradientError(IN_SINGLE, "float32")
    TABLE[key](path_node)


# The checks
# ------------------------------------------------------------------------------------------------------------------


def right(path_node: PathNode) -> None:
    """In every configuration."""


def every(*checks: Check) -> Check:
    def check(path_node: PathNode) -> None:
        for one in checks:
            one(path_node)

    return check


def only(*positions: int) -> Check:
    """Differentiable in these inputs alone."""

    def check(path_node: PathNode) -> None:
        if not path_node.inputs <= set(positions):
            raise NoGradientError("it has no gradient in the inputs that set it up", "freeze them")

    return check


def plain(**values: Any) -> Check:
    """Attributes have these values, or are absent."""

    def check(path_node: PathNode) -> None:
        for name, value in values.items():
            attribute = path_node.node.attributes.get(name)
            found = value if attribute is None else attribute.value
            if found != value and list(found) != value:
                raise NoGradientError(f"{name}={found}", f"{name}={value}")

    return check


def fixed(start: int) -> Check:
    """The sizes of the first input's axes from `start` on are numbers."""

    def check(path_node: PathNode) -> None:
        if not all(isinstance(d, int) for d in _shape(path_node.node.inputs[0])[start:]):
            raise NoGradientError("a size is known only at run time", STATIC)

    return check


def broadcasting(path_node: PathNode) -> None:
    """Sizes that broadcast are told apart beforehand: the builder takes unknown ones as equal."""
    _compatible([_shape(v) for v in path_node.node.inputs])


def matrix_product(path_node: PathNode) -> None:
    """The axes before the last two broadcast."""
    shapes = [_shape(v) for v in path_node.node.inputs]
    if min(len(s) for s in shapes) < 2:
        raise NoGradientError("an operand of rank 1")
    if max(len(s) for s in shapes) > 2 and path_node.node.outputs[0].dtype == ir.DataType.DOUBLE:
        raise NoGradientError(IN_SINGLE, "float32")
    _compatible([s[:-2] for s in shapes])


def general_product(path_node: PathNode) -> None:
    """The third operand broadcasts to the product of the first two."""
    beta = path_node.node.attributes.get("beta")
    if beta is not None and beta.value == 0:
        raise NoGradientError("beta=0", "leave the third operand away")
    if 2 in path_node.inputs:
        _compatible([_shape(path_node.node.inputs[2]), _shape(path_node.node.outputs[0])])


def expansion(path_node: PathNode) -> None:
    """How far it expands is known beforehand."""
    x, y = _shape(path_node.node.inputs[0]), _shape(path_node.node.outputs[0])
    if None in y:
        raise NoGradientError("it may expand to a size known only at run time", STATIC)
    _compatible([x, y])


def in_full(path_node: PathNode) -> None:
    """An operand that broadcasts would get a gradient of the wrong shape."""
    y = _shape(path_node.node.outputs[0])
    if any(_shape(path_node.node.inputs[i]) != y or None in y for i in path_node.inputs):
        raise NoGradientError("an operand may broadcast", STATIC)


def every_output(path_node: PathNode) -> None:
    """An output that no gradient comes back from would be forgotten."""
    if len(path_node.outputs) < len(path_node.node.outputs):
        raise NoGradientError("an output is not used")


def explicit_axes(path_node: PathNode) -> None:
    axes = path_node.node.inputs[1] if len(path_node.node.inputs) > 1 else None
    constant = None if axes is None else ir.convenience.get_const_tensor(axes)
    if constant is None or constant.size == 0:
        raise NoGradientError("its axes are not constant")


def forward_steps(path_node: PathNode) -> None:
    steps = path_node.node.inputs[4] if len(path_node.node.inputs) > 4 else None
    constant = None if steps is None else ir.convenience.get_const_tensor(steps)
    if steps is not None and (constant is None or (constant.numpy() < 1).any()):
        raise NoGradientError("its steps are not constant and positive")


def float_cast(path_node: PathNode) -> None:
    for value in (path_node.node.inputs[0], path_node.node.outputs[0]):
        if value is None or value.dtype not in (
            ir.DataType.FLOAT,
            ir.DataType.DOUBLE,
            ir.DataType.FLOAT16,
            ir.DataType.BFLOAT16,
        ):
            raise NoGradientError("a type without a gradient", "float32")


def without_axes(path_node: PathNode) -> None:
    if len(path_node.node.inputs) > 3 and path_node.node.inputs[3] is not None:
        raise NoGradientError("its axes are given as an input")


def _shape(value: ir.Value | None) -> tuple[int | str | None, ...]:
    if value is None:
        return ()
    if value.shape is None:
        raise NoGradientError(f"the rank of {value.name!r} is unknown", STATIC)
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def _compatible(shapes: Sequence[tuple[int | str | None, ...]]) -> None:
    """In every column, aligned at the right, all sizes are surely equal or 1."""
    for position in range(1, max(map(len, shapes)) + 1):
        sizes = [s[-position] for s in shapes if position <= len(s)]
        if len({*sizes} - {1}) > 1 or (None in sizes and len(sizes) > 1):
            raise NoGradientError("it may broadcast between sizes known only at run time", STATIC)


# The table
# -------------------------------------------------------------------------------------------------------------------

ALWAYS = [
    "Abs", "Concat", "Cos", "Div", "Erf", "Exp", "Flatten", "Gather", "GatherElements", "GatherND", "Gelu", "GlobalAveragePool", "Identity",
    "LeakyRelu", "Log", "LogSoftmax", "Neg", "Reciprocal", "Relu", "Reshape", "Sigmoid", "Sin", "Softmax", "Sqrt", "Squeeze", "Tanh",
    "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "com.microsoft.GRUTraining", "com.microsoft.LSTMTraining",
]  # fmt: skip

TABLE: dict[str, Check] = {
    **dict.fromkeys(ALWAYS, right),
    **dict.fromkeys(("Add", "Max", "Min", "Mul", "Sub"), broadcasting),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), plain(noop_with_empty_axes=0)),
    **dict.fromkeys(("ReduceL2", "ReduceLogSumExp"), every(explicit_axes, plain(keepdims=1))),
    **dict.fromkeys(("ScatterElements", "ScatterND"), plain(reduction="none")),
    "AveragePool": every(fixed(0), plain(auto_pad="NOTSET", dilations=[1, 1, 1])),
    "Cast": float_cast,
    "Clip": only(0),
    "Conv": plain(auto_pad="NOTSET"),
    "Expand": expansion,
    "Gemm": general_product,
    "MatMul": matrix_product,
    "MaxPool": every(fixed(1), plain(storage_order=0)),
    "Pad": every(only(0), plain(mode="constant"), without_axes),
    "Pow": every(only(0), in_full),
    "Slice": forward_steps,
    "Split": every_output,
    "Where": in_full,
}

# Operators whose gradient has no kernel for float64 on the CPU.
SINGLE = {
    "AveragePool", "Conv", "Cos", "Erf", "Gelu", "GlobalAveragePool", "LeakyRelu", "LogSoftmax", "MaxPool", "ReduceL2", "Relu", "Sin", "Softmax",
}  # fmt: skip

# What to add where "no gradient" does not say it all.
REASONS = {
    "DynamicQuantizeLinear": ": rounding has derivative zero",
    "QuantizeLinear": ": rounding has derivative zero",
}
