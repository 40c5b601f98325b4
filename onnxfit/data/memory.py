"""Arrays: the source of their batches, and the split into training and validation data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from onnxfit.data.adapter import ConvertedData, DataAdapter
from onnxfit.data.batch import Batch
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.mapped import MappedSource, is_mapped, is_path, open_paths
from onnxfit.data.source import Batching, RowSource, Source, Splittable
from onnxfit.data.structure import common_rows, holds_arrays, map_arrays, named_arrays, select_rows
from onnxfit.errors import SettingError
from onnxfit.registry import is_number, shortened

__all__ = ["ArraySource", "validation_split"]


class ArraySource(RowSource):
    """Arrays in memory, checked and cast once."""

    priority: ClassVar[int] = -10
    takes_labels: ClassVar[bool] = True

    def __init__(self, adapter: DataAdapter, data: ConvertedData, batching: Batching) -> None:
        self._data = data
        super().__init__(adapter, data.rows, batching)

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return is_path(data) or holds_arrays(data)

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        return array_source(adapter, data, batching)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        columns = self._data.columns
        scalars = self._data.scalars
        size = self._full_rows
        full_batches, remainder = divmod(self.rows, size)
        signature = self._data.signature(size)
        indices = self.indices(epoch, skip)
        for index in islice(indices, max(full_batches - skip, 0)):
            yield Batch(size, signature, columns, scalars, index)
        for index in indices:
            yield Batch(remainder, self._data.signature(remainder), columns, scalars, index)

    def fingerprint(self) -> dict[str, Any]:
        columns = self._data.columns + self._data.scalars
        return super().fingerprint() | fingerprint_of(columns)


def array_source(
    adapter: DataAdapter, data: tuple[Any, Any, Any], batching: Batching
) -> ArraySource | MappedSource:
    """Return the source for `data`, which is x, y and sample_weight.

    If any array is on disk, each batch is read, checked and cast when the loop asks for it.
    """
    x, y, sample_weight = map(open_paths, data)
    matched = adapter.match(x, y, sample_weight)
    if any(is_mapped(value) for _, value in matched.named_values()):
        return MappedSource(adapter, matched, batching)
    return ArraySource(adapter, adapter.convert(matched), batching)


def validation_split(
    x: Any, y: Any, sample_weight: Any, fraction: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return training and validation data, each as `(x, y, sample_weight)`.

    The last rows are used for validation, in their order. Of n rows, the first
    floor(n (1 - fraction)) are used for training, as in Keras. If a loader has a method `split`, as
    `ImageFolder` does, this method divides the data.

    - `x`, `y`, `sample_weight`: arrays, dicts or lists of arrays, paths of .npy and .npz files;
      `y` and `sample_weight` may be None.
    - `fraction`: the fraction of the rows used for validation, above 0 and below 1.

    SettingError: training or validation would get no row, or the data comes in batches. DataError:
    the numbers of rows differ.

    >>> import numpy as np
    >>> train, validation = validation_split(np.arange(7), None, None, 0.5)
    >>> train[0], validation[0]
    (array([0, 1, 2]), array([3, 4, 5, 6]))
    """
    check_fraction(fraction)
    if isinstance(x, Splittable):
        train_data, validation_data = x.split(fraction)
        return (train_data, y, sample_weight), (validation_data, None, None)
    x = open_paths(x)
    y = open_paths(y)
    sample_weight = open_paths(sample_weight)
    if not holds_arrays(x):
        raise SettingError(
            f"validation_split can split arrays only, got {type(x).__name__}. Split the data"
            " yourself and pass validation_data, or pass arrays."
        )
    data = {"x": x, "y": y, "sample_weight": sample_weight}
    arrays = [
        array
        for name, value in data.items()
        if value is not None
        for array in named_arrays(value, name)
    ]
    rows = common_rows(arrays, "training")
    train_rows = count_training_rows(rows, fraction)
    train = slice(0, train_rows)
    validation = slice(train_rows, rows)
    return (
        (_select(x, train), _select(y, train), _select(sample_weight, train)),
        (_select(x, validation), _select(y, validation), _select(sample_weight, validation)),
    )


def check_fraction(fraction: float) -> None:
    """Raise SettingError unless `fraction` is a number between 0 and 1."""
    if not (is_number(fraction) and 0 < fraction < 1):
        raise SettingError(
            "validation_split must be a fraction of the rows, between 0 and 1, got"
            f" {shortened(fraction)}."
        )


def count_training_rows(rows: int, fraction: float) -> int:
    """Return the number of training rows. SettingError: training or validation gets no row."""
    check_fraction(fraction)
    # Rounded, because 10 * (1 - 0.9) is slightly less than 1 in floating point.
    train_rows = math.floor(round(rows * (1 - fraction), 9))
    if not 0 < train_rows < rows:
        raise SettingError(
            f"validation_split={fraction} leaves no rows for"
            f" {'validation' if train_rows else 'training'}: the data has {rows} rows."
        )
    return train_rows


def _select(data: Any, rows: slice) -> Any:
    """Return some rows of every array. Values without rows are returned unchanged."""
    return None if data is None else map_arrays(data, lambda value: select_rows(value, rows))
