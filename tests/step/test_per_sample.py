"""Gradients of each row, products with Jacobians and Hessians: as torch.func computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from onnxfit import (
    ModelError,
    SettingError,
    Trainer,
    add_loss,
    gradient_model,
    per_sample_gradient_model,
)
from onnxfit.losses import CrossEntropy

# torch.func loads parts of torch that are deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.normal(size=(5, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
    "v": RNG.normal(size=(4, 3)).astype(np.float32),
}
X = RNG.normal(size=(7, 5)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 7)


def dense(rows: str = "N") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> dense (float[{rows}, 5] x) => (float[{rows}, 3] y)
        {{ a = MatMul(x, w)  c = Add(a, b)  h = Tanh(c)  y = MatMul(h, v) }}"""
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in WEIGHTS.items())
    return model


def run(model: onnx.ModelProto, **feeds: Any) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {name.replace("y_true_", "y_true/"): value for name, value in feeds.items()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds)))


def torch_loss(weights: dict[str, Any], x: Any, y: Any) -> Any:
    import torch

    h = torch.tanh(x @ weights["w"] + weights["b"])
    return torch.nn.functional.cross_entropy((h @ weights["v"])[None], y[None])


@pytest.mark.torch
def test_gradients_of_rows_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    model = per_sample_gradient_model(dense(), "cross_entropy")
    found = run(model, x=X, y_true_y=CLASSES)
    weights = {name: torch.tensor(array) for name, array in WEIGHTS.items()}
    of_row = torch.func.vmap(torch.func.grad(torch_loss), in_dims=(None, 0, 0))
    expected = of_row(weights, torch.tensor(X), torch.tensor(CLASSES))
    assert list(found) == ["loss", "w_grad", "b_grad", "v_grad"]
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[f"{name}_grad"], gradient, rtol=1e-4, atol=1e-6)
    losses = torch.func.vmap(torch_loss, in_dims=(None, 0, 0))(
        weights, torch.tensor(X), torch.tensor(CLASSES)
    )
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-5)
    one = run(model, x=X[:1], y_true_y=CLASSES[:1])  # any number of rows
    np.testing.assert_allclose(one["w_grad"], found["w_grad"][:1], rtol=1e-6)


def test_their_mean_is_the_gradient_of_the_batch() -> None:
    found = run(per_sample_gradient_model(dense(), "mse", "!b"), x=X, y_true_y=X[:, :3])
    assert list(found) == ["loss", "w_grad", "v_grad"]
    trainer = Trainer(dense(), loss="mse", optimizer=1.0)
    trainer.train_on_batch(X, X[:, :3])
    for name in "wv":
        step = WEIGHTS[name] - trainer.get_weights()[name]
        np.testing.assert_allclose(found[f"{name}_grad"].mean(0), step, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
def test_images_and_sequences_have_gradients_of_rows() -> None:
    torch = pytest.importorskip("torch")
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        images (float[N, 2, 6, 6] x) => (float[N, 3] y) <int64[2] flat = {0, -1}>
        { c = Conv<pads = [1, 1, 1, 1]>(x, k)  r = Relu(c)  p = GlobalAveragePool(r)
          f = Reshape(p, flat)  y = Gemm<transB = 1>(f, u) }"""
    )
    arrays = {"k": RNG.normal(size=(4, 2, 3, 3)), "u": RNG.normal(size=(3, 4))}
    for name, array in arrays.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    x = RNG.normal(size=(4, 2, 6, 6)).astype(np.float32)
    found = run(per_sample_gradient_model(model, "cross_entropy"), x=x, y_true_y=CLASSES[:4])

    def loss(weights: dict[str, Any], x: Any, y: Any) -> Any:
        f = torch.nn.functional
        pooled = f.conv2d(x[None], weights["k"], padding=1).relu().mean((2, 3))
        return f.cross_entropy(pooled @ weights["u"].T, y[None])

    weights = {name: torch.tensor(array.astype(np.float32)) for name, array in arrays.items()}
    of_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    expected = of_row(weights, torch.tensor(x), torch.tensor(CLASSES[:4]))
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[f"{name}_grad"], gradient, rtol=1e-3, atol=1e-5)


def test_a_masked_row_has_no_gradient() -> None:
    labels = CLASSES.copy()
    labels[2] = -1
    loss = CrossEntropy(ignore_index=-1)
    found = run(per_sample_gradient_model(dense(), loss), x=X, y_true_y=labels)
    assert not found["w_grad"][2].any()
    assert found["w_grad"][1].any()


def test_models_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ModelError, match="fixed batch size of 4"):
        per_sample_gradient_model(dense("4"), "mse")
    moved = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2, batch] x) => (float[batch, 2] y)
        <float[2] w = {1, 2}> { t = Transpose(x)  y = Mul(t, w) }"""
    )
    with pytest.raises(SettingError, match="the batch on the first axis"):
        per_sample_gradient_model(moved, "mse")


