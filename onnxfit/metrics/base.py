"""The base class of metrics, and the states that they merge."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from onnxfit.checks import ChecksArguments, shortened
from onnxfit.errors import CheckpointError, SettingError, UnsupportedError, listed_names
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import is_newest, snake_case

__all__ = ["Metric"]

Array = npt.NDArray[Any]
# Infinite outputs make NaN figures, and the loss already reports them.
without_warnings = np.errstate(invalid="ignore", over="ignore")


@dataclass
class Metric(ChecksArguments, ABC):
    """Base class of every metric: `reset`, then `update` for each batch, then `result`.

    - `weighted`: count every row, or every label, by its sample weight, and put `weighted_` before
      the name; otherwise sample weights are ignored. A row or label of weight 0 has no influence,
      even if it contains NaN.
    - `name`: the name under which the metric is logged; by default the class's name in snake case.

    `mode` is "max" if more is better, else "min"; `scalar` tells whether the result is a float;
    `running` whether the logs of batches have it, too. Without rows the result is NaN. A metric of
    several figures returns an array of them and has `figure_names`.

    To write a metric, subclass with a dataclass. Its fields are settings. `reset` sets attributes
    that begin with an underscore, always as new objects; `update` changes them and `result` reads
    them. A metric for training in several processes also needs `merge`. For the mean of a value per
    row or element, a function `(y_true, y_pred) -> values` is enough, and for a function of all
    rows there is `EpochMetric`. `sums` is optional: it saves copies of large outputs.

    `update` gets the loss's labels `y_true`: of the shape of `y_pred`, or integer classes without
    the class axis. `y_pred` is the model's output. A metric with `takes_dicts` also serves losses
    of several arrays of labels or of several outputs: `y_true` is then a dict of the labels, and
    `y_pred` a dict of the outputs. All arrays are read-only, and may be overwritten after `update`,
    so a metric stores copies. Classes that the outputs do not have are
    ignored. The class axis is the one that fits the labels; if several fit, 1 for outputs of rank 4
    or more, else the last.

    Several metrics have a setting `from_logits`: True for outputs that are raw scores, False to
    compare the outputs unchanged, None (the default) for the decision of the output's loss, which
    `Trainer.summary()` shows; outside a Trainer, None means False.

    >>> import math
    >>> @dataclass
    ... class LargestError(Metric):
    ...     def reset(self):
    ...         self._largest = math.nan
    ...
    ...     def update(self, y_true, y_pred, sample_weight=None):
    ...         self._largest = float(np.fmax(self._largest, np.abs(y_true - y_pred).max()))
    ...
    ...     def result(self):
    ...         return self._largest
    ...
    ...     def merge(self, states):
    ...         for state in states:
    ...             self._largest = float(np.fmax(self._largest, state["_largest"]))
    >>> metric = LargestError()
    >>> metric.update(np.array([1.0, 2.0]), np.array([1.5, 5.0]))
    >>> metric.name, metric.result()
    ('largest_error', 3.0)
    >>> other = LargestError()
    >>> other.update(np.array([1.0]), np.array([8.0]))
    >>> metric.merge([other.state_dict()])
    >>> metric.result()
    7.0
    """

    mode: ClassVar[str] = "min"
    scalar: ClassVar[bool] = True
    running: ClassVar[bool] = True
    takes_dicts: ClassVar[bool] = False  # whether `update` takes several arrays, as dicts
    aliases: ClassVar[tuple[str, ...]] = ()  # further names, of this class alone
    # Fields that, if None, take the value that the output's loss has in a field of this name.
    settings_of_loss: ClassVar[tuple[str, ...]] = ()

    weighted: bool = field(default=False, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise SettingError(
                f"{type(self).__name__} needs a string as name, got {shortened(self.name)}."
            )
        self.name = self.name or ("weighted_" if self.weighted else "") + self._own_name()
        self.reset()

    def _own_name(self) -> str:
        return snake_case(type(self).__name__)

    @abstractmethod
    def reset(self) -> None:
        """Forget every batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches so far, for a checkpoint within an epoch: numbers,
        arrays and lists of them, by attribute.

        A metric with anything else in attributes that begin with an underscore overrides this
        method.
        """
        return _with_own_lists({n: value for n, value in vars(self).items() if n.startswith("_")})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` that `state_dict` returned.

        Only attributes that begin with an underscore are set. CheckpointError: the state has
        another form.
        """
        self.reset()
        own = {name for name in vars(self) if name.startswith("_")}
        foreign = [n for n in state if not n.startswith("_") or hasattr(type(self), n)]
        if not own <= set(state) or foreign:
            raise CheckpointError(
                f"The metric {self.name!r} stores {listed_names(sorted(own)) or 'nothing'}, but the"
                f" checkpoint has {listed_names(sorted(state)) or 'nothing'}. Use the metric with"
                " which the checkpoint was saved."
            )
        vars(self).update(_with_own_lists(state))

    @abstractmethod
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        """Add a batch: labels `y_true`, outputs `y_pred`, and `sample_weight`: None, one for each
        row, shape `(batch,)`, or one for each label. DataError: labels and outputs do not fit.
        """

    def sums(
        self, op: GraphBuilder, y_true: Value, y_pred: Value, sample_weight: Value | None
    ) -> Mapping[str, Value] | None:
        """Return attribute -> what a batch adds to it, a scalar that the graph of a step computes.

        With it the outputs of a batch need not be copied from onnxruntime, and `add_sums` takes the
        place of `update`. None, the default, means that `update` gets every batch. So it does where
        a subclass overrides `update` or `reset`, and not this method.

        - `op`: builds the graph.
        - `y_true`, `y_pred`, `sample_weight`: the arguments of `update`, as values of the graph.
        """
        return None

    def add_sums(self, sums: Mapping[str, float]) -> None:
        """Add a batch by its `sums`, which a graph has computed."""
        for name, value in sums.items():
            setattr(self, name, getattr(self, name) + value)

    @abstractmethod
    def result(self) -> Any:
        """Return the figure over all batches since `reset`: a float, or an array if `scalar` is
        False.
        """

    @property
    def figure_names(self) -> tuple[str, ...]:
        """The names of the entries of `result`, for a metric of several figures: logs have each
        entry under the metric's name, `_` and its own name. Empty if the result is one figure, or
        an array that logs lack.
        """
        return ()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Add the batches of other metrics: `result` is then that of one metric, updated with all
        batches in any order.

        - `states`: the `state_dict` of each other metric. They have the settings of this metric. A
          metric without a batch adds nothing.

        With `merge`, several processes compute a metric: each updates its own metric with its rows,
        and merges the states of all. Every metric of onnxfit implements it. UnsupportedError: a
        custom metric has no `merge`, or has an inherited `merge` and its own `reset`.
        CheckpointError: the states belong to another metric.
        """
        raise _no_merge(self)


M = TypeVar("M", bound=Metric)


def _with_own_lists(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of its lists, because a metric appends its batches to them."""
    return {name: value[:] if isinstance(value, list) else value for name, value in state.items()}


def merged_copies(metric: M, states: Sequence[Mapping[str, Any]]) -> list[M]:
    """Return copies of a metric, each with one of the states to merge.

    UnsupportedError: the metric's `merge` belongs to another class's `reset`.
    """
    if not is_newest(type(metric), "merge", "reset"):
        raise _no_merge(metric)
    others = []
    for state in states:
        other = copy.copy(metric)
        other.load_state_dict(state)
        others.append(other)
    return others


def _no_merge(metric: Metric) -> UnsupportedError:
    name = type(metric).__name__
    return UnsupportedError(
        f"The metric {metric.name!r} cannot be merged from several processes, because {name} does"
        f" not support it. Implement {name}.merge(self, states), which adds the batches in the"
        " state_dict of other metrics."
    )
