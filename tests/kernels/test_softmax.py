"""Softmax without NaN, and the gradient of Softmax, by one operator each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit.kernels import softmax
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import (
    differentiated,
    kernel_model,
    kernel_types,
    random_feeds,
    run,
)

SHAPES = {
    "attention": (2, 3, 17, 128),
    "matrix": (37, 33),
    "one row": (1, 1000),
    "narrow": (5, 600, 3),
    "vector": (31,),
    "wide": (6, 9000),
}
MASKED = """<float zero = {0}> { p = Softmax(x) n = IsNaN(p) y = Where(n, zero, p) }"""
PLAIN = "{ y = Softmax(x) }"


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a kernel here, although it would not be faster."""
    monkeypatch.setattr(softmax, "MIN_COLUMNS", 1)


def model_of(shape: tuple[int, ...], body: str = PLAIN) -> onnx.ModelProto:
    sizes = ",".join(map(str, shape))
    return differentiated(f"g (float[{sizes}] x) => (float[{sizes}] y) {body}", ["x"])


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_float64_and_of_the_operators(name: str, kernels: Path) -> None:
    plain = model_of(SHAPES[name])
    faster = with_kernels(plain)
    assert [node.op_type for node in faster.graph.node] == ["Softmax", "SoftmaxGradient"]
    feeds = random_feeds(plain)
    found, right = run(faster, feeds, kernels)[1], run(plain, feeds)[1]
    x, dy = (feeds[name].astype(np.float64) for name in ("x", "y_grad"))
    y = np.exp(x - x.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    exact = y * (dy - (dy * y).sum(-1, keepdims=True))
    for expected in (right, exact):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    model = with_kernels(model_of(SHAPES["narrow"]))
    feeds = random_feeds(model, threads)
    found, right = (run(model, feeds, kernels, n)[1] for n in (threads, 1))
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("body", [PLAIN, MASKED])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["x", "y_grad"])
def test_infinite_numbers_reach_the_same_gradients(
    name: str, value: float, body: str, kernels: Path
) -> None:
    plain = model_of(SHAPES["matrix"], body)
    feeds = random_feeds(plain)
    feeds[name][3, 5] = feeds[name][7] = value
    results = run(with_kernels(plain), feeds, kernels), run(plain, feeds)
    assert not np.isfinite(results[1][1][7]).any()
    for found, right in zip(*results, strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(right))
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)


def test_the_gradient_needs_no_mask_of_nan(kernels: Path) -> None:
    plain = model_of(SHAPES["attention"], MASKED)
    (node,) = (n for n in with_kernels(plain).graph.node if n.op_type == "SoftmaxGradient")
    assert node.input[1] == "y_grad"


@pytest.mark.parametrize("name", SHAPES)
def test_a_softmax_without_nan_is_one_operator(name: str, kernels: Path) -> None:
    plain = model_of(SHAPES[name], MASKED)
    faster = with_kernels(plain)
    assert [node.op_type for node in faster.graph.node] == ["MaskedSoftmax", "SoftmaxGradient"]
    feeds = random_feeds(plain)
    feeds["x"].reshape(-1, SHAPES[name][-1])[-1, :-1] = -np.inf  # all but one
    for found, right in zip(run(faster, feeds, kernels), run(plain, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-6 * np.abs(right).max())


@pytest.mark.parametrize("reader", ["p", "n"])
def test_a_softmax_with_another_reader_keeps_its_nan(reader: str, kernels: Path) -> None:
    plain = model_of(SHAPES["matrix"], MASKED)
    node = onnx.helper.make_node("Cast", [reader], ["other"], "gradient/other", to=1)
    plain.graph.node.append(node)
    plain.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, SHAPES["matrix"]))
    feeds = random_feeds(plain)
    feeds["x"][3] = -np.inf
    assert "MaskedSoftmax" not in kernel_types(plain)
    for found, right in zip(
        run(with_kernels(plain), feeds, kernels), run(plain, feeds), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_other_axes_keep_their_operators(axis: int) -> None:
    assert kernel_types(model_of((3, 4, 5), f"{{ y = Softmax<axis = {axis}>(x) }}")) == []


@pytest.mark.parametrize(("columns", "expected"), [(7, []), (8, ["SoftmaxGradient"])])
def test_short_rows_keep_their_operators(
    columns: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax, "MIN_COLUMNS", 8)
    assert kernel_types(model_of((5, columns))) == expected


def test_other_computations_keep_their_operators() -> None:
    model = model_of(SHAPES["matrix"])
    (node,) = (node for node in model.graph.node if node.op_type == "Sub")
    node.input[:] = node.input[::-1]
    assert kernel_types(model) == []


@pytest.mark.parametrize("shape", [(0, 4), (3, 1)])
def test_smallest_tensors(shape: tuple[int, ...], kernels: Path) -> None:
    feeds = {"y": np.ones(shape, np.float32), "dy": np.full(shape, 5, np.float32)}
    (dx,) = run(gradient(feeds), feeds, kernels)
    assert dx.shape == shape
    assert not dx.any()
    only = {"y": feeds["y"]}
    (y,) = run(kernel_model("MaskedSoftmax", only, ["z"]), only, kernels)
    assert y.shape == shape
    np.testing.assert_allclose(y, 1 / shape[1])


def gradient(feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    model = kernel_model("SoftmaxGradient", feeds, ["dx"])
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("is_masked", 0))
    return model


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(5, 6), (6, 5)], "needs y and dy"),
        ([(), ()], "needs y and dy"),
        ([(5, 0), (5, 0)], "needs y and dy"),
        ([(5, 6)], "two inputs"),
    ],
)
def test_wrong_inputs_are_refused(
    shapes: list[tuple[int, ...]], message: str, kernels: Path
) -> None:
    feeds = {f"i{i}": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    with pytest.raises(Exception, match=message):
        run(gradient(feeds), feeds, kernels)


@pytest.mark.parametrize("shapes", [[()], [(5, 0)], [(5, 6), (5, 6)]])
def test_wrong_inputs_of_the_softmax_are_refused(
    shapes: list[tuple[int, ...]], kernels: Path
) -> None:
    feeds = {f"i{i}": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
    with pytest.raises(Exception, match="MaskedSoftmax"):
        run(kernel_model("MaskedSoftmax", feeds, ["y"]), feeds, kernels)
