"""Operators of integers as operators of floats: the same integers, and weights that can train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnxruntime
import pytest
from onnx import TensorProto
from onnx.numpy_helper import from_array, to_array

from examples.models import convolutional, dense
from onnxfit.gradients.gradient_model import gradient_model
from onnxfit.trainable.quantized.conversion import CONVERSIONS, TYPED_BY
from onnxfit.trainable.quantized.qoperators import remaining_qoperators, to_qdq
from tests.trainable.quantized.integer_files import without_overflow
from tests.trainable.quantized.qoperator_cases import (
    CASES,
    MICROSOFT,
    Array,
    Random,
    model_of,
    model_of_nodes,
)

LEVELS = {
    "plain": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "optimized": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# LSTM does not round the hidden state before each step: half a level of 1 / 127 at most
ATOL = {"DynamicQuantizeLSTM": 4e-3}
WITHOUT_KERNEL = {"QLinearReduceMean"}
IN_QDQ_FORM = {"DequantizeLinear"}


def run(model: onnx.ModelProto, feeds: dict[str, Array], level: str = "plain") -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = LEVELS[level]
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def initializers(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def dequantized(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Initializer -> the DequantizeLinear that reads it."""
    names = initializers(model)
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    return {node.input[0]: node for node in nodes if node.input[0] in names}


def assert_almost_equal_integers(found: Array, expected: Array) -> None:
    """Equal, but for at most one value in a hundred, which is one level away."""
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert difference.max(initial=0) <= 1
    assert np.count_nonzero(difference) <= found.size // 100


# --------------------------------------------------------------------------------------------------
# Laws of every conversion


def test_every_conversion_has_cases() -> None:
    converted = {op_type for _, op_type in CONVERSIONS}
    assert converted - WITHOUT_KERNEL - IN_QDQ_FORM == set(CASES)


@without_overflow
@pytest.mark.parametrize("op_type", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_outputs_stay(op_type: str, level: str) -> None:
    inside = []
    for model, feeds in (case for seed in range(3) for case in CASES[op_type](Random(seed))):
        converted = to_qdq(model)
        assert op_type not in operators(converted)
        assert remaining_qoperators(model) == {}
        for found, expected in zip(run(converted, feeds, level), run(model, feeds)):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if found.dtype in (np.uint8, np.int8):
                limits = np.iinfo(found.dtype)
                inside.append(np.mean((expected > limits.min) & (expected < limits.max)))
                assert_almost_equal_integers(found, expected)
            else:
                atol = ATOL.get(op_type, 2e-5)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=atol)
    assert not inside or np.mean(inside) > 0.5  # clamped values would agree anyway


@pytest.mark.parametrize("op_type", CASES)
def test_names_stay_and_the_argument_too(op_type: str) -> None:
    for model, _ in CASES[op_type](Random(0)):
        before = model.SerializeToString(deterministic=True)
        converted = to_qdq(model)
        assert model.SerializeToString(deterministic=True) == before
        assert converted.graph.input == model.graph.input
        assert converted.graph.output == model.graph.output
        new = initializers(converted)
        for name, tensor in initializers(model).items():
            assert new[name] == tensor
        assert to_qdq(converted) is converted


@pytest.mark.parametrize("op_type", CASES)
def test_integer_weights_are_behind_dequantize_linear(op_type: str) -> None:
    """So that training finds them."""
    for model, _ in CASES[op_type](Random(0)):
        weights = {
            name
            for name, tensor in initializers(model).items()
            if not name.endswith("_zero") and tensor.data_type != TensorProto.FLOAT
        }
        assert weights == set(dequantized(to_qdq(model)))


# --------------------------------------------------------------------------------------------------
# The numbers, by NumPy's integers


def levels_of(q: Array, zero: Array) -> Array:
    return q.astype(np.int64) - zero.astype(np.int64)


def test_a_matmul_is_that_of_exact_integers() -> None:
    for model, feeds in CASES["QLinearMatMul"](Random(1)):
        a = {name: to_array(tensor) for name, tensor in initializers(model).items()} | feeds
        product = levels_of(a["x"], a["x_zero"]) @ levels_of(a["w"], a["w_zero"])
        factor = a["x_scale"].astype(float) * a["w_scale"] / a["y_scale"]
        limits = np.iinfo(a["x"].dtype)
        exact = np.clip(np.rint(product * factor) + a["y_zero"], limits.min, limits.max)
        assert_almost_equal_integers(run(to_qdq(model), feeds)[0], exact)


