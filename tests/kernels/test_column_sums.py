"""The sums of the columns of a matrix by one operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.kernels import library
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import differentiated, kernel_model, layer_types, random_feeds, run

# Shapes of a layer's output. The gradient of the bias is summed over all axes but the last.
SHAPES = {
    "tokens": (16, 130, 96),
    "matrix": (900, 77),
    "wide": (257, 2100),
    "narrow": (70000, 1),
    "many rows": (9, 700, 16),
}


def model_of(shape: tuple[int, ...]) -> onnx.ModelProto:
    """y = x w + b; the gradients of w and b."""
    *rows, columns = shape
    text = f"""g (float[{",".join(map(str, rows))},3] x, float[3,{columns}] w, float[{columns}] b)
        => (float[{",".join(map(str, shape))}] y) {{ p = MatMul(x, w) y = Add(p, b) }}"""
    return differentiated(text, ["w", "b"])


@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_those_of_float64_whatever_the_threads(name: str, kernels: Path) -> None:
    plain = model_of(SHAPES[name])
    assert layer_types(plain) == ["ColumnSums"]
    feeds, faster = random_feeds(plain), with_kernels(plain)
    sums = run(faster, feeds, kernels)[2]
    dy = feeds["y_grad"].astype(np.float64).reshape(-1, SHAPES[name][-1])
    error = 2e-6 * np.abs(dy).sum(axis=0)
    assert (np.abs(sums - dy.sum(axis=0)) <= error).all()
    np.testing.assert_allclose(sums, run(plain, feeds)[2], rtol=0, atol=2 * error.max())
    for threads in range(2, 9):
        np.testing.assert_array_equal(run(faster, feeds, kernels, threads)[2], sums)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_infinite_numbers_stay_in_their_column(value: float, kernels: Path) -> None:
    plain = model_of(SHAPES["matrix"])
    feeds = random_feeds(plain)
    feeds["y_grad"][7, 5] = value
    sums = run(with_kernels(plain), feeds, kernels)[2]
    assert np.flatnonzero(~np.isfinite(sums)).tolist() == [5]


def test_small_matrices_keep_their_product() -> None:
    assert layer_types(model_of((255, 300))) == []
    assert layer_types(model_of((256, 255))) == []
    assert layer_types(model_of((256, 256))) == ["ColumnSums"]


def test_other_rows_than_ones_keep_their_product() -> None:
    plain = model_of(SHAPES["matrix"])
    (ones,) = (t for t in plain.graph.initializer if list(t.dims) == [900])
    ones.CopyFrom(onnx.numpy_helper.from_array(np.full(900, 2, np.float32), ones.name))
    assert layer_types(plain) == []


def test_an_array_without_columns_is_refused(kernels: Path) -> None:
    model = kernel_model("ColumnSums", {"x": np.zeros(())}, ["y"])
    with pytest.raises(Exception, match="ColumnSums needs x of"):
        run(model, {"x": np.zeros((), np.float32)}, kernels)
    model = kernel_model("ColumnSums", {"x": np.zeros((0, 3))}, ["y"])
    assert run(model, {"x": np.zeros((0, 3), np.float32)}, kernels)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_is_the_same(
    optimizer: str, backend: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[n,8] x) => (float[n,64] y)
        { p = MatMul(x, w) a = Add(p, b) y = Tanh(a) }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (8, 64)), ("b", (64,))):
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x, y = (rng.standard_normal((1024, n)).astype(np.float32) for n in (8, 64))
    weights: dict[str, np.ndarray] = {}
    for switch in ("", "off"):
        monkeypatch.setenv(library.SWITCH, switch)
        trainer = onnxfit.Trainer(model, loss="mse", optimizer=optimizer, backend=backend)
        for _ in range(5):
            trainer.train_on_batch(x, y)
        weights[switch] = trainer.get_weights()["b"]
    np.testing.assert_allclose(weights[""], weights["off"], rtol=1e-5, atol=1e-6)
