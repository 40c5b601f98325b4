"""State of a trainer's calls in one thread."""

from __future__ import annotations

from threading import local
from typing import Any

import numpy.typing as npt

from onnxfit.callbacks.callback_list import CallbackList
from onnxfit.training.carried import CarriedStates


class ThreadState(local):
    """State of a trainer's calls in one thread.

    - `callbacks`: the callbacks of the running fit, evaluation or prediction, or None.
    - `current_outputs`: output -> array of the current batch of a prediction.
    - `carried`: the states of the running evaluation or prediction, or None.
    """

    callbacks: CallbackList | None = None
    carried: CarriedStates | None = None

    def __init__(self) -> None:
        self.current_outputs: dict[str, npt.NDArray[Any]] = {}
