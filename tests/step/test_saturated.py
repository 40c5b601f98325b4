"""Losses of probabilities that are rounded to 0 or 1: the loss and the gradient are the true ones.

A float32 has no number between 1 - 6e-8 and 1, so the sigmoid of 17 is 1. The references compute
with logits in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest
from scipy import special

from onnxfit import Trainer, losses
from onnxfit.step.graphs import add_loss

Array = np.ndarray[Any, Any]

# How a graph computes two probabilities for each row from logits z, float[N, 2].
SIGMOIDS = {
    "Sigmoid": "y = Sigmoid(z)",
    "moved": "p = Sigmoid(z)  t = Transpose<perm = [1, 0]>(p)  y = Transpose<perm = [1, 0]>(t)",
    "reshaped": "s = Shape(z)  p = Sigmoid(z)  r = Reshape(p, flat)  y = Reshape(r, s)",
    "cast": "w = Cast<to = 11>(z)  p = Sigmoid(w)  y = Cast<to = 1>(p)",
    "spelled out": "n = Neg(z)  e = Exp(n)  d = Add(one, e)  y = Reciprocal(d)",
}
SOFTMAXES = {
    "Softmax": "y = Softmax(z)",
    "first axis": "t = Transpose<perm = [1, 0]>(z)  p = Softmax<axis = 0>(t)"
    "  y = Transpose<perm = [1, 0]>(p)",
    "image": "u = Unsqueeze(z, last)  v = Unsqueeze(u, last)  p = Softmax<axis = 1>(v)"
    "  y = Flatten(p)",
    "LogSoftmax": "l = LogSoftmax(z)  y = Exp(l)",
    "spelled out": "m = ReduceMax<axes = [1]>(z)  c = Sub(z, m)  e = Exp(c)"
    "  s = ReduceSum(e, axis)  y = Div(e, s)",
    "two classes": "f = Slice(z, first, second, axis)  g = Slice(z, second, third, axis)"
    "  h = Sub(g, f)  p = Sigmoid(h)  q = Sub(one, p)  y = Concat<axis = 1>(q, p)",
}
ROWS = 5
LABELS = np.array([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]], np.float32)
LOGITS = [(18.0, -3.0), (-40.0, 40.0), (60.0, -60.0), (0.5, 0.2), (-150.0, 110.0)]


def model(body: str, logits: tuple[float, float]) -> onnx.ModelProto:
    """A network whose logits are x plus a trained bias."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2] x) => (float[N, 2] y)
        <float[2] b, float one = {{1}}, int64[1] flat = {{-1}}, int64[1] last = {{2}},
         int64[1] axis = {{1}}, int64[1] first = {{0}}, int64[1] second = {{1}},
         int64[1] third = {{2}}>
        {{ z = Add(x, b)  {body} }}""")
    bias = onnx.numpy_helper.from_array(np.array(logits, np.float32), "b")
    model.graph.initializer.append(bias)
    return model


def binary(z: Array, y: Array) -> Array:
    return (y * np.logaddexp(0, -z) + (1 - y) * np.logaddexp(0, z)).mean(axis=1)


def binary_focal(z: Array, y: Array) -> Array:
    s = (2 * y - 1) * z
    return (special.expit(-s) ** 2 * np.logaddexp(0, -s)).mean(axis=1)


def classes(z: Array, y: Array) -> Array:
    return -(y * (z - special.logsumexp(z, axis=1, keepdims=True))).sum(axis=1)


def derivative(loss: Callable[[Array], float], z: Array, step: float = 1e-5) -> Array:
    unit = step * np.eye(len(z))
    return np.array([(loss(z + one) - loss(z - one)) / (2 * step) for one in unit])


CASES = [
    *(("Sigmoid", body, losses.BinaryCrossEntropy(), binary) for body in SIGMOIDS),
    ("Sigmoid", "Sigmoid", losses.BinaryCrossEntropy(from_logits=False), binary),
    ("Sigmoid", "Sigmoid", losses.Focal(alpha=None, from_logits=False), binary_focal),
    *(("Softmax", body, losses.CrossEntropy(), classes) for body in SOFTMAXES),
    ("Softmax", "Softmax", losses.KLDivergence(), classes),
]


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize(("kind", "body", "loss", "reference"), CASES)
def test_the_loss_and_gradient_are_those_of_the_logits(
    kind: str,
    body: str,
    loss: losses.Loss,
    reference: Callable[[Array, Array], Array],
    logits: tuple[float, float],
    backend: str,
) -> None:
    graph = model({"Sigmoid": SIGMOIDS, "Softmax": SOFTMAXES}[kind][body], logits)
    trainer = Trainer(graph, loss=loss, optimizer=1.0, backend=backend)
    x, z = np.zeros((ROWS, 2), np.float32), np.array(logits)

    def expected(z: Array) -> float:
        return float(reference(np.tile(z, (ROWS, 1)), LABELS).mean())

    assert trainer.evaluate(x, LABELS)["loss"] == pytest.approx(expected(z), rel=1e-5)
    assert trainer.train_on_batch(x, LABELS)["loss"] == pytest.approx(expected(z), rel=1e-5)
    gradient = z - trainer.get_weights()["b"].astype(float)
    np.testing.assert_allclose(gradient, derivative(expected, z), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("metrics", [[], ["accuracy", "auc"]], ids=["no metric", "metrics"])
def test_class_numbers_weights_and_metrics(metrics: list[str], backend: str) -> None:
    """The loss of weighted rows, and metrics that read the probabilities."""
    z, weights = np.array((30.0, -30.0)), np.array([1, 2, 0, 1, 1], np.float32)
    graph = model(SOFTMAXES["Softmax"], (30.0, -30.0))
    trainer = Trainer(graph, loss="cross_entropy", optimizer=1.0, metrics=metrics, backend=backend)
    x = np.zeros((ROWS, 2), np.float32)
    logs = trainer.train_on_batch(x, LABELS.argmax(1), weights)
    expected = float((weights * classes(np.tile(z, (ROWS, 1)), LABELS)).mean())
    assert logs["loss"] == pytest.approx(expected, rel=1e-5)
    if metrics:
        assert logs["accuracy"] == pytest.approx(0.6)
    share = (weights @ (special.softmax(z) - LABELS)) / ROWS
    np.testing.assert_allclose(z - trainer.get_weights()["b"], share, rtol=1e-5, atol=1e-6)


def test_a_masked_class_costs_nothing() -> None:
    """Its logarithm is infinite, and the product with a label of 0 must not be NaN."""
    graph = model(SOFTMAXES["Softmax"], (1.0, -np.inf))
    labels = np.tile(np.array([1, 0], np.float32), (ROWS, 1))
    trainer = Trainer(graph, loss="cross_entropy", weights=["b"])
    assert trainer.train_on_batch(np.zeros((ROWS, 2), np.float32), labels)["loss"] == 0


def test_a_where_of_the_model_stays() -> None:
    """It is no mask of rows: its output is 0, not the sigmoid of 0."""
    body = "p = Sigmoid(z)  n = Less(x, x)  m = Not(n)  zero = Sub(one, one)  y = Where(n, p, zero)"
    trainer = Trainer(model(body, (1.0, 1.0)), loss="bce", weights=["b"])
    x, y = np.zeros((ROWS, 2), np.float32), np.zeros((ROWS, 2), np.float32)
    assert trainer.evaluate(x, y, np.ones(ROWS))["loss"] == 0


def test_add_loss_computes_from_the_logits_too() -> None:
    operators = [n.op_type for n in add_loss(model("y = Sigmoid(z)", (0.0, 0.0)), "bce").graph.node]
    assert "Clip" not in operators


def test_batches_of_many_sizes_train_alike() -> None:
    """After some sizes, one graph is for all others."""
    trainers = [
        Trainer(model(SIGMOIDS["Sigmoid"], (20.0, -20.0)), loss="bce", optimizer=0.1, backend=name)
        for name in ("full", "forward_backward")
    ]
    for trainer in trainers:
        for rows in (1, 2, 3, 4, 5, 6, 7, 5, 1):
            x = np.zeros((rows, 2), np.float32)
            trainer.train_on_batch(x, np.tile(LABELS, (2, 1))[:rows])
    ours, expected = (trainer.get_weights()["b"] for trainer in trainers)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
