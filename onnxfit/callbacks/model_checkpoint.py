"""Save the training state, or only the weights, during training."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Union

from onnxfit.callbacks import file_template
from onnxfit.callbacks.background import SavingCallback, require_adapters, require_save_freq
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor, may_log
from onnxfit.callbacks.progress import print_line
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.checks import check_arguments, require_at_least
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.files import (
    NUMBER,
    STEP,
    ValueType,
    list_of,
    optional,
    pair_of,
    remove_leftovers,
    require_suffix,
    require_types,
    write_atomically,
)
from onnxfit.graph.tensors import write_safetensors

__all__ = ["ModelCheckpoint"]

MAX_PATH_CHARACTERS = 4096  # of a path that was read from a file


class ModelCheckpoint(SavingCallback, StatefulCallback):
    """Save a checkpoint after epochs, batches or steps: all of them, the best ones, or the last.

    - `filepath`: a file, or a template such as "checkpoints/{epoch:03d}-{val_loss:.3f}.ckpt". Its
      fields are `epoch` (counted from 1, as in Keras and in the progress bar), `step`
      (`trainer.global_step`) and every name in the logs, also one with ":", "/", "." or "[", such
      as "{val_Identity:0_loss:.3f}". Missing folders are created. An existing file is replaced
      atomically: if the process is killed, either the old file or the complete new file remains.
    - `monitor`: the metric that ranks checkpoints. NaN ranks worst.
    - `verbose`: 1 prints a line for every checkpoint; 0 is silent.
    - `save_best_only`: save only if the metric is better than ever before. If the logs lack it,
      nothing is saved, with one warning.
    - `save_weights_only`: instead of the training state (`trainer.save`, for `Trainer.load`), write
      `trainer.get_weights()` as safetensors; or, if `filepath` ends in ".onnx", the inference model
      of `trainer.export`.
    - `adapters_only`: leave the frozen model out of the training state (`trainer.save(path,
      adapters_only=True)`). `Trainer.load(path, model_onnx=...)` then needs the same model.
    - `mode`: "min", "max", or "auto" (the metric's own mode; "min" for a loss).
    - `save_freq`: "epoch", or a number n >= 1: instead of after epochs, save after every n batches,
      with the running metrics of the epoch.
    - `initial_value_threshold`: save nothing while the metric is not better than this.
    - `every_n_epochs`: save after every n-th epoch, n >= 1.
    - `every_n_steps`: a number n >= 1: instead of after epochs, save after every n updates (with
      accumulated gradients there are fewer updates than batches).
    - `top_k`: keep only this many of the best files written in this `fit`, and delete the others.
      None keeps all files; 0 writes only the file of `save_last`. The file from which training
      resumed is never deleted, and neither is any file whose name does not fit `filepath`.
    - `save_last`: each time a checkpoint is due, also write "last" with the suffix of `filepath`,
      in the same folder.
    - `background`: whether training waits only for a copy of its state in memory, and continues
      while the copy is written. None does so if the state has at most 512 MB; a larger state is
      written without a copy, and training waits. A file in the background is complete when the next
      save begins, and all files are complete when `fit` returns or raises. Otherwise a file is
      complete when the hook returns, so other callbacks may read it.

    Afterwards `best_model_path` and `best_model_score` are the best file and its metric, and
    `last_model_path` is the file written last. A checkpoint contains the state that every callback,
    including this one, has after the epoch. Every `fit` begins with a fresh state unless a saved
    state was loaded. With several processes, rank 0 writes the files, and all processes know their
    paths. With `average_every=k`, `save_freq` and `every_n_steps` must be multiples of k.

    SettingError: a setting is out of its range, `filepath` has the suffix of another format (such
    as `.keras`, `.h5` or `.pt`), or, before the first step, `monitor` decides what
    is saved and names nothing that the `fit` can compute. UnknownNameError (a KeyError), before the
    first step: the template names a metric that the `fit` does not compute; at the first save, if
    another callback might have logged it. CheckpointError: a file could not be written; in the
    background, the next save or the end of training raises it.

    >>> best = ModelCheckpoint("best.ckpt", monitor="val_accuracy", save_best_only=True)
    >>> ModelCheckpoint("best.keras")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: 'best.keras' would contain a checkpoint of onnxfit, but .keras ...
    """

    phase: ClassVar[str] = "checkpoint"
    # All ranks decide by the same logs, so that all know the paths. Only rank 0 writes.
    ranks: ClassVar[str] = "all"
    state_attributes = (
        "best_model_path",
        "best_model_score",
        "kept",
        "last_model_path",
        "step",
        "written",
    )

    @check_arguments
    def __init__(
        self,
        filepath: Union[str, os.PathLike[str]],
        *,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        adapters_only: bool = False,
        mode: str = "auto",
        save_freq: Union[str, int] = "epoch",
        initial_value_threshold: float | None = None,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        top_k: int | None = None,
        save_last: bool = False,
        background: bool | None = None,
    ) -> None:
        self.filepath = os.fspath(filepath)
        self.monitor = Monitor("ModelCheckpoint", monitor, mode)
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.adapters_only = adapters_only
        self.save_freq = save_freq
        self.initial_value_threshold = initial_value_threshold
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.top_k = top_k
        self.save_last = save_last
        self.background = background
        self._check()
        self._event: Logs | None = None
        self._to_write: list[str] = []
        self._to_delete: list[str] = []
        self._epoch = 0
        self._protected: set[str] = set()
        self.reset()

    def _check(self) -> None:
        require_at_least(
            "ModelCheckpoint",
            1,
            every_n_epochs=self.every_n_epochs,
            every_n_steps=self.every_n_steps,
        )
        require_at_least("ModelCheckpoint", 0, top_k=self.top_k)
        require_save_freq("ModelCheckpoint", self.save_freq)
        if self.save_freq != "epoch" and self.every_n_steps is not None:
            raise SettingError(
                "ModelCheckpoint got both save_freq (batches) and every_n_steps (updates). Pass one"
                " of them."
            )
        if self.top_k == 0 and not self.save_last:
            raise SettingError(
                "ModelCheckpoint(top_k=0) would never save a checkpoint. Pass save_last=True, or"
                " remove the callback."
            )
        if self.adapters_only and self.save_weights_only:
            raise SettingError(
                "ModelCheckpoint got both save_weights_only=True and adapters_only=True. Pass"
                " save_weights_only=True alone, which already saves only the adapters' weights."
            )
        if not self.save_weights_only:
            instead = " To write the model for inference, pass save_weights_only=True."
            require_suffix(self.filepath, "a checkpoint of onnxfit", ".ckpt", instead)
        elif not self.filepath.endswith(".onnx"):
            instead = " The suffix .onnx writes the model for inference."
            require_suffix(self.filepath, "weights", ".safetensors", instead)
        fields = file_template.fields(self.filepath)
        if any(not field.partition(":")[0] or field.isdigit() for field in fields):
            raise SettingError(
                "ModelCheckpoint needs a name in every field of filepath, as in"
                f" '{{epoch}}-{{val_loss:.3f}}.ckpt', got {self.filepath!r}."
            )
        if self.top_k is not None and self.top_k > 1 and not fields:
            raise SettingError(
                f"ModelCheckpoint(top_k={self.top_k}) writes several files and needs a filepath"
                f" with a field, such as {{epoch}}, got {self.filepath!r}."
            )

    @property
    def state_key(self) -> str:
        return f"ModelCheckpoint({self.filepath})"

    @property
    def folder(self) -> Path:
        """Innermost folder of `filepath` whose name has no field."""
        folder, _ = file_template.split_path(self.filepath)
        while file_template.fields(folder):
            folder, _ = file_template.split_path(folder)
        return Path(file_template.fill(folder, {}))

    def _folders(self) -> list[Path]:
        """Return the folders that may have files of the template."""
        levels = len(Path(self.filepath).parent.parts) - len(self.folder.parts)
        return [self.folder, *self.folder.glob("/".join(["*"] * levels) or "[]")]

    @property
    def last_path(self) -> str:
        """Path of the file that `save_last` writes, in `folder`."""
        _, name = file_template.split_path(self.filepath)
        literal = "".join(text for text, _ in file_template.parts(name))
        return str(self.folder / f"last{Path('_' + literal).suffix}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        - `state`: the dict that `state_dict` returned.

        CheckpointError: a value has another type, or a path is not a file of this callback.
        """
        path = ValueType(f"a file of the template {self.filepath!r}", self._is_own)
        score = optional(NUMBER)
        types = {
            "best_model_path": optional(path),
            "best_model_score": score,
            "kept": list_of(pair_of(path, score)),
            "last_model_path": optional(path),
            "step": STEP,
            "written": list_of(path),
        }
        require_types(f"The saved state of {self.state_key}", state, types)
        super().load_state_dict(state)

    def _is_own(self, path: Any) -> bool:
        """Return whether a value read from a file is a path that this callback may write."""
        if not isinstance(path, str) or len(path) > MAX_PATH_CHARACTERS:
            return False
        # A saved `last_path` has the separators of the system on which it was saved.
        is_last = path.replace("\\", "/") == self.last_path.replace("\\", "/")
        return is_last or bool(file_template.pattern(self.filepath).fullmatch(path))

    def _delete(self, path: str) -> None:
        """Delete one of this callback's files."""
        folder = os.path.realpath(self.folder)
        parent = os.path.realpath(Path(path).parent)
        if not Path(parent).is_relative_to(folder):
            raise CheckpointError(
                f"ModelCheckpoint does not delete {path!r}, because a symbolic link in this path"
                f" leads out of the folder {str(self.folder)!r} to {parent!r}. Remove the link."
            )
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"ModelCheckpoint cannot delete {path!r}: {error.strerror or error}."
            ) from error

    def overrides(self, hook: str) -> bool:
        if hook == "on_train_batch_end" and not self._saves_at_batches:
            return False
        return super().overrides(hook)

    @property
    def _saves_at_batches(self) -> bool:
        return self.every_n_steps is not None or self.save_freq != "epoch"

    @property
    def _monitor_decides(self) -> bool:
        """Whether the monitored metric decides what is saved."""
        return bool(self.save_best_only or self.top_k or self.initial_value_threshold is not None)

    def reset(self) -> None:
        self.best_model_path: str | None = None
        self.best_model_score: float | None = None
        self.last_model_path: str | None = None
        # [path, score] of the files of this fit that top_k keeps, the best first.
        self.kept: list[list[Any]] = []
        self.step = -1  # the step at which a checkpoint was last due
        self.written: list[str] = []  # the files of that step

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        if self._monitor_decides:
            self.monitor.require(self.callbacks, at_batches=self._saves_at_batches)
        self._require_fields()
        if self.adapters_only:
            require_adapters(self.trainer.settings)
        self.monitor.start(self.trainer)
        if self.trainer.is_main:
            for folder in self._folders():
                remove_leftovers(folder)
        # If the loaded state has the trainer's step, it was read from one of the files of that
        # step. Training resumes from that file, so it must not be deleted.
        resumed = self.written if self.step == self.trainer.global_step else []
        self._protected = {os.path.realpath(path) for path in resumed}
        self.step = self.trainer.global_step

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._save(logs, at_epoch_end=True)

    def _save(self, logs: Logs, at_epoch_end: bool = False) -> None:
        # Every ModelCheckpoint decides before the first of them saves, so that a file contains the
        # state of all of them after this event.
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback._event is not logs:
                callback._decide(logs, at_epoch_end)
        if self.trainer.is_main and (self._to_write or self._to_delete):
            self.finish_save()
            self.save(self._job())

    def _job(self) -> Callable[[], None]:
        """Return the function that writes and deletes the files of this event."""
        write = self._writer()
        to_write = self._to_write
        to_delete = self._to_delete
        protected = self._protected

        def job() -> None:
            for path in to_write:
                write(path)
            for path in to_delete:  # only once the better files exist
                if os.path.realpath(path) not in protected:
                    self._delete(path)

        return job

    def _decide(self, logs: Logs, at_epoch_end: bool) -> None:
        """Decide which files to write and delete; set the state to that after this event."""
        self._event = logs
        self._to_write = []
        self._to_delete = []
        if not self._is_due(at_epoch_end):
            return
        self.step = self.trainer.global_step
        score = self._score(logs)
        if self._qualifies(score):
            path = self._fill(logs)
            self._to_write.append(path)
            self._print(path, score)
            if score is not None and self.monitor.better(score, self.best_model_score):
                self.best_model_path = path
                self.best_model_score = score
            self._rank(path, score)
        if self.save_last:
            self._to_write.append(self.last_path)
        if self._to_write:
            self.last_model_path = self._to_write[-1]
        self.written = list(self._to_write)

    def _is_due(self, at_epoch_end: bool) -> bool:
        if isinstance(self.save_freq, int):
            return not at_epoch_end and self.trainer.global_batch % self.save_freq == 0
        if self.every_n_steps is None:
            return at_epoch_end and (self._epoch + 1) % self.every_n_epochs == 0
        # Do not save twice at one step: with accumulated gradients several batches have the same
        # step, and the end of an epoch may bring a last update.
        step = self.trainer.global_step
        return step != self.step and step % self.every_n_steps == 0

    def _score(self, logs: Logs) -> float | None:
        """Return the monitored metric, or None if it is NaN or absent.

        The monitor warns about an absent metric only if the metric decides what is saved.
        """
        decides = self._monitor_decides
        score = self.monitor.read(logs) if decides else logs.get(self.monitor.name)
        return None if score is None or math.isnan(score) else score

    def _qualifies(self, score: float | None) -> bool:
        """Return whether a checkpoint with this score is saved."""
        threshold = self.initial_value_threshold
        if threshold is not None and (score is None or not self.monitor.better(score, threshold)):
            return False
        if self.save_best_only and (
            score is None or not self.monitor.better(score, self.best_model_score)
        ):
            return False
        if self.top_k is None or len(self.kept) < self.top_k:
            return True
        return self.top_k > 0 and score is not None and self.monitor.better(score, self.kept[-1][1])

    def _rank(self, path: str, score: float | None) -> None:
        """Insert a file among the kept files, behind equal scores; mark the worst for deletion."""
        if not self.top_k:
            return
        self.kept = [entry for entry in self.kept if entry[0] != path]
        rank = sum(score is None or not self.monitor.better(score, kept) for _, kept in self.kept)
        self.kept.insert(rank, [path, score])
        self._to_delete = [worst for worst, _ in self.kept[self.top_k :]]
        self.kept = self.kept[: self.top_k]

    def _print(self, path: str, score: float | None) -> None:
        if not (self.verbose and self.trainer.is_main):
            return
        best = self.best_model_score
        change = ""
        if score is not None:
            change = f", {self.monitor.name} is {score:.6g}"
        if score is not None and best is not None:
            change += f" (best so far {best:.6g})"
        print_line(f"Epoch {self._epoch + 1}: ModelCheckpoint saves {path}{change}.")

    def _fill(self, logs: Logs) -> str:
        own = {"epoch": self._epoch + 1, "step": self.trainer.global_step}
        return file_template.fill(self.filepath, {**logs, **own})

    def _require_fields(self) -> None:
        """Raise the errors of `_fill` before the first step, for the figures of the running `fit`.

        No error is raised if another callback may log a figure.
        """
        callbacks = self.callbacks
        figures = callbacks.batch_figures if self._saves_at_batches else callbacks.figures
        if figures is not None and not any(map(may_log, callbacks)):
            values = {**dict.fromkeys(figures, 1.0), "epoch": 1, "step": 1}
            file_template.fill(self.filepath, values)

    def _writer(self) -> Callable[[str], object]:
        """Return a function that writes the current training state to a path."""
        copy = self.copies_state
        if not self.save_weights_only:
            return self.trainer.snapshot(adapters_only=self.adapters_only, copy=copy).write
        if self.filepath.endswith(".onnx"):
            return self.trainer.model_snapshot(copy=copy).write
        weights = self.trainer.get_weights(copy=copy)
        return lambda path: write_atomically(path, lambda file: write_safetensors(file, weights))
