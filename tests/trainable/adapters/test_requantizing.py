"""Adapters merged into packed weights, which are packed again."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import to_array

import onnxfit
from onnxfit import LoRA, Trainer
from onnxfit.errors import SettingError
from tests.trainable.adapters.files import initializers, packed_file, run

X = np.random.default_rng(8).normal(size=(12, 32)).astype(np.float32)


def adapted(file: onnx.ModelProto, target: str = "fc1_Q4") -> Trainer:
    """A trainer whose adapters change the weight."""
    trainer = Trainer(file, adapters=LoRA(rank=2, target=target), loss="mse")
    rng = np.random.default_rng(3)
    weights = trainer.get_weights()
    trainer.set_weights({name: rng.normal(0, 0.2, array.shape) for name, array in weights.items()})
    return trainer


def dequantized(model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    """The first weight and its scales, (32, 16), by the layout of MatMulNBits."""
    arrays = {tensor.name: to_array(tensor) for tensor in model.graph.initializer}
    packed = arrays["fc1_Q4"].reshape(16, 16)
    numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(16, 32).astype(int) - 8
    scales = np.repeat(arrays["s1"].reshape(16, 2), 16, axis=1)
    return (numbers * scales).T, np.abs(scales).T


def test_the_weight_is_packed_again_and_nothing_else_changes(tmp_path) -> None:
    file = packed_file()
    trainer = adapted(file)
    merged, exported = (
        trainer.export(),
        trainer.export(tmp_path / "merged.onnx", adapters="requantized"),
    )
    assert onnx.load(tmp_path / "merged.onnx") == exported
    assert exported.graph.node == file.graph.node
    before, after = initializers(file), initializers(exported)
    assert {name for name in before if before[name] != after[name]} == {"fc1_Q4", "s1"}
    weights = trainer.get_weights()
    expected = dequantized(file)[0] + 8 * weights["fc1_Q4.lora_A"] @ weights["fc1_Q4.lora_B"]
    found, scales = dequantized(exported)
    assert (np.abs(found - expected) <= scales * 1.0001).all()
    base, exact = run(file)(X), run(merged)(X)
    assert np.abs(run(exported)(X) - exact).max() < 0.3 * np.abs(base - exact).max()


def test_scales_that_other_layers_read_are_refused() -> None:
    file = packed_file()
    file.graph.node[2].input[2] = "s1"
    with pytest.raises(SettingError, match="other layers read s1"):
        adapted(file).export(adapters="requantized")


def test_float_weights_are_merged_as_ever() -> None:
    file = packed_file()
    trainer = adapted(file, target="head")
    exported = trainer.export(adapters="requantized")
    assert initializers(exported) == initializers(trainer.export())
    with pytest.raises(SettingError, match="adapters"):
        onnxfit.Trainer(file, "head", loss="mse").export(adapters="requantized")
