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
from tests.graph.spellings import LOG_SOFTMAXES, SIGMOIDS, SOFTMAXES, network

Array = np.ndarray[Any, Any]

ROWS = 5
LABELS = np.array([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]], np.float32)
LOGITS = [(18.0, -3.0), (-40.0, 40.0), (60.0, -60.0), (0.5, 0.2), (-150.0, 110.0)]


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
    *((SIGMOIDS, name, losses.BinaryCrossEntropy(), binary) for name in SIGMOIDS),
    (SIGMOIDS, "Sigmoid", losses.BinaryCrossEntropy(from_logits=False), binary),
    (SIGMOIDS, "Sigmoid", losses.Focal(alpha=None, from_logits=False), binary_focal),
    *((SOFTMAXES, name, losses.CrossEntropy(), classes) for name in SOFTMAXES),
    (SOFTMAXES, "JAX", losses.KLDivergence(), classes),
    *((LOG_SOFTMAXES, name, losses.NLL(), classes) for name in LOG_SOFTMAXES),
    *((LOG_SOFTMAXES, name, losses.CrossEntropy(), classes) for name in LOG_SOFTMAXES),
    (LOG_SOFTMAXES, "JAX", losses.KLDivergence(), classes),
]


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize(
    ("spellings", "name", "loss", "reference"),
    CASES,
    ids=[f"{c[1]}-{c[2].__class__.__name__}" for c in CASES],
)
def test_the_loss_and_gradient_are_those_of_the_logits(
    spellings: dict[str, str],
    name: str,
    loss: losses.Loss,
    reference: Callable[[Array, Array], Array],
    backend: str,
) -> None:
    """They are those of double precision, and to 1e-6 those of the operator itself."""
    labels = LABELS.argmax(1) if isinstance(loss, losses.NLL) else LABELS
    plain = next(iter(spellings.values()))
    trainers = [
        Trainer(network(text, LOGITS[0]), loss=loss, optimizer=1.0, backend=backend, weights=["b"])
        for text in dict.fromkeys([spellings[name], plain])
    ]
    for logits in LOGITS:
        z = np.array(logits)

        def expected(z: Array) -> float:
            return float(reference(np.tile(z, (ROWS, 1)), LABELS).mean())

        figures = [loss_and_gradient(trainer, logits, labels) for trainer in trainers]
        for evaluated, trained, gradient in figures:
            assert evaluated == pytest.approx(expected(z), rel=1e-5)
            assert trained == pytest.approx(expected(z), rel=1e-5)
            np.testing.assert_allclose(gradient, derivative(expected, z), rtol=1e-4, atol=2e-5)
        for ours, theirs in zip(figures[0], figures[-1]):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def loss_and_gradient(
    trainer: Trainer, logits: tuple[float, float], labels: Array
) -> tuple[float, float, Array]:
    """The loss of an evaluation and of a step, and the gradient of the bias."""
    trainer.set_weights({"b": np.array(logits, np.float32)})
    x = np.zeros((ROWS, 2), np.float32)
    evaluated = trainer.evaluate(x, labels)["loss"]
    trained = trainer.train_on_batch(x, labels)["loss"]
    gradient = np.array(logits) - trainer.get_weights()["b"].astype(float)
    # A step of 1 from 150 is rounded to 1.5e-5.
    return evaluated, trained, gradient


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("metrics", [[], ["accuracy", "auc"]], ids=["no metric", "metrics"])
def test_class_numbers_weights_and_metrics(metrics: list[str], backend: str) -> None:
    """The loss of weighted rows, and metrics that read the probabilities."""
    z, weights = np.array((30.0, -30.0)), np.array([1, 2, 0, 1, 1], np.float32)
    graph = network(SOFTMAXES["Softmax"], (30.0, -30.0))
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
    graph = network(SOFTMAXES["Softmax"], (1.0, -np.inf))
    labels = np.tile(np.array([1, 0], np.float32), (ROWS, 1))
    trainer = Trainer(graph, loss="cross_entropy", weights=["b"])
    assert trainer.train_on_batch(np.zeros((ROWS, 2), np.float32), labels)["loss"] == 0


