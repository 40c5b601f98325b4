"""Learning-rate schedules: the learning rate as a function of the number of updates done.

A schedule can also set `weight_decay`, the `momentum` of `SGD` and `RMSprop`, and the first of
`betas`: `SGD(0.1, momentum=Cyclic(0.95, 0.85, 100))`. The value of update $t$ replaces the number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Union

from onnxfit.checks import (
    ChecksArguments,
    check_number,
    is_finite,
    is_number,
    require_choice,
    set_field,
    shortened,
)
from onnxfit.errors import SettingError

__all__ = [
    "Constant",
    "Cosine",
    "Cyclic",
    "Exponential",
    "InverseScaling",
    "InverseSquareRoot",
    "InverseTime",
    "MultiStep",
    "OneCycle",
    "Optimal",
    "Piecewise",
    "Polynomial",
    "Schedule",
    "Sequential",
    "Step",
    "Warmup",
    "WarmupStableDecay",
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

    These are the learning rates of `torch.optim.lr_scheduler.OneCycleLR`. Its cycle of the momentum
    is a second schedule, `momentum=Sequential([Cosine(0.95, n, 0.85), Cosine(0.85, m, 0.95)],
    [n])`, where the rate rises for n updates and falls for m. Each phase goes from a rate $a$ to a
    rate $b$ by $b + (a - b)(1 + \cos(\pi s))/2$, where $s$ from 0 to 1 is the completed share of
    the phase. After `total_steps` updates the rate stays constant.

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


@dataclass(frozen=True)
class MultiStep(Schedule):
    r"""Decay by a factor at given updates, $\eta_0 \gamma^k$ with $k$ the number of milestones that
    are at most $t$ (`torch.optim.lr_scheduler.MultiStepLR`).

    - `learning_rate` $\eta_0 \ge 0$.
    - `milestones`: whole numbers >= 0 in ascending order, in updates.
    - `gamma` $\gamma$ in (0, 1].

    >>> [MultiStep(1.0, milestones=(1, 3), gamma=0.5)(step) for step in range(4)]
    [1.0, 0.5, 0.5, 0.25]
    """

    learning_rate: float
    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "milestones", at_least=0, whole=True, sequence=True)
        check_number(self, "gamma", above=0, at_most=1)
        if list(self.milestones) != sorted(self.milestones):
            raise SettingError(f"MultiStep needs ascending milestones, got {self.milestones}.")

    def __call__(self, step: int) -> float:
        return self.learning_rate * self.gamma ** bisect_right(self.milestones, step)


@dataclass(frozen=True)
class Cyclic(Schedule):
    r"""Triangles between two rates (Smith 2017; `torch.optim.lr_scheduler.CyclicLR`).

    In cycle $c = 0, 1, \ldots$, the rate goes on a line from $\eta_0$ to $\eta_0 + h_c (\eta_1 -
    \eta_0)$ and back.

    - `base_learning_rate` $\eta_0 \ge 0$, `max_learning_rate` $\eta_1 \ge 0$. Either may be the
      larger, so that a momentum can fall while the learning rate rises.
    - `step_size_up` $\ge 1$, in updates; `step_size_down` $\ge 1$, or None for the same.
    - `mode`: "triangular" for $h_c = 1$, "triangular2" for $h_c = 2^{-c}$, "exp_range" for
      $\gamma^t$ in place of $h_c$.
    - `gamma` $\gamma$ in (0, 1].

    >>> [Cyclic(0.0, 1.0, step_size_up=2, mode="triangular2")(step) for step in range(7)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5]
    """

    aliases: ClassVar[tuple[str, ...]] = ("triangular",)

    base_learning_rate: float
    max_learning_rate: float
    step_size_up: int = 2000
    step_size_down: int | None = None
    mode: str = "triangular"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "base_learning_rate", at_least=0)
        check_number(self, "max_learning_rate", at_least=0)
        check_number(self, "step_size_up", at_least=1, whole=True)
        if self.step_size_down is not None:
            check_number(self, "step_size_down", at_least=1, whole=True)
        check_number(self, "gamma", above=0, at_most=1)
        require_choice(
            "Cyclic's mode must be", self.mode, ("triangular", "triangular2", "exp_range")
        )

    def __call__(self, step: int) -> float:
        up = self.step_size_up
        down = up if self.step_size_down is None else self.step_size_down
        cycle, into = divmod(step, up + down)
        share = into / up if into <= up else (up + down - into) / down
        height = {"triangular": 1.0, "triangular2": 0.5**cycle}.get(self.mode, self.gamma**step)
        return _between(self.base_learning_rate, self.max_learning_rate, share * height)


@dataclass(frozen=True)
class Sequential(Schedule):
    """Schedules one after another: schedule $i$ begins at update $m_i$ and counts from there
    (`torch.optim.lr_scheduler.SequentialLR`, `optax.join_schedules`).

    - `schedules`: a list of Schedules, numbers >= 0 or callables of the update's number.
    - `milestones`: the updates $m_1, m_2, ...$ at which the second and each later one begins:
      increasing whole numbers >= 1, one fewer than schedules.

    >>> [Sequential([0.5, Polynomial(1.0, 2)], [2])(step) for step in range(5)]
    [0.5, 0.5, 1.0, 0.5, 0.0]
    """

    schedules: tuple[LearningRate, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        given: Any = self.schedules
        is_list = isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
        schedules = list(given) if is_list else []
        if not schedules or not all(map(_is_rate, schedules)):
            raise SettingError(
                "Sequential needs schedules to be a list of schedules or numbers >= 0, got"
                f" {shortened(given)}."
            )
        plain = (one if callable(one) else float(one) for one in schedules)
        set_field(self, "schedules", tuple(plain))
        check_number(self, "milestones", at_least=1, whole=True, sequence=True)
        if any(a >= b for a, b in zip(self.milestones, self.milestones[1:])):
            raise SettingError(f"Sequential needs increasing milestones, got {self.milestones}.")
        if len(self.schedules) != len(self.milestones) + 1:
            raise SettingError(
                f"Sequential needs one more schedule than milestones, got {len(self.schedules)}"
                f" schedules for {len(self.milestones)} milestones."
            )

    def __call__(self, step: int) -> float:
        i = bisect_right(self.milestones, step)
        begin = self.milestones[i - 1] if i else 0
        schedule = self.schedules[i]
        return schedule(step - begin) if callable(schedule) else schedule


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    r"""Linear warmup, a constant rate, and a decay (Hu et al. 2024; transformers'
    `get_wsd_schedule`).

    $a + (\eta_0 - a)\,t/n_w$ while $t < n_w$; then $\eta_0$ for $n_s$ updates; then $\eta_1 +
    (\eta_0 - \eta_1)\,f(s)$, where $s$ goes from 0 to 1 in $n_d$ updates; then $\eta_1$.

    - `learning_rate` $\eta_0 \ge 0$.
    - `warmup_steps` $n_w \ge 0$, `stable_steps` $n_s \ge 0$, `decay_steps` $n_d \ge 1$.
    - `end_learning_rate` $\eta_1 \ge 0$, `start` $a \ge 0$.
    - `decay`: "linear" for $f(s) = 1 - s$, "cos" for half a cosine, "sqrt" for $1 - \sqrt{s}$
      (Hägele et al. 2024).

    >>> [WarmupStableDecay(1.0, 2, 2, 2)(step) for step in range(7)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    aliases: ClassVar[tuple[str, ...]] = ("wsd",)

    learning_rate: float
    warmup_steps: int
    stable_steps: int
    decay_steps: int
    end_learning_rate: float = 0.0
    start: float = 0.0
    decay: str = "linear"

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "warmup_steps", at_least=0, whole=True)
        check_number(self, "stable_steps", at_least=0, whole=True)
        check_number(self, "decay_steps", at_least=1, whole=True)
        check_number(self, "end_learning_rate", at_least=0)
        check_number(self, "start", at_least=0)
        require_choice("WarmupStableDecay's decay must be", self.decay, ("linear", "cos", "sqrt"))

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return _between(self.start, self.learning_rate, step / self.warmup_steps)
        done = (step - self.warmup_steps - self.stable_steps) / self.decay_steps
        done = min(max(done, 0.0), 1.0)
        share = {"linear": 1 - done, "cos": _cosine(done), "sqrt": 1 - math.sqrt(done)}[self.decay]
        return _between(self.end_learning_rate, self.learning_rate, share)


