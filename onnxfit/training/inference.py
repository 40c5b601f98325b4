"""A trainer's evaluations and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.callback_list import CallbackList, as_list
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress.batches import shown_batches
from onnxfit.data import Batch, Source
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec
from onnxfit.registry import check_arguments, shortened
from onnxfit.runtime.values import join_batches
from onnxfit.step.tracker import Figures, Tracker
from onnxfit.training.adapting import adapter_for
from onnxfit.training.base import BaseTrainer, scalar_logs
from onnxfit.training.carried import CarriedStates
from onnxfit.training.ranks import joined_over_ranks, merged_over_ranks

Array = npt.NDArray[Any]


class InferenceTrainer(BaseTrainer):
    """Trainer that can evaluate and predict, over a data set or for one batch."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, type and shape of each input of the model, and the axis of the batch."""
        return self._recipe.data_inputs

    @check_arguments
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        steps: int | None = None,
        callbacks: Callback | Iterable[Callback] | None = (),
        verbose: int | str = 0,
        return_dict: bool = True,
    ) -> Any:
        """Return loss and metrics over a data set. The result is exact for any batch size.

        A loss of `reduction="sum"` is the sum over all rows. Penalties are added once.

        - `x`, `y`, `sample_weight`, `batch_size`, `callbacks`: as in `fit`.
        - `steps`: the number of batches; None evaluates all data.
        - `verbose`: 0 silent, 1 a progress bar, 2 a line at the end, "auto" 1 in a terminal, else
          0.
        - `return_dict`: True for a dict from name to value. False for Keras's list of values, or
          for the loss alone if there are no metrics.

        The values are floats; a confusion matrix is an array.
        """
        check_steps("steps", steps)
        refuse_number(sample_weight, "evaluate")
        with (
            self._source(x, y, sample_weight, batch_size, "evaluation") as data,
            self._calling(callbacks, "evaluate") as called,
        ):
            results = dict(self._evaluate_source(data, called, steps, verbose))
        if return_dict:
            return results
        return list(results.values()) if len(results) > 1 else results["loss"]

    @check_arguments
    def predict(
        self,
        x: Any,
        *,
        batch_size: int = 32,
        steps: int | None = None,
        callbacks: Callback | Iterable[Callback] | None = (),
        verbose: int | str = 0,
    ) -> Any:
        """Return the model's outputs for every row, in the order of the rows.

        - `x`, `batch_size`, `callbacks`: as in `fit`.
        - `steps`, `verbose`: as in `evaluate`.

        A single output is an array, several outputs are a dict. An output has the layout of the
        file, such as [time, batch, classes]. If its sizes, apart from the rows, differ between
        batches, as with sequences of several lengths, or if it has no rows, the output is a list of
        arrays, one per batch. A trainer without a loss can predict, too.

        The trained model is compiled first, so that predictions equal the predictions of the
        exported file bit for bit; `predict_on_batch` does not compile. With more than 512 MB of
        frozen weights, which all graphs share, nothing is compiled, and predictions equal those of
        the exported file within rounding.
        """
        check_steps("steps", steps)
        with (
            self._source(x, None, None, batch_size, "prediction") as data,
            self._calling(callbacks, "predict") as called,
        ):
            return self._predict(data, called, self._backend.deployed, steps, verbose)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Return the loss and metrics of the rows of `x`, `y`, `sample_weight`."""
        with (
            self._single_batches.source("evaluation", x, y, sample_weight) as data,
            self._calling((), "test_on_batch") as called,
        ):
            return dict(self._evaluate_source(data, called, carried=self._carried_in["evaluation"]))

    def predict_on_batch(self, x: Any) -> Any:
        """Return the model's outputs for the rows of `x`, in one run; fast between two steps.

        A quantized model is compiled again after a step, as for `predict`.
        """
        with (
            self._single_batches.source("prediction", x) as data,
            self._calling((), "predict_on_batch") as called,
        ):
            carried = self._carried_in["prediction"]
            return self._predict(data, called, lambda: self._backend.predict, carried=carried)

    # ------------------------------------------------------------------ inside

    def _source(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int,
        purpose: str,
        shuffle: bool = False,
        class_weight: Mapping[int, float] | None = None,
    ) -> Source:
        self._world.refuse_alone(purpose)
        adapter = adapter_for(self._recipe, purpose, self.seed, class_weight, self.world_size)
        source = adapter.source(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
        return source.shard(self.rank, self.world_size)

    def _predict(
        self,
        data: Source,
        callbacks: CallbackList,
        make_run: Callable[[], Callable[[Batch], dict[str, Array]]],
        steps: int | None = None,
        verbose: int | str = 0,
        carried: CarriedStates | None = None,
    ) -> Any:
        with self._carrying(carried):
            outputs = self._predict_source(data, callbacks, make_run, steps, verbose)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    @contextmanager
    def _carrying(self, carried: CarriedStates | None) -> Iterator[None]:
        """Use these states between batches; None begins with new ones."""
        outer = self._thread.carried
        if carried is None:
            carried = CarriedStates(self._recipe, self.settings["fixed_inputs"] or {})
        self._thread.carried = carried
        try:
            yield
        finally:
            self._thread.carried = outer

    @contextmanager
    def _calling(
        self, callbacks: Callback | Iterable[Callback] | None, caller: str
    ) -> Iterator[CallbackList]:
        """Call the callbacks of an evaluation or prediction, and close them at its end.

        - `caller`: the method that evaluates or predicts.
        """
        with self._world.turn(caller):
            self._require_equal_ranks(caller)
            outer = self._thread.callbacks  # a callback of a fit may evaluate
            trainer: Any = self  # a Trainer, the only class that is built
            inner = CallbackList(trainer, as_list(callbacks), world=self._world, caller=caller)
            self._thread.callbacks = inner
            try:
                yield inner
            except BaseException as error:
                inner.on_exception(error)
                raise
            finally:
                self._thread.callbacks = outer
                inner.on_close()

    def _evaluate_source(
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

    def _evaluate_batches(
        self,
        source: Source,
        callbacks: CallbackList,
        steps: int | None,
        verbose: int | str,
    ) -> Figures:
        states = self._thread.carried
        assert states is not None
        tracker = self._new_tracker()
        callbacks.on_test_begin(Logs())
        tells_end = "on_test_batch_end" in callbacks.heard
        exchanges = tells_end and self.world_size > 1
        reads_outputs = bool(self._recipe.metrics or self._recipe.state_outputs)
        batches = shown_batches(source, steps, verbose, "evaluate", self.is_main)
        for index, batch in enumerate(batches):
            if callbacks.test_batch_begin:
                callbacks.on_test_batch_begin(index, Logs())
            loss = math.nan
            this_batch = Tracker(self.objectives, []) if exchanges else None
            if batch.rows:
                batch = states.add_to(batch)
                if self._output_check.pending:
                    self._check_outputs(batch)
                result = self._backend.evaluate(batch, outputs=reads_outputs)
                loss = tracker.update(result, batch)
                if self._recipe.state_outputs:
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

    def _check_outputs(self, batch: Batch) -> None:
        """Warn if the outputs of the first batch contradict their losses."""
        if batch.rows:
            inputs = batch.only(self._recipe.input_names)
            self._output_check.check(self._backend.predict(inputs))

    def _loss_of_all(self, tracker: Tracker, loss: float) -> float:
        """Return the loss of a batch of all ranks, from the trackers of the ranks' shares."""
        whole = self._merged(tracker, "the loss of an evaluated batch")
        if whole.has_counted:
            return whole.loss
        # Every label is masked: the loss is the penalty. Rank 0 has a row of every batch.
        return float(self._world.from_main("the loss of a masked batch", loss))

    def _merged(self, tracker: Tracker, where: str) -> Tracker:
        """Return a tracker with the sums of all ranks."""
        return merged_over_ranks(self._world, where, tracker)[0]

    def _predict_source(
        self,
        source: Source,
        callbacks: CallbackList,
        make_run: Callable[[], Callable[[Batch], dict[str, Array]]],
        steps: int | None = None,
        verbose: int | str = 0,
    ) -> dict[str, Array | list[Array]]:
        """Return output -> array of all rows, or of the first `steps` batches.

        `make_run` returns the function that computes the outputs of a batch. It is called after
        `on_predict_begin`, which may change the weights.
        """
        layout, states = self._recipe.layout, self._thread.carried
        assert states is not None
        results: list[Mapping[str, Any]] = []  # outputs of each batch
        rows: list[int] = []
        outer = self.predicted  # a callback of a prediction may predict
        callbacks.on_predict_begin(Logs())
        run = make_run()
        tells_end = "on_predict_batch_end" in callbacks.heard
        try:
            batches = shown_batches(source, steps, verbose, "predict", self.is_main)
            for index, batch in enumerate(batches):
                if callbacks.predict_batch_begin:
                    callbacks.on_predict_batch_begin(index, Logs())
                predicted: Any = run(states.add_to(batch)) if batch.rows else {}
                if self._recipe.state_outputs and batch.rows:
                    states.take(predicted)
                if tells_end:
                    (predicted,) = joined_over_ranks(self._world, [predicted])
                    predicted = layout.outputs_in_file(predicted)
                self._thread.predicted = predicted
                results.append(predicted)
                rows.append(batch.rows if batch.whole_rows is None else batch.whole_rows)
                if callbacks.predict_batch_end:
                    callbacks.on_predict_batch_end(index, Logs())
        finally:
            self._thread.predicted = outer
        callbacks.on_predict_end(Logs())
        if not tells_end:
            joined = joined_over_ranks(self._world, results)
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


def refuse_number(sample_weight: Any, function: str) -> None:
    """Raise SettingError for a number instead of sample weights."""
    if isinstance(sample_weight, (int, float)):
        raise SettingError(
            f"The third argument of {function} is sample_weight and must have one weight for each"
            f" row, got {shortened(sample_weight)}. Did you mean"
            f" batch_size={shortened(sample_weight)}?"
        )