def test_a_where_of_the_model_stays() -> None:
    """It is no mask of rows: its output is 0, not the sigmoid of 0."""
    body = "p = Sigmoid(z)  n = Less(x, x)  m = Not(n)  o = Sub(one, one)  y = Where(n, p, o)"
    trainer = Trainer(network(body, (1.0, 1.0)), loss="bce", weights=["b"])
    x, y = np.zeros((ROWS, 2), np.float32), np.zeros((ROWS, 2), np.float32)
    assert trainer.evaluate(x, y, np.ones(ROWS))["loss"] == 0


def test_add_loss_computes_from_the_logits_too() -> None:
    operators = [
        n.op_type for n in add_loss(network("y = Sigmoid(z)", (0.0, 0.0)), "bce").graph.node
    ]
    assert "Clip" not in operators


def test_batches_of_many_sizes_train_alike() -> None:
    """After some sizes, one graph is for all others."""
    trainers = [
        Trainer(
            network(SIGMOIDS["Sigmoid"], (20.0, -20.0)), loss="bce", optimizer=0.1, backend=name
        )
        for name in ("full", "forward_backward")
    ]
    for trainer in trainers:
        for rows in (1, 2, 3, 4, 5, 6, 7, 5, 1):
            x = np.zeros((rows, 2), np.float32)
            trainer.train_on_batch(x, np.tile(LABELS, (2, 1))[:rows])
    ours, expected = (trainer.get_weights()["b"] for trainer in trainers)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize(
    ("text", "loss", "low", "high"),
    [
        ("p = Sigmoid(z)  y = Clip(p, low, high)", "bce", 1e-3, 1 - 1e-3),
        ("p = Sigmoid(z)  q = Max(p, low)  y = Min(high, q)", "bce", 1e-3, 1 - 1e-3),
        ("p = Sigmoid(z)  y = Clip(p, zero, one)", "bce", 0, 1),
        ("p = Softmax(z)  y = Clip(p, low, high)", "cross_entropy", 1e-3, 1 - 1e-3),
        ("p = Softmax(z)  y = Clip(p, zero, one)", "cross_entropy", 0, 1),
    ],
)
def test_a_clip_of_probabilities_stays(
    text: str, loss: str, low: float, high: float, backend: str
) -> None:
    """The loss is that of the bounded probability. Beyond a bound, there is no gradient."""
    for z in (0.3, -6.5, 30.0, -30.0):
        graph = network(text, (z, -z))
        for name, number in (("low", 1e-3), ("high", 1 - 1e-3)):
            tensor = onnx.numpy_helper.from_array(np.array(number, np.float32), name)
            graph.graph.initializer.append(tensor)
        trainer = Trainer(graph, loss=loss, optimizer=1.0, weights=["b"], backend=backend)
        x, y = np.zeros((1, 2), np.float32), np.array([[1, 0]], np.float32)

        def expected(b: Array) -> float:
            p = special.expit(b) if loss == "bce" else special.softmax(b)
            p = np.maximum(np.minimum(p, high), low)
            q = 1 - p
            if not low:  # exact where the probability is rounded
                q = special.expit(-b)
                p = special.expit(b) if loss == "bce" else np.exp(special.log_softmax(b))
            if loss == "bce":
                return float(-np.log([p[0], q[1]]).mean())
            return float(-np.log(p[0]))

        logits = np.array((z, -z))
        assert trainer.train_on_batch(x, y)["loss"] == pytest.approx(expected(logits), rel=1e-4)
        gradient = logits - trainer.get_weights()["b"].astype(float)
        np.testing.assert_allclose(gradient, derivative(expected, logits), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_each_output_of_several_has_its_own_activation(backend: str) -> None:
    """A Softmax over the channels of an image, a spelled sigmoid, and the class beside them."""
    graph = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 2, 3, 3] x) => (float[N, 2, 3, 3] mask, float[N, 2] box, int64[N] best)
        <float[2, 1, 1] b, float one = {1}, int64[2] axes = {2, 3}>
        { z = Add(x, b)  mask = Softmax<axis = 1>(z)  m = ReduceMax<axes = [2, 3], keepdims = 0>(z)
          n = Neg(m)  e = Exp(n)  d = Add(one, e)  box = Div(one, d)
          best = ArgMax<axis = 1, keepdims = 0>(box) }""")
    bias = np.array([30, -30], np.float32)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(bias.reshape(2, 1, 1), "b"))
    trainer = Trainer(
        graph,
        loss={"mask": "cross_entropy", "box": "bce"},
        optimizer=1.0,
        weights=["b"],
        backend=backend,
    )
    x, wrong = np.zeros((2, 2, 3, 3), np.float32), np.tile(np.array([0, 1], np.float32), (2, 1))
    logs = trainer.train_on_batch(x, {"mask": np.ones((2, 3, 3), np.int64), "box": wrong})
    assert logs["mask_loss"] == pytest.approx(60, rel=1e-5)
    assert logs["box_loss"] == pytest.approx(30, rel=1e-5)
    gradient = bias - trainer.get_weights()["b"].reshape(-1)
    np.testing.assert_allclose(gradient, [1 + 0.5, -1 - 0.5], rtol=1e-5)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_softmax_of_opset_11_is_over_all_axes_from_its_axis_on(backend: str) -> None:
    """The probabilities of a row sum to 1 over both axes, and the loss is over the last one."""
    graph = onnx.parser.parse_model("""<ir_version: 6, opset_import: ["": 11]>
        g (float[N, 2, 2] x) => (float[N, 2, 2] y) <float[2, 2] b>
        { z = Add(x, b)  y = Softmax<axis = 1>(z) }""")
    bias = np.array([[40, 0], [-40, 1]], np.float32)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(bias, "b"))
    trainer = Trainer(graph, loss="cross_entropy", optimizer=1.0, weights=["b"], backend=backend)
    x, y = np.zeros((3, 2, 2), np.float32), np.tile(np.eye(2, dtype=np.float32), (3, 1, 1))

    def expected(b: Array) -> float:
        return float(-(special.log_softmax(b).reshape(2, 2) * np.eye(2)).sum(axis=1).mean())

    loss = trainer.train_on_batch(x, y)["loss"]
    flat = bias.reshape(-1).astype(float)
    assert loss == pytest.approx(expected(flat), rel=1e-5)
    gradient = (bias - trainer.get_weights()["b"]).reshape(-1)
    np.testing.assert_allclose(gradient, derivative(expected, flat), atol=1e-4)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize(
    ("name", "loss"), [("JAX", "cross_entropy"), ("1 / (1 + exp(-z)) with Div", "bce")]
)
def test_a_spelled_activation_trains_as_in_pytorch(name: str, loss: str, backend: str) -> None:
    """Random rows with scores up to about 40, and three steps of SGD."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    graph = network({**SIGMOIDS, **SOFTMAXES}[name], (0.5, -0.25))
    x = (15 * rng.standard_normal((20, 2))).astype(np.float32)
    y = np.eye(2, dtype=np.float32)[rng.integers(0, 2, 20)]
    trainer = Trainer(graph, loss=loss, optimizer=0.5, weights=["b"], backend=backend)
    bias = torch.tensor([0.5, -0.25], requires_grad=True)
    for _ in range(3):
        z = torch.tensor(x) + bias
        functions = torch.nn.functional
        if loss == "bce":
            expected = functions.binary_cross_entropy_with_logits(z, torch.tensor(y))
        else:
            expected = functions.cross_entropy(z, torch.tensor(y.argmax(1)))
        (gradient,) = torch.autograd.grad(expected, bias)
        labels = y if loss == "bce" else y.argmax(1)
        assert trainer.train_on_batch(x, labels)["loss"] == pytest.approx(expected.item(), rel=1e-5)
        bias = (bias - 0.5 * gradient).detach().requires_grad_()
        np.testing.assert_allclose(trainer.get_weights()["b"], bias.detach(), rtol=1e-5)
