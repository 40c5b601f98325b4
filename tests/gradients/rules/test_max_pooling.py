"""MaxPool: the first of equal maxima, numbers at the ends of their range, and the forms by size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxfit import gradient_model
from onnxfit.gradients.pullback import add_pullback
from onnxfit.gradients.rules import max_pooling
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize
from onnxfit.step.finish import prune

Array = np.ndarray[Any, Any]

EXTREMES = [0.0, -0.0, 1e-45, 2e-45, -1e-45, 1e-38, 1.0, 3.4e38, -3.4e38, np.inf, -np.inf]
HALVING = [(2, 3, 6, 8), (2, 3, 7, 9), (1, 1, 2, 2), (3, 2, 5, 4), (3, 2, 9), (2, 3, 8)]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small pools be compared, too."""
    monkeypatch.setattr(max_pooling, "MIN_COMPARED_WINDOWS", 1)


def model_of(shape: Sequence[object], attributes: str, dtype: str = "float") -> onnx.ModelProto:
    rank = ",".join(f"o{i}" for i in range(len(shape)))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 21]> g ({dtype}[{",".join(map(str, shape))}] a)'
        f" => ({dtype}[{rank}] y) {{ y = MaxPool<{attributes}>(a) }}"
    )
    return gradient_model(model, "a", gradient="onnx")


def model_by_taps(shape: Sequence[object], attributes: str) -> onnx.ModelProto:
    """Return the model with its gradient in the form for WebGPU."""
    rank = ",".join(f"o{i}" for i in range(len(shape)))
    sizes = ",".join(map(str, shape))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 21]> g (float[{sizes}] a)'
        f" => (float[{rank}] y) {{ y = MaxPool<{attributes}>(a) }}"
    )
    pullback = add_pullback(normalize(model), ["y"], ["a"], device="webgpu").model
    return ir.to_proto(prune(GraphBuilder(pullback.graph)))


def gradient_of(model: onnx.ModelProto, a: Array, dy: Array) -> Array:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (da,) = session.run(["a_grad"], {"a": a, "y_grad": dy})
    assert isinstance(da, np.ndarray)
    return da


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def square(rank: int, size: int = 2) -> str:
    kernel = ",".join([str(size)] * rank)
    return f"kernel_shape=[{kernel}], strides=[{kernel}]"


def expected_gradient(a: Array, dy: Array, size: int = 2) -> Array:
    """Give each dy to the first maximum of its window, in the order of rows."""
    da = np.zeros_like(a)
    taps = list(itertools.product(range(size), repeat=a.ndim - 2))
    for n, c, *position in np.ndindex(*dy.shape):
        window = [(n, c, *(size * p + t for p, t in zip(position, tap))) for tap in taps]
        first = max(window, key=lambda index: a[index])  # of equal ones, max returns the first
        da[first] += dy[(n, c, *position)]
    return da


