"""Write every epoch's figures to a file: a table (CSV), or one JSON object a line (JSONL)."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Union

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.files import write_atomically

__all__ = ["CSVLogger", "JSONLLogger"]

Row = dict[str, Any]


class _FileLogger(StatefulCallback):
    """A file with one line an epoch, on disk at the end of it; cut back to where training resumes.
    """

    phase: ClassVar[str] = "logger"
    remembered = ("rows",)

    def __init__(self, path: Union[str, os.PathLike[str]], append: bool = False) -> None:
        self.path = Path(path)
        self.append = append
        self.rows = 0  # in the file

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}({self.path})"

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
        """The file's rows; without a last line that has no end, where the process was killed while
        writing it.
        """
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        rows = self._parse(lines)
        if any("epoch" not in row for row in rows):
            raise SettingError(
                f"{self.path} was not written by {type(self).__name__}: it has rows without"
                " 'epoch'. Give another path."
            )
        return rows

    def _write(self, rows: list[Row]) -> None:
        text = self._format(rows)
        write_atomically(self.path, lambda file: file.write(text.encode()))

    def _append(self, row: Row) -> None:
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(self._format([row]))

    @abstractmethod
    def _parse(self, lines: list[str]) -> list[Row]: ...

    @abstractmethod
    def _format(self, rows: list[Row]) -> str: ...


class CSVLogger(_FileLogger):
    """A table with a row an epoch:

    `epoch`, the metrics, `learning_rate`; a figure that an epoch lacks is an empty cell.

    A figure that appears later (a validation every third epoch) adds its column at the right; the
    rows so far are written again. `append=True` continues a file that exists, under its one header,
    instead of beginning afresh; so does a fit that resumes, after dropping the rows of the epochs
    that run again. Numbers are written so that reading them gives the same float; NaN and
    infinities as `nan`, `inf`. SettingError: the file to continue is no such table.
    """

    def __init__(
        self, path: Union[str, os.PathLike[str]], separator: str = ",", append: bool = False
    ) -> None:
        if len(separator) != 1:
            raise SettingError(f"CSVLogger needs one character as separator, got {separator!r}.")
        super().__init__(path, append)
        self.separator = separator
        self._columns: list[str] = []

    def _write(self, rows: list[Row]) -> None:
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        super()._write(rows)

    def _append(self, row: Row) -> None:
        if set(row) <= set(self._columns):
            with open(self.path, "a", encoding="utf-8", newline="") as file:
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
    """One JSON object an epoch and line, `{"epoch": 0, "loss": 0.5, ...}`; a figure that an epoch
    lacks is absent.

    JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity", which
    `float` reads. `append` and resuming are as for CSVLogger.
    """

    def _parse(self, lines: list[str]) -> list[Row]:
        return [json.loads(line) for line in lines]

    def _format(self, rows: list[Row]) -> str:
        return "".join(
            json.dumps({name: _json(value) for name, value in row.items()}) + "\n" for row in rows
        )


def _json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
