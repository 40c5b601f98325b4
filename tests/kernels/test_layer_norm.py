"""LayerNormalization and its gradient by one operator each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import (
    differentiated,
    kernel_model,
    layer_types,
    parsed,
    random_feeds,
    run,
)

SHAPES = {
    "tokens": (3, 19, 128),
    "matrix": (37, 33),
    "one row": (1, 1000),
    "narrow": (5, 60, 3),
    "rank 4": (2, 3, 5, 31),
    "wide": (40, 2100),
    "many rows": (9, 301, 16),
}
WEIGHTS = ["scale", "bias"]
NORM = "LayerNormalization<axis = -1, epsilon = 0.1>(x, scale, bias)"


def model_of(
    shape: tuple[int, ...], body: str = f"y = {NORM}", wrt: Sequence[str] = ("x", *WEIGHTS)
) -> onnx.ModelProto:
    sizes, columns = ",".join(map(str, shape)), shape[-1]
    text = f"""g (float[{sizes}] x, float[{columns}] scale, float[{columns}] bias)
        => (float[{sizes}] y) {{ {body} }}"""
    return differentiated(text, wrt)


def by_name(model: onnx.ModelProto, results: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {value.name: result for value, result in zip(model.graph.output, results, strict=True)}


def assert_close(
    found: dict[str, np.ndarray], right: dict[str, np.ndarray], tolerance: float
) -> None:
    """The numbers differ by at most a share of the largest."""
    assert found.keys() == right.keys()
    for name, expected in right.items():
        largest = max(np.abs(expected).max(initial=0), 1)
        np.testing.assert_allclose(
            found[name], expected, rtol=0, atol=tolerance * largest, err_msg=name
        )


def exact(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The formulas of Ba, Kiros and Hinton (2016), in float64."""
    x, dy, scale, bias = (
        feeds[name].astype(np.float64) for name in ("x", "y_grad", "scale", "bias")
    )
    mean = x.mean(-1, keepdims=True)
    deviation = np.sqrt(x.var(-1, keepdims=True) + 0.1)
    n, dn = (x - mean) / deviation, dy * scale
    leading = tuple(range(x.ndim - 1))
    means = dn.mean(-1, keepdims=True), (dn * n).mean(-1, keepdims=True)
    return {
        "y": n * scale + bias,
        "x_grad": (dn - means[0] - n * means[1]) / deviation,
        "scale_grad": (dy * n).sum(leading),
        "bias_grad": dy.sum(leading),
    }


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_float64(name: str, kernels: Path) -> None:
    plain = model_of(SHAPES[name])
    feeds = random_feeds(plain)
    found = by_name(plain, run(with_kernels(plain), feeds, kernels))
    assert_close(found, exact(feeds), 1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_the_operators(name: str, kernels: Path) -> None:
    plain = model_of(SHAPES[name])
    assert layer_types(plain) == ["LayerNorm", "LayerNormGradient"]
    feeds = random_feeds(plain)
    found = by_name(plain, run(with_kernels(plain), feeds, kernels))
    assert_close(found, by_name(plain, run(plain, feeds)), 1e-6)


def test_two_operators_take_the_place_of_all() -> None:
    faster = with_kernels(model_of(SHAPES["tokens"]))
    assert [node.op_type for node in faster.graph.node] == ["LayerNorm", "LayerNormGradient"]


def test_graphs_for_inference_keep_their_operator() -> None:
    model = parsed(
        "g (float[4,9] x, float[9] s) => (float[4,9] y) { y = LayerNormalization(x, s) }"
    )
    assert layer_types(model) == ["LayerNorm"]
    model.graph.node[0].name = "norm"
    assert layer_types(model) == []


@pytest.mark.parametrize(
    ("wrt", "outputs"), [(["x"], 1), (["x", "scale"], 3), (["x", "bias"], 3), (["scale"], 0)]
)
def test_frozen_weights_have_no_gradient(wrt: list[str], outputs: int, kernels: Path) -> None:
    plain = model_of(SHAPES["tokens"], wrt=wrt)
    faster = with_kernels(plain)
    found = [len(n.output) for n in faster.graph.node if n.op_type == "LayerNormGradient"]
    assert found == ([outputs] if outputs else [])
    feeds = random_feeds(plain)
    assert_close(
        by_name(plain, run(faster, feeds, kernels)), by_name(plain, run(plain, feeds)), 1e-6
    )


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    for name in ("many rows", "wide"):
        model = with_kernels(model_of(SHAPES[name]))
        feeds = random_feeds(model, threads)
        found, right = (run(model, feeds, kernels, n) for n in (threads, 1))
        for a, b in zip(found, right, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["x", "y_grad", "scale"])
def test_infinite_numbers_reach_the_same_gradients(name: str, value: float, kernels: Path) -> None:
    plain = model_of(SHAPES["matrix"])
    feeds = random_feeds(plain)
    feeds[name][..., 5] = value
    found, right = run(with_kernels(plain), feeds, kernels), run(plain, feeds)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))


BODIES = {
    "residual": f"n = {NORM} y = Add(n, x)",
    "twice": f"a = {NORM} y = LayerNormalization<axis = -1, epsilon = 0.1>(a, scale, bias)",
    "two readers": f"n = {NORM} s = Mul(n, n) y = Add(s, n)",
    "sum of two": f"m = Mul(x, x) a = {NORM} b = LayerNormalization<axis = -1>(m, scale, bias)"
    " y = Add(a, b)",
    "without bias": "n = LayerNormalization<axis = -1>(x, scale) y = Add(n, bias)",
}


