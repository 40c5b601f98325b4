"""Values through which no gradient flows, compared with PyTorch's `detach`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfit import SettingError, Trainer, UnknownNameError
from onnxfit.graph.names import STOP_GRADIENT
from tests.builds import every_way

RATE = 0.2
# `a` is an output, and `h` and `a` are read by later nodes
TWO_HEADS = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 3] x) => (float[N, 2] a, float[N, 2] b)
    <float[3, 4] u = {1, -2, 3, 1, 0, 2, -1, 1, 2, -2, 1, 0}, float[4, 2] v = {1, 0, 2, -1, 1, 1, 0, 2},
     float[2, 2] w = {1, -1, 2, 1}, float[4, 2] k = {1, 1, -1, 0, 2, 1, 0, 1}>
    { p = MatMul(x, u)  h = Tanh(p)  a = MatMul(h, v)  c = MatMul(a, w)  d = MatMul(h, k)  e = Add(c, d)
      b = Sigmoid(e) }"""
BRANCHES = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] x, bool yes) => (float[N, 2] y)
    <float[2, 2] u = {1, -2, 3, 1}, float[2] v = {2, 3}> { h = MatMul(x, u)
    t = If(yes) <then_branch = t () => (float[N, 2] s) { s = Mul(h, v) }, else_branch = e () => (float[N, 2] o) { o = Neg(h) }>
    y = Add(t, h) }"""


def data() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3)).astype(np.float32)
    return x, {name: rng.standard_normal((8, 2)).astype(np.float32) for name in "ab"}


def trained_in_torch(stopped: set[str], steps: int) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    model = onnx.parser.parse_model(TWO_HEADS)
    weights = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t).copy(), requires_grad=True)
        for t in model.graph.initializer
    }
    u, v, w, k = (weights[name] for name in "uvwk")
    x, y = data()
    optimizer = torch.optim.SGD(list(weights.values()), RATE)
    for _ in range(steps):
        h = torch.tanh(torch.tensor(x) @ u)
        h = h.detach() if "h" in stopped else h
        a = h @ v
        c = (a.detach() if "a" in stopped else a) @ w
        c = c.detach() if "c" in stopped else c
        b = torch.sigmoid(c + h @ k)
        mse = torch.nn.functional.mse_loss
        optimizer.zero_grad()
        (mse(a, torch.tensor(y["a"])) + mse(b, torch.tensor(y["b"]))).backward()
        optimizer.step()
    return {name: value.detach().numpy() for name, value in weights.items()}


@pytest.mark.torch
@every_way
@pytest.mark.parametrize("stopped", [(), ("a",), ("h",), ("c",), ("a", "c")])
def test_gradients_stop_as_in_torch(stopped: Any, way: dict[str, str]) -> None:
    model = onnx.parser.parse_model(TWO_HEADS)
    trainer = Trainer(
        model, loss={"a": "mse", "b": "mse"}, optimizer=RATE, stop_gradients=stopped, **way
    )
    x, y = data()
    for _ in range(4):
        trainer.train_on_batch(x, y)
    expected = trained_in_torch(set(stopped), 4)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    found = {**before, **trainer.get_weights()}
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=1e-5, atol=1e-6)
    # the file keeps its nodes, and predicts as before
    exported = trainer.export(None)
    assert [n.SerializeToString() for n in exported.graph.node] == [
        n.SerializeToString() for n in model.graph.node
    ]
    assert STOP_GRADIENT not in str(exported)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_branch_reads_a_stopped_value(backend: str) -> None:
    model = onnx.parser.parse_model(BRANCHES)
    x = {"x": np.array([[1, 2]], np.float32), "yes": np.array(True)}
    y = np.zeros((1, 2), np.float32)
    h = x["x"] @ np.array([[1, -2], [3, 1]], np.float32)
    error = 2 * (h * [2, 3] + h) / 2  # of the mean over two numbers
    trainer = Trainer(model, loss="mse", optimizer=0.01, backend=backend, stop_gradients="h")
    trainer.train_on_batch(x, y)
    assert list(trainer.get_weights()) == ["v"]
    np.testing.assert_allclose(
        trainer.get_weights()["v"], [2, 3] - 0.01 * (error * h)[0], rtol=1e-6
    )


@every_way
def test_a_loss_stops_the_gradient_of_a_value(way: dict[str, str]) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 1] x) => (float[N, 1] y)
        <float[1, 1] w = {3}> { y = MatMul(x, w) }"""
    )
    trainer = Trainer(
        model,
        loss=lambda op, y_true, y_pred: op.stop_gradient(y_pred) * y_pred * y_true,
        optimizer=0.1,
        **way,
    )
    one = np.ones((1, 1), np.float32)
    assert trainer.evaluate(2 * one, one, verbose=0)["loss"] == 36
    assert trainer.train_on_batch(2 * one, one)["loss"] == 36
    # the derivative of 6 y by w is 6 * 2, without the factor 2 of y squared
    np.testing.assert_allclose(trainer.get_weights()["w"], 3 - 0.1 * 12, rtol=1e-6)


def test_checkpoints_have_the_setting(tmp_path: Path) -> None:
    x, y = data()
    losses = {"a": "mse", "b": "mse"}
    trainer = Trainer(onnx.parser.parse_model(TWO_HEADS), loss=losses, stop_gradients=["?", "!h"])
    trainer.fit(x, y, verbose=0)
    trainer.save(tmp_path / "a.onnxfit")
    loaded = Trainer.load(tmp_path / "a.onnxfit")
    assert loaded.settings["stop_gradients"] == ["?", "!h"]
    assert "stop_gradients=['?', '!h']" in loaded.summary()
    assert loaded.train_on_batch(x, y) == trainer.train_on_batch(x, y)
    for name, weight in trainer.get_weights().items():
        np.testing.assert_array_equal(loaded.get_weights()[name], weight)


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ("hh", UnknownNameError, "No float value of the model is called 'hh'. Did you mean 'h'?"),
        (["h", "!aa"], UnknownNameError, "No float value of the model is called 'aa'"),
        (["u"], SettingError, r"'u', which is an initializer. Freeze it with weights=\['!u'\]"),
        (3, SettingError, "stop_gradients"),
    ],
)
def test_unknown_values_are_refused(setting: Any, error: type[Exception], message: str) -> None:
    model = onnx.parser.parse_model(TWO_HEADS)
    with pytest.raises(error, match=message):
        Trainer(model, loss={"a": "mse", "b": "mse"}, stop_gradients=setting)
