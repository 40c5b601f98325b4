"""Atomic writing of files: a file is either complete or absent."""

from __future__ import annotations

import errno
import math
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from onnxfit.errors import CheckpointError

TEMPORARY_NAME = ".onnxfit.{}.part"


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> Path:
    """Write a file so that it is at any moment either the old one or the complete new one.

    - `path`: the file. Missing parent folders are created; a link stays a link.
    - `write`: called with a temporary file beside `path`, open for binary writing. The temporary
      file is then flushed to the disk and renamed.

    Return `path`, as a Path. After that, the file and its name survive a power cut. A file that is
    replaced keeps its permissions, and a new one follows the umask. CheckpointError where the
    folder or the disk refuses; other exceptions of `write` are raised as they are. After an
    exception no temporary file is left, and an old file is unchanged.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_atomically(f"{folder}/new/a.txt", lambda file: file.write(b"a"))
    ...     path.read_bytes()
    b'a'
    """
    path = Path(path)
    try:
        target = Path(os.path.realpath(path))  # so that a link stays one
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a regular file")
        _make_folder(target.parent)
        temporary = target.with_name(TEMPORARY_NAME.format(uuid.uuid4().hex))
        try:
            with open(temporary, "xb", opener=_opener(target)) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} cannot be written: {error.strerror or error}."
        ) from error
    return path


def remove_leftovers(folder: str | os.PathLike[str], seconds: float = 3600) -> None:
    """Delete the temporary files that killed processes left in a folder.

    - `folder`: the folder, without those in it.
    - `seconds`: how long a file must not have been written to, since another process may still be
      writing it.
    """
    for path in Path(folder).glob(TEMPORARY_NAME.format("*")):
        try:
            if time.time() - path.stat().st_mtime >= seconds:
                path.unlink()
        except OSError:
            pass  # another process was faster, or this one has no permission


def _opener(target: Path) -> Callable[[str, int], int] | None:
    """Return an opener that creates a file with the permissions of `target`, if that is a file."""
    if not target.is_file():
        return None
    permissions = target.stat().st_mode & 0o777

    def create(path: str, flags: int) -> int:
        handle = os.open(path, flags, permissions)
        os.chmod(path, permissions)  # the umask may have removed some of them
        return handle

    return create


def _make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{str(folder)!r} is a file, not a folder")
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Systems other than POSIX do so by themselves."""
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


def json_float(value: float) -> float | str:
    """Return a float as JSON can hold it: NaN and infinities as strings that `float` reads.

    >>> json_float(0.5), json_float(float("-inf"))
    (0.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
