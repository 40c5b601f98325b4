"""Data in memory: its batches, and the rows of it that are kept back to validate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from onnxfit.data.batch import Batch, Source
from onnxfit.data.feed import DataAdapter, Prepared
from onnxfit.data.mapped import opened
from onnxfit.data.order import batch_indices, check_fixed, check_steps, count_steps
from onnxfit.data.structure import common_rows, holds_arrays, leaves_of, map_arrays, rows_of
from onnxfit.errors import SettingError


class ArraySource(Source):
    """Prepared arrays, in batches."""

    def __init__(
        self,
        prepared: Prepared,
        feed: DataAdapter,
        batch_size: int,
        seed: int | None,
        drop_last: bool,
    ) -> None:
        """`seed` None keeps the order of the rows."""
        rows = prepared.rows
        check_fixed(feed.fixed, rows, batch_size, drop_last, feed.what)
        check_steps(rows, batch_size, drop_last, feed.what)
        self.what, self.rows, self.batch_size = feed.what, rows, batch_size
        self.steps: int = count_steps(rows, batch_size, drop_last)
        self._prepared, self._feed, self._seed, self._drop_last = prepared, feed, seed, drop_last
        self._size = min(batch_size, rows)

    def with_batch_size(self, batch_size: int, drop_last: bool | None = None) -> ArraySource:
        return ArraySource(
            self._prepared,
            self._feed,
            batch_size,
            self._seed,
            self._drop_last if drop_last is None else drop_last,
        )

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        columns, scalars, size = self._prepared.columns, self._prepared.scalars, self._size
        assert self.rows is not None
        full, rest = divmod(self.rows, size)
        signature = self._prepared.signature(size)
        indices = batch_indices(self.rows, size, self.steps, self._seed, epoch, skip)
        for index in islice(indices, max(full - skip, 0)):
            yield Batch(size, signature, columns, scalars, index)
        for index in indices:
            yield Batch(rest, self._prepared.signature(rest), columns, scalars, index)


def validation_split(
    x: Any, y: Any, sample_weight: Any, fraction: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Training and validation data, each `(x, y, sample_weight)`: the last `fraction` of the rows,
    as they stand, validates.

    Of n rows floor(n (1 - fraction)) are trained on, as in Keras.

    >>> import numpy as np
    >>> train, validation = validation_split(np.arange(7), None, None, 0.5)
    >>> train[0], validation[0]
    (array([0, 1, 2]), array([3, 4, 5, 6]))
    """
    if not 0 < fraction < 1:
        raise SettingError(
            f"validation_split is a part of the rows, between 0 and 1, got {fraction}."
        )
    x, y, sample_weight = opened(x), opened(y), opened(sample_weight)
    if not holds_arrays(x):
        raise SettingError(
            f"validation_split cuts arrays, and {type(x).__name__} is none: split the data yourself"
            " and pass validation_data, or pass the arrays with validation_split."
        )
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    leaves = [
        leaf for name, data in given.items() if data is not None for leaf in leaves_of(data, name)
    ]
    rows = common_rows(leaves, "training")
    trained = math.floor(round(rows * (1 - fraction), 9))  # 10 * (1 - 0.9) is a little less than 1
    if not 0 < trained < rows:
        raise SettingError(
            f"validation_split={fraction} of {rows} rows leaves no row for"
            f" {'validation' if trained else 'training'}."
        )
    first, last = (
        tuple(_cut(given[name], with_batch_size) for name in given)
        for with_batch_size in (slice(0, trained), slice(trained, rows))
    )
    return (first[0], first[1], first[2]), (last[0], last[1], last[2])


def _cut(data: Any, rows: slice) -> Any:
    """Some rows of everything; what has no rows stays."""
    return None if data is None else map_arrays(data, lambda value: rows_of(value, rows))