def test_the_bias_has_the_scale_of_the_product() -> None:
    """y = alpha sA sB (A B + C), exact in NumPy's integers."""
    *_, (model, feeds) = CASES["QGemm"](Random(0))
    a = {name: to_array(tensor) for name, tensor in initializers(model).items()} | feeds
    product = levels_of(a["x"], a["x_zero"]).T @ levels_of(a["w"], a["w_zero"]).T + a["bias"]
    exact = 0.75 * a["x_scale"].astype(float) * a["w_scale"] * product
    converted = to_qdq(model)
    np.testing.assert_allclose(run(converted, feeds)[0], exact, rtol=1e-5, atol=1e-4)
    scale = initializers(converted)[dequantized(converted)["bias"].input[1]]
    assert scale.name == "bias/scale"
    np.testing.assert_array_equal(to_array(scale), a["x_scale"] * a["w_scale"])


def test_the_scale_of_a_bias_is_per_channel_where_that_of_the_weights_is() -> None:
    _, (model, _), *_ = CASES["QLinearConv"](Random(0))
    a = {name: to_array(tensor) for name, tensor in initializers(model).items()}
    converted = to_qdq(model)
    node = dequantized(converted)["bias"]
    np.testing.assert_array_equal(
        to_array(initializers(converted)[node.input[1]]), a["x_scale"] * a["w_scale"]
    )
    assert {(b.name, b.i) for b in node.attribute} == {("axis", 0)}


# --------------------------------------------------------------------------------------------------
# Files by onnxruntime's tool


Quantize = Callable[[onnx.ModelProto, str, bool], onnx.ModelProto]


@pytest.fixture
def quantize(tmp_path: Path) -> Quantize:
    """Quantize a model by onnxruntime's tool, statically on random inputs, or dynamically."""
    tool = pytest.importorskip("onnxruntime.quantization")

    class Reader(tool.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self, feeds: dict[str, Array]) -> None:
            self.batches = iter([feeds])

        def get_next(self) -> Any:
            return next(self.batches, None)

    def quantized(model: onnx.ModelProto, kind: str, per_channel: bool) -> onnx.ModelProto:
        source, target = tmp_path / "float.onnx", tmp_path / "integers.onnx"
        onnx.save(model, source)
        if kind == "dynamic":
            tool.quantize_dynamic(source, target, per_channel=per_channel)
        else:
            tool.quantize_static(
                source,
                target,
                Reader(inputs_of(model)),
                quant_format=tool.QuantFormat.QOperator,
                per_channel=per_channel,
                activation_type=getattr(tool.QuantType, kind),
            )
        return onnx.load(target)

    return quantized


def inputs_of(model: onnx.ModelProto, rows: int = 16) -> dict[str, Array]:
    (value,) = model.graph.input
    rng = np.random.default_rng(1)
    sizes = [d.dim_value or rows for d in value.type.tensor_type.shape.dim]
    if value.type.tensor_type.elem_type == TensorProto.INT64:
        return {value.name: rng.integers(0, 20, sizes)}
    return {value.name: rng.normal(size=sizes).astype(np.float32)}


def transformer() -> onnx.ModelProto:
    """One block of attention over an embedding, with two heads."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (int64[N, 6] ids) => (float[N, 3] y)
        <int64[4] heads = {0, 6, 2, 4}, int64[3] flat = {0, 6, 8}, float half = {0.5}> {
            e = Gather(table, ids)
            q0 = MatMul(e, wq)  q1 = Reshape(q0, heads)  q = Transpose<perm=[0, 2, 1, 3]>(q1)
            k0 = MatMul(e, wk)  k1 = Reshape(k0, heads)  k = Transpose<perm=[0, 2, 3, 1]>(k1)
            v0 = MatMul(e, wv)  v1 = Reshape(v0, heads)  v = Transpose<perm=[0, 2, 1, 3]>(v1)
            s0 = MatMul(q, k)  s1 = Mul(s0, half)  s = Softmax<axis=-1>(s1)
            c0 = MatMul(s, v)  c1 = Transpose<perm=[0, 2, 1, 3]>(c0)  c = Reshape(c1, flat)
            r = Add(c, e)  m = ReduceMean<axes=[1], keepdims=0>(r)  y = Gemm(m, fw, fb) }"""
    )
    sizes = {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "table": (20, 8), "fw": (8, 3), "fb": (3,)}
    rng = np.random.default_rng(0)
    for name, shape in sizes.items():
        array = rng.normal(size=shape).astype(np.float32) / 2
        model.graph.initializer.append(from_array(array, name))
    return model


