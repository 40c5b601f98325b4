"""Metric objects of Keras and torchmetrics."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.checks import shortened
from onnxfit.errors import (
    CheckpointError,
    DataError,
    OnnxfitError,
    SettingError,
    UnsupportedError,
    listed_names,
    warn_user,
)
from onnxfit.metrics.alignment import class_axis, counted_rows, per_element
from onnxfit.metrics.base import Array, Metric
from onnxfit.metrics.functions import mode_by_name, one_number, takes_two

__all__ = ["ExternalMetric"]

KERAS_METHODS = ("update_state", "result", "reset_state")
TORCHMETRICS_METHODS = ("update", "compute", "reset")


@dataclass
class ExternalMetric(Metric):
    """A metric object of Keras or torchmetrics, or one with the same methods.

    - `metric`: an object with Keras's `update_state(y_true, y_pred, sample_weight=None)`, `result`
      and `reset_state`, or torchmetrics's `update(preds, target)`, `compute` and `reset`. It is
      copied, so the object itself does not change.
    - `weighted`: as in `Metric`, for objects that take `sample_weight`.
    - `name`: as in `Metric`; by default the name that the object has, or that of its class.

    The object gets labels and outputs as other metrics do, without the labels that the loss
    ignores, and with the class axis that its library expects: the last for Keras, 1 for
    torchmetrics's classification. Outputs may be logits: torchmetrics turns them into
    probabilities, objects of Keras do not. An object of torchmetrics gets tensors, and whole
    numbers as labels of a classification; one of Keras that needs one-hot labels gets them.
    `Trainer(metrics=)` and `get_metric` wrap such objects.

    A checkpoint within an epoch contains the object's state: Keras's `variables`, torchmetrics's
    states, or attributes that are numbers, arrays or lists of arrays. If it has others, a warning
    says, after resuming, that the epoch's figure lacks the earlier batches. In several processes,
    torchmetrics's states are merged if they are sums, extremes or lists.

    SettingError: the object lacks a method, or with `weighted` does not take weights. DataError:
    the object returns more than one number, or cannot use labels and outputs. UnsupportedError: the
    object cannot be merged.

    >>> class Largest:
    ...     def reset_state(self):
    ...         self.largest = 0.0
    ...
    ...     def update_state(self, y_true, y_pred):
    ...         self.largest = max(self.largest, float(abs(y_true - y_pred).max()))
    ...
    ...     def result(self):
    ...         return self.largest
    >>> metric = ExternalMetric(Largest())
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 5.0]))
    >>> metric.name, metric.result()
    ('largest', 3.0)
    """

    named = False

    metric: Any

    def __post_init__(self) -> None:
        self.is_keras = hasattr(self.metric, "update_state")
        self.external = self._copied(self.metric)
        self._require_methods()
        better = getattr(self.metric, "higher_is_better", None)
        if better is None:
            better = mode_by_name(f"{self._own_name()} {self._class_name()}") == "max"
        self.mode = "max" if better else "min"  # type: ignore[misc]
        super().__post_init__()

    def __copy__(self) -> ExternalMetric:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.external = self._copied(self.external)
        return other

    def _copied(self, metric: Any) -> Any:
        try:
            return copy.deepcopy(metric)
        except Exception as error:
            raise SettingError(
                f"The metric object {shortened(metric)} cannot be copied: {error}. Each output and"
                " each evaluation needs its own copy."
            ) from error

    def _own_name(self) -> str:
        name = getattr(self.metric, "name", None)
        return name if isinstance(name, str) and name else self._class_name()

    def _class_name(self) -> str:
        words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
        return re.sub(words, "_", type(self.metric).__name__).lower()

    def _require_methods(self) -> None:
        methods = KERAS_METHODS if self.is_keras else TORCHMETRICS_METHODS
        kind = type(self.metric).__name__
        lacking = [name for name in methods if not callable(getattr(self.metric, name, None))]
        if lacking:
            raise SettingError(
                f"The metric object {kind} lacks {', '.join(lacking)}. Expected Keras's methods"
                f" {', '.join(KERAS_METHODS)}, or torchmetrics's"
                f" {', '.join(TORCHMETRICS_METHODS)}."
            )
        update = getattr(self.metric, methods[0])
        names = _fillable_parameters(update)
        if not takes_two(update) or names[1:2] in (["sample_weight"], ["weight"]):
            raise SettingError(
                f"{kind}.{methods[0]} does not take labels and outputs: its parameters are"
                f" ({', '.join(names)}). Pass a metric that compares them."
            )
        self.labels_first = self.is_keras or names[:1] in (["y_true"], ["target"], ["labels"])
        if self.weighted and not {"sample_weight", "**"} & set(names):
            raise SettingError(
                f"weighted=True needs a metric with sample weights, but {kind}.{methods[0]} takes"
                f" ({', '.join(names)}). Leave weighted out."
            )

    def reset(self) -> None:
        self._rows = 0
        if self.is_keras:
            self.external.reset_state()
        else:
            self.external.reset()

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if not len(y_pred):
            return
        labels, outputs, weights = self._arranged(y_true, y_pred, weights)
        arrays = [self._tensor(np.array(labels)), self._tensor(np.array(outputs))]
        named = {} if weights is None else {"sample_weight": self._tensor(weights)}
        update = self.external.update_state if self.is_keras else self.external.update
        try:
            update(*(arrays if self.labels_first else reversed(arrays)), **named)
        except OnnxfitError:
            raise
        except Exception as error:
            raise DataError(
                f"{type(self.metric).__name__} cannot use labels {y_true.dtype}"
                f"{list(y_true.shape)} and outputs {y_pred.dtype}{list(y_pred.shape)}: {error}"
            ) from error
        is_first = not self._rows
        self._rows += len(y_pred)
        if is_first:
            self.result()  # refuses an object that returns several numbers, before an update

    def _arranged(
        self, y_true: Array, y_pred: Array, weights: Array | None
    ) -> tuple[Array, Array, Array | None]:
        """Return labels, outputs and weights as the object expects them, without ignored labels."""
        bases = type(self.metric).__mro__
        classifies = any(b.__module__.startswith("torchmetrics.classification") for b in bases)
        axis = class_axis(y_true, y_pred)
        if axis is not None and (y_true < 0).any():
            counted, scores = y_true >= 0, np.moveaxis(y_pred, axis, -1)
            if weights is not None:
                weights = per_element(weights, y_true.shape)[counted]
            y_true, y_pred, axis = y_true[counted], scores[counted], 1
        if axis is not None and (self.is_keras or classifies):
            y_pred = np.moveaxis(y_pred, axis, -1 if self.is_keras else 1)
        if axis is not None and any(_wants_one_hot(base) for base in bases):
            y_true = np.eye(y_pred.shape[-1], dtype=np.float32)[y_true.astype(np.int64)]
        if classifies and y_true.dtype.kind == "f" and not (y_true % 1).any():
            y_true = y_true.astype(np.int64)
        return y_true, y_pred, weights

    def _tensor(self, array: Array) -> Any:
        """Return an array as the object takes it: as a tensor if it is a module of torch."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self.external, torch.nn.Module):
            return array
        return torch.from_numpy(np.array(array)).to(getattr(self.external, "device", "cpu"))

    def result(self) -> float:
        if not self._rows:
            return math.nan
        with warnings.catch_warnings():  # torchmetrics does not know of a restored state
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
            figure = self.external.result() if self.is_keras else self.external.compute()
        return one_number(self.name, figure)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        values = {n: _as_numbers(v) for n, v in self._values().items() if _is_counted(v)}
        if any(value is None for value in values.values()):
            return {"_rows": self._rows}
        return {"_rows": self._rows, "_values": values}

    def _values(self) -> dict[str, Any]:
        """Return the values that make up the state of the object."""
        if hasattr(self.external, "variables"):
            return {str(number): v for number, v in enumerate(self.external.variables)}
        if hasattr(self.external, "metric_state"):
            return dict(self.external.metric_state)
        return dict(vars(self.external))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        rows, values = state.get("_rows"), state.get("_values")
        if isinstance(rows, int) and rows and values is None:
            warn_user(
                f"The checkpoint lacks the state of the metric {self.name!r}, because it consists"
                " of more than numbers and arrays. The figure of this epoch will cover only the"
                " batches after the checkpoint."
            )
            return
        own = self._values()
        needed = {name for name, value in own.items() if _is_counted(value)}
        if not isinstance(rows, int) or (rows and not needed <= set(values or ()) <= set(own)):
            raise CheckpointError(
                f"The metric {self.name!r} stores {listed_names(own) or 'nothing'}, but the"
                f" checkpoint has {listed_names(values or ()) or 'nothing'}. Use the metric with"
                " which the checkpoint was saved."
            )
        self._rows = rows
        for name, value in (values or {}).items():
            self._restore(name, own[name], value)

    def _restore(self, name: str, own: Any, value: Any) -> None:
        if hasattr(own, "assign"):
            own.assign(np.asarray(value))
        elif isinstance(value, list):
            setattr(self.external, name, [self._tensor(np.asarray(entry)) for entry in value])
        else:
            is_number = isinstance(own, (bool, int, float))
            setattr(self.external, name, value if is_number else self._tensor(np.asarray(value)))

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        reductions = getattr(self.external, "_reductions", None)
        found = {getattr(r, "__name__", None) for r in (reductions or {}).values()}
        if reductions is None or not found <= set(MERGED_BY):
            raise UnsupportedError(
                f"The metric {self.name!r} cannot be merged from several processes, because"
                f" {type(self.metric).__name__} does not say how to add up its state. Use a metric"
                " of onnxfit, or EpochMetric."
            )
        for state in states:
            if not state["_rows"]:
                continue
            if not self._rows:
                self.load_state_dict(state)
                continue
            for name, value in self._values().items():
                merge = MERGED_BY[reductions[name].__name__]
                self._restore(name, value, merge(_as_numbers(value), state["_values"][name]))
            self._rows += state["_rows"]


