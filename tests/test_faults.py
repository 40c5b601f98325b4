"""The harness of `make faults`: its faults, a function that breaks the laws, and a sample of it all."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.faults import points
from scripts.faults.calls import ENDS, Fault, FileCalls
from scripts.faults.points import Room, in_child
from scripts.faults.savers import Saver

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="faults need /proc")


def write_zip(path: Path) -> None:
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"1" * 20_000)


def write_npy(path: Path) -> None:
    with io.open(path, "xb") as file:  # noqa: UP020  (as pathlib does)
        np.save(file, np.arange(100_000))


def write_npz(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, x=np.arange(10))


def append(path: Path) -> None:
    for _ in range(2):
        with open(path, "ab", buffering=0) as file:
            file.write(b"12")


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("a\nb"),
    "bytes": lambda path: path.write_bytes(b"123"),
    "zip": write_zip,
    "npy": write_npy,
    "npz": write_npz,
    "append": append,
}


@pytest.mark.parametrize("name", WRITERS)
def test_counted_calls_write_the_same_bytes(name: str, tmp_path: Path) -> None:
    for folder in ("plain", "counted"):
        (tmp_path / folder).mkdir()
    WRITERS[name](tmp_path / "plain" / "a")
    with FileCalls(tmp_path / "counted") as counted:
        WRITERS[name](tmp_path / "counted" / "a")
    same = name == "npz" or (tmp_path / "plain" / "a").read_bytes()
    assert same in (True, (tmp_path / "counted" / "a").read_bytes())
    assert ("open", "a") in counted.calls
    assert ("write", "a") in counted.calls
    number = len(counted.calls)
    WRITERS["bytes"](tmp_path / "counted" / "b")
    assert len(counted.calls) == number


def act(folder: Path) -> None:
    """Eight calls: make a folder, write two parts of a file, flush it, rename it, delete it."""
    (folder / "new").mkdir()
    with open(folder / "new" / "a", "xb", buffering=0) as file:
        file.write(b"1234")
        file.write(b"5678")
        os.fsync(file.fileno())
    os.replace(folder / "new" / "a", folder / "b")
    (folder / "b").unlink()
    (folder / "new").rmdir()


def test_every_call_is_counted_and_can_fail(tmp_path: Path) -> None:
    with FileCalls(tmp_path) as counted:
        act(tmp_path)
    names = ["mkdir", "open", "write", "write", "fsync", "replace", "unlink", "rmdir"]
    assert [name for name, _ in counted.calls] == names
    for number in range(1, 9):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(OSError, match="Errno"), FileCalls(folder, Fault(number)) as counted:
            act(folder)
        assert len(counted.calls) == number


@pytest.mark.parametrize(
    ("kind", "size", "code"),
    [("error", 4, errno.EIO), ("half", 6, errno.ENOSPC), ("full", 4, errno.ENOSPC)],
)
def test_a_write_that_fails(kind: str, size: int, code: int, tmp_path: Path) -> None:
    def write() -> None:
        with open(tmp_path / "a", "xb", buffering=0) as file:
            for part in (b"1234", b"5678", b""):
                file.write(part)

    with pytest.raises(OSError, match="Errno") as raised, FileCalls(tmp_path, Fault(3, kind)):
        write()
    assert raised.value.errno == code
    assert (tmp_path / "a").stat().st_size == size


@pytest.mark.parametrize(("kind", "left"), [("kill", b"12345678"), ("torn", b"12345678")])
def test_a_process_that_is_killed(kind: str, left: bytes, tmp_path: Path) -> None:
    def killed() -> None:
        with FileCalls(tmp_path, Fault(6, kind)):
            act(tmp_path)

    assert in_child(lambda: 1) == 1
    assert in_child(killed) is None
    assert (tmp_path / "new" / "a").read_bytes() == left


@pytest.mark.parametrize(("flushes", "left"), [(True, b"1234"), (False, b"")])
def test_a_power_cut_loses_what_was_not_flushed(flushes: bool, left: bytes, tmp_path: Path) -> None:
    def cut() -> None:
        with FileCalls(tmp_path, Fault(4 if flushes else 3, "power")):
            with open(tmp_path / "a", "xb") as file:
                file.write(b"1234")
                file.flush()
                if flushes:
                    os.fsync(file.fileno())
            os.replace(tmp_path / "a", tmp_path / "b")

    assert in_child(cut) is None
    assert (tmp_path / "a").read_bytes() == left


class Figures:
    """Stands for a trainer: two figures that are written into two files."""

    def __init__(self, steps: int) -> None:
        self.numbers = [steps, steps]
        self.settings: dict[str, Any] = {}


def write_one_by_one(figures: Figures, folder: Path) -> None:
    for name, number in zip("ab", figures.numbers):
        (folder / name).write_text(str(number))


def write_and_forget(figures: Figures, folder: Path) -> None:
    (folder / "new").write_text(str(figures.numbers))
    with open(folder / "new") as file:
        os.fsync(file.fileno())
    os.replace(folder / "new", folder / "ab")


def write_and_change(figures: Figures, folder: Path) -> None:
    figures.numbers[0] += 1
    write_and_forget(figures, folder)


def write_without_flushing(figures: Figures, folder: Path) -> None:
    (folder / "new").write_text(str(figures.numbers))
    os.replace(folder / "new", folder / "ab")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (write_one_by_one, "neither the old nor the new"),
        (write_and_change, "the trainer has changed"),
        (write_without_flushing, "neither the old nor the new"),
        (write_and_forget, "OSError"),  # which is no error of onnxfit
    ],
)
def test_a_function_that_breaks_a_law_is_found(
    write: Callable[[Any, Path], None],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(folder: Path) -> list[str]:
        return [path.read_text() for path in sorted(folder.glob("[ab]*"))]

    class Plain(Saver):
        def trainer(self, steps: int) -> Any:
            return Figures(steps)

    monkeypatch.setitem(points.SAVERS, "plain", Plain(write, read))
    monkeypatch.setattr(points, "state_of", lambda figures: [*figures.numbers])
    room = Room("plain", True, tmp_path)
    results = [room.check(point) for point in room.points()]
    assert any(problem in result.problem for result in results)
    assert {result.point.fault.kind for result in results} >= set(ENDS)


def test_a_sample_of_all_functions_breaks_no_law() -> None:
    command = [sys.executable, "scripts/faults", "--sample", "--processes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 laws broken" in done.stdout
