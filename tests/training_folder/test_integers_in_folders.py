"""A host trains an integer file, rounds its floats by export.onnx, and the training comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import Quantization, Trainer
from onnxfit.errors import SettingError
from tests.models import convolutional, mlp
from tests.training_folder.host import Host

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 16)
SHAPES = {"dense": (16, 4), "convolutional": (16, 1, 8, 8)}


def data(network: str) -> np.ndarray:
    return RNG.normal(size=SHAPES[network]).astype(np.float32)


def integer_file(network: str, **options: Any) -> onnx.ModelProto:
    model = mlp((4, 64, 3)) if network == "dense" else convolutional(batch_norm=False)
    return onnxfit.quantize(model, data(network), verbose=0, **options)


def integers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("target", ["onnxruntime", "web"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("network", SHAPES)
def test_a_host_rounds_as_export_does(
    network: str, per_channel: bool, target: str, tmp_path: Path
) -> None:
    file = integer_file(network, per_channel=per_channel)
    optimizer = onnxfit.optimizers.Adam(0.01)
    trainer = Trainer(file, loss="cross_entropy", optimizer=optimizer)
    host = Host(trainer.export_training(tmp_path / "folder", target=target))
    assert host.deploy() == (tmp_path / "folder" / "model.onnx").read_bytes()
    x = data(network)
    output = next(iter(trainer._training.recipe.objectives))
    losses = [host.train({"x": x, f"y:{output}": Y}) for _ in range(10)]
    assert losses[-1] < losses[0]
    deployed = onnx.ModelProto.FromString(host.deploy())
    onnx.checker.check_model(deployed)
    trainer.import_state(host.save(tmp_path / "trained.safetensors"))
    own, before = integers(trainer.export()), integers(file)
    for name, array in integers(deployed).items():
        np.testing.assert_array_equal(array, own[name])
    kinds = {own[n].dtype.name for n in own if not np.array_equal(own[n], before[n])}
    assert {"int8", "int32"} <= kinds


def test_integers_that_do_not_train_stay(tmp_path: Path) -> None:
    trainer = Trainer(
        integer_file("dense"),
        loss="cross_entropy",
        optimizer="adam",
        quantization=Quantization(weights=["fc1.*"]),
    )
    host = Host(trainer.export_training(tmp_path))
    described = {tensor["name"] for tensor in host.manifest["model"]["tensors"]}
    assert described == {"fc1.weight_quantized", "fc1.bias_quantized"}


def test_a_folder_of_integers_is_loaded(tmp_path: Path) -> None:
    trainer = Trainer(integer_file("dense"), loss="cross_entropy", optimizer="adam")
    x = data("dense")
    trainer.fit(x, Y, epochs=3, verbose=0)
    loaded = Trainer.load(trainer.export_training(tmp_path))
    assert loaded.export(lineage=False) == trainer.export(lineage=False)
    np.testing.assert_array_equal(loaded.predict(x), trainer.predict(x))
    assert loaded.train_on_batch(x, Y) == trainer.train_on_batch(x, Y)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"weights": "int4"}, {}, "integers of 4 bits"),
        ({}, {"scales": "learned"}, "scales of integers"),
    ],
)
def test_integers_that_no_graph_writes_are_refused(
    options: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        integer_file("dense", **options),
        loss="cross_entropy",
        quantization=Quantization(**settings),
    )
    with pytest.raises(SettingError, match=message):
        trainer.export_training(tmp_path)
    assert not list(tmp_path.iterdir())


def test_integers_are_refused_for_webgpu(tmp_path: Path) -> None:
    trainer = Trainer(integer_file("dense"), loss="cross_entropy")
    with pytest.raises(SettingError, match=r"WebGPU has no kernels\. Use target='web'"):
        trainer.export_training(tmp_path, target="webgpu")
    assert not list(tmp_path.iterdir())
