"""Adapters beside integers behind DequantizeLinear, which stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import to_array

import onnxfit
from onnxfit import LoRA, Quantization, SettingError, Trainer
from onnxfit.callbacks import ModelCheckpoint
from onnxfit.training import checkpoint
from tests import models
from tests.gradients.rules.cases.packed_weights import IS_LATER
from tests.trainable.adapters.files import (
    bnb4_file,
    file_of,
    initializers,
    packed_table,
    rows_of,
    run,
)
from tests.trainable.adapters.test_adapted import (
    BOTH_BACKENDS,
    LABELS,
    X,
    fitted,
    labels_of,
    trainer_of,
    weights_equal,
)

SIZES = (4, 16, 16, 3)
LAYERS = ("gemm", "gemm_transposed", "conv", "matmul")


def quantized(activations: str | None = "uint8", **settings: Any) -> onnx.ModelProto:
    calibration = None if activations is None else X
    given = {"activations": activations, "calibration": calibration} | settings
    return onnxfit.quantize(models.mlp(SIZES), **given)


def classifier(model: onnx.ModelProto, **settings: Any) -> Trainer:
    given = {"adapters": LoRA(rank=2, alpha=4), "loss": "cross_entropy", "optimizer": "adam"}
    return Trainer(model, **{**given, **settings})


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("activations", [None, "uint8"])
@BOTH_BACKENDS
def test_integers_and_nodes_stay_and_branches_are_exported(
    activations: str | None, backend: str
) -> None:
    file = quantized(activations)
    trainer = classifier(file, backend=backend)
    np.testing.assert_allclose(trainer.predict(X), run(file)(X), atol=1e-5)
    history = trainer.fit(X, LABELS, epochs=12, batch_size=8, verbose=0).history["loss"]
    assert history[-1] < history[0] - 0.02
    exported = trainer.export()
    kept = initializers(exported)
    assert {name: kept[name] for name in initializers(file)} == initializers(file)
    assert operators(exported).count("DequantizeLinear") == operators(file).count(
        "DequantizeLinear"
    )
    assert np.abs(run(exported)(X) - run(file)(X)).max() > 0.05
    np.testing.assert_allclose(trainer.predict(X), run(exported)(X), atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("per_channel", [False, True])
@BOTH_BACKENDS
def test_training_is_that_beside_the_dequantized_weights(
    kind: str, per_channel: bool, backend: str
) -> None:
    """Where no activation is rounded, both files compute the same."""
    file = onnxfit.quantize(file_of(kind), activations=None, per_channel=per_channel)
    x = rows_of(kind)
    of_integers = trainer_of(file, backend=backend)
    of_floats = trainer_of(onnxfit.dequantize(file), backend=backend)
    names = list(of_integers.get_weights())
    assert len(names) == len(of_floats.get_weights())
    start = dict(zip(of_floats.get_weights(), of_integers.get_weights().values()))
    of_floats.set_weights(start)
    y = labels_of(of_floats, x)
    for _ in range(5):
        expected = of_floats.train_on_batch(x, y)["loss"]
        assert of_integers.train_on_batch(x, y)["loss"] == pytest.approx(expected, rel=1e-4)
    for one, other in zip(of_integers.get_weights().values(), of_floats.get_weights().values()):
        np.testing.assert_allclose(one, other, atol=2e-4)


PACKED = {
    "FP4": lambda: bnb4_file(0),
    "NF4": lambda: bnb4_file(1),
    "table": packed_table,
}


@pytest.mark.parametrize("kind", PACKED)
@BOTH_BACKENDS
def test_training_is_that_beside_the_unpacked_weights(kind: str, backend: str) -> None:
    if kind == "table" and not IS_LATER:
        pytest.skip("this onnxruntime has no GatherBlockQuantized")
    packed, plain = PACKED[kind]()
    x = rows_of("embedding" if kind == "table" else "matmul")
    np.testing.assert_allclose(run(packed)(x), run(plain)(x), atol=1e-5)
    of_packed, of_floats = (trainer_of(file, backend=backend) for file in (packed, plain))
    ours, theirs = of_packed.get_weights(), of_floats.get_weights()
    assert [array.shape for array in ours.values()] == [array.shape for array in theirs.values()]
    of_floats.set_weights(dict(zip(theirs, ours.values())))
    y = labels_of(of_packed, x)
    losses = [
        [trainer.train_on_batch(x, y)["loss"] for _ in range(6)]
        for trainer in (of_packed, of_floats)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]
    exported = of_packed.export()
    assert set(initializers(packed).items()) <= set(initializers(exported).items())
    np.testing.assert_allclose(run(exported)(x), of_floats.predict(x), atol=1e-4)
    with pytest.raises(SettingError, match="only a MatMulNBits can be packed again"):
        of_packed.export(adapters="requantized")


@pytest.mark.parametrize("kind", PACKED)
def test_adapters_of_packed_numbers_come_back(kind: str, tmp_path: Path) -> None:
    if kind == "table" and not IS_LATER:
        pytest.skip("this onnxruntime has no GatherBlockQuantized")
    packed, plain = PACKED[kind]()
    x = rows_of("embedding" if kind == "table" else "matmul")
    trainer = fitted(trainer_of(packed), x)
    expected = trainer.predict(x)
    assert np.abs(expected - run(packed)(x)).max() > 0.01
    folder = trainer.export_adapter(tmp_path / "folder")
    file = trainer.export_adapter(tmp_path / "file.onnx_adapter")
    for path in (folder, file):
        again = Trainer(packed, adapters=LoRA.load(path))
        np.testing.assert_allclose(again.predict(x), expected, atol=1e-6)
    with pytest.warns(UserWarning, match="trained for a model whose weights have other values"):
        of_floats = Trainer(plain, adapters=LoRA.load(folder))
    np.testing.assert_allclose(of_floats.predict(x), expected, atol=1e-5)
    resumed = Trainer.load(trainer.save(tmp_path / "a.ckpt"))
    assert np.array_equal(resumed.predict(x), expected)


@pytest.mark.parametrize("only", [False, True])
def test_a_fit_resumes_bit_by_bit(tmp_path: Path, only: bool) -> None:
    whole, part = (classifier(quantized(), adapters=LoRA(rank=2, dropout=0.2)) for _ in range(2))
    whole.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    path = tmp_path / "a.ckpt"
    saving = ModelCheckpoint(path, adapters_only=only)
    part.fit(X, LABELS, epochs=2, batch_size=8, verbose=0, callbacks=saving)
    resumed = Trainer.load(path, model_onnx=quantized() if only else None)
    resumed.fit(X, LABELS, epochs=4, batch_size=8, verbose=0)
    assert weights_equal(whole, resumed)
    assert initializers(whole.export()) == initializers(resumed.export())
    if not only:
        contents = checkpoint.load(resumed.save(path), {})
        assert initializers(contents.trained_model()) == initializers(resumed.export())


def test_the_folder_is_for_the_modules_of_the_float_network(tmp_path: Path) -> None:
    trainer = fitted(trainer_of(quantized(None), LoRA(rank=2)), X)
    folder = trainer.export_adapter(tmp_path)
    assert {one.target for one in LoRA.load(folder)} == {("fc0", "fc1")}
    again = Trainer(quantized(None), adapters=LoRA.load(folder))
    assert np.array_equal(again.predict(X), trainer.predict(X))
    with pytest.warns(UserWarning, match="trained for a model whose weights have other values"):
        of_floats = Trainer(models.mlp(SIZES), adapters=LoRA.load(folder))
    np.testing.assert_allclose(of_floats.predict(X), trainer.predict(X), atol=0.1)
    assert np.abs(of_floats.predict(X) - run(models.mlp(SIZES))(X)).max() > 0.3


def test_what_would_change_the_integers_is_refused() -> None:
    file = quantized()
    with pytest.raises(SettingError, match="with adapters= these integers stay"):
        classifier(file, quantization=Quantization())
    for settings in ({"init": "pissa"}, {"dora": True}):
        with pytest.raises(SettingError, match=r"contains integers.*\n?.*target="):
            classifier(file, adapters=LoRA(rank=2, **settings))
    name = next(t.name for t in file.graph.initializer if to_array(t).dtype == np.int8)
    with pytest.raises(onnxfit.OnnxfitError):
        classifier(file, weights=name)


def test_integers_behind_dequantize_linear_are_not_packed_again() -> None:
    trainer = classifier(quantized(None))
    with pytest.raises(SettingError, match="only a MatMulNBits can be packed again"):
        trainer.export(adapters="requantized")
