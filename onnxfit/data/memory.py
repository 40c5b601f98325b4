"""Arrays: the source of their batches, and the split into training and validation data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import is_number, shortened
from onnxfit.data.adapter import ConvertedData, DataAdapter
from onnxfit.data.batch import Array, Batch
from onnxfit.data.content import MAX_HASHED_BYTES, Content, content_of
from onnxfit.data.convert import rows_first
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.mapped import MappedSource, is_mapped, is_path, open_paths
from onnxfit.data.source import Batching, RowSource, Source, Splittable
from onnxfit.data.structure import (
    common_rows,
    holds_arrays,
    is_list_of_arrays,
    map_arrays,
    named_arrays,
    select_rows,
)
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

__all__ = ["ArraySource", "validation_split"]


class SparseRows:
    """A sparse matrix whose selected rows are dense arrays.

    The whole matrix never becomes dense, unless it is passed to `np.asarray`.

    - `matrix`: a sparse matrix or array of SciPy with two axes, in any format.
    """

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix.tocsr()
        self.shape: tuple[int, ...] = matrix.shape
        self.ndim = len(self.shape)
        self.dtype: np.dtype[Any] = matrix.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        dense: Array = self._matrix[rows].toarray()
        return dense

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        dense: Array = self._matrix.toarray()
        return dense if dtype is None else dense.astype(dtype)

    @property
    def stored(self) -> Array:
        """The elements that the matrix stores."""
        stored: Array = self._matrix.data
        return stored


def with_sparse_rows(value: Any) -> Any:
    """Return a sparse matrix of SciPy as SparseRows, and any other value unchanged."""
    is_matrix = hasattr(value, "tocsr") and hasattr(value, "toarray")
    return SparseRows(value) if is_matrix and len(value.shape) == 2 else value


class ArraySource(RowSource):
    """Arrays in memory, checked and cast once."""

    priority: ClassVar[int] = -10
    takes_labels: ClassVar[bool] = True

    def __init__(self, adapter: DataAdapter, data: ConvertedData, batching: Batching) -> None:
        self._data = data
        # The rows of such labels belong to entries of the inputs, which keep their order.
        batching = replace(batching, seed=None) if adapter.is_whole else batching
        super().__init__(adapter, data.rows, batching)

    def _set_batching(self, batching: Batching) -> None:
        if self.adapter.is_whole and batching.batch_size < self.rows:
            inputs = "; ".join(map(str, self.adapter.inputs))
            raise DataError(
                f"The inputs ({inputs}) have several sizes without a common batch, so arrays cannot"
                f" be divided into batches of {batching.batch_size} rows. Pass whole batches: a"
                " list of batches (x, y), or a loader that gives them, such as one graph each."
            )
        super()._set_batching(batching)

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

    def content(self) -> Content | None:
        columns, scalars = self._data.columns, self._data.scalars
        if sum(array.nbytes for _, array in columns + scalars) > MAX_HASHED_BYTES:
            return None
        return content_of(
            self.rows,
            lambda index: (tuple((name, array[index]) for name, array in columns), scalars),
        )


def array_source(
    adapter: DataAdapter, data: tuple[Any, Any, Any], batching: Batching
) -> ArraySource | MappedSource:
    """Return the source for `data`, which is x, y and sample_weight.

    If any array is on disk or sparse, each batch is read, checked and cast when the loop asks for
    it.
    """
    x, y, sample_weight = map(_opened, data)
    matched = adapter.match(x, y, sample_weight)
    if not adapter.is_whole and any(_is_lazy(value) for _, value in matched.named_values()):
        return MappedSource(adapter, matched, batching)
    return ArraySource(adapter, adapter.convert(matched), batching)


def _opened(data: Any) -> Any:
    """Return data with paths as mapped arrays, and sparse matrices as SparseRows."""
    data = open_paths(data)
    if isinstance(data, Mapping):
        return {name: with_sparse_rows(value) for name, value in data.items()}
    return with_sparse_rows(data)


def _is_lazy(value: Any) -> bool:
    """Return whether reading an array as a whole needs more memory than the array itself."""
    return is_mapped(value) or isinstance(value, SparseRows)


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
    return split_rows(x, y, sample_weight, fraction, {})


def split_rows(
    x: Any, y: Any, sample_weight: Any, fraction: float, inputs: Mapping[str, TensorSpec]
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Return the same as `validation_split`, for a model with these inputs, by name.

    Inputs in a dict or list are divided along their batch axes; inputs without rows are in both
    parts. SettingError, too: the rows of the model's inputs cannot be divided.
    """
    check_fraction(fraction)
    if isinstance(x, Splittable):
        train_data, validation_data = x.split(fraction)
        return (train_data, y, sample_weight), (validation_data, None, None)
    x, y, sample_weight = map(_opened, (x, y, sample_weight))
    if not holds_arrays(x):
        raise SettingError(
            f"validation_split can split arrays only, got {type(x).__name__}. Split the data"
            " yourself and pass validation_data, or pass arrays."
        )
    if len(inputs) > 1 and is_list_of_arrays(x) and len(x) == len(inputs):
        x = dict(zip(inputs, x))
    whole = {}
    if isinstance(x, Mapping):
        whole = {name: x[name] for name, spec in inputs.items() if name in x and not spec.has_rows}
        x = {
            name: rows_first(value, inputs[name]) if name in inputs else value
            for name, value in x.items()
            if name not in whole
        }
    data = {"x": x, "y": y, "sample_weight": sample_weight}
    arrays = [
        array
        for name, value in data.items()
        if value is not None
        for array in named_arrays(value, name)
    ]
    rows = common_rows(arrays, "training")
    train_rows = count_training_rows(rows, fraction)

    def part(index: slice) -> tuple[Any, Any, Any]:
        chosen = _rows_in(x, index)
        if isinstance(x, Mapping):
            chosen = {name: _in_file(value, inputs.get(name)) for name, value in chosen.items()}
            chosen |= whole
        return chosen, _rows_in(y, index), _rows_in(sample_weight, index)

    return part(slice(0, train_rows)), part(slice(train_rows, rows))


def _in_file(value: Any, spec: TensorSpec | None) -> Any:
    """Return rows of an input, which are first, in the layout of the model's file."""
    axis = None if spec is None else spec.batch_axis
    return np.moveaxis(value, 0, axis) if axis else value


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


def _rows_in(data: Any, rows: slice) -> Any:
    """Return some rows of every array. Values without rows are returned unchanged."""
    return None if data is None else map_arrays(data, lambda value: select_rows(value, rows))