def recurrent() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[6, N, 5] x) => (float[1, N, 4] h) {
            y, h = LSTM<hidden_size=4>(x, w, r, b) }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w": (1, 16, 5), "r": (1, 16, 4), "b": (1, 32)}.items():
        array = rng.normal(size=shape).astype(np.float32) / 2
        model.graph.initializer.append(from_array(array, name))
    return model


def in_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The same nodes, of which every opset from 10 on has the same meaning."""
    model.opset_import[0].version = opset
    model.ir_version = 10 if opset == 21 else 8
    return model


@without_overflow
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QUInt8", "QInt8", "dynamic"])
@pytest.mark.parametrize(
    "build", [convolutional, lambda: dense(8, 16, 5), transformer], ids=["cnn", "mlp", "attention"]
)
def test_predictions_of_a_file_stay(
    build: Callable[[], onnx.ModelProto], kind: str, per_channel: bool, quantize: Quantize
) -> None:
    original = build()
    file = quantize(original, kind, per_channel)
    converted = to_qdq(file)
    assert remaining_qoperators(converted) == {}
    feeds = inputs_of(original)
    try:
        expected = run(file, feeds)[0]
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        # onnxruntime 1.19 has no ConvInteger for the int8 weights that its tool writes
        assert "ConvInteger" in operators(file)
        expected = run(original, feeds)[0]
        atol = 0.05 * np.ptp(expected)
    else:
        atol = 1e-5 if kind == "dynamic" else 0.0
    found = run(converted, feeds)[0]
    np.testing.assert_allclose(found, expected, atol=atol)
    weights = {n for n in initializers(file) if n.endswith("_quantized")}
    assert weights <= set(dequantized(converted))


@without_overflow
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_file_with_lstm_trains(quantize: Quantize, per_channel: bool) -> None:
    original = recurrent()
    feeds = inputs_of(original)
    file = quantize(original, "dynamic", per_channel)
    converted = to_qdq(file)
    assert remaining_qoperators(converted) == {}
    np.testing.assert_allclose(run(converted, feeds)[0], run(file, feeds)[0], atol=2e-3)


def test_an_lstm_of_two_directions_with_a_scale_for_each_column_stays() -> None:
    _, (model, _), _ = CASES["DynamicQuantizeLSTM"](Random(0))
    for name, value in (("w_scale", np.float32(0.01)), ("w_zero", np.int8(0))):
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.full((2, 16), value), name))
    assert to_qdq(model) is model
    (reason,) = remaining_qoperators(model).values()
    assert "'w' has a scale for each column of each of 2 directions" in reason


@without_overflow
@pytest.mark.parametrize("kind", ["QUInt8", "dynamic"])
@pytest.mark.parametrize("opset", [10, 11, 12, 13, 17, 19, 21])
def test_opsets(opset: int, kind: str, quantize: Quantize) -> None:
    """DequantizeLinear has scales per channel from 13 on; older files get the opset of training."""
    original = in_opset(dense(8, 16, 5), opset)
    file = quantize(original, kind, True)
    converted = to_qdq(file)
    onnx.checker.check_model(converted, full_check=True)
    assert converted.opset_import[0].version == (opset if opset >= 13 else 21)
    assert opset >= 13 or converted.ir_version >= 10
    assert remaining_qoperators(converted) == {}
    feeds = inputs_of(original)
    np.testing.assert_allclose(run(converted, feeds)[0], run(file, feeds)[0], atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Gradients


def with_float_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each integer weight as QuantizeLinear of a float of the same name."""
    unfolded = onnx.ModelProto()
    unfolded.CopyFrom(model)
    arrays = initializers(model)
    nodes = []
    for name, node in dequantized(model).items():
        axis = next((a.i for a in node.attribute), 0)
        scale = to_array(arrays[node.input[1]])
        q = to_array(arrays[name])
        zero = to_array(arrays[node.input[2]]) if len(node.input) > 2 else np.zeros_like(scale)
        shape = [-1 if i == axis else 1 for i in range(q.ndim)] if scale.size > 1 else []
        value = (
            scale.reshape(shape) * levels_of(q, zero).reshape(q.shape)
            if not shape
            else (
                scale.reshape(shape) * (q.astype(np.int64) - zero.astype(np.int64).reshape(shape))
            )
        )
        (tensor,) = [t for t in unfolded.graph.initializer if t.name == name]
        tensor.CopyFrom(from_array(value.astype(np.float32), name))
        for reader in unfolded.graph.node:
            if reader.op_type != "DequantizeLinear" or reader.input[0] != name:
                continue
            if q.dtype == np.int32:  # a bias is not rounded
                reader.CopyFrom(oh.make_node("Identity", [name], reader.output, reader.name))
                continue
            inputs = [name, *node.input[1:]]
            attributes = {"axis": axis} if shape else {}
            nodes.append(oh.make_node("QuantizeLinear", inputs, [f"{name}/q"], **attributes))
            reader.input[0] = f"{name}/q"
    rest = list(unfolded.graph.node)
    del unfolded.graph.node[:]
    unfolded.graph.node.extend([*nodes, *rest])
    return unfolded


