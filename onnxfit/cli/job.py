"""A training as the command line gives it: run it, note it beside its checkpoints, go on with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import click

from onnxfit.callbacks import Callback, CSVLogger, EarlyStopping, Logs, ModelCheckpoint, TensorBoard
from onnxfit.cli import arrays, options, settings
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.files import write_atomically
from onnxfit.trainer import Trainer
from onnxfit.training import checkpoint

Options = dict[str, Any]  # of `onnxfit fit`, by click's names for them, as typed
_NUMBER = r"[-+ ,.%\da-f]*(?:nan|inf)?"  # what a field of a template becomes
PATHS = ("model", "data", "validation_data", "tensorboard", "checkpoint", "csv", "output")


class CheckpointLayout:
    """Where a training's checkpoints lie: files of one folder whose names fill a template, and its
    options beside them.
    """

    def __init__(self, template: str) -> None:
        path = Path(template)
        if template.endswith(("/", os.sep)) or path.is_dir():
            path = path / f"last{checkpoint.SUFFIX}"
        self.path = path
        self.folder = path.parent
        parts = list(_parse(path.name))
        if any(field is not None for _, field in _parse(str(self.folder))):
            raise SettingError(
                "--checkpoint takes fields such as {epoch} in the name of the file, not of its"
                f" folder; got {template!r}."
            )
        if path.suffix == ".onnx":
            raise SettingError(
                f"--checkpoint writes a whole training state and no .onnx, got {template!r};"
                " --output writes the model."
            )
        plain = "".join(text + (field or "") for text, field in parts)
        self.interrupted = self.folder / (plain if plain == path.name else f"interrupted-{plain}")
        self.note = self.folder / f"{plain}.json"
        self._names = re.compile(
            "".join(
                re.escape(text) + (_NUMBER if field is not None else "") for text, field in parts
            )
        )

    def has(self, path: Path) -> bool:
        """Whether a file is called like one of these checkpoints."""
        return bool(self._names.fullmatch(path.name)) or path.name == self.interrupted.name

    def checkpoints(self) -> list[Path]:
        """The checkpoints there are, the newest first."""
        found = [
            path
            for path in self.folder.glob("*")
            if path.is_file() and path != self.note and self.has(path)
        ]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def write_note(self, typed: Options, *, finished: bool = False) -> None:
        text = json.dumps({"onnxfit": "fit", "finished": finished, "options": typed}, indent=2)
        write_atomically(self.note, lambda file: file.write(text.encode()))


def _parse(template: str) -> Iterator[tuple[str, str | None]]:
    try:
        for text, field, _, _ in string.Formatter().parse(template):
            yield text, field
    except ValueError as error:
        raise SettingError(
            f"--checkpoint cannot read the template {template!r}: {error}."
        ) from None


def note_of(path: Path) -> tuple[Options, bool]:
    """The options noted beside the checkpoints of a folder, or beside one of them, and whether that
    training came to its end.
    """
    folder = path if path.is_dir() else path.parent
    found = []
    for note in sorted(folder.glob("*.json")):
        try:
            contents = json.loads(note.read_bytes())
            if contents["onnxfit"] == "fit" and (
                path.is_dir() or _place(contents["options"], folder).has(path)
            ):
                found.append((note, contents))
        except (ValueError, KeyError, TypeError):
            continue  # somebody else's
    if len(found) != 1:
        there = (
            f"has those of {len(found)} ({', '.join(note.name for note, _ in found)}): name a"
            " checkpoint"
            if found
            else "has none"
        )
        raise CheckpointError(
            f"`onnxfit fit --checkpoint` notes its options beside its checkpoints; {str(folder)!r}"
            f" {there}."
        )
    contents = found[0][1]
    return {
        **contents["options"],
        "checkpoint": str(_place(contents["options"], folder).path),
    }, bool(contents["finished"])


def _place(typed: Options, folder: Path) -> CheckpointLayout:
    """The place of noted options, in the folder where they were found: it may have been moved."""
    return CheckpointLayout(str(folder.resolve() / CheckpointLayout(typed["checkpoint"]).path.name))


def absolute(typed: Options) -> Options:
    """Options that mean the same in another working folder."""

    def resolved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [resolved(one) for one in value]
        slash = "/" if str(value).endswith("/") else ""
        return None if value is None else os.path.abspath(value) + slash

    return {name: resolved(value) if name in PATHS else value for name, value in typed.items()}


def run(typed: Options, *, quiet: bool, as_json: bool, start: Path | None = None) -> None:
    """Train as the options say, from the beginning or from a checkpoint; print the figures.

    After Ctrl-C the state is saved where the options have a checkpoint, and the process exits with
    130.
    """
    place = CheckpointLayout(typed["checkpoint"]) if typed["checkpoint"] else None
    trainer = Trainer.load(start) if start else _trainer(typed)
    wanted = arrays.DataRequest(
        arrays.inputs_of(trainer.model), list(trainer.objectives), typed["label"]
    )
    x, y, sample_weight = arrays.read(typed["data"], wanted)
    validation = arrays.read(typed["validation_data"], wanted) if typed["validation_data"] else None
    stopping = None
    if typed["early_stopping"] is not None:
        monitor = "val_loss" if validation or typed["validation_split"] else "loss"
        stopping = EarlyStopping(
            monitor=monitor, patience=typed["early_stopping"], restore_best_weights=True
        )
    interruption = Interruption()
    callbacks: list[Callback] = [stopping] if stopping else []
    if place:
        callbacks.append(ModelCheckpoint(place.path))
    if typed["csv"]:
        callbacks.append(CSVLogger(typed["csv"]))
    if typed["tensorboard"]:
        callbacks.append(TensorBoard(typed["tensorboard"]))
    if place:
        place.write_note(typed)
    try:
        with interruption.listening():
            history = trainer.fit(
                x,
                y,
                sample_weight,
                epochs=typed["epochs"],
                batch_size=typed["batch_size"],
                validation_data=validation,
                validation_split=typed["validation_split"] or 0.0,
                callbacks=[*callbacks, interruption],
                verbose=0 if quiet else "auto",
            )
    except Interrupted as interrupted:
        _leave(trainer, place, interrupted.signal)
    if typed["output"]:
        trainer.export(typed["output"])
    if place:
        place.write_note(typed, finished=True)
    epochs = history.epoch
    best = (
        epochs.index(stopping.best_epoch)
        if stopping and stopping.best_epoch in epochs
        else len(epochs) - 1
    )
    figures = {
        name: values[best] for name, values in history.history.items() if len(values) == len(epochs)
    }
    if as_json:
        report = {
            "figures": figures,
            "epochs": len(epochs),
            "stopped": trainer.stop_reason,
            "history": history.history,
        }
        options.print_figures({**report, "output": typed["output"]}, as_json=True)
    else:
        options.print_figures(
            {"epochs": len(epochs), **({"best_epoch": best + 1} if stopping else {}), **figures},
            as_json=False,
        )


def _trainer(typed: Options) -> Trainer:
    loss = settings.loss_of(typed["loss"])
    return Trainer(
        typed["model"],
        weights=list(typed["weights"]) or None,
        loss=loss,
        penalty=settings.penalty_of(typed["penalty"]),
        optimizer=settings.optimizer_of(typed["optimizer"], typed["learning_rate"]),
        metrics=settings.metrics_of(typed["metrics"], loss),
        **{
            name: typed[name]
            for name in (
                "backend",
                "gradient",
                "device",
                "seed",
                "batch_norm",
                "clip_norm",
                "clip_value",
                "accumulate",
            )
        },
    )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C (or a request to terminate) was obeyed where nothing is half done."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


class Interruption(Callback):
    """Stops training at the end of the batch, or validation, in which a signal comes; a second one
    stops at once, wherever that is.
    """

    phase: ClassVar[str] = "checkpoint"  # loggers are told of this moment when training goes on

    def __init__(self) -> None:
        self.signal = 0

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._obey()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # else it is at its end anyway
        if not self.trainer.stop_training and epoch + 1 < self.params["epochs"]:
            self._obey()

    def _obey(self) -> None:
        if self.signal:
            raise Interrupted(self.signal)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals meanwhile, except those that the process was told to ignore (nohup)."""
        numbers = (
            [signal.SIGINT, signal.SIGTERM]
            if threading.current_thread() is threading.main_thread()
            else []
        )
        before = {number: signal.getsignal(number) for number in numbers}

        def note(number: int, _: FrameType | None) -> None:
            self.signal = number
            for other, handler in before.items():
                signal.signal(other, handler)

        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(trainer: Trainer, place: CheckpointLayout | None, number: int) -> None:
    """Save what there is, say how to go on, and exit as a process that the signal ended."""
    if place:
        trainer.save(place.interrupted)
        click.echo(f"Interrupted; the state is in {place.interrupted}. To go on:", err=True)
        click.echo(f"  onnxfit resume {shlex.quote(str(place.interrupted))}", err=True)
    else:
        click.echo(
            "Interrupted; nothing is saved. With --checkpoint FILE, `onnxfit resume` could go on"
            " from here.",
            err=True,
        )
    raise SystemExit(128 + number)
