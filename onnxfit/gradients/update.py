"""An optimizer's slots, and the operators that give weights and slots their next values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxfit.errors import SettingError
from onnxfit.graph import names, scopes
from onnxfit.graph.values import GraphBuilder, Value

if TYPE_CHECKING:
    from onnxfit.optimizers import Optimizer
    from onnxfit.optimizers.base import WeightOptimizer

Array = npt.NDArray[Any]
Bounds = Mapping[str, tuple[Array, Array]]  # weight -> its least and its greatest numbers
NO_BOUNDS: Bounds = MappingProxyType({})
FrozenRows = Mapping[str, npt.NDArray[np.int64]]  # weight -> the numbers of its frozen rows
NO_FROZEN_ROWS: FrozenRows = MappingProxyType({})


def apply_update(
    op: GraphBuilder,
    optimizers: Mapping[str, WeightOptimizer],
    weights: Mapping[str, Value],
    gradients: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
    lr: Value,
    step: Value,
    *,
    scaled: bool = False,
    bounds: Bounds = NO_BOUNDS,
    frozen_rows: FrozenRows = NO_FROZEN_ROWS,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Return the next value of every weight and of every slot.

    - `optimizers`: weight -> its update, as `Optimizer.for_weights` returns them.
    - `slots`: weight -> slot -> value, in the order of `initial_slots(optimizer, name, w)`.
    - `lr`: a scalar, the learning rate of the Trainer before multipliers.
    - `step`: a float64 scalar, 1 for the first update.
    - `scaled`: the gradients are already multiplied by the learning rate; the optimizer is
      `is_plain_sgd`.
    - `bounds`: weight -> two arrays of its shape, to which its numbers are clamped.
    - `frozen_rows`: weight -> rows that keep their numbers, also under weight decay.

    Adds a scalar input `names.scheduled(i)` for each schedule of `schedules_of` that the weights
    follow. SettingError: the optimizer's `update` changes the number of values, or the type or
    shape of a value.
    """
    # Weights of one element type and the same settings share these scalars.
    shared: dict[Any, tuple[Optimizer, Value | None, tuple[Value, ...]]] = {}
    scheduled = _ScheduledInputs(op, schedules_of(optimizers.values()))
    next_weights: dict[str, Value] = {}
    next_slots: dict[str, dict[str, Value]] = {}
    for name, w in weights.items():
        settings = optimizers[name]
        factor = settings.multiplier
        group = w.dtype, id(settings)
        if group not in shared:
            shared[group] = _shared_scalars(op, settings, scheduled, lr, step, w)
        rule, undecayed, coefficients = shared[group]
        own = dict(slots[name])
        average = own.pop(names.EMA, None) if rule.ema_momentum is not None else None
        with op.scope(scopes.update_of(name)):
            decayed = w if undecayed is None else undecayed * w
            g = gradients[name]
            if scaled:
                result: Any = decayed - (g if factor == 1 else g * factor)
            else:
                result = rule.update(op, decayed, g, *coefficients, *own.values())
            new, *new_slots = result if isinstance(result, tuple) else (result,)
            _check_returned(rule, name, [w, *own.values()], [new, *new_slots], list(own))
            if rule.cautious:
                new = _cautious(op, decayed, new, g)
            if settings.constraint is not None:
                new = settings.constraint(op, new)
            if name in bounds:
                new = _within(op, new, *bounds[name])
            if name in frozen_rows:
                kept = op.Gather(w, frozen_rows[name], axis=0)
                new = with_rows(op, new, frozen_rows[name], kept)
            next_slots[name] = dict(zip(own, new_slots))
            if average is not None and rule.ema_momentum is not None:
                momentum = rule.ema_momentum
                next_slots[name][names.EMA] = momentum * average + (1 - momentum) * new
        next_weights[name] = new
    return next_weights, next_slots


def _cautious(op: GraphBuilder, w: Value, new: Value, g: Value) -> Value:
    """Return the next weight where the step and -g have the same sign, by a larger step."""
    step = new - w
    one, zero = op.constant(1, w.dtype), op.constant(0, w.dtype)
    agrees = op.Where(op.Sign(step) * op.Sign(g) < 0, one, zero)
    share = op.Max(op.ReduceMean(agrees, keepdims=0), 1e-3)
    return w + step * (agrees / share)


def with_rows(op: GraphBuilder, x: Value, numbers: npt.NDArray[np.int64], rows: Value) -> Value:
    """Return x with other rows at these positions."""
    return op.ScatterND(x, op.constant(numbers[:, None]), rows)


def _within(op: GraphBuilder, w: Value, minimum: Array, maximum: Array) -> Value:
    """Return w clamped between arrays. NaN stays NaN, which Max and Min do not guarantee."""
    low, high = op.constant(minimum, w.dtype), op.constant(maximum, w.dtype)
    raised = op.Where(w < low, low, w)
    return op.Where(raised > high, high, raised)


