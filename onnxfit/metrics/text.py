"""Metrics of sequences of characters and words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfit.checks import shortened
from onnxfit.ctc import greedy_decode
from onnxfit.errors import DataError, SettingError
from onnxfit.metrics.alignment import counted_rows, misfit, per_element
from onnxfit.metrics.base import Array, Metric, merged_copies, without_warnings

__all__ = ["CharacterErrorRate", "WordErrorRate"]


@dataclass
class CharacterErrorRate(Metric):
    r"""Share of wrong characters $\sum_i d(y_i, \hat y_i) / \sum_i |y_i|$, for outputs of the loss
    CTC with one class for each character.

    $\hat y_i$ is what the output of row $i$ reads as, by `onnxfit.ctc.greedy_decode`. $d$ is the
    smallest number of insertions, deletions and replacements that turn one sequence into the other
    (Levenshtein 1966). Outputs are `(batch, time, classes)`, labels `(batch, labels)`. The rate is
    0 if every row is right, and may exceed 1. It is NaN if an output is NaN, or all labels are
    empty.

    - `blank`, `ignore_index`, `input_lengths`: as in the loss CTC. None takes the setting of the
      output's loss; outside a Trainer, it means CTC's default.
    - `weighted`, `name`: as in `Metric`. Weights belong to rows, and count in both sums.

    DataError: labels and outputs do not fit, or a label is the blank.

    >>> metric = CharacterErrorRate()
    >>> metric.update(np.array([[1, 2, -1], [2, 1, 1]]), np.eye(3)[[[1, 1, 0], [2, 1, 1]]])
    >>> metric.result()  # the second 2 and the second 1 are missing
    0.4
    """

    aliases = ("cer", "char_error_rate")
    settings_of_loss = ("blank", "ignore_index", "input_lengths")

    blank: int | None = field(default=None, kw_only=True)
    ignore_index: int | None = field(default=None, kw_only=True)
    input_lengths: bool | None = field(default=None, kw_only=True)

    def reset(self) -> None:
        self._edits = self._length = 0.0

    def units(self, labels: list[int]) -> Sequence[Any]:
        """Return the sequence to compare, for the class indices `labels`: by default themselves."""
        return labels

    @without_warnings
    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        y_true, y_pred, weights = counted_rows(self, y_true, y_pred, sample_weight)
        if y_true.ndim != 2 or y_pred.ndim != 3 or y_true.dtype.kind not in "iu":
            expected = "labels (batch, labels) of class indices, and outputs (batch, time, classes)"
            raise misfit(self, expected, y_true, y_pred)
        classes = y_pred.shape[2]
        blank = (self.blank or 0) % classes
        targets, lengths = y_true, None
        if self.input_lengths:
            targets, lengths = y_true[:, 1:], y_true[:, 0]
        counted = targets != (-1 if self.ignore_index is None else self.ignore_index)
        wrong = counted & ((targets == blank) | (targets < 0) | (targets >= classes))
        if wrong.any():
            raise DataError(
                f"{type(self).__name__} needs class indices from 0 to {classes - 1} except the"
                f" blank {blank} as labels, got {targets[wrong][0]}. Set blank and ignore_index as"
                " in the loss CTC."
            )
        is_nan = np.asarray(np.isnan(y_pred).any(axis=(1, 2)))
        outputs = np.where(is_nan[:, None, None], 0, y_pred)
        readings = greedy_decode(outputs, blank=blank, input_lengths=lengths)
        weights = per_element(weights, (len(y_pred),))
        for weight, row, mask, reading, broken in zip(weights, targets, counted, readings, is_nan):
            units = self.units(row[mask].tolist())
            edits = math.nan if broken else edit_distance(units, self.units(reading))
            self._edits += float(weight * edits)
            self._length += float(weight * len(units))

    def result(self) -> float:
        return self._edits / self._length if self._length else math.nan

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        for other in merged_copies(self, states):
            self._edits += other._edits
            self._length += other._length


@dataclass
class WordErrorRate(CharacterErrorRate):
    """Share of wrong words: `CharacterErrorRate` of sequences of words.

    - `alphabet`: the text of each class, in the order of the classes: a string, or a list of
      strings. The entry of the blank is not used. White space separates words.
    - `blank`, `ignore_index`, `input_lengths`, `weighted`, `name`: as in `CharacterErrorRate`.

    SettingError: `alphabet` has other entries than strings. DataError: `alphabet` has another size
    than the outputs have classes.

    >>> metric = WordErrorRate("_ab ")
    >>> metric.update(np.array([[1, 3, 2, 2]]), np.eye(4)[[[1, 3, 3, 2]]])
    >>> metric.result()  # "a b" for "a bb"
    0.5
    """

    named = False

    alphabet: Sequence[str]

    def __post_init__(self) -> None:
        if not isinstance(self.alphabet, (str, list, tuple)) or not all(
            isinstance(entry, str) for entry in self.alphabet
        ):
            raise SettingError(
                "WordErrorRate needs a string for each class as alphabet, got"
                f" {shortened(self.alphabet)}."
            )
        self.alphabet = tuple(self.alphabet)
        super().__post_init__()

    def update(self, y_true: Array, y_pred: Array, sample_weight: Array | None = None) -> None:
        if np.ndim(y_pred) == 3 and np.shape(y_pred)[2] != len(self.alphabet):
            raise DataError(
                "WordErrorRate needs a string for each class, that of the blank included, got"
                f" {len(self.alphabet)} strings and outputs of {np.shape(y_pred)[2]} classes."
            )
        super().update(y_true, y_pred, sample_weight)

    def units(self, labels: list[int]) -> Sequence[Any]:
        return "".join(self.alphabet[label] for label in labels).split()


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the smallest number of insertions, deletions and replacements that make a into b.

    `row[j]` is the distance between the beginning of a so far and the first j entries of b.
    """
    codes = {unit: code for code, unit in enumerate({*a, *b})}
    others, places = np.array([codes[unit] for unit in b], int), np.arange(len(b) + 1)
    row = places
    for i, unit in enumerate(a, 1):
        without_insertions = np.minimum(row[1:] + 1, row[:-1] + (others != codes[unit]))
        row = np.concatenate([[i], without_insertions])
        row = np.minimum.accumulate(row - places) + places
    return int(row[-1])