@pytest.mark.parametrize("name", BODIES)
def test_normalizations_inside_of_graphs(name: str, kernels: Path) -> None:
    plain = model_of(SHAPES["tokens"], BODIES[name])
    assert set(layer_types(plain)) == {"LayerNorm", "LayerNormGradient"}
    feeds = random_feeds(plain)
    found = by_name(plain, run(with_kernels(plain), feeds, kernels))
    assert_close(found, by_name(plain, run(plain, feeds)), 3e-6)


def test_constant_scales(kernels: Path) -> None:
    numbers = ", ".join(map(str, np.linspace(-1, 2, 7)))
    text = f"""g (float[4,5,7] x) => (float[4,5,7] y) <float[7] s = {{{numbers}}}>
        {{ y = LayerNormalization(x, s) }}"""
    plain = differentiated(text, ["x"])
    assert layer_types(plain) == ["LayerNorm", "LayerNormGradient"]
    feeds = random_feeds(plain)
    found = by_name(plain, run(with_kernels(plain), feeds, kernels))
    assert_close(found, by_name(plain, run(plain, feeds)), 1e-6)


@pytest.mark.parametrize("changed", ["axis", "mean", "inverse", "columns", "order"])
def test_other_computations_keep_their_operators(changed: str) -> None:
    model = model_of(SHAPES["tokens"])
    norm = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    for node in model.graph.node:
        if changed == "axis" and node is norm:
            next(a for a in node.attribute if a.name == "axis").i = 1
        if changed == "mean" and node.op_type == "Sub" and node.input[1] == norm.output[1]:
            node.input[1] = norm.output[2]
        if changed == "inverse" and list(node.input) == [norm.output[2]] * 2:
            node.op_type = "Add"
        if changed == "columns" and node.op_type == "Div":
            node.input[:] = node.input[::-1]
        if changed == "order" and node.op_type == "Sub" and norm.output[1] not in node.input:
            node.input[:] = node.input[::-1]
    assert "LayerNormGradient" not in layer_types(model)


def arrays(rows: int, columns: int) -> dict[str, np.ndarray]:
    """The inputs of the operator."""
    rng = np.random.default_rng(rows)
    shapes = [(rows, columns)] * 2 + [(columns,)] + [(rows, 1)] * 2
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in zip(("x", "dy", "scale", "mean", "inverse"), shapes, strict=True)
    }


def test_empty_batches_have_no_sums(kernels: Path) -> None:
    feeds = arrays(0, 6)
    model = kernel_model("LayerNormGradient", feeds, ["dx", "dscale", "dbias"])
    dx, dscale, dbias = run(model, feeds, kernels)
    assert dx.shape == (0, 6)
    assert dscale.tolist() == dbias.tolist() == [0] * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dy": (4, 6)}, "do not fit"),
        ({"scale": (5,)}, "do not fit"),
        ({"mean": (4,)}, "do not fit"),
        ({"inverse": (2, 3)}, "do not fit"),
        ({"x": ()}, "needs x of"),
        ({"x": (5, 0)}, "needs x of"),
        ({"more": (5, 6)}, "five inputs"),
    ],
)
def test_wrong_inputs_are_refused(
    change: dict[str, tuple[int, ...]], message: str, kernels: Path
) -> None:
    feeds = arrays(5, 6) | {n: np.zeros(shape, np.float32) for n, shape in change.items()}
    with pytest.raises(Exception, match=message):
        run(kernel_model("LayerNormGradient", feeds, ["dx"]), feeds, kernels)


@pytest.mark.parametrize("mean", [0, 100])
@pytest.mark.parametrize("shape", [(5, 6), (3, 1), (1, 4000), (0, 6)])
def test_the_operator_is_as_exact_as_float32(
    mean: float, shape: tuple[int, ...], kernels: Path
) -> None:
    feeds = {"x": shape, "scale": shape[-1:], "bias": shape[-1:]}
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(s).astype(np.float32) for name, s in feeds.items()}
    values["x"] += np.float32(mean)
    model = kernel_model("LayerNorm", values, ["y", "mean", "inverse"])
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("epsilon", 0.1))
    y, means, inverse = run(model, values, kernels)
    x, scale, bias = (values[name].astype(np.float64) for name in feeds)
    deviation = np.sqrt(x.var(-1, keepdims=True) + 0.1)
    exact = (x - x.mean(-1, keepdims=True)) / deviation * scale + bias
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-6 * max(mean, 1) * 4)
    np.testing.assert_allclose(means, x.mean(-1, keepdims=True), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(inverse, 1 / deviation, rtol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (5, 6), "scale": (5,)}, "do not fit"),
        ({"x": (5, 6), "scale": (6,), "bias": (5,)}, "do not fit"),
        ({"x": (), "scale": (1,)}, "needs x of"),
        ({"x": (5, 0), "scale": (0,)}, "needs x of"),
        ({"x": (5, 6)}, "two or three inputs"),
    ],
)
def test_wrong_inputs_of_the_normalization_are_refused(
    shapes: dict[str, tuple[int, ...]], message: str, kernels: Path
) -> None:
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    model = kernel_model("LayerNorm", feeds, ["y"])
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("epsilon", 0.1))
    with pytest.raises(Exception, match=message):
        run(model, feeds, kernels)


def test_two_outputs_are_refused(kernels: Path) -> None:
    feeds = arrays(5, 6)
    with pytest.raises(Exception, match="one output or three"):
        run(kernel_model("LayerNormGradient", feeds, ["dx", "dscale"]), feeds, kernels)
