"""quantization_report: laws, and the same figures from bare onnxruntime."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import DataError, ModelError, SettingError, UnknownNameError
from onnxfit.tools.quantization import QuantizationReport
from tests.helpers import compiled_graphs
from tests.models import convolutional, mlp, two_outputs
from tests.trainable.quantized.graphs import outputs_of, tensors_of
from tests.trainable.quantized.integer_files import without_overflow
from tests.trainable.quantized.qdq_files import (
    decibels,
    rename_inputs,
    symmetric_scale,
    with_integers,
)

LAYERS = ("fc0", "fc1", "fc2")
WEIGHTS = tuple(f"{layer}.weight" for layer in LAYERS)
VALUES = ("x", "a0", "a1", "y")
rng = np.random.default_rng(0)
X = rng.normal(size=(50, 4)).astype(np.float32)
Y = rng.integers(0, 3, 50)


def network() -> onnx.ModelProto:
    return mlp((4, 16, 16, 3), activation="Relu")


def values_of(model: onnx.ModelProto, *names: str) -> list[np.ndarray]:
    """The values of these names for X, of bare onnxruntime."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return outputs_of(copy, {"x": X})


def scales(
    model: onnx.ModelProto, names: tuple[str, ...] = (*WEIGHTS, *VALUES)
) -> dict[str, float]:
    computed = [name for name in names if name not in (*WEIGHTS, "x")]
    arrays = {"x": X, **dict(zip(computed, values_of(model, *computed)))}
    arrays |= {name: tensors_of(model)[name] for name in names if name in WEIGHTS}
    return {name: symmetric_scale(arrays[name]) for name in names}


def quantized(model: onnx.ModelProto, **changed: float) -> onnx.ModelProto:
    """The network in integers; `changed` are factors of scales, "__" standing for a dot."""
    every = scales(model)
    for name, factor in changed.items():
        every[name.replace("__", ".")] *= factor
    return with_integers(model, {w: every[w] for w in WEIGHTS}, {v: every[v] for v in VALUES})


def report(float_model: Any, int_model: Any, data: Any = (X, Y), **settings: Any) -> Any:
    settings = {"loss": "cross_entropy", "verbose": 0, **settings}
    return onnxfit.quantization_report(float_model, int_model, data, **settings)


def cross_entropy(scores: np.ndarray, y: np.ndarray = Y) -> float:
    scores = scores.astype(np.float64)
    likelihood = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return float(-likelihood[np.arange(len(y)), y].mean())


# ------------------------------------------------------------------------------------------------
# the figures of bare onnxruntime


@without_overflow
def test_figures_are_those_of_bare_onnxruntime_on_files_with_one_quantized_layer() -> None:
    model = network()
    made = report(model, quantized(model))
    every = scales(model)
    exact = outputs_of(model, {"x": X})[0]
    assert [layer.name for layer in made.layers] == list(LAYERS)
    for layer, name, values in zip(made.layers, WEIGHTS, (("x", "a0"), ("a0", "a1"), ("a1", "y"))):
        alone = with_integers(model, {name: every[name]}, {v: every[v] for v in values})
        rounded = outputs_of(alone, {"x": X})[0]
        assert layer.alone_snr == pytest.approx(decibels(exact, rounded), abs=0.05)
        assert layer.alone_loss == pytest.approx(cross_entropy(rounded), abs=1e-4)
        assert layer.loss_increase == pytest.approx(
            cross_entropy(rounded) - cross_entropy(exact), abs=1e-4
        )
        integers = np.rint(tensors_of(model)[name] / np.float32(every[name]))
        assert layer.weight_snr == pytest.approx(
            decibels(tensors_of(model)[name], integers * np.float32(every[name])), abs=1e-3
        )
        assert layer.levels == len(np.unique(integers))
        assert (layer.clipped_weights, layer.clipped_activations) == (0, 0)
        assert layer.type == "int8"


