"""Results of an evaluated batch, and the evaluation of existing outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.runtime.session import BoundSession

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class Evaluation:
    """Results of an evaluated batch, a `StepResult`. No later run changes them.

    - `scalars`: the loss and its terms, by name.
    - `outputs`: a mapping from output to array; empty if not requested.
    """

    scalars: Mapping[str, Array]
    outputs: dict[str, Array]

    def prediction(self) -> dict[str, Array]:
        """Return `outputs`."""
        return self.outputs

    def fed(self, batch: Batch) -> Mapping[str, Array]:
        """Return the arrays of `batch`."""
        return batch.arrays()


def evaluate_outputs(
    session: BoundSession, batch: Batch, predicted: Mapping[str, Array]
) -> Mapping[str, Array]:
    """Return the loss and its terms, by name, for the outputs `predicted` of a batch.

    - `session`: an `evaluate_outputs_graph`.
    """
    arrays = {**batch.arrays(), **predicted}
    for name, buffer in session.feeds.items():
        buffer[...] = arrays[names.shown(name)]  # a loss may read inputs of the model
    session.run({name: arrays[names.shown(name)] for name in session.per_run_inputs})
    return {name: array.copy() for name, array in session.scalars.items()}
