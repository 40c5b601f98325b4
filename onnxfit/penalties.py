"""Penalties: the cost of large weights, added to the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.checks import ChecksArguments, is_finite, is_number, name_list, shortened
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.graph.spec import Dim
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry

__all__ = ["L1", "L2", "ElasticNet", "Penalty", "get_penalty", "penalties_for"]


@dataclass(frozen=True)
class Penalty(ChecksArguments, ABC):
    """Base class of every penalty: the cost of one weight, a scalar that is added to the loss.

    To write a penalty, subclass with a frozen dataclass whose `__call__` is the formula; the
    gradient follows from it. Settings are fields.

    >>> @dataclass(frozen=True)
    ... class Orthogonal(Penalty):
    ...     weight: float = 0.01
    ...
    ...     def __call__(self, op, w):
    ...         gram = op.MatMul(op.Transpose(w), w)
    ...         distance = gram - np.eye(2, dtype=np.float32)
    ...         return self.weight * op.ReduceSum(distance * distance, keepdims=0)
    >>> graph = Orthogonal().build_onnx_function((3, 2), gradient=True).graph
    >>> [v.name for v in graph.output]
    ['penalty', 'weight_grad']
    """

    @abstractmethod
    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        """Return the cost of the weight `w`, shape `()`; `op` builds the graph."""

    def build_onnx_function(
        self,
        shape: Sequence[Dim] = ("rows", "columns"),
        dtype: npt.DTypeLike = np.float32,
        *,
        gradient: bool = False,
    ) -> onnx.ModelProto:
        """Build the penalty as a model, `weight` -> `penalty`, that runs in any onnxruntime.

        - `shape`, `dtype`: shape and element type of the weight; a size may be a name. `penalty`
          has shape `()`.
        - `gradient`: add the output `weight_grad`.

        >>> [v.name for v in L2(0.1).build_onnx_function(gradient=True).graph.output]
        ['penalty', 'weight_grad']
        """
        # Imported late: a formula does not need the differentiator.
        from onnxfit.gradients import functions

        op = functions.new_function(self)
        op.output("penalty", self(op, op.input("weight", dtype, shape)))
        return functions.to_model_proto(op, ("penalty", "weight") if gradient else None)


OnePenalty = Union[Penalty, type[Penalty], float, str, Mapping[str, float]]
PenaltyLike = Union[OnePenalty, Mapping[str, Union[OnePenalty, None]], None]


@dataclass(frozen=True)
class L1(Penalty):
    r"""Sum of absolute values, $\lambda \sum |w|$ (Tibshirani 1996); the gradient is
    $\lambda\,\mathrm{sign}(w)$, and 0 where $w = 0$.

    - `weight` $\lambda \ge 0$. SettingError: a value is not a finite number >= 0.

    >>> get_penalty("lasso")
    L1(weight=0.01)
    """

    aliases = ("lasso",)

    weight: float = 0.01

    def __post_init__(self) -> None:
        _check_strength("L1", "weight", self.weight)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return self.weight * _sum_of_elements(op, abs(w))


@dataclass(frozen=True)
class L2(Penalty):
    r"""Sum of squares, $\lambda \sum w^2$ (Hoerl and Kennard 1970); the gradient is $2 \lambda w$.

    - `weight` $\lambda \ge 0$. SettingError: a value is not a finite number >= 0.

    >>> get_penalty("ridge")
    L2(weight=0.01)
    """

    aliases = ("ridge",)

    weight: float = 0.01

    def __post_init__(self) -> None:
        _check_strength("L2", "weight", self.weight)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return self.weight * _sum_of_elements(op, w * w)


@dataclass(frozen=True)
class ElasticNet(Penalty):
    r"""Sum of absolute values and squares, $l_1 \sum |w| + l_2 \sum w^2$ (Zou and Hastie 2005,
    without their factor $1 + l_2$).

    - `l1` $l_1 \ge 0$, `l2` $l_2 \ge 0$. SettingError: a value is not a finite number >= 0.

    >>> ElasticNet(l1=0.5, l2=0.0)
    ElasticNet(l1=0.5, l2=0.0)
    """

    aliases = ("elastic", "elasticnet", "l1_l2", "l1l2")

    l1: float = 0.01
    l2: float = 0.01

    def __post_init__(self) -> None:
        _check_strength("ElasticNet", "l1", self.l1)
        _check_strength("ElasticNet", "l2", self.l2)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return _sum_of_elements(op, self.l1 * abs(w) + self.l2 * (w * w))


def get_penalty(spec: OnePenalty) -> Penalty:
    """Return the penalty that `spec` specifies.

    `spec` is a Penalty, which is returned itself, a Penalty class, a name, a number (L2 with that
    weight), or a dict `{"l1": a, "l2": b}`, in which either entry is optional. UnknownNameError (a
    SettingError): the name is unknown. SettingError: `spec` is anything else.

    >>> get_penalty(0.1), get_penalty("lasso"), get_penalty({"l1": 0.5})
    (L2(weight=0.1), L1(weight=0.01), ElasticNet(l1=0.5, l2=0.0))
    """
    if isinstance(spec, Penalty):
        return spec
    if isinstance(spec, type) and issubclass(spec, Penalty):
        return spec()
    if isinstance(spec, str):
        return lookup("penalty", spec, registry(__name__, Penalty))  # type: ignore[type-abstract]
    if is_number(spec):
        return L2(float(spec) if is_finite(spec) else spec)  # type: ignore[arg-type]
    if isinstance(spec, Mapping) and spec and set(spec) <= {"l1", "l2"}:
        return ElasticNet(spec.get("l1", 0.0), spec.get("l2", 0.0))
    raise SettingError(
        "A penalty must be a Penalty, a number (L2), a name or {'l1': a, 'l2': b}, got"
        f" {shortened(spec)}."
    )


def penalties_for(penalty: PenaltyLike, names: Sequence[str]) -> dict[str, Penalty]:
    """Return a mapping from weight to Penalty for penalized weights, in the order of `names`.

    - `penalty`: the argument of `Trainer`. None is no penalty; a Penalty, a number or a name
      applies to every weight. A dict maps names and fnmatch patterns to these, or to None for no
      penalty. A weight's own name takes precedence over patterns, and the first of several matching
      patterns applies.
    - `names`: the trained weights.

    UnknownNameError (a SettingError): no weight matches an entry of the dict.

    >>> weights = ["fc1.weight", "fc1.bias", "fc2.weight"]
    >>> penalties_for({"fc2.weight": {"l1": 0.1}, "*.bias": None, "*": 1e-4}, weights)
    {'fc1.weight': L2(weight=0.0001), 'fc2.weight': ElasticNet(l1=0.1, l2=0.0)}
    """
    names = name_list("names", names)
    if penalty is None:
        return {}
    if not isinstance(penalty, Mapping):
        return dict.fromkeys(names, get_penalty(penalty))
    _check_keys(penalty, names)
    entries = {key: None if p is None else get_penalty(p) for key, p in penalty.items()}
    # A weight's name may have brackets, and is then not a pattern.
    patterns = [key for key in entries if key not in names]
    chosen: dict[str, Penalty] = {}
    for name in names:
        keys = [name] if name in entries else [p for p in patterns if fnmatchcase(name, p)]
        own = entries[keys[0]] if keys else None
        if own is not None:
            chosen[name] = own
    return chosen


def _check_keys(penalty: Mapping[str, Any], names: Sequence[str]) -> None:
    for pattern in penalty:
        if not isinstance(pattern, str):
            raise SettingError(
                "penalty= must map names of weights and patterns to penalties, got the key"
                f" {pattern!r}."
            )
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
            if set(penalty) <= {"l1", "l2"}:
                raise SettingError(
                    f"penalty={dict(penalty)!r} matches no weight. For every weight, use"
                    f" penalty={{'*': {dict(penalty)!r}}}."
                )
            raise UnknownNameError("trained weight", pattern, names)


def _sum_of_elements(op: GraphBuilder, x: Value) -> Value:
    if x.shape is not None and 0 in x.shape:
        return op.constant(0, x.dtype)  # onnxruntime cannot compile the gradient of an empty sum
    return op.ReduceSum(x, keepdims=0) if x.rank else x


def _check_strength(penalty: str, field: str, value: Any) -> None:
    if not (is_number(value) and value >= 0 and is_finite(value)):
        raise SettingError(f"{penalty} needs a finite {field} >= 0, got {shortened(value)}.")