@pytest.mark.parametrize("kind", ["QUInt8", "QInt8", "dynamic"])
def test_every_weight_of_a_file_has_a_gradient(kind: str, quantize: Quantize) -> None:
    """The straight-through gradient of 8 bits is near that of floats."""
    original = convolutional()
    training = with_float_weights(to_qdq(quantize(original, kind, True)))
    names = [n for n in initializers(training) if n.endswith(("_quantized", ".bias"))]
    assert len(names) == 6
    feeds = inputs_of(original)
    feeds["logits_grad"] = np.random.default_rng(2).normal(size=(16, 10)).astype(np.float32)
    found = gradients_of(training, names, feeds)
    floats = gradients_of(original, None, feeds)
    for name in names:
        gradient = found[name]
        expected = floats[name.removesuffix("_quantized").removesuffix("_Transposed")]
        if gradient.shape != expected.shape:  # the tool transposes the weights of a Gemm
            gradient = gradient.T
        cosine = np.vdot(gradient, expected) / np.linalg.norm(gradient) / np.linalg.norm(expected)
        assert cosine > 0.9


def gradients_of(
    model: onnx.ModelProto, names: list[str] | None, feeds: dict[str, Array]
) -> dict[str, Array]:
    computed = gradient_model(model, names)
    outputs = [value.name.removesuffix("_grad") for value in computed.graph.output]
    return dict(zip(outputs, run(computed, feeds)))


