"""`onnxfit.dequantize`: the float model that a quantized one stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import ModelError, UnsupportedError
from onnxfit.trainable.quantized.qoperators import to_qdq
from tests.tools.quantization.test_quantize import quantized
from tests.trainable.quantized.graphs import (
    DYNAMIC_FILES,
    MODELS,
    OPTIONS,
    WEIGHTS_ONLY,
    dynamic_file,
    network,
    outputs_of,
    parsed,
    relative_error,
    rows,
    tensors_of,
)

CONVERSIONS = {"QuantizeLinear", "DequantizeLinear"}


def kinds_of(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float model, which has no conversions, and the inputs and outputs of the model."""
    before = model.SerializeToString()
    floats = onnxfit.dequantize(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(floats, full_check=True)
    assert not CONVERSIONS.intersection(kinds_of(floats))
    assert [*floats.graph.input] == [*model.graph.input]
    assert [*floats.graph.output] == [*model.graph.output]
    return floats


@pytest.mark.parametrize("options", WEIGHTS_ONLY)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_integer_weights_alone_computes_the_same(name: str, options: str) -> None:
    model, inputs = MODELS[name]()
    result = quantized(model, inputs, **WEIGHTS_ONLY[options])
    expected = outputs_of(result, inputs, exact=True)
    actual = outputs_of(checked(result), inputs, exact=True)
    assert relative_error(actual, expected) < 1e-6


def weights_by_onnxruntime(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """What the DequantizeLinear nodes of constants compute, by the name before."""
    tensors = {tensor.name for tensor in model.graph.initializer}
    nodes = [
        n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in tensors
    ]
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.node[:], part.graph.input[:], part.graph.output[:], part.graph.value_info[:]
    part.graph.node.extend(nodes)
    for node in nodes:
        value = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
        part.graph.output.append(value)
    arrays = outputs_of(part, {}, exact=True)
    names = [node.input[0].removesuffix("_quantized") for node in nodes]
    return dict(zip(names, arrays, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_exactly_what_the_integers_stand_for(name: str, options: str) -> None:
    model, inputs = MODELS[name]()
    result = quantized(model, inputs, **OPTIONS[options])
    floats = checked(result)
    expected = weights_by_onnxruntime(result)
    actual = tensors_of(floats)
    assert expected.keys() <= actual.keys()
    for weight, array in expected.items():
        # a body that reads the weight keeps the floats, under the name
        assert actual.get(f"{weight}_2", actual[weight]).tobytes() == array.tobytes()
    # without rounding, only the weights' error is left
    assert relative_error(outputs_of(floats, inputs), outputs_of(result, inputs, exact=True)) < 0.35


def test_names_and_operators_are_those_of_the_float_model() -> None:
    model = parsed(
        "g (float[N, 4] x) => (float[N, 2] y) { h = Gemm(x, u, c)  r = Relu(h)  y = MatMul(r, w) }",
        u=(4, 3),
        c=(3,),
        w=(3, 2),
    )
    floats = checked(onnxfit.quantize(model, rows(20, 4)))
    assert kinds_of(floats) == kinds_of(model)
    assert [[*n.input, *n.output] for n in floats.graph.node] == [
        [*n.input, *n.output] for n in model.graph.node
    ]
    assert {n: a.shape for n, a in tensors_of(floats).items()} == {
        n: a.shape for n, a in tensors_of(model).items()
    }


def test_the_float_model_can_be_quantized_again_and_trained() -> None:
    model, inputs = network()
    first = quantized(model, inputs)
    floats = onnxfit.dequantize(first)
    again = tensors_of(quantized(floats, inputs))
    integers = {name: a for name, a in tensors_of(first).items() if a.ndim > 1}
    for name, array in integers.items():  # a scale rounded once more
        assert np.abs(array.astype(int) - again[name].astype(int)).max() <= 1
    trainer = onnxfit.Trainer(floats, loss="cross_entropy")
    y = np.arange(40) % 3
    before = trainer.evaluate(inputs["x"], y)["loss"]
    trainer.fit(inputs["x"], y, epochs=3, verbose=0)
    assert trainer.evaluate(inputs["x"], y)["loss"] < before


# ---------------------------------------------------------------------- files of others


def by_default(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray], path: str, form: str = "QDQ"
) -> onnx.ModelProto:
    """The model as onnxruntime quantizes it by default: without its Relus."""
    from onnxruntime.quantization import QuantFormat, quantize_static

    class Reader:
        batches = iter([inputs])

        def get_next(self) -> Any:
            return next(self.batches, None)

    onnx.save(model, path)
    quantize_static(path, path, Reader(), quant_format=QuantFormat[form])
    return onnx.load(path)


def test_operators_of_integers_become_operators_of_floats(tmp_path: Any) -> None:
    model = parsed(
        """g (float[N, 4] x) => (float[N, 5] y)
        { h = Gemm(x, u, c)  r = Relu(h)  a = Add(r, r)  y = MatMul(a, w) }""",
        u=(4, 6),
        c=(6,),
        w=(6, 5),
    )
    inputs = {"x": rows(60, 4)}
    result = by_default(model, inputs, str(tmp_path / "m.onnx"), "QOperator")
    assert {"QGemm", "QLinearAdd", "QLinearMatMul"} <= set(kinds_of(result))
    floats = checked(result)
    assert kinds_of(floats) == kinds_of(model)
    assert relative_error(outputs_of(floats, inputs), outputs_of(model, inputs)) < 0.05


@pytest.mark.parametrize(("name", "options"), DYNAMIC_FILES)
def test_files_of_quantize_dynamic_become_float_files(
    name: str, options: str, tmp_path: Path
) -> None:
    """Without the rounding of activations, only the error of the weights is left."""
    model, integers, inputs = dynamic_file(name, options, tmp_path)
    floats = checked(integers)
    assert "DynamicQuantizeLinear" not in kinds_of(floats)
    assert relative_error(outputs_of(floats, inputs), outputs_of(model, inputs)) < 0.03
    steps = weights_by_onnxruntime(to_qdq(integers))
    for weight, array in steps.items():
        assert tensors_of(floats)[weight].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("activation", "added"), [("Relu(h)", "Relu"), ("Clip(h, low, high)", "Clip")]
)
def test_activations_that_onnxruntime_removes_come_back(
    activation: str, added: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = parsed(
        f"""g (float[N, 4] x) => (float[N, 5] y) <float low = {{0}}, float high = {{6}}>
        {{ h = Gemm(x, u, c)  r = {activation}  m = Identity(r)  y = MatMul(m, w) }}""",
        u=9 * rows(4, 6),
        c=rows(6),
        w=rows(6, 5),
    )
    inputs = {"x": rows(60, 4)}
    result = by_default(model, inputs, str(tmp_path / "m.onnx"))
    assert added not in kinds_of(result)
    floats = checked(result)
    assert [kind for kind in kinds_of(floats) if kind != "Constant"].count(added) == 1
    assert relative_error(outputs_of(floats, inputs), outputs_of(model, inputs)) < 0.05
    unseen = {"x": 5 * rows(60, 4, seed=9)}
    assert relative_error(outputs_of(floats, unseen), outputs_of(model, unseen)) < 0.05


def test_a_clip_that_is_there_gets_no_relu() -> None:
    model = parsed(
        """g (float[N, 4] x) => (float[N, 5] y) <float low = {0}, float high = {6}>
        { h = Gemm(x, u, c)  r = Clip(h, low, high)  y = MatMul(r, w) }""",
        u=(4, 6),
        c=(6,),
        w=(6, 5),
    )
    floats = checked(onnxfit.quantize(model, rows(20, 4)))
    assert kinds_of(floats) == ["Gemm", "Clip", "MatMul"]


def test_integers_that_are_read_twice_get_one_relu() -> None:
    model = parsed(
        """g (float[N, 2] x) => (float[N, 2] y) <float s = {0.5}, uint8 z = {0}>
        { h = Neg(x)  q = QuantizeLinear(h, s, z)  a = DequantizeLinear(q, s, z)
        b = DequantizeLinear(q, s, z)  y = Sub(a, b) }"""
    )
    assert kinds_of(checked(model)) == ["Neg", "Relu", "Sub"]


def test_no_activation_is_added_after_values_that_cannot_be_negative() -> None:
    model = parsed(
        """g (float[N, 4] x) => (float[N, 5] y)
        { h = MatMul(x, u)  s = Softmax(h)  t = Reshape(s, shape)  y = MatMul(t, w) }""",
        u=(4, 6),
        w=(6, 5),
    )
    shape = onnx.numpy_helper.from_array(np.array([-1, 6]), "shape")
    model.graph.initializer.append(shape)
    floats = checked(onnxfit.quantize(model, rows(20, 4), activations="uint8"))
    assert kinds_of(floats) == kinds_of(model)


CASES: dict[str, tuple[str, dict[str, list[float]]]] = {
    "no zero point": (
        """g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] w_quantized = {1, 2, 3, 4}, float s = {0.5}>
        { w = DequantizeLinear(w_quantized, s)  y = MatMul(x, w) }""",
        {"w": [0.5, 1, 1.5, 2]},
    ),
    "another name": (
        """g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] q = {1, 2, 3, 4}, float s = {0.5}>
        { w = DequantizeLinear(q, s)  y = MatMul(x, w) }""",
        {"q": [0.5, 1, 1.5, 2]},
    ),
    "a name in use": (
        """g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] w_quantized = {1, 2, 3, 4}, float s = {0.5}, float[2, 2] w = {7, 7, 7, 7}>
        { d = DequantizeLinear(w_quantized, s)  h = MatMul(x, w)  y = MatMul(h, d) }""",
        {"w": [7, 7, 7, 7], "w_2": [0.5, 1, 1.5, 2]},
    ),
    "constants": (
        """g (float[N, 2] x) => (float[N, 2] y) {
        q = Constant<value = uint8[2, 2] {1, 2, 3, 4}>()  s = Constant<value = float[2] {1, 10}>()
        z = Constant<value = uint8[2] {2, 2}>()  w = DequantizeLinear(q, s, z)  y = MatMul(x, w) }""",
        {"q": [-1, 0, 1, 20]},
    ),
    "rows": (
        """g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] q = {1, 2, 3, 4}, float[2] s = {1, 10}>
        { w = DequantizeLinear<axis = 0>(q, s)  y = MatMul(x, w) }""",
        {"q": [1, 2, 30, 40]},
    ),
    "blocks": (
        """g (float[N, 4] x) => (float[N, 1] y) <int8[4, 1] q = {1, 2, 3, 4}, float[2, 1] s = {1, 10}>
        { w = DequantizeLinear<axis = 0, block_size = 2>(q, s)  y = MatMul(x, w) }""",
        {"q": [1, 2, 30, 40]},
    ),
    "read twice": (
        """g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] w_quantized = {1, 2, 3, 4}, float s = {0.5}>
        { a = DequantizeLinear(w_quantized, s)  b = DequantizeLinear(w_quantized, s)
        h = MatMul(x, a)  y = MatMul(h, b) }""",
        {"w": [0.5, 1, 1.5, 2]},
    ),
    "rounded while it is trained": (
        """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {0.3, 0.8, 99, -99}, float s = {0.5}, int8 z = {0}>
        { q = QuantizeLinear(w, s, z)  d = DequantizeLinear(q, s, z)  y = MatMul(x, d) }""",
        {"w": [0.5, 1, 63.5, -64]},
    ),
    "input and output": (
        """g (float[N, 2] x) => (float[N, 2] y) <float s = {0.5}, int8 z = {0}>
        { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }""",
        {},
    ),
    "output that others read": (
        """g (float[N, 2] x) => (float[N, 2] y, float[N, 2] h) <float s = {0.5}, int8 z = {0}>
        { h = Exp(x)  q = QuantizeLinear(h, s, z)  y = DequantizeLinear(q, s, z) }""",
        {},
    ),
    "equal scales": (
        """g (float[N, 2] x) => (float[N, 2] y) <float s = {0.5}, int8 z = {0}, float t = {0.5}, int8 u = {0}>
        { h = Exp(x)  q = QuantizeLinear(h, s, z)  d = DequantizeLinear(q, t, u)  y = Neg(d) }""",
        {},
    ),
    "weight as output": (
        """g (float[N, 2] x) => (float[N, 2] y, float[2, 2] w) <int8[2, 2] q = {1, 2, 3, 4}, float s = {0.5}>
        { w = DequantizeLinear(q, s)  y = MatMul(x, w) }""",
        {"q": [0.5, 1, 1.5, 2]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_forms_of_other_quantizers(case: str) -> None:
    body, expected = CASES[case]
    model = parsed(body, 21)
    floats = checked(model)
    weights = {name: array.ravel().tolist() for name, array in tensors_of(floats).items()}
    assert weights == expected
    inputs = {"x": rows(5, model.graph.input[0].type.tensor_type.shape.dim[1].dim_value)}
    for a, b in zip(outputs_of(floats, inputs), outputs_of(model, inputs, exact=True), strict=True):
        assert np.abs(a - b).max() < (0.26 if expected == {} else 1e-5)


def test_operators_of_the_domain_of_onnxruntime() -> None:
    model, inputs = network()
    result = quantized(model, inputs)
    for node in result.graph.node:
        if node.op_type in CONVERSIONS:
            node.domain = "com.microsoft"
    result.opset_import.add(domain="com.microsoft", version=1)
    assert (
        tensors_of(checked(result)).keys()
        == tensors_of(onnxfit.dequantize(quantized(model, inputs))).keys()
    )


def test_conversions_of_integer_inputs_and_outputs_stay() -> None:
    model = parsed(
        """g (uint8[N, 2] x) => (uint8[N, 2] y) <float s = {0.5}, uint8 z = {0}, int8[2, 2] q = {1, 2, 3, 4}>
        { f = DequantizeLinear(x, s, z)  w = DequantizeLinear(q, s)  h = MatMul(f, w)
        y = QuantizeLinear(h, s, z) }"""
    )
    floats = onnxfit.dequantize(model)
    assert kinds_of(floats) == ["DequantizeLinear", "MatMul", "QuantizeLinear"]
    inputs = {"x": np.array([[1, 2], [30, 4]], np.uint8)}
    np.testing.assert_array_equal(
        outputs_of(floats, inputs)[0], outputs_of(model, inputs, exact=True)[0]
    )


def test_weights_inside_the_body_of_an_if() -> None:
    model = parsed(
        """g (float[N, 2] x, bool c) => (float[N, 2] y) <int8[2, 2] q = {1, 2, 3, 4}, float s = {0.5}>
        { y = If(c) <then_branch = t () => (float[N, 2] a) { w = DequantizeLinear(q, s)  a = MatMul(x, w) },
        else_branch = e () => (float[N, 2] b) { b = Neg(x) }> }"""
    )
    floats = checked(model)
    for c in (True, False):
        inputs = {"x": rows(3, 2), "c": np.array(c)}
        np.testing.assert_allclose(
            outputs_of(floats, inputs)[0], outputs_of(model, inputs, exact=True)[0], rtol=1e-6
        )


def test_without_a_zero_point_integers_are_uint8() -> None:
    """A weight is rounded, and the range of an activation begins at 0."""
    model = parsed(
        """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2.3, 0.4, -5}, float s = {1}>
        { q = QuantizeLinear(w, s)  d = DequantizeLinear(q, s)  h = MatMul(x, d)
        r = QuantizeLinear(h, s)  e = DequantizeLinear(r, s)  y = Neg(e) }"""
    )
    floats = checked(model)
    assert [node.op_type for node in floats.graph.node] == ["MatMul", "Relu", "Neg"]
    np.testing.assert_array_equal(tensors_of(floats)["w"], [[1, 2], [0, 0]])


# ---------------------------------------------------------------------- refusals


def test_a_float_model_is_refused() -> None:
    with pytest.raises(ModelError, match="not quantized"):
        onnxfit.dequantize(network()[0])


def test_a_node_without_a_scale_is_refused() -> None:
    model = parsed(
        """g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] q = {1, 2, 3, 4}>
        { w = com.microsoft.DequantizeLinear(q)  y = MatMul(x, w) }"""
    )
    with pytest.raises(
        UnsupportedError, match=r"cannot be converted to float operators \(DequantizeLinear\)"
    ):
        onnxfit.dequantize(model)


@pytest.mark.parametrize(
    "body",
    [
        "float[3] s = {1, 2, 3}> { w = DequantizeLinear(q, s)",
        "float[2] s = {1, 2}> { w = DequantizeLinear<axis = 7>(q, s)",
        "float[1, 2] s = {1, 2}> { w = DequantizeLinear<axis = 0, block_size = 1>(q, s)",
        "float s = {1}, int8[3] z = {1, 2, 3}> { w = DequantizeLinear(q, s, z)",
        'string s = {"a"}> { w = DequantizeLinear(q, s)',
    ],
)
def test_scales_that_do_not_fit_are_refused(body: str) -> None:
    model = parsed(
        f"""g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] q = {{1, 2, 3, 4}}, {body}
        y = MatMul(x, w) }}""",
        21,
    )
    with pytest.raises(ModelError, match="does not fit its values"):
        onnxfit.dequantize(model)


def test_operators_that_compute_with_integers_are_refused() -> None:
    model = parsed(
        """g (uint8[N, 2] x) => (int32[N, 2] y) <int8[2, 2] w = {1, 2, 3, 4}>
        { y = MatMulInteger(x, w) }"""
    )
    with pytest.raises(
        UnsupportedError, match=r"cannot be converted to float operators \(MatMulInteger\)\. y: "
    ):
        onnxfit.dequantize(model)
