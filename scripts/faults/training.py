"""A training in which each call for a file fails once, and which is then run again."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxfit import Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    JSONLLogger,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
)
from onnxfit.errors import OnnxfitError
from scripts.faults.calls import Fault, FileCalls, kinds_of
from scripts.faults.points import Point, Result, equal, in_child, listing
from scripts.faults.savers import read_checkpoint, read_model
from tests.training.test_resume import points as tensorboard_points
from tests.training.test_survival import X, Y, new

SUBJECT = "fit with callbacks"
LOGS = ("log.csv", "log.jsonl", "runs")


def script(trainer: Trainer) -> Any:
    """Train in the current folder, as a user who has reason to be careful.

    Return everything that a run ends with.
    """
    callbacks: list[Callback] = [
        EarlyStopping("val_loss", patience=4, restore_best_weights=True),
        ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05),
        ModelCheckpoint("best/{epoch}.onnxfit", top_k=1, save_last=True, background=False),
        ModelCheckpoint("model.onnx", save_weights_only=True, background=False),
        BackupAndRestore("backup", every_n_steps=1, background=False),
        CSVLogger("log.csv"),
        JSONLLogger("log.jsonl"),
        TensorBoard("runs", update_freq="batch"),
    ]
    x, y = X[:12], Y[:12]
    trainer.fit(
        x, y, epochs=2, batch_size=4, validation_data=(x, y), callbacks=callbacks, verbose=0
    )
    states = {one.state_key: one.state_dict() for one in callbacks if one.phase != "logger"}
    history = trainer.history
    figures = [history.history, history.epoch, trainer.train_losses_, trainer.stop_reason]
    return trainer.get_state(), figures, states


def contents(folder: Path) -> dict[str, Any]:
    """Return what the files of a run hold, by name."""
    checkpoints = sorted((folder / "best").glob("*.onnxfit"))
    files = {path.name: path for path in folder.iterdir()}
    return {
        **{path.name: read_checkpoint(path) for path in checkpoints},
        "model.onnx": read_model(folder / "model.onnx"),
        **{name: files[name].read_text() if name in files else "" for name in LOGS[:2]},
        "runs": tensorboard_points(folder / "runs"),
    }


class TrainingRoom:
    """The points of the training; each is run in processes of its own.

    - `resumes`: the run with the fault resumes a run that was killed in the middle.
    - `folder`: an empty folder for the files.
    """

    def __init__(self, resumes: bool, folder: Path) -> None:
        self.resumes = resumes
        self.folder = folder
        self._begun = folder / "begun"
        whole = folder / "whole"
        for path in (self._begun, whole):
            path.mkdir(parents=True)
        calls, self.end = self._counted(whole)
        self.contents = contents(whole)
        if resumes:
            middle = Fault(len(calls) * 3 // 5, "kill")
            in_child(lambda: self.run(self._begun, new("full", "plateau"), middle))
            again = folder / "again"
            shutil.copytree(self._begun, again)
            calls, _ = self._counted(again)
        self.calls = calls

    def _counted(self, folder: Path) -> tuple[list[tuple[str, str]], Any]:
        def run() -> Any:
            with FileCalls(folder) as counted:
                end = self.run(folder, new("full", "plateau"))
            return counted.calls, end

        found: tuple[list[tuple[str, str]], Any] = in_child(run)
        return found

    def run(self, folder: Path, trainer: Trainer, fault: Fault | None = None) -> Any:
        os.chdir(folder)
        with warnings.catch_warnings(), FileCalls(folder, fault):
            warnings.simplefilter("ignore")
            return script(trainer)

    def points(self) -> Iterator[Point]:
        """Yield two faults of each call; of several writes of a file, the first and the last."""
        for number, (call, path) in enumerate(self.calls, start=1):
            around = self.calls[number - 2 : number + 1]
            if number > 1 and around == [(call, path)] * 3:
                continue
            kinds = kinds_of(call)
            for kind in (kinds[0], kinds[1 + number % (len(kinds) - 1)]):
                yield Point(SUBJECT, self.resumes, Fault(number, kind), f"{call} {path}")

    def check(self, point: Point) -> Result:
        """Return the outcome of a point."""
        place = self.folder / str(os.getpid())
        shutil.copytree(self._begun, place)
        try:
            outcome, problem = self._outcome(point.fault, place)
        except Exception as error:
            outcome, problem = "failed", f"{type(error).__name__}: {error}"
        shutil.rmtree(place)
        return Result(point, outcome, problem)

    def _outcome(self, fault: Fault, place: Path) -> tuple[str, str]:
        def first() -> tuple[str, Any]:
            trainer = new("full", "plateau")
            try:
                return "finished", self.run(place, trainer, fault)
            except OnnxfitError:
                return "refused, resumed", self.run(place, trainer)

        def again() -> tuple[str, Any]:
            return "killed, resumed", self.run(place, new("full", "plateau"))

        found = in_child(first)
        # A run that is killed after it has deleted its backups is over, and the next one is new.
        is_over = found is None and not any((place / "backup").glob("backup-*"))
        if found is None:
            found = in_child(again)
            assert found is not None, "a run without a fault was killed"
        outcome, end = found
        if not equal(end, self.end):
            return outcome, "the run ends with other weights, figures or callbacks"
        files = contents(place)
        wrong = [name for name, value in self.contents.items() if not equal(files[name], value)]
        # A logger that cannot write warns and tries again: one fault changes no log.
        if outcome == "finished" and fault.kind == "full":
            wrong = [name for name in wrong if name not in LOGS]
        if is_over:
            wrong = [name for name in wrong if name != "runs"]
        if wrong:
            return outcome, f"other contents of {', '.join(wrong)}"
        left = [name for name in listing(place) if ".onnxfit." in name or "backup" in name]
        if left:
            return outcome, f"leftovers: {', '.join(left[:3])}"
        return outcome, ""