@without_overflow
def test_figures_of_all_layers_are_those_of_the_integer_file() -> None:
    model = network()
    int8 = quantized(model)
    made = report(model, int8)
    exact, rounded = outputs_of(model, {"x": X})[0], outputs_of(int8, {"x": X})[0]
    assert made.output_snr == pytest.approx(decibels(exact, rounded), abs=1e-3)
    assert made.float_loss == pytest.approx(cross_entropy(exact), rel=1e-5)
    assert made.int_loss == pytest.approx(cross_entropy(rounded), rel=1e-5)
    assert made.rows == len(X)
    floats = values_of(model, "a0", "a1", "y")
    integers = values_of(int8, "a0.rounded", "a1.rounded", "y")
    for layer, x, q in zip(made.layers, floats, integers):
        assert layer.output_snr == pytest.approx(decibels(x, q), abs=0.05)


@without_overflow
def test_a_rounding_in_front_of_a_relu_loses_nothing_by_cutting_off_negatives() -> None:
    model = network()
    int8 = onnxfit.quantize(model, X, verbose=0)
    made = report(model, int8)
    floats = values_of(model, "a0", "a1", "y")
    integers = values_of(int8, "a0_DequantizeLinear_Output", "a1_DequantizeLinear_Output", "y")
    for layer, x, q in zip(made.layers, floats, integers):
        assert layer.output_snr == pytest.approx(decibels(x, q), abs=0.05)
        assert layer.output_snr > 25
        assert layer.clipped_activations == pytest.approx(0, abs=0.01)


@without_overflow
def test_a_normalization_that_quantize_folds_is_folded_for_the_report() -> None:
    model = convolutional()
    images = np.random.default_rng(1).normal(size=(8, 1, 8, 8)).astype(np.float32)
    int8 = onnxfit.quantize(model, images, verbose=0)
    operators = [node.op_type for node in model.graph.node]
    assert "BatchNormalization" in operators
    made = onnxfit.quantization_report(model, int8, (images,))
    assert len(made.layers) == sum(name in ("Conv", "Gemm") for name in operators)
    exact, rounded = (outputs_of(m, {m.graph.input[0].name: images})[0] for m in (model, int8))
    assert made.output_snr == pytest.approx(decibels(exact, rounded), abs=0.05)


