"""Mixed precision: the operators of a model that compute in half precision, in a training step.

Weights, slots, losses and the update stay float32. In the forward pass, each operator of the table
below computes in the type that suits it, and Casts stand between two types. The derivative of a
Cast is a Cast, so the backward pass of an operator is in the operator's own type, and the gradients
of weights are float32 again.

The table follows the lists that PyTorch documents for `torch.autocast`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxfit.errors import UnknownNameError
from onnxfit.graph.inference import schema_of
from onnxfit.graph.subgraphs import subgraphs_of
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.step.limits import largest

FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class StepPrecision:
    """The element type of a step's products, and whether it scales its loss.

    - `name`: the name in `Trainer(precision=)`.
    - `half`: the narrow type; None for a step in float32 throughout.
    - `scales_loss`: whether gradients of the narrow type may leave its range, so that the loss is
      multiplied before they are computed.
    - `tf32`: whether a GPU rounds the factors of products to TF32, with 10 bits after the point.
    - `splits`: whether each factor of a product becomes the sum of two numbers of bfloat16, on the
      CPU.
    """

    name: str
    half: ir.DataType | None = None
    scales_loss: bool = False
    tf32: bool = False
    splits: bool = False


FLOAT32 = StepPrecision("float32")
PRECISIONS = (
    FLOAT32,
    StepPrecision("tf32", tf32=True),
    StepPrecision("bf16x3", splits=True),
    StepPrecision("bf16", ir.DataType.BFLOAT16),
    StepPrecision("fp16", ir.DataType.FLOAT16, scales_loss=True),
)
# Names that Keras, PyTorch and Lightning have for them.
ALIASES = {
    "fp32": "float32",
    "32": "float32",
    "32-true": "float32",
    "bfloat16": "bf16",
    "mixed_bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "mixed_float16": "fp16",
    "16-mixed": "fp16",
}


def get_precision(name: object) -> StepPrecision:
    """Return the precision of a name, as for `Trainer`. UnknownNameError: the name is unknown.

    >>> get_precision("mixed_bfloat16").name
    'bf16'
    """
    known = {precision.name: precision for precision in PRECISIONS}
    chosen = ALIASES.get(name, name) if isinstance(name, str) else None
    if chosen not in known:
        raise UnknownNameError("precision", name, known)
    return known[chosen]


# Where an operator computes: in half precision; in the type that its activations have, and in
# float32 where these differ; or in float32, as every operator does that is not in the table: among
# them norms, Softmax, reductions, exponentials, logarithms, powers and losses.
ComputeType = Literal["half", "activations"]

# Products take most of the time of a step, and their kernels sum in float32.
_PRODUCTS = ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")

# Operators that lose at most one rounding, or only move numbers.
_FOLLOWERS = (
    # arithmetic
    "Abs",
    "Add",
    "Clip",
    "Div",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Sub",
    "Where",
    # activations
    "Celu",
    "Elu",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "PRelu",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softsign",
    "Tanh",
    # pooling, dropout
    "AveragePool",
    "Dropout",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "MaxPool",
    # movement
    "Concat",
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Pad",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
    # sizes
    "Shape",
    "Size",
)

OPERATORS: Mapping[str, ComputeType] = {
    **dict.fromkeys(_PRODUCTS, "half"),
    **dict.fromkeys(_FOLLOWERS, "activations"),
}


def autocast(op: GraphBuilder, half: ir.DataType, weights: Collection[str]) -> None:
    """Let the operators of the table compute in half precision, in place.

    Outputs of the graph, and the bodies of If, Loop and Scan, stay float32.

    - `op`: the builder of a model's forward pass in float32, whose nodes are sorted.
    - `half`: the narrow type.
    - `weights`: the inputs of the graph that hold weights.
    """
    _Autocast(op, half, weights).run()


class _Autocast:
    """The Casts of a graph, and its values that depend on weights and constants alone."""

    def __init__(self, op: GraphBuilder, half: ir.DataType, weights: Collection[str]) -> None:
        self.op = op
        self.half = half
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        inputs = {value for value in op.graph.inputs if value.name in weights}
        self.static: set[ir.Value] = {*inputs, *op.graph.initializers.values()}

    def run(self) -> None:
        for node in list(self.op.graph):
            with self.op.replacing(node):
                self._autocast_node(node)
        for i, value in enumerate(self.op.graph.outputs):
            if value.dtype == self.half:
                self._widen_output(i, value)

    def _autocast_node(self, node: ir.Node) -> None:
        """Choose the type of a node, cast its inputs to it, and declare its outputs."""
        for body in subgraphs_of(node):
            self._widen_captured(body)
        inputs = [value for value in node.inputs if value is not None]
        if not subgraphs_of(node) and self.static.issuperset(inputs):
            self.static.update(node.outputs)
        if node.op_type == "Cast" and node.domain == "":
            return  # it accepts any type, and its attribute sets the type of its output
        floats = [i for i, value in enumerate(node.inputs) if self._is_float(value)]
        dtype = FLOAT
        if node.domain == "" and node.op_type in OPERATORS:
            floats = self._of_one_type(node, floats)
            dtype = self._type_of(node, floats)
        for i in floats:
            value = node.inputs[i]
            assert value is not None
            node.replace_input_with(i, self._cast(value, dtype))
        for value in node.outputs:
            if self._is_float(value):
                value.type = ir.TensorType(dtype)  # not `value.dtype`: values share the object

    def _is_float(self, value: ir.Value | None) -> bool:
        """Return whether a value is a tensor of float32 or of the narrow type."""
        return (
            value is not None
            and isinstance(value.type, ir.TensorType)
            and value.dtype in (FLOAT, self.half)
        )

    def _of_one_type(self, node: ir.Node, floats: list[int]) -> list[int]:
        """Return the inputs that share the element type of the first float, by ONNX's schema.

        The ratio of a Dropout, for instance, has a type of its own.
        """
        schema = schema_of(node, self.op.graph)
        if schema is None or not floats:
            return floats
        last = len(schema.inputs) - 1  # of a variadic operator, it takes all inputs that are left
        variables = {i: schema.inputs[min(i, last)].type_str for i in floats}
        return [i for i in floats if variables[i] == variables[floats[0]]]

    def _type_of(self, node: ir.Node, floats: list[int]) -> ir.DataType:
        """Return the type in which a node of the table computes."""
        if OPERATORS[node.op_type] == "half":
            return self.half
        values = [node.inputs[i] for i in floats]
        halves = [v.dtype == self.half for v in values if v is not None and v not in self.static]
        return self.half if halves and all(halves) else FLOAT

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return a value in a type; each is cast once, before the first node that needs it."""
        if value.dtype == dtype:
            return value
        key = value, dtype
        if key not in self.casts:
            self.casts[key] = self._new_cast(value, dtype).ir
            if value in self.static:
                self.static.add(self.casts[key])
        return self.casts[key]

    def _new_cast(self, value: ir.Value, dtype: ir.DataType) -> Value:
        constant = value.const_value if value.is_initializer() else None
        if constant is None or value.is_graph_input():
            return self.op.cast(self.op.wrap(value), dtype.numpy())
        # A float32 constant, such as that of a mask, may exceed the range of the half type. It is
        # clipped, because it must not become infinite.
        array = constant.numpy()
        greatest = np.float32(largest(dtype.numpy()))
        bounded = np.where(np.isfinite(array), np.clip(array, -greatest, greatest), array)
        return self.op.constant(bounded.astype(dtype.numpy()))

    def _widen_captured(self, graph: ir.Graph) -> None:
        """Let the nodes of a body read the values outside as float32."""
        for node in graph:
            for body in subgraphs_of(node):
                self._widen_captured(body)
            for i, value in enumerate(node.inputs):
                if value is not None and self._is_float(value) and value.dtype == self.half:
                    node.replace_input_with(i, self._cast(value, FLOAT))

    def _widen_output(self, position: int, value: ir.Value) -> None:
        name = value.name
        value.name = self.op.unique_name(f"{name}.{self.half.name.lower()}")
        wide = self.op.cast(self.op.wrap(value), np.float32).ir
        wide.name = name
        self.op.graph.outputs[position] = wide
