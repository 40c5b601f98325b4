"""Write the metrics of every epoch to a file: a table (CSV), or a JSON object a line (JSONL)."""

from __future__ import annotations

import csv
import io
import json
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Union

from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.files import COUNT, json_float, write_atomically

__all__ = ["CSVLogger", "JSONLLogger"]

Row = dict[str, Any]


class _FileLogger(StatefulCallback):
    """Base class of loggers that write one line an epoch.

    A line is on disk at the end of its epoch. A resumed fit drops the lines of the epochs that run
    again.
    """

    phase: ClassVar[str] = "logger"
    remembered = {"rows": COUNT}

    def __init__(self, filename: Union[str, os.PathLike[str]], *, append: bool = False) -> None:
        self.filename = Path(filename)
        self.append = append
        self.rows = 0  # in the file

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}({self.filename})"

    def reset(self) -> None:
        rows = self._read() if self.append else []
        self.rows = len(rows)
        self._write(rows)

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        if self._resumes:
            self._write(self._read()[: self.rows])

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._append({"epoch": epoch, **logs})
        self.rows += 1

    def _read(self) -> list[Row]:
        """Return the rows of the file.

        A last line without an end is left out: the process was killed while writing it.
        """
        text = self.filename.read_text(encoding="utf-8") if self.filename.exists() else ""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        rows = self._parse(lines)
        if any("epoch" not in row for row in rows):
            raise SettingError(
                f"{self.filename} was not written by {type(self).__name__}: it has rows without"
                " 'epoch'. Give another filename."
            )
        return rows

    def _write(self, rows: list[Row]) -> None:
        text = self._format(rows)
        write_atomically(self.filename, lambda file: file.write(text.encode()))

    def _append(self, row: Row) -> None:
        with open(self.filename, "a", encoding="utf-8", newline="") as file:
            file.write(self._format([row]))

    @abstractmethod
    def _parse(self, lines: list[str]) -> list[Row]: ...

    @abstractmethod
    def _format(self, rows: list[Row]) -> str: ...


class CSVLogger(_FileLogger):
    """Write a table with one row per epoch: `epoch` from 0, the metrics and `learning_rate`.

    - `filename`: the file. Missing folders are created.
    - `separator`: the character between cells.
    - `append`: continue an existing file, under its one header. False begins a new file, unless
      training resumes: then the rows of the epochs that run again are dropped.

    A metric that an epoch lacks is an empty cell. A metric that appears later, such as a validation
    every third epoch, adds its column at the right, and the earlier rows are written again. Numbers
    are written so that reading them gives the same float; NaN and infinities as `nan` and `inf`.
    SettingError: a separator of another length, or a file to continue that is no such table.

    >>> log = CSVLogger("log.csv", append=True)
    """

    def __init__(
        self,
        filename: Union[str, os.PathLike[str]],
        *,
        separator: str = ",",
        append: bool = False,
    ) -> None:
        if len(separator) != 1:
            raise SettingError(f"CSVLogger needs one character as separator, got {separator!r}.")
        super().__init__(filename, append=append)
        self.separator = separator
        self._columns: list[str] = []

    def _write(self, rows: list[Row]) -> None:
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        super()._write(rows)

    def _append(self, row: Row) -> None:
        if set(row) <= set(self._columns):
            with open(self.filename, "a", encoding="utf-8", newline="") as file:
                self._table(file).writerow(row)
        else:
            self._write([*self._read(), row])

    def _parse(self, lines: list[str]) -> list[Row]:
        return list(csv.DictReader(lines, delimiter=self.separator))

    def _format(self, rows: list[Row]) -> str:
        text = io.StringIO()
        table = self._table(text)
        if rows:
            table.writeheader()
        table.writerows(rows)
        return text.getvalue()

    def _table(self, file: io.TextIOBase) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, delimiter=self.separator, lineterminator="\n")


class JSONLLogger(_FileLogger):
    """Write one JSON object per epoch and line, such as `{"epoch": 0, "loss": 0.5}`.

    - `filename`: the file. Missing folders are created.
    - `append`: continue an existing file. False begins a new file, unless training resumes: then
      the lines of the epochs that run again are dropped.

    A metric that an epoch lacks is absent. JSON has no NaN and no infinities: they are written as
    the strings "NaN", "Infinity" and "-Infinity", which `float` reads. SettingError: the file to
    continue has lines without "epoch".

    >>> log = JSONLLogger("log.jsonl")
    """

    def _parse(self, lines: list[str]) -> list[Row]:
        return [json.loads(line) for line in lines]

    def _format(self, rows: list[Row]) -> str:
        return "".join(json.dumps(_json_row(row)) + "\n" for row in rows)


def _json_row(row: Row) -> Row:
    return {
        name: json_float(value) if isinstance(value, float) else value
        for name, value in row.items()
    }
