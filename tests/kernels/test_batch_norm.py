"""BatchNormalization by batch statistics and its gradient by one operator each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnxfit
from onnxfit.graph.values import GraphBuilder
from onnxfit.kernels import batch_norm
from onnxfit.kernels.batch_norm import BatchNorm
from onnxfit.kernels.search import NodeSearch, declared_types
from onnxfit.kernels.transforms import with_kernels
from onnxfit.load.training_form import to_training_form
from onnxfit.step.finish import finish
from tests.kernels.sessions import layer_kernels, layer_types, run

SHAPES = {
    "images": (3, 5, 7, 9),
    "one pixel": (6, 33, 1, 1),
    "many channels": (5, 67, 4, 4),
    "large": (2, 3, 41, 57),
    "one image": (1, 4, 5, 6),
    "rows": (19, 37),
    "signal": (4, 6, 130),
    "volume": (2, 3, 4, 3, 5),
}
ACTIVATIONS = {"none": "Identity(z)", "Relu": "Relu(z)", "Relu6": "Clip(z, low, high)"}
EXPORTED_RELU6 = "l = CastLike(low, z) h = CastLike(high, z) y = Clip(z, l, h)"
BOUNDS = {"none": (-np.inf, np.inf), "Relu": (0, np.inf), "Relu6": (0, 6)}
WEIGHTS = ["scale", "bias"]


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a kernel here, although it would not be faster."""
    monkeypatch.setattr(batch_norm, "MIN_PIXELS", 1)


