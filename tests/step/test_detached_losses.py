"""Losses that detach values as in PyTorch: BYOL, vector quantization, and complete IoU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import Trainer
from onnxfit.losses import Function, Joint
from onnxfit.penalties import Penalty

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 5)), RNG.normal(size=(8, 3))
RATE, STEPS = 0.1, 10


def network(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    for name, shape in weights.items():
        array = rng.normal(size=shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def assert_trains_as(
    trainer: Trainer,
    x: Any,
    y: Any,
    compute: Callable[[Mapping[str, Any]], Any],
    rtol: float = 1e-9,
) -> None:
    """Ten steps of SGD have the losses and the weights of PyTorch's."""
    weights = {n: torch.tensor(a, requires_grad=True) for n, a in trainer.get_weights().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = compute(weights)
        loss.backward()
        optimizer.step()
        found = trainer.train_on_batch(x, y)["loss"]
        assert found == pytest.approx(loss.item(), rel=rtol)
    for name, weight in trainer.get_weights().items():
        np.testing.assert_allclose(weight, weights[name].detach(), rtol=rtol, err_msg=name)


# ---------------------------------------------------------------------- BYOL and SimSiam

VIEWS = network(
    """views (double[N, 5] x, double[N, 5] other) => (double[N, 3] prediction, double[N, 3] target)
       { a = MatMul(x, w)  h = Tanh(a)  prediction = MatMul(h, v)  b = MatMul(other, w)
         target = Tanh(b) }""",
    w=(5, 3),
    v=(3, 3),
)
PAIR = {"x": X, "other": X + 0.1 * RNG.normal(size=X.shape)}


def negative_cosine(op: Any, prediction: Any, target: Any) -> Any:
    def unit(a: Any) -> Any:
        return a / op.Sqrt(op.ReduceSum(a * a, [1], keepdims=1))

    similar = unit(prediction) * unit(op.stop_gradient(target))
    return 2 - 2 * op.ReduceSum(similar, [1], keepdims=0)


def byol(weights: Mapping[str, Any]) -> Any:
    one, other = (torch.tensor(a) for a in PAIR.values())
    prediction = (one @ weights["w"]).tanh() @ weights["v"]
    target = (other @ weights["w"]).tanh().detach()
    return (2 - 2 * torch.nn.functional.cosine_similarity(prediction, target)).mean()


@BACKENDS
def test_a_target_network_is_detached_in_the_loss(backend: str) -> None:
    loss = Joint(negative_cosine, ["prediction", "target"])
    trainer = Trainer(VIEWS, loss=loss, optimizer=RATE, backend=backend)
    assert_trains_as(trainer, PAIR, None, byol)


@BACKENDS
def test_a_target_network_is_detached_in_the_file(backend: str) -> None:
    """`stop_gradients` names a value that the loss does not read."""
    loss = Joint(
        lambda op, p, t: 2 - 2 * op.ReduceSum(p * t, [1], keepdims=0),
        "prediction",
        values="target",
    )
    trainer = Trainer(VIEWS, loss=loss, optimizer=RATE, backend=backend, stop_gradients=["b"])

    def compute(weights: Mapping[str, Any]) -> Any:
        one, other = (torch.tensor(a) for a in PAIR.values())
        prediction = (one @ weights["w"]).tanh() @ weights["v"]
        return (2 - 2 * (prediction * (other @ weights["w"]).detach().tanh()).sum(1)).mean()

    assert_trains_as(trainer, PAIR, None, compute)


# ---------------------------------------------------------------------- vector quantization

ENCODER = network("encoder (double[N, 5] x) => (double[N, 3] z) { z = MatMul(x, w) }", w=(5, 3))
CODEBOOK = RNG.normal(size=(6, 3))


def nearest(op: Any, z: Any, codebook: Any) -> Any:
    """The nearest code of each row."""
    distance = op.ReduceSum((op.Unsqueeze(z, [1]) - op.Unsqueeze(codebook, [0])) ** 2, [2], keepdims=0)  # fmt: skip
    return op.Gather(codebook, op.ArgMin(distance, axis=1, keepdims=0))


def vector_quantization(op: Any, y_true: Any, z: Any, codebook: Any) -> Any:
    code = nearest(op, z, codebook)
    passed = z + op.stop_gradient(code - z)  # straight through
    terms = (passed - y_true) ** 2 + (op.stop_gradient(z) - code) ** 2
    return op.ReduceSum(terms + 0.25 * (z - op.stop_gradient(code)) ** 2, [1], keepdims=0)


def quantized(weights: Mapping[str, Any]) -> Any:
    z, codebook = torch.tensor(X) @ weights["w"], weights["loss/codebook"]
    code = codebook[torch.cdist(z, codebook).argmin(1)]
    passed = z + (code - z).detach()
    terms = (passed - torch.tensor(Y)) ** 2 + (z.detach() - code) ** 2
    return (terms + 0.25 * (z - code.detach()) ** 2).sum(1).mean()


@BACKENDS
def test_codes_train_straight_through_with_their_commitment(backend: str) -> None:
    loss = Function(vector_quantization, labels="double[b, 3]", weights={"codebook": CODEBOOK})
    trainer = Trainer(ENCODER, loss=loss, optimizer=RATE, backend=backend)
    assert_trains_as(trainer, X, Y, quantized)


# ---------------------------------------------------------------------- complete IoU

BOXES = network(
    """boxes (double[N, 5] x) => (float[N, 4] box) <double scale = {0.2}>
       { n = MatMul(x, w)  p = Mul(n, scale)  e = Exp(p)  box = Cast<to = 1>(e) }""",
    w=(5, 4),
)
WANTED = RNG.uniform(0.5, 2, size=(8, 4)).astype(np.float32)


def complete_iou(op: Any, y_true: Any, box: Any) -> Any:
    """Boxes are center and size. alpha weighs the aspect ratio without a gradient."""

    def parts(a: Any) -> list[Any]:
        return [op.Squeeze(c, [1]) for c in op.Split(a, op.constant([1] * 4), axis=1, _outputs=4)]

    (x, y, w, h), (u, v, r, s) = parts(box), parts(y_true)

    def overlap(c: Any, size: Any, d: Any, other: Any) -> Any:
        low, high = op.Max(c - size / 2, d - other / 2), op.Min(c + size / 2, d + other / 2)
        return op.Relu(high - low)

    def hull(c: Any, size: Any, d: Any, other: Any) -> Any:
        return op.Max(c + size / 2, d + other / 2) - op.Min(c - size / 2, d - other / 2)

    common = overlap(x, w, u, r) * overlap(y, h, v, s)
    iou = common / (w * h + r * s - common)
    distance = ((x - u) ** 2 + (y - v) ** 2) / (hull(x, w, u, r) ** 2 + hull(y, h, v, s) ** 2)
    aspect = 4 / math.pi**2 * (op.Atan(r / s) - op.Atan(w / h)) ** 2
    alpha = op.stop_gradient(aspect / (1 - iou + aspect))
    return 1 - iou + distance + alpha * aspect


def complete_iou_in_torch(weights: Mapping[str, Any]) -> Any:
    box = ((torch.tensor(X) @ weights["w"]) * 0.2).exp()
    wanted = torch.tensor(WANTED)
    low = torch.maximum(box[:, :2] - box[:, 2:] / 2, wanted[:, :2] - wanted[:, 2:] / 2)
    high = torch.minimum(box[:, :2] + box[:, 2:] / 2, wanted[:, :2] + wanted[:, 2:] / 2)
    common = (high - low).clamp(min=0).prod(1)
    iou = common / (box[:, 2:].prod(1) + wanted[:, 2:].prod(1) - common)
    least = torch.minimum(box[:, :2] - box[:, 2:] / 2, wanted[:, :2] - wanted[:, 2:] / 2)
    most = torch.maximum(box[:, :2] + box[:, 2:] / 2, wanted[:, :2] + wanted[:, 2:] / 2)
    distance = ((box - wanted)[:, :2] ** 2).sum(1) / ((most - least) ** 2).sum(1)
    angles = torch.atan(wanted[:, 2] / wanted[:, 3]) - torch.atan(box[:, 2] / box[:, 3])
    aspect = 4 / math.pi**2 * angles**2
    with torch.no_grad():
        alpha = aspect / (1 - iou + aspect)
    return (1 - iou + distance + alpha * aspect).mean()


@BACKENDS
def test_the_weight_of_the_aspect_ratio_has_no_gradient(backend: str) -> None:
    loss = Function(complete_iou, labels="float[b, 4]")
    trainer = Trainer(BOXES, loss=loss, weights="w", optimizer=RATE, backend=backend)
    assert_trains_as(trainer, X, WANTED, complete_iou_in_torch, rtol=1e-5)


# ---------------------------------------------------------------------- penalties


class Normalized(Penalty):
    """Squares divided by their own largest, which counts as a constant."""

    def __call__(self, op: Any, w: Any) -> Any:
        return op.ReduceSum(w * w / op.stop_gradient(op.ReduceMax(w * w, keepdims=0)), keepdims=0)


@BACKENDS
def test_a_penalty_detaches_a_value(backend: str) -> None:
    trainer = Trainer(ENCODER, loss="mse", penalty=Normalized(), optimizer=RATE, backend=backend)

    def compute(weights: Mapping[str, Any]) -> Any:
        w = weights["w"]
        penalty = (w * w / (w * w).max().detach()).sum()
        return ((torch.tensor(X) @ w - torch.tensor(Y)) ** 2).mean() + penalty

    assert_trains_as(trainer, X, Y, compute)
