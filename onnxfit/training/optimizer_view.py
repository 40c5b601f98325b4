"""The optimizer of a trainer as callbacks see it, with the learning rate in force."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfit.errors import MissingAttributeError, SettingError
from onnxfit.optimizers import Optimizer
from onnxfit.training.hints import WORDS_OF_OPTIMIZERS
from onnxfit.training.state import TrainingState


class LearningRate(float):
    """The learning rate of the next update: a float with the methods of Keras's variable."""

    _state: TrainingState

    def assign(self, value: float) -> None:
        """Set the learning rate of the next updates, like `trainer.learning_rate = value`."""
        self._state.learning_rate = value

    def numpy(self) -> np.float64:
        """Return the number."""
        return np.float64(self)


class OptimizerView:
    """The settings of an optimizer, whose `learning_rate` (or `lr`) is the one in force.

    Setting the learning rate sets `trainer.learning_rate`, with its errors. `learning_rates` maps
    each trained weight to its rate. `settings` is the optimizer as it was given. SettingError:
    another setting is set; it is part of the compiled step.
    """

    def __init__(self, optimizer: Optimizer, state: TrainingState) -> None:
        self.__dict__.update(_optimizer=optimizer, _state=state)

    @property  # type: ignore[misc]  # isinstance(trainer.optimizer, Adam)
    def __class__(self) -> type:
        return type(self._optimizer)

    @property
    def settings(self) -> Optimizer:
        """The optimizer as it was given, whose `learning_rate` is a number or a schedule."""
        optimizer: Optimizer = self._optimizer
        return optimizer

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each trained weight for the next update."""
        rates: dict[str, float] = self._state.learning_rates
        return rates

    @property
    def average_slots(self) -> dict[str, str | None]:
        """The slot with the average of each trained weight, or None."""
        slots: dict[str, str | None] = self._state.average_slots
        return slots

    def __getattr__(self, name: str) -> Any:
        if name in ("learning_rate", "lr"):
            rate = LearningRate(self._state.learning_rate)
            rate._state = self._state
            return rate
        optimizer = self.__dict__["_optimizer"]
        if name in WORDS_OF_OPTIMIZERS and not hasattr(optimizer, name):
            raise MissingAttributeError(
                f"{type(optimizer).__name__} has no attribute {name!r}. {WORDS_OF_OPTIMIZERS[name]}"
            )
        return getattr(optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("learning_rate", "lr"):
            owner = type(self._optimizer).__name__
            raise SettingError(
                f"{name} of the optimizer cannot change, because it is part of the compiled step."
                f" Pass Trainer(..., optimizer=onnxfit.optimizers.{owner}({name}=...)). Only"
                " learning_rate can be set later."
            )
        self._state.learning_rate = value

    def __eq__(self, other: object) -> bool:
        return bool(self._optimizer == getattr(other, "_optimizer", other))

    def __hash__(self) -> int:
        return hash(self._optimizer)

    def __repr__(self) -> str:
        return repr(self._optimizer)
