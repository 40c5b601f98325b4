"""Rows of different lengths, such as tokens of texts, in padded batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.adapter import LABEL_KEYS, DataAdapter
from onnxfit.data.batch import Array
from onnxfit.data.convert import as_array, is_float
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.loader import Loader
from onnxfit.data.memory import count_training_rows
from onnxfit.data.order import permutation
from onnxfit.data.source import Splittable
from onnxfit.data.structure import common_rows, length_of
from onnxfit.errors import DataError, SettingError

__all__ = ["Bucket", "Pad"]

TOKENS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
MAX_MULTIPLE = 2**16  # batches with longer rows would not fit into memory
UNNAMED = ""  # the column of rows without names


@dataclass(frozen=True)
class RaggedColumn:
    """The values of one input, of labels or of weights: an array for each row.

    `lengths` are the sizes of the first axis, or None if rows are not padded.
    """

    name: str
    values: list[Array]
    dtype: np.dtype[Any]
    lengths: Array | None

    @classmethod
    def read(cls, name: str, values: Any) -> RaggedColumn:
        """Return the column of a sequence with a value for each row. DataError: other data."""
        if length_of(values) is None:
            raise DataError(
                f"{name or 'the data'} is a single value. Expected one value for each row."
            )
        arrays = [as_array(value, f"{name} in row {row}") for row, value in enumerate(values)]
        filled = [array for array in arrays if array.size] or arrays[:1]
        for row, array in enumerate(arrays):
            same_sizes = array.shape[1:] == filled[0].shape[1:] or not array.size
            if array.ndim != filled[0].ndim or not same_sizes:
                raise DataError(
                    f"{name or 'the data'} has shape {filled[0].shape} in one row and"
                    f" {array.shape} in row {row}. Only the first axis may differ."
                )
        if not arrays:
            return cls(name, arrays, np.dtype(np.float32), None)
        lengths = np.array([len(array) for array in arrays]) if filled[0].ndim else None
        dtype = np.result_type(*{array.dtype for array in filled})
        if dtype == np.float64 and not hasattr(values[0], "__array__"):
            dtype = np.dtype(np.float32)  # numbers of Python have no element type to keep
        return cls(name, arrays, dtype, lengths)

    def without_constant_lengths(self, lengths: Array) -> RaggedColumn:
        """Return the column without lengths if all its rows have the same size.

        - `lengths`: the lengths of the padded rows. A column with the same lengths keeps them,
          because its rows are padded too.
        """
        own = self.lengths
        if own is None or np.array_equal(own, lengths) or (own != own[0]).any():
            return self
        return replace(self, lengths=None)

    def select(self, rows: Sequence[int] | Array) -> RaggedColumn:
        """Return the column with some of the rows."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return RaggedColumn(self.name, [self.values[row] for row in rows], self.dtype, lengths)

    def padded(self, rows: Array, own: Array, length: int | None, fill: int) -> Array:
        """Return some rows as one array, with `fill` after the end of shorter rows.

        - `rows`: the rows of the batch, which determine the shape.
        - `own`: the subset of `rows` to return.
        - `length`: the padded length; None if all rows have the same shape.
        - `fill`: the padding value.
        """
        values = [self.values[row] for row in own]
        if length is None:
            return np.stack(values).astype(self.dtype, copy=False)
        shapes = (self.values[row].shape[1:] for row in rows if self.values[row].size)
        rest = next(shapes, values[0].shape[1:])
        # The type of the labels may not contain the fill: uint8 has no -100.
        dtype = np.result_type(self.dtype, np.min_scalar_type(fill))
        array = np.full((len(values), length, *rest), fill, dtype)
        for target, value in zip(array, values):
            target[: len(value)] = value
        return array


def check_multiple(multiple: int | None) -> None:
    """Raise SettingError for a `pad_to_multiple_of` out of range."""
    if multiple is not None and not 1 <= multiple <= MAX_MULTIPLE:
        raise SettingError(
            f"pad_to_multiple_of must be from 1 to {MAX_MULTIPLE}, got {shortened(multiple)}."
        )


