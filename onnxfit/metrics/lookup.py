"""Metrics by name, and metrics that users pass as objects or functions."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Union

from onnxfit.checks import shortened
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.metrics.base import Array, Metric
from onnxfit.metrics.external import ExternalMetric, has_state
from onnxfit.metrics.functions import FunctionMetric, takes_two
from onnxfit.registry import find, lookup, registry

__all__ = ["get_metric"]

# Names of other libraries that mean a metric with a setting, or something that is no metric here
OTHER_NAMES = {
    **dict.fromkeys(
        ("multilabel_f1_score", "multilabel_precision", "multilabel_recall",
         "multilabel_fbeta_score", "multilabel_specificity", "multilabel_jaccard_index"),
        "Pass the metric with multi_label=True, such as onnxfit.metrics.F1(multi_label=True).",
    ),
    **dict.fromkeys(
        ("hamming_loss", "hamming_distance", "multilabel_accuracy", "multilabel_hamming_distance"),
        "The share of right decisions is 'binary_accuracy', and 1 minus it the Hamming distance.",
    ),
    "zero_one_loss": "It is 1 minus 'accuracy'.",
    "stat_scores": "Pass 'true_positives', 'false_positives', 'true_negatives', 'false_negatives'.",
    "classification_report": "Pass F1, Precision and Recall of onnxfit.metrics with average=None.",
    **dict.fromkeys(
        ("mean", "sum", "mean_metric", "sum_metric"),
        "Pass a function (y_true, y_pred) -> one value per row, whose mean is the metric.",
    ),
    **dict.fromkeys(
        ("hinge", "squared_hinge", "categorical_hinge", "poisson", "kl_divergence", "huber",
         "mean_pinball_loss", "hinge_loss"),
        "It is a loss of onnxfit. As a metric, pass a function (y_true, y_pred) -> one value per"
        " row.",
    ),
}  # fmt: skip
# Functions of scikit-learn that need all rows
SKLEARN_FUNCTIONS = (
    "coverage_error", "d2_absolute_error_score", "d2_pinball_score", "d2_tweedie_score",
    "label_ranking_average_precision_score", "label_ranking_loss", "mean_gamma_deviance",
    "mean_poisson_deviance", "mean_tweedie_deviance", "median_absolute_error",
    "adjusted_rand_score", "mutual_info_score", "silhouette_score",
)  # fmt: skip

MetricLike = Union[str, Metric, Callable[[Array, Array], Any], Any]


def get_metric(spec: MetricLike | type[Metric]) -> Metric:
    """Return a new Metric that `spec` specifies.

    `spec` is a name, a Metric, whose settings are copied, a Metric class, a metric object of Keras
    or torchmetrics (`ExternalMetric`), or a function `(y_true, y_pred) -> value`: one value per row
    or element, whose mean is the metric, or one for the batch. The number of an epoch is then the
    mean over the batches, weighted by their rows. For a function that is no mean over rows, such as
    an F1 score, this is another figure than that of all rows, and a warning says so; `EpochMetric`
    computes the figure of all rows. To find this out, the function is also called with halves of
    some batches. A name is logged as typed, a function under its own name. UnknownNameError (a
    SettingError): the name is unknown. SettingError: `spec` is anything else.

    >>> from onnxfit.metrics import Precision
    >>> get_metric("acc").name, get_metric(Precision(weighted=True)).name
    ('acc', 'weighted_precision')
    """
    if isinstance(spec, str):
        known = registry("onnxfit.metrics", Metric)  # type: ignore[type-abstract]
        try:
            return lookup("metric", spec, known, name=spec)
        except UnknownNameError:
            raise UnknownNameError("metric", spec, known, _advice(spec, known)) from None
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


def _advice(given: str, known: Mapping[str, type[Metric]]) -> str:
    """Return a sentence about a name of Keras, torchmetrics or scikit-learn; "" for others."""
    advice = find(given, OTHER_NAMES)
    if advice is not None:
        return advice
    function = find(given, {name: name for name in SKLEARN_FUNCTIONS})
    if function is not None:
        return f"Pass onnxfit.metrics.EpochMetric(sklearn.metrics.{function})."
    kind = re.match("(?i)(neg|binary|multiclass|multilabel)_?", given)
    meant = find(given[kind.end() :], {name: name for name in known}) if kind else None
    return f"Did you mean {meant!r}?" if meant else ""
