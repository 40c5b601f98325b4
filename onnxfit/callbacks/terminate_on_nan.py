"""Stop training in the batch whose loss is not finite."""

from __future__ import annotations

import math

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.checks import check_arguments
from onnxfit.errors import DivergenceError

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Stop in the batch whose loss is NaN or infinite, and undo the update of that batch.

    - `raise_error`: raise DivergenceError (a RuntimeError) with the step, the learning rate and the
      last losses, once the update is undone. Otherwise `trainer.stop_training` is set,
      `trainer.stop_reason` has the same information, and the epoch ends as usual, so that loggers
      show it.

    Afterwards the weights have their values from before the step.

    >>> stop = TerminateOnNaN(raise_error=True)
    """

    @check_arguments
    def __init__(self, raise_error: bool = False) -> None:
        self.raise_error = raise_error

    def needs_synced_logs(self, batch: int) -> bool:
        # Ranks that share gradients have the same loss; those that average weights do not.
        averages = self.callbacks.world.average_every is not None
        return averages or not math.isfinite(self.trainer.last_losses[-1])

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        loss = logs["batch_loss"]
        if math.isfinite(loss):
            return
        trainer = self.trainer
        last = ", ".join(f"{value:.6g}" for value in trainer.last_losses)
        reason = (
            f"the loss is {loss} at step {trainer.global_step} (epoch {trainer.epoch + 1}, batch"
            f" {batch + 1}); learning rate {trainer.learning_rate:g}, last losses {last}"
        )
        trainer.revert_step()
        if self.raise_error:
            raise DivergenceError(
                f"TerminateOnNaN: {reason}. The weights from before the step were restored. Try a"
                " lower learning rate, or clip_norm."
            )
        trainer.stop_reason = f"TerminateOnNaN: {reason}."
        trainer.stop_training = True