def training(shape: tuple[int, ...], body: str) -> onnx.ModelProto:
    """The training form of a graph with a BatchNormalization, the next statistics, and gradients.

    The weights and the input have a gradient.
    """
    sizes, channels = ",".join(map(str, shape)), shape[1]
    vectors = ", ".join(f"float[{channels}] {name}" for name in (*WEIGHTS, "mean", "variance"))
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{sizes}] x, {vectors}) => (float[{sizes}] y) <float low = {{0}}, float high = {{6}}>
        {{ z = BatchNormalization<epsilon = 0.001, momentum = 0.75>(x, scale, bias, mean, variance)
           {body} }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    op = GraphBuilder(model.graph)
    seed, step = op.input("seed", np.int64, ()), op.input("step", np.int64, ())
    for name, value in to_training_form(op, WEIGHTS, "train", seed, step).items():
        op.output(f"{name}/next", value)
    forward = onnx.shape_inference.infer_shapes(finish(op))
    whole = onnxfit.gradient_model(forward, ["x", *WEIGHTS], outputs="y")
    whole = onnx.shape_inference.infer_shapes(whole, data_prop=True)
    return onnx.shape_inference.infer_shapes(
        finish(GraphBuilder(ir.from_proto(whole).graph)), data_prop=True
    )


def model_of(name: str, activation: str) -> onnx.ModelProto:
    return training(SHAPES[name], f"y = {ACTIVATIONS[activation]}")


def feeds_of(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds = {
        value.name: rng.standard_normal(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
    feeds |= {name: np.zeros((), np.int64) for name in ("seed", "step") if name in feeds}
    feeds["scale"] += 3  # so that Relu6 has both bounds
    feeds["x"] += np.float32(1.5)
    return feeds


def exact(feeds: dict[str, np.ndarray], activation: str) -> dict[str, np.ndarray]:
    """The formulas of Ioffe and Szegedy (2015), in float64."""
    x, dy, scale, bias, mean, variance = (
        feeds[name].astype(np.float64)
        for name in ("x", "y_grad", "scale", "bias", "mean", "variance")
    )
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    of_channels = (1, -1, *[1] * (x.ndim - 2))
    batch_mean, batch_variance = x.mean(axes), x.var(axes)
    deviation = np.sqrt(batch_variance + 0.001).reshape(of_channels)
    n = (x - batch_mean.reshape(of_channels)) / deviation
    z = n * scale.reshape(of_channels) + bias.reshape(of_channels)
    low, high = BOUNDS[activation]
    dz = np.where((z > low) & (z < high), dy, 0)
    dn = dz * scale.reshape(of_channels)
    means = dn.mean(axes, keepdims=True), (dn * n).mean(axes, keepdims=True)
    return {
        "y": np.clip(z, low, high),
        "mean/next": 0.75 * mean + 0.25 * batch_mean,
        "variance/next": 0.75 * variance + 0.25 * batch_variance,
        "x_grad": (dn - means[0] - n * means[1]) / deviation,
        "scale_grad": (dz * n).sum(axes),
        "bias_grad": dz.sum(axes),
    }


def outputs(model: onnx.ModelProto, results: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {value.name: result for value, result in zip(model.graph.output, results, strict=True)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_float64(name: str, activation: str, kernels: Path) -> None:
    """They are at most 1e-6 of the largest number away."""
    model = with_kernels(model_of(name, activation))
    feeds = feeds_of(model)
    right = exact(feeds, activation)
    found = outputs(model, run(model, feeds, kernels))
    assert found.keys() == right.keys()
    for value, expected in right.items():
        scale = max(np.abs(expected).max(), 1)
        np.testing.assert_allclose(
            found[value], expected, rtol=0, atol=1.5e-6 * scale, err_msg=value
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_the_operators(name: str, activation: str, kernels: Path) -> None:
    plain = model_of(name, activation)
    feeds = feeds_of(plain)
    found = run(with_kernels(plain), feeds, kernels)
    for value, right in zip(found, run(plain, feeds), strict=True):
        np.testing.assert_allclose(value, right, rtol=0, atol=3e-6 * max(np.abs(right).max(), 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_operator_takes_the_place_of_each_direction(activation: str) -> None:
    faster = with_kernels(model_of("images", activation))
    of_kernels = layer_kernels(faster)
    assert [node.op_type for node in of_kernels] == ["BatchNorm", "BatchNormGradient"]
    number = list(ACTIVATIONS).index(activation)
    assert [node.attribute[0].i for node in of_kernels] == [number, number]
    sizes = {
        value.name: value for value in onnx.shape_inference.infer_shapes(faster).graph.value_info
    }
    whole = [node for node in faster.graph.node if node.op_type in ("Mul", "Add", "Sub", "Relu")]
    assert all("x_grad" not in node.output for node in whole)
    for node in whole:  # the operators that are left compute one number per channel
        shape = sizes[node.output[0]].type.tensor_type.shape if node.output[0] in sizes else None
        assert shape is None or np.prod([dim.dim_value for dim in shape.dim]) <= 5


def test_bounds_of_clip_may_be_cast(kernels: Path) -> None:
    plain = training(SHAPES["many channels"], EXPORTED_RELU6)
    faster = with_kernels(plain)
    of_kernels = layer_kernels(faster)
    assert [node.attribute[0].i for node in of_kernels] == [batch_norm.RELU6] * 2
    assert not {"Clip", "CastLike", "Equal", "Sub"} & {node.op_type for node in faster.graph.node}
    feeds = feeds_of(plain)
    for value, right in zip(run(faster, feeds, kernels), run(plain, feeds), strict=True):
        np.testing.assert_allclose(value, right, rtol=0, atol=3e-6 * max(np.abs(right).max(), 1))


@pytest.mark.parametrize("threads", range(1, 9))
def test_threads_change_nothing(threads: int, kernels: Path) -> None:
    for name in ("many channels", "large"):
        model = with_kernels(model_of(name, "Relu"))
        feeds = feeds_of(model, threads)
        found, right = (run(model, feeds, kernels, n) for n in (threads, 1))
        for a, b in zip(found, right, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("offset", [0.0, 300.0, -1e4])
def test_far_means_do_not_cancel(offset: float, kernels: Path) -> None:
    """The first element, about which the moments are taken, may be far from the others."""
    model = with_kernels(model_of("large", "none"))
    feeds = feeds_of(model)
    feeds["x"] += np.float32(offset)
    feeds["x"][0, :, 0, 0] = 0
    right = exact(feeds, "none")
    found = outputs(model, run(model, feeds, kernels))
    for value in ("mean/next", "variance/next"):
        np.testing.assert_allclose(found[value], right[value], rtol=1e-6)


def test_equal_elements_have_no_variance(kernels: Path) -> None:
    plain = model_of("images", "Relu6")
    feeds = feeds_of(plain)
    feeds["x"][:] = 0.5
    feeds["bias"][:] = [0, 6, 3, -1, 7]  # at the bounds, Clip lets the gradient pass
    found = outputs(plain, run(with_kernels(plain), feeds, kernels))
    right = outputs(plain, run(plain, feeds))
    for value in ("y", "variance/next", "bias_grad"):
        np.testing.assert_allclose(found[value], right[value], rtol=2e-6, atol=2e-6)


def test_at_its_kink_relu_lets_no_gradient_pass(kernels: Path) -> None:
    plain = model_of("images", "Relu")
    feeds = feeds_of(plain)
    feeds["x"][:] = 0
    feeds["bias"][:] = [0, 0, 1, -1, 0]
    found = outputs(plain, run(with_kernels(plain), feeds, kernels))
    right = outputs(plain, run(plain, feeds))
    np.testing.assert_allclose(found["bias_grad"], right["bias_grad"], rtol=1e-6)
    assert found["bias_grad"][[0, 1, 3, 4]].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_infinite_numbers_reach_the_gradients(value: float, kernels: Path) -> None:
    """A step that skips infinite gradients notices them."""
    model = with_kernels(model_of("images", "Relu"))
    feeds = feeds_of(model)
    feeds["x"][1, 2, 3, 4] = value
    found = outputs(model, run(model, feeds, kernels))
    assert np.isnan(found["x_grad"][:, 2]).all()
    assert np.isfinite(found["x_grad"][:, :2]).all()


BODIES = {
    "residual": "r = Add(z, x) y = Relu(r)",
    "two readers": "a = Relu(z) b = Mul(a, a) y = Add(b, z)",
    "leaky": "y = LeakyRelu(z)",
    "other bounds": "y = Clip(z, high)",
    "twice": """a = Relu(z) c = BatchNormalization(a, scale, bias, mean, variance) y = Relu(c)""",
}


@pytest.mark.parametrize("name", BODIES)
def test_values_with_other_readers_are_kept(name: str, kernels: Path) -> None:
    plain = training(SHAPES["images"], BODIES[name])
    assert "BatchNorm" in layer_types(plain)
    feeds = feeds_of(plain)
    found = run(with_kernels(plain), feeds, kernels)
    for value, right in zip(found, run(plain, feeds), strict=True):
        np.testing.assert_allclose(value, right, rtol=0, atol=5e-6 * max(np.abs(right).max(), 1))


@pytest.mark.parametrize(
    ("shape", "body", "expected"),
    [
        ((2, 3, 4, 4), "y = Relu(z)", ["BatchNorm", "BatchNormGradient"]),
        ((2, 3, 3, 5), "y = Relu(z)", []),
        ((40, 30), "y = Relu(z)", []),
    ],
)
def test_small_images_keep_their_operators(
    shape: tuple[int, ...], body: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norm, "MIN_PIXELS", 16)
    assert layer_types(training(shape, body)) == expected


@pytest.mark.parametrize("changed", ["axes", "epsilon", "order"])
def test_other_computations_keep_their_operators(changed: str) -> None:
    model = model_of("images", "none")
    for tensor in model.graph.initializer:
        if changed == "axes" and tensor.dims == [3]:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([0, 2, 1]), tensor.name))
    for node in model.graph.node:
        if changed == "epsilon" and node.op_type == "Sqrt":
            model.graph.initializer.remove(
                next(
                    tensor
                    for tensor in model.graph.initializer
                    if tensor.name
                    in [n.input[1] for n in model.graph.node if n.output[0] == node.input[0]]
                )
            )
        if changed == "order" and node.op_type == "Sub":
            node.input[:] = node.input[::-1]
    assert layer_types(model) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_kernels_compose(precision: str, kernels: Path) -> None:
    losses = {}
    for on in (True, False):
        trainer = onnxfit.Trainer(
            network(), loss="mse", optimizer=onnxfit.optimizers.SGD(0.01), precision=precision
        )
        rng = np.random.default_rng(0)
        x = rng.standard_normal((8, 3, 6, 6)).astype(np.float32)
        y = rng.standard_normal((8, 3, 6, 6)).astype(np.float32)
        with pytest.MonkeyPatch.context() as patch:
            if not on:
                patch.setenv("ONNXFIT_KERNELS", "off")
            losses[on] = [trainer.train_on_batch(x, y)["loss"] for _ in range(5)]
    assert losses[True][-1] < losses[True][0]
    np.testing.assert_allclose(losses[True], losses[False], rtol=2e-2)


def network() -> onnx.ModelProto:
    """Conv, BatchNormalization, Relu, Conv."""
    rng = np.random.default_rng(3)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n,3,6,6] x) => (float[n,3,6,6] y)
        <float[3] scale = {1, 1, 1}, float[3] bias = {0, 0, 0},
         float[3] mean = {0, 0, 0}, float[3] variance = {1, 1, 1}>
        { a = Conv<pads=[1,1,1,1]>(x, v)
          b = BatchNormalization(a, scale, bias, mean, variance)
          c = Relu(b)
          y = Conv<pads=[1,1,1,1]>(c, w) }"""
    )
    for name in "vw":
        values = rng.standard_normal((3, 3, 3, 3)).astype(np.float32) / 5
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": 3}, "out of range"),
        ({"activation": -1}, "out of range"),
        ({"inputs": 3}, "out of range"),
        ({"input": (1, "x")}, "do not fit"),
        ({"input": (3, "scale")}, "do not fit"),
        ({"input": (0, "scale")}, "needs x of"),
    ],
)
def test_wrong_nodes_are_refused(change: dict[str, object], message: str, kernels: Path) -> None:
    model = with_kernels(model_of("images", "none"))
    (node,) = (node for node in model.graph.node if node.op_type == "BatchNorm")
    if "activation" in change:
        node.attribute[0].i = change["activation"]
    if "inputs" in change:
        del node.input[change["inputs"] :]
    if "input" in change:
        position, name = change["input"]
        node.input[position] = name
    for value in (*model.graph.value_info, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(Exception, match=message):
        run(model, feeds_of(model), kernels)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [("axes", "not that of each channel"), ("epsilon", "not a constant"), ("pixels", "small")],
)
def test_a_rule_says_why_it_keeps_the_operators(
    changed: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("images", "none")
    search = NodeSearch(model.graph, list(model.graph.node), declared_types(model.graph))
    (found,) = search.found(BatchNorm(), {})
    assert BatchNorm().check(search, found) == ""
    if changed == "axes":
        for tensor in model.graph.initializer:
            if tensor.dims == [3]:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([0, 2, 1]), tensor.name))
    elif changed == "epsilon":
        model.graph.initializer.remove(search.tensors[found["epsilon"]])
    else:
        monkeypatch.setattr(batch_norm, "MIN_PIXELS", 10**6)
    search = NodeSearch(model.graph, list(model.graph.node), declared_types(model.graph))
    assert reason in BatchNorm().check(search, found)
    assert not list(search.found(BatchNorm(), {}))
