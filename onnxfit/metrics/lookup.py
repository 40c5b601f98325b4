"""Metrics by name, and metrics that users pass as objects or functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Union

from onnxfit.checks import shortened
from onnxfit.errors import SettingError
from onnxfit.metrics.base import Array, Metric
from onnxfit.metrics.external import ExternalMetric, has_state
from onnxfit.metrics.functions import FunctionMetric, takes_two
from onnxfit.registry import lookup, registry

__all__ = ["get_metric"]

MetricLike = Union[str, Metric, Callable[[Array, Array], Any], Any]


def get_metric(spec: MetricLike | type[Metric]) -> Metric:
    """Return a new Metric that `spec` specifies.

    `spec` is a name, a Metric, whose settings are copied, a Metric class, a metric object of Keras
    or torchmetrics (`ExternalMetric`), or a function `(y_true, y_pred) -> value`: one value per row
    or element, whose mean is the metric, or one for the batch. The number of an epoch is then the
    mean over the batches, weighted by their rows. For a function that is no mean over rows, such as
    an F1 score, this is another figure than that of all rows, and a warning says so; `EpochMetric`
    computes the figure of all rows. To find this out, the function is also called with halves of
    some batches. A name is logged as typed, a function under its own name. Raises UnknownNameError
    (a SettingError) for an unknown name, and SettingError for anything else.

    >>> from onnxfit.metrics import Precision
    >>> get_metric("acc").name, get_metric(Precision(weighted=True)).name
    ('acc', 'weighted_precision')
    """
    if isinstance(spec, str):
        known = registry("onnxfit.metrics", Metric)  # type: ignore[type-abstract]
        return lookup("metric", spec, known, name=spec)
    if isinstance(spec, Metric):
        metric = copy.copy(spec)  # one object passed for two outputs must not add up both
        metric.reset()
        return metric
    if isinstance(spec, type):
        if issubclass(spec, Metric):
            return spec()
        raise SettingError(
            f"A metric must be an object, got the class {spec.__name__}. Create an object:"
            f" {spec.__name__}(...)."
        )
    if has_state(spec):
        return ExternalMetric(spec)
    if callable(spec):
        if not takes_two(spec):
            raise SettingError(
                "A metric function must take the two arguments (y_true, y_pred), got"
                f" {shortened(spec)}. Pass a function of labels and outputs."
            )
        return FunctionMetric(spec)
    raise SettingError(
        "A metric must be a name, a Metric, a metric object of Keras or torchmetrics, or a function"
        f" (y_true, y_pred), got {shortened(spec)}."
    )
