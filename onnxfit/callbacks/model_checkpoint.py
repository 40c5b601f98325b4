"""Save the training state, or only the weights, as training goes."""

from __future__ import annotations

import math
import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Union

from onnxfit.callbacks.background import SavingCallback
from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.monitor import Monitor
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.files import remove_leftovers, write_atomically
from onnxfit.graph.tensors import write_model, write_safetensors

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(SavingCallback, StatefulCallback):
    """Saves a checkpoint after epochs or steps: all of them, the best ones, the last.

    - `path`: a file, or a template such as "checkpoints/{epoch:03d}-{val_loss:.3f}.ckpt" whose
      fields are `epoch` (from 0, as in logs and hooks), `step` (`trainer.global_step`) and every
      name in the logs. Missing folders are made. A file of that name is replaced, in one move: it
      is the old one or the whole new one, whenever the process is killed.
    - `monitor`, `mode`: the figure that ranks checkpoints, as for EarlyStopping. NaN ranks worst.
    - `save_best_only`: save only where the figure is better than ever before; nothing, with one
      warning, where the logs lack it.
    - `save_weights_only`: not the training state (`trainer.save`, for `Trainer.load`) but what
      `trainer.get_weights()` gives, as safetensors; or, where `path` ends in ".onnx", the inference
      model that `trainer.export` gives.
    - `every_n_epochs` >= 1: after the epochs for which `(epoch + 1) % every_n_epochs == 0`.
    - `every_n_steps` >= 1: instead of after epochs, after every so many updates, with the running
      figures of the epoch.
    - `top_k`: keep only so many of the best files written in this `fit`, and delete the others;
      None keeps all, 0 writes none but the last. The file from which training resumed is never
      deleted.
    - `save_last`: besides, at each of those occasions, "last" with the suffix of `path`, beside it.
    - `initial_value_threshold`: nothing is saved while the figure is not better than this.
    - `background`: training waits only for a copy of its state in memory, and goes on while that is
      written. A file is whole when the next one is begun, and all are when `fit` returns or raises.
      False: it is whole when the hook returns, which other callbacks' hooks may rely upon.

    Afterwards `best_model_path` and `best_model_score` are the best file and its figure,
    `last_model_path` the file written last. A checkpoint has the state of every callback as it is
    after the epoch, this one's included. Every `fit` begins afresh unless a saved state was loaded.

    SettingError: a setting out of its range. UnknownNameError (a KeyError) at the first save: the
    template names a figure that the logs lack. CheckpointError: a file could not be written; in the
    background, it comes with the next one or at the end of training.

    >>> ModelCheckpoint("model.onnx")
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: ModelCheckpoint needs save_weights_only=True to write ONNX, got 'model.onnx'.
    """

    phase: ClassVar[str] = "checkpoint"
    remembered = (
        "best_model_path",
        "best_model_score",
        "kept",
        "last_model_path",
        "step",
        "written",
    )

    def __init__(
        self,
        path: Union[str, os.PathLike[str]],
        monitor: str = "val_loss",
        mode: str = "auto",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        every_n_epochs: int = 1,
        every_n_steps: int | None = None,
        top_k: int | None = None,
        save_last: bool = False,
        initial_value_threshold: float | None = None,
        background: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self.monitor = Monitor("ModelCheckpoint", monitor, mode)
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.top_k = top_k
        self.save_last = save_last
        self.initial_value_threshold = initial_value_threshold
        self.background = background
        self._check()
        self._event: Logs | None = None
        self._to_write: list[str] = []
        self._to_delete: list[str] = []
        self._epoch = 0
        self._protected: set[str] = set()
        self.reset()

    def _check(self) -> None:
        for name, least in (("every_n_epochs", 1), ("every_n_steps", 1), ("top_k", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise SettingError(f"ModelCheckpoint needs {name} >= {least}, got {value}.")
        if self.top_k == 0 and not self.save_last:
            raise SettingError(
                "ModelCheckpoint with top_k=0 saves nothing: add save_last=True, or drop it."
            )
        if self.path.endswith(".onnx") and not self.save_weights_only:
            raise SettingError(
                f"ModelCheckpoint needs save_weights_only=True to write ONNX, got {self.path!r}."
            )
        fields = _fields(self.path)
        if any(not field or field.isdigit() for field in fields):
            raise SettingError(
                "ModelCheckpoint fills its path by name, as in '{epoch}-{val_loss:.3f}.ckpt',"
                f" got {self.path!r}."
            )
        if self.top_k is not None and self.top_k > 1 and not fields:
            raise SettingError(
                f"ModelCheckpoint with top_k={self.top_k} needs a path with a field, such as"
                f" {{epoch}}, got {self.path!r}."
            )

    @property
    def state_key(self) -> str:
        return f"ModelCheckpoint({self.path})"

    @property
    def last_path(self) -> str:
        """Where `save_last` writes: "last" and the path's suffix, in the innermost folder whose
        name has no field.
        """
        folder = Path(self.path).parent
        while _fields(str(folder)):
            folder = folder.parent
        literal = "".join(text for text, *_ in string.Formatter().parse(Path(self.path).name))
        return str(folder / f"last{Path('_' + literal).suffix}")

    def listens(self, hook: str) -> bool:
        return super().listens(hook) and (
            hook != "on_train_batch_end" or self.every_n_steps is not None
        )

    def reset(self) -> None:
        self.best_model_path: str | None = None
        self.best_model_score: float | None = None
        self.last_model_path: str | None = None
        # [path, figure], the best first: what top_k has left of this fit's files
        self.kept: list[list[Any]] = []
        self.step = -1  # at the last occasion to save
        self.written: list[str] = []  # on that occasion

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self.monitor.start(self.trainer)
        remove_leftovers(Path(self.last_path).parent)
        # the state lay in a file of its own step: that file is where training resumes from
        self._protected = (
            {os.path.realpath(path) for path in self.written}
            if self.step == self.trainer.global_step
            else set()
        )
        self.step = self.trainer.global_step

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._save(logs, at_epoch_end=True)

    def _save(self, logs: Logs, at_epoch_end: bool = False) -> None:
        # every ModelCheckpoint decides before the first of them saves, so that a file has the state
        # of all after this event
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback._event is not logs:
                callback._decide(logs, at_epoch_end)
        if self._to_write or self._to_delete:
            self.finish_save()
            write, paths, worst, protected = (
                self._writer(),
                self._to_write,
                self._to_delete,
                self._protected,
            )

            def job() -> None:
                for path in paths:
                    write(path)
                for path in worst:  # only now that there is something better
                    if os.path.realpath(path) not in protected:
                        Path(path).unlink(missing_ok=True)

            self.save(job)

    def _decide(self, logs: Logs, at_epoch_end: bool) -> None:
        """What to write and what to delete in this event; the state is from here on what it is
        after it.
        """
        self._event, self._to_write, self._to_delete = logs, [], []
        if not self._is_due(at_epoch_end):
            return
        self.step = self.trainer.global_step
        score = self._score(logs)
        if self._is_wanted(score):
            path = self._fill(logs)
            self._to_write.append(path)
            if score is not None and self.monitor.better(score, self.best_model_score):
                self.best_model_path, self.best_model_score = path, score
            self._rank(path, score)
        if self.save_last:
            self._to_write.append(self.last_path)
        if self._to_write:
            self.last_model_path = self._to_write[-1]
        self.written = list(self._to_write)

    def _is_due(self, at_epoch_end: bool) -> bool:
        if self.every_n_steps is None:
            return at_epoch_end and (self._epoch + 1) % self.every_n_epochs == 0
        # not twice at one step: with accumulated gradients it stays for several batches, and an
        # epoch's end may bring a last one
        return (
            self.trainer.global_step != self.step
            and self.trainer.global_step % self.every_n_steps == 0
        )

    def _score(self, logs: Logs) -> float | None:
        """The monitored figure;

        None where it is NaN or absent, which is worth a warning where it decides.
        """
        decides = self.save_best_only or self.top_k or self.initial_value_threshold is not None
        score = self.monitor.read(logs) if decides else logs.get(self.monitor.name)
        return None if score is None or math.isnan(score) else score

    def _is_wanted(self, score: float | None) -> bool:
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
        """Put a file in its place among those kept, behind its equals; the worst one too many is to
        be deleted.
        """
        if not self.top_k:
            return
        self.kept = [entry for entry in self.kept if entry[0] != path]
        place = sum(score is None or not self.monitor.better(score, kept) for _, kept in self.kept)
        self.kept.insert(place, [path, score])
        self._to_delete = [worst for worst, _ in self.kept[self.top_k :]]
        self.kept = self.kept[: self.top_k]

    def _fill(self, logs: Logs) -> str:
        fields = {
            "epoch": self._epoch,
            "step": self.trainer.global_step,
            **{name: logs[name] for name in _fields(self.path) if name in logs},
        }
        for name in _fields(self.path):
            if name not in fields:
                raise UnknownNameError(
                    f"field of the path {self.path!r}", name, {"epoch", "step", *logs}
                )
        return self.path.format(**fields)

    def _writer(self) -> Callable[[str], object]:
        """What writes a file of the training as it is now, whenever it is called."""
        if not self.save_weights_only:
            return self.trainer.snapshot().write
        if self.path.endswith(".onnx"):
            model = self.trainer.export(None)
            return lambda path: write_model(path, model)
        weights = self.trainer.get_weights()
        return lambda path: write_atomically(path, lambda file: write_safetensors(file, weights))


def _fields(template: str) -> list[str]:
    """The names that a path template asks for."""
    try:
        return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise SettingError(
            f"ModelCheckpoint cannot read the path template {template!r}: {error}."
        ) from error
