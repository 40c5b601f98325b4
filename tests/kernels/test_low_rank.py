"""The gradients of both factors of a LoRA adapter by one operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.kernels import library, low_rank, transforms
from onnxfit.kernels.transforms import with_kernels
from tests.kernels.sessions import kernel_model, kernel_types, layer_types, parsed, run

Arrays = dict[str, np.ndarray]
SIZES = {  # rows, columns of x and of dy, rank
    "one block": (64, 16, 16, 4),
    "odd rows": (67, 32, 16, 8),
    "rank 1": (130, 16, 48, 1),
    "rank 3": (65, 48, 80, 3),
    "rank 7": (1, 16, 16, 7),
    "rank 64": (300, 64, 112, 64),
    "many tasks": (2500, 32, 128, 8),
    "wide": (100, 2048, 16, 6),
}


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a kernel, although it would not be faster."""
    monkeypatch.setattr(low_rank, "MAX_RANK", 64)
    monkeypatch.setattr(low_rank, "MIN_COLUMNS", 1)
    monkeypatch.setattr(low_rank, "MIN_ROWS", 1)


def model_of(
    rows: int, x: int, dy: int, rank: int, *, scale: float = 2, kept: str = "dak", update: int = 0
) -> onnx.ModelProto:
    """The gradients as a step computes them.

    - `kept`: the result that is an output, "dak" for (rank, x) or "da" for (x, rank).
    - `update`: whether the update is in the product of the second one.
    """
    shape = f"{x},{rank}" if kept == "da" else f"{rank},{x}"
    second = (
        "Gemm<transA=1, alpha=-1.0, beta=1.0>(uf, dyf, b)"
        if update
        else ("Gemm<transA=1>(uf, dyf)")
    )
    first = "Gemm<transA=1>(xf, vf)" if kept == "da" else "Gemm<transA=1>(vf, xf)"
    return parsed(
        f"""g (float[1,{rows},{x}] x, float[1,{rows},{dy}] dy, float[{x},{rank}] a,
               float[{rank},{dy}] b) => (float[{shape}] {kept}, float[{rank},{dy}] db)
        <float s = {{{float(scale)}}}> {{
            u = MatMul(x, a) us = Mul(u, s) uf = Flatten<axis=-1>(us)
            bt = Transpose<perm=[1,0]>(b)
            v = MatMul(dy, bt) vs = Mul(s, v) vf = Flatten<axis=-1>(vs)
            xf = Flatten<axis=-1>(x) dyf = Flatten<axis=-1>(dy)
            {kept} = {first} db = {second} }}""",
        "gradient",
    )


def feeds_of(rows: int, x: int, dy: int, rank: int) -> Arrays:
    rng = np.random.default_rng(rows)
    shapes = {"x": (1, rows, x), "dy": (1, rows, dy), "a": (x, rank), "b": (rank, dy)}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def exact(feeds: Arrays, scale: float = 2) -> list[np.ndarray]:
    x, dy, a, b = (feeds[name].astype(np.float64) for name in ("x", "dy", "a", "b"))
    return [scale * (dy[0] @ b.T).T @ x[0], scale * (x[0] @ a).T @ dy[0]]


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for left, right in zip(found, expected, strict=True):
        largest = np.abs(right).max()
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("name", SIZES)
def test_results_are_those_of_float64_and_of_the_operators(
    name: str, all_sizes: None, kernels: Path
) -> None:
    plain, feeds = model_of(*SIZES[name]), feeds_of(*SIZES[name])
    assert layer_types(plain) == ["LowRankGradient"]
    found = run(with_kernels(plain), feeds, kernels)
    assert_close(found, exact(feeds))
    assert_close(found, run(plain, feeds))


@pytest.mark.parametrize("rank", [*range(1, 18), 31, 32, 33, 63, 64])
def test_ranks(rank: int, all_sizes: None, kernels: Path) -> None:
    sizes = (70, 32, 48, rank)
    plain, feeds = model_of(*sizes, scale=0.5), feeds_of(*sizes)
    assert_close(run(with_kernels(plain), feeds, kernels), exact(feeds, 0.5))


@pytest.mark.parametrize("kept", ["da", "dak"])
@pytest.mark.parametrize("update", [0, 1])
@pytest.mark.parametrize("scale", [1, -0.25])
def test_forms_of_the_gradients(
    kept: str, update: int, scale: float, all_sizes: None, kernels: Path
) -> None:
    sizes = (100, 32, 48, 8)
    plain, feeds = model_of(*sizes, scale=scale, kept=kept, update=update), feeds_of(*sizes)
    assert layer_types(plain) == ["LowRankGradient"]
    assert_close(run(with_kernels(plain), feeds, kernels), run(plain, feeds))


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, all_sizes: None, kernels: Path) -> None:
    model, feeds = with_kernels(model_of(*SIZES["many tasks"])), feeds_of(*SIZES["many tasks"])
    found, right = (run(model, feeds, kernels, n) for n in (threads, 1))
    for left, expected in zip(found, right, strict=True):
        np.testing.assert_array_equal(left, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["x", "dy", "a", "b"])
def test_infinite_numbers_reach_the_same_gradients(
    name: str, value: float, all_sizes: None, kernels: Path
) -> None:
    sizes = (70, 32, 48, 3)
    plain, feeds = model_of(*sizes), feeds_of(*sizes)
    feeds[name][..., 2, 1] = value
    found, right = run(with_kernels(plain), feeds, kernels), run(plain, feeds)
    assert not all(np.isfinite(array).all() for array in right)
    for left, expected in zip(found, right, strict=True):
        np.testing.assert_array_equal(np.isfinite(left), np.isfinite(expected))