def _wants_one_hot(cls: type) -> bool:
    """Whether a class of Keras reads labels as one-hot, without an error for indices."""
    names = r"(TopK)?Categorical\w+|F1Score|FBetaScore|Precision|Recall|AUC|OneHot\w+"
    is_own = cls.__module__.split(".")[0] in ("keras", "tf_keras")
    return is_own and re.fullmatch(names, cls.__name__) is not None


def _concatenated_pair(one: Any, other: Any) -> Any:
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *other]
    return np.concatenate([np.atleast_1d(one), np.atleast_1d(other)])


# name of a reduction of torchmetrics -> how the states of two processes become one
MERGED_BY: dict[str | None, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": np.add,
    "dim_zero_max": np.maximum,
    "dim_zero_min": np.minimum,
    "dim_zero_cat": _concatenated_pair,
}


def has_state(metric: Any) -> bool:
    """Whether an object adds up batches by itself, as those of Keras and torchmetrics do."""
    if isinstance(metric, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return False
    has = {name for name in ("update", "reset", "update_state", "compute") if hasattr(metric, name)}
    return bool(has & {"update_state", "compute"}) or has == {"update", "reset"}


def _fillable_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a call may fill, `**` for any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return ["**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters]


def _is_counted(value: Any) -> bool:
    """Whether an attribute may be the state of a metric, and no setting."""
    return not isinstance(value, (str, type(None), type, types.FunctionType))


def _as_numbers(value: Any) -> Any:
    """Return a value of a state as a number, an array, or a list of arrays; None for others."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        entries = [_as_numbers(entry) for entry in value]
        return None if any(entry is None for entry in entries) else entries
    value = value.detach().cpu() if hasattr(value, "detach") else value
    try:
        array = np.array(value)
    except Exception:
        return None
    return array if array.dtype.kind in "biuf" else None
