"""Write event files for TensorBoard: curves, histograms, the model's graph, hyperparameters."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Union

import numpy as np

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.hyperparameters import hyperparameters
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.write_guard import WriteGuard
from onnxfit.checks import check_arguments, require_at_least, require_frequency, shortened
from onnxfit.errors import SettingError
from onnxfit.files import (
    COUNT,
    FLAG,
    RATE,
    STEP,
    ValueType,
    mapping_of,
    require_path,
    require_types,
)

if TYPE_CHECKING:
    from onnxfit.callbacks.tensorboard.writer import RunWriter

__all__ = ["TensorBoard"]


# The session is part of the pattern that selects the files to truncate or delete.
SESSION = ValueType(
    "12 hexadecimal digits",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"[\da-f]{12}", value, re.ASCII)),
)
STATE_TYPES = {
    "session": SESSION,
    "files": mapping_of(COUNT),
    "graph": FLAG,
    "rate": RATE,
    "written_step": STEP,
}
# argument of Keras -> what to use instead
INSTEAD = {
    "write_images": (
        "Use histogram_freq=1, or a callback that calls board.writer().add_image(name, pixels,"
        " epoch + 1)."
    ),
    "profile_batch": "Use `make profile MODEL=model.onnx` in a clone of the repository.",
    "embeddings_freq": (
        "Use a callback that calls board.writer().add_embedding(rows, metadata=names) with rows of"
        " trainer.get_weights()."
    ),
    "embeddings_metadata": (
        "Pass the names to board.writer().add_embedding(rows, metadata=names) instead."
    ),
}


def in_section(figure: str, tag: str) -> str:
    """Return the tag in the section of a figure of the logs."""
    if figure == "loss" or figure.endswith("_loss"):
        return f"loss/{tag}"
    if figure in ("learning_rate", "lr"):  # "lr" is the default name of LearningRateMonitor
        return f"optimizer/{tag}"
    return f"metrics/{tag}"


class TensorBoard(Callback):
    """Write curves, histograms, the graph and hyperparameters for TensorBoard.

    - `log_dir`: a folder for this training alone. Its folders `train` and `validation` are the runs
      of TensorBoard, each created at its first write. To compare trainings, give each a `log_dir`
      inside a common folder.
    - `histogram_freq` >= 0: every `histogram_freq` epochs, write a histogram of each weight to the
      train run; 0 writes no histograms.
    - `write_graph`: write the ONNX model for the graph tab.
    - `write_steps_per_second`: write `epoch_steps_per_second`. Its default is False in Keras.
    - `update_freq`: "epoch" for curves over epochs alone; "batch" for curves over updates too, or a
      number n >= 1 for every n-th update.
    - `hparams`: name -> number, string or bool, listed in the hparams tab in addition to optimizer,
      learning rate, loss and batch size. TensorBoard takes the columns from one of the runs it
      shows, so runs to be compared should have the same names.
    - `write_images`, `profile_batch`, `embeddings_freq`, `embeddings_metadata`: arguments of Keras,
      which may only have the value that turns them off. Any other value is a SettingError, which
      says what to use instead.

    The tags are Keras's, in five sections, which TensorBoard shows in the order of the alphabet:
    `loss/`, `metrics/`, `optimizer/` (the learning rate), `speed/` and `weights/` (histograms).

    - `<section>/epoch_<figure>` in both runs, at the epoch, from 1. The prefix `val_` is dropped,
      so that both curves appear in one chart.
    - `optimizer/epoch_learning_rate` and `speed/epoch_steps_per_second` in train (updates per
      second, validation not counted).
    - `<section>/batch_<figure>` and `optimizer/batch_learning_rate` in train, at
      `trainer.global_step`, which the next `fit` continues. `loss/batch_loss` is the loss of the
      batch alone; the others are means since the epoch began.
    - `<section>/evaluation_<figure>_vs_iterations` in validation, after each validation, at
      `trainer.global_step`.
    - `weights/<weight>` in train, with `histogram_freq`.

    After every epoch, all events are in the files, even if the process is then killed. When
    training resumes from a checkpoint, the files of the killed run are truncated to their sizes at
    that checkpoint, so that no point appears twice. `writer(run)` returns the tensorboardX writer
    of a run, for images, figures and text. If the folder cannot be written, a warning says so, and
    training continues. SettingError: a setting is out of its range.

    >>> board = TensorBoard("runs/first", histogram_freq=1, update_freq="batch")
    >>> TensorBoard(update_freq="step")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: TensorBoard needs update_freq to be 'epoch', 'batch' or a number...
    """

    phase: ClassVar[str] = "logger"

    @check_arguments
    def __init__(
        self,
        log_dir: Union[str, os.PathLike[str]] = "logs",
        *,
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_steps_per_second: bool = True,
        update_freq: Union[str, int] = "epoch",
        hparams: Mapping[str, Any] | None = None,
        write_images: bool = False,
        profile_batch: Any = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Any = None,
    ) -> None:
        for name, value in (
            ("write_images", write_images),
            ("profile_batch", profile_batch),
            ("embeddings_freq", embeddings_freq),
            ("embeddings_metadata", embeddings_metadata),
        ):
            if value:
                raise SettingError(
                    f"TensorBoard needs {name} to be off, as it is by default, got"
                    f" {shortened(value)}. {INSTEAD[name]}"
                )
        require_at_least("TensorBoard", 0, histogram_freq=histogram_freq)
        require_frequency(
            "TensorBoard needs update_freq to be 'epoch', 'batch' or a number >= 1", update_freq
        )
        require_path(log_dir)
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = update_freq
        self.hparams = dict(hparams or {})
        self._writers: dict[str, RunWriter] = {}
        self._guard = WriteGuard("TensorBoard", self.log_dir)
        # Part of the names of the files of this run; a resumed run keeps it.
        self._session = uuid.uuid4().hex[:12]
        self._resumes = False
        self._graph_is_written = False
        self._hparams_are_written = False
        self._rate = 0.0
        self._written_step = -1

    @property
    def state_key(self) -> str:
        return f"TensorBoard({self.log_dir})"

    def overrides(self, hook: str) -> bool:
        return super().overrides(hook) and not (
            hook.startswith("on_train_batch") and self.update_freq == "epoch"
        )

    def writer(self, run: str = "train") -> RunWriter:
        """Return the tensorboardX SummaryWriter of a run.

        - `run`: "train", "validation", or the name of a new run. The callback flushes the writer
          after every epoch and closes it after training.
        """
        # Imported late: importing tensorboardX and its protocol buffers takes 0.25 s.
        from onnxfit.callbacks.tensorboard.writer import RunWriter

        if run not in self._writers:
            folder = os.path.join(self.log_dir, run)
            self._writers[run] = RunWriter(folder, self._session, self._guard.warn)
        return self._writers[run]

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        files = {str(path.relative_to(self.log_dir)): path.stat().st_size for path in self._files()}
        return {
            "session": self._session,
            "files": files,
            "graph": self._graph_is_written,
            "rate": self._rate,
            "written_step": self._written_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, and truncate the session's files to their sizes at that time.

        - `state`: the dict that `state_dict` returned. CheckpointError: a value has another type.
        """
        require_types(f"The saved state of {self.state_key}", state, STATE_TYPES)
        self._session = state["session"]
        self._graph_is_written = state["graph"]
        self._rate = state["rate"]
        self._written_step = state["written_step"]
        for path in self._files():
            size = state["files"].get(str(path.relative_to(self.log_dir)))
            if size is None:  # the file was created after the checkpoint
                path.unlink()
            elif size < path.stat().st_size:
                os.truncate(path, size)
        self._resumes = True

    def _files(self) -> list[Path]:
        """Return the event files of this run and of the run that it resumes."""
        if not os.path.isdir(self.log_dir):
            return []
        paths = Path(self.log_dir).glob(f"**/events.out.tfevents.*.{self._session}.*")
        return sorted(path for path in paths if path.is_file() and not path.is_symlink())

    def on_train_begin(self, logs: Logs) -> None:
        self._guard.reset()
        self._hparams_are_written = False
        self._training_began = time.time()
        self._begin_epoch()
        if not self._resumes:
            self._written_step = self.trainer.global_step
        if self.write_graph and not self._graph_is_written:
            from onnxfit.callbacks.tensorboard.graph import graph_event

            self.writer("train").add_event(graph_event(self.trainer.structure))
            self._graph_is_written = True
            self._flush()

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._step_before = self.trainer.global_step
        self._epoch_began = time.perf_counter()
        self._validation_seconds = 0.0

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        # Read the rate now: at the end of the batch, a schedule has already set the next rate.
        self._rate = self.trainer.learning_rate

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        step = self.trainer.global_step
        every = self.update_freq if isinstance(self.update_freq, int) else 1
        if step == self._written_step or step % every:
            return
        self._written_step = step
        writer = self.writer("train")
        for name, value in logs.items():
            if name != "loss":
                tag = name if name == "batch_loss" else f"batch_{name}"
                writer.add_scalar(in_section(name, tag), value, step)
        writer.add_scalar("optimizer/batch_learning_rate", self._rate, step)

    def on_test_begin(self, logs: Logs) -> None:
        self._validation_began = time.perf_counter()

    def on_test_end(self, logs: Logs) -> None:
        for name, value in logs.items():
            tag = in_section(name, f"evaluation_{name}_vs_iterations")
            self.writer("validation").add_scalar(tag, value, self.trainer.global_step)
        self._validation_seconds = time.perf_counter() - self._validation_began

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        seconds = time.perf_counter() - self._epoch_began - self._validation_seconds
        tags = {}
        shown = epoch + 1  # as in messages and in the progress bar
        for name, value in logs.items():
            run, metric = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            tags[name] = run, in_section(metric, f"epoch_{metric}")
            self.writer(run).add_scalar(tags[name][1], value, shown)
        if self.write_steps_per_second:
            speed = (self.trainer.global_step - self._step_before) / max(seconds, 1e-9)
            self.writer("train").add_scalar("speed/epoch_steps_per_second", speed, shown)
        if self.histogram_freq and shown % self.histogram_freq == 0:
            self._write_histograms(shown)
        if not self._hparams_are_written:
            tags.pop("learning_rate", None)
            # Validation metrics come first, because the page is not wide enough for all columns.
            self._write_hparams(
                dict(sorted(tags.items(), key=lambda item: item[1][0] != "validation"))
            )
        self._flush()

    def on_train_end(self, logs: Logs) -> None:
        self._write_end(succeeded=True)

    def on_exception(self, exception: BaseException) -> None:
        self._write_end(succeeded=False)

    def on_close(self) -> None:
        self._resumes = False
        writers = self._writers
        self._writers = {}
        for writer in writers.values():
            writer.close()

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _write_histograms(self, epoch: int) -> None:
        for name, weight in self.trainer.get_weights(copy=False).items():
            values = weight.astype(np.float64)
            values = values[np.isfinite(values)]
            if values.size:  # a tensor without finite values has no histogram
                self.writer("train").add_histogram(f"weights/{name}", values, epoch)

    def _write_hparams(self, metrics: Mapping[str, tuple[str, str]]) -> None:
        from onnxfit.callbacks.tensorboard.writer import hparams_of_run

        settings = hyperparameters(self.trainer, self.hparams)
        if "loss" in settings:  # the column "loss" has the figure
            settings = {"loss_function": settings.pop("loss"), **settings}
        for event in hparams_of_run(settings, metrics, self._training_began):
            self.writer("").add_event(event)
        self._hparams_are_written = True

    def _write_end(self, succeeded: bool) -> None:
        if self._hparams_are_written:
            from onnxfit.callbacks.tensorboard.writer import hparams_of_end

            self.writer("").add_event(hparams_of_end(succeeded))
            self._hparams_are_written = False
