"""The same ten rows in every kind of data, and a helper that makes a source of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from onnxfit.data import DataAdapter, DataLoader, Prefetch, Source
from onnxfit.errors import DataError
from onnxfit.graph.spec import TensorSpec

ROWS, SIZE = 10, 4


X = np.arange(20, dtype=np.float32).reshape(ROWS, 2)


Y = np.arange(ROWS, dtype=np.float32).reshape(ROWS, 1) / 8


W = np.linspace(1, 2, ROWS, dtype=np.float32)


def spec(name: str, *shape: int | str | None, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, np.dtype(dtype), shape)


INPUTS = [spec("x", "N", 2)]


FIXED = [spec("x", 4, 2)]


@dataclass(frozen=True)
class Labels:
    """Stands for an output and its loss: float labels of shape (n, 1)."""

    output: str = "out"

    @property
    def input(self) -> str:
        return f"y_true/{self.output}"

    def prepare(self, y: np.ndarray) -> np.ndarray:
        y = y[:, None] if y.ndim == 1 else y
        if y.shape[1:] != (1,):
            raise DataError(f"labels of shape {y.shape} were given, (batch, 1) is expected")
        return y.astype(np.float32)


OUT = {"out": Labels()}


def make(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    inputs: list[TensorSpec] = INPUTS,
    targets: Any = OUT,
    batch_size: Any = SIZE,
    shuffle: bool = False,
    drop_last: bool = False,
    **settings: Any,
) -> Source:
    adapter = DataAdapter(inputs, targets, **settings)
    data = adapter.source(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
    return data.with_batch_size(batch_size, drop_last=True) if drop_last else data


def whole(data: Source, epoch: int = 0, skip: int = 0) -> dict[str, np.ndarray]:
    """All rows of a pass."""
    parts = [batch.arrays() for batch in data.batches(epoch, skip)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def three_batches() -> list[tuple[np.ndarray, ...]]:
    return [(X[i : i + SIZE], Y[i : i + SIZE], W[i : i + SIZE]) for i in range(0, ROWS, SIZE)]


class Numbered:
    """Batches by number, as Keras's PyDataset gives them."""

    def __init__(self) -> None:
        self.ended = 0

    def __len__(self) -> int:
        return len(three_batches())

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return three_batches()[index]

    def on_epoch_end(self) -> None:
        self.ended += 1


class Iterable:
    """Batches by iteration alone."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Tensor:
    """A tensor of another library: numpy can read it, and that is all."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.ndim = array.ndim

    def __len__(self) -> int:
        return len(self.array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.array, dtype)

    def __getitem__(self, rows: Any) -> Tensor:
        return Tensor(self.array[rows])


class Table(Tensor):
    """What pandas's DataFrame has in common with this: columns by name, rows by `iloc`, an array on
    request.
    """

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        super().__init__(np.stack(list(columns.values()), axis=1))
        self.columns = list(columns)
        self.data = columns

    def __getitem__(self, column: str) -> Tensor:
        return Tensor(self.data[column])

    @property
    def iloc(self) -> Any:
        table = self

        class Rows:
            def __getitem__(self, rows: Any) -> Table:
                return Table({name: column[rows] for name, column in table.data.items()})

        return Rows()


class Columns:
    """What a dataset of Hugging Face has in common with this: rows by number or numbers, as a dict
    of columns, once it is told to.
    """

    def __init__(self, columns: dict[str, np.ndarray], told: bool = False) -> None:
        self.columns_ = columns
        self.told = told

    def with_format(self, kind: str) -> Columns:
        assert kind == "numpy"
        return Columns(self.columns_, told=True)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: slice | list[int]) -> dict[str, np.ndarray]:
        assert self.told
        assert isinstance(rows, (slice, list)), "single rows would lack the batch dimension"
        return {name: column[rows] for name, column in self.columns_.items()}

    def iter(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        return (self[i : i + batch_size] for i in range(0, ROWS, batch_size))


class StreamedColumns(Columns):
    """The same without a length."""

    __len__ = None  # type: ignore[assignment]

    def with_format(self, kind: str) -> StreamedColumns:
        return StreamedColumns(self.columns_, told=True)


NAMED = {"x": X, "label": Y, "sample_weight": W}


# how to hand over the same ten rows; every kind must give the same three batches
KINDS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "arrays": lambda: (X, Y, W),
    "other layout": lambda: (np.asfortranarray(X), Y[::-1][::-1], W),
    "lists of numbers": lambda: (X.tolist(), Y[:, 0].tolist(), W.tolist()),
    "tuples of numbers": lambda: (tuple(map(tuple, X.tolist())), Y[:, 0], W[:, None]),
    "foreign tensors": lambda: (Tensor(X), Tensor(Y), Tensor(W)),
    "table": lambda: (Table({"a": X[:, 0], "b": X[:, 1]}), Table({"y": Y[:, 0]}), W),
    "dicts": lambda: ({"x": X}, {"out": Y}, W),
    "labels by graph input": lambda: ({"x": X}, {"y_true/out": Y}, W),
    "lists of arrays": lambda: ([X], [Y], W),
    "one dict": lambda: (NAMED,),
    "one dict with the output's name": lambda: ({"out": Y, "sample_weight": W, "x": X},),
    "loader": lambda: (DataLoader(X, Y, W, batch_size=SIZE, shuffle=False),),
    "prefetching loader": lambda: (
        DataLoader(X, Y, W, batch_size=SIZE, shuffle=False, prefetch=2),
    ),
    "loader of dicts": lambda: (
        DataLoader({"x": X}, {"out": Y}, W, batch_size=SIZE, shuffle=False),
    ),
    "list of batches": lambda: (three_batches(),),
    "tuple of batches": lambda: (tuple(three_batches()),),
    "list of dicts": lambda: (
        [{"x": x, "y": y, "sample_weight": w} for x, y, w in three_batches()],
    ),
    "numbered batches": lambda: (Numbered(),),
    "iterable": lambda: (Iterable(three_batches()),),
    "iterable of lists": lambda: (
        Iterable([[Tensor(part) for part in batch] for batch in three_batches()]),
    ),
    "iterable of nested dicts": lambda: (
        Iterable([({"x": x}, {"out": y}, w) for x, y, w in three_batches()]),
    ),
    "function": lambda: ((lambda: iter(three_batches())),),
    "generator function": lambda: ((lambda: (batch for batch in three_batches())),),
    "generator": lambda: ((batch for batch in three_batches()),),
    "prefetched batches": lambda: (Prefetch(three_batches()),),
    "prefetched function": lambda: (
        Prefetch(lambda: (batch for batch in three_batches()), depth=1),
    ),
    "prefetched loader": lambda: (Prefetch(DataLoader(X, Y, W, batch_size=SIZE, shuffle=False)),),
    "columns": lambda: (Columns(NAMED),),
    "streamed columns": lambda: (StreamedColumns(NAMED),),
}


kinds = pytest.mark.parametrize("kind", KINDS)


def with_nan(array: np.ndarray, row: int) -> np.ndarray:
    array = array.copy()
    array[row] = np.nan
    return array


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "onnxfit prefetch"]
