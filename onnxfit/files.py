"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from onnxfit.errors import CheckpointError


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Path:
    """Call `write` with a file beside `path`, flush it to the disk, then rename: `path` is the old file or the whole new one.

    Missing parent folders are made. CheckpointError where the folder or the disk refuses; what else `write` raises is raised on, and
    nothing is left behind.
    """
    path = Path(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=".onnxfit.", suffix=".part", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(aside, 0o666 & ~_umask())
            os.replace(aside, target)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)!r} cannot be written: {error.strerror or error}. Training is unharmed.") from error
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
