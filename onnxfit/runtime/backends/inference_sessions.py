"""Sessions for inference: the model compiled with its weights, the results of evaluations, and the
release of sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from onnxfit.data import Batch
from onnxfit.graph import names
from onnxfit.graph.shared_tensors import NOT_IN_NUMPY, include_shared
from onnxfit.load.lean_reading import with_shared
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.runtime.device import Device
from onnxfit.runtime.memory import trim_malloc
from onnxfit.runtime.session import BoundSession, StatelessSession
from onnxfit.runtime.values import Array
from onnxfit.step.graphs import deployed_graph
from onnxfit.step.recipe import Recipe


class Owner(Protocol):
    """Object that compiles sessions and keeps them."""

    def clear(self) -> None:
        """Drop the sessions; they are compiled again when they are needed."""


class InferenceSessions:
    """The kinds of sessions that run the whole model in inference mode.

    Each of these sessions has its own copy of packed weights. If these are large, at most one kind
    is kept. The other kinds are released before a session is compiled. The sessions of training
    always stay, so training and evaluation can alternate without compiling anything again.

    - `exclusive`: whether at most one kind is kept.

    `owners` maps each kind to the owner of its sessions. The references are weak, because an owner
    may refer to this object.
    """

    def __init__(self, *, exclusive: bool) -> None:
        self._exclusive = exclusive
        self.owners: WeakValueDictionary[str, Owner] = WeakValueDictionary()

    def make_room(self, kind: str) -> None:
        """Release the sessions of the other kinds, before a session of a kind is compiled."""
        if not self._exclusive:
            return
        for other, owner in self.owners.items():
            if other != kind:
                owner.clear()
        trim_malloc()


class DeployedModel:
    """The model compiled with the weights of one version of the state as constants.

    - `device`, `threads`: as for `StatelessSession`.
    """

    def __init__(self, device: Device, threads: int | None) -> None:
        self._device = device
        self._threads = threads
        self._version = -1  # of the state with which the session was compiled
        self._session: StatelessSession | None = None

    def session(
        self, recipe: Recipe, state: DoubleBufferedState, inference: InferenceSessions
    ) -> StatelessSession:
        """Return the session for the current state; compile it if the state has changed."""
        if self._session is None or self._version != state.version:
            self.clear()  # the memory of the last session is free for the next one
            inference.make_room("deployed")
            self._session = self._compile(recipe, state)
            self._version = state.version
        return self._session

    def _compile(self, recipe: Recipe, state: DoubleBufferedState) -> StatelessSession:
        arrays = {name: state.get(name) for name in recipe.state}
        deployed = deployed_graph(recipe, arrays)
        del arrays
        model = with_shared(deployed.proto) if recipe.packed else deployed
        include_shared(model.proto, NOT_IN_NUMPY)
        return StatelessSession(
            model.proto, self._device, self._threads, "prediction", uses_integers=True
        )

    def clear(self) -> None:
        """Drop the session."""
        self._session = None


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

    def inputs_of(self, batch: Batch) -> Mapping[str, Array]:
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
