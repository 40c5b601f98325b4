"""A file of integers trains as floats, and comes back with the same nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxfit import DataError, ModelError, Quantization, SettingError, Trainer
from onnxfit.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from onnxfit.graph.model import OnnxModel
from onnxfit.load.trainable import TrainableModel
from onnxfit.optimizers import SGD, Adam
from onnxfit.trainable.quantized.quantized_model import to_fake_quantized
from tests.graph.graphs import linear
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import (
    ALL_GRAINS,
    ALL_KINDS,
    LIMITS,
    SYMMETRIC,
    integer_file,
)

X = files.rows(32)
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])
Y = np.random.default_rng(2).normal(size=(32, files.COLUMNS)).astype(np.float32)


def trainer_of(model: onnx.ModelProto, **settings: Any) -> Trainer:
    return Trainer(model, **{"loss": "mse", "optimizer": Adam(0.1), "metrics": ["mae"]} | settings)


def fit(trainer: Trainer, epochs: int = 2, **settings: Any) -> None:
    trainer.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, **settings)


def weights_equal(one: Trainer, other: Trainer) -> bool:
    mine, theirs = one.get_weights(), other.get_weights()
    return mine.keys() == theirs.keys() and all(
        np.array_equal(array, theirs[name]) for name, array in mine.items()
    )


# ---------------------------------------------------------------------- to the floats and back


@ALL_KINDS
@ALL_GRAINS
@SYMMETRIC
@pytest.mark.parametrize("raw", [True, False], ids=["bytes", "list"])
def test_no_step_changes_nothing(kind: str, grain: str, symmetric: bool, raw: bool) -> None:
    file = integer_file(kind, grain, symmetric, raw=raw)
    form = to_fake_quantized(OnnxModel(file))
    floats = {t.name: numpy_helper.to_array(t) for t in form.model.graph.initializer}
    arrays = {name: floats[name] for name in ("w", "b")}
    assert arrays["w"].dtype == arrays["b"].dtype == np.float32
    assert form.export(arrays).whole().SerializeToString(
        deterministic=True
    ) == file.SerializeToString(deterministic=True)


def test_a_file_of_floats_is_trained_as_it_is() -> None:
    file = linear()
    form = to_fake_quantized(OnnxModel(file))
    assert type(form) is TrainableModel
    assert form.is_file
    assert form.model is file


@ALL_KINDS
@ALL_GRAINS
@SYMMETRIC
def test_a_trained_file_differs_in_its_integers_alone(
    kind: str, grain: str, symmetric: bool
) -> None:
    file = integer_file(kind, grain, symmetric)
    trainer = trainer_of(file)
    assert list(trainer.get_weights()) == ["w", "b"]
    fit(trainer)
    exported = trainer.export(lineage=False)
    assert files.stripped(exported) == files.stripped(file)
    assert exported.ByteSize() <= file.ByteSize()
    changed = []
    for old, new in zip(file.graph.initializer, exported.graph.initializer):
        assert (old.name, old.data_type, old.dims) == (new.name, new.data_type, new.dims)
        if old != new:
            changed.append(old.name)
    assert changed == ["w", "b"]
    onnx.checker.check_model(exported, full_check=True)


# onnxruntime cannot run 8 bits in blocks behind activations of integers
RUNNABLE = [
    (kind, grain, activations)
    for kind in LIMITS
    for grain in ("tensor", "channel", "block")
    for activations in (True, False)
    if not (grain == "block" and activations and kind in ("int8", "uint8"))
]


@pytest.mark.parametrize(("kind", "grain", "activations"), RUNNABLE)
@SYMMETRIC
def test_what_a_trainer_predicts_is_what_the_file_predicts(
    kind: str, grain: str, activations: bool, symmetric: bool
) -> None:
    """To the last bit, on a bare onnxruntime."""
    trainer = trainer_of(integer_file(kind, grain, symmetric, activations=activations))
    for _ in range(2):
        predicted = files.run_file(trainer.export(), X)
        np.testing.assert_array_equal(trainer.predict(X, batch_size=len(X)), predicted)
        np.testing.assert_array_equal(trainer.predict_on_batch(X), predicted)
        errors = predicted.astype(np.float64) - Y
        expected = {"loss": np.mean(errors**2), "mae": np.mean(np.abs(errors))}
        assert trainer.evaluate(X, Y, batch_size=len(X)) == pytest.approx(expected, rel=1e-6)
        assert trainer.test_on_batch(X, Y) == pytest.approx(expected, rel=1e-6)
        before = predicted
        fit(trainer, epochs=1)
        assert not np.array_equal(files.run_file(trainer.export(), X), before)


@pytest.mark.parametrize("kind", ["int8", "int16", "uint16"])
@pytest.mark.parametrize("grain", ["tensor", "channel"])
def test_operators_of_onnxruntime_quantize_too(kind: str, grain: str) -> None:
    """onnxruntime's quantizer writes them for 16 bits before opset 21, where ONNX has none."""
    file = integer_file(kind, grain, symmetric=False)
    for node in file.graph.node:
        if node.op_type.endswith("tizeLinear"):
            node.domain = "com.microsoft"
    del file.opset_import[:]
    file.opset_import.extend([helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    trainer = trainer_of(file)
    before = trainer.evaluate(X, Y)["loss"]
    fit(trainer)
    assert trainer.evaluate(X, Y)["loss"] < before
    exported = trainer.export()
    assert files.stripped(exported) == files.stripped(file)
    np.testing.assert_array_equal(trainer.predict_on_batch(X), files.run_file(exported, X))


def test_the_loss_of_an_evaluation_has_its_weights_and_penalty() -> None:
    trainer = trainer_of(integer_file(), penalty={"w": 0.1}, metrics=[])
    fit(trainer, epochs=1)
    weights = np.linspace(0, 2, len(X))
    errors = (trainer.predict(X, batch_size=len(X)).astype(np.float64) - Y) ** 2
    penalty = 0.1 * np.sum(trainer.get_weights()["w"].astype(np.float64) ** 2)
    expected = np.mean(errors.mean(1) * weights) + penalty
    found = trainer.evaluate(X, Y, weights, batch_size=10)["loss"]
    assert found == pytest.approx(expected, rel=1e-5)


def with_own_loss() -> onnx.ModelProto:
    """The model computes the mean of its squares itself."""
    file = integer_file()
    file.graph.node.extend(
        [
            helper.make_node("Mul", ["y", "y"], ["squares"]),
            helper.make_node("ReduceMean", ["squares"], ["loss"], keepdims=0),
        ]
    )
    file.graph.output.append(helper.make_tensor_value_info("loss", 1, []))
    return file


@BOTH_BACKENDS
def test_a_file_may_have_a_loss_of_its_own(backend: str) -> None:
    trainer = Trainer(with_own_loss(), optimizer=0.1, backend=backend)
    before = trainer.evaluate(X, batch_size=len(X))["loss"]
    squares = trainer.predict_on_batch(X)["y"].astype(np.float64) ** 2
    assert before == pytest.approx(squares.mean(), rel=1e-6)
    trainer.fit(X, epochs=2, verbose=0)
    assert trainer.evaluate(X, batch_size=len(X))["loss"] < before


def test_a_trainer_without_a_loss_predicts() -> None:
    file = integer_file()
    np.testing.assert_array_equal(Trainer(file).predict_on_batch(X), files.run_file(file, X))


# ---------------------------------------------------------------------- a step


def fake_quantized(torch: Any, weight: Any, file: onnx.ModelProto, kind: str, grain: str) -> Any:
    """The weight as torch rounds it."""
    arrays = {t.name: numpy_helper.to_array(t) for t in file.graph.initializer}
    scale = torch.tensor(arrays["w_scale"])
    low, high = LIMITS[kind]
    zero = np.broadcast_to(arrays["w_zero"].astype(np.int64), scale.shape).copy()
    if grain == "tensor":
        return torch.fake_quantize_per_tensor_affine(
            weight, scale.item(), int(zero.item()), low, high
        )
    zeros = torch.tensor(zero, dtype=torch.float32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zeros, 1, low, high)


@pytest.mark.torch
@BOTH_BACKENDS
@pytest.mark.parametrize("grain", ["tensor", "channel"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "uint4"])
def test_a_step_is_that_of_torch_with_fake_quantization(
    kind: str, grain: str, backend: str
) -> None:
    torch = pytest.importorskip("torch")
    file = integer_file(kind, grain, symmetric=False, activations=False)
    trainer = trainer_of(file, optimizer=SGD(0.5), backend=backend)
    start = trainer.get_weights()
    w, b = (torch.tensor(start[name], requires_grad=True) for name in ("w", "b"))
    optimizer = torch.optim.SGD([w, b], lr=0.5)
    for i in range(0, 32, 8):
        x, y = torch.tensor(X[i : i + 8]), torch.tensor(Y[i : i + 8])
        optimizer.zero_grad()
        predicted = b - x @ fake_quantized(torch, w, file, kind, grain)
        loss = torch.nn.functional.mse_loss(predicted, y)
        loss.backward()
        optimizer.step()
        found = trainer.train_on_batch(X[i : i + 8], Y[i : i + 8])["loss"]
        assert found == pytest.approx(loss.item(), rel=1e-5)
        weights = trainer.get_weights()
        np.testing.assert_allclose(weights["w"], w.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(weights["b"], b.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(weights["w"] - start["w"]).max() > 0.01


# ---------------------------------------------------------------------- a whole training


@BOTH_BACKENDS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_goes_on_to_the_last_bit(tmp_path: Path, backend: str, accumulate: int) -> None:
    settings = {"accumulate": accumulate, "backend": backend}
    whole = trainer_of(integer_file(), **settings)
    fit(whole, epochs=4)
    half = trainer_of(integer_file(), **settings)
    fit(half, epochs=2)
    path = half.save(tmp_path / "c")
    for resumed in (Trainer.load(path), trainer_of(integer_file(), **settings)):
        resumed.restore(path)
        assert weights_equal(resumed, half)
        resumed.fit(X, Y, epochs=4, initial_epoch=2, batch_size=8, verbose=0)
        assert weights_equal(resumed, whole)
        assert resumed.export(lineage=False) == whole.export(lineage=False)
        assert files.stripped(resumed.model) == files.stripped(half.model)
    assert half.save(tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_checkpoint_keeps_floats_between_the_integers(tmp_path: Path) -> None:
    trainer = trainer_of(integer_file("int4"), optimizer=SGD(1e-6))
    fit(trainer, epochs=1)
    assert trainer.export(lineage=False) == trainer.model  # no float went as far as another integer
    loaded = Trainer.load(trainer.save(tmp_path / "c"))
    assert weights_equal(loaded, trainer)
    assert not weights_equal(loaded, trainer_of(integer_file("int4")))


def test_callbacks_work_as_on_floats(tmp_path: Path) -> None:
    file = integer_file()
    trainer = trainer_of(file, optimizer=Adam(0.1, ema_momentum=0.5))
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_best_only=True)
    stopping = EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
    trainer.frozen = "b"
    before = trainer.get_weights()
    trainer.fit(X, Y, validation_data=(X, Y), epochs=3, verbose=0, callbacks=[best, stopping])
    after = trainer.get_weights()
    assert np.array_equal(before["b"], after["b"])
    assert not np.array_equal(before["w"], after["w"])
    averaged = trainer.export(averaged=True)
    assert files.stripped(averaged) == files.stripped(file)
    assert averaged != trainer.export()
    assert [p.name for p in tmp_path.iterdir()]


def test_a_failed_fit_changes_nothing() -> None:
    trainer = trainer_of(integer_file())
    fit(trainer, epochs=1)
    before, exported = trainer.get_state(), trainer.export()

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit(trainer, epochs=2, callbacks=LambdaCallback(on_train_begin=fail))
    with pytest.raises(DataError, match="10"):
        trainer.fit(X[:, :3], Y, verbose=0)
    assert trainer.export() == exported
    for name, array in trainer.get_state()["weights"].items():
        np.testing.assert_array_equal(array, before["weights"][name])


def test_graphs_and_tables_name_the_integers() -> None:
    trainer = trainer_of(integer_file())
    graphs = trainer.save_onnx_graph(bytes)
    assert onnx.load_from_string(graphs["model"]) == trainer.model
    assert onnx.load_from_string(graphs["trained"]) == trainer.export()
    train = onnx.load_from_string(graphs["train"]).graph
    assert {"w", "b"} <= {value.name for value in train.input}
    assert trainer.inspect().trains
    assert trainer.inspect().weights == ("w", "b")
    assert "10×6" in trainer.summary()


# ---------------------------------------------------------------------- what is trained


def test_settings_choose_the_integers() -> None:
    file = integer_file()
    only = trainer_of(file, quantization=Quantization(weights="w"))
    assert list(only.get_weights()) == ["w"]
    fit(only)
    old, new = ({t.name: t for t in model.graph.initializer} for model in (file, only.export()))
    assert old["b"] == new["b"]
    assert old["w"] != new["w"]
    assert list(trainer_of(file, weights=["!b"]).get_weights()) == ["w"]
    with pytest.raises(SettingError, match="No integer weight is called 'v'"):
        trainer_of(file, quantization=Quantization(weights="v"))
    with pytest.raises(SettingError, match="this file has no such integers"):
        trainer_of(linear(), quantization=Quantization())
    with pytest.raises(SettingError, match=r"an onnxfit.Quantization\(...\) or None, got str"):
        trainer_of(file, quantization="w")


def test_scales_are_settings() -> None:
    with pytest.raises(SettingError, match="weights= selects scales of a quantized file"):
        trainer_of(integer_file(), weights="*")


def with_batch_norm(file: onnx.ModelProto) -> onnx.ModelProto:
    graph = file.graph
    graph.node[-1].output[0] = "s"
    arrays = ["scale", "bias", "mean", "var"]
    ones = np.ones(files.COLUMNS, np.float32)
    graph.initializer.extend(numpy_helper.from_array(ones, name) for name in arrays)
    graph.node.append(helper.make_node("BatchNormalization", ["s", *arrays], ["y"]))
    return file


def test_batch_norm_is_folded_first_or_frozen() -> None:
    file = with_batch_norm(integer_file())
    with pytest.raises(ModelError, match=r"Fold it .*\n?.*batch_norm='frozen'"):
        trainer_of(file)
    trainer = trainer_of(file, batch_norm="frozen")
    fit(trainer, epochs=1)
    assert {"w", "b", "scale", "bias"} == set(trainer.get_weights())
    predicted = files.run_file(trainer.export(), X)
    np.testing.assert_array_equal(trainer.predict_on_batch(X), predicted)


def test_a_train_graph_compiles_where_onnxruntime_moves_rounding() -> None:
    """onnxruntime 1.31 moved a QuantizeLinear through the backward pass of a convolution."""
    rng = np.random.default_rng(0)
    nodes, arrays = [], {"s": np.array(0.05, np.float32), "z": np.array(0, np.uint8)}
    arrays["wz"] = np.array(0, np.int8)
    value = "x"
    for i, (outputs, inputs) in enumerate([(8, 1), (8, 8)]):
        arrays[f"w{i}"] = rng.integers(-127, 128, (outputs, inputs, 3, 3)).astype(np.int8)
        nodes += [
            helper.make_node("QuantizeLinear", [value, "s", "z"], [f"q{i}"]),
            helper.make_node("DequantizeLinear", [f"q{i}", "s", "z"], [f"d{i}"]),
            helper.make_node("DequantizeLinear", [f"w{i}", "s", "wz"], [f"f{i}"]),
            helper.make_node("Conv", [f"d{i}", f"f{i}"], [f"c{i}"], pads=[1] * 4),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
        ]
        value = f"r{i}"
    nodes.append(helper.make_node("Flatten", [value], ["y"]))
    graph = helper.make_graph(
        nodes,
        "convolutions",
        [helper.make_tensor_value_info("x", 1, ["N", 1, 4, 4])],
        [helper.make_tensor_value_info("y", 1, ["N", 128])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    trainer = Trainer(model, loss="mse", optimizer="adam")
    x = rng.normal(size=(8, 1, 4, 4)).astype(np.float32)
    trainer.fit(x, rng.normal(size=(8, 128)).astype(np.float32), verbose=0)
    np.testing.assert_array_equal(trainer.predict(x), files.run_file(trainer.export(), x))