def padded_length(lengths: Array, multiple: int | None) -> int:
    """Return the length to which rows of these lengths are padded."""
    multiple = multiple or 1
    # If no row has tokens, the batch still needs one column.
    return -(-max(int(lengths.max()), 1) // multiple) * multiple


class Pad(Loader, Splittable):
    """Rows of different lengths in batches, each padded to its longest row.

    - `X`: the rows: a list of sequences, of dicts input name -> sequence (as a Hugging Face dataset
      gives them), or a dict name -> list of sequences (as its tokenizers return). A sequence is a
      list of numbers or an array; only the size of its first axis may differ between rows. Inputs
      with one number in each row, or with rows of one size, are not padded.
    - `y`: labels: a list with one number or one sequence for each row, or a dict output -> list.
      The dicts of `X` may contain the labels instead, under "labels", "label", "y" or the name of
      an output.
    - `sample_weight`: a list with one number for each row, or one sequence, padded with 0.
    - `pad_to_multiple_of`: make the padded length a multiple of this number, so that there are
      fewer shapes to compile; None for the longest row itself.
    - `pad_token_id`: the padding of `input_ids`, or of the first input with lengths. The other
      inputs are padded with 0.
    - `label_pad_token_id`: the padding of labels that are sequences. Give the loss
      `ignore_index=-100`.
    - `batch_size`, `shuffle`, `seed`, `drop_last`, `prefetch`: as for `DataLoader`.

    If the model has an input `attention_mask` that the data lacks, the loader makes the mask: 1 for
    tokens of a row, 0 for padding. Iterating without a trainer adds a mask to rows with names. If
    the model has an input `position_ids` that the data lacks, the loader counts the tokens of each
    row from 0; tokens that an `attention_mask` of the data marks with 0 are not counted.
    `predict` returns the rows in their order; outputs of batches with shorter rows are filled up
    with zeros.

    DataError: rows are not numbers, or differ in more than the first axis; or labels are sequences
    of floats without weights of the same lengths. SettingError: a setting is impossible.

    >>> loader = Pad([[5, 6, 7], [8]], [1, 0], shuffle=False, pad_to_multiple_of=4)
    >>> x, y = next(iter(loader))
    >>> x.tolist(), y.tolist()
    ([[5, 6, 7, 0], [8, 0, 0, 0]], [1, 0])
    """

    _reads_share: ClassVar[bool] = True

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
        drop_last: bool = False,
        prefetch: int = 0,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int = 0,
        label_pad_token_id: int = -100,
    ) -> None:
        check_multiple(pad_to_multiple_of)
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_token_id = pad_token_id
        self.label_pad_token_id = label_pad_token_id
        self._inputs = _read_columns(X, "X")
        self._labels = {} if y is None else _read_columns(y, "y")
        self._weights = None
        if sample_weight is not None:
            self._weights = RaggedColumn.read("sample_weight", sample_weight)
        self._label_names = set(LABEL_KEYS)
        self._makes_mask = MASK not in self._inputs and UNNAMED not in self._inputs
        self._makes_positions = False
        columns = [*self._inputs.values(), *self._labels.values()]
        columns += [self._weights] if self._weights is not None else []
        rows = common_rows([(column.name, column.values) for column in columns], "loader's")
        self._lengths = self._find_lengths()
        self._inputs = self._with_lengths(self._inputs)
        self._labels = self._with_lengths(self._labels)
        if self._weights is not None:
            self._weights = self._weights.without_constant_lengths(self._lengths)
        self._check_labels()
        super().__init__(rows, batch_size, shuffle, seed, drop_last, prefetch)

    def fingerprint(self) -> dict[str, Any]:
        ends = []
        for column in (*self._inputs.values(), *self._labels.values()):
            ends += [(f"{column.name} in row {row}", column.values[row]) for row in (0, -1)]
        return fingerprint_of([("lengths", self._lengths), *ends])

    def bind(self, adapter: DataAdapter) -> Pad:
        loader = copy(self)
        names = [spec.name for spec in adapter.inputs]
        others = [name for name in names if name not in (MASK, POSITIONS)]
        if UNNAMED in self._inputs and len(names) > len(others) == 1:
            loader._inputs = {others[0]: self._inputs[UNNAMED]}
        loader._makes_mask = MASK in names and MASK not in self._inputs
        loader._makes_positions = POSITIONS in names and POSITIONS not in self._inputs
        loader._label_names = self._label_names | adapter.label_names
        loader._check_labels()
        return loader

    @check_arguments
    def split(self, fraction: float) -> tuple[Pad, Pad]:
        """Return two loaders, for training and for validation. The last rows are for validation.

        `fit(loader, validation_split=0.2)` does the same.

        - `fraction`: the fraction of the rows used for validation, above 0 and below 1.

        SettingError: training or validation would get no row.
        """
        train_rows = count_training_rows(self.rows, fraction)
        training = self._select(range(train_rows))
        validation = self._select(range(train_rows, self.rows))
        validation.shuffle = validation.drop_last = False
        return training, validation

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        for rows in self.batch_rows(epoch, skip, seed):
            # Each rank pads its rows to the length of the whole batch of all ranks.
            own = self._share.select_rows(rows)
            x: Any = self._padded(self._inputs, rows, own)
            if UNNAMED not in x:
                self._add_mask_and_positions(x, rows, own)
            y: Any = self._padded(self._labels, rows, own)
            elements = [x.get(UNNAMED, x), y.get(UNNAMED, y) if y else None]
            if self._weights is not None:
                elements.append(self._padded_column(self._weights, rows, own, 0))
            elif not y:
                elements.pop()
            yield tuple(elements)

    def _add_mask_and_positions(self, x: dict[str, Array], rows: Array, own: Array) -> None:
        """Add the inputs that the loader makes to the inputs `x` of the rows `own` of a batch."""
        places = np.arange(self._padded_length(self._lengths[rows]))
        mask = (places < self._lengths[own][:, None]).astype(np.int64)
        if self._makes_mask:
            x[MASK] = mask
        if self._makes_positions:
            given = x.get(MASK, mask)
            counted = (given if given.shape == mask.shape else mask) != 0
            x[POSITIONS] = np.where(counted, np.cumsum(counted, axis=1) - 1, 0)

    def _find_lengths(self) -> Array:
        """Return the length of each row, from the column that determines it."""
        columns = [c for name, c in self._inputs.items() if name not in (MASK, *LABEL_KEYS)]
        columns.sort(key=lambda column: column.name != TOKENS)
        self._main = next((c.name for c in columns if c.lengths is not None), None)
        for column in columns:
            if column.name == self._main and column.lengths is not None:
                return column.lengths
        raise DataError(
            f"{type(self).__name__} needs rows that are sequences, but no input has any. Use"
            " DataLoader."
        )

    def _check_labels(self) -> None:
        """Raise DataError for sequences of float labels, whose padding would look like labels."""
        weighted = self._weights is not None and self._weights.lengths is not None
        inside = [c for name, c in self._inputs.items() if name in self._label_names]
        for column in (*self._labels.values(), *inside):
            if is_float(column.dtype) and column.lengths is not None and not weighted:
                raise DataError(
                    f"{column.name or 'y'} has sequences of floats, whose padding would be trained"
                    " as labels. Pass sample_weight with one sequence of weights for each row. It"
                    " is padded with 0, so that the padding does not count."
                )

    def _with_lengths(self, columns: Mapping[str, RaggedColumn]) -> dict[str, RaggedColumn]:
        return {name: c.without_constant_lengths(self._lengths) for name, c in columns.items()}

    def _padded_length(self, lengths: Array) -> int:
        return padded_length(lengths, self.pad_to_multiple_of)

    def _padded(
        self, columns: Mapping[str, RaggedColumn], rows: Array, own: Array
    ) -> dict[str, Array]:
        padded = {}
        for name, column in columns.items():
            if columns is self._labels or name in self._label_names:
                fill = 0 if is_float(column.dtype) else self.label_pad_token_id
            else:
                fill = self.pad_token_id if column.name == self._main else 0
            padded[name] = self._padded_column(column, rows, own, fill)
        return padded

    def _padded_column(self, column: RaggedColumn, rows: Array, own: Array, fill: int) -> Array:
        length = None
        if column.lengths is not None:
            length = self._padded_length(column.lengths[rows])
        return column.padded(rows, own, length, fill)

    def _select(self, rows: Sequence[int]) -> Pad:
        """Return a loader of some of the rows, at the beginning of epoch 0."""
        index = np.array(rows)
        loader = copy(self)
        loader._inputs = {name: column.select(index) for name, column in self._inputs.items()}
        loader._labels = {name: column.select(index) for name, column in self._labels.items()}
        loader._weights = None if self._weights is None else self._weights.select(index)
        loader._lengths = self._lengths[index]
        loader._reset(len(index))
        return loader


