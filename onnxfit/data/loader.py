"""Loaders: data and how it is to be passed over, which also iterate by themselves."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from onnxfit.data.convert import as_array
from onnxfit.data.mapped import opened
from onnxfit.data.order import batch_indices, checked_batch_size, count_steps
from onnxfit.data.prefetch import Ahead, close_all, prefetched
from onnxfit.data.structure import common_rows, leaves_of, map_arrays
from onnxfit.errors import DataError, SettingError


class Loader(ABC):
    """Rows in batches, in a new order every epoch.

    Iterating gives `(x,)`, `(x, y)` or `(x, y, sample_weight)`, and each whole pass is the next
    epoch. `state_dict` says where a pass stands; after `load_state_dict` the next iteration goes on
    there. In `Trainer.fit` the trainer counts the epochs; evaluation and prediction keep the order
    of the rows.
    """

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
            raise SettingError(f"prefetch is a number of batches, 0 or more, got {prefetch}.")
        self.rows = rows
        self.batch_size = checked_batch_size(batch_size)
        self.shuffle = bool(shuffle)
        self.seed = None if seed is None else operator.index(seed)
        self.drop_last = bool(drop_last)
        self.prefetch = prefetch
        self.epoch = 0
        self._batch = 0  # batches of the pass under way that were handed out
        self._skip = 0
        self._running: list[Ahead[Any]] = []
        if not len(self):
            raise DataError(
                f"drop_last=True leaves nothing: {self.rows} rows are fewer than"
                f" batch_size={self.batch_size}."
            )

    @abstractmethod
    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        """The batches of a pass without the first `skip`; seed None keeps the order of the rows."""

    def __len__(self) -> int:
        """Batches in a pass."""
        return count_steps(self.rows, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        epoch, skip, self._skip = self.epoch, self._skip, 0
        self._batch = skip
        batches = self.batches(epoch, skip, (self.seed or 0) if self.shuffle else None)
        if self.prefetch:
            batches = prefetched(batches, self.prefetch, self._running)
        for batch in batches:
            self._batch += 1
            yield batch
        self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning."""
        self.epoch, self._batch, self._skip = operator.index(epoch), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and the batches of it handed out, and what the data must be for them to mean
        the same: plain numbers.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "batch": self._batch,
            "rows": self.rows,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        SettingError where it is of other data or another batch size.
        """
        for name in ("rows", "batch_size"):
            if state[name] != getattr(self, name):
                raise SettingError(
                    f"The loader's state has {name} {state[name]}, this loader has"
                    f" {getattr(self, name)}."
                )
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._batch = self._skip = state["batch"]

    def close(self) -> None:
        """End the background thread, if one runs."""
        close_all(self._running)


class DataLoader(Loader):
    """Arrays in batches, in a new order every epoch.

    - `X`, `y`: an array, a dict name -> array or a list of arrays (several inputs or outputs), or
      what numpy reads as one (pandas); all with the same number of rows. `sample_weight`: shape
      `(n,)` or `(n, 1)`. In place of an array stands an `np.memmap` or the path of a .npy file, and
      in place of a dict that of a .npz: they may be larger than memory, as only the rows of a batch
      are read.
    - `batch_size`: rows of a batch. The last one may be shorter, unless `drop_last`.
    - `shuffle`: the order of rows is a permutation that depends on `(seed, epoch)` only, and every
      row comes once an epoch. `Trainer.fit` counts the epochs itself; evaluation and prediction
      keep the order of the arrays.
    - `seed`: None stands for the trainer's seed, and for 0 where the loader is iterated without a
      trainer.
    - `prefetch`: batches that a background thread gathers ahead; worth it for memory-mapped arrays.
      0: no thread.

    Iterating gives `(x,)`, `(x, y)` or `(x, y, sample_weight)`, built like `X` and `y`, and each
    whole pass is the next epoch. `state_dict` says where a pass stands; after `load_state_dict` the
    next iteration goes on there.

    DataError: no rows, unequal numbers of rows, or not arrays of numbers. SettingError: an
    impossible setting.

    >>> import numpy as np
    >>> loader = DataLoader(np.arange(5.0), batch_size=2, shuffle=False)
    >>> [x.tolist() for (x,) in loader], len(loader)
    ([[0.0, 1.0], [2.0, 3.0], [4.0]], 3)
    """

    def __init__(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 0,
    ) -> None:
        if sample_weight is not None and y is None:
            raise DataError("DataLoader got sample weights without labels: y is None.")
        self.X, self.y, self.sample_weight = opened(X), opened(y), opened(sample_weight)
        given = {"X": self.X, "y": self.y, "sample_weight": self.sample_weight}
        parts = {name: _arrays(data, name) for name, data in given.items() if data is not None}
        self._parts = list(parts.values())
        rows = common_rows(
            [leaf for name, part in parts.items() for leaf in leaves_of(part, name)], "loader's"
        )
        super().__init__(rows, batch_size, shuffle, seed, drop_last, prefetch)

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        for index in batch_indices(self.rows, self.batch_size, len(self), seed, epoch, skip):
            yield tuple(map_arrays(part, partial(_rows, index)) for part in self._parts)


def _rows(index: Any, array: Any) -> Any:
    """The rows of an array; a scalar is the same for every row."""
    return array[index] if array.ndim else array


def _arrays(data: Any, place: str) -> Any:
    """Everything as arrays of numbers."""
    return map_arrays(data, lambda value: as_array(value, place))
