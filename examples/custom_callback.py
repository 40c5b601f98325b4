"""A callback of one's own: logs how far the weights moved, and stops when they have settled."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from models import dense

import onnxfit


class Settled(onnxfit.callbacks.Callback):
    """Logs `moved`, the distance the weights went in an epoch; ends training after `patience`
    epochs in a row below `threshold`.

    What `trainer.log` adds is seen by every later callback: the progress bar, History, CSV files
    and TensorBoard show `moved` too.
    """

    def __init__(self, threshold: float, patience: int = 1) -> None:
        self.threshold = threshold
        self.patience = patience
        self.quiet = 0

    def on_epoch_begin(self, epoch: int, logs: onnxfit.callbacks.Logs) -> None:
        self.before = self.trainer.get_weights()

    def on_epoch_end(self, epoch: int, logs: onnxfit.callbacks.Logs) -> None:
        now = self.trainer.get_weights()
        moved = np.sqrt(sum(np.sum((now[name] - self.before[name]) ** 2) for name in now))
        self.trainer.log("moved", moved)
        self.quiet = self.quiet + 1 if moved < self.threshold else 0
        if self.quiet == self.patience:
            self.trainer.stop_training = True
            self.trainer.stop_reason = (
                f"Settled: the weights moved by less than {self.threshold} in {self.patience}"
                " epochs"
            )

    # what a checkpoint keeps, so that a run that was killed stops where it would have stopped
    def state_dict(self) -> dict[str, Any]:
        return {"quiet": self.quiet}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.quiet = state["quiet"]


def main() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((512, 4)).astype(np.float32)
    y = X @ np.array([1.0, -2.0, 3.0, 0.5], np.float32) + 1

    trainer = onnxfit.Trainer(dense(4, 1), loss="mse", optimizer=onnxfit.optimizers.SGD(0.05))
    history = trainer.fit(X, y, epochs=100, callbacks=[Settled(1e-3, patience=2)], verbose=0)

    moved = history.history["moved"]
    print("moved   ", " ".join(f"{m:.4f}" for m in moved))
    print(f"epochs   {len(moved)}: {trainer.stop_reason}")
    if not (len(moved) < 100 and max(moved[-2:]) < 1e-3 <= min(moved[:-2])):
        sys.exit(
            "custom_callback: training was to end with the second epoch that moves the weights by"
            " less than 0.001"
        )


if __name__ == "__main__":
    main()