@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    r"""Linear warmup, then decay with the square root of time (Vaswani et al. 2017; transformers'
    `get_inverse_sqrt_schedule`).

    $\eta_0\,t/n$ while $t < n$, then $\eta_0 \sqrt{T/(t - n + T)}$.

    - `learning_rate` $\eta_0 \ge 0$, the largest rate.
    - `warmup_steps` $n \ge 0$.
    - `timescale` $T \ge 1$; None is $n$, or 10000 without warmup.

    >>> [InverseSquareRoot(0.5, warmup_steps=4)(step) for step in (0, 2, 4, 16)]
    [0.0, 0.25, 0.5, 0.25]
    """

    aliases: ClassVar[tuple[str, ...]] = ("inverse_sqrt", "noam")

    learning_rate: float
    warmup_steps: int = 0
    timescale: int | None = None

    def __post_init__(self) -> None:
        check_number(self, "learning_rate", at_least=0)
        check_number(self, "warmup_steps", at_least=0, whole=True)
        if self.timescale is not None:
            check_number(self, "timescale", at_least=1, whole=True)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        scale = self.timescale or self.warmup_steps or 10_000
        return self.learning_rate * math.sqrt(scale / (step - self.warmup_steps + scale))


def _is_rate(value: Any) -> bool:
    """Return whether a value is a schedule, or a number >= 0."""
    return callable(value) or (is_number(value) and is_finite(value) and value >= 0)


def _elapsed(step: int, decay_steps: int, staircase: bool) -> float:
    return step // decay_steps if staircase else step / decay_steps


def _cosine(done: float) -> float:
    """1 at 0, 0 at 1, half a cosine in between."""
    return (1 + math.cos(math.pi * done)) / 2


def _between(low: float, high: float, share: float) -> float:
    """Interpolate: `high` at share 1, `low` at 0. Both ends are exact."""
    return high if share == 1 else low + (high - low) * share
