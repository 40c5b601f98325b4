"""Keep the metrics of every epoch."""

from __future__ import annotations

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.files import COUNT, FIGURE, list_of, mapping_of

__all__ = ["History"]


class History(StatefulCallback):
    """Keep the metrics of every epoch; `fit` returns one.

    `history` maps each metric to the list of its values at the ends of the epochs that had one;
    `epoch` is the list of those epochs, from 0. Every `fit` begins with an empty history unless a
    saved state was loaded, so that a resumed history equals an uninterrupted one.

    >>> History()
    History(epochs=0, names=[])
    """

    remembered = {"epoch": list_of(COUNT), "history": mapping_of(list_of(FIGURE))}

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return f"History(epochs={len(self.epoch)}, names={list(self.history)})"

    def reset(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # The phase is that of monitors, so that a checkpoint of this epoch contains its metrics.
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
