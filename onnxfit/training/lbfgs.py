"""Train a small model on all rows at once, by L-BFGS."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxfit.checks import is_finite, is_integer, is_number, shortened
from onnxfit.data import Batch
from onnxfit.errors import DivergenceError, InstallationError, SettingError
from onnxfit.runtime.backends.forward_backward import ForwardBackwardBackend
from onnxfit.training.training import Training

__all__ = ["fit_lbfgs"]

Array = npt.NDArray[Any]
MAX_ITERATIONS = 1_000_000
MAX_HISTORY = 1000


def fit_lbfgs(
    trainer: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    max_iter: int = 100,
    gtol: float = 1e-5,
    history_size: int = 10,
) -> dict[str, Any]:
    """Minimize the loss of all rows by L-BFGS (Liu & Nocedal 1989), and set the weights found.

    It suits a few thousand weights and data that fit into memory, such as a logistic regression.
    SciPy searches; it keeps several copies of the weights, in float64. The loss has the penalties
    of the trainer. The optimizer and its slots, clipping, and the counters do not take part.

    - `trainer`: a Trainer with `backend="forward_backward"`. A dropout has one mask for all steps.
    - `x`, `y`, `sample_weight`: as for `Trainer.train_on_batch`.
    - `max_iter`: the largest number of iterations, 1 to a million.
    - `gtol` >= 0: the search ends when no element of the gradient is larger in magnitude. It also
      ends when the loss no longer changes in the element type of the weights.
    - `history_size`: the number of past gradients that approximate the curvature, 1 to 1000.

    Returns a dict: "loss", "iterations", "evaluations", "converged" and SciPy's "message".
    After an error the weights are those from before the call. DivergenceError: the loss became NaN
    or infinite. InstallationError: SciPy is missing. SettingError: a number is out of range, or the
    trainer has another backend, frozen tensors, constraints, running statistics that a step
    updates, states between batches, integer weights, a scaled loss, or several processes.
    """
    _check_numbers(max_iter, gtol, history_size)
    training = getattr(trainer, "_training", None)
    if not isinstance(training, Training):
        raise SettingError(f"fit_lbfgs needs a Trainer, got {shortened(trainer)}.")
    _check_trainer(training)
    optimize = _scipy_optimize()
    before = training.state.get_weights()
    start = {name: before[name] for name in training.recipe.weights}
    with (
        training.guard.fitting(),
        training.single_batches.source("training", x, y, sample_weight) as data,
    ):
        training.lineage.mark(training, "fit_lbfgs")
        batch = next(iter(data.batches(0)))
        try:
            found = optimize.minimize(
                lambda vector: _loss_and_gradient(training, batch, start, vector),
                _flat_vector(start),
                jac=True,
                method="L-BFGS-B",
                options={
                    "maxiter": max_iter,
                    "gtol": gtol,
                    "ftol": _resolution(start),
                    "maxcor": history_size,
                },
            )
            training.state.set_weights(_separated(start, found.x))
        except BaseException:
            training.state.set_weights(start)
            raise
    return {
        "loss": float(found.fun),
        "iterations": int(found.nit),
        "evaluations": int(found.nfev),
        "converged": bool(found.success),
        "message": str(found.message),
    }


def _loss_and_gradient(
    training: Training, batch: Batch, start: Mapping[str, Array], vector: Array
) -> tuple[float, Array]:
    """Return the loss at some weights and its gradient, in float64."""
    backend = training.backend
    assert isinstance(backend, ForwardBackwardBackend)
    with training.guard.advancing, backend.lock:
        training.state.set_weights(_separated(start, vector))
        loss, gradients = backend.loss_and_gradients(
            batch, training.state.updates, training.random_seed
        )
        gradient = _flat_vector({name: gradients[name] for name in start})
    if not (np.isfinite(loss) and np.isfinite(gradient).all()):
        raise DivergenceError(
            f"The loss is {loss:g} with a largest gradient of {np.abs(gradient).max():g}, so L-BFGS"
            " cannot continue. Scale the inputs to a mean of 0 and a variance of 1, or add a"
            " penalty."
        )
    return loss, gradient


def _resolution(weights: Mapping[str, Array]) -> float:
    """Return the relative change of a loss below which rounding hides any progress."""
    wide = any(w.dtype == np.float64 for w in weights.values())
    return float(np.finfo(np.float64 if wide else np.float32).eps)


def _flat_vector(tensors: Mapping[str, Array]) -> Array:
    return np.concatenate([np.ravel(tensor).astype(np.float64) for tensor in tensors.values()])


def _separated(like: Mapping[str, Array], vector: Array) -> dict[str, Array]:
    """Return the tensors in a vector, with the shapes and element types of `like`."""
    ends = np.cumsum([tensor.size for tensor in like.values()])
    parts = np.split(vector, ends[:-1])
    return {n: p.reshape(w.shape).astype(w.dtype) for (n, w), p in zip(like.items(), parts)}


def _check_numbers(max_iter: Any, gtol: Any, history_size: Any) -> None:
    numbers = {"max_iter": (max_iter, MAX_ITERATIONS), "history_size": (history_size, MAX_HISTORY)}
    for name, (value, maximum) in numbers.items():
        if not (is_integer(value) and 1 <= value <= maximum):
            raise SettingError(
                f"fit_lbfgs needs {name} as a whole number from 1 to {maximum}, got"
                f" {shortened(value)}."
            )
    if not (is_number(gtol) and is_finite(gtol) and gtol >= 0):
        raise SettingError(f"fit_lbfgs needs gtol >= 0, got {shortened(gtol)}.")


def _check_trainer(training: Training) -> None:
    recipe = training.recipe
    if not isinstance(training.backend, ForwardBackwardBackend):
        raise SettingError(
            "fit_lbfgs needs Trainer(..., backend='forward_backward'), got backend="
            f"{training.backend.name!r}."
        )
    obstacles = {
        "frozen tensors: leave them out of weights=": training.state.frozen.all,
        "frozen rows: remove freeze_rows=": recipe.frozen_rows,
        "constraints: use an optimizer without them": any(
            one.constraint is not None for one in recipe.optimizers.values()
        ),
        "running statistics: use batch_norm='frozen'": recipe.statistics,
        "states between batches: remove state_outputs=": recipe.state_outputs,
        "integer weights: train the float model": recipe.bounds,
        "a scaled loss: use precision='float32'": recipe.precision.scales_loss,
        "several processes: use distribute=None": training.world.size > 1,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise SettingError(f"fit_lbfgs cannot train with {obstacle}.")


def _scipy_optimize() -> Any:
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError:
        raise InstallationError("fit_lbfgs needs SciPy: pip install scipy.") from None
