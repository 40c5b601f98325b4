"""Use averages of the weights: the optimizer's running one, or the mean over the last epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import SettingError
from onnxfit.graph import names

__all__ = ["StochasticWeightAveraging", "SwapEMAWeights"]

Array = npt.NDArray[Any]


class SwapEMAWeights(StatefulCallback):
    """Puts the averages of `optimizer=Adam(..., ema_momentum=...)` in place of the weights for
    every validation, and after training.

    - `swap_on_epoch`: at the end of each epoch too, until the next one begins, so that the
      checkpoints, best weights and loggers of an epoch see the averages. A checkpoint has the
      weights as well, and training resumes from those.
    - `at_end`: the averages remain in place when training ends normally. The next `fit` with this
      callback takes up the weights again, unless others have been set since.

    A callback of the same phase that reads weights, such as
    EarlyStopping(restore_best_weights=True), must come after this one to see the averages. Running
    statistics of BatchNormalization are not averaged. After an exception the weights are in place.
    In `trainer.evaluate(..., callbacks=[...])` it evaluates the averages. A swap copies all weights
    and slots once.

    SettingError, before training: the optimizer keeps no averages.
    """

    remembered = ("weights",)

    def __init__(self, swap_on_epoch: bool = False, at_end: bool = True) -> None:
        self.swap_on_epoch = swap_on_epoch
        self.at_end = at_end
        self.weights: dict[str, Array] | None = None  # while the averages are in their place
        self._averages: dict[str, Array] = {}

    def reset(self) -> None:
        now = self.trainer.get_weights()
        if not all(
            name in now and np.array_equal(now[name], average)
            for name, average in self._averages.items()
        ):
            self.weights = None  # another trainer's, or replaced since

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        self._check()
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
        if self.trainer.optimizer.ema_momentum is None:
            raise SettingError(
                "SwapEMAWeights needs an optimizer that averages, such as"
                " optimizer=onnxfit.optimizers.Adam(ema_momentum=0.99)."
            )

    def _swap_in(self) -> None:
        if self.weights is None:
            state = self.trainer.get_state()
            trained = self.trainer.settings["weights"]
            self.weights = {name: state["weights"][name] for name in trained}
            self._averages = {name: state["slots"][names.slot(name, "ema")] for name in trained}
            self.trainer.set_weights(self._averages)

    def _swap_back(self) -> None:
        if self.weights is not None:
            self.trainer.set_weights(self.weights)
            self.weights = None


class StochasticWeightAveraging(StatefulCallback):
    r"""Ends training at the mean of the weights at the ends of the last epochs (Izmailov et al.
    2018).

    $\bar w \leftarrow \bar w + (w - \bar w)/(k+1)$ after each epoch from `start_epoch` on, $k$
    epochs having been averaged so far; when training ends, $\bar w$ takes the place of $w$.

    - `start_epoch`: a whole number >= 0, the first epoch whose end is averaged; or a fraction of
      `epochs`, in [0, 1).
    - `learning_rate` >= 0: what the learning rate is from that epoch on; None leaves it alone.
    - `update_batch_norm`: where the model has running statistics, pass over the training data once
      more with the averaged weights and put the mean of all its batches' statistics in their place.
      Otherwise the statistics are averaged as the weights are, which is less exact and needs no
      pass.

    The mean is kept in float64. Training that stops before `start_epoch` keeps its weights.
    SettingError: a setting out of its range; DataError at the end of training: statistics are to be
    computed from data that can be passed over only once. TypeError, before training:
    `learning_rate` is given, and the optimizer's is driven by a Schedule.
    """

    remembered = ("count", "mean")

    def __init__(
        self,
        start_epoch: float = 0.8,
        learning_rate: float | None = None,
        update_batch_norm: bool = True,
    ) -> None:
        fraction = isinstance(start_epoch, float)
        if not start_epoch >= 0 or (fraction and start_epoch >= 1):
            raise SettingError(
                "StochasticWeightAveraging needs a start_epoch >= 0 or a fraction in [0, 1), got"
                f" {start_epoch}."
            )
        if learning_rate is not None and not learning_rate >= 0:
            raise SettingError(
                f"StochasticWeightAveraging needs learning_rate >= 0, got {learning_rate}."
            )
        self.start_epoch = start_epoch
        self.learning_rate = learning_rate
        self.update_batch_norm = update_batch_norm
        self.reset()

    def reset(self) -> None:
        self.count = 0  # epochs averaged
        self.mean: dict[str, Array] = {}

    def on_train_begin(self, logs: Logs) -> None:
        super().on_train_begin(logs)
        rate = self.trainer.optimizer.learning_rate
        if self.learning_rate is not None and callable(rate):
            raise TypeError(
                f"StochasticWeightAveraging cannot set a learning rate that {rate!r} sets at every"
                " update: drop either."
            )

    @property
    def first_epoch(self) -> int:
        """The first epoch whose end is averaged, in the running `fit`."""
        start = self.start_epoch
        return int(start * self.params["epochs"]) if isinstance(start, float) else start

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self.learning_rate is not None and epoch >= self.first_epoch:
            self.trainer.learning_rate = self.learning_rate

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if epoch < self.first_epoch:
            return
        weights = {name: w.astype(np.float64) for name, w in self.trainer.get_weights().items()}
        self.count += 1
        self.mean = {
            name: (mean := self.mean.get(name, w)) + (w - mean) / self.count
            for name, w in weights.items()
        }

    def on_train_end(self, logs: Logs) -> None:
        if not self.count:
            return
        trainer = self.trainer
        now = trainer.get_weights()
        trainer.set_weights({name: self.mean[name].astype(w.dtype) for name, w in now.items()})
        statistics = [name for name in now if name not in trainer.settings["weights"]]
        if statistics and self.update_batch_norm:
            trainer.set_weights(self._statistics(statistics))

    def _statistics(self, statistics: list[str]) -> dict[str, Array]:
        """The mean, over the batches of one pass, of what each batch's own statistics are."""
        trainer = self.trainer
        weights = trainer.get_weights()
        zeros = weights | {name: np.zeros_like(weights[name]) for name in statistics}
        ones = weights | {name: np.ones_like(weights[name]) for name in statistics}
        # a step makes m s + (1 - m) b of a statistic s, where b is the batch's: b from s = 0, and m
        # from s = 1 besides
        from_ones, from_zeros = next(self._after_batches(ones, statistics)), next(
            self._after_batches(zeros, statistics)
        )
        kept = {name: from_ones[name] - from_zeros[name] for name in statistics}
        total: dict[str, Array] = {}
        batches = 0
        for found in self._after_batches(zeros, statistics):
            batches += 1
            total = {name: total.get(name, 0.0) + found[name] for name in statistics}
        trainer.set_weights(weights)
        return {
            name: (total[name] / batches / (1 - kept[name])).astype(weights[name].dtype)
            for name in statistics
            if np.all(kept[name] < 1)
        }

    def _after_batches(
        self, weights: dict[str, Array], statistics: list[str]
    ) -> Iterator[dict[str, Array]]:
        """The statistics after a step on each batch of one pass, every one of which begins at these
        weights.
        """
        self.trainer.set_weights(weights)
        with closing(self.trainer.trial_steps(repeat(0.0))) as steps:
            for _ in steps:
                found = self.trainer.get_weights()
                yield {name: found[name].astype(np.float64) for name in statistics}
                self.trainer.set_weights(weights)
