"""`to_float32`: the same numbers, and no half precision left."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx.printer
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfit
from onnxfit.errors import ModelError
from onnxfit.trainable.quantized.settings import Quantization
from tests.tools.editing.graphs import array_of, fresh_network, run

HALVES = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}

# The parser takes the bits of a float16.
EVERYWHERE = """<ir_version: 9, opset_import: ["": 18, "own": 1]>
g (float16[N, 2] x, seq(float16[2]) s, bool c, optional(float16[2]) o) => (float16[N, 2] y, float16[N, 2] r)
<float16[2, 2] w = {15360, 16384, 16896, 17408}, int64 t = {1}, float16[N, 2] h>
{
    k = Constant <value: tensor = float16[2] {14336, 13312}> ()
    a = own.scaled <by: tensor = float16[1] {16384}> (x)
    h = MatMul(a, w)
    first = SequenceAt(s, t)
    b = Cast <to = 10> (h)
    size = Shape(x)
    e = ConstantOfShape <value: tensor = float16[1] {15360}> (size)
    y = If (c) <
        then_branch = yes () => (float16[N, 2] p) <float16[2] i = {16896, 16896}> { p = Add(b, i) },
        else_branch = no () => (float16[N, 2] q) {
            j = Constant <value: tensor = float16[2] {15360, 15360}> ()  q = Mul(e, j) }
    >
    z = RandomNormalLike <dtype = 10> (x)
    u = Mul(z, k)
    r = Mul(u, first)
}
<domain: "own", opset_import: ["": 18]>
scaled <by> (x) => (y) {
    n = Constant <value: tensor = @by> ()  d = Constant <value: tensor = float16[1] {15360}> ()
    m = Mul(x, n)  y = Mul(m, d)
}"""


def halves_in(model: onnx.ModelProto) -> list[str]:
    """Return the lines of a model's text that name a type in half precision."""
    text = onnx.printer.to_text(model).splitlines()
    named = ("float16", "to: int = 10", "dtype: int = 10")
    return [line for line in text if any(name in line for name in named)]


@pytest.mark.parametrize("half", HALVES, ids=lambda half: HALVES[half].name)
def test_every_number_stays(half: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits.view(HALVES[half])
    for as_raw in (True, False):
        tensor = helper.make_tensor(
            "w", half, [1 << 16], bits.tobytes() if as_raw else numbers.tolist(), raw=as_raw
        )
        graph = helper.make_graph(
            [helper.make_node("Identity", ["w"], ["y"])],
            "g",
            [],
            [helper.make_tensor_value_info("y", half, [1 << 16])],
            [tensor],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        given = model.SerializeToString()
        (wide,) = onnxfit.to_float32(model).graph.initializer
        assert model.SerializeToString() == given
        assert wide.data_type == TensorProto.FLOAT
        assert not wide.int32_data
        np.testing.assert_array_equal(numpy_helper.to_array(wide), numbers.astype(np.float32))


def test_no_half_precision_is_left_anywhere() -> None:
    model = onnx.parser.parse_model(EVERYWHERE)
    assert len(halves_in(model)) > 8
    wide = onnxfit.to_float32(model)
    assert not halves_in(wide)
    onnx.checker.check_model(wide, full_check=True)
    assert [n.op_type for n in wide.graph.node] == [n.op_type for n in model.graph.node]


def test_a_model_without_half_precision_stays_byte_identical() -> None:
    model = fresh_network()
    assert onnxfit.to_float32(model).SerializeToString() == model.SerializeToString()


def network() -> onnx.ModelProto:
    return onnxfit.untie(fresh_network())


def in_half(model: onnx.ModelProto, half: int) -> onnx.ModelProto:
    """Return a network of float32 layers in half precision."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(HALVES[half])
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        value.type.tensor_type.elem_type = half
    return copy


@pytest.mark.parametrize("half", HALVES, ids=lambda half: HALVES[half].name)
def test_the_result_trains_as_the_float32_file_with_the_same_weights(half: int) -> None:
    single = network()
    model = in_half(single, half)
    wide = onnxfit.to_float32(model)
    rounded = {t.name: array_of(model, t.name).astype(np.float32) for t in single.graph.initializer}
    for tensor in single.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(rounded[tensor.name], tensor.name))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 6)).astype(np.float32), rng.integers(0, 3, 8)
    trainers = [
        onnxfit.Trainer(each, loss="cross_entropy", optimizer="adam") for each in (wide, single)
    ]
    losses = [trainer.fit(x, y, epochs=3, verbose=0).history["loss"] for trainer in trainers]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    files = [trainer.export(None).graph.initializer for trainer in trainers]
    assert list(files[0]) == list(files[1])


def test_outputs_differ_by_the_roundings_of_float16_alone() -> None:
    model = in_half(network(), TensorProto.FLOAT16)
    x = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float16)
    (narrow,), (wide,) = run(model, x=x), run(onnxfit.to_float32(model), x=x.astype(np.float32))
    assert narrow.dtype == np.float16
    assert wide.dtype == np.float32
    np.testing.assert_allclose(narrow, wide, rtol=1e-2, atol=1e-2)


def test_packed_integers_with_float16_scales_train() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float16[N, 16] x) => (float16[N, 2] y)
        <uint8[2, 1, 8] q = {1, 35, 69, 103, 137, 171, 205, 239, 16, 50, 84, 118, 152, 186, 220, 254},
         float16[2, 1] s = {14336, 13312}>
        { y = com.microsoft.MatMulNBits <K = 16, N = 2, bits = 4, block_size = 16> (x, q, s) }""")
    with pytest.raises(ModelError, match="float16"):
        onnxfit.Trainer(model, loss="mse", quantization=Quantization())
    trainer = onnxfit.Trainer(onnxfit.to_float32(model), loss="mse", quantization=Quantization())
    x = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    losses = trainer.fit(x, x[:, :2], epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_a_file_with_external_data(tmp_path: Path) -> None:
    model = in_half(network(), TensorProto.FLOAT16)
    path = tmp_path / "half.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="half.data")
    wide = onnxfit.to_float32(path)
    expected = onnxfit.to_float32(in_half(network(), TensorProto.FLOAT16))
    for tensor in expected.graph.initializer:
        np.testing.assert_array_equal(array_of(wide, tensor.name), numpy_helper.to_array(tensor))
    assert not any(t.external_data for t in wide.graph.initializer)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx"):
        onnxfit.to_float32(tmp_path / "none.onnx")
