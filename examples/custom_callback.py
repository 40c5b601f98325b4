"""Write a callback that logs how far the weights moved, and stops when they have settled."""

from __future__ import annotations

import sys

import numpy as np
from models import dense

import onnxfit


class Settled(onnxfit.callbacks.StatefulCallback):
    """Stop training after `patience` epochs in a row in which the weights hardly moved.

    - `threshold`: a distance of the weights below which an epoch counts.
    - `patience`: the number of such epochs.

    The distance is logged as `moved`: the progress bar, History, CSV files and TensorBoard show it.
    Checkpoints keep `quiet`, so that a resumed training stops where an uninterrupted one would.
    """

    state_attributes = ("quiet",)

    def __init__(self, threshold: float, *, patience: int = 1) -> None:
        self.threshold = threshold
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        self.quiet = 0  # such epochs in a row so far

    def on_epoch_begin(self, epoch: int, logs: onnxfit.callbacks.Logs) -> None:
        self.before = self.trainer.get_weights()

    def on_epoch_end(self, epoch: int, logs: onnxfit.callbacks.Logs) -> None:
        after = self.trainer.get_weights()
        moved = np.sqrt(sum(np.sum((after[name] - self.before[name]) ** 2) for name in after))
        self.trainer.log("moved", moved)
        self.quiet = self.quiet + 1 if moved < self.threshold else 0
        if self.quiet == self.patience:
            self.trainer.stop_training = True
            self.trainer.stop_reason = (
                f"Settled: the weights moved by less than {self.threshold} in {self.patience}"
                " epochs"
            )


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
