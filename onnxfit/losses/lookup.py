"""Losses by name."""

from __future__ import annotations

import inspect
from typing import Any, Union

from onnxfit.errors import SettingError, UnknownNameError, nearest_name
from onnxfit.losses.base import Loss
from onnxfit.losses.functions import Function, LossFunction
from onnxfit.registry import lookup, registry, snake_case

__all__ = ["get_loss"]

# Losses of these libraries compute with their own tensors and cannot be used here.
OTHER_LIBRARIES = ("jax", "keras", "numpy", "optax", "sklearn", "tensorflow", "tf_keras", "torch")
REGISTRY = "onnxfit.losses"

LossLike = Union[str, Loss, type[Loss], LossFunction]


def get_loss(spec: LossLike) -> Loss:
    """Return the loss that `spec` specifies.

    `spec` is a name, a Loss, which is returned itself, a Loss class, or a function `(op, y_true,
    y_pred) -> Value` that returns one value per sample or a scalar. Raises UnknownNameError (a
    SettingError), with the nearest name, for an unknown name, and SettingError for anything else.

    >>> get_loss("huber"), get_loss("MSE")
    (Huber(reduction='mean', delta=1.0), MeanSquaredError(reduction='mean'))
    >>> get_loss("cross_entrpy")
    Traceback (most recent call last):
        ...
    onnxfit.errors.UnknownNameError: No loss is called 'cross_entrpy'. Did you mean ...
    """
    if isinstance(spec, str):
        return lookup("loss", spec, registry(REGISTRY, Loss))  # type: ignore[type-abstract]
    if isinstance(spec, Loss):
        return spec
    if isinstance(spec, type) and issubclass(spec, Loss):
        return spec()
    _refuse_other_library(spec)
    if callable(spec) and not isinstance(spec, type):
        try:
            inspect.signature(spec).bind(None, None, None)
        except TypeError:
            raise SettingError(
                f"A loss function must accept (op, y_true, y_pred), but {spec!r} does not. op"
                " builds the graph, as in lambda op, y_true, y_pred: op.Abs(y_true - y_pred)."
            ) from None
        except ValueError:  # a callable without a signature
            pass
        return Function(spec)
    raise SettingError(
        f"loss must be a name, a Loss or a function (op, y_true, y_pred) -> Value, got {spec!r}."
    )


def _refuse_other_library(spec: Any) -> None:
    """Raise SettingError for a loss of PyTorch, Keras or scikit-learn; name onnxfit's own."""
    module = str(getattr(spec, "__module__", None) or "")
    library = module.split(".")[0]
    is_module = hasattr(spec, "forward") and hasattr(spec, "parameters")
    if library not in OTHER_LIBRARIES and not is_module:
        return
    name = getattr(spec, "__name__", None) or type(spec).__name__
    try:
        ours = snake_case(type(get_loss(name)).__name__)
    except UnknownNameError:
        known = registry(REGISTRY, Loss)  # type: ignore[type-abstract]
        ours = nearest_name(name, known) or "mean_squared_error"
    raise SettingError(
        f"{name} computes with arrays or tensors, but a loss must build ONNX nodes. Use"
        f" loss={ours!r}, or write a function: lambda op, y_true, y_pred: op.Abs(y_true - y_pred)."
    )