@pytest.mark.parametrize(
    ("sizes", "is_used"),
    [
        ((64, 128, 128, 8), True),
        ((1000, 144, 512, 1), True),
        ((63, 128, 128, 8), False),
        ((64, 112, 128, 8), False),
        ((64, 128, 64, 8), False),
        ((64, 136, 128, 8), False),
        ((64, 128, 128, 9), False),
    ],
)
def test_sizes_for_which_it_is_not_used(sizes: tuple[int, int, int, int], is_used: bool) -> None:
    assert layer_types(model_of(*sizes)) == ["LowRankGradient"] * is_used


@pytest.mark.parametrize("read", ["u", "us", "uf", "v", "vs", "vf"])
def test_products_with_another_reader_keep_their_operators(read: str) -> None:
    model = model_of(64, 128, 128, 8)
    model.graph.node.append(onnx.helper.make_node("Neg", [read], ["other"], "gradient/other"))
    model.graph.output.add().name = "other"
    assert layer_types(model) == []


@pytest.mark.parametrize("changed", ["scale", "alpha", "one side"])
def test_other_computations_keep_their_operators(changed: str) -> None:
    model = model_of(64, 128, 128, 8)
    nodes = {node.output[0]: node for node in model.graph.node}
    if changed == "scale":
        model.graph.initializer.append(onnx.helper.make_tensor("t", 1, [], [3.0]))
        nodes["us"].input[1] = "t"
    if changed == "alpha":
        nodes["db"].attribute.append(onnx.helper.make_attribute("alpha", 2.0))
    if changed == "one side":
        nodes["db"].input[1] = "xf"
    assert "LowRankGradient" not in kernel_types(model)


@pytest.mark.parametrize("unknown", ["dyf", "xf", "uf", "vf", "us", "vs"])
def test_values_of_unknown_shape_keep_their_operators(unknown: str) -> None:
    model = model_of(100, 128, 128, 4)
    values = [value for value in model.graph.value_info if value.name != unknown]
    assert len(values) < len(model.graph.value_info)
    del model.graph.value_info[:]
    model.graph.value_info.extend(values)
    assert layer_types(model) == []


def test_an_empty_batch_has_no_gradient(kernels: Path) -> None:
    feeds = {"x": (0, 16), "dy": (0, 32), "a": (3, 16), "b": (3, 32)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in feeds.items()}
    model = operator(arrays)
    da, db = run(model, arrays, kernels)
    assert (da.shape, db.shape) == ((3, 16), (3, 32))
    assert not da.any()
    assert not db.any()


def operator(feeds: Arrays) -> onnx.ModelProto:
    model = kernel_model("LowRankGradient", feeds, ["da", "db"])
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("scale", 2.0))
    return model


@pytest.mark.parametrize(
    "change",
    [
        {"x": (2, 4, 32)},
        {"x": (8, 16)},
        {"dy": (7, 48)},
        {"a": (3, 32)},
        {"b": (4, 48, 1)},
        {"a": (0, 32), "b": (0, 48)},
        {"a": (65, 32), "b": (65, 48)},
        {"x": (8, 24), "a": (4, 24)},
        {"x": (8, 0), "a": (4, 0)},
        {"x": ()},
    ],
)
def test_wrong_inputs_are_refused(change: dict[str, tuple[int, ...]], kernels: Path) -> None:
    shapes = {"x": (8, 32), "dy": (8, 48), "a": (4, 32), "b": (4, 48)} | change
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(Exception, match="do not fit"):
        run(operator(feeds), feeds, kernels)


def test_wrong_numbers_of_inputs_are_refused(kernels: Path) -> None:
    feeds = {name: np.zeros((8, 16), np.float32) for name in ("x", "dy", "a")}
    with pytest.raises(Exception, match="four inputs"):
        run(operator(feeds), feeds, kernels)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("transposed", [False, True])
def test_training_is_the_same(
    optimizer: str,
    dropout: float,
    transposed: bool,
    kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = "Gemm<transB=1>(x, w, b)" if transposed else "p = MatMul(x, w) y = Add(p, b)"
    layer = f"y = {layer}" if transposed else layer
    text = f"g (float[n,128] x) => (float[n,144] y) {{ {layer} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    rng = np.random.default_rng(0)
    w = rng.standard_normal((128, 144)).astype(np.float32) / 10
    for name, array in (("w", w.T if transposed else w), ("b", w[0])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.copy(), name))
    x, y = (rng.standard_normal((320, n)).astype(np.float32) for n in (128, 144))
    losses = {}
    used: list[str] = []
    original = low_rank.replace_low_rank_gradients

    def counted(*arguments: object) -> object:
        nodes = original(*arguments)  # type: ignore[arg-type]
        used.extend(node.op_type for node in nodes if node.op_type == "LowRankGradient")
        return nodes

    monkeypatch.setattr(transforms, "replace_low_rank_gradients", counted)
    for switch in ("", "off"):
        monkeypatch.setenv(library.SWITCH, switch)
        trainer = onnxfit.Trainer(
            model,
            loss="mse",
            optimizer=optimizer,
            adapters=onnxfit.LoRA(8, dropout=dropout),
            seed=1,
        )
        losses[switch] = [float(trainer.train_on_batch(x, y)["loss"]) for _ in range(4)]
    assert used == ([] if dropout else ["LowRankGradient"])
    np.testing.assert_allclose(losses[""], losses["off"], rtol=1e-5)
