"""The registry of lowerings: operators written so that onnxruntime's gradient builder
differentiates them correctly.

A lowering is called for a node on the gradient path. It returns the value (or values) that replace
the node's output (or outputs), or None if the node may stay, perhaps with changed attributes. It
raises NoGradientError if there is no correct way to write the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Union

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value


class NodeToLower:
    """A node on the gradient path, with its inputs and attributes as a lowering needs them.

    `path_inputs` and `path_outputs` are the positions of its inputs and outputs on the path.
    """

    def __init__(self, op: GraphBuilder, path_node: PathNode) -> None:
        self.op = op
        self.ir = path_node.node
        self.op_type = path_node.node.op_type
        self.path_inputs = path_node.inputs
        self.path_outputs = path_node.outputs

    def optional_input(self, index: int) -> Value | None:
        """Return the input at a position; None if it is absent."""
        value = self.ir.inputs[index] if index < len(self.ir.inputs) else None
        return None if value is None else self.op.wrap(value)

    def input(self, index: int) -> Value:
        """Return the input at a position. Raises NoGradientError if it is absent."""
        value = self.optional_input(index)
        if value is None:
            raise NoGradientError(f"its input {index} is missing")
        return value

    def constant_input(self, index: int) -> npt.NDArray[Any] | None:
        """Return a constant input, None if absent. Raises NoGradientError if it is computed."""
        value = self.optional_input(index)
        if value is None:
            return None
        tensor = ir.convenience.get_const_tensor(value.ir)
        if tensor is None:
            raise NoGradientError(
                f"its input {value.name!r} is not a constant", "make it an initializer"
            )
        return tensor.numpy()

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, or the default."""
        attribute = self.ir.attributes.get(name)
        return default if attribute is None else attribute.value

    def text_attribute(self, name: str, default: str) -> str:
        """Return the value of a string attribute, or the default."""
        value = self.attribute(name, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    @property
    def first_output(self) -> Value:
        return self.op.wrap(self.ir.outputs[0])


Outputs = Union[Value, tuple[Union[Value, None], ...], None]
Lowering = Callable[[GraphBuilder, NodeToLower], Outputs]
F = TypeVar("F", bound=Lowering)

LOWERINGS: dict[str, Lowering] = {}


def lowering(*op_types: str) -> Callable[[F], F]:
    """Register the decorated function as the lowering of these operators."""

    def register(function: F) -> F:
        LOWERINGS.update(dict.fromkeys(op_types, function))
        return function

    return register


def require_rank(value: Value) -> int:
    """Return the number of axes. Raises NoGradientError if it is unknown."""
    if value.shape is None:
        raise NoGradientError(f"the rank of {value.name!r} is unknown", STATIC)
    return len(value.shape)


def require_size(value: Value, axis: int) -> int:
    """Return the size of an axis. Raises NoGradientError if it is unknown."""
    require_rank(value)
    assert value.shape is not None
    size = value.shape[axis]
    if not isinstance(size, int):
        raise NoGradientError(f"axis {axis} of {value.name!r} has no fixed size", STATIC)
    return size


def same_shape(a: Value, b: Value) -> bool:
    """Return whether two values surely have the same shape."""
    return a.shape is not None and a.shape == b.shape and None not in a.shape


def expand_to(op: GraphBuilder, value: Value, like: Value) -> Value:
    """Broadcast `value` to the shape of `like` by an Expand, whose gradient sums it back."""
    if same_shape(value, like):
        return value
    if like.shape is None or not all(isinstance(d, int) for d in like.shape):
        raise NoGradientError(
            f"{value.name!r} may broadcast to a size known only at run time", STATIC
        )
    return op.Expand(value, op.constant(np.array(like.shape, np.int64)))


def gather_at(op: GraphBuilder, x: Value, indices: npt.ArrayLike, axis: int) -> Value:
    """Return the elements of x at constant indices along an axis; indices may repeat."""
    return op.Gather(x, op.constant(np.asarray(indices, np.int64)), axis=axis)