@pytest.mark.usefixtures("compare")
@pytest.mark.parametrize("batch", ["static", "unknown"])
@pytest.mark.parametrize("shape", HALVING)
def test_comparisons_find_the_first_maximum(shape: tuple[int, ...], batch: str) -> None:
    rng = np.random.default_rng(0)
    dy = rng.standard_normal((*shape[:2], *(n // 2 for n in shape[2:]))).astype(np.float32)
    model = model_of(shape if batch == "static" else ("N", *shape[1:]), square(len(shape) - 2))
    assert "Equal" in operators(model)
    for a in (rng.integers(0, 3, shape), rng.choice(EXTREMES, shape)):
        a = a.astype(np.float32)
        np.testing.assert_array_equal(gradient_of(model, a, dy), expected_gradient(a, dy))


def test_pools_are_compared_from_a_measured_size_on() -> None:
    halves = square(2)
    assert "Equal" not in operators(model_of((2, 4, 8, 8), halves))
    assert "Equal" in operators(model_of((64, 16, 28, 28), halves))
    assert "Equal" in operators(model_of(("N", 16, 28, 28), halves))
    for others in (
        square(2, 3), "kernel_shape=[3,3], strides=[2,2]", f"{halves}, ceil_mode=1",
        f"{halves}, pads=[1,1,1,1]", f'{halves}, auto_pad="SAME_UPPER"', "kernel_shape=[2,2]",
        "kernel_shape=[2,2], strides=[2,2], dilations=[1,2]",
    ):  # fmt: skip
        assert "Equal" not in operators(model_of((64, 16, 28, 28), others)), others
    assert "Equal" not in operators(model_of((64, 16, 28, 28), halves, "double"))
    assert "Equal" not in operators(model_of(("N", "C", 28, 28), halves))


def test_indices_that_the_model_returns_are_used() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 21]> g (float[64,16,28,28] a)'
        " => (float[64,16,14,14] y, int64[64,16,14,14] i) {"
        " y, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a) }"
    )
    assert "Equal" not in operators(gradient_model(model, "a", outputs="y", gradient="onnx"))


def test_compared_pools_do_not_return_indices() -> None:
    model = model_of((64, 16, 28, 28), square(2))
    assert all(len(node.output) == 1 for node in model.graph.node if node.op_type == "MaxPool")


@pytest.mark.parametrize("shape", [(2, 3, 7, 7), ("N", 3, 7, 7), ("N", "C", "H", "W")])
@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_no_window_covers_need_no_scatter(shape: tuple[object, ...], size: int) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 3, (2, 3, 7, 7)).astype(np.float32)
    dy = rng.standard_normal((2, 3, 7 // size, 7 // size)).astype(np.float32)
    model = model_of(shape, square(2, size))
    assert "ScatterElements" not in operators(model)
    np.testing.assert_array_equal(gradient_of(model, a, dy), expected_gradient(a, dy, size))


@pytest.mark.usefixtures("compare")
def test_comparisons_can_be_differentiated_again() -> None:
    """The gradient is linear in dy: its own gradient reads what it has put somewhere."""
    rng = np.random.default_rng(0)
    a, seed = (rng.standard_normal((2, 3, 6, 8)).astype(np.float32) for _ in range(2))
    first = model_of(a.shape, square(2))
    second = gradient_model(first, "y_grad", outputs="a_grad", gradient="onnx")
    session = onnxruntime.InferenceSession(
        second.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    dy = np.ones((2, 3, 3, 4), np.float32)
    (found,) = session.run(["y_grad_grad"], {"a": a, "y_grad": dy, "a_grad_grad": seed})
    chosen = expected_gradient(a, dy) * seed
    expected = chosen.reshape(2, 3, 3, 2, 4, 2).sum((3, 5))
    np.testing.assert_array_equal(found, expected)


def test_double_precision_has_a_kernel() -> None:
    rng = np.random.default_rng(0)
    a, dy = rng.integers(0, 3, (2, 3, 6, 6)).astype(float), rng.standard_normal((2, 3, 3, 3))
    model = model_of(a.shape, square(2), "double")
    np.testing.assert_array_equal(gradient_of(model, a, dy), expected_gradient(a, dy))


@pytest.mark.parametrize("windows", [1, 2**11])
def test_windows_without_a_number_stop_no_step(
    monkeypatch: pytest.MonkeyPatch, windows: int
) -> None:
    monkeypatch.setattr(max_pooling, "MIN_COMPARED_WINDOWS", windows)
    a = np.array([[np.nan, np.nan, 1, 2], [np.nan, np.nan, 3, 4]], np.float32)[None, None]
    dy = np.ones((1, 1, 1, 2), np.float32)
    da = gradient_of(model_of(a.shape, square(2)), a, dy)
    assert da[0, 0, :, 2:].tolist() == [[0, 0], [0, 1]]
    assert da[0, 0, :, :2].sum() == 1


@pytest.mark.parametrize("sizes", ["known", "unknown"])
@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 3, 6, 8), "kernel_shape=[2,2], strides=[2,2]"),
        ((2, 3, 7, 9), "kernel_shape=[2,2], strides=[2,2]"),
        ((2, 3, 7, 9), "kernel_shape=[2,2], strides=[2,2], ceil_mode=1"),
        ((2, 3, 9, 9), "kernel_shape=[3,3], strides=[2,2]"),
        ((2, 3, 8, 7), "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
        ((2, 3, 8, 7), "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1"),
        ((2, 3, 8, 7), "kernel_shape=[3,2], strides=[1,1], pads=[0,1,2,0]"),
        ((2, 3, 9, 8), "kernel_shape=[2,3], strides=[1,2], dilations=[3,2]"),
        ((2, 3, 8, 7), 'kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER"'),
        ((2, 3, 8, 7), 'kernel_shape=[2,2], strides=[1,3], auto_pad="SAME_LOWER"'),
        ((2, 3, 10), "kernel_shape=[3], strides=[2], pads=[1,1]"),
        ((1, 2, 4, 6, 4), "kernel_shape=[2,2,2], strides=[2,2,2]"),
        ((1, 2, 5, 5, 5), "kernel_shape=[3,3,3], strides=[2,2,2]"),
    ],
)
def test_comparisons_of_taps_are_the_gradient_by_indices(
    shape: tuple[int, ...], attributes: str, sizes: str
) -> None:
    declared = shape if sizes == "known" else ("N", "C", *(f"s{i}" for i in range(len(shape) - 2)))
    by_taps = model_by_taps(declared, attributes)
    assert not {"MaxUnpool", "ScatterElements"} & operators(by_taps)
    assert all(len(node.output) == 1 for node in by_taps.graph.node)
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 3, shape).astype(np.float32)  # with many equal maxima
    expected = model_of(shape, attributes)
    session = onnxruntime.InferenceSession(
        expected.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    outputs = [value.name for value in session.get_outputs()]
    y_shape = session.get_outputs()[outputs.index("y")].shape
    dy = rng.integers(-50, 50, y_shape).astype(np.float32)  # whose sums are exact
    np.testing.assert_array_equal(gradient_of(by_taps, a, dy), gradient_of(expected, a, dy))
