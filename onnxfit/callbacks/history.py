"""Keep the metrics of every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Union

from onnxfit.callbacks.logs import Logs
from onnxfit.callbacks.progress.line import number_text
from onnxfit.callbacks.stateful_callback import StatefulCallback
from onnxfit.checks import check_arguments, name_list
from onnxfit.drawing.notebook import paragraph
from onnxfit.drawing.tables import Table
from onnxfit.errors import InstallationError, SettingError, UnknownNameError
from onnxfit.files import COUNT, FIGURE, list_of, mapping_of, require_types

__all__ = ["History"]

VALIDATION = "val_"  # the beginning of the names of validation metrics
EPOCHS_TYPE = {"epochs_by_name": mapping_of(list_of(COUNT))}
MAX_EPOCHS_SHOWN = 20  # of a table in a notebook
LAST_EPOCHS_SHOWN = 15  # of a longer table
MAX_POINTS_WITH_MARKERS = 29


class History(StatefulCallback):
    """Keep the metrics of every epoch; `fit` returns one.

    `history` maps each metric to the list of its values at the ends of epochs. `epoch` is the list
    of all epochs, from 0. `epochs_by_name` maps each metric to the epochs in which it had a value,
    because validation may not follow every epoch. `plot` draws the metrics, `frame` returns them as
    a table, and a notebook shows that table. Every `fit` begins with an empty history unless a
    saved state was loaded, so that a resumed history equals an uninterrupted one.

    >>> History()
    History(epochs=0, names=[])
    """

    is_brief: ClassVar[bool] = True
    state_attributes = {"epoch": list_of(COUNT), "history": mapping_of(list_of(FIGURE))}

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return f"History(epochs={len(self.epoch)}, names={list(self.history)})"

    def reset(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}
        self.epochs_by_name: dict[str, list[int]] = {}

    def state_dict(self) -> dict[str, Any]:
        epochs = {name: list(listed) for name, listed in self.epochs_by_name.items()}
        return {**super().state_dict(), "epochs_by_name": epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. CheckpointError: a value has another type.

        - `state`: the dict that `state_dict` returned.
        """
        epochs = {"epochs_by_name": state.get("epochs_by_name", {})}  # older checkpoints lack it
        require_types("The saved state of History", epochs, EPOCHS_TYPE)
        super().load_state_dict(state)
        self.epochs_by_name = {
            name: list(listed) for name, listed in epochs["epochs_by_name"].items()
        }

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        # The phase is that of monitors, so that a checkpoint of this epoch contains its metrics.
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
            self.epochs_by_name.setdefault(name, []).append(epoch)

    @check_arguments
    def plot(self, names: Union[Sequence[str], str, None] = None) -> tuple[Any, ...]:
        """Draw the metrics over the epochs, counted from 1, with matplotlib.

        - `names`: a metric or several, without `val_`. None draws all, but the learning rate only
          if it changed. Each metric has its own panel with the curves of training and validation.

        Return the matplotlib Axes of the panels; `axes[0].figure` is the Figure. Notebooks show it
        at the end of the cell; elsewhere call `matplotlib.pyplot.show()` or `figure.savefig(path)`.

        InstallationError: matplotlib is not installed. UnknownNameError: a name is not a metric of
        this history. SettingError: the history is empty.
        """
        known = list(dict.fromkeys(name.removeprefix(VALIDATION) for name in self.history))
        is_changing = len({*self.history.get("learning_rate", ())}) > 1
        drawn = [name for name in known if name != "learning_rate" or is_changing]
        chosen = drawn if names is None else name_list("names", names)
        for name in chosen:
            if name not in known:
                raise UnknownNameError("metric of this history", name, known)
        if not chosen:
            raise SettingError("This history has no metrics to plot. Train for an epoch first.")
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise InstallationError(
                'History.plot needs matplotlib: pip install "onnxfit[notebook]".'
            ) from None
        columns = min(len(chosen), 3)
        rows = -(-len(chosen) // columns)
        _, grid = plt.subplots(
            rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False, layout="constrained"
        )
        axes = tuple(grid.flat)
        for panel, name in zip(axes, chosen):
            self._draw(panel, name)
        for panel in axes[len(chosen) :]:
            panel.remove()
        return axes[: len(chosen)]

    def _draw(self, panel: Any, name: str) -> None:
        """Draw a metric and its validation into a panel."""
        for key, label in ((name, "training"), (VALIDATION + name, "validation")):
            if key in self.history:
                epochs = [epoch + 1 for epoch in self._epochs_of(key)]
                marker = "." if len(epochs) <= MAX_POINTS_WITH_MARKERS else None
                panel.plot(epochs, self.history[key], marker=marker, label=label)
        panel.set(title=name, xlabel="epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
        if VALIDATION + name in self.history:
            panel.legend()

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame.

        It has a row for each epoch, counted from 1 as in `plot`, and a column for each metric. A
        metric without a value at an epoch is NaN there.

        InstallationError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise InstallationError(
                'History.frame needs pandas: pip install "onnxfit[notebook]".'
            ) from None
        numbers = [epoch + 1 for epoch in self.epoch]
        columns = {
            name: [values.get(epoch, float("nan")) for epoch in self.epoch]
            for name, values in self._values().items()
        }
        return pd.DataFrame(columns, index=pd.Index(numbers, name="epoch", dtype="int64"))

    def _epochs_of(self, name: str) -> list[int]:
        """Return the epochs in which a metric had a value; if unknown, assume the last epochs."""
        epochs = self.epochs_by_name.get(name, [])
        number = len(self.history[name])
        return epochs if len(epochs) == number else self.epoch[len(self.epoch) - number :]

    def _values(self) -> dict[str, dict[int, float]]:
        """Return the values of each metric, by epoch."""
        return {
            name: dict(zip(self._epochs_of(name), values)) for name, values in self.history.items()
        }

    def _repr_html_(self) -> str:
        """Return a table of the metrics for a notebook, with epochs counted from 1."""
        if not self.epoch:
            return paragraph("History of 0 epochs")
        columns = [
            [number_text(values[epoch]) if epoch in values else "" for epoch in self.epoch]
            for values in self._values().values()
        ]
        rows = [*zip([str(epoch + 1) for epoch in self.epoch], *columns)]
        header = ["epoch", *self.history]
        if len(rows) > MAX_EPOCHS_SHOWN:
            first = rows[: MAX_EPOCHS_SHOWN - LAST_EPOCHS_SHOWN]
            rows = [*first, ("…",) * len(header), *rows[-LAST_EPOCHS_SHOWN:]]
        return Table(header, rows, right=frozenset(header)).html()