def _shared_scalars(
    op: GraphBuilder,
    settings: WeightOptimizer,
    scheduled: _ScheduledInputs,
    lr: Value,
    step: Value,
    w: Value,
) -> tuple[Optimizer, Value | None, tuple[Value, ...]]:
    """Return the optimizer with the values of its schedules, the factor that decays a weight (None
    without decay), and the coefficients.
    """
    rule, factor = settings.optimizer, settings.multiplier
    schedules = rule.scheduled_settings()
    with op.scope(scopes.OPTIMIZER):
        base = lr if settings.schedule is None else scheduled.value(settings.schedule)
        values = {name: scheduled.value(schedule) for name, schedule in schedules.items()}
        narrow = {name: op.cast(value, w.dtype) for name, value in values.items()}
        rate = op.cast(base if factor == 1 else base * factor, w.dtype)
        # In `coefficients`, the betas meet the step, a float64.
        wide = {**narrow, **{name: values[name] for name in values if name == "betas"}}
        own = rule.with_scheduled(narrow.__getitem__, checked=False)
        undecayed = None
        if rule.weight_decay and not rule.applies_weight_decay:
            undecayed = 1 - rate * own.weight_decay
        coefficients = rule.with_scheduled(wide.__getitem__, checked=False).coefficients
        return own, undecayed, coefficients(op, rate, step)


def schedules_of(optimizers: Iterable[WeightOptimizer]) -> list[Callable[[int], float]]:
    """Return the schedules that weights follow besides the Trainer's learning rate, once each."""
    found: list[Callable[[int], float]] = []
    for one in optimizers:
        own = [] if one.schedule is None else [one.schedule]
        for schedule in (*own, *one.optimizer.scheduled_settings().values()):
            if schedule not in found:
                found.append(schedule)
    return found


class _ScheduledInputs:
    """The inputs of a graph for the values of schedules, added when they are first used."""

    def __init__(self, op: GraphBuilder, schedules: Sequence[Callable[[int], float]]) -> None:
        self._op = op
        self._schedules = schedules
        self._values: dict[int, Value] = {}

    def value(self, schedule: Callable[[int], float]) -> Value:
        """Return the input, a float64, for the value of a schedule."""
        number = self._schedules.index(schedule)
        if number not in self._values:
            self._values[number] = self._op.input(names.scheduled(number), np.float64, ())
        return self._values[number]


def _check_returned(
    optimizer: Optimizer,
    name: str,
    before: Sequence[Value],
    after: Sequence[Value],
    slots: Sequence[str],
) -> None:
    """Raise SettingError unless an update keeps the weight and its slots, their types and shapes.

    Weight and slots come in this order, because a weight may have the name of a slot.
    """
    method = f"{type(optimizer).__name__}.update for {name!r}"
    if len(after) != len(before):
        raise SettingError(
            f"{method} returned {len(after)} values, expected {len(before)}: the weight and"
            f" {', '.join(slots) or 'no slots'}."
        )
    for key, old, new in zip((name, *slots), before, after):
        other_shape = None not in (old.shape, new.shape) and old.shape != new.shape
        if old.dtype != new.dtype or other_shape:
            old_type, new_type = (f"{v.dtype}{list(v.shape or ())}" for v in (old, new))
            raise SettingError(
                f"{method} changed {key!r} from {old_type} to {new_type}. Keep the shape, and cast"
                " numbers computed from `step` to w.dtype."
            )


def initial_slots(optimizer: Optimizer, name: str, w: Array) -> dict[str, Array]:
    """Return the slots of the weight `w`, called `name`, before the first update.

    They are copies, by name. With `ema_momentum` they include the average, as `ema`. SettingError:
    the optimizer has its own slot of that name.

    >>> from onnxfit.optimizers import Adam
    >>> list(initial_slots(Adam(ema_momentum=0.99), "fc.weight", np.ones((3, 2))))
    ['m', 'v', 'ema']
    """
    slots = {slot: np.array(value) for slot, value in optimizer.slots(w).items()}
    if optimizer.ema_momentum is None:
        return slots
    if names.EMA in slots:
        raise SettingError(
            f"{type(optimizer).__name__} has a slot {names.EMA!r} for {name!r}, but ema_momentum"
            " uses this name. Rename the slot."
        )
    return {**slots, names.EMA: np.array(w)}


def initial_slots_to_read(optimizer: Optimizer, name: str, w: Array) -> dict[str, Array]:
    """Return `initial_slots` as read-only arrays.

    A slot with one repeated number, as nearly all are at first, takes no memory.
    """

    def compact(value: Array) -> Array:
        if not value.size or (value != value.flat[0]).any():
            return value
        return np.broadcast_to(np.array(value.flat[0], value.dtype), value.shape)

    return {slot: compact(value) for slot, value in initial_slots(optimizer, name, w).items()}
