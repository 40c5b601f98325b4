"""Functions of the user as losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.checks import name_list, set_field, shortened
from onnxfit.errors import SettingError, UnsupportedError, listed_names
from onnxfit.graph.labels import (
    adopt_sizes,
    declared_labels,
    fit_shape,
    label_numbers,
    parse_labels,
)
from onnxfit.graph.spec import Dim, TensorSpec
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.load.opset import empty_graph
from onnxfit.losses.base import Loss, loss_name
from onnxfit.losses.checks import class_axis

__all__ = ["Function", "Joint"]

LossFunction = Callable[..., Value]  # (op, y_true, y_pred), and the tensors that it trains


@dataclass(frozen=True)
class Function(Loss):
    """A function `(op, y_true, y_pred) -> Value` as a loss, with labels of any shape and type.

    `loss=function` is the same as `loss=Function(function)`.

    - `function`: returns one value per sample or element, or a scalar, which is not reduced.
    - `labels`: element type and shape of the labels as in ONNX's text syntax, such as "int64[b]" or
      "float[b, 7, 4]": the first size is the batch, under any name, a number is checked, and any
      other name or "?" is free. A dict name -> text declares several arrays; `y_true` is then a
      dict name -> Value, and `fit` takes `y={"class": ..., "boxes": ...}`. None takes labels of the
      output's shape, which get its element type, or of another shape, such as class indices, which
      are passed unchanged.
    - `weights`: tensors that the loss trains, a dict name -> initial values, in the element type of
      the output. The function gets them as keywords; see `Loss.initial_weights`.
    - `reduction` is as in `Loss`.

    SettingError: the text is no element type and shape. DataError: labels do not fit it.

    >>> def box_error(op, y_true, y_pred):
    ...     distance = op.ReduceSum(op.Abs(y_pred - y_true["box"]), [1], keepdims=0)
    ...     return op.Where(y_true["has_box"], distance, 0)
    >>> loss = Function(box_error, labels={"has_box": "bool[b]", "box": "float[b, 4]"})
    >>> [v.name for v in loss.build_onnx_function(("b", 4)).graph.input]
    ['y_true/has_box', 'y_true/box', 'y_pred']
    """

    named = False

    function: LossFunction
    labels: str | Mapping[str, str] | None = None
    weights: Mapping[str, npt.ArrayLike] | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise SettingError(f"Function needs a function, got {shortened(self.function)}.")
        _ = self.declared  # reports a wrong text here
        if self.has_weights:
            _check_call(self, ["op", "y_true", "y_pred"])

    def initial_weights(self, y_pred: Any, random: np.random.Generator) -> Mapping[str, Any]:
        return self.weights or {}

    @property
    def has_weights(self) -> bool:
        return bool(_weights_of_function(self))

    @cached_property
    def declared(self) -> Mapping[str, TensorSpec] | None:
        """The labels that `labels` declares, by name."""
        return None if self.labels is None else parse_labels(self.labels)

    def __call__(self, op: GraphBuilder, y_true: Value, y_pred: Value, **weights: Value) -> Value:
        return _built(self, lambda: self.function(op, y_true, y_pred, **weights))

    def target(self, y_pred: TensorSpec) -> TensorSpec:
        same = super().target(y_pred)
        if self.declared is not None:
            return self.declared.get("", same)
        if y_pred.shape is None or len(y_pred.shape) < 2 or _takes(self, same, y_pred):
            return same
        axis = class_axis(self, None, len(y_pred.shape))
        sizes = y_pred.shape[:axis] + y_pred.shape[axis + 1 :]
        if y_pred.shape[axis] == 1:
            return same
        indices = TensorSpec("y_true", np.dtype(np.int64), sizes)
        return indices if _takes(self, indices, y_pred) else same

    def prepare(self, y: npt.ArrayLike, y_pred: TensorSpec) -> npt.NDArray[Any]:
        if self.declared is not None:
            return declared_labels(loss_name(self), np.asarray(y), self.target(y_pred))
        labels = label_numbers(loss_name(self), y)
        expected = self.target(y_pred)
        if expected.dtype.kind in "iu" or fit_shape(labels, expected) is None:
            return labels
        return super().prepare(labels, y_pred)

    def _label_inputs(self, op: GraphBuilder, y_pred: TensorSpec) -> Any:
        if self.declared is None or "" in self.declared:
            return super()._label_inputs(op, y_pred)
        return {
            name: op.input(f"y_true/{name}", spec.dtype, spec.shape or ())
            for name, spec in self.declared.items()
        }

    def _adopt_sizes(self, y_true: Any, y_pred: Value) -> None:
        for labels in y_true.values() if isinstance(y_true, Mapping) else [y_true]:
            super()._adopt_sizes(labels, y_pred)

    def _label_sizes(self, y_true: Value, y_pred: Value) -> tuple[Dim, ...] | None:
        # Labels may have another shape than the output.
        return y_pred.shape[:1] + (None,) * (y_true.rank - 1) if y_pred.shape else None

    def _name_in_messages(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


@dataclass(frozen=True)
class Joint(Loss):
    """A function of several outputs, inputs and values of the model as one loss.

    - `function`: `(op, *read)`, or `(op, y_true, *read)` with labels; returns one value per sample
      or element, or a scalar, which is not reduced. `read` has the values of `outputs`, `inputs`
      and `values`, in this order.
    - `outputs`, `inputs`: names of the model's outputs and inputs, one or several.
    - `values`: names of other values of the file: results of nodes, or initializers.
    - `labels`, `weights`: as in `Function`; None for a loss without labels, or without tensors of
      its own.
    - `reduction` is as in `Loss`. A sample weight multiplies the value of its row; the function
      sees rows of weight 0 like all others. Several processes compute the function on their own
      rows each, and average.

    `loss=Joint(...)` is the only loss of a model; `loss={"name": Joint(...), "output": "mse"}`
    trains several losses. The name is free, and is the one of the labels.

    SettingError: the function does not take as many arguments as the loss reads.

    >>> def pull(op, image, text):
    ...     return op.ReduceSum((image - text) ** 2, [1], keepdims=0)
    >>> Joint(pull, outputs=["image", "text"]).read
    ('image', 'text')
    """

    named = False

    function: Callable[..., Value]
    outputs: Sequence[str] | str = ()
    inputs: Sequence[str] | str = field(default=(), kw_only=True)
    values: Sequence[str] | str = field(default=(), kw_only=True)
    labels: str | Mapping[str, str] | None = field(default=None, kw_only=True)
    weights: Mapping[str, npt.ArrayLike] | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("outputs", "inputs", "values"):
            set_field(self, kind, tuple(name_list(kind, getattr(self, kind))))
        if not self.read:
            raise SettingError("Joint needs the name of an output, an input or a value to read.")
        self._check_function()

    def _check_function(self) -> None:
        """Raise SettingError unless the function takes what the loss reads."""
        _check_call(self, ["op", *(["y_true"] if self.declared else []), *self.read])

    def initial_weights(self, y_pred: Any, random: np.random.Generator) -> Mapping[str, Any]:
        return self.weights or {}

    @property
    def has_weights(self) -> bool:
        return bool(_weights_of_function(self))

    @property
    def read(self) -> tuple[str, ...]:
        """The names of all that the function reads, in the order of its arguments."""
        return (*self.outputs, *self.inputs, *self.values)

    @cached_property
    def declared(self) -> Mapping[str, TensorSpec]:
        """The labels that `labels` declares, by name."""
        return {} if self.labels is None else parse_labels(self.labels)

    def __call__(self, op: GraphBuilder, y_true: Any, y_pred: Any, **weights: Value) -> Value:
        labels = [y_true] if self.declared else []
        return _built(self, lambda: self.function(op, *labels, *y_pred, **weights))

    def build_onnx_function(self, *arguments: Any, **settings: Any) -> onnx.ModelProto:
        """Raise UnsupportedError: the shapes of what a Joint reads are those of a model.

        - `arguments`, `settings`: those of `Loss.build_onnx_function`.
        """
        raise UnsupportedError(
            "A Joint loss reads values of a model. Use onnxfit.add_loss(model, loss), which returns"
            " the model with its loss as one more output."
        )

    def _adopt_sizes(self, y_true: Any, y_pred: Any) -> None:
        rows = _batch_rows(y_pred)
        for labels in y_true.values() if isinstance(y_true, Mapping) else [y_true]:
            if labels is not None:
                adopt_sizes(labels, (rows,) + (None,) * (labels.rank - 1))

    def _adopt_rows(self, sample_weight: Value, y_pred: Any) -> None:
        if sample_weight.rank == 1:
            adopt_sizes(sample_weight, (_batch_rows(y_pred),))

    def _without_weightless(self, op: GraphBuilder, counts: Value, y_true: Any, y_pred: Any) -> Any:
        # The loss of a row may depend on all rows, and zeros would not be neutral there.
        return y_pred

    def _name_in_messages(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


@dataclass(frozen=True)
class JointFormula(Joint):
    """Base class of losses of several outputs whose formula is their own `__call__`.

    `named` is False, because such a loss needs the names of the outputs.
    """

    named = False

    function: Any = field(default=None, init=False, repr=False)
    labels: Any = field(default=None, init=False, repr=False)
    weights: Any = field(default=None, init=False, repr=False, compare=False)

    def _name_in_messages(self) -> str:
        return type(self).__name__


def _weights_of_function(loss: Function | Joint) -> Mapping[str, npt.ArrayLike]:
    """Return the tensors that a function trains. SettingError: they are no dict by name."""
    weights = {} if loss.weights is None else loss.weights
    if not isinstance(weights, Mapping) or not all(map(str.isidentifier, map(str, weights))):
        raise SettingError(
            f"{type(loss).__name__} needs weights={{name: initial values}}, whose names are"
            f" parameters of the function, got {shortened(loss.weights)}."
        )
    return weights


def _check_call(loss: Function | Joint, arguments: Sequence[str]) -> None:
    """Raise SettingError unless the function takes these arguments, and the loss's tensors."""
    weights = _weights_of_function(loss)
    try:
        inspect.signature(loss.function).bind(*arguments, **weights)
    except TypeError:
        raise SettingError(
            f"The function of {type(loss).__name__} must accept"
            f" ({', '.join([*arguments, *weights])}), but {shortened(loss.function)} does not."
        ) from None
    except ValueError:  # a callable without a signature
        pass


