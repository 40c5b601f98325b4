"""Tensors that no step changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from onnxfit.graph import names
from onnxfit.runtime.buffers import DoubleBufferedState

Array = npt.NDArray[Any]
Changes = tuple[Mapping[str, int], Mapping[str, Array]]


class FrozenTensors:
    """Frozen weights and statistics, and their slots. A step changes them; then they are restored.

    - `state`: the state of the training.
    - `weights`: the names of the frozen weights and running statistics.
    - `slots`: a mapping from weight to the names of its slots.

    `all` are the names of the weights, the statistics and the slots.
    """

    def __init__(
        self,
        state: DoubleBufferedState,
        weights: Sequence[str] = (),
        slots: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.weights = tuple(weights)
        self._state = state
        frozen_slots = [names.slot(w, s) for w in weights for s in (slots or {}).get(w, ())]
        self.all = (*weights, *frozen_slots)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the tensors at the end of this block, which updates the state once."""
        before = self.changes()
        yield
        self.restore(before)

    def changes(self) -> Changes:
        """Return how often each group has changed, and copies of the tensors with one buffer."""
        state = self._state
        in_place = {name: state.get(name) for name in self.all if state.is_in_place(name)}
        return dict(state.changes), in_place

    def restore(self, before: Changes) -> None:
        """Restore the values before a step, from copies or the other buffers."""
        state, (changes, in_place) = self._state, before
        for name in self.all:
            group = state.group(name)
            if state.changes[group] != changes[group]:
                other = state.buffer(name, current=False)
                state.buffer(name).write(in_place[name] if name in in_place else other.read())
