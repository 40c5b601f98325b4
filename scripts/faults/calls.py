"""Calls of the operating system for files: one of them fails, or the process ends there.

Only Python's functions are replaced (`open`, `os.fsync`, `os.replace`, ...). NumPy, zipfile, PIL
and protobuf write through them, since `open` returns a file that has no C stream.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

# call -> the error of its failure
ERRORS = {
    "open": errno.EACCES,
    "mkdir": errno.EACCES,
    "write": errno.EIO,
    "fsync": errno.EIO,
    "truncate": errno.EIO,
    "replace": errno.EIO,
    "rename": errno.EIO,
    "unlink": errno.EACCES,
    "rmdir": errno.EACCES,
}
NEEDS_SPACE = ("open", "mkdir", "write", "fsync")  # of these, each fails on a full disk
ENDS = ("kill", "torn", "power")  # the kinds of faults that kill the process


@dataclass(frozen=True)
class Fault:
    """A call that fails.

    - `call`: the number of the call, from 1; 0 for no fault. "power" after the last call comes when
      the function has returned.
    - `kind`: "error": the call raises OSError, and later calls succeed. "half": a write stores half
      of its bytes, and the next write of the file raises ENOSPC. "full": the call and every later
      one that needs space raise ENOSPC. "kill": the process is killed before the call. "torn": it
      is killed after half of a write. "power": it is killed, and whatever was not flushed is lost,
      except in files that are written without a buffer, as logs are.
    """

    call: int = 0
    kind: str = "error"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kinds_of(call: str) -> tuple[str, ...]:
    """Return the kinds of faults that a call can have."""
    kinds = ["error", "kill"]
    if call in NEEDS_SPACE:
        kinds.append("full")
    if call == "write":
        kinds += ["half", "torn"]
    if call in ("write", "replace", "rename", "unlink"):
        kinds.append("power")
    return tuple(kinds)


class FileCalls:
    """Context that counts the calls for files in one folder, and lets one of them fail.

    - `folder`: the folder, with its subfolders.
    - `fault`: the call that fails.

    `calls` lists the calls as (function, path in the folder).
    """

    def __init__(self, folder: str | os.PathLike[str], fault: Fault | None = None) -> None:
        self.folder = os.path.realpath(folder)
        self.fault = fault or Fault()
        self.calls: list[tuple[str, str]] = []
        self.unsynced: dict[int, int] = {}  # inode -> bytes that are certainly on the disk
        self._originals: list[tuple[Any, str, Any]] = []
        self._is_opening = False

    def __enter__(self) -> FileCalls:
        original = builtins.open
        self._replace(builtins, "open", self._open(original))
        self._replace(io, "open", builtins.open)
        self._replace(os, "open", self._os_open(os.open))
        self._replace(os, "fsync", self._fsync(os.fsync))
        for name, call in {**{name: name for name in ERRORS}, "remove": "unlink"}.items():
            if name not in ("open", "write", "fsync"):
                self._replace(os, name, self._counted(call, getattr(os, name)))
        # Python 3.10 has its own references to the functions.
        accessor = getattr(pathlib, "_NormalAccessor", None)
        for name in ("open", "mkdir", "rename", "replace", "rmdir", "unlink"):
            if accessor is not None:
                module = io if name == "open" else os
                self._replace(accessor, name, staticmethod(getattr(module, name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._originals:
            place, name, original = self._originals.pop()
            setattr(place, name, original)
        if self.fault == Fault(len(self.calls) + 1, "power"):
            self._lose_unsynced()
            _die()

    def _replace(self, place: Any, name: str, function: Any) -> None:
        self._originals.append((place, name, vars(place)[name]))
        setattr(place, name, function)

    def meet(self, name: str, path: str) -> bool:
        """Count a call, and let it fail if it is the one; return whether it is, for a write."""
        relative = re.sub(
            r"\.onnxfit\.[\w.-]+\.", ".onnxfit.*.", os.path.relpath(path, self.folder)
        )
        self.calls.append((name, relative))
        number, fault = len(self.calls), self.fault
        is_full = fault.kind == "full" and 0 < fault.call <= number
        if is_full and name in NEEDS_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if number != fault.call:
            return False
        if fault.kind == "error" or (fault.kind, name == "write") == ("half", False):
            raise OSError(ERRORS[name], os.strerror(ERRORS[name]), path)
        if fault.kind == "power":
            self._lose_unsynced()
        if fault.kind in ENDS and (fault.kind, name) != ("torn", "write"):
            _die()
        return True

    def contains(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the path of a file if it is in the folder, else None."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.fspath(path)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        parent, name = os.path.split(os.path.abspath(path))
        path = os.path.join(os.path.realpath(parent), name)
        return path if path == self.folder or path.startswith(f"{self.folder}{os.sep}") else None

    def _lose_unsynced(self) -> None:
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(parent, name)
                size = self.unsynced.get(os.lstat(path).st_ino)
                if size is not None:
                    with io.FileIO(path, "r+") as file:
                        file.truncate(size)

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(
            file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None,
            errors: str | None = None, newline: str | None = None, closefd: bool = True,
            opener: Any = None,
        ) -> Any:  # fmt: skip
            path = None if isinstance(file, int) else self.contains(file)
            if path is None or not set(mode) & set("wax+"):
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            self.meet("open", path)
            kind = mode.replace("b", "").replace("t", "").replace("+", "") + "+"
            self._is_opening = True
            try:
                raw = _Raw(self, path, kind, opener, syncs=buffering != 0)
            finally:
                self._is_opening = False
            if buffering == 0:
                return raw
            # NumPy writes the numbers into a BufferedWriter of its own accord.
            file = io.BufferedRandom(raw)  # type: ignore[type-var]
            return file if "b" in mode else io.TextIOWrapper(file, encoding, errors, newline)

        return opened

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            inside = None if self._is_opening else self.contains(path, dir_fd)
            if inside is not None:
                self.meet("open", inside)
            return original(path, flags, mode, dir_fd=dir_fd)

        return opened

    def _fsync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def flushed(handle: int) -> None:
            path = self.contains(handle)
            if path is not None:
                self.meet("fsync", path)
            original(handle)
            self.unsynced.pop(os.fstat(handle).st_ino, None)

        return flushed

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *arguments: Any, **settings: Any) -> Any:
            folder = settings.get("dir_fd", settings.get("src_dir_fd"))
            inside = self.contains(path, folder)
            if inside is not None:
                self.meet(name, inside)
            return original(path, *arguments, **settings)

        return counted


class _Raw(io.FileIO):
    """A file whose writes are counted."""

    def __init__(self, calls: FileCalls, path: str, mode: str, opener: Any, syncs: bool) -> None:
        super().__init__(path, mode, opener=opener)
        self._calls = calls
        self._path = path
        self._syncs = syncs
        self._is_full = False

    def write(self, data: Any) -> int:  # type: ignore[override]
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        view = memoryview(data).cast("B")
        if self._syncs:
            status = os.fstat(self.fileno())
            self._calls.unsynced.setdefault(status.st_ino, status.st_size)
        if not self._calls.meet("write", self._path):
            return super().write(view)
        written = super().write(view[: len(view) // 2])
        if self._calls.fault.kind == "torn":
            _die()
        self._is_full = True
        return written

    def truncate(self, size: int | None = None) -> int:
        self._calls.meet("truncate", self._path)
        return super().truncate(size)
