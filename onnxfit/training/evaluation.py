"""Evaluations and predictions over a data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.callback_list import CallbackList, as_list
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress.batches import shown_batches
from onnxfit.checks import shortened
from onnxfit.data import Batch, Source
from onnxfit.errors import DataError, SettingError
from onnxfit.runtime.values import join_batches
from onnxfit.step.tracker import Figures, Tracker
from onnxfit.training.carried import CarriedStates
from onnxfit.training.ranks import joined_over_ranks, merged_over_ranks
from onnxfit.training.training import Training, scalar_logs

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

Array = npt.NDArray[Any]


class Evaluator:
    """Evaluates and predicts with the model in training.

    - `trainer`: the trainer that callbacks see.
    """

    def __init__(self, training: Training, trainer: Trainer) -> None:
        self.training = training
        self.trainer = trainer

    @contextmanager
    def calling(
        self, callbacks: Callback | Iterable[Callback] | None, caller: str
    ) -> Iterator[CallbackList]:
        """Call the callbacks of an evaluation or prediction, and close them at its end.

        - `caller`: the method that evaluates or predicts.
        """
        with self.training.world.collective(caller):
            self.training.require_equal_ranks(caller)
            outer = self.training.thread.callbacks  # a callback of a fit may evaluate
            world = self.training.world
            inner = CallbackList(self.trainer, as_list(callbacks), world=world, caller=caller)
            self.training.thread.callbacks = inner
            try:
                yield inner
            except BaseException as error:
                inner.on_exception(error)
                raise
            finally:
                self.training.thread.callbacks = outer
                inner.on_close()

    def evaluate(
        self,
        source: Source,
        callbacks: CallbackList,
        steps: int | None = None,
        verbose: int | str = 0,
        carried: CarriedStates | None = None,
    ) -> Figures:
        """Return loss and metrics over the data, or over its first `steps` batches.

        - `carried`: the states before the first batch; None begins with new ones.
        """
        with self._carrying(carried):
            return self._evaluate_batches(source, callbacks, steps, verbose)

    def predict(
        self,
        data: Source,
        callbacks: CallbackList,
        make_run: Callable[[], Callable[[Batch], dict[str, Array]]],
        steps: int | None = None,
        verbose: int | str = 0,
        carried: CarriedStates | None = None,
    ) -> Any:
        """Return the outputs of all rows, or of the first `steps` batches; see `Trainer.predict`.

        - `make_run`: returns the function that computes the outputs of a batch. It is called after
          `on_predict_begin`, which may change the weights.
        - `carried`: the states before the first batch; None begins with new ones.
        """
        with self._carrying(carried):
            outputs = self._predict_source(data, callbacks, make_run, steps, verbose)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _carrying(self, carried: CarriedStates | None) -> Iterator[None]:
        """Use these states between batches; None begins with new ones."""
        outer = self.training.thread.carried
        if carried is None:
            carried = self.training.new_carried()
        self.training.thread.carried = carried
        try:
            yield
        finally:
            self.training.thread.carried = outer

    def _evaluate_batches(
        self,
        source: Source,
        callbacks: CallbackList,
        steps: int | None,
        verbose: int | str,
    ) -> Figures:
        states = self.training.thread.carried
        assert states is not None
        tracker = self.training.new_tracker()
        callbacks.on_test_begin(Logs())
        tells_end = "on_test_batch_end" in callbacks.subscribed
        exchanges = tells_end and self.training.world.size > 1
        reads_outputs = bool(self.training.recipe.metrics or self.training.recipe.state_outputs)
        batches = shown_batches(source, steps, verbose, "evaluate", self.training.world.is_main)
        for index, batch in enumerate(batches):
            if callbacks.test_batch_begin:
                callbacks.on_test_batch_begin(index, Logs())
            loss = math.nan
            this_batch = Tracker(self.training.recipe.objectives, []) if exchanges else None
            if batch.rows:
                batch = states.add_to(batch)
                if self.training.output_check.pending:
                    self.training.check_outputs(batch)
                result = self.training.backend.evaluate(batch, outputs=reads_outputs)
                loss = tracker.update(result, batch)
                if self.training.recipe.state_outputs:
                    states.take(result.prediction())
                if this_batch is not None:
                    this_batch.update(result, batch)
            if tells_end:
                whole = self._merged(tracker, "the end of an evaluated batch")
                if this_batch is not None:
                    loss = self._loss_of_all(this_batch, loss)
                logs = scalar_logs({**whole.figures(), "batch_loss": loss})
                callbacks.on_test_batch_end(index, logs)
        tracker = self._merged(tracker, "the end of an evaluation")
        if not tracker.rows:
            raise DataError("The evaluation data is empty: it gave no batches.")
        results = tracker.results()
        callbacks.on_test_end(scalar_logs(results))
        return results

    def _loss_of_all(self, tracker: Tracker, loss: float) -> float:
        """Return the loss of a batch of all ranks, from the trackers of the ranks' shares."""
        whole = self._merged(tracker, "the loss of an evaluated batch")
        if whole.has_counted:
            return whole.loss
        # Every label is masked: the loss is the penalty. Rank 0 has a row of every batch.
        return float(self.training.world.broadcast("the loss of a masked batch", loss))

    def _merged(self, tracker: Tracker, where: str) -> Tracker:
        """Return a tracker with the sums of all ranks."""
        return merged_over_ranks(self.training.world, where, tracker)[0]

    def _predict_source(
        self,
        source: Source,
        callbacks: CallbackList,
        make_run: Callable[[], Callable[[Batch], dict[str, Array]]],
        steps: int | None = None,
        verbose: int | str = 0,
    ) -> dict[str, Array | list[Array]]:
        """Return output -> array of all rows, or a list of the arrays of batches."""
        layout, states = self.training.recipe.layout, self.training.thread.carried
        assert states is not None
        results: list[Mapping[str, Any]] = []  # outputs of each batch
        rows: list[int] = []
        outer = self.training.thread.current_outputs  # a callback of a prediction may predict
        callbacks.on_predict_begin(Logs())
        run = make_run()
        tells_end = "on_predict_batch_end" in callbacks.subscribed
        try:
            batches = shown_batches(source, steps, verbose, "predict", self.training.world.is_main)
            for index, batch in enumerate(batches):
                if callbacks.predict_batch_begin:
                    callbacks.on_predict_batch_begin(index, Logs())
                predicted: Any = run(states.add_to(batch)) if batch.rows else {}
                if self.training.recipe.state_outputs and batch.rows:
                    states.take(predicted)
                if tells_end:
                    (predicted,) = joined_over_ranks(self.training.world, [predicted])
                    predicted = layout.outputs_in_file(predicted)
                self.training.thread.current_outputs = predicted
                results.append(predicted)
                rows.append(batch.rows_of_all)
                if callbacks.predict_batch_end:
                    callbacks.on_predict_batch_end(index, Logs())
        finally:
            self.training.thread.current_outputs = outer
        callbacks.on_predict_end(Logs())
        if not tells_end:
            joined = joined_over_ranks(self.training.world, results)
            results = [layout.outputs_in_file(one) for one in joined]
        if not results:
            raise DataError("The prediction data is empty: it gave no batches.")
        outputs: dict[str, Array | list[Array]] = {}
        for name in results[0]:
            arrays = [one[name] for one in results]
            outputs[name] = join_batches(arrays, layout.joining_axis(name, arrays, rows))
        return outputs


def check_steps(name: str, steps: int | None) -> None:
    """Raise SettingError unless the argument `name` is a number of batches, or None for all."""
    if steps is not None and not 1 <= steps < 2**63:
        raise SettingError(f"{name} must be >= 1, got {shortened(steps)}.")


def as_keras(results: Mapping[str, Any], return_dict: bool) -> Any:
    """Return figures as a dict, or as Keras's list; as the loss alone if there are no metrics."""
    if return_dict:
        return dict(results)
    return list(results.values()) if len(results) > 1 else results["loss"]


def refuse_number(sample_weight: Any, function: str) -> None:
    """Raise SettingError for a number instead of sample weights."""
    if isinstance(sample_weight, (int, float)):
        raise SettingError(
            f"The third argument of {function} is sample_weight and must have one weight for each"
            f" row, got {shortened(sample_weight)}. Did you mean"
            f" batch_size={shortened(sample_weight)}?"
        )
