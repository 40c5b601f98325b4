"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from onnxfit.errors import CheckpointError

ASIDE = ".onnxfit.{}.part"


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Path:
    """Call `write` with a file beside `path`, flush it to the disk, then rename:

    `path` is the old file or the whole new one.

    Missing parent folders are made. When it returns, file and name outlive a power cut.
    CheckpointError where the folder or the disk refuses; what else `write` raises is raised on.
    Either way nothing is left behind, and an old file is as it was.
    """
    path = Path(path)
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        _make_folder(target.parent)
        aside = target.with_name(ASIDE.format(uuid.uuid4().hex))
        try:
            with open(aside, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} cannot be written: {error.strerror or error}."
        ) from error
    return path


def remove_leftovers(folder: str | os.PathLike[str], seconds: float = 3600) -> None:
    """Delete what killed processes were writing into a folder: files aside that nobody has written
    to for so long.
    """
    for path in Path(folder).glob(ASIDE.format("*")):
        try:
            if time.time() - path.stat().st_mtime >= seconds:
                path.unlink()
        except OSError:
            pass  # another process was faster, or may do what this one may not


def _make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{str(folder)!r} is a file, not a folder")
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk; where a system has no such thing, it keeps them in
    order by itself.
    """
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(handle)