# ---------------------------------------------------------------------- forward mode


@pytest.mark.torch
@pytest.mark.parametrize("wrt", ["x", ["x", "w", "b"]])
def test_products_with_a_jacobian_are_those_of_torch(wrt: Any) -> None:
    torch = pytest.importorskip("torch")
    names = [wrt] if isinstance(wrt, str) else wrt
    model = gradient_model(dense(), wrt, mode="jvp")
    assert [i.name for i in model.graph.input] == ["x", *(f"{name}_tangent" for name in names)]
    assert [o.name for o in model.graph.output] == ["y", "y_tangent"]
    arrays = {"x": X, **WEIGHTS}
    tangents = {n: RNG.normal(size=arrays[n].shape).astype(np.float32) for n in names}
    found = run(model, x=X, **{f"{name}_tangent": array for name, array in tangents.items()})

    def forward(values: dict[str, Any]) -> Any:
        w = {name: torch.tensor(array) for name, array in arrays.items()} | values
        return torch.tanh(w["x"] @ w["w"] + w["b"]) @ w["v"]

    def as_torch(of: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.tensor(of[name]) for name in names}

    y, product = torch.func.jvp(forward, (as_torch(arrays),), (as_torch(tangents),))
    np.testing.assert_allclose(found["y"], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["y_tangent"], product, rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_products_with_a_hessian_by_either_mode() -> None:
    torch = pytest.importorskip("torch")
    with_loss = add_loss(dense(), "cross_entropy")
    once = gradient_model(with_loss, "w", outputs="train/loss")
    tangent = RNG.normal(size=(5, 4)).astype(np.float32)
    one = np.ones((), np.float32)
    forward = gradient_model(once, "w", outputs="w_grad", mode="jvp")
    found = run(forward, x=X, y_true_y=CLASSES, w_tangent=tangent, **{"train/loss_grad": one})[
        "w_grad_tangent"
    ]
    reverse = gradient_model(once, "w", outputs="w_grad")
    added = reverse.graph.output[-1].name
    other = run(reverse, x=X, y_true_y=CLASSES, w_grad_grad=tangent, **{"train/loss_grad": one})[
        added
    ]

    def loss(w: Any) -> Any:
        weights = {name: torch.tensor(array) for name, array in WEIGHTS.items()} | {"w": w}
        output = torch.tanh(torch.tensor(X) @ w + weights["b"]) @ weights["v"]
        return torch.nn.functional.cross_entropy(output, torch.tensor(CLASSES))

    w = torch.tensor(WEIGHTS["w"])
    _, expected = torch.func.jvp(torch.func.grad(loss), (w,), (torch.tensor(tangent),))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(other, expected, rtol=1e-3, atol=1e-6)


def test_another_mode_is_refused() -> None:
    with pytest.raises(SettingError, match="mode must be 'vjp' or 'jvp'"):
        gradient_model(dense(), mode="forward")
