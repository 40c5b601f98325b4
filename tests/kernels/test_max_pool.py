"""The gradient of MaxPool by one operator: that of the plain operators, in all their forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxfit
from onnxfit.kernels import max_pool
from onnxfit.kernels.library import DOMAIN
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import kernel_types, run

# (shape of x, attributes)
POOLS = {
    "halving": ("2,3,8,6", "kernel_shape=[2,2], strides=[2,2]"),
    "halving wide": ("3,2,20,262", "kernel_shape=[2,2], strides=[2,2]"),
    "halving odd": ("2,3,7,9", "kernel_shape=[2,2], strides=[2,2]"),
    "halving many": ("33,9,14,14", "kernel_shape=[2,2], strides=[2,2]"),
    "halving small": ("40,9,4,6", "kernel_shape=[2,2], strides=[2,2]"),
    "halving the last axis": ("7,9,1,6", "kernel_shape=[1,2], strides=[1,2]"),
    "halving rows": ("7,9,4,1", "kernel_shape=[2,1], strides=[2,1]"),
    "halving lines": ("33,9,16", "kernel_shape=[2], strides=[2]"),
    "halving odd lines": ("33,9,17", "kernel_shape=[2], strides=[2]"),
    "overlapping": ("2,3,7,9", "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    "one pad": ("2,3,7,9", "kernel_shape=[3,2], strides=[2,1], pads=[0,1,2,0]"),
    "dilated": ("2,2,9,11", "kernel_shape=[3,2], dilations=[2,3]"),
    "ceiling": ("1,2,6,8", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
    "line": ("2,3,15", "kernel_shape=[3], strides=[2]"),
    "pairs": ("2,3,15", "kernel_shape=[2], strides=[2]"),
    "volume": ("1,2,5,6,7", "kernel_shape=[2,3,2], strides=[2,1,2], pads=[1,1,0,0,1,1]"),
    "long": ("1,2,3,200", "kernel_shape=[2,3], strides=[1,2], pads=[0,1,0,1]"),
    "valid": ("2,3,7,9", 'kernel_shape=[3,3], strides=[3,2], auto_pad="VALID"'),
}


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a kernel here, although it would not be faster."""
    monkeypatch.setattr(max_pool, "MIN_WINDOWS", 1)


