"""Token ids of documents in batches, packed into rows of equal length or padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, ClassVar

import numpy as np

from onnxfit.checks import check_arguments, shortened
from onnxfit.data.adapter import DataAdapter
from onnxfit.data.batch import Array
from onnxfit.data.convert import is_float
from onnxfit.data.corpus import IGNORED, MAX_ID, Columns, read_corpus
from onnxfit.data.fingerprint import fingerprint_of
from onnxfit.data.loader import Loader
from onnxfit.data.memory import count_training_rows
from onnxfit.data.padding import (
    MASK,
    POSITIONS,
    TOKENS,
    bucketed_rows,
    check_multiple,
    padded_length,
)
from onnxfit.data.source import Splittable
from onnxfit.errors import DataError, SettingError, warn_user
from onnxfit.graph.spec import TensorSpec

__all__ = ["TextLoader"]

LABELS = "labels"
INPUTS = (TOKENS, MASK, POSITIONS)
MAX_LENGTH = 2**24  # longer rows would not fit into memory


class TextLoader(Loader, Splittable):
    """Token ids of documents in batches for a causal language model.

    Padding gives each document its own row, in batches of similar lengths. Packing concatenates the
    documents and cuts them into rows of `length` tokens; only the last row is padded. Every token
    comes once per epoch.

    - `data`: the ids of all documents in one array (an `np.memmap`, or the path of a .npy file,
      which is mapped and never kept in memory); the path of a Parquet or Arrow file, of a folder of
      such files, or a list of paths, with a list of ids in each row; an iterable of sequences, or
      of dicts with a `column` of ids; or a dict of such columns. All data except mapped arrays is
      kept in memory, with 4 bytes per token.
    - `length`: tokens of a row. Longer documents are cut into pieces, and None cuts no document.
      Packing needs a length.
    - `pack`: pack the documents into rows; False pads them. Pack for a model whose attention mask
      has 3 or 4 axes, which keeps the documents of a row apart, or for a single long document. In
      any other model, packed documents see each other, and a warning says so.
    - `eos_token_id`: the id that ends each document of an array; without it, the array is one
      document. If documents come one by one, it is appended to each document that lacks it.
    - `column`: the name of the column of ids in files, or the key of the ids in dicts.
    - `label_column`: the name of the column of labels, one for each token, if the data has this
      column: the id that the model shall learn, or -100 for no loss. Give the tokens of a prompt
      -100 to train on the answer only. Without the column, or with None, the ids are the labels.
    - `pad_token_id`: the id used for padding.
    - `pad_to_multiple_of`: make the length of padded rows a multiple of this number.
    - `pool`: number of batches whose padded rows are sorted by length together, as in `Bucket`.
    - `input_names`: the names of the model's inputs, if they are not `input_ids`,
      `attention_mask` and `position_ids`, such as `{"input_ids": "tokens"}`.
    - `batch_size`, `shuffle`, `seed`, `drop_last`, `prefetch`: as for `DataLoader`. The order
      depends on `(seed, epoch)` only.

    A batch is `(inputs, labels)`. Of these inputs it has the ones that the model takes:

    - `input_ids`, shape `(batch, tokens)`. If the model has only one other input, its name does not
      matter.
    - `attention_mask`: of shape `(batch, tokens)`, 1 for tokens and 0 for padding. A model whose
      mask has 3 or 4 axes gets a mask for each pair of tokens, shape `(batch, 1, tokens, tokens)`:
      a token attends to itself and to the earlier tokens of its document. In a mask of floats, 0
      allows attention, and the smallest number of the type forbids it.
    - `position_ids`: positions, which begin at 0 with each row. If the mask keeps packed documents
      apart, they also begin at 0 with each document.

    The labels are those of the data, or the ids at the same positions, for the loss `CausalLM`.
    They are -100 for padding and for a document's first token, so that no loss crosses the end of a
    document. The label of an appended `eos_token_id` is this id, or -100 if the label before is
    -100. If the model has an input `labels`, the labels are passed to this input. `predict` ignores
    them. Rows that have an `attention_mask` lose the tokens that it marks with 0, as padding.

    DataError: there are no ids, ids are not integers from 0 to 2**31 - 1, a document has no tokens,
    or the labels do not match the ids. SettingError: a setting is impossible.

    >>> loader = TextLoader([[1, 2, 3], [4, 5]], 4, eos_token_id=0, shuffle=False)
    >>> x, labels = next(iter(loader))
    >>> x["input_ids"].tolist()
    [[1, 2, 3, 0], [4, 5, 0, 0]]
    >>> labels.tolist()
    [[-100, 2, 3, 0], [-100, 5, 0, -100]]
    """

    _reads_share: ClassVar[bool] = True

    @check_arguments
    def __init__(
        self,
        data: Any,
        length: int | None = None,
        *,
        pack: bool = False,
        eos_token_id: int | None = None,
        column: str = TOKENS,
        label_column: str | None = LABELS,
        pad_token_id: int = 0,
        pad_to_multiple_of: int | None = None,
        pool: int = 50,
        input_names: Mapping[str, str] | None = None,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 0,
    ) -> None:
        if length is None and pack:
            raise SettingError(
                "TextLoader needs length, the number of tokens in each packed row, such as"
                " TextLoader(data, 1024, pack=True). To pad the documents instead of packing them,"
                " pass pack=False."
            )
        if length is not None and not 2 <= length <= MAX_LENGTH:
            raise SettingError(
                f"TextLoader needs length from 2 to {MAX_LENGTH}, got {shortened(length)}."
            )
        for name, token in (("pad_token_id", pad_token_id), ("eos_token_id", eos_token_id)):
            if token is not None and not 0 <= token <= MAX_ID:
                raise SettingError(f"{name} must be from 0 to {MAX_ID}, got {shortened(token)}.")
        check_multiple(pad_to_multiple_of)
        if pool < 1:
            raise SettingError(f"TextLoader needs pool >= 1, got {pool}.")
        self.length = length
        self.pack = pack
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pool = pool
        self._names = {**dict.fromkeys(INPUTS, ""), **_checked_names(input_names)}
        self._names = {name: own or name for name, own in self._names.items()}
        self._specs: dict[str, TensorSpec] | None = None  # specs of the inputs that the model takes
        self._labels_inside = False
        self._corpus = read_corpus(data, Columns(column, label_column), eos_token_id)
        size = len(self._corpus.tokens)
        if pack:
            assert length is not None
            self._bounds: Array | None = None  # row i begins at token i * length
            rows = -(-size // length)
        else:
            self._bounds = _cut(self._corpus.document_starts(), size, length)
            rows = len(self._bounds) - 1
        self._first = 0  # number of the first row of this loader
        super().__init__(rows, batch_size, shuffle, seed, drop_last, prefetch)

    def fingerprint(self) -> dict[str, Any]:
        columns = [("tokens", self._corpus.tokens)]
        if self._corpus.labels is not None:
            columns.append(("labels", self._corpus.labels))
        if self._bounds is not None:
            columns.append(("rows", self._bounds))
        return fingerprint_of(columns) | {"length": self.length, "first": self._first}

    def bind(self, adapter: DataAdapter) -> TextLoader:
        loader = copy(self)
        specs = {spec.name: spec for spec in adapter.inputs}
        names = dict(self._names)
        others = [n for n in specs if n not in (names[MASK], names[POSITIONS], LABELS)]
        if names[TOKENS] not in specs and len(others) == 1:
            names[TOKENS] = others[0]
        loader._names = names
        loader._specs = {name: specs[own] for name, own in names.items() if own in specs}
        loader._labels_inside = LABELS in specs and not adapter.targets
        if self.pack and self._corpus.has_several_documents and not loader._keeps_documents_apart():
            warn_user(
                "The model has no attention mask of 3 or 4 axes, which keeps packed documents"
                " apart: a token sees the documents before its own in the row, and positions run on"
                " from one to the next. To give each document its own row, pass TextLoader(...,"
                " pack=False), or export the model with a mask (batch, 1, tokens, tokens)."
            )
        return loader

    @check_arguments
    def split(self, fraction: float) -> tuple[TextLoader, TextLoader]:
        """Return two loaders, for training and for validation. The last rows are for validation.

        `fit(loader, validation_split=0.1)` does the same.

        - `fraction`: the fraction of the rows used for validation, above 0 and below 1.

        SettingError: training or validation would get no row.
        """
        train_rows = count_training_rows(self.rows, fraction)
        training, validation = copy(self), copy(self)
        training._reset(train_rows)
        validation._first += train_rows
        validation.shuffle = validation.drop_last = False
        validation._reset(self.rows - train_rows)
        return training, validation

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        for rows in self.batch_rows(epoch, skip, seed):
            starts, stops = self._spans(rows)
            own_starts, own_stops = self._spans(self._share.select_rows(rows))
            yield self._make_batch(own_starts, own_stops, self._width(stops - starts))

    def batch_rows(self, epoch: int, skip: int, seed: int | None) -> Iterator[Array]:
        if seed is None or self._bounds is None:
            return super().batch_rows(epoch, skip, seed)
        starts, stops = self._spans(np.arange(self.rows))
        return bucketed_rows(
            stops - starts, self.batch_size, len(self), self.pool, seed, epoch, skip
        )

    def _spans(self, rows: Array) -> tuple[Array, Array]:
        """Return the position of each row's first token, and the position after its last token."""
        rows = rows + self._first
        if self._bounds is not None:
            return self._bounds[rows], self._bounds[rows + 1]
        assert self.length is not None
        starts = rows * self.length
        return starts, np.minimum(starts + self.length, len(self._corpus.tokens))

    def _width(self, lengths: Array) -> int:
        if self.pack:
            assert self.length is not None
            return self.length
        return padded_length(lengths, self.pad_to_multiple_of)

    def _make_batch(self, starts: Array, stops: Array, width: int) -> tuple[Any, ...]:
        ids = np.full((len(starts), width), self.pad_token_id, np.int64)
        targets = np.full_like(ids, IGNORED)
        begins = np.zeros(ids.shape, bool)
        for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist())):
            ids[row, : stop - start] = self._corpus.read(start, stop)
            targets[row, : stop - start] = self._corpus.read_labels(start, stop)
            begins[row, : stop - start] = self._corpus.begins(start, stop)
        is_token = np.arange(width) < (stops - starts)[:, None]
        labels = np.where(is_token & ~begins, targets, IGNORED)
        arrays = {TOKENS: ids}
        if self._takes(MASK):
            arrays[MASK] = self._mask(begins, is_token)
        if self._takes(POSITIONS):
            restarts = begins if self._keeps_documents_apart() else np.zeros_like(begins)
            arrays[POSITIONS] = np.where(is_token, _positions(restarts), 0)
        x = {self._names[name]: self._typed(name, array) for name, array in arrays.items()}
        if self._labels_inside:
            return ({**x, LABELS: labels},)
        return x, labels

    def _takes(self, name: str) -> bool:
        return self._specs is None or name in self._specs

    def _typed(self, name: str, array: Array) -> Array:
        """Return an array of ids in the type of the model's input."""
        if self._specs is None or name not in self._specs or array.dtype.kind == "f":
            return array
        return array.astype(self._specs[name].dtype, copy=False)

    def _mask_axes(self) -> int:
        """Return the number of axes of the model's mask, 2 by default and 0 for no mask."""
        if self._specs is None:
            return 2
        if MASK not in self._specs:
            return 0
        shape = self._specs[MASK].shape
        return 2 if shape is None else len(shape)

    def _keeps_documents_apart(self) -> bool:
        """Return whether a token of a packed row sees its own document only."""
        return self._mask_axes() in (3, 4)

    def _mask(self, begins: Array, is_token: Array) -> Array:
        spec = None if self._specs is None else self._specs[MASK]
        axes = self._mask_axes()
        if axes == 2:
            return is_token.astype(np.int64)
        if axes not in (3, 4):
            raise DataError(
                "TextLoader makes attention masks with 2, 3 or 4 axes, but the model has the input"
                f" {spec}. Pass batches that you make yourself."
            )
        document = begins.cumsum(axis=1)
        sees = np.tril(document[:, :, None] == document[:, None, :])
        sees &= is_token[:, None, :] & is_token[:, :, None]
        # Padding attends to itself, because a softmax over no token would be NaN.
        sees |= np.eye(is_token.shape[1], dtype=bool)
        mask: Array = sees if axes == 3 else sees[:, None]
        if spec is not None and is_float(spec.dtype):
            return np.where(mask, 0, np.finfo(spec.dtype).min).astype(spec.dtype)
        return mask


def _positions(begins: Array) -> Array:
    """Return the position of each token, counted from the last begin in the row, or its start."""
    places = np.arange(begins.shape[1])
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def _cut(starts: Array, size: int, length: int | None) -> Array:
    """Return the start of each row, and the end of the last row.

    Each document is one row, or several rows of at most `length` tokens.
    """
    bounds = np.append(starts, size)
    if length is None:
        return bounds
    pieces = -(-np.diff(bounds) // length)
    first = np.repeat(starts, pieces)
    number = np.arange(len(first)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(first + number * length, size)


def _checked_names(names: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(names or {})
    unknown = [name for name in given if name not in INPUTS]
    if unknown or not all(isinstance(own, str) and own for own in given.values()):
        raise SettingError(
            f"input_names must map {', '.join(map(repr, INPUTS))} to names of inputs, got"
            f" {shortened(given)}."
        )
    return given
