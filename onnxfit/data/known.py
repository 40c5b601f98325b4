"""Single batches, which skip checks that an earlier batch of the same kind has passed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Array, Batch, Target
from onnxfit.data.convert import in_c_order
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.memory import ArraySource
from onnxfit.data.order import check_fixed
from onnxfit.data.share import Share
from onnxfit.data.source import ShardedSource, Source

__all__ = ["BatchPlanCache"]

ALL_ROWS = 2**62  # a batch size that no data set reaches
MAX_KNOWN_BATCHES = 16

# The key on which the checks of names, shapes and types depend, and the arrays to check.
Passed = tuple[tuple[Any, ...], list[Array]]


class OneBatch(Source):
    """A source of one batch."""

    def __init__(self, batch: Batch, adapter: DataAdapter) -> None:
        self.purpose = adapter.purpose
        self.rows = batch.rows
        self._adapter = adapter
        self._batches = (batch,)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        return iter(self._batches[skip:])

    def _shard(self, share: Share) -> Source:
        fixed = self._adapter.fixed_input
        rows = self._batches[0].rows
        check_fixed(fixed, rows, rows, False, self.purpose, ranks=share.size)
        return ShardedSource(self, share)

    def fingerprint(self) -> dict[str, Any]:
        (batch,) = self._batches
        return super().fingerprint() | fingerprint_of(batch.columns + batch.scalars)


@dataclass(frozen=True)
class Column:
    """The path of an array from the caller into a batch.

    - `input`: the graph input that takes the array.
    - `position`: the position of the array among the caller's arrays.
    - `target`: prepares the array; None if the batch takes the array unchanged.
    - `is_label`: whether the array contains labels, which must be finite.
    - `shape`, `dtype`: shape and type of the array in the batch.
    """

    input: str
    position: int
    target: Target | None
    is_label: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class BatchPlanCache:
    """Maker of single batches, with fewer checks for data of a kind that was checked before.

    Data is of the same kind if it has the same names, shapes and element types. Values (NaN, the
    range of labels) are checked in every batch. For all other data the adapter checks everything:
    for sample weights, arrays that need a conversion or are not in C order, tables, and loaders.

    Several threads may use one object: an entry of `_known` never changes.

    - `adapter`: checks, casts and names the data.
    """

    def __init__(self, adapter: DataAdapter) -> None:
        self.adapter = adapter
        self._checks_numbers = adapter.purpose != "prediction"
        self._known: dict[tuple[Any, ...], tuple[int, str, list[Column]]] = {}

    def source(self, x: Any, y: Any = None, sample_weight: Any = None) -> Source:
        """Return a source of one batch with all rows of `x`, `y` and `sample_weight`.

        If `x` gives batches, the source gives the same batches. The errors are the same as of
        `DataAdapter.source`.
        """
        passed = _passed(x, y) if sample_weight is None else None
        batch = self._batch(*passed) if passed is not None else None
        if batch is not None:
            return OneBatch(batch, self.adapter)
        source = self.adapter.source(x, y, sample_weight, batch_size=ALL_ROWS)
        if passed is not None and isinstance(source, ArraySource):
            self._record(*passed, x, y, next(source.batches(0)))
        return source

    def _batch(self, key: tuple[Any, ...], arrays: list[Array]) -> Batch | None:
        """Return the batch of these arrays, or None if the adapter must check them."""
        known = self._known.get(key)
        if known is None:
            return None
        rows, signature, columns = known
        named = []
        for column in columns:
            array = arrays[column.position]
            if column.target is not None:
                array = in_c_order(column.target.prepare(array))
                if array.shape != column.shape or array.dtype != column.dtype:
                    return None
            flags = array.flags
            if not (flags.c_contiguous and flags.aligned):
                return None
            if self._checks_numbers and not _has_numbers(array, column.is_label):
                return None
            named.append((column.input, array))
        return Batch(rows, signature, tuple(named), (), slice(0, rows))

    def _record(
        self, key: tuple[Any, ...], arrays: list[Array], x: Any, y: Any, batch: Batch
    ) -> None:
        """Remember how the adapter made `batch` of the arrays, unless it changed an input."""
        positions = {id(array): position for position, array in enumerate(arrays)}
        if len(positions) < len(arrays) or batch.scalars:
            return  # an array that was passed twice has no unique position
        matched = self.adapter.match(x, y)
        values = dict(matched.inputs)
        targets: dict[str, Target] = {}
        for output, value in matched.labels.items():
            target = self.adapter.targets[output]
            targets[target.input] = target
            values[target.input] = value
        columns = []
        for name, array in batch.columns:
            value = values[name]
            position = positions.get(id(value))
            is_same = (array.shape, array.dtype) == (value.shape, value.dtype)
            label_target = targets.get(name)
            if label_target is None and array is not value:
                return
            if position is None or array.dtype.kind not in "biuf":
                return
            is_label = label_target is not None
            if is_same and getattr(label_target, "keeps_finite", False):
                label_target = None
            columns.append(Column(name, position, label_target, is_label, array.shape, array.dtype))
        if len(self._known) >= MAX_KNOWN_BATCHES:
            self._known.clear()
        self._known[key] = batch.rows, batch.signature, columns


def _has_numbers(array: Array, finite: bool) -> bool:
    """Return whether no element is NaN and, with `finite`, no element is infinite."""
    if array.dtype.kind != "f" or not array.size:
        return True
    minimum = array.item(array.argmin())  # NaN if any element is NaN, which `argmin` finds first
    if not finite:
        return bool(minimum >= -math.inf)
    return bool(minimum > -math.inf and array.item(array.argmax()) < math.inf)


def _passed(x: Any, y: Any) -> Passed | None:
    """Return the key of arrays and the arrays, or None for data of another kind."""
    if type(x) is np.ndarray and type(y) is np.ndarray:
        return (x.shape, x.dtype, y.shape, y.dtype), [x, y]
    arrays: list[Array] = []
    key: list[Any] = []
    for data in (x, y):
        kind = type(data)
        if kind is np.ndarray:
            key += (kind, data.shape, data.dtype)
            arrays.append(data)
            continue
        members: Any = ()
        if kind is dict:
            key += (kind, *data)
            members = data.values()
        elif kind is list or kind is tuple:
            key += (kind, len(data))
            members = data
        elif data is not None:
            return None
        for member in members:
            if type(member) is not np.ndarray:
                return None
            key += (member.shape, member.dtype)
            arrays.append(member)
        key.append(None)
    return tuple(key), arrays