def gradient(shape: str, attributes: str, kind: str = "float") -> onnx.ModelProto:
    """y of x, and x_grad of x and y_grad."""
    text = f"""<ir_version: 10, opset_import: ["": 21]> g ({kind}[{shape}] x) => ({kind}[] y)
        {{ y = MaxPool<{attributes}>(x) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnxfit.gradient_model(onnx.shape_inference.infer_shapes(model))
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def feeds_of(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    (dy,) = (value for value in model.graph.input if value.name == "y_grad")
    shape = [dim.dim_value for dim in dy.type.tensor_type.shape.dim]
    return {"x": x, "y_grad": np.random.default_rng(1).standard_normal(shape).astype(x.dtype)}


def size(shape: str) -> list[int]:
    return [int(n) for n in shape.split(",")]


def assert_follows(model: onnx.ModelProto, x: np.ndarray, library: Path, threads: int = 1) -> None:
    faster = with_kernels(model)
    # the node of y, without Indices, and the kernel
    assert [n.domain for n in faster.graph.node] == ["", DOMAIN]
    assert len(faster.graph.node[0].output) == 1
    feeds = feeds_of(model, x)
    for found, right in zip(run(faster, feeds, library, threads), run(model, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", POOLS)
def test_the_gradient_is_that_of_the_operators(name: str, kernels: Path) -> None:
    shape, attributes = POOLS[name]
    rng = np.random.default_rng(0)
    for kind, dtype in (("float", np.float32), ("double", np.float64)):
        model = gradient(shape, attributes, kind)
        assert_follows(model, rng.standard_normal(size(shape)).astype(dtype), kernels)


@pytest.mark.parametrize("name", POOLS)
def test_the_first_of_equal_elements_wins(name: str, kernels: Path) -> None:
    shape, attributes = POOLS[name]
    model = gradient(shape, attributes)
    x = np.random.default_rng(0).integers(0, 3, size(shape)).astype(np.float32)
    assert_follows(model, x, kernels)
    assert_follows(model, np.where(x == 2, np.float32(np.inf), x), kernels)
    assert_follows(model, np.where(x == 0, np.float32(-1e38), x), kernels)


@pytest.mark.parametrize("name", ["halving wide", "overlapping", "volume"])
def test_nan_is_no_maximum(name: str, kernels: Path) -> None:
    """As in the MaxPool of onnxruntime: a large number shows which element is the maximum."""
    shape, attributes = POOLS[name]
    model = gradient(shape, attributes)
    x = np.random.default_rng(0).standard_normal(size(shape)).astype(np.float32)
    holes = np.random.default_rng(1).random(x.shape) < 0.2
    feeds = feeds_of(model, x)
    library = kernels
    faster = with_kernels(model)
    found = run(faster, {**feeds, "x": np.where(holes, np.float32(np.nan), x)}, library)[1]
    right = run(faster, {**feeds, "x": np.where(holes, np.float32(-1e30), x)}, library)[1]
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    for name in ("halving many", "overlapping"):
        _, attributes = POOLS[name]
        shape = "17,13,23,21"
        x = np.random.default_rng(threads).standard_normal(size(shape)).astype(np.float32)
        assert_follows(gradient(shape, attributes), x, kernels, threads)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_without_a_number_the_first_element_counts(value: float, kernels: Path) -> None:
    model = with_kernels(gradient(*POOLS["overlapping"]))
    x = np.full((2, 3, 7, 9), value, np.float32)
    feeds = {"x": x, "y_grad": np.ones((2, 3, 4, 5), np.float32)}
    dx = run(model, feeds, kernels)[1]
    expected = np.zeros_like(x)
    for i in range(4):
        for j in range(5):
            expected[:, :, max(2 * i - 1, 0), max(2 * j - 1, 0)] += 1
    np.testing.assert_array_equal(dx, expected)


def test_other_pools_keep_their_operators() -> None:
    assert kernel_types(gradient("2,3,7,9", 'kernel_shape=[3,3], auto_pad="SAME_UPPER"')) == []
    four = gradient("1,1,3,3,3,3", "kernel_shape=[2,2,2,2]")
    assert kernel_types(four) == []
    copied = gradient(*POOLS["halving"])
    noted = next(node for node in copied.graph.node if node.metadata_props)
    copy = copied.graph.node.add()
    copy.CopyFrom(noted)
    copy.output[0] = "copy"
    assert kernel_types(copied) == []


def test_small_images_keep_their_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "MIN_WINDOWS", 49)
    attributes = "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"
    assert kernel_types(gradient("1,2,14,14", attributes)) == ["MaxPoolGradient"]
    assert kernel_types(gradient("1,2,14,12", attributes)) == []


@pytest.mark.parametrize(
    ("shape", "attributes", "has_kernel"),
    [
        ("1,2,2,4", "kernel_shape=[2,2], strides=[2,2]", True),
        ("1,2,4", "kernel_shape=[2], strides=[2]", True),
        ("1,2,3,4", "kernel_shape=[2,2], strides=[2,2]", False),
        ("1,2,5", "kernel_shape=[2], strides=[2]", False),
        ("1,2,4,4", "kernel_shape=[2,2], strides=[2,1]", False),
        ("1,2,4,4", "kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]", False),
        ("1,2,4,4", "kernel_shape=[2,3], strides=[2,2]", False),
        ("1,2,4,4,4", "kernel_shape=[2,2,2], strides=[2,2,2]", False),
    ],
)
def test_small_images_that_are_halved_have_a_kernel(
    shape: str, attributes: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(max_pool, "MIN_WINDOWS", 49)
    assert kernel_types(gradient(shape, attributes)) == ["MaxPoolGradient"] * has_kernel


def test_a_vanished_value_is_noticed() -> None:
    model = gradient(*POOLS["halving"])
    for node in model.graph.node:
        node.input[:] = ["renamed" if name == "x" else name for name in node.input]
    model.graph.input[0].name = "renamed"
    assert kernel_types(model) == []


@pytest.mark.parametrize(
    ("attribute", "numbers", "message"),
    [
        ("kernel_shape", [0, 2], "out of range"),
        ("kernel_shape", [2], "out of range"),
        ("strides", [0, 1], "out of range"),
        ("dilations", [1, -1], "out of range"),
        ("pads", [-1, 0], "out of range"),
        ("pads", [2**40, 0], "out of range"),
    ],
)
def test_wrong_attributes_are_refused(
    attribute: str, numbers: list[int], message: str, kernels: Path
) -> None:
    model = with_kernels(gradient(*POOLS["halving"]))
    for given in model.graph.node[-1].attribute:
        if given.name == attribute:
            given.ints[:] = numbers
    with pytest.raises(Exception, match=message):
        run(model, {"x": np.zeros((2, 3, 8, 6), np.float32)}, kernels)


def test_windows_behind_the_image_are_left_out(kernels: Path) -> None:
    """dy may have any size: no window reads or writes outside of the image."""
    model = with_kernels(gradient(*POOLS["overlapping"]))
    del model.graph.output[0]
    del model.graph.node[0]
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    feeds = {"x": np.zeros((2, 3, 7, 9), np.float32), "y_grad": np.ones((2, 3, 40, 50), np.float32)}
    (dx,) = run(model, feeds, kernels)
    assert dx.sum() == 2 * 3 * 4 * 5
