"""Training begins with the floats of the file that was quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfit import ModelError, Quantization, SettingError, Trainer
from onnxfit.graph.model import OnnxModel
from onnxfit.trainable.quantized.quantized_model import to_fake_quantized
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.graphs import DYNAMIC_FILES, dynamic_file, outputs_of, tensors_of
from tests.trainable.quantized.integer_files import integer_file


def float_file(
    names: tuple[str, str] = ("w", "b"), columns: int = files.COLUMNS
) -> onnx.ModelProto:
    """The floats of `integer_file`, before they were rounded."""
    form = to_fake_quantized(OnnxModel(integer_file()))
    arrays = {t.name: numpy_helper.to_array(t) for t in form.model.graph.initializer}
    rng = np.random.default_rng(4)
    w = arrays["w"] + rng.uniform(-0.4, 0.4, arrays["w"].shape) * arrays["w_scale"]
    tensors = [
        numpy_helper.from_array(w[:, :columns].astype(np.float32), names[0]),
        numpy_helper.from_array((arrays["b"] + 1e-5)[:columns].astype(np.float32), names[1]),
        # of the same shape, and further from the integers
        numpy_helper.from_array(rng.normal(size=w.shape).astype(np.float32), "decoy"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", names[0]], ["p"]),
        helper.make_node("Add", ["p", names[1]], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "floats",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", files.ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", columns])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def trainer_with(model: object) -> Trainer:
    return Trainer(integer_file(), loss="mse", quantization=Quantization(float_model=model))


@pytest.mark.parametrize("names", [("w", "b"), ("val_3", "val_4")], ids=["by name", "by values"])
def test_weights_begin_with_the_floats(names: tuple[str, str]) -> None:
    floats = float_file(names)
    trainer = trainer_with(floats)
    arrays = {t.name: numpy_helper.to_array(t) for t in floats.graph.initializer}
    for name, source in zip(("w", "b"), names):
        np.testing.assert_array_equal(trainer.get_weights()[name], arrays[source])
    # each float is less than half a step from its integer
    exported = {t.name: t for t in trainer.export().graph.initializer}
    assert exported["w"] == {t.name: t for t in integer_file().graph.initializer}["w"]


def test_the_quantizer_calls_integers_after_their_floats() -> None:
    file = integer_file()
    for node in file.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = {"w": "w_quantized", "b": "b_quantized"}.get(name, name)
    for tensor in file.graph.initializer:
        tensor.name = {"w": "w_quantized", "b": "b_quantized"}.get(tensor.name, tensor.name)
    floats = float_file()
    trainer = Trainer(file, loss="mse", quantization=Quantization(float_model=floats))
    arrays = {t.name: numpy_helper.to_array(t) for t in floats.graph.initializer}
    np.testing.assert_array_equal(trainer.get_weights()["w_quantized"], arrays["w"])


def test_a_path_and_bytes_are_models_too(tmp_path: Path) -> None:
    floats = float_file()
    onnx.save(floats, tmp_path / "float.onnx")
    expected = trainer_with(floats).get_weights()["w"]
    for source in (
        tmp_path / "float.onnx",
        str(tmp_path / "float.onnx"),
        floats.SerializeToString(),
    ):
        np.testing.assert_array_equal(trainer_with(source).get_weights()["w"], expected)


@pytest.mark.parametrize(("name", "options"), DYNAMIC_FILES)
def test_weights_of_quantize_dynamic_begin_with_their_floats(
    name: str, options: str, tmp_path: Path
) -> None:
    """The quantizer transposes some weights, square ones among them.

    Versions of onnxruntime before 1.21 do not name them so; the loss tells the two apart.
    """
    floats, integers, inputs = dynamic_file(name, options, tmp_path)
    originals = tensors_of(floats)
    trainer = Trainer(integers, loss="mse", quantization=Quantization(float_model=floats))
    for weight, array in trainer.get_weights().items():
        if not weight.endswith("_quantized"):
            continue
        stem = weight.removesuffix("_quantized").removesuffix("_Transposed")
        original = originals[stem]
        transposed = np.swapaxes(original, -1, -2)
        exchanged = name == "LSTM" or np.array_equal(array, transposed)
        assert exchanged or "_Transposed" not in weight
        np.testing.assert_array_equal(array, transposed if exchanged else original)
    if name != "LSTM":  # whose first axis is not the batch
        without, (y,) = Trainer(integers, loss="mse"), outputs_of(floats, inputs)
        loss, expected = (t.evaluate(inputs["x"], y)["loss"] for t in (trainer, without))
        assert loss == pytest.approx(expected)


@pytest.mark.parametrize("steps", [2, 40])
@pytest.mark.parametrize("names", [("w", "b"), ("val_3", "val_4")], ids=["by name", "by values"])
def test_floats_further_away_than_rounding_are_refused(names: tuple[str, str], steps: int) -> None:
    floats = float_file(names)
    tensors = tensors_of(integer_file())
    moved = tensors_of(floats)[names[0]].copy()
    moved[1, 1] += steps * tensors["w_scale"].max() * (-1 if tensors["w"][1, 1] > 0 else 1)
    floats.graph.initializer[0].CopyFrom(numpy_helper.from_array(moved, names[0]))
    with pytest.raises(SettingError, match=r"'w' of the file are not those of .* less than one"):
        trainer_with(floats)


def test_floats_of_half_precision_are_those_of_the_integers() -> None:
    """Their own rounding counts, too: a bias of 32 bits is finer than float16."""
    floats = float_file()
    arrays = tensors_of(floats)
    for tensor in list(floats.graph.initializer[:2]):
        half = arrays[tensor.name].astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    trainer = trainer_with(floats)
    np.testing.assert_array_equal(trainer.get_weights()["b"], arrays["b"].astype(np.float16))


def test_checkpoints_do_not_need_the_float_file(tmp_path: Path) -> None:
    trainer = trainer_with(float_file())
    assert trainer.settings["quantization"] == Quantization()
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(loaded.get_weights()[name], array)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match=r"weight 'w' of float_model has shape \(10, 3\), but its integers"
    ):
        trainer_with(float_file(columns=3))
    without_bias = float_file(("w", "v"))
    bias = numpy_helper.from_array(np.zeros(1, np.float32), "v")
    without_bias.graph.initializer[1].CopyFrom(bias)
    with pytest.raises(SettingError, match=r"no weight of shape \(6,\) for the integers 'b'"):
        trainer_with(without_bias)
    nameless = float_file(("other", "b"))
    nameless.graph.initializer[0].ClearField("raw_data")
    nameless.graph.initializer[0].float_data.extend([0.0] * files.ROWS * files.COLUMNS)
    with pytest.raises(SettingError, match="'w' of the file are not those of 'other', 'decoy' in"):
        trainer_with(nameless)
    with pytest.raises(ModelError, match="There is no file"):
        trainer_with(tmp_path / "missing.onnx")
    with pytest.raises(
        SettingError, match=r"float_model must be a path, bytes or an onnx\.ModelProto"
    ):
        Quantization(float_model=3)
