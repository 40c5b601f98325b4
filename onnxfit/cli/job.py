"""Train with the options of `onnxfit fit`, and save the options for `onnxfit resume`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from onnxfit.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    History,
    Logs,
    ModelCheckpoint,
    TensorBoard,
    file_template,
)
from onnxfit.cli import arrays, labels, ranks, settings
from onnxfit.cli.data_file import STDIN
from onnxfit.cli.models import require_loss
from onnxfit.cli.options import print_figures
from onnxfit.errors import CheckpointError, SettingError, listed_names
from onnxfit.files import read_regular_file, require_suffix, write_atomically
from onnxfit.graph.class_names import ClassNames
from onnxfit.trainable.adapters.peft import FILES as ADAPTER_FILES
from onnxfit.trainer import Trainer
from onnxfit.training import checkpoint

Options = dict[str, Any]  # options of `onnxfit fit`, by click's names, with the given values
WRITTEN_OPTIONS = ("csv", "output", "adapter_output", "tensorboard")
PATH_OPTIONS = (
    "model",
    "data",
    "validation_data",
    "float_model",
    "teacher",
    "checkpoint",
    *WRITTEN_OPTIONS,
)
# Options passed unchanged to Trainer.
TRAINER_OPTIONS = (
    "backend",
    "gradient",
    "device",
    "seed",
    "batch_norm",
    "precision",
    "clip_norm",
    "clip_value",
    "clip_adaptive",
    "accumulate",
    "dynamic_batch",
)


class CheckpointLayout:
    """The files of `--checkpoint`: checkpoints whose names fill a template, and their options.

    All files are in one folder. The template may be a folder, for one file `last.onnxfit`.

    - `path`: the template of the checkpoints' names, including the folder.
    - `name`: the template without the folder.
    - `interrupted`: the checkpoint that is written after Ctrl-C.
    - `options_path`: the JSON file with the options of the training.
    """

    def __init__(self, template: str) -> None:
        if template.endswith(("/", os.sep)) or Path(template).is_dir():
            template = str(Path(template) / f"last{checkpoint.SUFFIX}")
        folder, self.name = file_template.split_path(template)
        self.folder = Path(folder)
        self.path = os.path.join(folder, self.name)
        if file_template.fields(folder):
            raise SettingError(
                "--checkpoint may have fields such as {epoch} in the name of the file, but not of"
                f" its folder, got {template!r}."
            )
        require_suffix(self.path, "a checkpoint", ".ckpt", " --output writes the trained model.")
        # name of the file, with fields by their names
        name = "".join(text + _file_name(field) for text, field in file_template.parts(self.name))
        self.interrupted = self.folder / (name if name == self.name else f"interrupted-{name}")
        self.options_path = self.folder / f"{name}.json"
        self._pattern = file_template.pattern(self.name)

    def matches(self, path: Path) -> bool:
        """Return whether a file has the name of one of these checkpoints."""
        return bool(self._pattern.fullmatch(path.name)) or path.name == self.interrupted.name

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that exist, the newest first."""
        paths = [
            path
            for path in self.folder.glob("*")
            if path.is_file() and path != self.options_path and self.matches(path)
        ]
        return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)

    def write_options(self, fit_options: Options, *, finished: bool = False) -> None:
        """Write the options, and whether the training is finished, next to the checkpoints."""
        if not ranks.is_main():
            return
        contents = {"onnxfit": "fit", "finished": finished, "options": fit_options}
        text = json.dumps(contents, indent=2)
        write_atomically(self.options_path, lambda file: file.write(text.encode()))


def _file_name(field: str | None) -> str:
    """Return the name of a field, without its format, as a part of a file's name."""
    name, _ = file_template.split(field or "", ())
    return re.sub(r"[/\\]", "_", name)


