"""The forward and the backward pass of a model, as two runs that the caller starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from onnxfit.step.split import SplitStep

Array = npt.NDArray[Any]


@dataclass(eq=False)
class ForwardPass:
    """A forward pass whose backward pass is pending.

    - `outputs`: output -> OrtValue.
    - `saved`: values that the backward pass needs; None after the backward pass.
    - `passes`: the object that ran this forward pass, and runs its backward pass.
    - `weights_version`: the version of the weights that it used.
    """

    outputs: dict[str, Any]
    saved: Any
    passes: ForwardBackward
    weights_version: int


class ForwardBackward(Protocol):
    """An object that runs the forward and the backward pass.

    Values are OrtValues. Input values may also be NumPy arrays, which are not copied. `feeds` are
    the buffers to write inputs into; inputs without a buffer are arguments of `forward`.
    """

    graphs: SplitStep
    feeds: dict[str, Array]

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> ForwardPass:
        """Run a forward pass, which also updates the running statistics.

        `values` are the model's inputs without buffers; random numbers depend on `step` and `seed`.
        """

    def backward(self, forward: ForwardPass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return the gradients of weights and inputs by name, from the gradients of the outputs.

        Each forward pass allows one backward pass.
        """
