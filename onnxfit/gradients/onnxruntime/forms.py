"""The registry of forms: how an operator is written so that onnxruntime's builder differentiates it correctly.

A form is called for a node between weights and loss. It gives the value (or values) that take the place of the node's output (or
outputs), or None where the node may stay, perhaps with attributes written out; it raises Refused where there is no right form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxfit.gradients.blocker import STATIC
from onnxfit.gradients.paths import Site
from onnxfit.gradients.table import Refused
from onnxfit.graph.values import Op, Value

Form = Callable[[Op, Site], "Value | tuple[Value | None, ...] | None"]
F = TypeVar("F", bound=Form)

FORMS: dict[str, Form] = {}


def form(*op_types: str) -> Callable[[F], F]:
    """Register the form of these operators."""

    def register(function: F) -> F:
        FORMS.update(dict.fromkeys(op_types, function))
        return function

    return register


def given(op: Op, site: Site, index: int) -> Value | None:
    """The node's input at `index`, or None where it is absent."""
    inputs = site.node.inputs
    value = inputs[index] if index < len(inputs) else None
    return None if value is None else op.wrap(value)


def needed(op: Op, site: Site, index: int = 0) -> Value:
    value = given(op, site, index)
    if value is None:
        raise Refused(f"its input {index} is missing")
    return value


def attribute(site: Site, name: str, default: Any = None) -> Any:
    found = site.node.attributes.get(name)
    return default if found is None else found.value


def text(site: Site, name: str, default: str) -> str:
    value = attribute(site, name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def known(op: Op, site: Site, index: int) -> npt.NDArray[Any] | None:
    """A constant input as an array; None where it is absent, Refused where it is computed."""
    value = given(op, site, index)
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value.ir)
    if tensor is None:
        raise Refused(f"its input {value.name!r} is not a constant", "make it an initializer")
    return tensor.numpy()


def rank(value: Value) -> int:
    if value.shape is None:
        raise Refused(f"the rank of {value.name!r} is unknown", STATIC)
    return len(value.shape)


def size(value: Value, axis: int) -> int:
    """The size of an axis, which must be a number."""
    rank(value)
    assert value.shape is not None
    found = value.shape[axis]
    if not isinstance(found, int):
        raise Refused(f"axis {axis} of {value.name!r} has no fixed size", STATIC)
    return found


def same_shape(a: Value, b: Value) -> bool:
    """Whether two values surely have the same shape."""
    return a.shape is not None and a.shape == b.shape and None not in a.shape


def expanded(op: Op, value: Value, like: Value) -> Value:
    """`value` broadcast to the shape of `like`, explicitly: its gradient is then summed by the rule of Expand."""
    if same_shape(value, like):
        return value
    if like.shape is None or not all(isinstance(d, int) for d in like.shape):
        raise Refused(f"{value.name!r} may broadcast to a size known only at run time", STATIC)
    return op.Expand(value, op.constant(np.array(like.shape, np.int64)))


def result(op: Op, site: Site) -> Value:
    return op.wrap(site.node.outputs[0])
