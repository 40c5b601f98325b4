"""Networks and rules with and without onnxruntime's graph optimizations: both must agree.

A network trains for three steps: the gradients of the first one, the losses and the predictions are
compared. Each case of the gradient rules runs forward and backward.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnxfit
from onnxfit import Trainer
from onnxfit.optimizers import SGD
from onnxfit.runtime.session_cache import SESSIONS
from scripts.disagreements.known import LEVELS, Array, differs, run
from tests import models
from tests.gradients.rules.cases import Case, built, families, seeds

RNG = np.random.default_rng(0)
TOLERANCE = 2e-5  # of float32 sums, relative to the largest number of an array
Make = Callable[[], tuple[Trainer, Any, Any]]  # returns a trainer, its inputs and its labels


@contextmanager
def optimizations(level: str) -> Iterator[None]:
    """Give every new session of onnxfit this level of onnxruntime's graph optimizations."""
    original = onnxruntime.SessionOptions

    class Options(original):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)

    onnxruntime.SessionOptions = Options
    SESSIONS.clear()  # kept sessions have another level
    try:
        yield
    finally:
        onnxruntime.SessionOptions = original
        SESSIONS.clear()


def trained(make: Make) -> dict[str, Array]:
    """Return what training and prediction compute."""
    trainer, x, y = make()
    before = trainer.get_weights()
    losses = [trainer.train_on_batch(x, y)["loss"]]
    found = {f"gradient of {n}": before[n] - a for n, a in trainer.get_weights().items()}
    losses += [trainer.train_on_batch(x, y)["loss"] for _ in range(2)]
    predicted = trainer.predict(x, verbose=0)
    outputs = predicted if isinstance(predicted, Mapping) else {"y": predicted}
    return {
        **found,
        "losses": np.array(losses),
        **{f"prediction of {name}": np.asarray(array) for name, array in outputs.items()},
    }


def far(found: Mapping[str, Array], right: Mapping[str, Array], tolerance: float) -> list[str]:
    """Return the names of the arrays that differ by more than rounding."""
    names = [*dict.fromkeys((*found, *right))]
    return [
        n for n in names
        if n not in found or n not in right or differs(found[n], right[n], tolerance)
    ]  # fmt: skip


def disagreements_of_network(make: Make) -> list[str]:
    """Return the arrays in which the two levels disagree."""
    results = []
    for level in LEVELS:
        with optimizations(level), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(trained(make))
    return far(*results, TOLERANCE)


def network(model: onnx.ModelProto, x: Any, y: Any, loss: Any = "mse", **settings: Any) -> Make:
    """Return a function that makes a trainer for a model.

    A step of SGD with the rate 0.125, a power of two, shows the gradient.
    """
    return lambda: (
        Trainer(model, loss=loss, optimizer=SGD(0.125), threads=1, **settings), x, y
    )  # fmt: skip


def draw(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def small_networks() -> Iterator[tuple[str, Make]]:
    """Yield the networks of tests/models.py, and quantized ones."""
    x, y = draw(8, 4), draw(8, 3)
    column = draw(8, 1)
    images, classes = draw(8, 1, 8, 8), RNG.integers(0, 3, 8)
    yield "linear", network(models.linear(b=1.0), column, -column)
    for activation in ("Tanh", "Relu", "Sigmoid", "Elu", "Softplus", "LeakyRelu", "Selu"):
        yield f"perceptron, {activation}", network(models.mlp(activation=activation), x, y)
    both = {"a": column, "b": -column}
    yield "two outputs", network(models.two_outputs(), column, both, {"a": "mse", "b": "huber"})
    inputs = {"left": column, "right": draw(8, 1)}
    yield "two inputs", network(models.two_inputs(), inputs, column)
    for batch_norm in (True, False):
        model = models.convolutional(batch_norm)
        yield f"convolutional, {batch_norm=}", network(model, images, classes, "cross_entropy")
    model = models.convolutional(dropout=0.4)
    yield "convolutional, dropout", network(model, images, classes, "cross_entropy")
    for kind in ("int8", "uint8"):
        integers = onnxfit.quantize(models.mlp(), x, weights=kind, activations=kind)
        yield f"quantized, {kind}", network(integers, x, y)


def exported_networks() -> Iterator[tuple[str, Make]]:
    """Yield the networks of tests/test_networks.py, which PyTorch exports."""
    import torch

    from tests.test_networks import LOSSES, NETWORKS

    for name, (make, inputs, kind) in NETWORKS.items():
        torch.manual_seed(0)
        x, module = inputs(), make()
        with torch.no_grad():
            shape = tuple(module(x).shape)
        y = draw(*shape) if kind == "numbers" else RNG.integers(0, 5, (shape[0], *shape[2:]))
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = Path(folder) / "model.onnx"
            torch.onnx.export(
                module.train(), (x,), path, dynamo=False, input_names=["x"],
                dynamic_axes={"x": {0: "batch"}}, opset_version=17,
                training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
            )  # fmt: skip
            model = onnx.load(path)
        yield name, network(model, x.numpy(), y, LOSSES[kind])


def disagreements_of_case(case: Case) -> list[str]:
    """Return the arrays in which the two levels disagree for a case of the rules.

    A case that onnxruntime has no kernels for agrees.
    """
    feeds = case.feeds()
    try:
        forward = dict(zip(case.outputs, run(case.model(), feeds, LEVELS[1])))
    except Exception:  # onnxruntime raises its own classes
        return []
    arriving = seeds(case, forward)
    backward = built(case.model(), case.outputs, case.wrt, arriving, runs="").model
    found = []
    for model, given in ((case.model(), feeds), (backward, {**feeds, **arriving})):
        names = [value.name for value in model.graph.output]
        results = [dict(zip(names, run(model, given, level))) for level in LEVELS]
        found += far(*results, 1e-4)
    return found


def all_cases() -> list[tuple[str, Case]]:
    """Return the cases of all rules, by name."""
    return [(f"{f}: {case.name}", case) for f, cases in families().items() for case in cases]
