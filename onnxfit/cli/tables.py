"""The columns of a .csv, or of a .jsonl with an object on each line."""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from onnxfit.cli.data_file import DataFile
from onnxfit.errors import DataError, warn_user

Array = npt.NDArray[Any]


def read_columns(file: DataFile) -> dict[str, Array]:
    """Return a dict name -> column: float64, or text (dtype `str`) if every row has text.

    DataError: there are no rows, or a column has both numbers and text.
    """
    return _csv_columns(file) if file.suffix == ".csv" else _jsonl_columns(file)


@contextmanager
def _text_of(file: DataFile) -> Iterator[TextIO]:
    with file.open() as binary:
        yield io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")


# ---------------------------------------------------------------------- CSV


def _csv_columns(file: DataFile) -> dict[str, Array]:
    with _text_of(file) as text:
        header = _header_of(file, text)
        with warnings.catch_warnings():
            # numpy warns about a file without rows, but an error below reports it
            warnings.simplefilter("ignore")
            try:
                table = np.loadtxt(
                    text, delimiter=",", ndmin=2, comments=None, dtype=np.float64, quotechar='"'
                )
            except UnicodeError:
                raise
            except ValueError as error:
                table = None
                problem = error
    if table is None:
        return _text_columns(file, problem)
    if not len(table):
        raise DataError(f"{file.name} has no rows.")
    _check_count(file, header, table.shape[1])
    return dict(zip(header, table.T))


def _header_of(file: DataFile, text: TextIO) -> list[str]:
    """Return the names of the columns in the first line."""
    header = [name.strip() for name in next(csv.reader(text), [])]
    _refuse_numbers(file, header)
    if not header or len(set(header)) < len(header) or "" in header:
        raise DataError(
            f"{file.name} needs a first line with a unique name for each column, got"
            f" {', '.join(header) or 'nothing'}."
        )
    return header


def _text_columns(file: DataFile, problem: ValueError) -> dict[str, Array]:
    """Return the columns of a table that is not made of numbers only.

    - `problem`: NumPy's reason. It is raised if the lines have different numbers of cells.
    """
    with _text_of(file) as text:
        header = _header_of(file, text)
        rows = [row for row in csv.reader(text) if row]
    widths = {len(row) for row in rows}
    if len(widths) != 1:
        raise problem
    _check_count(file, header, *widths)
    cells = ([cell.strip() for cell in column] for column in zip(*rows))
    return {name: _column_of_cells(file, name, column) for name, column in zip(header, cells)}


def _column_of_cells(file: DataFile, name: str, cells: list[str]) -> Array:
    numbers = list(map(_is_number, cells))
    if all(numbers):
        return np.array(cells, np.float64)
    return _text_column(file, name, cells, [not n and c != "" for n, c in zip(numbers, cells)])


def _text_column(file: DataFile, name: str, values: Sequence[Any], is_text: list[bool]) -> Array:
    """Return a column of text. DataError: `is_text` is false for a row, or the row is empty."""
    if not all(is_text):
        row, other = is_text.index(False), is_text.index(True) if any(is_text) else None
        text = "" if other is None else f", but {values[other]!r} in row {other}"
        raise DataError(
            f"{file.name} has {values[row]!r} in row {row} of the column {name!r}{text}. A column"
            " needs a number in each row, or text in each row."
        )
    return np.array(values, np.str_)


def _check_count(file: DataFile, header: Sequence[str], columns: int) -> None:
    if columns != len(header):
        raise DataError(
            f"{file.name} has {len(header)} names in its first line, but {columns} columns."
        )


def _refuse_numbers(file: DataFile, header: Sequence[str]) -> None:
    """Raise DataError if a first line is a row of data, which would be lost.

    pandas writes 0, 1, 2, ... as the names of columns without names. They are names, with a
    warning, because they could also be a row.
    """
    if not header or not all(map(_is_number, header)):
        return
    shown = ", ".join(header[:5]) + (", ..." if len(header) > 5 else "")
    if header == [str(number) for number in range(len(header))]:
        warn_user(
            f"The first line of {file.name}, {shown}, was read as the names of the columns. If it"
            " is a row of data, put a line of names above it."
        )
        return
    raise DataError(
        f"{file.name} has no line of names: its first line consists of numbers ({shown}). Put a"
        " line above it that names each column, such as a,b,c,label."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------- JSON lines


def _jsonl_columns(file: DataFile) -> dict[str, Array]:
    """Return the columns of objects. A list of numbers in each row makes a column of rank 2."""
    values: dict[str, list[Any]] = {}
    rows = 0
    with _text_of(file) as text:
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            row = _object_of(file, number, line)
            if rows and row.keys() != values.keys():
                differing = sorted(row.keys() ^ values.keys())
                raise DataError(
                    f"{file.name} has different names in line {number} than in the line before:"
                    f" {', '.join(map(repr, differing[:5]))}. Every line needs the same names."
                )
            for name, value in row.items():
                values.setdefault(name, []).append(value)
            rows += 1
    if not rows:
        raise DataError(f"{file.name} has no rows.")
    return {name: _column_of_values(file, name, column) for name, column in values.items()}


def _object_of(file: DataFile, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name} cannot be read: line {number} is no JSON: {error}") from None
    if not isinstance(row, dict) or not row:
        raise DataError(
            f'{file.name} needs an object on each line, such as {{"a": 1, "label": "cat"}}. Line'
            f" {number} is {line.strip()[:40]!r}."
        )
    return row


def _column_of_values(file: DataFile, name: str, values: list[Any]) -> Array:
    is_text = [isinstance(value, str) for value in values]
    if any(is_text):
        return _text_column(file, name, values, is_text)
    try:
        column = np.array(values, np.float64)
    except (ValueError, TypeError, OverflowError):
        column = None
    if column is None or any(value is None for value in values):
        raise DataError(
            f"{file.name} has values in the column {name!r} that are neither numbers nor lists of"
            " numbers with the same length. The first is"
            f" {json.dumps(next((v for v in values if v is None), values[0]))[:40]}."
        )
    return column.reshape(len(column), -1) if column.ndim > 2 else column
