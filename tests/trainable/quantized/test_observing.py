"""Ranges of activations that follow the batches: torch's observer, onnxruntime's scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxfit import ModelError, Quantization, SettingError, Trainer
from onnxfit.callbacks import StochasticWeightAveraging
from onnxfit.optimizers import SGD, Adam
from tests.distributed.threads import on_ranks
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import COLUMNS, LIMITS, integer_file, numpy_type
from tests.trainable.quantized.layer_files import arrays_of, images, labels, layer_file

X = files.rows(32)
Y = np.random.default_rng(2).normal(size=(32, COLUMNS)).astype(np.float32)
BATCHES = [X[i : i + 8] * (1 + i) + i / 10 for i in range(0, 32, 8)]  # ranges that grow
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])
# type and zero point of an activation
KINDS = [("uint8", 100), ("uint8", 0), ("int8", -20), ("int8", 0), ("uint8", 128), ("uint16", 900)]
ALL_KINDS = pytest.mark.parametrize(("kind", "zero"), KINDS)


def activation_file(kind: str = "uint8", zero: int = 100, shape: tuple[int, ...] = ()) -> Any:
    """integer_file with an activation of another type."""
    model = integer_file()
    arrays = {
        "x_scale": np.full(shape, 2 / (LIMITS[kind][1] - LIMITS[kind][0]), np.float32),
        "x_zero": np.full(shape, zero, numpy_type(kind)),
    }
    for tensor in model.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return model


def trainer_of(model: onnx.ModelProto, observe: int = 3, **settings: Any) -> Trainer:
    defaults = {"loss": "mse", "optimizer": SGD(1e-3)}
    quantization = Quantization(observe=observe)
    return Trainer(model, **{**defaults, "quantization": quantization, **settings})


def range_of(model: onnx.ModelProto, kind: str) -> tuple[float, float]:
    arrays = arrays_of(model)
    scale, zero = float(arrays["x_scale"]), float(arrays["x_zero"])
    return scale * (LIMITS[kind][0] - zero), scale * (LIMITS[kind][1] - zero)


def expected_ranges(start: tuple[float, float], count: int) -> tuple[float, float]:
    low, high = start
    for batch in BATCHES[:count]:
        low += 0.01 * (min(float(batch.min()), 0) - low)
        high += 0.01 * (max(float(batch.max()), 0) - high)
    return low, high


def is_symmetric(kind: str, zero: int) -> bool:
    return zero == sum(LIMITS[kind], 1) // 2


# ---------------------------------------------------------------------- the numbers


@BOTH_BACKENDS
@ALL_KINDS
def test_ranges_follow_the_batches_and_stay(kind: str, zero: int, backend: str) -> None:
    """onnxruntime's quantizer makes the same scale and zero point of the ranges."""
    from onnxruntime.quantization.quant_utils import compute_scale_zp

    file = activation_file(kind, zero)
    trainer = trainer_of(file, backend=backend)
    assert trainer.export() == file
    symmetric = is_symmetric(kind, zero)
    low, high = range_of(file, kind)
    least, greatest = LIMITS[kind]
    if symmetric:
        least = max(least, -greatest)
        high = float(arrays_of(file)["x_scale"]) * (greatest - least) / 2
        low = -high
    for count, batch in enumerate(BATCHES, start=1):
        trainer.train_on_batch(batch, Y[:8])
        seen = min(count, 3)
        ends = expected_ranges((low, high), seen)
        if symmetric:
            size = high
            for one in BATCHES[:seen]:
                size += 0.01 * (float(np.abs(one).max()) - size)
            ends = -size, size
        found_zero, found_scale = compute_scale_zp(
            *(np.array(end, np.float32) for end in ends),
            *(np.array(end, numpy_type(kind)) for end in (least, greatest)),
            symmetric,
        )[:2]
        arrays = arrays_of(trainer.export())
        assert arrays["x_scale"] == pytest.approx(float(found_scale), rel=1e-5)
        assert abs(int(arrays["x_zero"]) - int(found_zero)) <= (kind == "uint16")
    assert float(arrays["x_scale"]) > 1.005 * float(arrays_of(file)["x_scale"])
    changed = {"x_scale", "w", "b"} | ({"x_zero"} - {symmetric and "x_zero"})
    assert {n for n in arrays if not np.array_equal(arrays[n], arrays_of(file)[n])} <= changed


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "zero"), [("uint8", 100), ("int8", -20), ("uint8", 7)])
def test_ranges_are_those_of_torch(kind: str, zero: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.ao.quantization.observer import MovingAverageMinMaxObserver

    dtype = torch.quint8 if kind == "uint8" else torch.qint8
    observer = MovingAverageMinMaxObserver(dtype=dtype, qscheme=torch.per_tensor_affine)
    file = activation_file(kind, zero)
    low, high = range_of(file, kind)
    observer.min_val, observer.max_val = torch.tensor(low), torch.tensor(high)
    trainer = trainer_of(file, observe=4)
    for batch in BATCHES:
        observer(torch.tensor(batch))
        trainer.train_on_batch(batch, Y[:8])
        scale, zero_point = observer.calculate_qparams()
        arrays = arrays_of(trainer.export())
        assert arrays["x_scale"] == pytest.approx(scale.item(), rel=1e-5)
        assert arrays["x_zero"] == zero_point.item()


def test_a_quantizer_without_zero_point_begins_at_0() -> None:
    model = integer_file()
    for node in model.graph.node:
        if "x_zero" in node.input:
            del node.input[2:]
    del model.graph.initializer[[t.name for t in model.graph.initializer].index("x_zero")]
    trainer = trainer_of(model)
    scale = 0.03
    for batch in BATCHES[:3]:
        trainer.train_on_batch(batch, Y[:8])
        scale += 0.01 * (float(batch.max()) / 255 - scale)
    assert trainer.get_weights()["x_scale"] == pytest.approx(scale, rel=1e-5)


def test_a_range_of_several_quantizers_covers_all() -> None:
    """Both sides of MaxPool; the file of all is what the trainer predicts."""
    file = layer_file()
    trainer = trainer_of(file, optimizer=Adam(0.002))
    trainer.fit(images(), labels(), epochs=2, batch_size=8, verbose=0)
    exported = trainer.export()
    assert files.stripped(exported) == files.stripped(file)
    old, new = arrays_of(file), arrays_of(exported)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    assert {"x_scale", "h_scale", "b_scale"} <= changed <= {
        "x_scale", "x_zero", "h_scale", "b_scale", "w", "b", "v"
    }  # fmt: skip
    np.testing.assert_array_equal(new["b_scale"], new["x_scale"] * new["w_scale"])
    np.testing.assert_array_equal(trainer.predict(images()), files.run_file(exported, images()))


def test_scales_of_one_element_stay_vectors() -> None:
    trainer = trainer_of(activation_file(shape=(1,)))
    plain = trainer_of(activation_file())
    for one in (trainer, plain):
        one.train_on_batch(BATCHES[3], Y[:8])
    assert trainer.get_weights()["x_scale"].shape == trainer.get_weights()["x_zero"].shape == (1,)
    assert trainer.get_weights()["x_scale"][0] == plain.get_weights()["x_scale"]


def test_ranges_of_zeros_leave_a_scale() -> None:
    trainer = trainer_of(activation_file(), observe=10**6)
    trainer.set_weights({"x_scale": np.float32(1e-37)})
    for _ in range(300):
        trainer.train_on_batch(np.zeros((8, 10), np.float32), Y[:8])
    assert 0 < trainer.get_weights()["x_scale"] < 2e-38
    trainer.export()


# ---------------------------------------------------------------------- a whole training


@BOTH_BACKENDS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_goes_on_to_the_last_bit(tmp_path: Path, backend: str, accumulate: int) -> None:
    settings = {"observe": 11, "accumulate": accumulate, "backend": backend, "optimizer": "adam"}
    file = activation_file()

    def fit(trainer: Trainer, epochs: int, first: int = 0) -> None:
        trainer.fit(X, Y, epochs=epochs, initial_epoch=first, batch_size=8, verbose=0)

    whole, half = trainer_of(file, **settings), trainer_of(file, **settings)
    fit(whole, 4)
    fit(half, 2)
    path = half.save(tmp_path / "c")
    for resumed in (Trainer.load(path), trainer_of(file, **settings)):
        resumed.restore(path)
        assert resumed.settings["quantization"] == Quantization(observe=11)
        fit(resumed, 4, 2)
        assert resumed.export(lineage=False) == whole.export(lineage=False)
        for name, array in whole.get_weights().items():
            np.testing.assert_array_equal(resumed.get_weights()[name], array, err_msg=name)


@BOTH_BACKENDS
def test_batches_of_a_window_count_one_by_one(backend: str) -> None:
    trainers = [
        trainer_of(activation_file(), observe=3, backend=backend, accumulate=n) for n in (1, 2)
    ]
    for batch in BATCHES:
        for trainer in trainers:
            trainer.train_on_batch(batch, Y[:8])
    one, other = (trainer.get_weights() for trainer in trainers)
    assert one["x_scale"] == other["x_scale"]
    assert one["x_zero"] == other["x_zero"]
    assert not np.array_equal(one["w"], other["w"])


@BOTH_BACKENDS
def test_a_step_is_undone_and_ranges_are_frozen(backend: str) -> None:
    trainer = trainer_of(activation_file(), backend=backend)
    before = trainer.get_weights()
    trainer.train_on_batch(BATCHES[3], Y[:8])
    assert trainer.get_weights()["x_scale"] != before["x_scale"]
    trainer.revert_step()
    assert trainer.get_weights()["x_scale"] == before["x_scale"]
    trainer.frozen = "x_*"
    trainer.train_on_batch(BATCHES[3], Y[:8])
    after = trainer.get_weights()
    assert after["x_scale"] == before["x_scale"]
    assert not np.array_equal(after["w"], before["w"])


@BOTH_BACKENDS
def test_ranks_average_their_ranges(backend: str) -> None:
    def trained(communicator: Any = None) -> dict[str, np.ndarray]:
        trainer = trainer_of(activation_file(), backend=backend, distribute=communicator, threads=1)
        trainer.fit(X[:16], Y[:16], batch_size=16, shuffle=False, verbose=0)
        return trainer.get_weights()

    ranks = on_ranks(2, trained)
    for name, array in ranks[0].items():
        np.testing.assert_array_equal(ranks[1][name], array, err_msg=name)
    halves = []
    for rows in (X[:16:2], X[1:16:2]), (X[:8], X[8:16]):
        scales = []
        for part in rows:
            trainer = trainer_of(activation_file())
            trainer.train_on_batch(part, Y[:8])
            scales.append(trainer.get_weights()["x_scale"])
        halves.append(np.mean(scales))
    assert np.isclose(ranks[0]["x_scale"], halves, rtol=1e-6).any()


def test_averaged_weights_leave_ranges_alone() -> None:
    trainer = trainer_of(activation_file())
    average = StochasticWeightAveraging(0)
    trainer.fit(X, Y, epochs=2, batch_size=8, verbose=0, callbacks=average)
    weights = trainer.get_weights()
    assert weights["x_scale"] == pytest.approx(2 / 255, rel=0.5)
    assert 0 <= weights["x_zero"] <= 255


def test_graphs_and_tables_name_the_ranges() -> None:
    trainer = trainer_of(activation_file())
    train = onnx.load_from_string(trainer.save_onnx_graph(bytes)["train"]).graph
    assert {"x_scale/next", "x_zero/next"} <= {value.name for value in train.output}
    assert "Quantization(observe=3)" in str(trainer.summary())
    assert "statistic" in str(trainer.summary())
    assert "x_scale" not in trainer_of(activation_file(), observe=0).get_weights()


# ---------------------------------------------------------------------- bad input


def test_files_without_activations() -> None:
    with pytest.raises(
        SettingError, match="integer activations, but this one has only integer weights"
    ):
        trainer_of(integer_file(activations=False))
    with pytest.raises(SettingError, match="selects scales of a quantized file, w_scale, x_scale"):
        trainer_of(activation_file(), weights=["*_scale"])


def test_activations_with_several_scales() -> None:
    model = activation_file(shape=(10,))
    for node in model.graph.node:
        if "x_scale" in node.input:
            node.attribute.append(helper.make_attribute("axis", 1))
    with pytest.raises(ModelError, match=r"of shape \(10,\), but observe= supports"):
        trainer_of(model)


def test_ranges_that_would_move_apart() -> None:
    model = layer_file()
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "h_zero":
                node.input[i] = "x_zero"
    with pytest.raises(ModelError, match="zero point 'x_zero' belongs to the scales 'x_scale'"):
        trainer_of(model)
    model = layer_file()
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "h_scale":
                node.input[i] = "x_scale"
    with pytest.raises(ModelError, match="'x_scale' belongs to several zero points"):
        trainer_of(model)
