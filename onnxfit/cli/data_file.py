"""A file of data, or standard input, which `-` names."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onnxfit.distributed.find import launched_ranks
from onnxfit.errors import DataError
from onnxfit.files import require_regular_file

STDIN = "-"
FORMATS = {".npy": "a .npy", ".npz": "a .npz", ".csv": "CSV", ".jsonl": "JSON lines"}
# The first bytes of a file -> its suffix; any other text is CSV.
FIRST_BYTES = {b"\x93NUMPY": ".npy", b"PK": ".npz", b"{": ".jsonl"}


@dataclass(frozen=True)
class DataFile:
    """A file that a command reads.

    - `name`: the text that begins messages about the file.
    - `suffix`: the format, as one of `FORMATS`, or the unknown suffix of a path.
    - `contents`: the bytes of standard input; None for a path.
    """

    name: str
    suffix: str
    contents: bytes | None = None
    path: str = STDIN

    def open(self) -> BinaryIO:
        """Return the file, open for reading. OSError: it is missing, or is a pipe or a device."""
        if self.contents is not None:
            return io.BytesIO(self.contents)
        require_regular_file(Path(self.path))
        return open(self.path, "rb")


def data_files(paths: Sequence[str]) -> list[DataFile]:
    """Return the files of an option, after reading standard input for `-`.

    DataError: standard input is beside other files, is empty, or cannot be read here.
    """
    if STDIN in paths:
        require_one_reader(paths)
        return [_standard_input()]
    return [DataFile(repr(path), Path(path).suffix.lower(), path=path) for path in paths]


def require_one_reader(paths: Sequence[str], ranks: int = 1) -> None:
    """Raise DataError if standard input has several readers: options, files or processes.

    - `paths`: all files of data of a command.
    - `ranks`: the number of processes that the command will start.
    """
    if STDIN not in paths:
        return
    if len(paths) > 1:
        others = ", ".join(paths)
        raise DataError(
            f"- stands for standard input, which contains a single file, but the data was {others}."
            " Pass several arrays as one .npz, and validation data as a file."
        )
    if max(ranks, launched_ranks(os.environ)) > 1:
        raise DataError(
            "Several processes cannot read the same standard input. Write the data to a file, and"
            " pass its path instead of -."
        )


def _standard_input() -> DataFile:
    if sys.stdin is None:  # the process was started without standard input
        raise DataError("- reads the data from standard input, but standard input is closed.")
    if sys.stdin.isatty():
        raise DataError(
            "- reads the data from standard input, but standard input is a terminal. Pass the data"
            " with < FILE or a pipe, or give the path of a file."
        )
    contents = sys.stdin.buffer.read()
    start = contents[:1024].removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise DataError(
            "Standard input is empty. Pass the data with < FILE or a pipe, and check the program"
            " that writes into the pipe."
        )
    suffixes = [suffix for first, suffix in FIRST_BYTES.items() if start.startswith(first)]
    suffix = suffixes[0] if suffixes else ".csv"
    return DataFile(f"Standard input (read as {FORMATS[suffix]})", suffix, contents)
