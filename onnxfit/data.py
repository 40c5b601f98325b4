"""Data: arrays, loaders and iterables become batches that fit the model's inputs, or one clear error says why they do not."""

from __future__ import annotations

import math
import operator
import queue
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from onnxfit.errors import DataError, SettingError
from onnxfit.graph.names import SAMPLE_WEIGHT
from onnxfit.graph.spec import TensorSpec

__all__ = ["Batch", "DataLoader", "Source", "source", "validation_split"]

Array = npt.NDArray[Any]
Columns = tuple[tuple[str, Array], ...]
T = TypeVar("T")

LABEL_KEYS = ("label", "labels", "y")  # what data sets call the only target


class Target(Protocol):
    """What an output's labels need: the graph input they enter by, and how its loss wants them."""

    @property
    def input(self) -> str: ...

    def prepare(self, y: Array) -> Array: ...


# ---------------------------------------------------------------------- what the loop sees


@dataclass(slots=True, eq=False)
class Batch:
    """Some rows of the data. Nothing is copied before `write` or `arrays`.

    `signature` is equal for two batches of the same names, types and shapes. It is a string, because a string remembers its hash.
    """

    rows: int
    signature: str
    columns: Columns  # the arrays that have rows, of which `index` selects this batch's
    scalars: Columns  # inputs of rank 0, the same for every row
    index: slice | Array

    def arrays(self) -> dict[str, Array]:
        """Graph input -> array, of exactly this batch's rows."""
        return {name: array[self.index] for name, array in self.columns} | dict(self.scalars)

    def write(self, buffers: Mapping[str, Array]) -> None:
        """Copy every array into the buffer of its name, which has its shape and type."""
        index = self.index
        if isinstance(index, slice):
            for name, array in self.columns:
                buffers[name][...] = array[index]
        else:
            for name, array in self.columns:
                array.take(
                    index, 0, buffers[name], "clip"
                )  # "clip" lets numpy write without a buffer of its own; no index is out of range
        for name, array in self.scalars:
            buffers[name][...] = array


class Source(ABC):
    """Where batches come from: `batches(epoch)` is one pass over the data.

    `steps` (batches in a pass), `rows` and `batch_size` are None where only the data can tell. `re_iterable` is False for what can
    be passed over once.
    """

    what: str
    rows: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    re_iterable: bool = True

    @abstractmethod
    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of pass number `epoch`, which decides the order of rows, without the first `skip`."""

    def require_re_iterable(self, passes: int) -> None:
        """DataError where more than one pass is asked of data that can be passed over once."""
        if passes > 1 and not self.re_iterable:
            raise DataError(
                f"The {self.what} data is an iterator, which can be passed over once, and {passes} epochs need {passes} passes. "
                "Pass something that can be iterated anew: the function that returns the generator (fit(batches), not "
                "fit(batches())), a list of batches, or an onnxfit.DataLoader. Or set steps_per_epoch."
            )

    def close(self) -> None:  # noqa: B027  most sources hold nothing
        """End what runs in the background."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


S = TypeVar("S", bound=Source)


