"""The base of every callback, and the list that calls them in order.

The loop, with every hook:

    on_train_begin()
    for epoch in ...:
        on_epoch_begin(epoch)
        for batch in ...:
            on_train_batch_begin(batch)
            ... one step: forward, loss, gradient, update ...     (forward_backward: on_gradients(gradients) before the update)
            on_train_batch_end(batch, {"loss", metrics, "batch_loss"})
        on_test_begin(); on_test_batch_begin/end ...; on_test_end({"loss", metrics})          where there is validation data
        on_epoch_end(epoch, {"loss", metrics, "val_loss", ..., "learning_rate"})
    on_train_end(logs of the last epoch)
    finally: on_exception(exception) if one came; on_close()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

if TYPE_CHECKING:
    from onnxfit.trainer import Trainer

Logs = Mapping[str, float]


class Callback:
    """Override the hooks you need; every one is optional. `self.trainer` and `self.params` are set before the first."""

    phase: ClassVar[str] = "monitor"  # "monitor" before "checkpoint" before "logger", whatever the order of the list

    trainer: Trainer
    params: dict[str, Any]

    @property
    def state_key(self) -> str:
        """What tells this callback's saved state from another's: the class name plus what distinguishes it."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, as JSON (numbers, strings, lists, dicts) and numpy arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def on_train_begin(self, logs: Logs) -> None: ...
    def on_train_end(self, logs: Logs) -> None: ...
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None: ...
    def on_epoch_end(self, epoch: int, logs: Logs) -> None: ...
    def on_train_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_train_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_test_begin(self, logs: Logs) -> None: ...
    def on_test_end(self, logs: Logs) -> None: ...
    def on_test_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_test_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_predict_begin(self, logs: Logs) -> None: ...
    def on_predict_end(self, logs: Logs) -> None: ...
    def on_predict_batch_begin(self, batch: int, logs: Logs) -> None: ...
    def on_predict_batch_end(self, batch: int, logs: Logs) -> None: ...
    def on_gradients(self, gradients: dict[str, npt.NDArray[Any]]) -> None: ...
    def on_exception(self, exception: BaseException) -> None: ...
    def on_close(self) -> None: ...