@without_overflow
@pytest.mark.parametrize("weight_type", ["QInt8", "QUInt8", "QInt16"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("model", [mlp(activation="Relu"), convolutional(batch_norm=False)])
def test_files_of_quantize_static(
    model: onnx.ModelProto, per_channel: bool, weight_type: str, tmp_path: Path
) -> None:
    """The layers alone are those of `nodes_to_quantize`, with the same calibration."""
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"node{i}"
    shape = [d.dim_value or 30 for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    settings = {"weight_type": weight_type, "per_channel": per_channel}
    int8 = by_the_tool(model, x, tmp_path, **settings)
    made = report(model, int8, (x,), loss=None)
    exact = outputs_of(model, {"x": x})[0]
    assert made.output_snr == pytest.approx(
        decibels(exact, outputs_of(int8, {"x": x})[0]), abs=0.05
    )
    names = [n.name for n in model.graph.node if n.op_type in ("Conv", "Gemm")]
    assert [layer.name for layer in made.layers] == names
    for layer in made.layers:
        together = with_its_relu(model, layer.name)
        alone = by_the_tool(model, x, tmp_path, nodes_to_quantize=together, **settings)
        assert layer.alone_snr == pytest.approx(
            decibels(exact, outputs_of(alone, {"x": x})[0]), abs=0.5
        )


def with_its_relu(model: onnx.ModelProto, name: str) -> list[str]:
    """The node of this name, and the Relu whose work its rounding does."""
    node = next(n for n in model.graph.node if n.name == name)
    readers = [n for n in model.graph.node if n.input[0] == node.output[0]]
    return [name, *(n.name for n in readers if n.op_type == "Relu")]


def by_the_tool(
    model: onnx.ModelProto, x: np.ndarray, folder: Path, weight_type: str, **settings: Any
) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{model.graph.input[0].name: x}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx",
        folder / "int.onnx",
        Reader(),
        weight_type=QuantType[weight_type],
        activation_type=QuantType.QUInt8,
        **settings,
    )
    return onnx.load(folder / "int.onnx")


# ------------------------------------------------------------------------------------------------
# laws


def test_a_layer_whose_integers_are_its_floats_costs_nothing() -> None:
    """Whole numbers and scales of powers of two: nothing is rounded, and sums are exact."""
    model = network()
    for tensor in model.graph.initializer:
        array = rng.integers(-3, 4, tuple(tensor.dims)).astype(np.float32)
        array.flat[0] = 4
        tensor.CopyFrom(from_array(array, tensor.name))
    x = rng.integers(-8, 9, (20, 4)).astype(np.float32)
    int8 = with_integers(model, dict.fromkeys(WEIGHTS, 0.25), {"x": 0.5})
    made = report(model, int8, (x, Y[:20]))
    assert made.output_snr == math.inf
    assert made.int_loss == made.float_loss
    for layer in made.layers:
        assert layer.weight_snr == layer.output_snr == layer.alone_snr == math.inf
        assert layer.loss_increase == layer.noise == 0
    assert "exact" in str(made)
    assert "<svg" in made.svg()


@pytest.mark.parametrize("by", [None, "loss_increase", "alone_snr", "output_snr", "weight_snr"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_harmed_layer_comes_first_in_every_ranking(layer: str, by: str | None) -> None:
    """A scale that is 30 times too large leaves some eight of the 255 levels."""
    model = network()
    labels = outputs_of(model, {"x": X})[0]  # so that the loss is the noise
    int8 = quantized(model, **{f"{layer}__weight": 30})
    made = report(model, int8, (X, labels), loss="mse")
    if by == "output_snr":  # the layers after it inherit its noise
        first = min(LAYERS.index(name) for name in made.worst(3, by)[:1])
        assert first >= LAYERS.index(layer)
        made = dataclasses.replace(made, layers=made.layers[: LAYERS.index(layer) + 1])
    assert made.worst(1, by) == [layer]
    assert made.ranked(by)[0].levels < 12


@pytest.mark.parametrize("bits", [4, 6, 8, 10, 12])
def test_the_noise_of_a_random_weight_falls_by_six_decibels_a_bit(bits: int) -> None:
    """Rounding errors are uniform over a step s of an evenly distributed weight in [-1, 1]: the
    noise is s²/12, the signal 1/3, and s = 1/(2^(b-1) - 1). So the ratio is 4/s², which is
    6.02 b - 6.02 + 6.02 dB up to 20 log10(1 - 2^(1-b)). The mean of n squared errors has a relative
    standard deviation of sqrt(4/5)/sqrt(n), that of n squared weights the same: four of them, for
    n = 20000, are 4 · sqrt(2 · 0.8 / 20000) = 3.6 %, or 0.16 dB.
    """
    w = np.random.default_rng(bits).uniform(-1, 1, (200, 100)).astype(np.float32)
    w.flat[0] = 1
    model = oh.make_model(
        oh.make_graph(
            [oh.make_node("MatMul", ["x", "w"], ["y"], "fc")],
            "g",
            [oh.make_tensor_value_info("x", 1, ["N", 200])],
            [oh.make_tensor_value_info("y", 1, ["N", 100])],
            [from_array(w, "w")],
        ),
        opset_imports=[oh.make_opsetid("", 21)],
        ir_version=10,
    )
    step = 1 / (2 ** (bits - 1) - 1)
    int16 = with_integers(model, {"w": step}, dtype=np.int16)
    (layer,) = report(model, int16, np.ones((2, 200), np.float32), loss=None).layers
    expected = 20 * bits * math.log10(2) + 20 * math.log10(1 - 2 ** (1 - bits))
    assert layer.weight_snr == pytest.approx(expected, abs=0.16)
    assert layer.levels == 2**bits - 1 or bits > 8  # few weights for that many levels


def test_sums_do_not_depend_on_the_batch_size() -> None:
    model = network()
    int8 = quantized(model)
    weights = rng.uniform(0.5, 2, 50).astype(np.float32)
    first, *others = [report(model, int8, (X, Y, weights), batch_size=size) for size in (50, 7, 1)]
    for other in others:
        for one, two in zip(first.layers, other.layers):
            assert dataclasses.astuple(two)[3:] == pytest.approx(
                dataclasses.astuple(one)[3:], rel=1e-4, abs=1e-6
            )
        assert other.float_loss == pytest.approx(first.float_loss, rel=1e-6)


def test_order_of_rows_and_kind_of_data_do_not_matter() -> None:
    model = network()
    int8 = quantized(model)
    expected = report(model, int8)
    for data in (
        (X[::-1].copy(), Y[::-1].copy()),
        onnxfit.DataLoader(X, Y, batch_size=16),
        [(X[:20], Y[:20]), (X[20:], Y[20:])],
        {"x": X, "y": Y},
    ):
        made = report(model, int8, data)
        assert made.int_loss == pytest.approx(expected.int_loss, rel=1e-6)
        assert made.worst(3) == expected.worst(3)


def test_clipped_shares() -> None:
    model = network()
    made = report(model, quantized(model, fc1__weight=0.5, a0=0.25))
    every = scales(model)
    integers = tensors_of(model)["fc1.weight"] / np.float32(0.5 * every["fc1.weight"])
    beyond = (integers > 127.5) | (integers < -128.5)
    assert made.layers[1].clipped_weights == pytest.approx(beyond.mean())
    a0, a1 = values_of(model, "a0", "a1")
    clipped = (a0 > 127.5 * 0.25 * every["a0"]).sum()
    assert clipped
    assert made.layers[1].clipped_activations == pytest.approx(clipped / (a0.size + a1.size))
    assert made.layers[0].clipped_activations == pytest.approx(clipped / (a0.size + X.size))
    assert made.layers[2].clipped_activations == 0


# ------------------------------------------------------------------------------------------------
# forms of files


def test_weights_alone_may_be_integers() -> None:
    model = network()
    made = report(model, with_integers(model, {"fc1.weight": 0.01}))
    (layer,) = made.layers
    assert (layer.name, layer.clipped_activations) == ("fc1", None)
    assert layer.alone_snr == pytest.approx(made.output_snr, abs=0.01)


@pytest.mark.parametrize("largest", [7, -8])
def test_four_bits_in_blocks(largest: int) -> None:
    """Blocked integers of 4 bits, as onnxruntime writes language models; there, scales may be
    negative.
    """
    w = rng.normal(size=(8, 6)).astype(np.float32)
    model = mlp((8, 6))
    model.graph.initializer[0].CopyFrom(from_array(w, "fc0.weight"))
    scale = (np.abs(w).reshape(2, 4, 6).max(1) / largest).astype(np.float32)
    exact = np.rint(w / np.repeat(scale, 4, 0))
    integers = exact.clip(-8, 7).astype(int)
    int4 = onnx.ModelProto.FromString(model.SerializeToString())
    int4.graph.initializer.append(from_array(scale, "s"))
    int4.graph.initializer.append(
        oh.make_tensor("q", onnx.TensorProto.INT4, w.shape, integers.ravel())
    )
    rename_inputs(int4.graph, "fc0.weight", "d")
    node = oh.make_node("DequantizeLinear", ["q", "s"], ["d"], axis=0, block_size=4)
    int4.graph.node.insert(0, node)
    int4.opset_import[0].version = 21
    int4.ir_version = 10
    x = rng.normal(size=(9, 8)).astype(np.float32)
    (layer,) = report(model, int4, x, loss=None).layers
    assert layer.weight_snr == pytest.approx(
        decibels(w, integers * np.repeat(scale, 4, 0)), abs=1e-3
    )
    assert layer.alone_snr == pytest.approx(
        decibels(outputs_of(model, {"x": x})[0], outputs_of(int4, {"x": x})[0]), abs=1e-2
    )
    assert layer.type == "int4"
    assert layer.clipped_weights == pytest.approx(((w / np.repeat(scale, 4, 0)) > 7.5).mean())


def test_old_files_list_their_weights_as_inputs() -> None:
    model = network()
    int8 = quantized(model)
    expected = report(model, int8)
    for proto in (model, int8):
        proto.graph.input.extend(
            oh.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer
        )
    assert report(model, int8) == expected


def test_a_weight_that_two_layers_read_is_rounded_in_one_alone() -> None:
    model = mlp((4, 4, 4), activation="Relu")
    rename_inputs(model.graph, "fc1.weight", "fc0.weight")
    del model.graph.initializer[2]
    int8 = with_integers(model, {"fc0.weight": 0.1})
    made = report(model, int8, X, loss=None)
    for layer in made.layers:
        alone = with_integers(model, {"fc0.weight": 0.1}, nodes={"fc0.weight": layer.name})
        expected = decibels(outputs_of(model, {"x": X})[0], outputs_of(alone, {"x": X})[0])
        assert layer.alone_snr == pytest.approx(expected, abs=0.05)


def test_a_residual_reads_the_rounded_value() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 4] y) { h = MatMul(x, w)  s = Add(h, x)  y = Relu(s) }"""
    )
    model.graph.initializer.append(from_array(rng.normal(size=(4, 4)).astype(np.float32), "w"))
    every = {"x": 0.05, "h": 0.1, "s": 0.1}
    int8 = with_integers(model, {"w": 0.02}, every)
    made = report(model, int8, X, loss=None)
    assert [(layer.name, layer.operator) for layer in made.layers] == [
        ("h", "MatMul"),
        ("s", "Add"),
    ]
    for layer, alone in zip(
        made.layers,
        (
            with_integers(model, {"w": 0.02}, {"x": 0.05, "h": 0.1}),
            with_integers(model, {}, every),
        ),
    ):
        expected = decibels(outputs_of(model, {"x": X})[0], outputs_of(alone, {"x": X})[0])
        assert layer.alone_snr == pytest.approx(expected, abs=0.05)
    assert made.layers[1].weight_snr is None
    assert made.layers[1].levels is None


def test_several_outputs_and_losses() -> None:
    model = two_outputs()
    x = rng.normal(size=(12, 1)).astype(np.float32)
    y = {"a": 2 * x, "b": x}
    int8 = with_integers(model, {"u": 0.3, "v": 0.3, "t": 0.3})
    made = report(model, int8, (x, y), loss={"a": "mse", "b": "mse"})
    exact = np.float64([1, 2, 3])
    rounded = np.float64([0.9, 2.1, 3])
    ratio = 10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum())
    assert made.output_snr == pytest.approx(ratio, abs=1e-3)
    square = float((x.astype(np.float64) ** 2).mean())
    assert made.float_loss == pytest.approx(2 * square, rel=1e-5)
    assert made.int_loss == pytest.approx((1.1**2 + 1.1**2) * square, rel=1e-5)


def test_paths_and_bytes_are_the_same_models(tmp_path: Path) -> None:
    model = network()
    int8 = quantized(model)
    onnx.save(model, tmp_path / "float.onnx")
    from_files = report(tmp_path / "float.onnx", int8.SerializeToString())
    assert from_files == report(model, int8)


def test_models_stay_as_they_are() -> None:
    model = network()
    int8 = quantized(model)
    before = model.SerializeToString(), int8.SerializeToString()
    report(model, int8)
    assert (model.SerializeToString(), int8.SerializeToString()) == before


# ------------------------------------------------------------------------------------------------
# errors


def folded() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A model with BatchNormalization, and integers of one where it has been folded."""
    model = convolutional()
    other = convolutional(batch_norm=False)
    return model, with_integers(other, {"fc.weight": 0.1})


def wrong_shape() -> onnx.ModelProto:
    other = mlp((4, 16, 16, 3), activation="Relu")
    other.graph.initializer[2].CopyFrom(from_array(np.ones((16, 2), np.float32), "fc1.weight"))
    return with_integers(other, {"fc1.weight": 0.1})


def renamed() -> onnx.ModelProto:
    int8 = quantized(network())
    for node in int8.graph.node:
        if node.name == "fc1":
            node.name, node.output[0] = "fcx", "hx"
        node.input[:] = ["hx" if n == "h1" else n for n in node.input]
    return int8


def without_scales() -> onnx.ModelProto:
    """ONNX's checker does not read operators of onnxruntime's own domain."""
    int8 = quantized(network())
    for node in int8.graph.node:
        if node.op_type.endswith("quantizeLinear"):
            node.domain = "com.microsoft"
            del node.input[1:]
    return int8


def dynamic() -> onnx.ModelProto:
    int8 = quantized(network())
    scale = oh.make_node("Abs", ["a0.scale"], ["a0.dynamic"])
    rename_inputs(int8.graph, "a0.scale", "a0.dynamic")
    int8.graph.node.insert(0, scale)
    scale.input[0] = "a0.scale"
    return int8


@pytest.mark.parametrize(
    ("int_model", "message"),
    [
        (network, "has no DequantizeLinear.*quant_format=QuantFormat.QDQ"),
        (wrong_shape, r"'fc1.weight' of shape \[16, 16\] in the float.*of shape \[16, 2\]"),
        (renamed, "quantized Gemm 'fcx', which the float model lacks. Did you mean 'fc"),
        (dynamic, "'a0.dynamic', which is computed at run time"),
        (lambda: with_integers(two_outputs(), {"u": 0.1}), "has the outputs y, but the integer"),
        (without_scales, "has no DequantizeLinear"),
        (lambda: with_integers(network(), {}, {"x": 0.1}), "quantizes no weight, and no value"),
    ],
)
def test_integer_models_that_do_not_fit(int_model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        report(network(), int_model())


def test_an_integer_model_of_other_shapes() -> None:
    model = mlp((4, 4))
    int8 = with_integers(model, {"fc0.weight": 0.1})
    gemm = next(node for node in int8.graph.node if node.op_type == "Gemm")
    flatten = oh.make_node("Flatten", ["y.wide"], ["y"], axis=0)
    gemm.output[0] = "y.wide"
    int8.graph.node.append(flatten)
    int8.graph.output[0].CopyFrom(oh.make_tensor_value_info("y", 1, [1, 16]))
    with pytest.raises(
        ModelError, match=r"with shape \[1, 16\], but the float model with shape \[4, 4\]"
    ):
        report(model, int8, X[:4], loss=None)


HOSTILE = {
    "axis": lambda node: node.attribute.append(oh.make_attribute("axis", 7)),
    "block_size": lambda node: node.attribute.append(oh.make_attribute("block_size", 2**40)),
    "no scale": lambda node: node.input.__delitem__(slice(1, None)),
    "domain": lambda node: setattr(node, "domain", "com.stranger"),
    "integers as a scale": lambda node: node.input.__setitem__(1, "fc1.weight.integers"),
    "floats as integers": lambda node: node.input.__setitem__(0, "fc0.bias"),
    "itself": lambda node: node.input.__setitem__(0, node.output[0]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_of_strangers(kind: str) -> None:
    int8 = with_integers(network(), {"fc1.weight": 0.1})
    node = next(n for n in int8.graph.node if n.op_type == "DequantizeLinear")
    scale = next(t for t in int8.graph.initializer if t.name == "fc1.weight.scale")
    scale.CopyFrom(from_array(np.full(16, 0.1, np.float32), scale.name))
    zero = next(t for t in int8.graph.initializer if t.name == "fc1.weight.zero")
    zero.CopyFrom(from_array(np.zeros(16, np.int8), zero.name))
    assert report(network(), int8).layers
    HOSTILE[kind](node)
    with pytest.raises(ModelError):
        report(network(), int8)


def test_a_normalization_of_another_model_is_no_partner() -> None:
    with pytest.raises(ModelError, match="The integer model lacks Conv"):
        report(*folded(), rng.normal(size=(2, 1, 8, 8)), loss=None)


def test_errors_of_data_and_loss() -> None:
    model = network()
    int8 = quantized(model)
    with pytest.raises(DataError, match="has no labels"):
        report(model, int8, (X,))
    with pytest.raises(DataError, match="x: float32"):
        report(model, int8, X[:, :3], loss=None)
    with pytest.raises(DataError, match="is empty"):
        report(model, int8, [], loss=None)
    nan = X.copy()
    nan[3, 1] = np.nan
    with pytest.raises(DataError, match="float model computes NaN or infinity in 'y'"):
        report(model, int8, nan, loss=None)
    with pytest.raises(UnknownNameError, match="No loss is called"):
        report(model, int8, loss="cross_entropi")
    with pytest.raises(SettingError, match="data must be"):
        report(model, int8, (X, Y, None, None))
    with pytest.raises(SettingError, match="verbose"):
        report(model, int8, verbose=2)


def test_a_model_that_overflows_in_integers() -> None:
    """Rounding makes 2.2e38 to 3.3e38, which times 1.05 is more than the largest float."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 4] y)
        { h = Mul(x, w)  y = Mul(h, v) }"""
    )
    for name, value in (("w", 2.2e38), ("v", 1e-38)):
        model.graph.initializer.append(from_array(np.full(4, value, np.float32), name))
    int8 = with_integers(model, {"w": 3.3e38})
    with pytest.raises(ModelError, match="integer model computes NaN or infinity in 'y'"):
        report(model, int8, np.full((2, 4), 1.05, np.float32), loss=None)


def test_a_scale_that_is_not_finite() -> None:
    int8 = quantized(network())
    scale = next(t for t in int8.graph.initializer if t.name == "fc1.weight.scale")
    scale.CopyFrom(from_array(np.float32("nan"), scale.name))
    with pytest.raises(ModelError, match=r"'fc1.weight.dq' has a scale that is NaN or infinite"):
        report(network(), int8)


# ------------------------------------------------------------------------------------------------
# the report


def made_up(layers: int, loss: bool = True) -> QuantizationReport:
    from onnxfit.tools.quantization import QuantizedLayer

    return QuantizationReport(
        tuple(
            QuantizedLayer(
                name=f"/encoder/encoder.layers.{i}/attention/self_attention/q_proj/ConvTranspose",
                operator="ConvTranspose",
                type="int8",
                weight_snr=-10.0 - i,
                output_snr=-20.0 - i,
                alone_snr=(i * 37 % layers) - 30.0,
                alone_loss=1.0,
                loss_increase=-1.23456e-5 * ((i * 37) % layers) if loss else None,
                clipped_weights=1.0,
                clipped_activations=0.1,
                levels=3,
            )
            for i in range(layers)
        ),
        rows=1_000_000,
        output_snr=-12.3,
        float_loss=1.2345e-5 if loss else None,
        int_loss=1.2345e5 if loss else None,
    )


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("layers", [1, 30, 31, 100])
def test_the_table_fits_a_terminal(layers: int, loss: bool) -> None:
    lines = str(made_up(layers, loss)).splitlines()
    assert max(map(len, lines)) <= 80
    shown = min(layers, 30)
    assert len(lines) == 2 + 2 + shown + 1 + 3
    assert any(f"… {layers - 29} more layers" in line for line in lines) == (layers > 30)


def test_rankings() -> None:
    made = made_up(7)
    assert made.worst(100) == [layer.name for layer in made.ranked()]
    assert [layer.alone_snr for layer in made.ranked("alone_snr")] == [i - 30.0 for i in range(7)]
    increases = [layer.loss_increase for layer in made.ranked()]
    assert increases == sorted(increases, reverse=True)
    with pytest.raises(UnknownNameError, match="Did you mean 'alone_snr'"):
        made.worst(1, "alone")
    with pytest.raises(SettingError, match="at least 1"):
        made.worst(0)
    with pytest.raises(SettingError, match="needs a loss, but the report was made without one"):
        made_up(2, loss=False).ranked("loss_increase")


def test_the_picture_has_a_bar_for_each_layer(tmp_path: Path) -> None:
    import xml.etree.ElementTree as ElementTree

    made = made_up(60)
    made.save(tmp_path / "report.svg")
    root = ElementTree.parse(tmp_path / "report.svg").getroot()
    bars = [e for e in root if e.tag.endswith("rect")][1:]
    assert len(bars) == 2 * 60
    width = float(root.get("width"))
    assert all(
        0 <= float(b.get("x")) <= float(b.get("x")) + float(b.get("width")) <= width for b in bars
    )
    noise = [float(b.get("width")) for b in bars[:60]]
    ranked = [layer.noise for layer in made.ranked()]
    assert np.array_equal(np.argsort(noise, kind="stable"), np.argsort(ranked, kind="stable"))


def test_files_of_a_report(tmp_path: Path) -> None:
    made = made_up(50)
    made.save(tmp_path / "report.TXT")
    text = (tmp_path / "report.TXT").read_text(encoding="utf-8")
    assert text.count("ConvTr") + text.count("Transpose") >= 50
    assert "more layers" not in text
    with pytest.raises(SettingError, match=r"must end in .svg or .txt"):
        made.save(tmp_path / "report.png")


def test_names_of_strangers_are_escaped() -> None:
    layer = dataclasses.replace(made_up(1).layers[0], name='<script>"&\x1b[31m')
    made = dataclasses.replace(made_up(1), layers=(layer,))
    assert "<script>" not in made._repr_html_() + made.svg()
    assert "\x1b" not in str(made) + made.svg()


@pytest.mark.parametrize("widths", [(4, 3), (4, 8, 8, 8, 8, 8, 3)])
def test_layers_share_their_sessions(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for the float model and each layer alone, one for the integers, one for the loss."""
    compiled = compiled_graphs(monkeypatch)
    model = mlp(widths)
    every = {t.name: 0.1 for t in model.graph.initializer if t.name.endswith("weight")}
    made = report(model, with_integers(model, every), batch_size=7)
    assert len(made.layers) == len(widths) - 1
    assert sorted(compiled) == ["integer", "layer by layer", "loss"]


def test_a_progress_bar_counts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    report(model, quantized(model), verbose=1, batch_size=25)
    assert "10/10" in capsys.readouterr().err
    report(model, quantized(model))
    assert capsys.readouterr().err == ""


def test_activations_that_quantize_leaves_in_the_file() -> None:
    """onnxruntime 1.19 removed a Relu, and with it the value before, which the report observes."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 4] x) => (float[N, 3] y) { h = Gemm(x, w, b) a = Relu(h) y = Gemm(a, v, c) }""")
    for name, shape in {"w": (4, 8), "b": (8,), "v": (8, 3), "c": (3,)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = rng.standard_normal((40, 4)).astype(np.float32)
    report = onnxfit.quantization_report(model, onnxfit.quantize(model, x, verbose=0), x, verbose=0)
    assert len(report.layers) == 2
    assert report.output_snr > 20


def test_a_folded_transpose_of_a_weight_has_a_layer_in_the_report() -> None:
    """onnxruntime computes Transpose(w) before it quantizes."""
    w = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    graph = oh.make_graph(
        [
            oh.make_node("Transpose", ["w"], ["wt"], "turn", perm=[1, 0]),
            oh.make_node("MatMul", ["x", "wt"], ["y"], "multiply"),
        ],
        "g",
        [oh.make_tensor_value_info("x", 1, ["N", 4])],
        [oh.make_tensor_value_info("y", 1, ["N", 3])],
        [from_array(w, "w")],
    )
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=8)
    integers = onnxfit.quantize(model, X, verbose=0)
    assert "Transpose" not in {node.op_type for node in integers.graph.node}
    report = onnxfit.quantization_report(model, integers, X, verbose=0)
    (layer,) = report.layers
    assert layer.name == "multiply"
