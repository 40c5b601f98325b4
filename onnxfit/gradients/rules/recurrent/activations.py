"""The activations of recurrent operators, with their slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxfit.gradients.table import NoGradientError
from onnxfit.graph.values import GraphBuilder, Value

DEFAULT_ACTIVATIONS = {
    "RNN": ["Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
}


@dataclass(frozen=True)
class ActivationFormula:
    """a = value(op, z, alpha, beta), and its derivative slope(op, z, a, alpha, beta).

    `defaults` are the defaults of alpha and beta, if the activation has them; None if versions of
    onnxruntime differ in the default.
    """

    value: Callable[[GraphBuilder, Value, float, float], Value]
    slope: Callable[[GraphBuilder, Value, Value, float, float], Value]
    defaults: tuple[float | None, ...] = ()


def _as_number(op: GraphBuilder, condition: Value, like: Value) -> Value:
    return op.cast(condition, like.dtype)


ACTIVATIONS = {
    "relu": ActivationFormula(
        lambda op, z, alpha, beta: op.Relu(z),
        lambda op, z, a, alpha, beta: _as_number(op, a > 0, z),
    ),
    "tanh": ActivationFormula(
        lambda op, z, alpha, beta: op.Tanh(z),
        lambda op, z, a, alpha, beta: 1 - a * a,
    ),
    "sigmoid": ActivationFormula(
        lambda op, z, alpha, beta: op.Sigmoid(z),
        lambda op, z, a, alpha, beta: a * (1 - a),
    ),
    "affine": ActivationFormula(
        lambda op, z, alpha, beta: alpha * z + beta,
        lambda op, z, a, alpha, beta: op.Expand(op.constant(alpha, z.dtype), op.shape(z)),
        (None, None),
    ),
    "leakyrelu": ActivationFormula(
        lambda op, z, alpha, beta: op.Where(z >= 0, z, alpha * z),
        lambda op, z, a, alpha, beta: alpha + (1 - alpha) * _as_number(op, z > 0, z),
        (0.01,),
    ),
    "thresholdedrelu": ActivationFormula(
        lambda op, z, alpha, beta: op.Where(z >= alpha, z, 0),
        lambda op, z, a, alpha, beta: _as_number(op, z > alpha, z),
        (None,),
    ),
    "scaledtanh": ActivationFormula(
        lambda op, z, alpha, beta: alpha * op.Tanh(beta * z),
        lambda op, z, a, alpha, beta: alpha * beta * (1 - op.Tanh(beta * z) ** 2),
        (None, None),
    ),
    "hardsigmoid": ActivationFormula(
        lambda op, z, alpha, beta: op.Clip(alpha * z + beta, 0, 1),
        lambda op, z, a, alpha, beta: alpha * _as_number(op, (a > 0) & (a < 1), z),
        (0.2, 0.5),
    ),
    "elu": ActivationFormula(
        lambda op, z, alpha, beta: op.Where(z >= 0, z, alpha * (op.Exp(op.Min(z, 0)) - 1)),
        lambda op, z, a, alpha, beta: op.Where(z > 0, 1, a + alpha),
        (1.0,),
    ),
    "softsign": ActivationFormula(
        lambda op, z, alpha, beta: z / (1 + op.Abs(z)),
        lambda op, z, a, alpha, beta: (1 - op.Abs(a)) ** 2,
    ),
    "softplus": ActivationFormula(
        lambda op, z, alpha, beta: op.Max(z, 0) + op.Log(1 + op.Exp(-op.Abs(z))),
        lambda op, z, a, alpha, beta: op.Sigmoid(z),
    ),
}


@dataclass(frozen=True)
class Activation:
    """One of a node's activations, with the clipping of its argument to [-clip, clip]."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def __call__(self, z: Value) -> Value:
        """Return the activation of z."""
        return ACTIVATIONS[self.name].value(z.op, self._clipped(z), self.alpha, self.beta)

    def slope(self, z: Value, a: Value) -> Value:
        """Return the derivative at z, where the activation is a."""
        formula = ACTIVATIONS[self.name]
        slope = formula.slope(z.op, self._clipped(z), a, self.alpha, self.beta)
        if self.clip is None:
            return slope
        return slope * _as_number(z.op, z.op.Abs(z) <= self.clip, z)

    def _clipped(self, z: Value) -> Value:
        return z if self.clip is None else z.op.Clip(z, -self.clip, self.clip)


def activations_of(
    op_type: str,
    names: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    clip: float | None,
    directions: int,
) -> list[list[Activation]]:
    """Return the activations of each direction.

    An activation with an alpha (a beta) takes the next number of the list, or its default after the
    end of the list. NoGradientError: ONNX does not define an activation, or versions of onnxruntime
    use different numbers for it.
    """
    per_direction = DEFAULT_ACTIVATIONS[op_type]
    numbers = {"alpha": list(alphas or ()), "beta": list(betas or ())}
    unused = {parameter: list(values) for parameter, values in numbers.items()}
    activations = []
    for k, name in enumerate(names or per_direction * directions):
        if name.lower() not in ACTIVATIONS:
            raise NoGradientError(
                f"its activation {name!r} is not defined by ONNX",
                f"use one of {', '.join(ACTIVATIONS)}",
            )
        chosen = {"alpha": 0.0, "beta": 0.0}
        for parameter, default in zip(chosen, ACTIVATIONS[name.lower()].defaults):
            number = unused[parameter].pop(0) if unused[parameter] else default
            # For an RNN, versions of onnxruntime also differ in how they assign the numbers, unless
            # every activation has one.
            is_ambiguous = op_type == "RNN" and numbers[parameter][k : k + 1] != [number]
            if number is None or is_ambiguous:
                raise NoGradientError(
                    f"versions of onnxruntime use different values of {parameter} for its"
                    f" activation {name!r}",
                    f"set activation_{parameter} with a number for every activation",
                )
            chosen[parameter] = number
        # onnxruntime does not clip the argument of an LSTM's third activation, c in h = o h(c).
        is_clipped = op_type != "LSTM" or k % 3 != 2
        bound = (clip or None) if is_clipped else None
        activations.append(Activation(name.lower(), **chosen, clip=bound))
    step = len(per_direction)
    return [activations[k * step : (k + 1) * step] for k in range(directions)]
