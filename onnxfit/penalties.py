"""Penalties: what large weights cost, added to the loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import onnx

from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.graph.spec import Dim
from onnxfit.graph.values import GraphBuilder, Value
from onnxfit.registry import lookup, registry, snake_case

__all__ = ["L1", "L2", "ElasticNet", "Penalty", "get_penalty", "penalties_for"]


@dataclass(frozen=True)
class Penalty(ABC):
    """The base of every penalty: from one weight to a scalar."""

    @abstractmethod
    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        """What this weight costs, shape `()`."""

    def build_onnx_function(
        self,
        shape: Sequence[Dim] = ("rows", "columns"),
        dtype: npt.DTypeLike = np.float32,
        *,
        gradient: bool = False,
    ) -> onnx.ModelProto:
        """The penalty as a model of its own, for a weight of this shape and type:

        `weight` -> `penalty`, shape `()`.

        `gradient=True` adds the output `weight_grad`. It runs in any onnxruntime.
        """
        # Imported late: a formula does not need the differentiator.
        from onnxfit.gradients import functions

        op = functions.new_function(self)
        op.output("penalty", self(op, op.input("weight", dtype, shape)))
        return functions.finished(op, ("penalty", "weight") if gradient else None)


OnePenalty = Union[Penalty, type[Penalty], float, str, Mapping[str, float]]
PenaltyLike = Union[OnePenalty, Mapping[str, Union[OnePenalty, None]], None]


@dataclass(frozen=True)
class L1(Penalty):
    r"""$\lambda \sum |w|$, with $\lambda$ = `weight` $\ge 0$; its gradient is
    $\lambda\,\mathrm{sign}(w)$, and 0 where $w = 0$ (Tibshirani 1996).
    """

    aliases = ("lasso",)

    weight: float = 0.01

    def __post_init__(self) -> None:
        _check("L1", "weight", self.weight)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return self.weight * _sum(op, abs(w))


@dataclass(frozen=True)
class L2(Penalty):
    r"""$\lambda \sum w^2$, with $\lambda$ = `weight` $\ge 0$; its gradient is $2 \lambda w$ (Hoerl
    and Kennard 1970).
    """

    aliases = ("ridge",)

    weight: float = 0.01

    def __post_init__(self) -> None:
        _check("L2", "weight", self.weight)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return self.weight * _sum(op, w * w)


@dataclass(frozen=True)
class ElasticNet(Penalty):
    r"""$l_1 \sum |w| + l_2 \sum w^2$, with `l1`, `l2` $\ge 0$ (Zou and Hastie 2005, without their
    factor $1 + l_2$).
    """

    aliases = ("elastic", "elasticnet", "l1_l2", "l1l2")

    l1: float = 0.01
    l2: float = 0.01

    def __post_init__(self) -> None:
        _check("ElasticNet", "l1", self.l1)
        _check("ElasticNet", "l2", self.l2)

    def __call__(self, op: GraphBuilder, w: Value) -> Value:
        return _sum(op, self.l1 * abs(w) + self.l2 * (w * w))


def get_penalty(spec: OnePenalty) -> Penalty:
    """A Penalty from one, a number (L2), a name, a class, or `{"l1": a, "l2": b}`, of which either
    may be left out.

    >>> get_penalty(0.1), get_penalty("lasso"), get_penalty({"l1": 0.5})
    (L2(weight=0.1), L1(weight=0.01), ElasticNet(l1=0.5, l2=0.0))
    """
    if isinstance(spec, Penalty):
        return spec
    if isinstance(spec, type) and issubclass(spec, Penalty):
        return spec()
    if isinstance(spec, str):
        known = registry(__name__, Penalty)  # type: ignore[type-abstract]
        return lookup(
            "penalty",
            next((n for n in (spec, snake_case(spec), spec.lower()) if n in known), spec),
            known,
        )
    if _is_number(spec):
        return L2(float(spec))  # type: ignore[arg-type]
    if isinstance(spec, Mapping) and spec and set(spec) <= {"l1", "l2"}:
        return ElasticNet(spec.get("l1", 0.0), spec.get("l2", 0.0))
    raise SettingError(
        f"A penalty is a Penalty, a number (L2), a name or {{'l1': a, 'l2': b}}, got {spec!r}."
    )


def penalties_for(penalty: PenaltyLike, names: Sequence[str]) -> dict[str, Penalty]:
    """One penalty per weight that has one, in the order of `names`, from what `Trainer(penalty=)`
    takes.

    A Penalty, number or name holds for every weight. A dict maps names and fnmatch patterns to
    these, or to None for no penalty: a weight's own name comes before patterns, and of patterns the
    first that matches it. UnknownNameError for an entry that no weight matches.

    >>> penalties_for({"fc2.weight": {"l1": 0.1}, "*.bias": None, "*": 1e-4}, ["fc1.weight", "fc1.bias", "fc2.weight"])
    {'fc1.weight': L2(weight=0.0001), 'fc2.weight': ElasticNet(l1=0.1, l2=0.0)}
    """
    if penalty is None:
        return {}
    if not isinstance(penalty, Mapping):
        return dict.fromkeys(names, get_penalty(penalty))
    entries = {
        key: None if one is None else get_penalty(one) for key, one in _entries(penalty, names)
    }
    # a name may have brackets, and is no pattern then
    patterns = [key for key in entries if key not in names]
    found: dict[str, Penalty] = {}
    for name in names:
        key = name if name in entries else next((p for p in patterns if fnmatchcase(name, p)), None)
        one = None if key is None else entries[key]
        if one is not None:
            found[name] = one
    return found


def _entries(penalty: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    for pattern in penalty:
        if not isinstance(pattern, str):
            raise SettingError(
                "penalty= maps names of weights and patterns to penalties, got the key"
                f" {pattern!r}."
            )
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
            if set(penalty) <= {"l1", "l2"}:
                raise SettingError(
                    f"penalty={dict(penalty)!r} names no weight; for every weight write"
                    f" penalty={{'*': {dict(penalty)!r}}}."
                )
            raise UnknownNameError("trained weight", pattern, names)
    return list(penalty.items())


def _sum(op: GraphBuilder, x: Value) -> Value:
    if x.shape is not None and 0 in x.shape:
        return op.constant(0, x.dtype)  # onnxruntime cannot compile the gradient of an empty sum
    return op.ReduceSum(x, keepdims=0) if x.rank else x


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _check(penalty: str, field: str, value: Any) -> None:
    if not (_is_number(value) and value >= 0 and math.isfinite(value)):
        raise SettingError(f"{penalty} needs a finite {field} >= 0, got {value!r}.")
