"""What every epoch's end reported."""

from __future__ import annotations

from onnxfit.callbacks.callback import StatefulCallback
from onnxfit.callbacks.logs import Logs

__all__ = ["History"]


class History(StatefulCallback):
    """`history`: name -> list of the values at the ends of the epochs that had one;

    `epoch`: the numbers of those epochs, from 0.

    `fit` returns one. Every `fit` begins afresh unless a saved state was loaded, so that a resumed
    history equals an uninterrupted one.
    """

    remembered = ("epoch", "history")

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return f"History(epochs={len(self.epoch)}, names={list(self.history)})"

    def reset(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # in the phase of monitors, so that a checkpoint of this epoch has its figures
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
