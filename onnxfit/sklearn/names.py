"""Arguments of scikit-learn's and other estimators, and what they are called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

import numpy as np

from onnxfit.checks import checks_names, shortened
from onnxfit.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])

_EPOCHS = "Pass epochs={}: the number of iterations over the data."
_OPTIMIZER = "Pass optimizer=onnxfit.optimizers.{}."
_PENALTY = (
    "Pass penalty={'coefficients_*': ...}. For alpha=a of MLPClassifier the number is"
    " a / (2 * batch_size), for MLPRegressor a / batch_size."
)
_RATE = "Pass learning_rate={}: the learning rate, a number or a Schedule."
_FIXED_ACTIVATION = (
    "Default networks have ReLU between their layers. For another activation, pass a model."
)
_NO_TOLERANCE = (
    "Fits run all epochs, unless early_stopping=True; for a smallest improvement, pass"
    " callbacks=[onnxfit.callbacks.EarlyStopping('loss', min_delta=...)]."
)

# Argument of another library's estimator -> the hint; {} stands for the value that was given.
ANSWERS = {
    **dict.fromkeys(("max_iter", "max_epochs", "n_iter", "nb_epoch"), _EPOCHS),
    **dict.fromkeys(("learning_rate_init", "eta0", "lr"), _RATE),
    **dict.fromkeys(("alpha", "C", "l1_ratio", "weight_decay"), _PENALTY),
    "solver": "Pass optimizer='adam', 'sgd' or an optimizer of onnxfit. There is no L-BFGS.",
    "power_t": "Pass learning_rate=onnxfit.schedules.InverseScaling(..., power={}).",
    "momentum": _OPTIMIZER.format("SGD(momentum={})"),
    "nesterovs_momentum": _OPTIMIZER.format("SGD(momentum=0.9, nesterov={})"),
    "beta_1": _OPTIMIZER.format("Adam(betas=({}, 0.999))"),
    "beta_2": _OPTIMIZER.format("Adam(betas=(0.9, {}))"),
    "epsilon": _OPTIMIZER.format("Adam(eps={})"),
    "activation": _FIXED_ACTIVATION,
    "tol": _NO_TOLERANCE,
    "shuffle": "Fits always shuffle the rows; random_state= decides their order.",
    "n_jobs": "Pass threads={}: the threads that share an operator.",
    "layers": "Pass hidden_layer_sizes={}.",
    "module": "Pass a model, as a path, bytes or an onnx.ModelProto.",
    "criterion": "Pass loss=: a name, an object or a function.",
}


def require_own_names(owner: str, given: dict[str, Any], known: Collection[str]) -> None:
    """Raise ArgumentError for an argument of another library; the message says its name here.

    - `owner`: the class that gets the arguments.
    - `given`: the arguments by name.
    - `known`: the names of the arguments of `owner`.
    """
    for name, value in given.items():
        if name not in known and name in ANSWERS:
            hint = ANSWERS[name].replace("{}", shortened(value))
            raise ArgumentError(f"{owner} has no argument {name}={shortened(value)}. {hint}")


def checks_own_names(constructor: F) -> F:
    """Decorate a constructor so that arguments of scikit-learn's estimators raise an ArgumentError
    with their names here; so do sizes of layers in the place of the model.
    """
    known = inspect.signature(constructor).parameters
    checked = checks_names(constructor)

    @functools.wraps(constructor)
    def called(self: Any, *positional: Any, **named: Any) -> None:
        owner = type(self).__name__
        require_own_names(owner, named, known)
        if positional and _are_sizes(positional[0]):
            raise ArgumentError(
                f"The first argument of {owner} is the model, got {shortened(positional[0])}. For"
                f" sizes of layers, pass hidden_layer_sizes={shortened(positional[0])}."
            )
        checked(self, *positional, **named)

    return cast("F", called)


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a number or several."""
    if isinstance(value, (str, bytes)):
        return False
    numbers = value if isinstance(value, Iterable) else [value]
    return isinstance(value, (list, tuple, range, int, np.integer, np.ndarray)) and all(
        isinstance(number, (int, np.integer)) for number in numbers
    )