def read_options(path: Path) -> tuple[Options, bool]:
    """Return the options of the training at `path`, and whether it is finished.

    `path` is one of its checkpoints, or their folder. CheckpointError: the folder has no options,
    or options of several trainings.
    """
    folder = path if path.is_dir() else path.parent
    candidates = []
    for options_path in sorted(folder.glob("*.json")):
        try:
            contents = json.loads(read_regular_file(options_path))
            layout = _layout(contents["options"], folder)
            if contents["onnxfit"] == "fit" and (path.is_dir() or layout.matches(path)):
                options = {**contents["options"], "checkpoint": layout.path}
                candidates.append((options_path, options, bool(contents["finished"])))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # not a file of `onnxfit fit`
    if len(candidates) != 1:
        problem = "has no saved options"
        if candidates:
            names = ", ".join(options_path.name for options_path, *_ in candidates)
            problem = (
                f"has the options of {len(candidates)} trainings ({names}). Pass the path of a"
                " checkpoint instead of the folder"
            )
        raise CheckpointError(
            "`onnxfit fit --checkpoint` saves its options next to its checkpoints, but the folder"
            f" {str(folder)!r} {problem}."
        )
    ((_, fit_options, finished),) = candidates
    return fit_options, finished


def _layout(fit_options: Options, folder: Path) -> CheckpointLayout:
    """Return the checkpoint layout of options found in `folder`, which may have been moved.

    Only the name in the saved path counts. CheckpointError: this name is not the name of a file.
    """
    folder = folder.resolve()
    layout = CheckpointLayout(str(folder / CheckpointLayout(fit_options["checkpoint"]).name))
    if layout.folder != folder:  # the name is `..`, or names a folder
        raise CheckpointError(
            f"The options in {str(folder)!r} have --checkpoint {fit_options['checkpoint']!r}, which"
            " does not name a file in this folder."
        )
    return layout


def paths_outside(fit_options: Options) -> list[str]:
    """Return the options, each with its path, whose files would be outside the allowed folders.

    The allowed folders are the folder of `--checkpoint` and the working directory, with symbolic
    links resolved.
    """
    layout = CheckpointLayout(fit_options["checkpoint"])
    roots = [Path(os.path.realpath(root)) for root in (layout.folder, os.curdir)]

    def is_outside(path: Path) -> bool:
        return not any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots)

    named = [name for name in WRITTEN_OPTIONS if fit_options[name]]
    written = [(f"--{name.replace('_', '-')}", Path(fit_options[name])) for name in named]
    # Symbolic links in the folders of checkpoints and TensorBoard would redirect their files.
    for path in layout.folder.glob("*"):
        if path.is_symlink() and (path == layout.options_path or layout.matches(path)):
            written.append(("--checkpoint", path))
    if fit_options["adapter_output"]:
        for name in ADAPTER_FILES:
            path = Path(fit_options["adapter_output"]) / name
            written += [("--adapter-output", path)] if path.is_symlink() else []
    # A folder that is itself outside is not searched, because it could be as large as "/".
    if fit_options["tensorboard"] and not is_outside(Path(fit_options["tensorboard"])):
        # Runs are subfolders, and TensorBoard itself skips files that are links.
        below = Path(fit_options["tensorboard"]).glob("*")
        written += [("--tensorboard", path) for path in below if path.is_symlink()]
    return [f"{option} {os.fspath(path)!r}" for option, path in written if is_outside(path)]


