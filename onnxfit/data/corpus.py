"""Token ids and labels of documents: flat arrays in memory or in a file, and documents' starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxfit.checks import shortened
from onnxfit.data.arrow import FORMATS, column_files, lists
from onnxfit.data.batch import Array
from onnxfit.data.mapped import is_path, open_paths
from onnxfit.data.padding import MASK
from onnxfit.data.structure import common_rows
from onnxfit.errors import DataError, listed_names

MAX_ID = 2**31 - 1  # ids are int32 or int64 in models
IGNORED = -100  # the label that CausalLM ignores
CHUNK = 1 << 22  # number of tokens searched for ends of documents at a time
ROWS = 1 << 12  # number of rows of a column read at a time


@dataclass(frozen=True)
class Corpus:
    """Documents, one after the other.

    - `tokens`: the ids of all documents, shape `(tokens,)`; a file is mapped, not read.
    - `starts`: the position of the first token of each document, if known.
    - `end`: if `starts` is unknown, the id that ends each document, or None for a single document.
    - `labels`: the label of each token, -100 for no loss, in the shape of `tokens`. None uses the
      tokens as labels.
    """

    tokens: Array
    starts: Array | None = None
    end: int | None = None
    labels: Array | None = None

    @property
    def has_several_documents(self) -> bool:
        """Whether a token may belong to another document than the token before."""
        return self.end is not None if self.starts is None else len(self.starts) > 1

    def read(self, start: int, stop: int) -> Array:
        """Return the ids from `start` up to `stop`. DataError: an id is impossible."""
        return _checked_ids(np.asarray(self.tokens[start:stop]), start)

    def read_labels(self, start: int, stop: int) -> Array:
        """Return the labels from `start` up to `stop`. DataError: a label is impossible."""
        if self.labels is None:
            return self.read(start, stop)
        return _checked_labels(np.asarray(self.labels[start:stop]), start)

    def begins(self, start: int, stop: int) -> Array:
        """Return, for each token in a range, whether a document begins with this token."""
        if self.starts is not None:
            first, last = np.searchsorted(self.starts, (start, stop))
            begins = np.zeros(stop - start, bool)
            begins[self.starts[first:last] - start] = True
            return begins
        if self.end is None:
            begins = np.zeros(stop - start, bool)
        else:
            before = np.asarray(self.tokens[max(start - 1, 0) : stop - 1]) == self.end
            begins = before if start else np.concatenate([[False], before])
        if not start:
            begins[:1] = True
        return begins

    def document_starts(self) -> Array:
        """Return the position of each document's first token. A file is read once to find them."""
        if self.starts is not None:
            return self.starts
        size = len(self.tokens)
        found = [
            np.flatnonzero(self.begins(start, min(start + CHUNK, size))) + start
            for start in range(0, size, CHUNK)
        ]
        return np.concatenate(found)


@dataclass(frozen=True)
class Columns:
    """The names of the columns in files, or of the keys in rows that are dicts.

    - `tokens`: the token ids.
    - `labels`: the labels, in data that has them; None ignores labels.
    """

    tokens: str
    labels: str | None

    def optional(self) -> list[str]:
        """Return the names of the columns that data may lack."""
        return [MASK] if self.labels is None else [MASK, self.labels]

    def document(self, row: Mapping[str, Any], number: int) -> Document:
        """Return the document of a row. DataError: its columns do not match."""
        if self.tokens not in row:
            raise DataError(
                f"Document {number} has no column {self.tokens!r}. Its columns are"
                f" {listed_names(map(repr, row), self.tokens)}. Pass the name of the column with"
                " the token ids: TextLoader(..., column=...)."
            )
        ids = _one_axis(row[self.tokens], number, "token ids")
        labels = mask = None
        if self.labels is not None and row.get(self.labels) is not None:
            labels = self._beside(ids, row[self.labels], number, self.labels)
        if row.get(MASK) is not None:
            mask = self._beside(ids, row[MASK], number, MASK) != 0
            ids = ids[mask]
            labels = None if labels is None else labels[mask]
        return Document.checked(ids, labels, number)

    def _beside(self, ids: Array, values: Any, number: int, name: str) -> Array:
        array = _one_axis(values, number, name)
        if len(array) != len(ids):
            advice = " or pass label_column=None to ignore them" if name == self.labels else ""
            raise DataError(
                f"Document {number} has {len(ids)} token ids, but {len(array)} values in {name!r}."
                f" Give each token one value{advice}."
            )
        return array


