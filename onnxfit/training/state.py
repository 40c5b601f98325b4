"""The state of a training: weights, slots and counters, as `get_state` returns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy.typing as npt

from onnxfit.checks import is_finite, is_number, shortened
from onnxfit.errors import SettingError, UnknownNameError, UnsupportedError, listed_names
from onnxfit.files import COUNT, RATE, optional
from onnxfit.graph import names
from onnxfit.graph.weights import matching
from onnxfit.optimizers.base import learning_rate_at, rate_at
from onnxfit.runtime.backends.backend import Backend
from onnxfit.runtime.buffers import DoubleBufferedState
from onnxfit.step.recipe import Recipe
from onnxfit.training.carried import CarriedStates
from onnxfit.training.ranks import require_same_weights

# `global_step` when the optimizer's slots were new; absent if it is 0
FIRST_STEP = "first_step"
COUNTERS = ("epoch", "global_step", "global_batch", "samples_seen")
COUNTER_TYPES = {
    **dict.fromkeys((*COUNTERS, "window"), COUNT),
    "learning_rate": optional(RATE),  # None if it follows a schedule
}
Array = npt.NDArray[Any]
TrainerState = Mapping[str, Mapping[str, Any]]
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


class TrainingState:
    """All that a training step changes: weights, slots, counters, and the states between batches.

    - `epoch`, `global_step`, `global_batch`, `samples_seen`: epochs, updates, batches and rows
      trained so far, over all fits.
    - `first_step`: `global_step` when the optimizer's slots were new.
    - `averaged_step`: the update after which the ranks last had the same weights.
    - `fixed_rate`: the learning rate of the next update; None if it follows a schedule.
    - `frozen`: the tensors that no step changes.
    - `carried`: the states that one batch gives to the next.
    """

    def __init__(self, recipe: Recipe, backend: Backend, carried: CarriedStates) -> None:
        self._recipe = recipe
        self._backend = backend
        self.epoch = 0
        self.global_step = 0
        self.global_batch = 0
        self.samples_seen = 0
        self.averaged_step = 0
        rate = recipe.optimizer.learning_rate
        self.fixed_rate: float | None = None if callable(rate) else float(rate)
        self._check_learning_rate(self.fixed_rate or 0.0)
        self.frozen = FrozenTensors(backend.state)
        self.carried = carried

    @property
    def first_step(self) -> int:
        """The update before which the optimizer's slots began; the backend has it."""
        return self._backend.first_step

    @first_step.setter
    def first_step(self, value: int) -> None:
        self._backend.first_step = value

    @property
    def updates(self) -> int:
        """Number of updates that the optimizer's slots have seen."""
        return self.global_step - self.first_step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update; see `Trainer.learning_rate`."""
        if self.fixed_rate is None:
            rate = learning_rate_at(self._recipe.optimizer, self.global_step)
            self._check_learning_rate(rate)
            return rate
        return self.fixed_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self.fixed_rate is None:
            raise UnsupportedError(
                "The learning rate cannot be set, because it follows the schedule"
                f" {self._recipe.optimizer.learning_rate!r}. To set it, give the optimizer a number"
                " as its learning_rate."
            )
        if not (is_number(value) and is_finite(value) and value >= 0):
            raise SettingError(
                f"learning_rate must be a finite number >= 0, got {shortened(value)}."
            )
        self._check_learning_rate(float(value))
        self.fixed_rate = float(value)

    @property
    def learning_rates(self) -> dict[str, float]:
        """Learning rate of each trained weight for the next update."""
        common = self.learning_rate
        return {
            name: one.multiplier
            * (common if one.schedule is None else rate_at(one.schedule, self.global_step))
            for name, one in self._recipe.optimizers.items()
        }

    @property
    def average_slots(self) -> dict[str, str | None]:
        """The slot with the average of each trained weight, or None."""
        return {n: one.optimizer.average_slot for n, one in self._recipe.optimizers.items()}

    def _check_learning_rate(self, rate: float) -> None:
        """Raise SettingError for a rate that the element type of a weight cannot represent."""
        limit = self._recipe.max_learning_rate
        if rate > limit:
            raise SettingError(
                f"The learning rate is {rate:g}, but the weights' element types and"
                f" learning_rate_multipliers allow at most {limit:.2g}."
            )

    def freeze(self, patterns: Sequence[str] | str) -> None:
        """Freeze the weights and running statistics of these names or patterns, and no others."""
        weights = matching(patterns, self._recipe.state)
        self.frozen = FrozenTensors(self._backend.state, weights, self._recipe.slots)

    def get_weights(self, *, copy: bool = True) -> dict[str, Array]:
        """Return the trained weights and the running statistics; see `Trainer.get_weights`."""
        return self._arrays(self._recipe.state, copy=copy)

    def until_it_changes(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which views of the state still have the values of this moment.

        It keeps steps waiting. Entering it later than the next change is a SettingError.
        """
        tensors = self._backend.state
        before = tensors.changes.copy()

        @contextmanager
        def unchanged() -> Iterator[None]:
            with self._backend.lock:
                if tensors.changes != before:
                    raise SettingError(
                        "The snapshot with copy=False refers to weights that have changed since."
                        " Write it before the next step, or take it with copy=True."
                    )
                yield

        return unchanged

    def _arrays(self, names: Iterable[str], *, copy: bool) -> dict[str, Array]:
        """Return tensors of the state: copies, or views that are valid until the next step."""
        with self._backend.lock:
            state = self._backend.state
            return {name: state.get(name) if copy else state.view(name) for name in names}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace some of the weights; see `Trainer.set_weights`."""
        known = self._recipe.state
        for name in weights:
            if name not in known:
                raise UnknownNameError("trained weight", name, known)
        require_same_weights(self._backend.world, "set_weights", weights)
        with self._backend.lock:
            self._backend.state.set(weights)

    def get(self, *, copy: bool = True) -> dict[str, dict[str, Any]]:
        """Return weights, slots and counters; see `Trainer.get_state`."""
        with self._backend.lock:
            slots = [name for name in self._backend.state if name not in self._recipe.state]
            counters = {name: getattr(self, name) for name in COUNTERS}
            counters |= {
                "window": self._backend.accumulator.count,
                "learning_rate": self.fixed_rate,
            }
            counters |= {FIRST_STEP: self.first_step} if self.first_step else {}
            return {
                "weights": self.get_weights(copy=copy),
                "slots": self._arrays(slots, copy=copy),
                "counters": counters,
            }

    def set(self, state: TrainerState) -> None:
        """Restore a state of the same form."""
        counters = state["counters"]
        self._backend.state.set({**state["weights"], **state["slots"]})
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self._backend.accumulator.count = counters["window"]
        self.fixed_rate = counters["learning_rate"]
        self.first_step = counters.get(FIRST_STEP, 0)

    def revert(self) -> None:
        """Undo the last update of weights, slots, statistics and states between batches."""
        self._backend.revert()
        self.carried.revert()
        self.averaged_step = -1  # each rank has its own weights again


def require_same_form(state: TrainerState, own: TrainerState) -> None:
    """Raise SettingError unless a trainer whose state is `own` can continue from `state`."""
    if set(state) != set(own):
        raise SettingError(
            f"A state must have {', '.join(own)}, got {shortened(sorted(state))}. Pass the result"
            " of get_state."
        )
    for kind, entries in own.items():
        if set(state[kind]) - {FIRST_STEP} != set(entries) - {FIRST_STEP}:
            raise SettingError(
                f"The state belongs to another trainer: its {kind} are"
                f" {listed_names(sorted(state[kind]))}, but expected"
                f" {listed_names(sorted(entries))}."
            )
    counters = state["counters"]
    if (counters["learning_rate"] is None) != (own["counters"]["learning_rate"] is None):
        raise SettingError(
            "The state belongs to another trainer: in one of the two trainers the learning rate"
            " follows a schedule, in the other it does not."
        )
    first = counters.get(FIRST_STEP, 0)
    if not COUNT.accepts(first) or first > counters["global_step"]:
        raise SettingError(
            f"The state's counter {FIRST_STEP} must be a number of updates up to global_step, got"
            f" {first!r} and {counters['global_step']!r}."
        )
    for name, value_type in COUNTER_TYPES.items():
        if not value_type.accepts(counters[name]):
            raise SettingError(
                f"The state's counter {name} must be {value_type.description}, got"
                f" {counters[name]!r}."
            )
