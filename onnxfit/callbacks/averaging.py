"""Use averages of the weights: the optimizer's running average, or the mean of the last epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.learning_rate import require_constant_rate
from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.stateful_callback import StatefulCallback, require_weights
from onnxfit.checks import check_arguments, require_at_least
from onnxfit.errors import CheckpointError, SettingError, listed_names
from onnxfit.files import ARRAY, COUNT, mapping_of, optional
from onnxfit.graph import names

__all__ = ["StochasticWeightAveraging", "SwapEMAWeights"]

Array = npt.NDArray[Any]


class SwapEMAWeights(StatefulCallback):
    """Replace the weights by their averages for every validation, and after training.

    The averages are those of an optimizer such as `Adam(ema_momentum=0.99)` or
    `ScheduleFreeAdamW()`.

    - `swap_on_epoch`: use the averages at the end of each epoch too, until the next epoch begins.
      Checkpoints, best weights and loggers of an epoch then see the averages. A checkpoint contains
      the weights as well, and training resumes from the weights.
    - `at_end`: the averages stay when training ends normally. The next `fit` with this callback
      restores the weights first, unless others have been set since.

    A callback of the same phase that reads weights, such as
    EarlyStopping(restore_best_weights=True), sees the averages only if it comes after this one in
    the list. Running statistics of BatchNormalization are not averaged. After an exception the
    weights are restored. `trainer.evaluate(..., callbacks=[SwapEMAWeights()])` evaluates the
    averages. A swap copies all weights and slots once.

    SettingError, before training: the optimizer keeps no averages.

    >>> swap = SwapEMAWeights(swap_on_epoch=True)
    """

    state_attributes = {"weights": optional(mapping_of(ARRAY))}

    @check_arguments
    def __init__(self, swap_on_epoch: bool = False, *, at_end: bool = True) -> None:
        self.swap_on_epoch = swap_on_epoch
        self.at_end = at_end
        # The weights, while the averages replace them in the trainer.
        self.weights: dict[str, Array] | None = None
        self._averages: dict[str, Array] = {}

    def reset(self) -> None:
        current = self.trainer.get_weights(copy=False)
        if not all(
            name in current and np.array_equal(current[name], average)
            for name, average in self._averages.items()
        ):
            # This fit has another trainer, or the weights have been set since the last fit.
            self.weights = None

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._check()
        require_weights(self, "weights", self.weights or {})
        self._swap_back()

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._swap_back()

    def on_test_begin(self, logs: Logs) -> None:
        self._check()
        self._swap_in()

    def on_test_end(self, logs: Logs) -> None:
        self._swap_back()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self.swap_on_epoch:
            self._swap_in()

    def on_train_end(self, logs: Logs) -> None:
        if self.at_end:
            self._swap_in()
        else:
            self._swap_back()

    def on_exception(self, exception: BaseException) -> None:
        self._swap_back()

    def _check(self) -> None:
        if None in self.trainer.optimizer.average_slots.values():
            raise SettingError(
                "SwapEMAWeights needs an optimizer that averages the weights, such as"
                " optimizer=onnxfit.optimizers.Adam(ema_momentum=0.99)."
            )

    def _swap_in(self) -> None:
        if self.weights is None:
            state = self.trainer.get_state()
            trained = self.trainer.settings["weights"]
            self.weights = {name: state["weights"][name] for name in trained}
            slots = self.trainer.optimizer.average_slots
            self._averages = {n: state["slots"][names.slot(n, slots[n] or "")] for n in trained}
            self.trainer.set_weights(self._averages)

    def _swap_back(self) -> None:
        if self.weights is not None:
            self.trainer.set_weights(self.weights)
            self.weights = None


class StochasticWeightAveraging(StatefulCallback):
    r"""End training at the mean of the weights of the last epochs (Izmailov et al. 2018).

    - `start_epoch`: the first epoch, from 0, whose weights are averaged: a whole number >= 0, or a
      fraction of `epochs`, in [0, 1).
    - `learning_rate` >= 0: the learning rate from that epoch on; None does not change the rate.
    - `update_batch_norm`: if the model has running statistics, iterate over the training data once
      more with the averaged weights, and set the statistics to the means over all batches. False
      averages the statistics in the same way as the weights; this is less exact and needs no data.

    After each epoch from `start_epoch` on, $\bar w \leftarrow \bar w + (w - \bar w)/(k+1)$ in
    float64, where $k$ epochs have been averaged so far. When training ends, $\bar w$ replaces $w$.
    Training that stops before `start_epoch` keeps its weights.

    SettingError: a setting is out of its range. DataError, at the end of training: the statistics
    need the data again, but the data can be iterated over only once. TypeError, before training:
    `learning_rate` is given although a Schedule sets the optimizer's learning rate.

    >>> average = StochasticWeightAveraging(0.75, learning_rate=0.01)
    """

    state_attributes = {"count": COUNT, "mean": mapping_of(ARRAY)}

    @check_arguments
    def __init__(
        self,
        start_epoch: float = 0.8,
        *,
        learning_rate: float | None = None,
        update_batch_norm: bool = True,
    ) -> None:
        is_fraction = isinstance(start_epoch, float)
        if not start_epoch >= 0 or (is_fraction and start_epoch >= 1):
            raise SettingError(
                "StochasticWeightAveraging needs start_epoch to be a whole number >= 0, or a"
                f" fraction of the epochs in [0, 1), got {start_epoch}."
            )
        require_at_least("StochasticWeightAveraging", 0, learning_rate=learning_rate)
        self.start_epoch = start_epoch
        self.learning_rate = learning_rate
        self.update_batch_norm = update_batch_norm
        self.reset()

    def reset(self) -> None:
        self.count = 0  # epochs averaged
        self.mean: dict[str, Array] = {}

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        require_weights(self, "mean", self.mean, np.float64)
        if self.count and set(self.mean) != set(self.trainer.get_weights(copy=False)):
            raise CheckpointError(
                f"The saved state of {self.state_key} has means of {listed_names(self.mean)}, but"
                " expected a mean of every weight. The state belongs to another model. Resume from"
                " a checkpoint of this model."
            )
        if self.learning_rate is not None:
            require_constant_rate(self, "StochasticWeightAveraging", "Remove either.")

    @property
    def first_epoch(self) -> int:
        """First epoch of the running `fit`, from 0, whose weights are averaged."""
        start = self.start_epoch
        return int(start * self.params["epochs"]) if isinstance(start, float) else start

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self.learning_rate is not None and epoch >= self.first_epoch:
            self.trainer.learning_rate = self.learning_rate

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if epoch < self.first_epoch:
            return
        self.count += 1
        for name, weight in self.trainer.get_weights(copy=False).items():
            exact = weight.astype(np.float64)
            mean = self.mean.get(name, exact)
            self.mean[name] = mean + (exact - mean) / self.count

    def on_train_end(self, logs: Logs) -> None:
        if not self.count:
            return
        trainer = self.trainer
        weights = trainer.get_weights(copy=False)
        trainer.set_weights({name: self.mean[name].astype(w.dtype) for name, w in weights.items()})
        statistics = [name for name in weights if name not in trainer.settings["weights"]]
        quantization = trainer.settings["quantization"]
        # Observed ranges of a quantization are not statistics of batches.
        observed = quantization is not None and quantization.observe
        if statistics and self.update_batch_norm and not observed:
            trainer.set_weights(self._statistics(statistics))

    def _statistics(self, names: list[str]) -> dict[str, Array]:
        """Return the mean of the batches' own statistics, over one pass of the training data.

        A training step updates a running statistic s to m s + (1 - m) b, where b is the statistic
        of the batch. From s = 0 the result is (1 - m) b; from s = 1 it is larger by m.
        """
        weights = self.trainer.get_weights()
        zeros = weights | {name: np.zeros_like(weights[name]) for name in names}
        ones = weights | {name: np.ones_like(weights[name]) for name in names}
        from_ones = next(self._after_batches(ones, names))
        from_zeros = next(self._after_batches(zeros, names))
        momentum = {name: from_ones[name] - from_zeros[name] for name in names}
        total: dict[str, Array] = {}
        batches = 0
        for statistics in self._after_batches(zeros, names):
            batches += 1
            total = {name: total.get(name, 0.0) + statistics[name] for name in names}
        self.trainer.set_weights(weights)
        return {
            name: (total[name] / batches / (1 - momentum[name])).astype(weights[name].dtype)
            for name in names
            if np.all(momentum[name] < 1)
        }

    def _after_batches(
        self, weights: dict[str, Array], names: list[str]
    ) -> Iterator[dict[str, Array]]:
        """Yield the statistics after a step on each batch; every step begins at `weights`."""
        self.trainer.set_weights(weights)
        with closing(self.trainer.trial_steps(repeat(0.0))) as steps:
            for _ in steps:
                updated = self.trainer.get_weights(copy=False)
                yield {name: updated[name].astype(np.float64) for name in names}
                self.trainer.set_weights(weights)
