"""The registry of forms: how an operator is written so that onnxruntime's builder differentiates it
correctly.

A form is called for a node between weights and loss. It gives the value (or values) that take the
place of the node's output (or outputs), or None where the node may stay, perhaps with attributes
written out; it raises Refused where there is no right form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.paths import PathNode
from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

Form = Callable[[GraphBuilder, PathNode], "Value | tuple[Value | None, ...] | None"]
F = TypeVar("F", bound=Form)

FORMS: dict[str, Form] = {}


def form(*op_types: str) -> Callable[[F], F]:
    """Register the form of these operators."""

    def register(function: F) -> F:
        FORMS.update(dict.fromkeys(op_types, function))
        return function

    return register


def given(op: GraphBuilder, path_node: PathNode, index: int) -> Value | None:
    """The node's input at `index`, or None where it is absent."""
    inputs = path_node.node.inputs
    value = inputs[index] if index < len(inputs) else None
    return None if value is None else op.wrap(value)


def needed(op: GraphBuilder, path_node: PathNode, index: int = 0) -> Value:
    value = given(op, path_node, index)
    if value is None:
        raise NoGradientError(f"its input {index} is missing")
    return value


def attribute(path_node: PathNode, name: str, default: Any = None) -> Any:
    found = path_node.node.attributes.get(name)
    return default if found is None else found.value


def text(path_node: PathNode, name: str, default: str) -> str:
    value = attribute(path_node, name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def known(op: GraphBuilder, path_node: PathNode, index: int) -> npt.NDArray[Any] | None:
    """A constant input as an array; None where it is absent, Refused where it is computed."""
    value = given(op, path_node, index)
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value.ir)
    if tensor is None:
        raise NoGradientError(
            f"its input {value.name!r} is not a constant", "make it an initializer"
        )
    return tensor.numpy()


def rank(value: Value) -> int:
    if value.shape is None:
        raise NoGradientError(f"the rank of {value.name!r} is unknown", STATIC)
    return len(value.shape)


def size(value: Value, axis: int) -> int:
    """The size of an axis, which must be a number."""
    rank(value)
    assert value.shape is not None
    found = value.shape[axis]
    if not isinstance(found, int):
        raise NoGradientError(f"axis {axis} of {value.name!r} has no fixed size", STATIC)
    return found


def same_shape(a: Value, b: Value) -> bool:
    """Whether two values surely have the same shape."""
    return a.shape is not None and a.shape == b.shape and None not in a.shape


def expanded(op: GraphBuilder, value: Value, like: Value) -> Value:
    """`value` broadcast to the shape of `like`, explicitly: its gradient is then summed by the rule
    of Expand.
    """
    if same_shape(value, like):
        return value
    if like.shape is None or not all(isinstance(d, int) for d in like.shape):
        raise NoGradientError(
            f"{value.name!r} may broadcast to a size known only at run time", STATIC
        )
    return op.Expand(value, op.constant(np.array(like.shape, np.int64)))


def result(op: GraphBuilder, path_node: PathNode) -> Value:
    return op.wrap(path_node.node.outputs[0])
