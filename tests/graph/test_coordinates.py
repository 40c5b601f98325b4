"""Grids, strides and bins at the outputs of a network, and tensors that only resemble them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfit.graph.weights import weight_reasons
from onnxfit.load.normalize import normalize

HEAD = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 2, 21] x) => (float[N, ?, ?] y) {{
    h = MatMul(x, w) {} }}"""
LEVELS = (4, 2, 1)


def mesh(rows: int, columns: int, offset: float = 0.5) -> np.ndarray:
    y, x = np.meshgrid(np.arange(rows) + offset, np.arange(columns) + offset, indexing="ij")
    return np.stack([x, y]).reshape(2, -1)


ANCHORS = np.concatenate([mesh(n, n) for n in LEVELS], 1)  # YOLOv8's, [2, cells]
STRIDES = np.repeat([8.0, 16.0, 32.0], [n * n for n in LEVELS])


def roles(nodes: str, **tensors: np.ndarray) -> dict[str, str]:
    model = onnx.parser.parse_model(HEAD.format(nodes))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    tensors["w"] = rng.normal(size=(21, np.size(tensors.get("grid", np.zeros((2, 21)))) // 2))
    for name, array in tensors.items():
        floats = array.dtype.kind == "f"
        array = array.astype(np.float32) if floats else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    reasons = weight_reasons(normalize(model))
    return {name: reason.text for name, reason in reasons.items() if reason.is_formula}


def test_anchors_and_strides_of_a_detector_are_found() -> None:
    strides = np.repeat(STRIDES, 4)[None]
    found = roles("a = Add(h, grid) y = Mul(a, s)", grid=np.repeat(ANCHORS, 4, 1)[None], s=strides)
    assert found == {"grid": "grid of positions", "s": "vector of strides"}


@pytest.mark.parametrize(
    "grid",
    [
        ANCHORS[None],
        mesh(5, 7, 0.0)[None],
        mesh(5, 7, -0.5)[None],
        np.tile(mesh(3, 4), (1, 3)),  # one for each anchor of a cell
        np.stack([np.linspace(-1, 1, 9), np.linspace(-1, 1, 9)]),
        np.tile(np.arange(10.0), (2, 1)),
    ],
)
def test_grids_are_found_in_every_layout(grid: np.ndarray) -> None:
    assert roles("y = Add(h, grid)", grid=grid) == {"grid": "grid of positions"}
    last = np.moveaxis(grid.reshape(2, -1), 0, 1)[None]
    nodes = "t = Transpose<perm=[0, 2, 1]>(h) y = Sub(last, t)"
    assert roles(nodes, last=last, grid=grid)["last"] == "grid of positions"


def test_the_mean_of_a_distribution_over_bins_is_found() -> None:
    """Detectors with a distribution focal loss, and regressions over classes."""
    bins = np.arange(21.0)
    for nodes, b in (
        ("p = Softmax(h) y = MatMul(p, b)", bins[:, None]),
        ("p = Softmax(h) t = Transpose<perm=[0, 2, 1]>(p) y = Conv(t, b)", bins[None, :, None]),
        ("p = Softmax(h) m = Mul(p, b) y = ReduceSum<keepdims=1>(m)", bins / 4 - 2),
    ):
        assert roles(nodes, b=b) == {"b": "grid of a softmax's bins"}


def test_a_table_of_equidistant_values_is_found() -> None:
    nodes = "i = ArgMax<axis=2, keepdims=1>(h) y = Gather(b, i)"
    assert roles(nodes, b=np.linspace(3.8, 7.6, 95)) == {"b": "grid of positions"}


@pytest.mark.parametrize(
    ("nodes", "b"),
    [
        ("y = Add(h, b)", np.random.default_rng(0).normal(size=(2, 21))),
        ("y = Add(h, b)", np.sort(np.random.default_rng(0).normal(size=21))),
        ("y = Add(h, b)", np.arange(21.0) + np.random.default_rng(0).normal(0, 0.01, 21)),
        ("y = Mul(h, b)", np.ones(21)),
        ("y = Mul(h, b)", np.random.default_rng(0).choice([2.0, 4.0], 21)),
        ("y = Add(h, b)", np.zeros(21)),
        ("s = Softmax(h) y = MatMul(s, b)", np.random.default_rng(0).normal(size=(21, 1))),
        ("y = MatMul(h, b)", np.arange(21.0)[:, None]),  # a layer
        ("a = Add(h, b) y = MatMul(a, w)", np.arange(21.0)),  # before a layer, as centers may be
        ("i = ArgMax<axis=2, keepdims=1>(h) y = Gather(b, i)", np.geomspace(1, 9, 21)),
    ],
)
def test_other_tensors_are_weights(nodes: str, b: np.ndarray) -> None:
    assert not roles(nodes, b=b)