@dataclass(frozen=True)
class Document:
    """The token ids of a document, and the label of each token, if the data has labels."""

    ids: Array
    labels: Array | None

    @classmethod
    def checked(cls, ids: Array, labels: Array | None, number: int) -> Document:
        """Return document `number` in 4 bytes per value. DataError: a value is impossible."""
        if not ids.size:
            raise DataError(f"Document {number} has no tokens. Remove it from the data.")
        place = f"document {number}"
        ids = _checked_ids(_checked_type(ids, place), place).astype(np.int32)
        if labels is not None:
            _checked_type(labels, f"the column of labels in {place}", "Labels")
            labels = _checked_labels(labels, place).astype(np.int32)
        return cls(ids, labels)

    def ended(self, end: int | None) -> Document:
        """Return the document with `end` as its last token.

        The added token is a label, unless the last token of the document has none.
        """
        if end is None or self.ids[-1] == end:
            return self
        labels = self.labels
        if labels is not None:
            label = IGNORED if labels[-1] == IGNORED else end
            labels = np.append(labels, np.int32(label))
        return Document(np.append(self.ids, np.int32(end)), labels)


def read_corpus(data: Any, columns: Columns, end: int | None) -> Corpus:
    """Return the documents of a file, an array, or an iterable.

    - `columns`: the names of the columns in files, or the keys in rows that are dicts.
    - `end`: the id that ends each document. If documents come one by one, it is appended to every
      document that lacks it.

    DataError: the data is of another kind, a document has no tokens, ids are not integers, or
    labels do not match the ids.
    """
    if isinstance(data, Mapping) and columns.tokens in data:
        given = {name: data[name] for name in columns.optional() if data.get(name) is not None}
        flat = _flat(data[columns.tokens], "the array")
        if flat is not None:
            return _flat_corpus(flat, given, columns, end)
        if given:
            data = _rows_of_columns({columns.tokens: data[columns.tokens], **given})
        else:
            data = data[columns.tokens]
    flat = _flat(data, "the list" if isinstance(data, (list, tuple)) else "the array")
    if flat is not None:
        return Corpus(flat, None, end)
    if is_path(data):
        return _join_documents(_documents_of_files([data], columns), end)
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise DataError(
            "TextLoader needs token ids: a .npy or Parquet file, an array, or an iterable of"
            f" sequences, got {shortened(data)}. Apply your tokenizer to texts first."
        )
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    if is_path(first) and Path(first).suffix in FORMATS:
        return _join_documents(_documents_of_files(data, columns), end)
    return _join_documents(_documents(data, columns), end)


def _flat(data: Any, name: str, values: str = "Token ids") -> Array | None:
    """Return the values of an array of one axis, of its file, or of a list; None: other data."""
    if is_path(data) and Path(data).suffix == ".npy":
        data = open_paths(data)
    is_list = isinstance(data, (list, tuple)) and len(data) > 0
    if is_list and all(isinstance(item, (int, np.integer)) for item in data):
        data = np.asarray(data)
    if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype != object:
        return _checked_type(data, name, values)
    return None


def _flat_corpus(
    tokens: Array, given: Mapping[str, Any], columns: Columns, end: int | None
) -> Corpus:
    """Return the corpus of one array of ids and one array of labels, neither of which is read."""
    if MASK in given:
        raise DataError(
            f"The ids are one array without padding, but there is {MASK!r}, which marks padding."
            f" Remove {MASK!r}, or pass a list of documents."
        )
    labels = None
    if columns.labels is not None and columns.labels in given:
        labels = _flat(given[columns.labels], "the array of labels", "Labels")
        if labels is None or len(labels) != len(tokens):
            size = "another form" if labels is None else f"{len(labels)} values"
            raise DataError(
                f"There are {len(tokens)} token ids in one array, but {columns.labels!r} has"
                f" {size}. Give each token one label, or pass label_column=None to ignore them."
            )
    return Corpus(tokens, None, end, labels)


