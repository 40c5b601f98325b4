"""A folder for one case, and a watch over what the case does outside of it.

Python reports files that are opened, moved or deleted, processes and connections to audit hooks.
The hook here refuses what a case may not do, so that it does not happen, and notes it. Libraries in
C do not report to it, so the files around the case are compared as well.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.fuzz.attempt import Attempt

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# audit events that change files -> how many of their first arguments are paths
CHANGES = {
    "os.chmod": 1, "os.chown": 1, "os.link": 2, "os.mkdir": 1, "os.remove": 1, "os.rename": 2,
    "os.rmdir": 1, "os.setxattr": 1, "os.symlink": 2, "os.truncate": 1, "os.utime": 1,
}  # fmt: skip
# audit events of code that runs, and of connections
FORBIDDEN = frozenset({
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pickle.find_class",
    "socket.bind", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "pty.spawn",
})  # fmt: skip
FIFO = "a named pipe"  # as the target of a link: a pipe without a writer takes its place
# names that nobody gave to onnxfit: none of these files may change
DECOYS = {
    "precious.txt": b"precious",
    "precious.onnxfit": b"PK\3\4",
    "notes.json": b'{"onnxfit": "other"}',
    "other/weights.bin": b"secret!!" * 64,
    "other/precious.csv": b"epoch,loss\n0,1\n",
}
# what hostile files name: decoys inside and outside of the sandbox, folders, and devices
PATHS = (
    "precious.txt", "./precious.onnxfit", "other/precious.csv", "../outside/precious.txt",
    "../outside/other/precious.csv", "../outside", "..", ".", "/", "other", "/tmp/onnxfit-fuzz.txt",
    "/etc/onnxfit-fuzz.txt", "/dev/onnxfit-fuzz", "linked/precious.txt", "~/precious.txt", "file:///etc/passwd",
    "..\\outside\\precious.txt", "../outside/new/file.txt", "//etc/onnxfit-fuzz.txt", "\0", "a\0b",
    "http://127.0.0.1:9/", "*", "**/*", "{epoch}", "../outside/{epoch}.txt", "$HOME/x", "a/" * 3000,
)  # fmt: skip


class Escape(Exception):
    """A case changed what its user had not named, or ran code."""


class _Watch:
    """The audit hook of this process. Python cannot remove a hook, so it is installed once."""

    def __init__(self) -> None:
        self.roots: tuple[str, ...] | None = None  # where files may be written; None: anywhere
        self.events: list[str] = []
        self._installed = False

    @contextlib.contextmanager
    def over(self, *roots: str) -> Iterator[None]:
        if not self._installed:
            sys.addaudithook(self._audit)
            self._installed = True
        self.events = []
        self.roots = roots
        # a module that is imported for the first time would be written as bytecode
        writes_nothing, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            yield
        finally:
            self.roots = None
            sys.dont_write_bytecode = writes_nothing

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.roots is None:
            return
        if event in FORBIDDEN:
            self._refuse(event, arguments)
        elif event == "open" and arguments[2] and arguments[2] & WRITING:
            self._require_inside(event, arguments[:1], follow=True)
        elif event in CHANGES:
            self._require_inside(event, arguments[: CHANGES[event]], follow=False)

    def _require_inside(self, event: str, paths: Sequence[Any], follow: bool) -> None:
        for path in paths:
            if isinstance(path, int):  # a file that is open
                continue
            whole = os.path.abspath(os.fsdecode(path))
            if follow:
                real = os.path.realpath(whole)
            else:
                real = os.path.join(
                    os.path.realpath(os.path.dirname(whole)), os.path.basename(whole)
                )
            if not any(real == root or real.startswith(root + os.sep) for root in self.roots or ()):
                self._refuse(event, paths)

    def _refuse(self, event: str, arguments: Sequence[Any]) -> None:
        self.events.append(f"{event}{tuple(arguments)!r:.200}")
        raise PermissionError(1, "the fuzzer does not permit it", str(arguments)[:100])


_watch = _Watch()


@contextlib.contextmanager
def sandbox(folder: Path, attempt: Attempt) -> Iterator[None]:
    """Enter a new folder with the attempt's files and decoys, and raise Escape at its end if
    anything but the attempt's own paths has changed.
    """
    inside = folder / "sandbox"
    outside = folder / "outside"
    for root in (inside, outside):
        shutil.rmtree(root, ignore_errors=True)
        _write(root, DECOYS)
    _write(inside, {**attempt.decoys, **attempt.files})
    (inside / "linked").symlink_to(outside)
    for name, target in attempt.links.items():
        if target == FIFO:
            os.mkfifo(inside / name)
        else:
            (inside / name).symlink_to(target)
    before = _contents(folder)
    previous = Path.cwd()
    os.chdir(inside)
    try:
        with _watch.over(str(inside.resolve()), "/dev/null"):
            yield
    finally:
        os.chdir(previous)
        changes = [f"changed {name}" for name in _changed(before, _contents(folder), attempt)]
        if _watch.events or changes:
            raise Escape("; ".join([*_watch.events, *changes]))


def _write(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Return what is inside the sandbox and outside: path -> bytes, or None for a folder."""
    contents: dict[str, bytes | None] = {}
    for root in ("sandbox", "outside"):
        for parent, folders, files in os.walk(folder / root):
            for name in (*folders, *files):
                path = Path(parent, name)
                if path.is_symlink():
                    content: bytes | None = os.fsencode(os.readlink(path))
                else:
                    content = path.read_bytes() if path.is_file() else None
                contents[str(path.relative_to(folder))] = content
    return contents


def _changed(
    before: dict[str, bytes | None], after: dict[str, bytes | None], attempt: Attempt
) -> list[str]:
    """Return the paths that were made, changed or deleted, except those of the attempt."""
    patterns = [f"sandbox/{pattern}" for pattern in attempt.own]
    decoys = [f"sandbox/{name}" for name in attempt.decoys]
    return [
        name
        for name in sorted({*before, *after})
        if (name in before) != (name in after) or before[name] != after[name]
        if name in decoys or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