class Bucket(Pad):
    """Rows of different lengths in padded batches of similar lengths, which need less padding.

    In training, the rows are shuffled and divided into pools. The rows of a pool are sorted by
    length and divided into batches. The batches come in a random order, with a shorter batch last.
    Every row comes once per epoch, and the order depends on `(seed, epoch)` only. Validation,
    evaluation and prediction keep the order of the rows, and pad as `Pad` does.

    - `pool`: the number of batches in a pool. More batches need less padding, and mix rows less.
    - The other arguments are the same as for `Pad`, without `shuffle`.

    >>> rows = [[1] * length for length in (9, 2, 9, 2, 9, 2)]
    >>> loader = Bucket(rows, batch_size=3)
    >>> sorted(x.shape for (x,) in loader)
    [(3, 2), (3, 9)]
    """

    @check_arguments
    def __init__(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        pool: int = 50,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 0,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int = 0,
        label_pad_token_id: int = -100,
    ) -> None:
        if pool < 1:
            raise SettingError(f"Bucket needs pool >= 1, got {pool}.")
        self.pool = pool
        super().__init__(
            X,
            y,
            sample_weight,
            batch_size=batch_size,
            seed=seed,
            drop_last=drop_last,
            prefetch=prefetch,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=pad_token_id,
            label_pad_token_id=label_pad_token_id,
        )

    def batch_rows(self, epoch: int, skip: int, seed: int | None) -> Iterator[Array]:
        if seed is None:
            return super().batch_rows(epoch, skip, seed)
        return bucketed_rows(
            self._lengths, self.batch_size, len(self), self.pool, seed, epoch, skip
        )


