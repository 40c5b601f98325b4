"""Constraints: projections of weights after each update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from onnxfit.checks import ChecksArguments, check_number, is_integer, set_field, shortened
from onnxfit.errors import SettingError
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry

__all__ = ["Constraint", "MaxNorm", "MinMaxNorm", "NonNeg", "UnitNorm", "get_constraint"]

REGISTRY = "onnxfit.optimizers"
EPSILON = 1e-7  # that of Keras


@dataclass(frozen=True)
class Constraint(ChecksArguments, ABC):
    """Base class of every constraint: the weight after an update, projected.

    Constraints are a setting of the optimizer. The average of `ema_momentum` is that of the
    projected weights.

    To write a constraint, subclass with a frozen dataclass whose `__call__` is the formula.

    >>> @dataclass(frozen=True)
    ... class Box(Constraint):
    ...     bound: float = 1.0
    ...
    ...     def __call__(self, op, w):
    ...         return op.Clip(w, -self.bound, self.bound)
    >>> Box(0.5)
    Box(bound=0.5)
    """

    @abstractmethod
    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        """Return the projected weight, in the shape and element type of `w`; `op` builds the
        graph.
        """

    def check_axes(self, weight: str, ndim: int) -> None:
        """Raise SettingError if a weight lacks an axis of the setting `axis`.

        - `weight`, `ndim`: the name of the weight, and the number of its axes.
        """
        axes: Any = getattr(self, "axis", ())
        for axis in [axes] if is_integer(axes) else axes:
            if not -ndim <= axis < ndim:
                raise SettingError(
                    f"{self!r} needs a weight with an axis {axis}, but {weight!r} has {ndim} axes."
                    " Pass another axis, or a dict that gives the constraint to fewer weights."
                )


@dataclass(frozen=True)
class MaxNorm(Constraint):
    r"""Norms of at most $c$ (Srebro & Shraibman 2005; `keras.constraints.MaxNorm`): $w\,\min(n,
    c)/(n + 10^{-7})$ with the L2 norm $n$ of $w$ over `axis`.

    - `max_value` $c \ge 0$.
    - `axis`: an axis, or a list of axes. 0 is right for a matrix (inputs, outputs), as Keras has
      it; 1 for one that torch exported as (outputs, inputs); (1, 2, 3) for filters of ONNX.

    >>> get_constraint("max_norm")
    MaxNorm(max_value=2.0, axis=0)
    """

    max_value: float = 2.0
    axis: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        check_number(self, "max_value", at_least=0)
        _check_axis(self)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        norms = _norms(op, w, self.axis)
        return w * (op.Min(norms, self.max_value) / (norms + EPSILON))


@dataclass(frozen=True)
class NonNeg(Constraint):
    r"""No number below 0: $\max(w, 0)$ (`keras.constraints.NonNeg`).

    >>> get_constraint("non_neg")
    NonNeg()
    """

    aliases = ("nonneg",)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return op.Where(w < 0, op.constant(0, w.dtype), w)  # NaN stays NaN


@dataclass(frozen=True)
class UnitNorm(Constraint):
    r"""Norms of 1: $w/(n + 10^{-7})$ with the L2 norm $n$ of $w$ over `axis`
    (`keras.constraints.UnitNorm`).

    - `axis`: as in `MaxNorm`.

    >>> UnitNorm(axis=(1, 2, 3))
    UnitNorm(axis=(1, 2, 3))
    """

    axis: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        _check_axis(self)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return w / (_norms(op, w, self.axis) + EPSILON)


@dataclass(frozen=True)
class MinMaxNorm(Constraint):
    r"""Norms between two bounds (`keras.constraints.MinMaxNorm`): $w\,(r\,\mathrm{clip}(n, a, b) +
    (1-r)\,n)/(n + 10^{-7})$ with the L2 norm $n$ of $w$ over `axis`.

    - `min_value` $a \ge 0$, `max_value` $b \ge a$.
    - `rate` $r$ in [0, 1]: 1 moves the norm to its bound, a smaller number a part of the way.
    - `axis`: as in `MaxNorm`.

    >>> MinMaxNorm(0.5, 2.0, rate=0.9).axis
    0
    """

    min_value: float = 0.0
    max_value: float = 1.0
    rate: float = 1.0
    axis: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        check_number(self, "min_value", at_least=0)
        check_number(self, "max_value", at_least=0)
        check_number(self, "rate", at_least=0, at_most=1)
        _check_axis(self)
        if self.min_value > self.max_value:
            raise SettingError(
                f"MinMaxNorm needs min_value <= max_value, got {self.min_value} and"
                f" {self.max_value}."
            )

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        norms = _norms(op, w, self.axis)
        clipped = op.Min(op.Max(norms, self.min_value), self.max_value)
        wanted = self.rate * clipped + (1 - self.rate) * norms
        return w * (wanted / (norms + EPSILON))


OneConstraint = Union[Constraint, type[Constraint], str]
Constraints = Union[OneConstraint, Mapping[str, Union[OneConstraint, None]], None]


def get_constraint(spec: OneConstraint) -> Constraint:
    """Return the constraint that `spec` specifies: a name, a Constraint class, or a Constraint.

    UnknownNameError (a SettingError): the name is unknown; the message has the nearest name.
    SettingError: `spec` is anything else.

    >>> get_constraint("UnitNorm")
    UnitNorm(axis=0)
    """
    if isinstance(spec, Constraint):
        return spec
    if isinstance(spec, type) and issubclass(spec, Constraint):
        return spec()
    if isinstance(spec, str):
        known = registry(REGISTRY, Constraint)  # type: ignore[type-abstract]
        return lookup("constraint", spec, known)
    raise SettingError(f"A constraint must be a Constraint or a name, got {shortened(spec)}.")


def constraints_by_pattern(given: Constraints) -> dict[str, Constraint | None]:
    """Return the setting `constraints` as a mapping from pattern to constraint."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {"*": get_constraint(given)}
    if not all(isinstance(pattern, str) for pattern in given):
        raise SettingError(
            "constraints must map names of weights and patterns to constraints, got"
            f" {shortened(given)}."
        )
    return {pattern: None if c is None else get_constraint(c) for pattern, c in given.items()}


def _check_axis(owner: Any) -> None:
    """Raise SettingError unless `axis` is a whole number, or a list of whole numbers."""
    axis = owner.axis
    axes = [axis] if is_integer(axis) else axis
    if not isinstance(axes, (list, tuple)) or not axes or not all(map(is_integer, axes)):
        raise SettingError(
            f"{type(owner).__name__} needs axis to be a whole number or a list of whole numbers,"
            f" got {shortened(axis)}."
        )
    set_field(owner, "axis", int(axis) if is_integer(axis) else tuple(map(int, axes)))


def _norms(op: GraphBuilder, w: Value, axis: int | Sequence[int]) -> Value:
    """Return the L2 norms over axes, which stay with size 1."""
    axes = [axis] if isinstance(axis, int) else list(axis)
    return op.Sqrt(op.ReduceSum(w * w, axes))