class DataLoader:
    """Arrays in batches, in a new order every epoch.

    - `X`, `y`: an array, a dict name -> array or a list of arrays (several inputs or outputs), or what numpy reads as one (pandas);
      all with the same number of rows. `sample_weight`: shape `(n,)` or `(n, 1)`.
    - `batch_size`: rows of a batch. The last one may be shorter, unless `drop_last`.
    - `shuffle`: the order of rows is a permutation that depends on `(seed, epoch)` only, and every row comes once an epoch.
      `Trainer.fit` counts the epochs itself; evaluation and prediction keep the order of the arrays.
    - `seed`: None stands for the trainer's seed, and for 0 where the loader is iterated without a trainer.
    - `prefetch`: batches that a background thread gathers ahead; worth it for memory-mapped arrays. 0: no thread.

    Iterating gives `(x,)`, `(x, y)` or `(x, y, sample_weight)`, built like `X` and `y`, and each whole pass is the next epoch.
    `state_dict` says where a pass stands; after `load_state_dict` the next iteration goes on there.

    DataError: no rows, unequal numbers of rows, or not arrays of numbers. SettingError: an impossible setting.

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
        if prefetch < 0:
            raise SettingError(f"prefetch is a number of batches, 0 or more, got {prefetch}.")
        self.X, self.y, self.sample_weight = X, y, sample_weight
        self.batch_size = _batch_size(batch_size)
        self.shuffle = bool(shuffle)
        self.seed = None if seed is None else operator.index(seed)
        self.drop_last = bool(drop_last)
        self.prefetch = prefetch
        given = {"X": X, "y": y, "sample_weight": sample_weight}
        parts = {name: _arrays(data, name) for name, data in given.items() if data is not None}
        self.rows = _common_rows([leaf for name, part in parts.items() for leaf in _leaves(part, name)], "loader's")
        self._parts = list(parts.values())
        self.epoch = 0
        self._batch = 0  # batches of the pass under way that were handed out
        self._skip = 0
        self._running: list[Prefetch[Any]] = []
        if not len(self):
            raise DataError(f"drop_last=True leaves nothing: {self.rows} rows are fewer than batch_size={self.batch_size}.")

    def __len__(self) -> int:
        """Batches in a pass."""
        return _steps(self.rows, self.batch_size, self.drop_last)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        epoch, skip, self._skip = self.epoch, self._skip, 0
        self._batch = skip
        batches = self._pass(epoch, skip)
        if self.prefetch:
            batches = _ahead(batches, self.prefetch, self._running)
        for batch in batches:
            self._batch += 1
            yield batch
        self.set_epoch(epoch + 1)

    def _pass(self, epoch: int, skip: int) -> Iterator[tuple[Any, ...]]:
        seed = (self.seed or 0) if self.shuffle else None
        for index in _indices(self.rows, self.batch_size, len(self), seed, epoch, skip):
            yield tuple(_map(part, lambda array: array[index] if array.ndim else array) for part in self._parts)  # noqa: B023

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its beginning."""
        self.epoch, self._batch, self._skip = operator.index(epoch), 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and the batches of it handed out, and what the data must be for them to mean the same: plain numbers."""
        return {"seed": self.seed, "epoch": self.epoch, "batch": self._batch, "rows": self.rows, "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. SettingError where it is of other data or another batch size."""
        for name in ("rows", "batch_size"):
            if state[name] != getattr(self, name):
                raise SettingError(f"The loader's state has {name} {state[name]}, this loader has {getattr(self, name)}.")
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._batch = self._skip = state["batch"]

    def close(self) -> None:
        """End the background thread, if one runs."""
        _close_all(self._running)


def source(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    inputs: Sequence[TensorSpec],
    targets: Mapping[str, Target],
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool = False,
    class_weight: Mapping[int, float] | None = None,
    what: str = "training",
) -> Source:
    """The batches of whatever a user calls data.

    - arrays, dicts and lists of arrays, pandas, `DataLoader`: cast and checked here, once;
    - HF datasets, objects with `__len__` and `__getitem__` of batches, iterables of batches, functions that return an iterator: each
      batch is cast and checked when it comes.

    `shuffle` is for the rows of arrays, and for the order of batches that can be had by number (as in Keras); iterables have their own.
    `targets` maps output -> Target, in the model's order. `what` is "training", "evaluation" or "prediction", which needs no labels.

    DataError: the data does not fit `inputs` or `targets`. SettingError: settings that exclude each other.
    """
    if isinstance(x, DataLoader):
        _refuse_beside_batches(x, y, sample_weight)
        made = source(
            x.X,
            x.y,
            x.sample_weight,
            inputs=inputs,
            targets=targets,
            batch_size=x.batch_size,
            shuffle=x.shuffle and what == "training",
            seed=seed if x.seed is None else x.seed,
            drop_last=x.drop_last,
            class_weight=class_weight,
            what=what,
        )
        return PrefetchedSource(made, x.prefetch) if x.prefetch else made
    feed = Feed(tuple(inputs), dict(targets), _class_weight(class_weight, targets), what)
    batch_size = _batch_size(batch_size)
    if _holds_arrays(x):
        prepared = feed.prepare(x, y, sample_weight)
        _check_fixed(feed.fixed, prepared.rows, batch_size, drop_last, what)
        return ArraySource(prepared, batch_size, shuffle, seed, drop_last, what)
    _refuse_beside_batches(x, y, sample_weight)
    return _stream(x, feed, batch_size, shuffle, seed)


