"""Integer weights that cannot be trained are refused by the constructor, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfit import ModelError, OnnxfitError, Quantization, SettingError, Trainer, UnknownNameError
from onnxfit.trainable.quantized.integer_weights import (
    integer_names,
    integer_weights,
    select_integers,
)
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import integer_file


def replace(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def scale_is(number: float) -> onnx.ModelProto:
    model = integer_file(grain="channel")
    scale = np.full(files.COLUMNS, 0.1, np.float32)
    scale[2] = number
    replace(model, "w_scale", scale)
    return model


def activation_scale_is_zero() -> onnx.ModelProto:
    model = integer_file()
    replace(model, "x_scale", np.array(0, np.float32))
    return model


def scale_is_computed() -> onnx.ModelProto:
    model = integer_file()
    (tensor,) = (t for t in model.graph.initializer if t.name == "w_scale")
    tensor.name = "factor"
    nodes = [helper.make_node("Abs", ["factor"], ["w_scale"]), *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def text_for(name: str) -> onnx.ModelProto:
    model = integer_file(symmetric=False)
    replace(model, name, np.array(["a"], object))
    return model


def two_scales() -> onnx.ModelProto:
    model = integer_file()
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "other"))
    model.graph.node.extend(
        [
            helper.make_node("DequantizeLinear", ["w", "other"], ["wo"], name="dequantize_again"),
            helper.make_node("MatMul", ["xd", "wo"], ["z"], name="multiply_again"),
        ]
    )
    model.graph.output.append(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", files.COLUMNS])
    )
    return model


def read_directly() -> onnx.ModelProto:
    model = integer_file()
    model.graph.node.append(
        helper.make_node("MatMulInteger", ["xq", "w"], ["z"], name="multiply_integers")
    )
    model.graph.output.append(
        helper.make_tensor_value_info("z", TensorProto.INT32, ["N", files.COLUMNS])
    )
    return model


def floats_beside_the_integers() -> onnx.ModelProto:
    model = integer_file()
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = "w_quantized" if name == "w" else name
    (tensor,) = (t for t in model.graph.initializer if t.name == "w")
    tensor.name = "w_quantized"
    array = np.zeros((files.ROWS, files.COLUMNS), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    model.graph.node.append(helper.make_node("MatMul", ["x", "w"], ["z"], name="multiply_floats"))
    model.graph.output.append(
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", files.COLUMNS])
    )
    return model


def four_bits_before_opset_21() -> onnx.ModelProto:
    model = integer_file("int4")
    model.opset_import[0].version = 19
    return model


def scale_of_another_size() -> onnx.ModelProto:
    model = integer_file(grain="channel")
    replace(model, "w_scale", np.full(files.COLUMNS + 1, 0.1, np.float32))
    return model


REFUSED: list[tuple[Callable[[], onnx.ModelProto], type[OnnxfitError], str]] = [
    (lambda: scale_is(0), ModelError, "'w_scale' of DequantizeLinear 'dequantize_w' contains 0,"),
    (lambda: scale_is(-0.5), ModelError, "contains -0.5, but a scale must be positive"),
    (lambda: scale_is(np.nan), ModelError, "contains nan"),
    (lambda: scale_is(np.inf), ModelError, "contains inf"),
    (activation_scale_is_zero, ModelError, "'x_scale' of QuantizeLinear 'quantize_x'"),
    (scale_is_computed, ModelError, "scale 'w_scale' of the integers 'w' is not an initializer"),
    (two_scales, ModelError, "through two scales: by 'dequantize_w' with 'w_scale' and by 'dequ"),
    (read_directly, ModelError, "by a DequantizeLinear and by MatMulInteger 'multiply_integers'"),
    (floats_beside_the_integers, SettingError, "The file contains w twice"),
    (four_bits_before_opset_21, ModelError, "'w' are int4, which .* opset 21 on, .* opset 19"),
    (lambda: text_for("w_scale"), ModelError, "'dequantize_w' has a tensor of type STRING"),
    (lambda: text_for("w_zero"), ModelError, "'dequantize_w' has a tensor of type STRING"),
    (scale_of_another_size, ModelError, "shape.*'w'|does not fit"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_what_cannot_be_trained_is_refused(
    make: Callable[[], onnx.ModelProto], error: type[OnnxfitError], message: str
) -> None:
    model = make()
    before = model.SerializeToString(deterministic=True)
    with pytest.raises(error, match=message) as info:
        Trainer(model, loss={"y": "mse"})
    assert str(info.value).count("\n") < 4
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("make", [scale_is_computed, read_directly])
def test_such_integers_can_be_left_out(make: Callable[[], onnx.ModelProto]) -> None:
    trainer = Trainer(make(), loss={"y": "mse"}, quantization=Quantization(weights="!w"))
    assert "w" not in trainer.get_weights()
    assert "b" in trainer.get_weights()


def test_the_floats_of_such_integers_can_be_trained_alone() -> None:
    setting = Quantization(weights="!w_quantized")
    trainer = Trainer(
        floats_beside_the_integers(), loss={"y": "mse", "z": "mse"}, quantization=setting
    )
    assert set(trainer.get_weights()) == {"w", "b"}


def test_one_scale_may_have_two_readers() -> None:
    model = two_scales()
    for node in model.graph.node:
        if node.name == "dequantize_again":
            node.input[1] = "w_scale"
    trainer = Trainer(model, loss={"y": "mse", "z": "mse"})
    x, y = files.rows(8), np.zeros((8, files.COLUMNS), np.float32)
    trainer.fit(x, {"y": y, "z": y}, verbose=0)
    assert list(trainer.get_weights()) == ["w", "b"]


def test_patterns_select_in_the_order_of_the_file() -> None:
    model = integer_file()

    def selected(*patterns: str) -> list[str]:
        names = select_integers(integer_names(model), patterns)
        assert [weight.name for weight in integer_weights(model, names)] == names
        return names

    assert selected("b", "w") == selected("*") == ["w", "b"]
    assert selected("!w") == ["b"]
    assert selected("*", "!b") == ["w"]
    with pytest.raises(UnknownNameError, match="No integer weight is called 'c'"):
        selected("!c")


def test_integers_that_are_an_output_are_left_alone() -> None:
    model = integer_file()
    model.graph.output.append(
        helper.make_tensor_value_info("bd", TensorProto.FLOAT, [files.COLUMNS])
    )
    assert integer_names(model) == ["w"]
    trainer = Trainer(model, loss={"y": "mse"})
    assert list(trainer.get_weights()) == ["w"]
    bias = next(t for t in model.graph.initializer if t.name == "b")
    old = model.SerializeToString()
    x = files.rows(8)
    trainer.fit(x, {"y": np.zeros((8, files.COLUMNS), np.float32)}, verbose=0)
    assert next(t for t in trainer.export().graph.initializer if t.name == "b") == bias
    assert model.SerializeToString() == old