def with_absolute_paths(fit_options: Options) -> Options:
    """Return options that mean the same in another working directory."""

    def absolute(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [absolute(path) for path in value]
        if value in (None, STDIN):
            return value
        slash = "/" if str(value).endswith("/") else ""
        return os.path.abspath(value) + slash

    return {
        name: absolute(value) if name in PATH_OPTIONS else value
        for name, value in fit_options.items()
    }


def run(fit_options: Options, *, quiet: bool, as_json: bool, start: Path | None = None) -> None:
    """Train with the given options, and print the loss and metrics.

    If the checkpoint `start` is given, training continues from it. After Ctrl-C, the state is saved
    if the options have a checkpoint. Otherwise the weights so far are written to the outputs. The
    process then exits with 130.
    """
    layout = None
    if fit_options["checkpoint"]:
        layout = CheckpointLayout(fit_options["checkpoint"])
    trainer = _loaded(start, fit_options) if start else _trainer(fit_options)
    request = arrays.DataRequest(trainer.inputs, list(trainer.objectives), fit_options["label"])
    data = arrays.read(fit_options["data"], request)
    validation = None
    if fit_options["validation_data"]:
        validation = arrays.read(fit_options["validation_data"], request)
    classes, data, validation = labels.encode_for_training(trainer, data, validation)
    stopping = _early_stopping(fit_options)
    callbacks = [*([stopping] if stopping else []), *_writers(fit_options, layout)]
    if layout:
        layout.write_options(fit_options)
    history = _fit(trainer, fit_options, data, validation, callbacks, layout, quiet)
    _write_outputs(trainer, fit_options)
    if layout:
        layout.write_options(fit_options, finished=True)
    _print_report(trainer, history, stopping, classes, fit_options["output"], as_json)


def _write_outputs(trainer: Trainer, fit_options: Options) -> list[str]:
    """Write the files of --output and --adapter-output, and return their paths."""
    output, adapters = fit_options["output"], fit_options["adapter_output"]
    if output and trainer.is_main:
        trainer.export(output)
    if adapters:
        trainer.export_adapter(adapters)
    return [path for path in (output, adapters) if path]


def _trainer(fit_options: Options) -> Trainer:
    return require_loss(Trainer(fit_options["model"], **trainer_settings(fit_options)))


def _loaded(start: Path, fit_options: Options) -> Trainer:
    """Return the Trainer of a checkpoint, with the teacher, which a checkpoint does not contain."""
    teacher = fit_options["teacher"]
    if teacher is None:
        return Trainer.load(start)
    return Trainer.load(start, teacher=_teacher(fit_options))


def _teacher(fit_options: Options) -> Any:
    return settings.parse_distillation(fit_options["distillation"], fit_options["teacher"])


def trainer_settings(fit_options: Options) -> dict[str, Any]:
    """Return the arguments of Trainer. UnknownNameError: a name or setting does not exist."""
    return {
        "weights": list(fit_options["weights"]) or None,
        "stop_gradients": list(fit_options["stop_gradients"]) or None,
        "loss": settings.parse_loss(fit_options["loss"]),
        "penalty": settings.parse_penalty(fit_options["penalty"]),
        "optimizer": settings.parse_optimizer(
            fit_options["optimizer"], fit_options["learning_rate"]
        ),
        "metrics": settings.parse_metrics(fit_options["metrics"]),
        "freeze_rows": settings.parse_freeze_rows(fit_options["freeze_rows"]),
        "adapters": settings.parse_lora(fit_options["lora"]),
        "quantization": settings.parse_quantization(
            fit_options["quantization"], fit_options["float_model"]
        ),
        "teacher": _teacher(fit_options),
        "fixed_inputs": settings.parse_fixed_inputs(fit_options["fixed_inputs"]),
        "batch_axes": settings.parse_batch_axes(fit_options["batch_axes"]),
        **{name: fit_options[name] for name in TRAINER_OPTIONS},
    }


def _early_stopping(fit_options: Options) -> EarlyStopping | None:
    patience = fit_options["early_stopping"]
    if patience is None:
        return None
    validates = fit_options["validation_data"] or fit_options["validation_split"]
    monitor = "val_loss" if validates else "loss"
    return EarlyStopping(monitor=monitor, patience=patience, restore_best_weights=True)


def _writers(fit_options: Options, layout: CheckpointLayout | None) -> list[Callback]:
    """Return the callbacks that write the files of the options."""
    callbacks: list[Callback] = []
    if layout:
        callbacks.append(ModelCheckpoint(layout.path))
    if fit_options["csv"]:
        callbacks.append(CSVLogger(fit_options["csv"]))
    if fit_options["tensorboard"]:
        callbacks.append(TensorBoard(fit_options["tensorboard"]))
    return callbacks


def _fit(
    trainer: Trainer,
    fit_options: Options,
    data: arrays.Data,
    validation: arrays.Data | None,
    callbacks: list[Callback],
    layout: CheckpointLayout | None,
    quiet: bool,
) -> History:
    """Train until the end, or until a signal ends the process."""
    interruption = Interruption()
    # A rank may get a signal while it saves the state after a signal to another rank.
    with interruption.listening():
        try:
            return trainer.fit(
                *data,
                epochs=fit_options["epochs"],
                batch_size=fit_options["batch_size"],
                validation_data=validation,
                validation_split=fit_options["validation_split"] or 0.0,
                callbacks=[*callbacks, interruption],
                verbose=0 if quiet else "auto",
            )
        except Interrupted as interrupted:
            _save_and_exit(trainer, fit_options, layout, interrupted.signal)


def _print_report(
    trainer: Trainer,
    history: History,
    stopping: EarlyStopping | None,
    classes: ClassNames,
    output: str | None,
    as_json: bool,
) -> None:
    """Print the loss and metrics of the last epoch, or of the best epoch with early stopping."""
    epochs = history.epoch
    best = len(epochs) - 1
    if stopping and stopping.best_epoch in epochs:
        best = epochs.index(stopping.best_epoch)
    figures = {
        name: values[best] for name, values in history.history.items() if len(values) == len(epochs)
    }
    report: dict[str, Any]
    if as_json:
        report = {
            "figures": figures,
            "epochs": len(epochs),
            "stopped": trainer.stop_reason,
            "history": history.history,
            "classes": classes,
            "output": output,
        }
    else:
        report = {"epochs": len(epochs)}
        if stopping:
            report["best_epoch"] = best + 1
        report |= figures
        for name, names in classes.items():
            key = "classes" if len(classes) == 1 else f"classes of {name}"
            report[key] = listed_names(names)
    print_figures(report, as_json=as_json)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a request to terminate, raised between two batches or epochs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


class Interruption(Callback):
    """Callback that stops training after a signal, at the end of the batch or validation.

    A second signal stops the process at once. With several ranks, all stop at the same batch, no
    matter which rank received the signal.
    """

    # Loggers are called for the same batch or epoch when training is resumed.
    phase: ClassVar[str] = "checkpoint"
    ranks: ClassVar[str | None] = "all"

    def __init__(self) -> None:
        self.signal = 0  # number of the signal that this process received
        self._signal_of_all = 0

    def needs_synced_logs(self, batch: int) -> bool:
        # Between updates, the ranks have different accumulated gradients.
        if (batch + 1) % self.trainer.accumulate == 0:
            self._signal_of_all = ranks.signal_of_all(self.signal)
        return self._signal_of_all != 0

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._raise(self.signal if self.trainer.world_size == 1 else self._signal_of_all)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # After the last epoch, training ends normally, so there is nothing to interrupt.
        if not self.trainer.stop_training and epoch + 1 < self.params["epochs"]:
            self._raise(ranks.signal_of_all(self.signal))

    def _raise(self, number: int) -> None:
        if number:
            raise Interrupted(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals inside the block, except signals that the process ignores (nohup)."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGINT, signal.SIGTERM] if in_main_thread else []
        handlers = {number: signal.getsignal(number) for number in numbers}

        def on_signal(number: int, _: FrameType | None) -> None:
            self.signal = number
            for other, handler in handlers.items():
                signal.signal(other, handler)

        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _save_and_exit(
    trainer: Trainer, fit_options: Options, layout: CheckpointLayout | None, number: int
) -> NoReturn:
    """Save the state, print how to continue, and exit with the status of a signal."""
    if layout and trainer.is_main:
        path = layout.interrupted
        trainer.save(path)
        option = " --allow-paths-outside" if paths_outside(fit_options) else ""
        if trainer.world_size > 1:
            option += f" --ranks {trainer.world_size}"
        if STDIN in (*fit_options["data"], *fit_options["validation_data"]):
            option += " < DATA"
        ranks.say(f"Interrupted. The training state was saved to {path}. To continue:")
        ranks.say(f"  onnxfit resume {shlex.quote(str(path))}{option}")
    elif not layout:
        # One of the paths exists: `fit` needs one of --output, --adapter-output and --checkpoint.
        written = " and ".join(_write_outputs(trainer, fit_options))
        ranks.say(
            f"Interrupted after {trainer.global_batch} batches. The weights"
            f" trained so far were written to {written}. With --checkpoint FILE, `onnxfit resume`"
            " could continue from here."
        )
    ranks.wait_for_main("the end of an interrupted fit")
    raise SystemExit(128 + number)