def test_the_gradient_passes_through_rounding_as_through_nothing() -> None:
    """dw = x^T dy where y and w are in range, with x as it was dequantized."""
    r = Random(0)
    names = {"x": r.normal(5, 8), "w": r.integers(np.int8, 8, 3), "s": np.float32(0.05)}
    names |= {"z": np.int8(3), "y_scale": np.float32(0.5), "w_zero": np.int8(0)}
    nodes = [
        oh.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        oh.make_node("QLinearMatMul", ["q", "s", "z", "w", "s", "w_zero", "y_scale", "z"], ["p"]),
        oh.make_node("DequantizeLinear", ["p", "y_scale", "z"], ["y"]),
    ]
    arrays = {name: np.asarray(array) for name, array in names.items()}
    model, feeds = model_of_nodes(nodes, arrays, {"y": np.float32})
    gradients = gradient_model(with_float_weights(to_qdq(model)), "w")
    dy = r.normal(5, 3)
    y, dw = run(gradients, {**feeds, "y_grad": dy})
    x = 0.05 * (np.clip(np.rint(feeds["x"] / np.float32(0.05)) + 3, -128, 127) - 3)
    levels = np.rint(x @ (0.05 * arrays["w"].astype(float)) / 0.5) + 3
    in_range = (levels >= -128) & (levels <= 127)
    np.testing.assert_allclose(y, 0.5 * (np.clip(levels, -128, 127) - 3))
    np.testing.assert_allclose(dw, x.T @ (dy * in_range), rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Odd files


def unary_model(**replaced: Any) -> tuple[onnx.ModelProto, dict[str, Array]]:
    r = Random(0)
    inputs = {
        "x": r.integers(np.int8, 4, 6),
        "x_scale": r.scale(0.02),
        "x_zero": r.zero(np.int8),
        "y_scale": r.scale(0.02),
        "y_zero": r.zero(np.int8),
    } | replaced
    return model_of("QLinearLeakyRelu", inputs, {"y": np.int8})


def test_a_model_without_integers_is_returned_itself() -> None:
    model = dense(4, 2)
    assert to_qdq(model) is model
    assert remaining_qoperators(model) == {}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_absent_zero_points_are_zeros_of_the_type_of_the_input(dtype: Any) -> None:
    r = Random(0)
    inputs: dict[str, Array | None] = {
        "x": r.integers(dtype, 4, 6),
        "x_scale": r.scale(0.02),
        "x_zero": None,
        "y_scale": r.scale(0.02),
        "y_zero": None,
    }
    model, feeds = model_of("QLinearLeakyRelu", inputs, {"y": dtype})
    assert model.graph.node[0].input[4] == ""  # shorter, onnxruntime ends the process
    np.testing.assert_array_equal(run(to_qdq(model), feeds)[0], run(model, feeds)[0])


def test_a_zero_point_absent_from_an_output_of_unknown_type_leaves_the_node() -> None:
    model, _ = unary_model(y_zero=None)
    model.graph.node[0].input[0] = "elsewhere"
    assert to_qdq(model) is model
    assert remaining_qoperators(model) == {
        "it": "its output has no zero point, and the element type of 'elsewhere' is unknown"
    }


@pytest.mark.parametrize("op_type", ["QuantizeLinear", *sorted(set(TYPED_BY) & set(CASES))])
def test_the_type_of_a_computed_input_is_that_of_its_zero_point(op_type: str) -> None:
    r = Random(0)
    if op_type == "QuantizeLinear":
        inputs: dict[str, Array | None] = {"x": r.normal(4, 6), "s": r.scale(0.02)}
        inputs["z"] = r.zero(np.int8)
        cases = [model_of("QuantizeLinear", inputs, {"y": np.int8}, domain="")]
    else:
        cases = list(CASES[op_type](r))
    signed = [case for case in cases if elem_type(case[0].graph.output[0]) == TensorProto.INT8]
    assert signed
    for model, feeds in signed:
        names = ["y", "last_scale", "", "last_scale", ""]
        model.graph.node.append(oh.make_node("QLinearSigmoid", names, ["last"], domain=MICROSOFT))
        model.graph.initializer.append(from_array(np.float32(0.02), "last_scale"))
        model.graph.output[0].name = "last"
        assert_almost_equal_integers(run(to_qdq(model), feeds)[0], run(model, feeds)[0])


def elem_type(value: onnx.ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type


@without_overflow
def test_a_bias_may_have_rows() -> None:
    _, (model, feeds), *_ = CASES["QGemm"](Random(0))
    (tensor,) = [t for t in model.graph.initializer if t.name == "bias"]
    tensor.CopyFrom(from_array(to_array(tensor)[None], "bias"))
    assert_almost_equal_integers(run(to_qdq(model), feeds)[0], run(model, feeds)[0])


def test_a_node_that_stays_shares_nothing() -> None:
    """The first node fails at its last scale, after it has dequantized x."""
    model, feeds = unary_model()
    model.graph.node.add().CopyFrom(model.graph.node[0])
    first = model.graph.node[0]
    first.name, first.output[0], first.input[3] = "first", "z", "computed"
    model.graph.node.insert(0, oh.make_node("Abs", ["y_scale"], ["computed"]))
    model.graph.output.append(oh.make_tensor_value_info("z", TensorProto.INT8, None))
    converted = to_qdq(model)
    assert list(remaining_qoperators(converted)) == ["first"]
    for found, expected in zip(run(converted, feeds), run(model, feeds)):
        np.testing.assert_array_equal(found, expected)


def test_a_computed_scale_leaves_the_node() -> None:
    model, _ = unary_model()
    node = oh.make_node("Abs", ["y_scale"], ["computed"])
    model.graph.node.insert(0, node)
    model.graph.node[1].input[3] = "computed"
    assert to_qdq(model) is model
    assert remaining_qoperators(model) == {
        "it": "the scale 'computed' of 'y' is computed when the model runs"
    }


def test_a_node_that_stays_does_not_keep_others_from_conversion() -> None:
    model, feeds = unary_model()
    model.graph.node.add().CopyFrom(model.graph.node[0])
    second = model.graph.node[1]
    second.name, second.input[0], second.output[0] = "second", "y", "z"
    second.input[1] = "computed"
    model.graph.node.insert(0, oh.make_node("Abs", ["y_scale"], ["computed"]))
    model.graph.output.append(oh.make_tensor_value_info("z", TensorProto.INT8, None))
    converted = to_qdq(model)
    assert operators(converted) == [
        "Abs", "DequantizeLinear", "LeakyRelu", "QuantizeLinear", "QLinearLeakyRelu",
    ]  # fmt: skip
    assert list(remaining_qoperators(converted)) == ["second"]
    for found, expected in zip(run(converted, feeds), run(model, feeds)):
        np.testing.assert_array_equal(found, expected)


def test_scales_in_constant_nodes() -> None:
    model, feeds = unary_model()
    expected = run(model, feeds)[0]
    for tensor in list(model.graph.initializer):
        model.graph.initializer.remove(tensor)
        node = oh.make_node("Constant", [], [tensor.name], value=tensor)
        model.graph.node.insert(0, node)
    np.testing.assert_array_equal(run(to_qdq(model), feeds)[0], expected)


@without_overflow
def test_vectors_of_one_zero_point_fit_one_scale_and_many() -> None:
    """onnxruntime reads equal zero points of channels as one, and one as equal ones."""
    (_, (model, feeds), *_) = CASES["QLinearConv"](Random(0))
    for scales, zeros in (((), (4,)), ((4,), ()), ((1,), (4,)), ((4,), (1,))):
        arrays = {"w_scale": np.full(scales, 0.01), "w_zero": np.full(zeros, 3)}
        for name, dtype in (("w_scale", np.float32), ("w_zero", np.int8)):
            (tensor,) = [t for t in model.graph.initializer if t.name == name]
            tensor.CopyFrom(from_array(arrays[name].astype(dtype), name))
        assert_almost_equal_integers(run(to_qdq(model), feeds)[0], run(model, feeds)[0])


def test_shared_weights_are_dequantized_once() -> None:
    r = Random(0)
    quantized = {"s": r.scale(0.02), "z": r.zero(np.int8)}
    arrays = {"x": r.integers(np.int8, 4, 6), "w": r.integers(np.int8, 6, 6), **quantized}
    ends = ["s", "z", "w", "s", "z", "s", "z"]
    nodes = [
        oh.make_node("QLinearMatMul", ["x", *ends], ["h"], "one"),
        oh.make_node("QLinearMatMul", ["h", *ends], ["y"], "two"),
    ]
    model, feeds = model_of_nodes(nodes, arrays, {"y": np.int8})
    converted = to_qdq(model)
    assert operators(converted).count("DequantizeLinear") == 3  # x, h and w
    np.testing.assert_array_equal(run(converted, feeds)[0], run(model, feeds)[0])


def test_one_weight_with_two_scales_is_dequantized_by_each() -> None:
    r = Random(0)
    arrays = {
        "x": r.integers(np.int8, 4, 6),
        "w": r.integers(np.int8, 6, 6),
        "s": r.scale(0.02),
        "t": r.scale(0.02),
        "z": r.zero(np.int8),
    }
    nodes = [
        oh.make_node("QLinearMatMul", ["x", "s", "z", "w", "s", "z", "s", "z"], ["h"]),
        oh.make_node("QLinearMatMul", ["h", "s", "z", "w", "t", "z", "s", "z"], ["y"]),
    ]
    model, feeds = model_of_nodes(nodes, arrays, {"y": np.int8})
    np.testing.assert_array_equal(run(to_qdq(model), feeds)[0], run(model, feeds)[0])


def dynamic_model() -> tuple[onnx.ModelProto, dict[str, Array]]:
    return next(iter(CASES["MatMulInteger"](Random(0))))


def test_the_nodes_that_multiply_by_scales_go() -> None:
    model, _ = dynamic_model()
    assert operators(to_qdq(model)) == [
        "DynamicQuantizeLinear", "DequantizeLinear", "DequantizeLinear", "MatMul",
    ]  # fmt: skip


def test_scales_may_be_multiplied_one_after_the_other() -> None:
    model, feeds = dynamic_model()
    expected = run(model, feeds)[0]
    del model.graph.node[3:]
    model.graph.node.append(oh.make_node("Mul", ["w_scale", "y_cast"], ["half"]))
    model.graph.node.append(oh.make_node("Mul", ["half", "x_scale"], ["y"]))
    converted = to_qdq(model)
    assert "MatMul" in operators(converted)
    np.testing.assert_allclose(run(converted, feeds)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_product_of_scales_with_another_use_stays() -> None:
    model, feeds = dynamic_model()
    model.graph.output.append(oh.make_tensor_value_info("scales", TensorProto.FLOAT, None))
    converted = to_qdq(model)
    assert "Mul" in operators(converted)
    for found, expected in zip(run(converted, feeds), run(model, feeds)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def _int32_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(oh.make_tensor_value_info("y_q", TensorProto.INT32, None))


def _cast_to_double(model: onnx.ModelProto) -> None:
    model.graph.node[2].attribute[0].i = TensorProto.DOUBLE


def _no_multiplication(model: onnx.ModelProto) -> None:
    del model.graph.node[3:]
    model.graph.node[2].output[0] = "y"


def _other_scale(model: onnx.ModelProto) -> None:
    model.graph.node[3].input[0] = "w_scale"


def _scale_for_each_row(model: onnx.ModelProto) -> None:
    inputs = ["x", "x_scale", "x_zero"]
    model.graph.node[0].CopyFrom(oh.make_node("QuantizeLinear", inputs, ["q"], axis=0))


def _integers_from_outside(model: onnx.ModelProto) -> None:
    model.graph.node[1].input[0] = "outside"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_int32_output, "its output does not go into one Cast to float32"),
        (_cast_to_double, "its output does not go into one Cast to float32"),
        (_no_multiplication, "its output is not multiplied by two scales"),
        (_other_scale, "its output is not multiplied by the scales of its operands"),
        (_scale_for_each_row, "the scale of 'q' is unknown"),
        (_integers_from_outside, "the scale of 'outside' is unknown"),
    ],
)
def test_other_products_of_integers_stay(
    change: Callable[[onnx.ModelProto], None], reason: str
) -> None:
    model, _ = dynamic_model()
    change(model)
    assert to_qdq(model) is model
    assert remaining_qoperators(model) == {"it": reason}


def test_an_operator_in_a_body_is_listed() -> None:
    model, _ = unary_model()
    node = model.graph.node[0]
    nodes = [node, oh.make_node("DequantizeLinear", ["x", "x_scale"], ["real"])]
    body = oh.make_graph(nodes, "b", [], [oh.make_tensor_value_info("y", TensorProto.INT8, None)])
    outer = oh.make_node("If", ["flag"], ["out"], then_branch=body, else_branch=body)
    model.graph.node[0].CopyFrom(outer)
    assert to_qdq(model) is model
    assert remaining_qoperators(model) == {"it": "it is in the body of an If, a Loop or a Scan"}


@pytest.mark.parametrize("op_type", sorted({op_type for _, op_type in CONVERSIONS}))
def test_a_node_with_too_few_inputs_stays(op_type: str) -> None:
    """onnxruntime says about it what it says about every model it does not read."""
    domains = {domain for domain, known in CONVERSIONS if known == op_type}
    for domain in domains:
        for inputs in ([], ["x"], ["x", ""]):
            node = oh.make_node(op_type, inputs, ["y"], "it", domain=domain)
            graph = oh.make_graph([node], "g", [], [])
            opsets = [oh.make_opsetid("", 17), oh.make_opsetid(MICROSOFT, 1)]
            model = oh.make_model(graph, opset_imports=opsets)
            converted = to_qdq(model)
            assert converted is model


def _text(name: str) -> onnx.TensorProto:
    return oh.make_tensor(name, TensorProto.STRING, [], [b"text"])


@pytest.mark.parametrize("op_type", CASES)
def test_hostile_tensors_and_attributes_leave_the_node(op_type: str) -> None:
    """Operators of com.microsoft have no schema in ONNX, so that its checker takes anything."""
    for model, _ in CASES[op_type](Random(0)):
        for tensor in initializers(model).values():
            hostile = onnx.ModelProto()
            hostile.CopyFrom(model)
            for other in hostile.graph.initializer:
                if other.name == tensor.name:
                    other.CopyFrom(_text(tensor.name))
            to_qdq(hostile)
        for node in model.graph.node:
            for attribute in list(node.attribute):
                attribute.CopyFrom(oh.make_attribute(attribute.name, "text"))
        to_qdq(model)
        remaining_qoperators(model)


def test_integers_that_are_moved_keep_their_scale() -> None:
    model, feeds = dynamic_model()
    expected = run(model, feeds)[0]
    for i, names in enumerate((["q", "moved"], ["moved", "back"])):
        model.graph.node.insert(1 + i, oh.make_node("Transpose", names[:1], names[1:]))
    model.graph.node[3].input[0] = "back"
    converted = to_qdq(model)
    assert "MatMul" in operators(converted)
    np.testing.assert_allclose(run(converted, feeds)[0], expected, rtol=1e-5, atol=1e-5)


def test_circles_and_nodes_without_inputs_end() -> None:
    model, _ = dynamic_model()
    model.graph.node[0].CopyFrom(oh.make_node("Transpose", ["q"], ["q"]))
    assert remaining_qoperators(model) == {"it": "the scale of 'q' is unknown"}
    model.graph.node[0].CopyFrom(oh.make_node("Transpose", [], ["q"]))
    assert remaining_qoperators(model) == {"it": "the scale of 'q' is unknown"}
    for position in (3, 4):
        model, _ = dynamic_model()
        model.graph.node[position].input.pop()
        assert to_qdq(model) is model


def test_channels_that_come_last_in_an_unknown_rank_leave_the_node() -> None:
    *_, (model, _) = CASES["QLinearGlobalAveragePool"](Random(0))
    model.graph.node[0].input[0] = "elsewhere"
    assert remaining_qoperators(model) == {
        "it": "the rank of 'elsewhere' is unknown, and its channels are the last axis"
    }


def test_a_scale_of_integers_from_elsewhere_leaves_the_node() -> None:
    _, (model, _), *_ = CASES["MatMulIntegerToFloat"](Random(0))
    model.graph.node[1].input[2] = "elsewhere"
    (reason,) = remaining_qoperators(model).values()
    assert reason == "the origin of the scale 'elsewhere' of 'q' is unknown"


def test_a_bias_without_an_entry_for_each_scale_leaves_the_node() -> None:
    _, (model, _), *_ = CASES["QGemm"](Random(0))
    (tensor,) = [t for t in model.graph.initializer if t.name == "bias"]
    tensor.CopyFrom(from_array(np.int32([7]), "bias"))
    assert remaining_qoperators(model) == {
        "it": "its bias 'bias' is not an initializer with an entry for each of the 6 scales in"
        " 'w_scale'"
    }


@pytest.mark.parametrize("zeros", [[1, 2], [1, 2, 3, 4]])
def test_zero_points_that_differ_need_as_many_scales(zeros: list[int]) -> None:
    (_, (model, _), *_) = CASES["QLinearConv"](Random(0))
    for name, array in {"w_scale": np.float32(0.01), "w_zero": np.int8(zeros)}.items():
        (tensor,) = [t for t in model.graph.initializer if t.name == name]
        tensor.CopyFrom(from_array(np.asarray(array), name))
    (reason,) = remaining_qoperators(model).values()
    assert reason == (
        f"the zero point 'w_zero' of 'w' has shape ({len(zeros)},), but its scale has shape ()"
    )


def test_rows_of_a_table_are_taken_after_it_is_dequantized() -> None:
    """So that the integers of an embedding can be trained."""
    r = Random(0)
    arrays = {
        "ids": r.rng.integers(0, 9, (2, 3)),
        "table": r.integers(np.uint8, 9, 6),
        "s": r.scale(0.02),
        "z": r.zero(np.uint8),
        "w": r.integers(np.uint8, 6, 4),
    }
    nodes = [
        oh.make_node("Gather", ["table", "ids"], ["q"]),
        oh.make_node("QLinearMatMul", ["q", "s", "z", "w", "s", "z", "s", "z"], ["y"]),
        oh.make_node("DequantizeLinear", ["q", "s", "z"], ["rows"]),
    ]
    outputs = {"y": np.uint8, "rows": np.float32}
    model, feeds = model_of_nodes(nodes, arrays, outputs, ("ids",))
    converted = to_qdq(model)
    assert set(dequantized(converted)) == {"table", "w"}
    assert all(
        node.input[0] != "table" for node in converted.graph.node if node.op_type == "Gather"
    )
    for found, expected in zip(run(converted, feeds), run(model, feeds)):
        np.testing.assert_array_equal(found, expected)
    assert to_qdq(converted) is converted


@without_overflow
def test_names_that_conversions_would_give_may_be_in_use() -> None:
    _, (model, feeds), *_ = CASES["QGemm"](Random(0))
    expected = run(model, feeds)[0]
    model.graph.initializer.append(from_array(np.float32(1), "bias/scale"))
    model.graph.node[0].name = "y"
    assert_almost_equal_integers(run(to_qdq(model), feeds)[0], expected)
