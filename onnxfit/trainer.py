"""Trainer: a model, a loss, an optimizer, and the loop that brings them together."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from dataclasses import astuple, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.callbacks.callback import Callback, CallbackList
from onnxfit.callbacks.history import History
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress import ProgressBar
from onnxfit.data import Batch, Source, source
from onnxfit.data import validation_split as split_rows
from onnxfit.data.order import checked_batch_size
from onnxfit.errors import CheckpointError, ModelError, OnnxfitError, SettingError, UnknownNameError
from onnxfit.gradients import gradient_source, reachable, refuse
from onnxfit.gradients.inspection import Inspection, inspect_working
from onnxfit.graph import names
from onnxfit.graph.model import (
    ModelSource,
    normalize,
    read_model,
    spec_of,
    tensor_outputs,
    with_initializers,
)
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.tensors import initializer_arrays, write_model
from onnxfit.graph.training_form import to_inference_form
from onnxfit.graph.weights import matching, select_weights
from onnxfit.metrics import mode_by_name
from onnxfit.optimizers import OptimizerLike, get_optimizer, initial_slots_to_read, learning_rate_at
from onnxfit.penalties import PenaltyLike, penalties_for
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.backends.forward_backward import ForwardBackwardBackend
from onnxfit.runtime.backends.full import FullBackend
from onnxfit.runtime.backends.manual import ManualTraining
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import BoundSession
from onnxfit.step.graphs import blockers
from onnxfit.step.objectives import (
    Losses,
    Metrics,
    OutputMetric,
    Target,
    get_objectives,
    get_output_metrics,
)
from onnxfit.step.recipe import Recipe
from onnxfit.step.tracker import Figures, Tracker
from onnxfit.training import checkpoint, summary
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.loop import FitState, require_data, validation_due
from onnxfit.training.position import PendingFit, Position

Array = npt.NDArray[Any]
BACKENDS: dict[str, type[Backend]] = {
    "full": FullBackend,
    "forward_backward": ForwardBackwardBackend,
}


class Trainer:
    """Trains an ONNX model.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `weights`: None for every float initializer that is a weight, or names and fnmatch patterns in
      any order; `"!pattern"` excludes. Weights outside stay byte-identical.
    - `loss`: a name, a Loss, a callable `(op, y_true, y_pred) -> Value`, a dict output name ->
      loss, or None when the model has a scalar output `loss` of its own. With several outputs the
      loss is the sum, each counted by `loss_weights` (1 by default).
    - `penalty`: None, a Penalty, a number (L2), or a dict pattern -> Penalty, number or `{"l1": a,
      "l2": b}`.
    - `optimizer`: a name, an Optimizer, or a number: SGD with that learning rate.
    - `metrics`: names, Metrics or callables `(y_true, y_pred) -> value per row`; with several
      outputs a dict output name -> metrics.
    - `gradient`: where gradients come from: "onnx", a table of rules in plain ONNX operators, for
      any onnxruntime; "onnxruntime", the builder of its training build; "auto", the table, and the
      builder for what the table does not know.
    - `device`: "cpu", "cuda", "cuda:1", whatever the installed onnxruntime offers.
    - `seed`: of the order of rows and of dropout; the same seed gives the same weights, bit for
      bit, on one machine.
    - `batch_norm`: "train" normalises by the batch and follows the running statistics; "frozen"
      uses them as they are.
    - `clip_norm`, `clip_value`: bounds for the common L2 norm of all gradients, and for each of
      their elements.
    - `accumulate`: batches whose gradients are averaged for one update.
    - `threads`: how many onnxruntime uses for an operator; None leaves it to onnxruntime.

    What cannot work is said here, before the first batch: ModelError, GradientError, SettingError,
    UnknownNameError, InstallationError.

    >>> import numpy as np, onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {0}, float[1] bias = {0}>
    ...     { scaled = MatMul(x, slope)  y = Add(scaled, bias) }''')
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> trainer = Trainer(model, loss="mean_squared_error", optimizer=0.5)
    >>> history = trainer.fit(x, 3 * x + 1, epochs=20, verbose=0)
    >>> {name: round(w.item(), 3) for name, w in trainer.get_weights().items()}
    {'slope': 3.0, 'bias': 1.0}
    """

    def __init__(
        self,
        model_onnx: ModelSource,
        weights: Sequence[str] | str | None = None,
        loss: Losses = None,
        penalty: PenaltyLike = None,
        optimizer: OptimizerLike = "sgd",
        *,
        metrics: Metrics = (),
        loss_weights: Mapping[str, float] | None = None,
        backend: str = "full",
        gradient: str = "auto",
        device: str = "cpu",
        seed: int = 0,
        batch_norm: str = "train",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        threads: int | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise UnknownNameError("backend", backend, BACKENDS)
        if batch_norm not in ("train", "frozen"):
            raise SettingError(f"batch_norm is 'train' or 'frozen', got {batch_norm!r}.")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise SettingError(
                f"accumulate is a whole number of batches from 1 on, got {accumulate!r}."
            )
        if not isinstance(seed, int):
            raise SettingError(f"seed is a whole number, got {seed!r}.")
        if threads is not None and not (isinstance(threads, int) and 0 <= threads <= 1024):
            raise SettingError(f"threads is a whole number up to 1024, or None, got {threads!r}.")
        for setting, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None and not (0 < value <= sys.float_info.max or value == math.inf):
                raise SettingError(f"{setting} is a positive number or None, got {value}.")
        self.model = read_model(model_onnx)
        self.optimizer = get_optimizer(optimizer)
        self.backend = backend
        self.seed = seed
        work = normalize(self.model)
        outputs = tensor_outputs(work)
        work.graph.outputs[:] = [v for v in work.graph.outputs if v.name in outputs]
        self._outputs = [name for name, spec in outputs.items() if spec.dtype.kind == "f"]
        self._inputs = [spec_of(v) for v in work.graph.inputs]
        self.objectives = get_objectives(
            loss, loss_weights, outputs, needed=backend != "forward_backward"
        )
        self._targets = {
            output: Target(outputs[output], objective.loss)
            for output, objective in self.objectives.items()
        }
        self._output_metrics = get_output_metrics(metrics, self.objectives)
        chosen = select_weights(work, weights)
        self._loss_outputs = list(self.objectives) or [
            name for name in outputs if name == names.LOSS
        ]
        led = {
            name
            for output in self._loss_outputs or self._outputs
            for name in reachable(work, output, chosen)
        }
        trained = [name for name in chosen if name in led]
        if not trained:
            raise ModelError(
                "The loss depends on no weight in a way that has a derivative; the weights are"
                f" {', '.join(chosen)}."
            )
        if weights is not None and len(trained) < len(chosen):
            idle = [name for name in chosen if name not in trained]
            raise SettingError(
                f"No loss depends on {', '.join(idle)}: leave them out of weights=, or give the"
                " output they lead to a loss."
            )
        arrays = initializer_arrays(self.model, trained)
        recipe = Recipe(
            model=work,
            weights=tuple(trained),
            objectives=self.objectives,
            penalties=penalties_for(penalty, trained),
            optimizer=self.optimizer,
            gradient=gradient_source(gradient),
            slots={
                name: initial_slots_to_read(self.optimizer, name, arrays[name]) for name in trained
            },
            metric_outputs=tuple(dict.fromkeys(m.output for m in self._output_metrics)),
            batch_norm=batch_norm,
            clip_norm=clip_norm,
            clip_value=clip_value,
        )
        arrays |= initializer_arrays(self.model, recipe.statistics)
        _refuse_names(recipe)
        # a loss that cannot meet its output is refused here too; sizes come with the first batch
        if self._loss_outputs:
            found = blockers(recipe, self._expected_batch())
        else:
            found = inspect_working(work, trained, self._outputs, gradient).blockers
        refuse([b for b in found if not b.needs_sizes])
        self.settings: dict[str, Any] = {
            "weights": trained, "loss": loss, "penalty": penalty, "optimizer": optimizer, "metrics": metrics, "loss_weights": loss_weights,
            "backend": backend, "gradient": gradient, "device": device, "seed": seed, "batch_norm": batch_norm, "clip_norm": clip_norm,
            "clip_value": clip_value, "accumulate": accumulate, "threads": threads,
        }  # fmt: skip
        self._backend = BACKENDS[backend](
            recipe, arrays, device=Device.parse(device), threads=threads, accumulate=accumulate
        )
        self._partial = (
            ManualTraining(self._backend)
            if isinstance(self._backend, ForwardBackwardBackend)
            else None
        )
        self._tracker = Tracker(self.objectives, self._output_metrics)
        rate = self.optimizer.learning_rate
        self._learning_rate: float | None = None if callable(rate) else float(rate)
        self.history = History()
        self.train_losses_: list[float] = []
        self.epoch = self.global_step = self.global_batch = self.samples_seen = 0
        self.stop_training = False
        self.stop_reason: str | None = None
        self.last_losses: deque[float] = deque(maxlen=5)
        # output -> array of the batch that is being predicted, for `on_predict_batch_end`
        self.predicted: dict[str, Array] = {}
        self._course: FitState | None = None  # of the fit under way, or the last
        self._unfinished = PendingFit()  # what a loaded trainer's next fit goes on with
        self._calls: CallbackList | None = None  # of the fit, evaluation or prediction under way
        self._frozen: tuple[str, ...] = ()
        self._held: tuple[str, ...] = ()  # these, and their slots

    def fit(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_freq: int | Sequence[int] = 1,
        callbacks: Sequence[Callback] | None = (),
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = True,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        verbose: int | str = "auto",
    ) -> History:
        """Train for `epochs` epochs (from `initial_epoch` on) and return the History; every
        argument means what it means in Keras.

        `x` is an array, a dict or list of arrays, or a loader: anything re-iterable that gives
        batches (`onnxfit.DataLoader`, a torch DataLoader, a function that returns an iterator).
        What can be wrong with the data is found before the first step: a DataError then leaves
        weights, optimizer and history as they were.
        """
        if self._fitting:
            raise SettingError(
                "fit is running already: a callback may evaluate and predict, and another thread"
                " needs another Trainer."
            )
        if validation_steps is not None and validation_steps < 1:
            raise SettingError(f"validation_steps is at least 1, got {validation_steps}.")
        if validation_split:
            if validation_data is not None:
                raise SettingError("Give validation_data or validation_split, not both.")
            (x, y, sample_weight), validation_data = split_rows(
                x, y, sample_weight, validation_split
            )
        due = validation_due(validation_freq)
        with ExitStack() as stack:
            training = stack.enter_context(
                self._source(x, y, sample_weight, batch_size, "training", shuffle, class_weight)
            )
            validation = None
            if validation_data is not None:
                validation = stack.enter_context(
                    self._source(*_triple(validation_data), batch_size, "validation")
                )
            callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
            for callback in callbacks:
                if isinstance(callback, Callback):  # what is none is refused below
                    callback.prepare(self)
            left = self._unfinished.from_epoch(initial_epoch)
            first = left.place.epoch
            if epochs - first > 1 and steps_per_epoch is None:
                training.require_re_iterable(epochs - first)
            if validation is not None and (passes := sum(map(due, range(first, epochs)))) > 1:
                validation.require_re_iterable(passes)
            batches = EpochIterator(training, steps_per_epoch, self.epoch, left.place)
            stack.callback(batches.close)
            history = History()
            bars = (
                [ProgressBar(verbose)]
                if verbose and not any(isinstance(c, ProgressBar) for c in callbacks)
                else []
            )
            params = {"epochs": epochs, "steps": batches.steps, "verbose": verbose}
            calls = CallbackList(self, [*callbacks, history, *bars], params, left.callbacks)
            # unlike Position(): a fit is under way, before its first batch, too
            course = FitState(batches, calls, replace(left.place, number=batches.place[0]))
            logs, ended = Logs(), left.ended
            with self._under_way(course, history):
                course.idle = training
                calls.on_train_begin(logs)
                course.idle = None
                course.require_same_batches()
                if ended and not left.place.batch:
                    logs, ended = self._tell_loggers(ended), {}
                for epoch in range(first, epochs if not self.stop_training else first):
                    calls.on_epoch_begin(epoch, Logs())
                    if ended:
                        self._tell_loggers(ended)
                    figures, rate = self._train_epoch(
                        course, left.tracker if left.place.batch else {}
                    )
                    ended, left = {}, PendingFit()
                    if validation is not None and due(epoch):
                        found = self._evaluate(validation, calls, validation_steps)
                        figures |= {f"val_{name}": value for name, value in found.items()}
                    self.epoch += 1
                    self.train_losses_.append(self._tracker.loss)
                    course.place = Position(epoch=epoch + 1)
                    logs = _logs({**figures, "learning_rate": rate})
                    course.telling = "on_epoch_end", epoch, logs
                    calls.on_epoch_end(epoch, logs)
                    course.telling = None
                    if self.stop_training:
                        break
                course.place, course.idle = Position(), batches.data
                calls.on_train_end(logs)
        return history

    @property
    def _fitting(self) -> bool:
        return self._course is not None and self._course.running

    @contextmanager
    def _under_way(self, course: FitState, history: History) -> Iterator[None]:
        """While a fit runs.

        What an error leaves of it is there for a checkpoint; one before the first step leaves the
        next fit what this one had.
        """
        before, done, calls = (self.history, self._unfinished), self.global_batch, course.calls
        self.history, self._calls, self._course, self._unfinished = (
            history,
            calls,
            course,
            PendingFit(),
        )
        self.stop_training, self.stop_reason = False, None
        self.last_losses.clear()
        self._backend.on_gradients = calls.on_gradients if calls.gradients else None
        if not course.place.batch:
            self._backend.window = 0  # gradients that an interrupted fit left behind
        try:
            yield
        except BaseException as error:
            calls.on_exception(error)
            course.callbacks = calls.state_dict()
            if self.global_batch == done:  # not even the first step was possible
                self.history, self._unfinished = before
            raise
        finally:
            self._calls, course.running, course.idle, self._backend.on_gradients = (
                None,
                False,
                None,
                None,
            )
            calls.on_close()

    def _tell_loggers(self, ended: Mapping[str, Any]) -> Logs:
        """What they had not been told when the checkpoint was written, and what had been decided by
        then.
        """
        assert self._calls is not None
        logs, self.stop_training, self.stop_reason = (
            Logs({**ended["logs"]}),
            ended["stop"],
            ended["reason"],
        )
        self._calls.tell_loggers(ended["hook"], ended["index"], logs)
        return logs

    def _train_epoch(self, course: FitState, so_far: Mapping[str, Any]) -> tuple[Figures, float]:
        """One epoch, or what is left of it; returns the means over all of it, and the learning rate
        of its last step.
        """
        backend, tracker, calls, place = self._backend, self._tracker, course.calls, course.place
        begin, end = calls.train_batch_begin, calls.train_batch_end
        rate = self.learning_rate if place.rate is None else place.rate
        tracker.reset()
        if so_far:
            tracker.load_state_dict(so_far)
        for index, batch in () if self.stop_training or place.trained else course.epochs:
            if begin:
                calls.on_train_batch_begin(index, Logs())
            rate = self.learning_rate
            loss = self._step(batch, rate)
            place.batch, place.rate = index + 1, rate
            self.last_losses.append(loss)
            if end:
                figures = tracker.figures()  # none of them is an array
                figures["batch_loss"] = loss
                logs = Logs(figures)
                course.telling = "on_train_batch_end", index, logs
                calls.on_train_batch_end(index, logs)
                course.telling = None
            if self.stop_training:
                break
            if not (math.isfinite(loss) or course.warned):
                course.warned = True
                self._warn_of_loss(loss)
        before = self._before_step()
        # a short window at the end of the epoch
        self.global_step += backend.flush(rate, self.global_step)
        place.trained = True
        self._hold(before)
        return tracker.results(), rate

    def _step(self, batch: Batch, rate: float) -> float:
        """One batch; a metric that cannot take its labels or outputs leaves everything as it was."""
        before = self._before_step() if self._held else None
        runner = self._backend.train(batch, rate, self.global_step, self.seed)
        if before:
            self._hold(before)
        try:
            loss = self._tracker.update(runner, batch)
        except Exception:
            self._backend.revert()
            raise
        self.global_batch += 1
        self.samples_seen += batch.rows
        self.global_step += not self._backend.window
        return loss

    def _evaluate(self, data: Source, calls: CallbackList, steps: int | None = None) -> Figures:
        """Loss and metrics over a data set, with the weights as they are."""
        tracker = Tracker(self.objectives, [metric.copy() for metric in self._output_metrics])
        calls.on_test_begin(Logs())
        for index, batch in enumerate(islice(data.batches(0), steps)):
            if calls.test_batch_begin:
                calls.on_test_batch_begin(index, Logs())
            loss = tracker.update(self._backend.evaluate(batch), batch)
            if calls.test_batch_end:
                calls.on_test_batch_end(index, _logs({**tracker.figures(), "batch_loss": loss}))
        require_data(tracker.rows, "evaluation")
        results = tracker.results()
        calls.on_test_end(_logs(results))
        return results

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        callbacks: Sequence[Callback] | None = (),
    ) -> dict[str, Any]:
        """Loss and metrics over a data set, exact whatever the batch size: floats, and an array for
        a confusion matrix.
        """
        with (
            self._source(x, y, sample_weight, batch_size, "evaluation") as data,
            self._listening(callbacks) as calls,
        ):
            return dict(self._evaluate(data, calls))

    def predict(
        self, x: Any, *, batch_size: int = 32, callbacks: Sequence[Callback] | None = ()
    ) -> Any:
        """The model's outputs for every row, in input order: an array, or a dict output name ->
        array where there are several.

        The trained model is compiled for it, so that it predicts as the exported file does;
        `predict_on_batch` spares that.
        """
        return self._predict(x, batch_size, callbacks, self._backend.deployed)

    def _predict(
        self,
        x: Any,
        batch_size: int | None,
        callbacks: Sequence[Callback] | None,
        run: Callable[[Batch], BoundSession],
    ) -> Any:
        parts: dict[str, list[Array]] = {}
        with (
            self._source(x, None, None, batch_size, "prediction") as data,
            self._listening(callbacks) as calls,
        ):
            calls.on_predict_begin(Logs())
            for index, batch in enumerate(data.batches(0)):
                if calls.predict_batch_begin:
                    calls.on_predict_batch_begin(index, Logs())
                self.predicted = run(batch).prediction()
                for name, array in self.predicted.items():
                    parts.setdefault(name, []).append(array)
                if calls.predict_batch_end:
                    calls.on_predict_batch_end(index, Logs())
            self.predicted = {}
            calls.on_predict_end(Logs())
        require_data(parts, "prediction")
        return _only(
            {
                name: np.concatenate(arrays) if arrays[0].ndim else np.stack(arrays)
                for name, arrays in parts.items()
            }
        )

    # ------------------------------------------------------------------ single batches

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """One step on these rows; the loss and metrics of this batch alone, as they were before the
        update.
        """
        with self._source(x, y, sample_weight, None, "training") as data:
            for batch in data.batches(0):
                self._tracker.reset()
                self._step(batch, self.learning_rate)
        return dict(self._tracker.results())

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Loss and metrics of these rows, without an update."""
        return self.evaluate(x, y, sample_weight, batch_size=_ALL)

    def predict_on_batch(self, x: Any) -> Any:
        """The model's outputs for these rows, in one run, with the weights where training has them:
        fast between two steps.
        """
        return self._predict(x, None, (), self._backend.predict)

    # ------------------------------------------------------------------ by hand

    def forward(self, inputs: Any, training: bool = True) -> Any:
        """The outputs for some rows, so that `backward` can follow (`backend="forward_backward"`).

        `inputs` are an array, or a dict or list of arrays for several inputs; or OrtValues, and
        then OrtValues come back. Nothing is copied on the CPU: leave the arrays as they are until
        the backward pass; the outputs are views that cannot be written. One output is returned as
        it is, several as a dict. With `training=True` Dropout drops and running statistics follow
        the batch, and what the backward pass needs is kept; any number of passes may wait. With
        `training=False` it is inference, and nothing is kept.
        """
        batch = (
            self._hands().named(inputs)
            or next(self._source(inputs, None, None, None, "prediction").batches(0)).arrays()
        )
        return self._hands().forward(batch, training, self.global_step, self.seed)

    def backward(self, output_gradients: Any, *, of: Any = None) -> dict[str, dict[str, Any]]:
        """Gradients `{"inputs": {name: ...}, "weights": {name: ...}}` from those of the outputs: a
        vector-Jacobian product.

        `output_gradients` is an array like the output, or a dict output -> array (None for zeros)
        where several take one. It belongs to the newest forward pass that waits, or to that which
        returned the object `of`; each is good for one backward pass. The penalty has no part in it:
        `apply_gradients` adds that. DataError for a gradient that is missing or does not fit,
        SettingError where no forward pass waits, or the weights were changed since; the trainer
        stays as it was.
        """
        return self._hands().backward(output_gradients, of)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """One update by gradients of all trained weights, as `backward` gives them under "weights"
        (added up, averaged, changed as you like).

        The penalties' gradients are added, clip_norm and clip_value applied. Forward passes that
        still wait are forgotten.
        """
        before = self._before_step()
        self._hands().apply(gradients, self.learning_rate, self.global_step)
        self._hold(before)
        self.global_step += 1

    def _hands(self) -> ManualTraining:
        if self._partial is None:
            raise SettingError(
                "forward, backward and apply_gradients need separate graphs: Trainer(...,"
                " backend='forward_backward'), got 'full'."
            )
        return self._partial

    # ------------------------------------------------------------------ state

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update.

        Setting it lasts until it is set again; a schedule cannot be overruled (TypeError).
        """
        return (
            learning_rate_at(self.optimizer, self.global_step)
            if self._learning_rate is None
            else self._learning_rate
        )

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._learning_rate is None:
            raise TypeError(
                f"The learning rate follows {self.optimizer.learning_rate!r}: keep that schedule,"
                " or build the Trainer with a number and set learning_rate (or use a callback that"
                " does)."
            )
        value = float(value)
        if not (math.isfinite(value) and value >= 0):
            raise SettingError(f"learning_rate is a finite number >= 0, got {value}.")
        self._learning_rate = value

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch in the fit under way, or the last;

        None where only the data can tell. A callback can set it in `on_train_begin`.

        The validation data keep theirs. SettingError for data that come in batches, DataError for a
        model whose batch size is fixed.
        """
        return self._course.epochs.data.batch_size if self._course is not None else None

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        course = self._course
        if course is None or course.idle is None or course.place == Position():
            raise SettingError(
                "batch_size can be set before the first epoch of a fit: in on_train_begin, or by"
                " fit(batch_size=...)."
            )
        course.epochs.with_batch_size(checked_batch_size(value))
        course.idle = course.epochs.data
        for callback in course.calls:
            callback.params["steps"] = course.epochs.steps

    @property
    def accumulate(self) -> int:
        """Batches whose gradients are averaged for one update; can be set, at any time, if the
        Trainer was built with 2 or more.
        """
        return self._backend.accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        if not isinstance(value, int) or value < 1:
            raise SettingError(f"accumulate is a whole number of batches from 1 on, got {value!r}.")
        if value > 1 and not self._backend.adds_up:
            raise SettingError(
                f"accumulate={value} needs graphs that add gradients up, which this trainer was"
                " built without: Trainer(..., accumulate=2) or more has them, whatever is set"
                " afterwards."
            )
        self._backend.accumulate = value

    @property
    def frozen(self) -> tuple[str, ...]:
        """Weights and running statistics that no step changes: they and their slots stay as they
        are, byte for byte.

        Set it to names or fnmatch patterns (UnknownNameError for one that matches nothing), or to
        `()`. The gradient is computed as before, and `clip_norm` counts theirs; after a step their
        old values are copied back. What is to be frozen for good is better left out of `weights=`.
        """
        return self._frozen

    @frozen.setter
    def frozen(self, patterns: Sequence[str] | str) -> None:
        recipe = self._backend.recipe
        self._frozen = tuple(matching(patterns, recipe.state))
        slots = (
            names.slot(name, slot) for name in self._frozen for slot in recipe.slots.get(name, ())
        )
        self._held = (*self._frozen, *slots)

    @property
    def metrics(self) -> list[OutputMetric]:
        """The metrics of training, each with the name it is logged under, the output it looks at
        and its `mode`, "min" or "max".
        """
        return list(self._output_metrics)

    @property
    def loss(self) -> Any:
        """The loss as it was given."""
        return self.settings["loss"]

    def get_weights(self) -> dict[str, Array]:
        """Copies of all that training changes in the model: the trained weights, and the running
        statistics it updates.
        """
        return {name: self._backend.state.get(name) for name in self._backend.recipe.state}

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace some weights; all are checked before the first is changed.

        DataError for a name, shape or type that does not fit.
        """
        known = self._backend.recipe.state
        for name in weights:
            if name not in known:
                raise UnknownNameError("trained weight", name, known)
        self._backend.state.set(weights)

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Copies of weights, slots and counters: all that decides how training goes on."""
        state = self._backend.state
        others = [name for name in state if name not in self._backend.recipe.state]
        return {
            "weights": self.get_weights(),
            "slots": {name: state.get(name) for name in others},
            "counters": {
                **{name: getattr(self, name) for name in _COUNTERS},
                "window": self._backend.window,
                "learning_rate": self._learning_rate,
            },
        }

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go back to what `get_state` gave.

        DataError or SettingError before anything changes where it is another trainer's.
        """
        mine, counters = self.get_state(), state["counters"]
        for part, entries in mine.items():
            if set(state[part]) != set(entries):
                raise SettingError(
                    f"The state is another trainer's: its {part} are {sorted(state[part])}, this"
                    f" one's {sorted(entries)}."
                )
        if (counters["learning_rate"] is None) != (self._learning_rate is None):
            raise SettingError(
                "The state's learning rate follows a schedule and this trainer's does not, or the"
                " other way round."
            )
        counts = [counters[name] for name in (*_COUNTERS, "window")]
        whole = all(isinstance(count, int) and 0 <= count < 2**63 for count in counts)
        if not whole or not isinstance(counters["learning_rate"], (int, float, type(None))):
            raise SettingError(
                "A state counts in whole numbers, and its learning rate is one number; got"
                f" {counters}."
            )
        self._backend.state.set({**state["weights"], **state["slots"]})
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self._backend.window = counters["window"]
        self._learning_rate = counters["learning_rate"]

    def revert_step(self) -> None:
        """Undo the last update: weights, slots and statistics as they were before it.

        Only the last one can be undone, once.
        """
        self._backend.revert()

    def trial_steps(
        self, rates: Iterable[float], passes: int | None = 1, batch_size: int | None = None
    ) -> Generator[float, None, None]:
        """Steps on the data of the fit under way, one at each of these learning rates; yields the
        loss of each step's batch.

        For a callback's `on_train_begin` and `on_train_end`. There are at most as many steps as
        batches in so many `passes` over the data (None: as many as rates). With a `batch_size` they
        are whole batches of so many rows, and there is none where the data have fewer. When the
        iterator ends, or is closed, weights, slots, statistics and counters are as they were
        before; no hook is called meanwhile. SettingError within an epoch or outside `fit`, or for a
        batch size of data that come in batches; DataError for data that can be passed over only
        once.
        """
        data = self._course.idle if self._course is not None else None
        if data is None:
            raise SettingError(
                "trial_steps needs a fit of which no epoch is under way: call it in on_train_begin"
                " or on_train_end."
            )
        if batch_size is not None and data.rows is not None and batch_size > data.rows:
            return
        with ExitStack() as stack:
            if batch_size is not None:
                data = stack.enter_context(data.with_batch_size(batch_size, drop_last=True))
                stack.enter_context(self._backend.trying())
            data.require_re_iterable(2)
            numbers = count() if passes is None else range(passes)
            batches = stack.enter_context(
                closing(batch for number in numbers for batch in data.batches(number))
            )
            before, told = self.get_state(), self._backend.on_gradients
            self._backend.window, self._backend.on_gradients = 0, None
            try:
                for rate, batch in zip(rates, batches):
                    yield self._step(batch, rate)
            finally:
                self.set_state(before)
                self._backend.on_gradients = told

    def log(self, name: str, value: float) -> None:
        """Add a figure to the logs of the hook under way, for every callback still to be called."""
        if self._calls is None:
            raise SettingError(
                f"trainer.log({name!r}, ...) adds to the logs of a hook: call it inside one, while"
                " fit runs."
            )
        self._calls.log(name, value)

    def monitor_mode(self, monitor: str) -> str:
        """Whether less ("min") or more ("max") of a figure is better: what its metric says, else
        what its name suggests.
        """
        name = monitor.removeprefix("val_")
        for metric in self._output_metrics:
            if metric.name == name:
                return metric.mode
        return mode_by_name(name)

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the whole training state into one file, atomically: model, weights, slots,
        counters, settings, history, callbacks.
        """
        return self.snapshot().write(path)

    def snapshot(self) -> checkpoint.Snapshot:
        """A copy in memory of what `save` writes: its `write(path)` may come later, or in another
        thread, while training goes on.
        """
        left = self._left()
        contents = checkpoint.Contents(
            model=self.model,
            settings=self.settings,
            state=self.get_state(),
            history=self.history.state_dict(),
            train_losses=self.train_losses_,
            resume=astuple(left.place),
            tracker=deepcopy(left.tracker),
            ended=left.ended,
            callbacks=left.callbacks,
        )
        return checkpoint.Snapshot(contents)

    def _left(self) -> PendingFit:
        """What a checkpoint written now holds of the fit under way, or of one that was interrupted
        or loaded.
        """
        course = self._course
        if course is None or self._unfinished.place != Position():
            return self._unfinished
        ended: Mapping[str, Any] = {}
        if course.telling is not None:
            hook, index, logs = course.telling
            ended = {
                "hook": hook,
                "index": index,
                "logs": dict(logs),
                "stop": self.stop_training,
                "reason": self.stop_reason,
            }
        sums = self._tracker.state_dict() if course.place.batch else {}
        return PendingFit(
            course.now(),
            sums,
            ended,
            course.calls.state_dict() if course.running else course.callbacks,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], **settings: Any) -> Trainer:
        """The trainer that `save` wrote, or that `save_onnx_graph` left in a folder: the next `fit`
        goes on where it stopped.

        `settings` replace the constructor's arguments of the same name; only a loss, penalty,
        optimizer or metric of your own class must be given again, since a checkpoint holds no code.
        CheckpointError for a file that is none, is damaged, or is from a newer onnxfit.
        """
        contents = checkpoint.load(path, settings)
        with _fitting_this_version(path):
            trainer = cls(contents.model, **contents.settings)
            trainer._take(contents)
        return trainer

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Take back, into this trainer, what `save` wrote of it or of one built alike: the next
        `fit` goes on where that one stood.

        The settings remain this trainer's. CheckpointError as for `load`; SettingError or
        DataError, before anything changes, for a state that is another model's or another
        optimizer's.
        """
        if self._fitting:
            raise SettingError(
                "restore decides where a fit begins: call it before fit, or in a callback's"
                " `prepare`."
            )
        contents = checkpoint.load(path, self.settings)
        with _fitting_this_version(path):
            self._take(contents)

    def _take(self, contents: checkpoint.Contents) -> None:
        self.set_state(contents.state)
        self.history.load_state_dict(contents.history)
        self.train_losses_ = [float(loss) for loss in contents.train_losses]
        place = Position(*contents.resume)
        # of a fit that came to its end nothing is left to go on with
        callbacks = dict(contents.callbacks) if place != Position() else {}
        self._course, self._unfinished = (
            None,
            PendingFit(place, dict(contents.tracker), dict(contents.ended), callbacks),
        )

    def export(
        self, path: str | os.PathLike[str] | None = None, *, averaged: bool = False
    ) -> onnx.ModelProto:
        """The model for inference: the original with the trained weights in place, written to
        `path` unless that is None.

        `averaged=True` takes the averages that `optimizer=Adam(..., ema_momentum=...)` keeps. The
        file holds all of the model; only above 2 GB, which is more than it can, the tensors are in
        a file `<path>.data` beside it. CheckpointError where it cannot be written.
        """
        arrays = self.get_weights()
        if averaged:
            if self.optimizer.ema_momentum is None:
                raise SettingError(
                    "averaged=True needs an optimizer that averages, such as"
                    " optimizer=onnxfit.optimizers.Adam(ema_momentum=0.99)."
                )
            arrays |= {
                name: self._backend.state.get(names.slot(name, "ema"))
                for name in self._backend.recipe.weights
            }
        model = with_initializers(self.model, arrays)
        to_inference_form(model)
        if path is not None:
            write_model(path, model, self._backend.recipe.state)
        return model

    def save_onnx_graph(self, folder: Any, prefix: str = "", suffix: str = "") -> dict[str, Any]:
        """Every graph of this trainer:

        `model`, `trained`, and those of a step, in the order they run.

        They are `train`, `evaluate`, `predict` (backend "full"), or `forward`, `loss`, `backward`,
        `penalty`, `update`, `evaluate`, `predict` ("forward_backward"); with `accumulate`,
        `accumulate` and `update` as well. `folder` is a path, and the result maps graph name ->
        file name `<prefix><graph name><suffix>.onnx`; beside them lies a checkpoint, so that
        `Trainer.load(folder)` goes on from there. Or `folder` is the type `bytes`, and the result
        holds the serialized graphs: the same bytes. A graph with more than 2 GB of tensors has them
        in a file `<file name>.data` beside it, and no serialized form.
        """
        graphs = {"model": self.model, "trained": self.export(None)}
        graphs |= {
            kind: self._backend.any_graph(kind, self._expected_batch())
            for kind in self._backend.kinds
        }
        if folder is bytes:
            return {
                name: graph.SerializeToString(deterministic=True) for name, graph in graphs.items()
            }
        files = {}
        for name, graph in graphs.items():
            files[name] = f"{prefix}{name}{suffix}.onnx"
            write_model(Path(folder) / files[name], graph, self._backend.recipe.state)
        self.save(Path(folder) / f"{prefix}trainer{suffix}{checkpoint.SUFFIX}")
        return files

    def summary(self) -> str:
        """A table of the model's tensors: which are trained, by how many numbers, under which
        penalty.
        """
        return summary.summary(self._backend.recipe, self._inputs)

    def inspect(self) -> Inspection:
        """Every operator of the model: whether the gradient passes it on the way from loss to
        weights, and how. Prints as a table.
        """
        recipe = self._backend.recipe
        gradient = str(self.settings["gradient"])
        return inspect_working(
            recipe.model, recipe.weights, self._loss_outputs or self._outputs, gradient
        )

    # ------------------------------------------------------------------ inside

    def _source(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        what: str,
        shuffle: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> Source:
        if not self._loss_outputs and what != "prediction":
            raise SettingError(
                f"This trainer has no loss, which {what} needs: give it loss=..., or train by"
                " forward, backward and apply_gradients."
            )
        return source(
            x,
            y,
            sample_weight,
            inputs=self._inputs,
            targets={} if what == "prediction" else self._targets,
            batch_size=_ALL if batch_size is None else batch_size,
            shuffle=shuffle,
            seed=self.seed,
            class_weight=class_weight,
            what=what,
        )

    @contextmanager
    def _listening(self, callbacks: Sequence[Callback] | None) -> Iterator[CallbackList]:
        """Callbacks of an evaluation or prediction, closed at its end."""
        # a callback of a fit may evaluate
        outer, self._calls = self._calls, CallbackList(self, callbacks or ())
        calls = self._calls
        try:
            yield calls
        except BaseException as error:
            calls.on_exception(error)
            raise
        finally:
            self._calls = outer
            calls.on_close()

    def _before_step(self) -> Mapping[str, int]:
        return dict(self._backend.state.changes) if self._held else {}

    def _hold(self, before: Mapping[str, int]) -> None:
        """After a step, give back to what is frozen its value before it, which the state's other
        set still has.
        """
        state = self._backend.state
        for name in self._held:
            if state.changes[state.group(name)] != before[state.group(name)]:
                state.buffer(name).write(state.buffer(name, current=False).read())

    def _expected_batch(self) -> dict[str, TensorSpec]:
        """A batch as the model declares it, its sizes mostly names."""
        batch = {spec.name: spec for spec in self._inputs}
        for target in self._targets.values():
            expected = target.loss.target(target.output)
            batch[target.input] = TensorSpec(target.input, expected.dtype, expected.shape)
        return batch

    def _warn_of_loss(self, loss: float) -> None:
        text = (
            f"The loss is {loss} at step {self.global_step}, learning rate {self.learning_rate:g}:"
            " training goes on. Lower the learning rate, or set clip_norm; TerminateOnNaN stops"
            " here and keeps the weights."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=4)


_ALL = 2**62  # a batch size that no data set reaches
_COUNTERS = ("epoch", "global_step", "global_batch", "samples_seen")


@contextmanager
def _fitting_this_version(path: str | os.PathLike[str]) -> Iterator[None]:
    """CheckpointError where a whole checkpoint holds something that cannot be used."""
    try:
        yield
    except OnnxfitError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} does not fit this onnxfit, or is damaged: {error}"
        ) from error


def _refuse_names(recipe: Recipe) -> None:
    """ModelError for tensors of the model that have the name of something a step adds."""
    graph = recipe.model.graph
    own = {names.updated(n) for n in recipe.state} | {names.gradient_sum(n) for n in recipe.weights}
    for weight, slots in recipe.slots.items():
        own |= {form(names.slot(weight, slot)) for slot in slots for form in (str, names.updated)}
    values = [
        *graph.inputs,
        *graph.initializers.values(),
        *(v for node in graph for v in node.outputs),
    ]
    taken = sorted({v.name for v in values if v.name and (names.reserved(v.name) or v.name in own)})
    taken += sorted(
        {node.name for node in graph if node.name and names.reserved(node.name)} - {*taken}
    )
    if taken:
        raise ModelError(
            f"The model has tensors or nodes called {', '.join(taken)}, names that a training step"
            " needs itself: rename them."
        )


def _triple(data: Any) -> tuple[Any, Any, Any]:
    """validation_data as x, y, sample_weight: a tuple (or list) of arrays, or a loader."""
    if isinstance(data, tuple) or (
        isinstance(data, list)
        and len(data) in (2, 3)
        and all(isinstance(d, np.ndarray) for d in data)
    ):
        if len(data) not in (2, 3):
            raise SettingError(
                f"validation_data is (x, y), (x, y, sample_weight) or a loader, got {len(data)}"
                " items."
            )
        return data[0], data[1], data[2] if len(data) == 3 else None
    return data, None, None


def _logs(figures: Figures) -> Logs:
    return Logs(
        {name: value for name, value in figures.items() if not isinstance(value, np.ndarray)}
    )


def _only(arrays: dict[str, Array]) -> Any:
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays
