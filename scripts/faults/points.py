"""Each call for a file of each function fails once: the laws of files afterwards."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from onnxfit import folders
from onnxfit.errors import OnnxfitError
from scripts.faults.calls import ENDS, Fault, FileCalls, kinds_of
from scripts.faults.savers import SAVERS, Saver, state_of

SECONDS = 60  # after which a child process counts as hung
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A fault in a call of a function.

    - `subject`: the function, or the training.
    - `replaces`: whether files of an earlier call are there.
    - `place`: the call, for a message.
    """

    subject: str
    replaces: bool
    fault: Fault
    place: str = ""

    def __str__(self) -> str:
        over = "over old files" if self.replaces else "in an empty folder"
        return f"{self.subject} {over}, {self.fault.kind} at call {self.fault.call} ({self.place})"


@dataclass(frozen=True)
class Result:
    """The outcome of a point, and the law that it breaks; "" for none."""

    point: Point
    outcome: str
    problem: str = ""


class ChildError(Exception):
    """A child process failed or hung."""


def is_sampled(point: Point, one_in: int) -> bool:
    """Return whether a point is in a sample, which is the same on every machine."""
    return not zlib.crc32(str(point).encode()) % one_in


def in_child(function: Callable[[], T]) -> T | None:
    """Return what a function returns in a forked child, or None if a fault ended the child.

    A child has sessions of onnxruntime of its own, whose threads a fork would lose.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            answer = pickle.dumps(function())
            with os.fdopen(writing, "wb") as file:
                file.write(answer)
            code = 0
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            with os.fdopen(writing, "wb") as file:
                file.write(f"{error!r} in {Path(frame.filename).name}:{frame.lineno}".encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    status = os.waitpid(child, 0)[1]
    if status == signal.SIGKILL:
        return None
    if status:
        raise ChildError(answer.decode() or f"status {status}")
    found: T = pickle.loads(answer)
    return found


def equal(a: Any, b: Any) -> bool:
    try:
        np.testing.assert_equal(a, b)
    except AssertionError:
        return False
    return True


def listing(folder: Path) -> list[str]:
    """Return the files in a folder; the data of a model has one of several names."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    return sorted(re.sub(r"\.onnxfit-\d+\.data$", ".data", name) for name in names)


class Room:
    """The points of one function, in a process of its own.

    - `subject`: the name of the function.
    - `replaces`: whether files of an earlier call are there.
    - `folder`: an empty folder for the files.
    """

    def __init__(self, subject: str, replaces: bool, folder: Path) -> None:
        folders.SECONDS_OF_A_MOVE = 0.0  # nobody else writes here
        warnings.simplefilter("ignore")
        self.subject = subject
        self.replaces = replaces
        self.saver: Saver = SAVERS[subject]
        self.folder = folder
        self.trainer = self.saver.trainer(2)
        self.number = 0
        self._template = folder / "template" / "files"
        self._template.mkdir(parents=True)
        if replaces:
            self.write(self._template, self.saver.trainer(1))
        self.old = self.saver.read(self._template)
        clean = self.place()
        with FileCalls(clean) as counted:
            self.write(clean)
        self.calls = counted.calls
        self.new = self.saver.read(clean)
        self.files = listing(clean)
        self.state = state_of(self.trainer)

    def write(self, folder: Path, trainer: Any = None) -> None:
        with self.saver.limits():
            self.saver.write(trainer or self.trainer, folder)

    def place(self) -> Path:
        """Return a new folder with the old files."""
        self.number += 1
        place = self.folder / str(self.number) / "files"
        shutil.copytree(self._template, place)
        return place

    def points(self) -> Iterator[Point]:
        for number, (call, path) in enumerate(self.calls, start=1):
            for kind in kinds_of(call):
                fault = Fault(number, kind)
                yield Point(self.subject, self.replaces, fault, f"{call} {path}")
        end = Fault(len(self.calls) + 1, "power")
        yield Point(self.subject, self.replaces, end, "after the last call")

    def check(self, point: Point) -> Result:
        """Return the outcome of a point."""
        place = self.place()
        try:
            outcome, problem = self._outcome(point.fault, place)
        except Exception as error:
            outcome, problem = "failed", f"{type(error).__name__}: {error}"
        shutil.rmtree(place.parent)
        return Result(point, outcome, problem)

    def _outcome(self, fault: Fault, place: Path) -> tuple[str, str]:
        def attempt() -> str:
            try:
                with FileCalls(place, fault):
                    self.write(place)
            except (OnnxfitError, click.ClickException) as error:
                return "refused" if str(error) else "refused without a message"
            return "written"

        outcome = (in_child(attempt) or "killed") if fault.kind in ENDS else attempt()
        found = self.saver.read(place)
        is_new = equal(found, self.new)
        if not (is_new or self._is_old(found)):
            return outcome, "the files are neither the old nor the new ones"
        if outcome == "written" and not is_new:
            return outcome, "the call succeeded without the new files"
        if not equal(state_of(self.trainer), self.state):
            return outcome, "the trainer has changed"
        if fault.kind in ENDS:
            in_child(lambda: self.write(place))
        else:
            self.write(place)
        if not equal(self.saver.read(place), self.new):
            return outcome, "the next call does not write the new files"
        files = listing(place)
        if files != self.files:
            return outcome, f"the next call leaves {files} instead of {self.files}"
        if not equal(state_of(self.trainer), self.state):
            return outcome, "the trainer has changed in the next call"
        return f"{outcome}, {'new' if is_new else 'old'}", ""

    def _is_old(self, found: Any) -> bool:
        if not self.saver.is_divided:
            return equal(found, self.old)
        return all(
            value is None or equal(value, self.old.get(name)) or equal(value, self.new.get(name))
            for name, value in found.items()
        )
