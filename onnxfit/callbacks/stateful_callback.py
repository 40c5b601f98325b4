"""Callbacks with a state that checkpoints keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Union

import numpy as np
import numpy.typing as npt

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.logs import Logs
from onnxfit.errors import CheckpointError
from onnxfit.files import ANYTHING, ValueType, require_types

__all__ = ["StatefulCallback"]


class StatefulCallback(Callback, ABC):
    """Base class of callbacks with a state that checkpoints keep.

    A subclass lists the attributes of its state in `state_attributes`, and sets their initial
    values in `reset`. Every `fit` calls `reset`, unless a saved state has been loaded since the
    last `fit`. If `state_attributes` is a dict, it maps each name to the `onnxfit.files.ValueType`
    that a loaded value must have. CheckpointError: a saved state lacks an attribute, or has an
    attribute of another type.

    >>> class CountEpochs(StatefulCallback):
    ...     state_attributes = ("epochs",)
    ...
    ...     def reset(self):
    ...         self.epochs = 0
    ...
    ...     def on_epoch_end(self, epoch, logs):
    ...         self.epochs += 1
    """

    state_attributes: ClassVar[Union[Mapping[str, ValueType], tuple[str, ...]]] = ()
    _resumes = False

    @abstractmethod
    def reset(self) -> None:
        """Set the attributes in `state_attributes` to their initial values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes in `state_attributes`, by name."""
        return {name: _snapshot(getattr(self, name)) for name in self.state_attributes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the attributes in `state_attributes`; the next `fit` then does not reset them.

        - `state`: the dict that `state_dict` returned.

        CheckpointError, before anything is set: an attribute is missing, or has another type.
        """
        types = self.state_attributes
        if not isinstance(types, Mapping):
            types = dict.fromkeys(types, ANYTHING)
        require_types(f"The saved state of {self.state_key}", state, types)
        for name in self.state_attributes:
            setattr(self, name, _snapshot(state[name]))
        self._resumes = True

    def on_train_begin(self, logs: Logs) -> None:
        """Reset the state unless a saved state was loaded; `logs` is empty."""
        if not self._resumes:
            self.reset()

    def on_close(self) -> None:
        """Let the next `fit` begin with a fresh state."""
        self._resumes = False


def _snapshot(value: Any) -> Any:
    """Return a copy that later changes do not affect.

    Arrays are shared, because callbacks replace them and never modify them in place.
    """
    if isinstance(value, dict):
        return {key: _snapshot(entry) for key, entry in value.items()}
    return [_snapshot(entry) for entry in value] if isinstance(value, list) else value


def require_weights(
    callback: StatefulCallback,
    name: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    dtype: npt.DTypeLike | None = None,
) -> None:
    """Raise CheckpointError unless loaded arrays can take the place of the trainer's weights.

    - `callback`: the callback with the loaded state.
    - `name`: the arrays' name in that state.
    - `arrays`: weight -> array.
    - `dtype`: the type of all arrays; None for each weight's own type.
    """
    weights = callback.trainer.get_weights(copy=False) if arrays else {}
    for key, array in arrays.items():
        weight = weights.get(key)
        if weight is None:
            problem = "but the trainer has no weight of this name"
        elif (array.shape, array.dtype) != (weight.shape, np.dtype(dtype or weight.dtype)):
            problem = (
                f"as {array.dtype}{list(array.shape)}, but expected"
                f" {np.dtype(dtype or weight.dtype)}{list(weight.shape)}"
            )
        else:
            continue
        raise CheckpointError(
            f"The saved state of {callback.state_key} has {name} of {key!r}, {problem}. The state"
            " belongs to another model. Resume from a checkpoint of this model."
        )
