"""Learning-rate schedules: the learning rate as a function of the number of updates done."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Union

from onnxfit.checks import (
    ChecksArguments,
    check_number,
    is_finite,
    is_number,
    require_choice,
    shortened,
)
from onnxfit.errors import SettingError

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "InverseScaling",
    "InverseTime",
    "OneCycle",
    "Optimal",
    "Piecewise",
    "Polynomial",
    "Schedule",
    "Step",
    "Warmup",
]


@dataclass(frozen=True)
class Schedule(ChecksArguments, ABC):
    """Base class of every schedule: `schedule(step)` is the learning rate of update number `step`,
    counted from 0.

    A schedule is a pure function without state, so a resumed run gets the rates of an uninterrupted
    one. In the formulas $t$ is the number of the update. Settings out of range raise SettingError.

    To write a schedule, subclass with a frozen dataclass whose `__call__` is the formula; for a
    schedule without settings, a plain function of the step is enough.

    >>> @dataclass(frozen=True)
    ... class Sawtooth(Schedule):
    ...     learning_rate: float
    ...     period: int
    ...
    ...     def __call__(self, step):
    ...         return self.learning_rate * (1 - step % self.period / self.period)
    >>> [Sawtooth(0.5, period=2)(step) for step in range(4)]
    [0.5, 0.25, 0.5, 0.25]
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the learning rate of update number `step`, counted from 0."""


LearningRate = Union[float, Schedule, Callable[[int], float]]


@dataclass(frozen=True)
class Constant(Schedule):
    r"""The same learning rate $\eta$ for every update.

    - `learning_rate` $\eta \ge 0$.

    >>> Constant(0.1)(1000)
    0.1
    """

    learning_rate: float

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)

    def __call__(self, step: int) -> float:
        return self.learning_rate


@dataclass(frozen=True)
class Exponential(Schedule):
    r"""Exponential decay $\eta_0 \cdot r^{t/n}$ (`keras.optimizers.schedules.ExponentialDecay`).

    - `learning_rate` $\eta_0 \ge 0$.
    - `decay_steps` $n \ge 1$, in updates.
    - `decay_rate` $r$ in (0, 1].
    - `staircase`: use the whole part of $t/n$, so the rate drops every $n$ updates.

    >>> [Exponential(0.8, decay_steps=2, decay_rate=0.25)(step) for step in range(3)]
    [0.8, 0.4, 0.2]
    """

    learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "decay_steps", at_least=1, whole=True)
        check_number(self, "decay_rate", above=0, at_most=1)

    def __call__(self, step: int) -> float:
        return self.learning_rate * math.pow(
            self.decay_rate, _elapsed(step, self.decay_steps, self.staircase)
        )


@dataclass(frozen=True)
class InverseTime(Schedule):
    r"""Decay with the inverse of time, $\eta_0 / (1 + r t/n)$
    (`keras.optimizers.schedules.InverseTimeDecay`).

    - `learning_rate` $\eta_0 \ge 0$.
    - `decay_steps` $n \ge 1$, in updates.
    - `decay_rate` $r \ge 0$.
    - `staircase`: take the whole part of $t/n$.

    >>> InverseTime(0.1, decay_steps=10, decay_rate=1.0)(30)
    0.025
    """

    learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "decay_steps", at_least=1, whole=True)
        check_number(self, "decay_rate", at_least=0)

    def __call__(self, step: int) -> float:
        return self.learning_rate / (
            1 + self.decay_rate * _elapsed(step, self.decay_steps, self.staircase)
        )


@dataclass(frozen=True)
class Step(Schedule):
    r"""Decay in steps, $\eta_0 \cdot \gamma^{\lfloor t/n \rfloor}$
    (`torch.optim.lr_scheduler.StepLR`).

    - `learning_rate` $\eta_0 \ge 0$.
    - `step_size` $n \ge 1$, in updates.
    - `gamma` $\gamma$ in (0, 1].

    >>> [Step(0.5, step_size=2, gamma=0.5)(step) for step in range(5)]
    [0.5, 0.5, 0.25, 0.25, 0.125]
    """

    learning_rate: float
    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "step_size", at_least=1, whole=True)
        check_number(self, "gamma", above=0, at_most=1)

    def __call__(self, step: int) -> float:
        return self.learning_rate * self.gamma ** (step // self.step_size)


@dataclass(frozen=True)
class Piecewise(Schedule):
    r"""Constant pieces: $v_0$ while $t < b_0$, then $v_1$ while $t < b_1$, and so on.

    - `boundaries` $b$: increasing whole numbers >= 0, in updates. (Keras's PiecewiseConstantDecay
      changes one update later.)
    - `values` $v$: numbers >= 0, one more than boundaries.

    >>> [Piecewise(boundaries=(2, 3), values=(1.0, 0.1, 0.01))(step) for step in range(4)]
    [1.0, 1.0, 0.1, 0.01]
    """

    boundaries: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        check_number(self, "boundaries", at_least=0, whole=True, sequence=True)
        check_number(self, "values", at_least=0, sequence=True)
        if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:])):
            raise SettingError(f"Piecewise needs increasing boundaries, got {self.boundaries}.")
        if len(self.values) != len(self.boundaries) + 1:
            raise SettingError(
                f"Piecewise needs one more value than boundaries, got {len(self.values)} values"
                f" for {len(self.boundaries)} boundaries."
            )

    def __call__(self, step: int) -> float:
        return self.values[bisect_right(self.boundaries, step)]


@dataclass(frozen=True)
class Polynomial(Schedule):
    r"""Polynomial decay $\eta_1 + (\eta_0 - \eta_1)(1 - t/n)^p$ until update $n$, then $\eta_1$
    (`keras.optimizers.schedules.PolynomialDecay`).

    - `learning_rate` $\eta_0 \ge 0$.
    - `decay_steps` $n \ge 1$, in updates.
    - `end_learning_rate` $\eta_1 \ge 0$.
    - `power` $p > 0$; 1 is linear.
    - `cycle`: whenever $t$ passes $n$, use the next multiple of the first $n$. The rate jumps up
      and falls again, more slowly each time.

    >>> [Polynomial(0.4, decay_steps=4)(step) for step in (0, 1, 2, 4, 9)]
    [0.4, 0.30000000000000004, 0.2, 0.0, 0.0]
    """

    learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "decay_steps", at_least=1, whole=True)
        check_number(self, "end_learning_rate", at_least=0)
        check_number(self, "power", above=0)

    def __call__(self, step: int) -> float:
        cycles = max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1
        left = max(0.0, 1 - step / (self.decay_steps * cycles))
        return _between(self.end_learning_rate, self.learning_rate, left**self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    r"""Half a cosine, $\eta_1 + (\eta_0 - \eta_1)(1 + \cos(\pi t/n))/2$ until update $n$, then
    $\eta_1$ (Loshchilov & Hutter 2017).

    - `learning_rate` $\eta_0 \ge 0$.
    - `decay_steps` $n \ge 1$, in updates.
    - `end_learning_rate` $\eta_1 \ge 0$.
    - `restarts`: let the rate jump up again after $n$ updates.
    - `t_mul` $\ge 1$, with restarts: the length of each period relative to the previous one.
    - `m_mul` in (0, 1], with restarts: the height of each period above $\eta_1$, relative to the
      previous one.

    >>> [round(Cosine(0.2, decay_steps=2)(step), 3) for step in range(4)]
    [0.2, 0.1, 0.0, 0.0]
    >>> [round(Cosine(0.2, decay_steps=2, restarts=True, m_mul=0.5)(step), 3) for step in range(6)]
    [0.2, 0.1, 0.1, 0.05, 0.05, 0.025]
    """

    learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0
    restarts: bool = False
    t_mul: float = 1.0
    m_mul: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "decay_steps", at_least=1, whole=True)
        check_number(self, "end_learning_rate", at_least=0)
        check_number(self, "t_mul", at_least=1)
        check_number(self, "m_mul", above=0, at_most=1)
        if not self.restarts and (self.t_mul, self.m_mul) != (1, 1):
            raise SettingError(
                f"Cosine's t_mul and m_mul need restarts=True, got t_mul={self.t_mul},"
                f" m_mul={self.m_mul}."
            )

    def __call__(self, step: int) -> float:
        into = float(step)
        length = float(self.decay_steps)
        height = 1.0
        if not self.restarts:
            into = min(into, length)
        elif self.t_mul == 1:
            period, into = divmod(into, length)
            height = self.m_mul**period
        else:  # subtracting keeps the restarts exact; a logarithm would round
            while into >= length:
                into -= length
                length *= self.t_mul
                height *= self.m_mul
        return self.end_learning_rate + (
            self.learning_rate - self.end_learning_rate
        ) * height * _cosine(into / length)


@dataclass(frozen=True)
class OneCycle(Schedule):
    r"""One rise and fall: up to $\eta$ from $\eta$/`div_factor`, and down to
    $\eta$/`div_factor`/`final_div_factor` (Smith & Topin 2018).

    These are the learning rates of `torch.optim.lr_scheduler.OneCycleLR`; its cycle of the momentum
    is not included. Each phase goes from a rate $a$ to a rate $b$ by $b + (a - b)(1 + \cos(\pi
    s))/2$, where $s$ from 0 to 1 is the completed share of the phase. After `total_steps` updates
    the rate stays constant.

    - `max_learning_rate` $\eta \ge 0$.
    - `total_steps` $\ge 1$, in updates.
    - `pct_start` in [0, 1]: the share of the updates in which the rate rises.
    - `div_factor`, `final_div_factor`: each >= 1.
    - `anneal_strategy`: "cos" for half a cosine, "linear" for the line $a + (b - a)s$.
    - `three_phase`: fall back to the start in as many updates as the rise takes, then below it;
      `pct_start` is then at most 0.5.

    >>> [round(OneCycle(1.0, total_steps=10)(step), 5) for step in (0, 2, 9)]
    [0.04, 1.0, 0.0]
    """

    max_learning_rate: float
    total_steps: int
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    anneal_strategy: str = "cos"
    three_phase: bool = False

    def __post_init__(self) -> None:
        check_number(self, "max_learning_rate", at_least=0)
        check_number(self, "total_steps", at_least=1, whole=True)
        check_number(self, "pct_start", at_least=0, at_most=0.5 if self.three_phase else 1)
        check_number(self, "div_factor", at_least=1)
        check_number(self, "final_div_factor", at_least=1)
        require_choice(
            "OneCycle's anneal_strategy must be", self.anneal_strategy, ("cos", "linear")
        )

    def __call__(self, step: int) -> float:
        high = self.max_learning_rate
        start = high / self.div_factor
        up = self.pct_start * self.total_steps - 1
        last = self.total_steps - 1
        phases = [(up, start, high)]
        if self.three_phase:
            phases.append((2 * up, high, start))
        phases.append((last, phases[-1][2], start / self.final_div_factor))
        begin = 0.0
        for end, before, after in phases:
            if step <= end and end > begin:
                done = (step - begin) / (end - begin)
                share = _cosine(done) if self.anneal_strategy == "cos" else 1 - done
                return _between(after, before, share)
            begin = end
        return phases[-1][2]


@dataclass(frozen=True)
class Warmup(Schedule):
    r"""Linear warmup to the first rate of a schedule, $a + (\eta_0 - a)\, t/n$ while $t < n$, then
    the schedule itself, $\eta_{t-n}$.

    - `schedule` $\eta_t$: a Schedule, a number >= 0, or a callable of the update's number.
    - `steps` $n \ge 0$, in updates.
    - `start` $a \ge 0$.

    >>> [Warmup(Polynomial(0.4, decay_steps=4), steps=2)(step) for step in range(5)]
    [0.0, 0.2, 0.4, 0.30000000000000004, 0.2]
    """

    schedule: LearningRate
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            check_number(self, "schedule", at_least=0)
        check_number(self, "steps", at_least=0, whole=True)
        check_number(self, "start", at_least=0)

    def __call__(self, step: int) -> float:
        after = max(0, step - self.steps)
        rate = self.schedule(after) if callable(self.schedule) else self.schedule
        if not (is_number(rate) and is_finite(rate)):
            raise SettingError(f"Warmup's schedule must return a number, got {shortened(rate)}.")
        if step >= self.steps:
            return rate
        return _between(self.start, rate, step / self.steps)


@dataclass(frozen=True)
class InverseScaling(Schedule):
    r"""Decay with a power of the update, $\eta_0 / (t + 1)^p$; `learning_rate="invscaling"` of
    scikit-learn's SGDRegressor.

    - `learning_rate` $\eta_0 \ge 0$.
    - `power` $p \ge 0$.

    >>> [InverseScaling(0.01, power=0.5)(step) for step in (0, 3)]
    [0.01, 0.005]
    """

    aliases: ClassVar[tuple[str, ...]] = ("invscaling",)

    learning_rate: float = 0.01
    power: float = 0.25

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "power", at_least=0)

    def __call__(self, step: int) -> float:
        # a division by (step + 1)**power would overflow for a large power
        return self.learning_rate * math.pow(step + 1, -self.power)


@dataclass(frozen=True)
class Optimal(Schedule):
    r"""Bottou's decay $\eta_0 t_0/(t_0 + t)$ with $t_0 = 1/(e\alpha)$, $e = w/\max(1, 2(1+w))$ and
    $w = \sqrt{1/\sqrt\alpha}$ (Bottou 2010).

    $w$ is the expected size of the weights under this penalty, and $2(1+w)$ the slope of the
    squared error at $-w$. scikit-learn's "optimal" also has this form, with $e = w$ and $\eta_0 =
    e$.

    - `learning_rate` $\eta_0 \ge 0$.
    - `alpha` $\alpha > 0$: the strength of the model's L2 penalty.

    >>> round(Optimal(0.01, alpha=1e-4)(22000), 6)
    0.005
    """

    learning_rate: float = 0.01
    alpha: float = 1e-4

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "alpha", above=0)

    def __call__(self, step: int) -> float:
        typical = math.sqrt(1 / math.sqrt(self.alpha))
        first = 1 / (typical / max(1.0, 2 * (1 + typical)) * self.alpha)
        return self.learning_rate * first / (first + step)


def _elapsed(step: int, decay_steps: int, staircase: bool) -> float:
    return step // decay_steps if staircase else step / decay_steps


def _cosine(done: float) -> float:
    """1 at 0, 0 at 1, half a cosine in between."""
    return (1 + math.cos(math.pi * done)) / 2


def _between(low: float, high: float, share: float) -> float:
    """Interpolate: `high` at share 1, `low` at 0. Both ends are exact."""
    return high if share == 1 else low + (high - low) * share
