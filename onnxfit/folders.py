"""Replacing several files of a folder as a whole."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Union

from onnxfit.errors import CheckpointError
from onnxfit.files import (
    make_folder,
    read_regular_file,
    remove_leftovers,
    require_path,
    sync_folder,
    temporary_name,
    write_atomically,
    writing,
)

JOURNALS = ".onnxfit.*.ready"  # folders with new files that are complete and being moved
NAMES = "names.json"  # in a journal: the files to move, and the files to delete
FileContents = Union[bytes, Callable[[Path, BinaryIO], object]]
SECONDS_OF_A_MOVE = 2.0  # after which a journal without a change belongs to a killed process


def write_folder(
    folder: str | os.PathLike[str], files: Mapping[str, FileContents], stale: Iterable[str] = ()
) -> Path:
    """Write several files to a folder: after an error or a kill, all are old or all are new.

    - `folder`: the folder. It is created if it is missing; its other files are not changed.
    - `files`: name -> contents, or a function that writes them. Its arguments are the temporary
      folder with the files before it, and the open file. The last file is renamed last, so that it
      can describe the others.
    - `stale`: names of files to delete, if they exist.

    Return `folder`, as a Path. All files are written into a temporary folder and flushed to the
    disk before the first one is moved. If the process is killed while it moves them,
    `finish_folder` moves the rest. CheckpointError: the folder cannot be written; the old files are
    restored.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_folder(f"{folder}/new", {"a.txt": b"a", "b.txt": b"b"})
    ...     sorted(file.name for file in path.iterdir())
    ['a.txt', 'b.txt']
    """
    require_path(folder)
    folder = Path(folder)
    names = [*files], [name for name in stale if name not in files]
    try:
        make_folder(folder)
        finish_folder(folder)
        remove_leftovers(folder)
        temporary = folder / temporary_name()
        try:
            temporary.mkdir()
            for file, contents in files.items():
                write = partial(_write_bytes, contents) if isinstance(contents, bytes) else contents
                write_atomically(temporary / "new" / file, partial(write, temporary / "new"))
            (temporary / "old").mkdir()
            text = json.dumps(names).encode()
            write_atomically(temporary / NAMES, partial(_write_bytes, text, temporary))
            journal = temporary.with_suffix(".ready")
            os.rename(temporary, journal)
            sync_folder(folder)
            temporary = journal
            _replace_files(folder, journal, *names)
            sync_folder(folder)
        finally:
            _remove_journal(temporary)
    except OSError as error:
        raise CheckpointError(
            f"The folder {os.fspath(folder)!r} cannot be written: {error.strerror or error}."
        ) from error
    return folder


def finish_folder(folder: str | os.PathLike[str]) -> None:
    """Finish the `write_folder` of a process that was killed while it moved the new files.

    - `folder`: the folder. Call this before reading several files of it.

    OSError or ValueError: the files cannot be moved, or the journal is damaged.
    """
    for journal in sorted(Path(folder).glob(JOURNALS)):
        while _age(journal) < SECONDS_OF_A_MOVE:  # its process may be alive
            time.sleep(0.05)
        if journal.is_symlink() or not journal.is_dir():
            continue
        names, stale = json.loads(read_regular_file(journal / NAMES))
        for name in (*names, *stale):
            if name != Path(name).name or name in ("", ".."):
                raise ValueError(f"{str(journal)!r} names {name!r}, which is no file of the folder")
        for name in names:
            if (journal / "new" / name).exists():
                os.replace(journal / "new" / name, Path(folder) / name)
        for name in stale:
            (Path(folder) / name).unlink(missing_ok=True)
        _remove_journal(journal)


def _remove_journal(journal: Path) -> None:
    """Delete a temporary folder, which is no journal from the beginning of the deletion on."""
    temporary = journal.with_suffix(".part")
    if journal.exists():
        os.rename(journal, temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    writing.discard(temporary.name)


def _age(path: Path) -> float:
    """Return the seconds since the last change of a journal; infinity if it does not exist."""
    times = [p.stat().st_mtime for p in (path, path / "new", path / "old") if p.exists()]
    return time.time() - max(times) if times else math.inf


def _write_bytes(contents: bytes, folder: Path, file: BinaryIO) -> None:
    file.write(contents)


def _replace_files(folder: Path, journal: Path, names: Sequence[str], stale: Sequence[str]) -> None:
    """Move new files to a folder; after an error, move the old files back."""
    new, old = journal / "new", journal / "old"
    done: list[str] = []
    try:
        for name in (*stale, *names):
            done.append(name)
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, f"its entry {name!r} is a folder")
            if os.path.lexists(folder / name):
                os.replace(folder / name, old / name)
            if name in names:
                os.replace(new / name, folder / name)
    except BaseException:
        # The new files go back, so that the journal can be finished at any time.
        for name in reversed(done):
            if name in names and not os.path.lexists(new / name):
                os.replace(folder / name, new / name)
            if os.path.lexists(old / name):
                os.replace(old / name, folder / name)
        raise
