"""The forward and the backward pass of a model as two runs, between which a caller may stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from onnxfit.step import split

Array = npt.NDArray[Any]


@dataclass(eq=False)
class Pass:
    """A forward pass whose backward pass may follow: its outputs, and what the backward pass needs,
    as OrtValues.
    """

    outputs: dict[str, Any]
    kept: Any
    backward: Passes
    weights: int  # the version of the weights it saw
    done: bool = field(default=False)


class Passes(Protocol):
    """A way to run both passes.

    Values are OrtValues or, going in, numpy arrays, which are read where they lie.
    """

    graphs: split.Passes
    feeds: dict[str, Array]  # buffers to write inputs into; other inputs come with every run

    def forward(self, values: Mapping[str, Any], step: int, seed: int) -> Pass:
        """The outputs for these inputs (all but state, and scalars of the step); running statistics
        follow the batch.
        """

    def backward(self, forward: Pass, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Weight or input -> its gradient, from output -> gradient; once for each forward pass."""
