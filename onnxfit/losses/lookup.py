"""Losses by name."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Union

from onnxfit.errors import SettingError, UnknownNameError, nearest_name
from onnxfit.losses.base import Loss
from onnxfit.losses.functions import Function, LossFunction
from onnxfit.registry import find, lookup, registry, snake_case

__all__ = ["get_loss"]

# Losses of these libraries compute with their own tensors and cannot be used here.
OTHER_LIBRARIES = ("jax", "keras", "numpy", "optax", "sklearn", "tensorflow", "tf_keras", "torch")
REGISTRY = "onnxfit.losses"
# Names of other libraries for losses that need arguments here.
OTHER_NAMES = {
    "label_smoothing_cross_entropy": "CrossEntropy(label_smoothing=0.1)",
    "label_smoothing": "CrossEntropy(label_smoothing=0.1)",
    "categorical_cross_entropy_with_label_smoothing": "CrossEntropy(label_smoothing=0.1)",
    "clip": 'InfoNCE(outputs=["image", "text"], learn_temperature=True)',
    "nt_xent": 'NTXent(outputs=["first", "second"])',
    "triplet": 'TripletMargin(outputs=["anchor", "positive", "negative"])',
    "triplet_margin_with_distance": 'TripletMargin(outputs=["anchor", "positive", "negative"])',
    "triplet_semi_hard": 'TripletSemiHard(outputs="embedding")',
    "supervised_contrastive": 'SupCon(outputs="embedding")',
    "mixture_density": "MixtureNLL(components=...)",
}

LossLike = Union[str, Loss, type[Loss], LossFunction]


def get_loss(spec: LossLike) -> Loss:
    """Return the loss that `spec` specifies.

    `spec` is a name, a Loss, which is returned itself, a Loss class, or a function `(op, y_true,
    y_pred) -> Value` that returns one value per sample or a scalar. UnknownNameError (a
    SettingError): the name is unknown; the message has the nearest name. SettingError: `spec` is
    anything else.

    >>> get_loss("huber"), get_loss("MSE")
    (Huber(reduction='mean', delta=1.0), MeanSquaredError(reduction='mean'))
    >>> get_loss("cross_entrpy")
    Traceback (most recent call last):
        ...
    onnxfit.errors.UnknownNameError: No loss is called 'cross_entrpy'. Did you mean ...
    """
    if isinstance(spec, str):
        return _by_name(spec)
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


def _by_name(name: str) -> Loss:
    try:
        return lookup("loss", name, registry(REGISTRY, Loss))  # type: ignore[type-abstract]
    except UnknownNameError:
        advice = find(name, OTHER_NAMES) or _with_arguments(name)
        if advice is None:
            raise
    raise SettingError(f"The loss {name!r} needs arguments. Pass loss=onnxfit.losses.{advice}.")


def _with_arguments(name: str) -> str | None:
    """Return how to make a loss that needs arguments; None for any other name."""
    exports = sys.modules[REGISTRY]
    members = {snake_case(member): getattr(exports, member) for member in exports.__all__}
    unnamed = {key: cls for key, cls in members.items() if vars(cls).get("named") is False}
    cls = find(name, unnamed)
    if cls is None:
        return None
    return f"{cls.__name__}({next(iter(inspect.signature(cls).parameters))}=...)"


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