def _rows_of_columns(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of columns. DataError: their sizes differ."""
    common_rows([(name, values) for name, values in columns.items()], "loader's")
    for values in zip(*columns.values()):
        yield dict(zip(columns, values))


def _documents(data: Iterable[Any], columns: Columns) -> Iterator[Document]:
    for number, item in enumerate(data):
        row = item if isinstance(item, Mapping) else {columns.tokens: item}
        yield columns.document(row, number)


def _one_axis(values: Any, number: int, kind: str) -> Array:
    if isinstance(values, (str, bytes)):
        raise DataError(
            f"Document {number} is text, {shortened(values)}, but expected token ids. Apply your"
            " tokenizer first."
        )
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"Document {number} is not a sequence of {kind}: {error}") from None
    if array.ndim != 1:
        raise DataError(
            f"Document {number} has shape {array.shape}. Expected a single axis of {kind}."
        )
    return array


def _documents_of_files(paths: Any, columns: Columns) -> Iterator[Document]:
    number = 0
    for file in column_files(paths, [columns.tokens], columns.optional()):
        for group in range(file.groups):
            for lists_of in lists(file, group, ROWS):
                split = {
                    name: np.split(values, np.cumsum(lengths)[:-1])
                    for name, (values, lengths) in lists_of.items()
                }
                for row in _rows_of_columns(split):
                    yield columns.document(row, number)
                    number += 1


def _checked_ids(ids: Array, place: int | str) -> Array:
    """Return `ids` if all are possible.

    - `place`: the position of the first id, or the name of the document.

    DataError: an id is impossible.
    """
    if ids.size and (ids.min() < 0 or ids.max() > MAX_ID):
        first = int(((ids < 0) | (ids > MAX_ID)).argmax())
        where = f"at position {place + first}" if isinstance(place, int) else f"in {place}"
        raise DataError(f"Token ids must be from 0 to {MAX_ID}, got {ids[first]} {where}.")
    return ids


def _checked_labels(labels: Array, place: int | str) -> Array:
    """Return `labels` if all are possible; `place` is the same as for `_checked_ids`."""
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels > MAX_ID)
    if wrong.any():
        first = int(wrong.argmax())
        where = f"at position {place + first}" if isinstance(place, int) else f"in {place}"
        raise DataError(
            f"Labels must be from 0 to {MAX_ID}, or {IGNORED} for no loss, got"
            f" {labels[first]} {where}."
        )
    return labels


def _checked_type(array: Array, name: str, values: str = "Token ids") -> Array:
    if not array.size:
        raise DataError(f"The data has no tokens: {name} is empty.")
    if array.dtype.kind not in "iu":
        raise DataError(f"{values} must be integers, but {name} has type {array.dtype}.")
    return array


def _join_documents(documents: Iterator[Document], end: int | None) -> Corpus:
    """Return documents as one array in memory, with 4 bytes per token, and the same for labels."""
    parts: list[Document] = []
    for number, document in enumerate(documents):
        parts.append(document.ended(end))
        if (document.labels is None) != (parts[0].labels is None):
            first, this = ("no ", "") if parts[0].labels is None else ("", "no ")
            raise DataError(
                f"Document {number} has {this}labels, but document 0 has {first}labels. Give all"
                f" documents labels; a label of {IGNORED} has no loss."
            )
    if not parts:
        raise DataError("The data has no documents.")
    starts = np.cumsum([0, *(len(part.ids) for part in parts[:-1])], dtype=np.int64)
    labels = [part.labels for part in parts if part.labels is not None]
    return Corpus(
        np.concatenate([part.ids for part in parts]),
        starts,
        labels=np.concatenate(labels) if labels else None,
    )
