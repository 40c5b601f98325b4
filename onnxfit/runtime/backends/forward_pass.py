"""The forward and the backward pass of a model as two runs that the caller starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from onnxfit.step.split import SplitStep

Array = npt.NDArray[Any]


@dataclass(eq=False)
class ForwardPass:
    """A forward pass that waits for its backward pass.

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
    """A forward and a backward pass that can be run.

    Values are OrtValues. Values that go in may also be NumPy arrays, which are not copied.
    `feeds` are the buffers to write inputs into; inputs without a buffer are arguments
    of `forward`.
    """

    graphs: SplitStep
    feeds: dict[str, Array]

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> ForwardPass:
        """Run a forward pass, which also updates the running statistics.

        `values` are the model's inputs without buffers; random numbers depend on `step` and `seed`.
        """

    def backward(self, forward: ForwardPass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Return weight or input -> its gradient, from output -> its gradient.

        Each forward pass is good for one backward pass.
        """