def validation_split(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Training and validation data, each `(x, y, sample_weight)`: the last `fraction` of the rows, as they stand, validates.

    Of n rows floor(n (1 - fraction)) are trained on, as in Keras.

    >>> train, validation = validation_split(np.arange(7), None, None, 0.5)
    >>> train[0], validation[0]
    (array([0, 1, 2]), array([3, 4, 5, 6]))
    """
    if not 0 < fraction < 1:
        raise SettingError(f"validation_split is a part of the rows, between 0 and 1, got {fraction}.")
    if not _holds_arrays(x):
        raise SettingError(
            f"validation_split cuts arrays, and {type(x).__name__} is none: split the data yourself and pass validation_data, "
            "or pass the arrays with validation_split."
        )
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    leaves = [leaf for name, data in given.items() if data is not None for leaf in _leaves(data, name)]
    rows = _common_rows(leaves, "training")
    trained = math.floor(round(rows * (1 - fraction), 9))  # 10 * (1 - 0.9) is a little less than 1
    if not 0 < trained < rows:
        raise SettingError(
            f"validation_split={fraction} of {rows} rows leaves no row for {'validation' if trained else 'training'}."
        )
    first, last = (tuple(_cut(given[name], cut) for name in given) for cut in (slice(0, trained), slice(trained, rows)))
    return (first[0], first[1], first[2]), (last[0], last[1], last[2])


# ---------------------------------------------------------------------- arrays


class ArraySource(Source):
    """Prepared arrays, in batches."""

    def __init__(self, prepared: Prepared, batch_size: int, shuffle: bool, seed: int, drop_last: bool, what: str) -> None:
        rows = prepared.rows
        self.what, self.rows, self.batch_size = what, rows, batch_size
        self.steps: int = _steps(rows, batch_size, drop_last)
        if not self.steps:
            raise DataError(
                f"drop_last=True leaves nothing of the {what} data: {rows} rows are fewer than batch_size={batch_size}."
            )
        self._prepared = prepared
        self._size = min(batch_size, rows)
        self._seed = seed if shuffle else None

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        columns, scalars, size = self._prepared.columns, self._prepared.scalars, self._size
        assert self.rows is not None
        full, rest = divmod(self.rows, size)
        signature = self._prepared.signature(size)
        indices = _indices(self.rows, size, self.steps, self._seed, epoch, skip)
        for index in islice(indices, max(full - skip, 0)):
            yield Batch(size, signature, columns, scalars, index)
        for index in indices:
            yield Batch(rest, self._prepared.signature(rest), columns, scalars, index)


def _indices(rows: int, size: int, steps: int, seed: int | None, epoch: int, skip: int) -> Iterator[slice | Array]:
    """Which rows each batch of a pass has: slices, or parts of the epoch's permutation where there is a seed."""
    starts = range(skip * size, steps * size, size)
    if seed is None:
        return (slice(start, min(start + size, rows)) for start in starts)
    order = permutation(seed, epoch, rows)
    return (order[start : start + size] for start in starts)


def permutation(seed: int, epoch: int, rows: int) -> Array:
    """The order of rows in an epoch: a pure function of its arguments."""
    return np.random.Generator(np.random.PCG64([seed % 2**64, epoch % 2**64])).permutation(rows)


# ---------------------------------------------------------------------- batches that come one by one


class StreamSource(Source):
    """Batches made elsewhere; `passes(epoch, skip)` begins a pass over them."""

    def __init__(
        self,
        feed: Feed,
        passes: Callable[[int, int], Iterator[Any]],
        *,
        steps: int | None = None,
        rows: int | None = None,
        batch_size: int | None = None,
        re_iterable: bool = True,
    ) -> None:
        self.what, self.steps, self.rows, self.batch_size, self.re_iterable = feed.what, steps, rows, batch_size, re_iterable
        self._feed = feed
        self._passes = passes

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        given = self._passes(epoch, skip)
        number = skip
        try:
            for item in given:
                try:
                    batch = self._feed.batch(item)
                except DataError as error:
                    raise DataError(f"In batch {number} of the {self.what} data: {error}") from None
                yield batch
                number += 1
        finally:
            end = getattr(given, "close", None)
            if callable(end):  # a generator; one of the caller's own comes as an islice, which leaves it open
                end()
        if not number:
            used = "" if self.re_iterable else " An iterator can be passed over once: is it used up?"
            raise DataError(f"The {self.what} data gave no batch.{used}")


def _stream(data: Any, feed: Feed, batch_size: int, shuffle: bool, seed: int) -> Source:
    """The source for whatever gives batches."""
    what, kinds = feed.what, type(data).__mro__
    if hasattr(data, "with_format") and hasattr(data, "iter"):
        return _columns_stream(data.with_format("numpy"), feed, batch_size, shuffle, seed)
    if any(kind.__name__ == "Dataset" and kind.__module__.startswith("torch.utils.data") for kind in kinds):
        raise DataError(
            f"The {what} data is a torch Dataset ({type(data).__name__}), which gives single samples: "
            "pass torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    length = _length(data)
    size = getattr(data, "batch_size", None)
    if not isinstance(size, int):
        size = None
    if hasattr(data, "__getitem__") and length is not None and not isinstance(data, (str, bytes)):
        return StreamSource(feed, _indexed_passes(data, seed if shuffle else None), steps=length, batch_size=size)
    if hasattr(data, "__iter__") and not isinstance(data, (str, bytes)):
        if isinstance(data, Iterator):
            return StreamSource(
                feed, lambda epoch, skip: islice(data, skip, None), re_iterable=False, steps=length, batch_size=size
            )

        def iterate(epoch: int, skip: int) -> Iterator[Any]:
            if hasattr(data, "set_epoch"):
                data.set_epoch(epoch)
            return _from(iter(data), skip)

        return StreamSource(feed, iterate, steps=length, batch_size=size)
    if callable(data):
        return StreamSource(feed, lambda epoch, skip: _from(iter(data()), skip))
    raise DataError(
        f"The {what} data is {'None' if data is None else 'of type ' + type(data).__name__}: expected arrays, a dict or list of "
        "arrays, an onnxfit.DataLoader, an iterable of batches, or a function that returns an iterator of batches."
    )


def _from(batches: Iterator[Any], skip: int) -> Iterator[Any]:
    """The iterator itself, `skip` batches on: a generator can then still be closed."""
    for _ in islice(batches, skip):
        pass
    return batches


def _indexed_passes(data: Any, seed: int | None) -> Callable[[int, int], Iterator[Any]]:
    """Batches by number, in a new order every epoch; Keras's hook between epochs is called."""

    def passes(epoch: int, skip: int) -> Iterator[Any]:
        length = len(data)
        order = range(length) if seed is None else permutation(seed, epoch, length).tolist()
        for number in order[skip:]:
            yield data[number]
        if hasattr(data, "on_epoch_end"):
            data.on_epoch_end()

    return passes


def _columns_stream(data: Any, feed: Feed, batch_size: int, shuffle: bool, seed: int) -> Source:
    """A HF dataset: rows by their numbers, or, where it is a stream itself, in its own order."""
    rows = _length(data)
    if rows is None:

        def iterate(epoch: int, skip: int) -> Iterator[Any]:
            if hasattr(data, "set_epoch"):
                data.set_epoch(epoch)
            return _from(iter(data.iter(batch_size=batch_size)), skip)

        return StreamSource(feed, iterate, batch_size=batch_size)
    size, steps = min(batch_size, max(rows, 1)), _steps(rows, batch_size, False)
    _check_fixed(feed.fixed, rows, batch_size, False, feed.what)

    def gather(epoch: int, skip: int) -> Iterator[Any]:
        for index in _indices(rows, size, steps, seed if shuffle else None, epoch, skip):
            yield data[index if isinstance(index, slice) else index.tolist()]

    return StreamSource(feed, gather, steps=steps, rows=rows, batch_size=batch_size)


# ---------------------------------------------------------------------- one batch ahead


class Prefetch(Iterator[T]):
    """An iterator that a background thread keeps `depth` items ahead; its exceptions are raised here, with their traceback."""

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._over = False
        self._thread = threading.Thread(target=self._work, args=(items,), name="onnxfit prefetch", daemon=True)
        self._thread.start()

    def _work(self, items: Iterable[T]) -> None:
        try:
            iterator = iter(items)
            while True:
                self._room.acquire()
                if self._over:
                    return
                self._ready.put((True, next(iterator)))
        except BaseException as error:  # StopIteration too: it ends the loop that reads
            self._ready.put((False, error))

    def __next__(self) -> T:
        if self._over:
            raise StopIteration
        fine, item = self._ready.get()
        if not fine:
            self._over = True
            raise item
        self._room.release()
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread; what it gathered is dropped."""
        self._over = True
        self._room.release()
        if self._thread is not threading.current_thread():
            self._thread.join()


class PrefetchedSource(Source):
    """Another source, gathered in the background."""

    def __init__(self, inner: Source, depth: int) -> None:
        self.what, self.rows, self.steps, self.batch_size = inner.what, inner.rows, inner.steps, inner.batch_size
        self.re_iterable = inner.re_iterable
        self._inner = inner
        self._depth = depth
        self._running: list[Prefetch[Batch]] = []

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        return _ahead(map(_gathered, self._inner.batches(epoch, skip)), self._depth, self._running)

    def close(self) -> None:
        _close_all(self._running)
        self._inner.close()


def _ahead(items: Iterable[T], depth: int, running: list[Prefetch[T]]) -> Iterator[T]:
    """The items, gathered by a thread that is listed in `running` while it lives."""
    ahead = Prefetch(items, depth)
    running.append(ahead)
    try:
        yield from ahead
    finally:
        ahead.close()
        running.remove(ahead)


def _close_all(running: Iterable[Prefetch[Any]]) -> None:
    for ahead in running:
        ahead.close()


def _gathered(batch: Batch) -> Batch:
    """The same batch with its rows copied out."""
    columns = {name: np.ascontiguousarray(array[batch.index]) for name, array in batch.columns}
    return Batch(batch.rows, batch.signature, tuple(columns.items()), batch.scalars, slice(0, batch.rows))


# ---------------------------------------------------------------------- data meets model


@dataclass(frozen=True)
class Prepared:
    """Arrays as the graph wants them, in C order."""

    rows: int
    columns: Columns
    scalars: Columns

    def signature(self, rows: int) -> str:
        """Names, types and shapes of a batch of so many rows."""
        columns = (f"{name}:{a.dtype.str}{(rows, *a.shape[1:])}" for name, a in self.columns)
        return ";".join((*columns, *(f"{name}:{a.dtype.str}()" for name, a in self.scalars)))


@dataclass
class Feed:
    """Fits data to a model: finds every input and label, checks and casts them."""

    inputs: tuple[TensorSpec, ...]
    targets: Mapping[str, Target]
    class_weight: Mapping[int, float] | None
    what: str
    _warned: bool = field(default=False, init=False)

    @property
    def fixed(self) -> TensorSpec | None:
        """An input whose batch dimension is a number."""
        return next((spec for spec in self.inputs if spec.shape and isinstance(spec.shape[0], int)), None)

    def batch(self, given: Any) -> Batch:
        """A batch as loaders give them: `(x,)`, `(x, y)`, `(x, y, sample_weight)`, an array, or a dict."""
        x, y, sample_weight = given, None, None
        if isinstance(given, (tuple, list)):
            if not 1 <= len(given) <= 3:
                raise DataError(
                    f"a batch is (x,), (x, y) or (x, y, sample_weight), got {len(given)} items. "
                    "Several inputs are a tuple or dict inside: ((a, b), y)."
                )
            x, y, sample_weight = (*given, None, None)[:3]
        prepared = self.prepare(x, y, sample_weight)
        if self.fixed is not None and self.fixed.shape is not None and prepared.rows != self.fixed.shape[0]:
            raise DataError(
                f"the batch dimension of input {self.fixed} is fixed, and this batch has {prepared.rows} rows. "
                f"Make batches of {self.fixed.shape[0]}, and leave out a shorter last one (drop_last=True)."
            )
        return Batch(prepared.rows, prepared.signature(prepared.rows), prepared.columns, prepared.scalars, slice(0, prepared.rows))

    def prepare(self, x: Any, y: Any, sample_weight: Any) -> Prepared:
        """Everything as the graph wants it. DataError where it does not fit."""
        x, y, sample_weight = self._out_of_dict(x, y, sample_weight)
        raw_inputs, raw_labels = self._inputs(x), self._labels(y)
        if sample_weight is not None and not self.targets:
            sample_weight = self._ignore("sample weights", None)
        if sample_weight is not None and self.class_weight is not None:
            raise SettingError("Give class_weight or sample_weight, not both: multiply the class weights into sample_weight.")
        inputs = [_shaped(_as_array(raw_inputs[spec.name], spec), spec) for spec in self.inputs]
        labels = {output: _as_array(value, f"y for {output}") for output, value in raw_labels.items()}
        weights = None if sample_weight is None else _weights(sample_weight)
        rows = _common_rows(
            [*zip(self.inputs, inputs), *((f"y for {o}", a) for o, a in labels.items()), (SAMPLE_WEIGHT, weights)], self.what
        )
        if self.class_weight is not None:
            weights = _class_weights(next(iter(labels.values())), self.class_weight)
        columns: list[tuple[str, Array]] = []
        scalars: list[tuple[str, Array]] = []
        narrowed: list[str] = []
        for spec, array in zip(self.inputs, inputs):
            if (
                hasattr(raw_inputs[spec.name], "__array__") and array.ndim and _narrows(array.dtype, spec.dtype)
            ):  # a list has no type to lose
                narrowed.append(f"{spec.name!r} is {array.dtype} and was converted to {spec.dtype}")
            array = _in_c_order(_cast(array, spec))
            self._check_numbers(array, spec)
            (columns if array.ndim else scalars).append((spec.name, array))
        for output, array in labels.items():
            if not array.ndim:
                raise DataError(f"y for {output} is a single number, expected one label a row.")
            array = _in_c_order(self.targets[output].prepare(array))
            self._check_numbers(array, f"y for {output}")
            columns.append((self.targets[output].input, array))
        if weights is not None:
            weights = _in_c_order(weights)
            self._check_numbers(weights, SAMPLE_WEIGHT)
            columns.append((SAMPLE_WEIGHT, weights))
        if narrowed and not self._warned:
            self._warned = True
            _warn(f"{'; '.join(narrowed)}. Convert once with astype to save time and silence this.")
        return Prepared(rows, tuple(columns), tuple(scalars))

    def _check_numbers(self, array: Array, place: object) -> None:
        """DataError for NaN, except in prediction: a model may know what to do with it, a gradient does not."""
        # the minimum is NaN if anything is, and needs no array of booleans
        if self.what != "prediction" and _is_float(array.dtype) and array.size and np.isnan(array.min()):
            row = int(np.isnan(array).reshape(len(array) if array.ndim else 1, -1).any(axis=1).argmax())
            raise DataError(f"{place} is NaN in row {row}.")

    def _out_of_dict(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Labels and weights that stand beside the inputs in one dict."""
        if not isinstance(x, Mapping):
            return x, y, sample_weight
        others = {key: value for key, value in x.items() if key not in {spec.name for spec in self.inputs}}
        if self.what == "prediction":
            for key in (*LABEL_KEYS, SAMPLE_WEIGHT):
                others.pop(key, None)
        else:
            if y is None:
                found: dict[str, Any] = {}
                for output, target in self.targets.items():
                    keys = (output, target.input, *(LABEL_KEYS if len(self.targets) == 1 else ()))
                    present = [key for key in keys if key in others]
                    if present:
                        found[output] = others.pop(present[0])
                y = found or None
            if sample_weight is None:
                sample_weight = others.pop(SAMPLE_WEIGHT, None)
        return {spec.name: x[spec.name] for spec in self.inputs if spec.name in x} | others, y, sample_weight

    def _inputs(self, x: Any) -> dict[str, Any]:
        named = _by_name(x, [spec.name for spec in self.inputs], "input")
        missing = [spec for spec in self.inputs if spec.name not in named]
        surplus = [name for name in named if name not in {spec.name for spec in self.inputs}]
        if missing or surplus:
            raise DataError(
                f"The {self.what} data does not match the model's inputs."
                + (f" Missing: {'; '.join(map(str, missing))}." if missing else "")
                + (f" Not an input: {', '.join(map(repr, surplus))}." if surplus else "")
                + f" Expected: {'; '.join(map(str, self.inputs))}."
            )
        return named

    def _labels(self, y: Any) -> dict[str, Any]:
        if y is None or not self.targets:
            if self.targets:
                raise DataError(
                    f"The {self.what} data has no labels, and the loss of {', '.join(map(repr, self.targets))} needs them: "
                    "pass y, or batches (x, y)."
                )
            return {} if y is None else self._ignore("labels", {})
        entrances = {target.input: output for output, target in self.targets.items()}
        named = {entrances.get(name, name): value for name, value in _by_name(y, list(self.targets), "output with a loss").items()}
        if set(named) != set(self.targets):
            raise DataError(
                f"The labels are for {', '.join(map(repr, named)) or 'nothing'}; "
                f"the outputs with a loss are {', '.join(map(repr, self.targets))}."
            )
        return {output: named[output] for output in self.targets}

    def _ignore(self, given: str, nothing: T) -> T:
        """Prediction passes over labels and weights; elsewhere they would be lost silently."""
        if self.what != "prediction":
            raise DataError(
                f"The model computes its own loss, so that {given} have no place: feed them as inputs. "
                f"The inputs are {'; '.join(map(str, self.inputs))}."
            )
        return nothing


# ---------------------------------------------------------------------- pieces


def _holds_arrays(data: Any) -> bool:
    """Whether data is in memory as arrays, and not something that gives batches."""
    if isinstance(data, Mapping) or hasattr(data, "__array__") or hasattr(data, "toarray"):
        return True
    return isinstance(data, (list, tuple)) and not (data and all(_is_batch(item) for item in data))


def _is_batch(item: Any) -> bool:
    """Whether an item of a list is a batch, and not an array, a row or a number."""
    return isinstance(item, Mapping) or (isinstance(item, tuple) and any(hasattr(part, "__len__") for part in item))


def _refuse_beside_batches(data: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise SettingError(f"{type(data).__name__} gives batches, which bring their own labels and weights: leave out {name}.")


def _by_name(data: Any, names: Sequence[str], kind: str) -> dict[str, Any]:
    """Dicts by name, lists by order, an array for the only one; a table for several is taken by its columns."""
    if isinstance(data, Mapping):
        return dict(data)
    if hasattr(data, "columns") and len(names) > 1:
        return {str(column): data[column] for column in data.columns}
    several = isinstance(data, (list, tuple)) and (
        len(names) > 1 or (len(data) > 0 and all(_length(item) is not None and hasattr(item, "__array__") for item in data))
    )
    if not several and len(names) == 1:
        return {names[0]: data}
    if not several or len(data) != len(names):
        given = f"{len(data)} arrays" if several else f"one {type(data).__name__}"
        raise DataError(
            f"{given} for {len(names)} {kind}{'s' * (len(names) != 1)}: pass a dict by name or a list in the order "
            f"{', '.join(map(repr, names))}." + (" Rows in a list go through np.stack." if len(names) == 1 else "")
        )
    return dict(zip(names, data))


def _as_array(value: Any, place: object) -> Array:
    """An array of numbers or booleans. DataError for anything else."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"{place} is a masked array, whose mask would be lost: fill it first, array.filled(0).")
    if hasattr(value, "toarray"):
        raise DataError(f"{place} is sparse ({type(value).__name__}), and models take dense arrays: pass .toarray().")
    try:
        array = np.asarray(value)
    except Exception as error:  # numpy, torch and others each raise their own
        raise DataError(f"{place} cannot become one array (rows of different lengths?): {error}") from error
    if array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.type is not np.void):  # V: bfloat16 and its like
        return array
    hint = {"O": "objects", "V": "records", "c": "complex", "M": "dates", "m": "times"}.get(array.dtype.kind, "text")
    raise DataError(
        f"{place} has element type {array.dtype} ({hint}): pass numbers; np.unique(..., return_inverse=True)[1] numbers classes."
    )


def _shaped(array: Array, spec: TensorSpec) -> Array:
    """The array with the rank of the input; the batch dimension is the caller's."""
    shape = spec.shape
    if shape is None:
        return array
    if not shape:
        if array.size != 1:
            raise DataError(f"{spec} is a single number, got an array of shape {array.shape}.")
        return array.reshape(())
    if array.ndim and not len(array):
        return array  # no rows: that is the error to report
    if array.ndim == len(shape) - 1 and array.ndim and shape[-1] == 1:
        array = array[..., None]
    if array.ndim != len(shape) or any(isinstance(d, int) and d != s for d, s in zip(shape[1:], array.shape[1:])):
        raise DataError(f"{spec} got an array of shape {array.shape}; the first dimension is the batch.")
    return array


def _cast(array: Array, spec: TensorSpec) -> Array:
    """The array in the input's element type; what loses more than precision is a DataError."""
    dtype = spec.dtype
    if array.dtype == dtype:
        return array
    if dtype.kind not in "biu":
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError:
            raise DataError(f"{spec} got {array.dtype} values beyond the range of {dtype}.") from None
    with np.errstate(invalid="ignore"):
        cast = array.astype(dtype)
    if array.dtype.kind != "b" and not np.array_equal(cast, array):
        raise DataError(f"{spec} got {array.dtype} values that {dtype} cannot hold, such as {array[cast != array].flat[0]}.")
    return cast


def _narrows(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    return _is_float(given) and _is_float(wanted) and given.itemsize > wanted.itemsize


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fV"


def _weights(sample_weight: Any) -> Array:
    array = _as_array(sample_weight, "sample_weight")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"sample_weight has one number a row, shape (n,) or (n, 1), got {array.shape}.")
    return array.astype(np.float32, copy=False)


def _class_weight(class_weight: Mapping[int, float] | None, targets: Mapping[str, Target]) -> dict[int, float] | None:
    if class_weight is None:
        return None
    if len(targets) != 1:
        raise SettingError(f"class_weight needs exactly one output with labels, the model has {len(targets)}: pass sample_weight.")
    try:
        weights = {operator.index(label): float(weight) for label, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise SettingError(f"class_weight is a dict class number -> weight, got {class_weight!r}.") from None
    if not all(map(math.isfinite, weights.values())):
        raise SettingError(f"class_weight holds finite numbers, got {class_weight!r}.")
    return weights


def _class_weights(labels: Array, class_weight: Mapping[int, float]) -> Array:
    """Each row's weight by its class: its integer label, or the place of the 1 in a one-hot row."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.size and np.all((labels == 0) | (labels == 1)) and np.all(labels.sum(axis=1) == 1):
        labels = labels.argmax(axis=1)
    if labels.ndim != 1 or not np.array_equal(labels, np.rint(labels)):
        raise DataError(
            f"class_weight needs integer classes (n,) or one-hot rows (n, classes), got {labels.dtype} of shape {labels.shape}."
        )
    classes, inverse = np.unique(labels, return_inverse=True)
    return np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[inverse]


def _in_c_order(array: Array) -> Array:
    """The array in the memory layout that np.take reads; any other it would copy as a whole, for every batch."""
    return array if array.flags.c_contiguous and array.flags.aligned else np.require(array, requirements=["C", "A"])


def _check_fixed(fixed: TensorSpec | None, rows: int, batch_size: int, drop_last: bool, what: str) -> None:
    """DataError where a model's fixed batch dimension and the batches to come differ."""
    if fixed is None:
        return
    assert fixed.shape is not None
    needed = fixed.shape[0]
    assert isinstance(needed, int)
    size, rest = min(batch_size, rows), rows % needed
    if size == needed and (drop_last or not rest):
        return
    if rows < needed:
        raise DataError(f"The batch dimension of input {fixed} is fixed, and the {what} data has only {rows} rows.")
    loader = f"DataLoader(x, y, batch_size={needed}{', drop_last=True' if rest else ''})"
    raise DataError(
        f"The batch dimension of input {fixed} is fixed: every batch needs {needed} rows, and batches of {size} from {rows} rows "
        "do not give that. "
        f"Pass batch_size={needed}" + (f"; drop_last=True leaves out the last {rest} rows: {loader}." if rest else ".")
    )


def _common_rows(arrays: Iterable[tuple[object, Any]], what: str) -> int:
    """The number of rows that all of (place, array) share. DataError where they differ or there are none."""
    sizes = [(place, rows) for place, array in arrays if (rows := _length(array)) is not None]
    if not sizes:
        raise DataError(f"The {what} data has no array with rows.")
    rows = sizes[0][1]
    if any(size != rows for _, size in sizes):
        raise DataError(
            f"The {what} data has unequal numbers of rows: {', '.join(f'{place} has {size}' for place, size in sizes)}."
        )
    if not rows:
        raise DataError(f"The {what} data is empty: 0 rows.")
    return rows


def _batch_size(batch_size: Any) -> int:
    try:
        size = operator.index(batch_size)
    except TypeError:
        raise SettingError(f"batch_size is a number of rows, got {batch_size!r}.") from None
    if size < 1:
        raise SettingError(f"batch_size is at least 1, got {size}.")
    return size


def _steps(rows: int, batch_size: int, drop_last: bool) -> int:
    return rows // batch_size if drop_last else -(-rows // batch_size)


def _length(data: Any) -> int | None:
    """The length of what has one."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _leaves(data: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every array of a dict or list of arrays, and where it stands."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield f"{place}[{name!r}]", value
    elif _is_list_of_arrays(data):
        for number, value in enumerate(data):
            yield f"{place}[{number}]", value
    else:
        yield place, data


def _is_list_of_arrays(data: Any) -> bool:
    return (
        isinstance(data, (list, tuple))
        and len(data) > 0
        and all(hasattr(item, "__array__") and _length(item) is not None for item in data)
    )


def _map(data: Any, function: Callable[[Any], Any]) -> Any:
    """The same dict or list with every array replaced."""
    if isinstance(data, Mapping):
        return {name: function(value) for name, value in data.items()}
    return [function(value) for value in data] if _is_list_of_arrays(data) else function(data)


def _arrays(data: Any, place: str) -> Any:
    """Everything as arrays of numbers."""
    return _map(data, lambda value: _as_array(value, place))


def _cut(data: Any, rows: slice) -> Any:
    """Some rows of everything; what has no rows stays."""

    def cut(value: Any) -> Any:
        if _length(value) is None:
            return value
        return value.iloc[rows] if hasattr(value, "iloc") else value[rows]

    return None if data is None else _map(data, cut)


def _warn(message: str) -> None:
    """A warning at the line of the caller's that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "onnxfit":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