def bucketed_rows(
    lengths: Array, size: int, steps: int, pool: int, seed: int, epoch: int, skip: int
) -> Iterator[Array]:
    """Return the row numbers of each batch of an epoch, in batches of similar lengths.

    The first `skip` batches are left out. `Bucket` describes the other arguments.

    - `lengths`: the length of each row.
    - `size`: rows of a batch.
    - `steps`: batches in an epoch.
    """
    order = permutation(seed, epoch, len(lengths))[: steps * size]
    pools = [order[i : i + size * pool] for i in range(0, len(order), size * pool)]
    sorted_rows = np.concatenate([rows[np.argsort(lengths[rows], kind="stable")] for rows in pools])
    full = len(order) // size
    numbers = [*permutation(seed, epoch, full, 1).tolist(), *range(full, steps)]
    return (sorted_rows[number * size : (number + 1) * size] for number in numbers[skip:])


def _read_columns(data: Any, name: str) -> dict[str, RaggedColumn]:
    """Return the columns of data by name; rows without names form one column called `UNNAMED`."""
    if isinstance(data, Mapping):
        return {str(key): RaggedColumn.read(str(key), values) for key, values in data.items()}
    if length_of(data) is None:
        raise DataError(
            f"{name} must be a list of rows or a dict of lists, got {type(data).__name__}."
        )
    rows = list(data)
    if not (rows and isinstance(rows[0], Mapping)):
        return {UNNAMED: RaggedColumn.read(UNNAMED, rows)}
    keys = list(rows[0])
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or set(row) != set(keys):
            given = ", ".join(map(repr, row)) if isinstance(row, Mapping) else type(row).__name__
            raise DataError(
                f"Row {number} has {given}, but row 0 has {', '.join(map(repr, keys))}. All rows"
                " must have the same names."
            )
    return {str(key): RaggedColumn.read(str(key), [row[key] for row in rows]) for key in keys}
