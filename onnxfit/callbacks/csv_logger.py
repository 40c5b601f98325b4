"""Write the metrics of every epoch to a file: a table (CSV) or JSON lines (JSONL)."""

from __future__ import annotations

import csv
import io
import json
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Union

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.write_guard import WriteGuard
from onnxfit.checks import check_arguments
from onnxfit.errors import SettingError
from onnxfit.files import (
    COUNT,
    append_whole,
    json_float,
    read_regular_file,
    write_atomically,
)

__all__ = ["CSVLogger", "JSONLLogger"]

Row = dict[str, Any]


class _FileLogger(StatefulCallback):
    """Base class of loggers that write one line per epoch.

    A line is on disk at the end of its epoch. A resumed fit drops the lines of the epochs that run
    again. If the file cannot be written, there is one warning per fit; the missing lines are
    written together with the next line, or when the fit ends.
    """

    phase: ClassVar[str] = "logger"
    is_brief: ClassVar[bool] = True
    state_attributes = {"rows": COUNT}

    @check_arguments
    def __init__(self, filename: Union[str, os.PathLike[str]], *, append: bool = False) -> None:
        self.filename = Path(filename)
        self.append = append
        self.rows = 0  # in the file
        self._guard = WriteGuard(type(self).__name__, self.filename)
        self._begun = False  # whether this fit has created the file, or cut it to the rows to keep
        self._unwritten: list[Row] = []

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}({self.filename})"

    def reset(self) -> None:
        self.rows = 0

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._guard.reset()
        self._begun = False
        self._unwritten = []
        with self._guard:
            self._begin()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._unwritten.append({"epoch": epoch + 1, **logs})
        self._write_rest()

    def on_close(self) -> None:
        super().on_close()
        if self._unwritten:
            self._write_rest()

    def _write_rest(self) -> None:
        """Write the lines that are not in the file yet."""
        with self._guard:
            if not self._begun:
                self._begin()
            self._append(self._unwritten)
            self.rows += len(self._unwritten)
            self._unwritten = []

    def _begin(self) -> None:
        """Write the file with the rows to keep."""
        rows = self._read() if self.append or self._resumes else []
        if self._resumes:
            rows = rows[: self.rows]
        self._write(rows)
        self.rows = len(rows)
        self._begun = True

    def _read(self) -> list[Row]:
        """Return the rows of the file. SettingError: this logger did not write the file.

        A last line without a line end is left out: the process was killed while writing it.
        """
        try:
            text = read_regular_file(self.filename).decode() if self.filename.exists() else ""
            # Only "\n" ends a line: names may contain the other separators that splitlines knows.
            lines = list(io.StringIO(text))
            if lines and not lines[-1].endswith("\n"):
                lines.pop()
            rows = self._parse(lines)
            problem = "it has rows without 'epoch'"
        except (ValueError, csv.Error) as error:  # text of another encoding raises ValueError
            rows = [{}]
            problem = str(error)
        if any("epoch" not in row for row in rows):
            raise SettingError(
                f"{self.filename} was not written by {type(self).__name__}: {problem}. Pass another"
                " filename, or delete the file."
            )
        return rows

    def _append(self, rows: list[Row]) -> None:
        with open(self.filename, "ab", buffering=0) as file:
            append_whole(file, self._format(rows).encode())

    def _write(self, rows: list[Row]) -> None:
        """Replace the file."""
        text = self._format(rows)
        write_atomically(self.filename, lambda file: file.write(text.encode()))

    @abstractmethod
    def _parse(self, lines: list[str]) -> list[Row]: ...

    @abstractmethod
    def _format(self, rows: list[Row]) -> str: ...


class CSVLogger(_FileLogger):
    """Write a table with one row per epoch: `epoch` from 1, the metrics and `learning_rate`.

    - `filename`: the file. Missing folders are created.
    - `separator`: the character between cells.
    - `append`: continue an existing file, under its header. False begins a new file, unless
      training resumes: then only the rows of the epochs that run again are dropped.

    A metric that an epoch lacks is an empty cell. A metric that appears later, such as a validation
    every third epoch, adds its column at the right, and the earlier rows are written again. Numbers
    are written so that reading them gives the same float; NaN and infinities as `nan` and `inf`.
    If the file cannot be written, a warning says so, and training continues. SettingError: the
    separator is not one character, or the file to continue is not a table of this callback.

    >>> log = CSVLogger("log.csv", append=True)
    """

    @check_arguments
    def __init__(
        self,
        filename: Union[str, os.PathLike[str]],
        *,
        separator: str = ",",
        append: bool = False,
    ) -> None:
        if len(separator) != 1:
            raise SettingError(
                f"CSVLogger needs separator to be a single character, got {separator!r}."
            )
        super().__init__(filename, append=append)
        self.separator = separator
        self._columns: list[str] = []

    def _append(self, rows: list[Row]) -> None:
        if all(set(row) <= set(self._columns) for row in rows):
            super()._append(rows)
        else:
            self._write([*self._read(), *rows])

    def _write(self, rows: list[Row]) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        header = _as_csv([dict(zip(columns, columns))], columns, self.separator) if rows else ""
        text = header + _as_csv(rows, columns, self.separator)
        write_atomically(self.filename, lambda file: file.write(text.encode()))
        self._columns = columns

    def _parse(self, lines: list[str]) -> list[Row]:
        rows: list[Row] = list(csv.DictReader(lines, delimiter=self.separator))
        if any(None in row for row in rows):
            raise ValueError("a row has more cells than the header")
        return rows

    def _format(self, rows: list[Row]) -> str:
        return _as_csv(rows, self._columns, self.separator)


def _as_csv(rows: list[Row], columns: list[str], separator: str) -> str:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns, delimiter=separator, lineterminator="\r\n")
    lines = []
    for row in rows:  # with "\n" as its line end, the writer would not quote "\r" in a name
        table.writerow(row)
        lines.append(text.getvalue().removesuffix("\r\n") + "\n")
        text.seek(0)
        text.truncate()
    return "".join(lines)


class JSONLLogger(_FileLogger):
    """Write one JSON object per line for every epoch, such as `{"epoch": 1, "loss": 0.5}`.

    - `filename`: the file. Missing folders are created.
    - `append`: continue an existing file. False begins a new file, unless training resumes: then
      only the lines of the epochs that run again are dropped.

    A metric that an epoch lacks is absent. JSON has no NaN and no infinities: they are written as
    the strings "NaN", "Infinity" and "-Infinity", which `float` reads. If the file cannot be
    written, a warning says so, and training continues. SettingError: the file to continue was not
    written by this callback.

    >>> log = JSONLLogger("log.jsonl")
    """

    def _parse(self, lines: list[str]) -> list[Row]:
        rows = [json.loads(line) for line in lines]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("one of its lines is not a JSON object")
        return rows

    def _format(self, rows: list[Row]) -> str:
        return "".join(json.dumps(_json_row(row)) + "\n" for row in rows)


def _json_row(row: Row) -> Row:
    return {
        name: json_float(value) if isinstance(value, float) else value
        for name, value in row.items()
    }