def require_names(loss: Joint, fits: bool, what: str) -> None:
    if not fits:
        raise SettingError(
            f"{type(loss).__name__} needs the names of {what}, got {listed_names(loss.read)}."
        )


def _batch_rows(values: Sequence[Value]) -> Dim:
    """The rows of a batch, which the first value with axes has."""
    return next((value.shape[0] for value in values if value.shape), None)


def _built(loss: Loss, build: Callable[[], Any]) -> Value:
    """Return the value that a function of the user builds, or raise an error that names it."""
    try:
        value = build()
    except (AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"{loss_name(loss)} failed on the values of the graph: {error}\nBuild the loss from"
            " op's ONNX operators and + - * / ** abs, as in lambda op, y_true, y_pred:"
            " op.Abs(y_true - y_pred). Functions of NumPy and PyTorch do not accept these values."
        ) from error
    if not isinstance(value, Value) or value.dtype.kind != "f":
        raise SettingError(f"{loss_name(loss)} must return a Value of floats, got {value!r}.")
    return value


@lru_cache(maxsize=128)
def _takes(loss: Function, labels: TensorSpec, y_pred: TensorSpec) -> bool:
    """Whether the function builds its graph for these labels and this output."""
    op = empty_graph("trial")
    inputs = (op.input(spec.name, spec.dtype, spec.shape or ()) for spec in (labels, y_pred))
    own = {
        name: op.input(name, y_pred.dtype, np.shape(array))
        for name, array in _weights_of_function(loss).items()
    }
    try:
        loss(op, *inputs, **own)
    except ValueError:
        return False
    return True
