"""Write what TensorBoard shows: curves, histograms, the model's graph, hyperparameters."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Union

import numpy as np

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError

if TYPE_CHECKING:
    from onnxfit.callbacks.tensorboard_writer import RunWriter

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Writes event files for `tensorboard --logdir`.

    - `log_dir`: its folders `train` and `validation` are the runs, each made at its first write.
      Give every training its own `log_dir` below a common one to compare them.
    - `histogram_freq` >= 0: every so many epochs a histogram of each weight, `<weight
      name>/histogram`, in the train run; 0 for none.
    - `write_graph`: the ONNX model in the graph tab.
    - `update_freq`: "epoch"; "batch" for curves over updates too, or n for every n-th update.
    - `hparams`: what the hparams tab lists besides optimizer, learning rate, loss and batch size;
      name -> number, string or bool. TensorBoard takes the columns from one of the runs it shows,
      so runs to be compared should have the same names.

    Tags: `epoch_<metric>` in both runs (`val_` is dropped, so that the curves lie over each other),
    `epoch_learning_rate` and `epoch_steps_per_second` (updates per second of training, validation
    not counted) in train, at the epoch, from 0; `batch_<metric>` and `batch_learning_rate` in
    train, at `trainer.global_step`, which goes on from fit to fit (`batch_loss` is the batch's own
    loss as in the logs, the others are means since the epoch began); after each validation
    `evaluation_<metric>_vs_iterations` in validation, at `trainer.global_step`.

    After every epoch all of it is in the files, even if the process is killed. Where training
    resumes from a checkpoint, the files of the killed run are cut back to what they held at that
    checkpoint, so that no point is there twice. `writer(run)` gives the tensorboardX writer of a
    run, for images, figures, text and the like. SettingError: a setting out of its range.

    >>> TensorBoard(update_freq="step")
    Traceback (most recent call last):
        ...
    onnxfit.errors.SettingError: TensorBoard needs update_freq 'epoch', 'batch' or a number >= 1, got 'step'.
    """

    phase: ClassVar[str] = "logger"

    def __init__(
        self,
        log_dir: Union[str, os.PathLike[str]] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        update_freq: Union[str, int] = "epoch",
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        if not histogram_freq >= 0:
            raise SettingError(f"TensorBoard needs histogram_freq >= 0, got {histogram_freq}.")
        if update_freq not in ("epoch", "batch") and not (
            isinstance(update_freq, int) and update_freq >= 1
        ):
            raise SettingError(
                "TensorBoard needs update_freq 'epoch', 'batch' or a number >= 1, got"
                f" {update_freq!r}."
            )
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.update_freq = update_freq
        self.hparams = dict(hparams or {})
        self._writers: dict[str, RunWriter] = {}
        # in the names of its files, those of a resumed run included
        self._session = uuid.uuid4().hex[:12]
        self._resumes = self._graph_is_written = self._hparams_are_written = False
        self._rate, self._written_step = 0.0, -1

    @property
    def state_key(self) -> str:
        return f"TensorBoard({self.log_dir})"

    def listens(self, hook: str) -> bool:
        return super().listens(hook) and not (
            hook.startswith("on_train_batch") and self.update_freq == "epoch"
        )

    def writer(self, run: str = "train") -> RunWriter:
        """The tensorboardX writer of a run: "train", "validation", or a name of your own."""
        # tensorboardX imports torch where there is one
        from onnxfit.callbacks.tensorboard_writer import RunWriter

        if run not in self._writers:
            self._writers[run] = RunWriter(os.path.join(self.log_dir, run), self._session)
        return self._writers[run]

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        files = {str(path.relative_to(self.log_dir)): path.stat().st_size for path in self._files()}
        return {
            "session": self._session, "files": files, "graph": self._graph_is_written, "rate": self._rate, "written_step": self._written_step,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._session, self._graph_is_written = state["session"], state["graph"]
        self._rate, self._written_step = state["rate"], state["written_step"]
        for path in self._files():
            size = state["files"].get(str(path.relative_to(self.log_dir)))
            if size is None:  # begun after the checkpoint
                path.unlink()
            elif size < path.stat().st_size:
                os.truncate(path, size)
        self._resumes = True

    def _files(self) -> list[Path]:
        """The event files of this run, and of what it resumes."""
        return sorted(Path(self.log_dir).glob(f"**/events.out.tfevents.*.{self._session}.*"))

    def on_train_begin(self, logs: Logs) -> None:
        self._hparams_are_written = False
        self._started = time.time()
        self._begin_epoch()
        if not self._resumes:
            self._written_step = self.trainer.global_step
        if self.write_graph and not self._graph_is_written:
            from tensorboardX.proto.event_pb2 import Event

            from onnxfit.callbacks.tensorboard_graph import graph_def

            graph = graph_def(self.trainer.model).SerializeToString()
            self.writer("train").add_event(Event(graph_def=graph))
            self._graph_is_written = True
            self._flush()

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._steps_before = self.trainer.global_step
        self._epoch_began = time.perf_counter()
        self._tested = 0.0

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        # a schedule's next value is in force when the batch ends
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
                writer.add_scalar(name if name == "batch_loss" else f"batch_{name}", value, step)
        writer.add_scalar("batch_learning_rate", self._rate, step)

    def on_test_begin(self, logs: Logs) -> None:
        self._test_began = time.perf_counter()

    def on_test_end(self, logs: Logs) -> None:
        for name, value in logs.items():
            self.writer("validation").add_scalar(
                f"evaluation_{name}_vs_iterations", value, self.trainer.global_step
            )
        self._tested = time.perf_counter() - self._test_began

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        seconds = time.perf_counter() - self._epoch_began - self._tested
        tags = {}
        for name, value in logs.items():
            run, metric = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            tags[name] = (run, f"epoch_{metric}")
            self.writer(run).add_scalar(f"epoch_{metric}", value, epoch)
        steps = self.trainer.global_step - self._steps_before
        self.writer("train").add_scalar("epoch_steps_per_second", steps / max(seconds, 1e-9), epoch)
        if self.histogram_freq and (epoch + 1) % self.histogram_freq == 0:
            self._write_histograms(epoch)
        if not self._hparams_are_written:
            tags.pop("learning_rate", None)
            # what settings are compared by comes first: the page is not wide enough for all
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
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _write_histograms(self, epoch: int) -> None:
        for name, weight in self.trainer.get_weights().items():
            values = weight.astype(np.float64)
            values = values[np.isfinite(values)]
            if values.size:  # an empty tensor has no histogram, nor has one that is NaN all over
                self.writer("train").add_histogram(f"{name}/histogram", values, epoch)

    def _write_hparams(self, metrics: Mapping[str, tuple[str, str]]) -> None:
        from onnxfit.callbacks.tensorboard_writer import hparams_of_run

        trainer = self.trainer
        rate = trainer.optimizer.learning_rate
        hparams = {
            "optimizer": type(trainer.optimizer).__name__,
            "learning_rate": repr(rate) if callable(rate) else float(rate),
            "loss": _name(trainer.loss),
            "batch_size": trainer.batch_size,
            **self.hparams,
        }
        for event in hparams_of_run(
            {k: v for k, v in hparams.items() if v is not None}, metrics, self._started
        ):
            self.writer("").add_event(event)
        self._hparams_are_written = True

    def _write_end(self, succeeded: bool) -> None:
        if self._hparams_are_written:
            from onnxfit.callbacks.tensorboard_writer import hparams_of_end

            self.writer("").add_event(hparams_of_end(succeeded))
            self._hparams_are_written = False


def _name(loss: Any) -> str:
    """What to call a loss, as it was given to the Trainer."""
    if isinstance(loss, Mapping):
        return ", ".join(f"{output}: {_name(part)}" for output, part in loss.items())
    if loss is None:
        return "in the model"
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
