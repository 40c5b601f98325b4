"""Loaders: data with a batch size and an order of rows, for `fit` or for iteration."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Array
from onnxfit.data.content import Content, given_content
from onnxfit.data.convert import as_array
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.mapped import open_paths
from onnxfit.data.memory import array_source
from onnxfit.data.order import batch_indices, checked_batch_size, count_steps
from onnxfit.data.prefetch import (
    PrefetchedSource,
    PrefetchIterator,
    close_all,
    copied_items,
    prefetched,
)
from onnxfit.data.share import WHOLE, Share
from onnxfit.data.source import Batching, RowSource, Source
from onnxfit.data.stream import StreamSource, source_of_rank
from onnxfit.data.structure import common_rows, length_of, map_arrays, named_arrays
from onnxfit.errors import DataError, SettingError, UnknownNameError
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.given_axes import axes_by_name

__all__ = ["DataLoader", "Loader", "LoaderSource"]


class Loader(ABC):
    """Base class of loaders: rows in batches, in a new order every epoch.

    A subclass implements `batches`, and can then be passed to `fit`.

    - `rows`: the number of rows.
    - `batch_size`: rows of a batch. The last batch may be shorter, unless `drop_last`.
    - `shuffle`: whether `batches` gets a seed. Evaluation and prediction keep the order of the
      rows.
    - `seed`: an integer; None uses the trainer's seed, or 0 if the loader is iterated without a
      trainer.
    - `drop_last`: leave out a last batch that is shorter.
    - `prefetch`: batches that a background thread prepares ahead; 0 for no thread.

    Iterating gives `(x,)`, `(x, y)` or `(x, y, sample_weight)`, and each complete iteration is the
    next epoch. `state_dict` holds the position in an epoch; after `load_state_dict` the next
    iteration continues from there. In `Trainer.fit` the trainer counts the epochs.

    With several ranks (processes), each rank makes every batch and keeps its own rows. If that is
    slow, the loader may have a method `shard(rank, size)`, which returns the batches of one rank.
    Each of these batches counts as one of `size` equal shares, and all ranks need the same number
    of batches.

    DataError: an epoch would have no batch. SettingError: the batch size or `prefetch` is
    impossible.
    """

    # Loaders of onnxfit that read only the rows of one rank find its share in `_share`.
    _reads_share: ClassVar[bool] = False
    _share: Share = WHOLE
    # The relative chances of rows to be drawn for training; None takes every row once.
    _chances: Array | None = None

    def __init__(
        self,
        rows: int,
        batch_size: int,
        shuffle: bool,
        seed: int | None,
        drop_last: bool,
        prefetch: int,
    ) -> None:
        if prefetch < 0:
            raise SettingError(f"prefetch must be a number of batches >= 0, got {prefetch}.")
        self.batch_size = checked_batch_size(batch_size)
        self.shuffle = bool(shuffle)
        self.seed = None if seed is None else operator.index(seed)
        self.drop_last = bool(drop_last)
        self.prefetch = prefetch
        self._reset(rows)

    def _reset(self, rows: int) -> None:
        """Set the state before the first batch; a copy with other rows has its own state."""
        self.rows = rows
        self.epoch = 0
        self._batch = 0  # number of batches of the current epoch yielded so far
        self._skip = 0
        self._running: list[PrefetchIterator[Any]] = []
        if not len(self):
            raise DataError(
                f"drop_last=True would drop all rows: {self.rows} rows do not fill a batch of"
                f" batch_size={self.batch_size}. Pass a smaller batch_size, or drop_last=False."
            )

    def batch_rows(self, epoch: int, skip: int, seed: int | None) -> Iterator[Array]:
        """Return the numbers of the rows of each batch of an epoch, without the first `skip`.

        - `epoch`, `seed`: determine the order of rows; with `seed` None the rows keep their order.
        - `skip`: the number of batches to leave out at the beginning.
        """
        numbers = np.arange(self.rows)
        return (numbers[index] for index in self._indices(epoch, skip, seed))

    def _indices(self, epoch: int, skip: int, seed: int | None) -> Iterator[slice | Array]:
        """Return the rows of each batch of an epoch, as slices if they keep their order."""
        return batch_indices(
            self.rows, self.batch_size, len(self), seed, epoch, skip, self._chances
        )

    def _set_sampling(self, sampling: Any, classes: Any) -> None:
        """Set the chances of rows from the setting `sampling` and the class of each row."""
        if sampling is None:
            return
        name = type(self).__name__
        if not self.shuffle:
            raise SettingError(f"{name}(sampling=...) draws rows at random: pass shuffle=True.")
        if isinstance(sampling, str):
            labels = np.asarray(() if classes is None else classes)
            is_class = labels.dtype.kind in "iub" and labels.size == self.rows == len(labels)
            if sampling != "balanced" or not is_class:
                raise SettingError(
                    f"{name} needs sampling to be one number for each row, or 'balanced' with one"
                    f" class index for each row as labels, got {shortened(sampling)}."
                )
            _, members, counts = np.unique(labels, return_inverse=True, return_counts=True)
            self._chances = 1 / counts[members.reshape(-1)]
            return
        chances = np.asarray(sampling)
        fits = chances.dtype.kind in "iuf" and chances.shape == (self.rows,)
        if not fits or not (np.isfinite(chances).all() and chances.min() >= 0 and chances.any()):
            raise SettingError(
                f"{name} needs sampling to be a number >= 0 for each of its {self.rows} rows, not"
                f" all of them 0, got {shortened(sampling)}."
            )
        # Sums of the chances, divided by the largest, are finite.
        self._chances = chances.astype(np.float64) / float(chances.max())

    @abstractmethod
    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over the batches of one epoch.

        - `epoch`: the number of the epoch, from 0; with `seed` it determines the order of rows.
        - `skip`: the number of batches to leave out at the beginning.
        - `seed`: None keeps the order of the rows.
        """

    def bind(self, adapter: DataAdapter) -> Loader:
        """Return the loader that `fit`, `evaluate` or `predict` iterates: by default this one.

        If the batches depend on the model or the purpose, override this method and return a copy.

        - `adapter`: has the model's `inputs` and `targets`, the `purpose` and the trainer's `seed`.
        """
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that differ if another process has other data; by default none.

        The number of rows and the batch size need not be included. The values must be found without
        reading the data.
        """
        return {}

    def content(self) -> Content | None:
        """Return the hashes of all data, by which an exported file identifies it; None without any.

        By default, the attribute `content_hash` is the hash, a text that differs for other data.
        """
        return given_content(self)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return count_steps(self.rows, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        epoch = self.epoch
        skip = self._skip
        self._skip = 0
        self._batch = skip
        batches = self.batches(epoch, skip, (self.seed or 0) if self.shuffle else None)
        if self.prefetch:
            batches = prefetched(copied_items(batches), self.prefetch, self._running, self)
        for batch in batches:
            self._batch += 1
            yield batch
        self.set_epoch(epoch + 1)

    @check_arguments
    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start at the beginning of epoch `epoch`."""
        self.epoch = operator.index(epoch)
        self._batch = 0
        self._skip = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the epoch and the number of batches yielded in this epoch.

        The state also has the number of rows and the batch size, because a position is only valid
        for the same ones. Every value is a plain number or None.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": self._batch,
            "rows": self.rows,
            "batch_size": self.batch_size,
        }

    @check_arguments
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from the position of another loader.

        - `state`: the result of the other loader's `state_dict`.

        SettingError: the number of rows or the batch size differs.
        """
        if not set(state) >= set(self.state_dict()):
            raise SettingError(
                f"The state of a loader must have {', '.join(self.state_dict())}, got"
                f" {shortened(dict(state))}. Pass the result of state_dict."
            )
        for name in ("rows", "batch_size"):
            if state[name] != getattr(self, name):
                raise SettingError(
                    f"The state was saved with {name}={state[name]}, but this loader has"
                    f" {name}={getattr(self, name)}. Create the loader with the saved {name}."
                )
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._batch = state["batch"]
        self._skip = state["batch"]

    def close(self) -> None:
        """End the background thread, if one runs."""
        close_all(self._running)


class LoaderSource(RowSource, StreamSource):
    """A loader, whose batch size, order and prefetching override the arguments of `fit`."""

    def __init__(self, adapter: DataAdapter, loader: Loader, seed: int | None) -> None:
        self._loader = loader
        batching = Batching(loader.batch_size, seed, loader.drop_last, loader._chances)
        super().__init__(adapter, loader.rows, batching, type(loader).__name__)

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return isinstance(data, Loader)

    @classmethod
    def from_data(cls, adapter: DataAdapter, data: Any, batching: Batching) -> Source:
        seed = None
        if data.shuffle and adapter.purpose == "training":
            seed = adapter.seed if data.seed is None else data.seed
        source: Source
        batching = Batching(data.batch_size, seed, data.drop_last, data._chances)
        if isinstance(data, DataLoader) and data.collate is not None:
            source = CollatedSource(adapter, data, batching)
        elif isinstance(data, DataLoader):  # its own settings say how to make batches
            _require_axes(data, adapter.inputs)
            source = array_source(adapter, (data.X, data.y, data.sample_weight), batching)
        else:
            source = cls(adapter, data.bind(adapter), seed)
        return PrefetchedSource(source, data.prefetch, data) if data.prefetch else source

    def with_batch_size(self, batch_size: int, drop_last: bool = False) -> LoaderSource:
        other = super().with_batch_size(batch_size, drop_last)
        other._loader = copy(self._loader)  # leave the caller's loader unchanged
        other._loader.batch_size = other.batch_size
        other._loader.drop_last = other._batching.drop_last
        return other

    def _shard(self, share: Share) -> Source:
        source = source_of_rank(self, self._loader, self.adapter, share)
        if source is not None:
            return source
        if not self._loader._reads_share:
            return super()._shard(share)
        other = copy(self)
        other._loader = copy(self._loader)
        other._loader._share = share
        return other._shard_rows(share)

    def fingerprint(self) -> dict[str, Any]:
        own = {"kind": type(self._loader).__name__, **self._loader.fingerprint()}
        return super().fingerprint() | own

    def content(self) -> Content | None:
        return self._loader.content()

    def items(self, epoch: int, skip: int) -> Iterator[tuple[Any, ...]]:
        return self._loader.batches(epoch, skip, self._batching.seed)


class DataLoader(Loader):
    """Arrays in batches, in a new order every epoch.

    - `X`, `y`: an array, a dict name -> array or a list of arrays (several inputs or outputs), or
      anything that numpy reads as an array (pandas, torch). All have the same number of rows. An
      array may also be an `np.memmap` or the path of a .npy file, and a dict the path of a .npz
      file. Files may be larger than memory: only the rows of a batch are read.
    - `batch_axes`: array of a dict `X` -> the axis of its rows, where that is not the first, or
      None for an array without rows, which each batch gets as a whole. The model's inputs must have
      the same axes.
    - `sample_weight`: weights of the rows, shape `(n,)` or `(n, 1)`, or of the labels, in their
      shape.
    - `batch_size`: rows of a batch, 1 or more. The last batch may be shorter, unless `drop_last`.
    - `shuffle`: give the rows a new order every epoch, a permutation that depends on `(seed,
      epoch)` only. Every row comes once per epoch. `Trainer.fit` counts the epochs itself;
      evaluation and prediction keep the order of the arrays.
    - `seed`: an integer; None uses the trainer's seed, or 0 if the loader is iterated without a
      trainer.
    - `sampling`: None, or the chance of each row to be drawn for training, relative to the others,
      shape `(n,)`: an epoch then draws n rows with replacement (`torch.utils.data`'s
      WeightedRandomSampler). "balanced" gives all classes of integer labels `(n,)` the same chance.
      Evaluation and prediction see every row once.
    - `drop_last`: leave out a last batch that is shorter.
    - `prefetch`: batches that a background thread prepares ahead, which helps with memory-mapped
      arrays; 0 for no thread.
    - `collate`: a function from a list of samples to a batch, `(x, y)` or `(x, y, sample_weight)`,
      as `collate_fn` of PyTorch. `X` is then a sequence of samples of any kind, such as graphs of
      different sizes, without `y`, `sample_weight` and `batch_axes`. Each rank collates its own
      samples.

    Iterating gives `(x,)`, `(x, y)` or `(x, y, sample_weight)`, with the structure of `X` and `y`,
    and each complete iteration is the next epoch. `state_dict` holds the position in an epoch;
    after `load_state_dict` the next iteration continues from there.

    DataError: there are no rows, the numbers of rows differ, or an array does not consist of
    numbers. SettingError: a setting is impossible.

    >>> import numpy as np
    >>> loader = DataLoader(np.arange(5.0), batch_size=2, shuffle=False)
    >>> [x.tolist() for (x,) in loader], len(loader)
    ([[0.0, 1.0], [2.0, 3.0], [4.0]], 3)
    """

    @check_arguments
    def __init__(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        sampling: Any = None,
        drop_last: bool = False,
        prefetch: int = 0,
        batch_axes: Mapping[str, int | None] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.batch_axes = axes_by_name(batch_axes)
        self.collate = collate
        if collate is not None:
            rows = _number_of_samples(X, y, sample_weight, self.batch_axes)
            self.X, self.y, self.sample_weight = X, None, None
            super().__init__(rows, batch_size, shuffle, seed, drop_last, prefetch)
            self._set_sampling(sampling, None)
            return
        if sample_weight is not None and y is None:
            raise DataError("DataLoader got sample_weight without labels (y is None). Pass y too.")
        self.X = open_paths(X)
        self.y = open_paths(y)
        self.sample_weight = open_paths(sample_weight)
        data = {"X": self.X, "y": self.y, "sample_weight": self.sample_weight}
        converted = {
            name: map_arrays(value, partial(as_array, name=name))
            for name, value in data.items()
            if value is not None
        }
        self._elements = list(converted.values())  # x, y and the weights, the elements of a batch
        rows = common_rows(self._rows_first(converted), "loader's", _axes_hint(self.X))
        super().__init__(rows, batch_size, shuffle, seed, drop_last, prefetch)
        labels = converted.get("y")
        self._set_sampling(sampling, labels if hasattr(labels, "dtype") else None)

    def fingerprint(self) -> dict[str, Any]:
        if self.collate is not None:
            return {}
        kinds = zip(("X", "y", "sample_weight"), self._elements)
        return fingerprint_of(
            [named for kind, value in kinds for named in named_arrays(value, kind)]
        )

    def _rows_first(self, converted: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
        """Yield the name of each array that has rows, and the array with its rows first."""
        x = converted.get("X")
        inputs = x if isinstance(x, Mapping) else {}
        for name, axis in self.batch_axes.items():
            if name not in inputs:
                raise UnknownNameError("array of a dict X, in batch_axes,", name, inputs)
            rank = inputs[name].ndim
            if axis is not None and not -rank <= axis < rank:
                raise SettingError(
                    f"batch_axes has axis {axis} for X[{name!r}], which has {rank} axes."
                )
        for kind, value in converted.items():
            axes = {f"X[{n!r}]": axis for n, axis in self.batch_axes.items()} if kind == "X" else {}
            for name, array in named_arrays(value, kind):
                axis = axes.get(name, 0)
                if axis is not None:
                    yield name, np.moveaxis(array, axis, 0) if axis else array

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        if self.collate is not None:
            for numbers in self.batch_rows(epoch, skip, seed):
                yield self.collated(numbers)
            return
        for index in self._indices(epoch, skip, seed):
            x, *others = self._elements
            if self.batch_axes:
                chosen: Any = {
                    name: _rows_at(index, array, self.batch_axes.get(name, 0))
                    for name, array in x.items()
                }
            else:
                chosen = map_arrays(x, partial(_rows_at, index))
            yield (chosen, *(map_arrays(data, partial(_rows_at, index)) for data in others))

    def collated(self, numbers: Iterable[int]) -> tuple[Any, ...]:
        """Return the batch of the samples with these `numbers`."""
        assert self.collate is not None
        batch = self.collate([self.X[int(number)] for number in numbers])
        return batch if isinstance(batch, tuple) else (batch,)


class CollatedSource(RowSource, StreamSource):
    """Samples of any kind, which a function of the user collates into batches."""

    def __init__(self, adapter: DataAdapter, loader: DataLoader, batching: Batching) -> None:
        super().__init__(adapter, loader.rows, batching)
        self._loader = loader

    @classmethod
    def accepts(cls, data: Any) -> bool:
        return False  # LoaderSource creates it

    def items(self, epoch: int, skip: int) -> Iterator[Any]:
        numbers = np.arange(self.rows)
        for index in self.indices(epoch, skip):
            yield self._loader.collated(numbers[index])

    def _shard(self, share: Share) -> Source:
        return self._shard_rows(share)


def _number_of_samples(x: Any, y: Any, weights: Any, axes: Any) -> int:
    """Return the number of samples. SettingError: there is another source of labels or axes."""
    if y is not None or weights is not None or axes:
        raise SettingError(
            "With collate=, each sample has its own labels and weights, so DataLoader takes no y,"
            " sample_weight and batch_axes. Pass pairs: DataLoader(list(zip(X, y)), collate=...)."
        )
    rows = length_of(x)
    if not rows or not hasattr(x, "__getitem__"):
        raise DataError(
            "With collate=, X must be a sequence of at least one sample, such as a list, got"
            f" {shortened(x)}."
        )
    return rows


def _rows_at(index: Any, array: Any, axis: int | None = 0) -> Any:
    """Return the rows of an array. An array without rows is returned unchanged."""
    if axis is None or not array.ndim:
        return array
    return np.take(array, index, axis) if axis else array[index]


def _axes_hint(x: Any) -> Callable[[int], str]:
    """Return the advice for arrays of a dict that have other numbers of entries on axis 0."""
    is_dict = isinstance(x, Mapping)
    text = (
        " If an input has its rows on another axis, or none, pass DataLoader(...,"
        " batch_axes={'name': axis}) with that axis, or None."
    )
    return lambda rows: text if is_dict else ""


def _require_axes(loader: DataLoader, inputs: Iterable[TensorSpec]) -> None:
    """Raise DataError unless the model's inputs have their batch where the arrays have it."""
    arrays = loader._elements[0]
    for spec in inputs if isinstance(arrays, Mapping) else ():
        rank = arrays[spec.name].ndim if spec.name in arrays else 0
        axis = loader.batch_axes.get(spec.name, 0)
        if (
            rank
            and spec.rank == rank
            and (axis if axis is None else axis % rank) != spec.batch_axis
        ):
            raise DataError(
                f"The batch axis of the input {spec} is {spec.batch_axis}, but the DataLoader"
                f" has {axis}. Pass DataLoader(..., batch_axes={{{spec.name!r}:"
                f" {spec.batch_axis}}}), with an array in the layout of the model."
            )
