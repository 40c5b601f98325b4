"""Token ids of documents: one flat array in memory or in a file, and the starts of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxfit.data.arrow import FORMATS, column_files, lists
from onnxfit.data.batch import Array
from onnxfit.data.mapped import is_path, open_paths
from onnxfit.errors import DataError, listed_names
from onnxfit.registry import shortened

MAX_ID = 2**31 - 1  # ids are int32 or int64 in models
CHUNK = 1 << 22  # number of tokens searched for ends of documents at a time
ROWS = 1 << 12  # number of rows of a column read at a time


@dataclass(frozen=True)
class Corpus:
    """Documents, one after the other.

    - `tokens`: the ids of all documents, shape `(tokens,)`; a file is mapped, not read.
    - `starts`: the position of the first token of each document, if known.
    - `end`: if `starts` is unknown, the id that ends each document, or None for a single document.
    """

    tokens: Array
    starts: Array | None = None
    end: int | None = None

    def read(self, start: int, stop: int) -> Array:
        """Return the ids from `start` up to `stop`. DataError: an id is impossible."""
        ids = np.asarray(self.tokens[start:stop])
        if ids.size and (ids.min() < 0 or ids.max() > MAX_ID):
            place = start + int(((ids < 0) | (ids > MAX_ID)).argmax())
            raise DataError(
                f"Token ids must be from 0 to {MAX_ID}, got {self.tokens[place]} at position"
                f" {place}."
            )
        return ids

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


def read_corpus(data: Any, column: str, end: int | None) -> Corpus:
    """Return the documents of a file, an array, or an iterable.

    - `column`: the name of the column in files, or the key in rows that are dicts.
    - `end`: the id that ends each document. If documents come one by one, it is appended to every
      document that lacks it.

    DataError: the data is of another kind, a document has no tokens, or ids are not integers.
    """
    if isinstance(data, Mapping) and column in data:
        data = data[column]
    if is_path(data) and Path(data).suffix == ".npy":
        data = open_paths(data)
    if is_path(data):
        return _joined(_documents_of_files([data], column), end)
    if isinstance(data, np.ndarray) and data.ndim == 1 and data.dtype != object:
        return Corpus(_checked_type(data, "the array"), None, end)
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise DataError(
            "TextLoader needs token ids: a .npy or Parquet file, an array, or an iterable of"
            f" sequences, got {shortened(data)}. Apply your tokenizer to texts first."
        )
    if isinstance(data, (list, tuple)) and data:
        if is_path(data[0]) and Path(data[0]).suffix in FORMATS:
            return _joined(_documents_of_files(data, column), end)
        if all(isinstance(item, (int, np.integer)) for item in data):
            return Corpus(_checked_type(np.asarray(data), "the list"), None, end)
    return _joined(_documents(data, column), end)


def _documents(data: Iterable[Any], column: str) -> Iterator[Array]:
    for number, item in enumerate(data):
        if isinstance(item, Mapping):
            if column not in item:
                raise DataError(
                    f"Document {number} has no column {column!r}. Its columns are"
                    f" {listed_names(map(repr, item), column)}. Pass the name of the column with"
                    " the token ids: TextLoader(..., column=...)."
                )
            item = item[column]
        if isinstance(item, (str, bytes)):
            raise DataError(
                f"Document {number} is text, {shortened(item)}, but expected token ids. Apply your"
                " tokenizer first."
            )
        yield _as_ids(item, number)


def _as_ids(item: Any, number: int) -> Array:
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError) as error:
        raise DataError(f"Document {number} is not a sequence of token ids: {error}") from None
    if ids.ndim != 1:
        raise DataError(
            f"Document {number} has shape {ids.shape}. Expected a single axis of token ids."
        )
    if not ids.size:
        raise DataError(f"Document {number} has no tokens. Remove it from the data.")
    return _checked_type(ids, f"document {number}")


def _documents_of_files(paths: Any, column: str) -> Iterator[Array]:
    number = 0
    for file in column_files(paths, [column]):
        for group in range(file.groups):
            for values, lengths in lists(file, group, ROWS):
                for ids in np.split(values, np.cumsum(lengths)[:-1]):
                    yield _as_ids(ids, number)
                    number += 1


def _checked_type(ids: Array, name: str) -> Array:
    if ids.dtype.kind not in "iu":
        raise DataError(f"Token ids must be integers, but {name} has type {ids.dtype}.")
    if not ids.size:
        raise DataError(f"The data has no tokens: {name} is empty.")
    return ids


def _joined(documents: Iterator[Array], end: int | None) -> Corpus:
    """Return documents as one array in memory, with 4 bytes per token."""
    parts: list[Array] = []
    lengths = []
    for number, ids in enumerate(documents):
        if ids.min() < 0 or ids.max() > MAX_ID:
            wrong = ids[(ids < 0) | (ids > MAX_ID)][0]
            raise DataError(
                f"Token ids must be from 0 to {MAX_ID}, got {wrong} in document {number}."
            )
        length = len(ids)
        parts.append(ids.astype(np.int32))
        if end is not None and ids[-1] != end:
            parts.append(np.array([end], np.int32))
            length += 1
        lengths.append(length)
    if not parts:
        raise DataError("The data has no documents.")
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return Corpus(np.concatenate(parts), starts)
