"""Learned scales and zero points: steps of torch's learnable quantizer, and files that keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnxfit import DivergenceError, ModelError, Quantization, SettingError, Trainer
from onnxfit.gradients.backward import gradients
from onnxfit.graph.model import OnnxModel
from onnxfit.graph.values import GraphBuilder
from onnxfit.optimizers import SGD, Adam
from onnxfit.optimizers.base import WeightInfo
from onnxfit.step.update import fused_weights
from onnxfit.trainable.quantized import learning
from onnxfit.trainable.quantized.quantized_model import to_fake_quantized
from tests.trainable.quantized import integer_files as files
from tests.trainable.quantized.integer_files import (
    COLUMNS,
    LIMITS,
    ROWS,
    integer_file,
    without_overflow,
)
from tests.trainable.quantized.layer_files import (
    arrays_of,
    images,
    labels,
    layer_file,
    operator_file,
)

LEARNED = Quantization(scales="learned")
X = files.rows(32)
Y = np.random.default_rng(2).normal(size=(32, COLUMNS)).astype(np.float32)
BOTH_BACKENDS = pytest.mark.parametrize("backend", ["full", "forward_backward"])


def trainer_of(model: onnx.ModelProto, **settings: Any) -> Trainer:
    defaults = {"loss": "mse", "optimizer": Adam(0.01), "quantization": LEARNED}
    return Trainer(model, **{**defaults, **settings})


def fit(trainer: Trainer, epochs: int = 2, **settings: Any) -> None:
    trainer.fit(X, Y, epochs=epochs, batch_size=8, verbose=0, **settings)


def with_array(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    return model


# ---------------------------------------------------------------------- a step


@pytest.mark.torch
@BOTH_BACKENDS
@pytest.mark.parametrize(
    ("kind", "grain", "symmetric"),
    [
        ("int8", "tensor", True),
        ("uint8", "tensor", False),
        ("int4", "channel", True),
        ("int8", "channel", False),
        ("uint4", "channel", False),
    ],
)
def test_sgd_takes_the_steps_of_torch(kind: str, grain: str, symmetric: bool, backend: str) -> None:
    torch = pytest.importorskip("torch")
    file = with_array(integer_file(kind, grain, symmetric), "x_zero", np.array(90, np.uint8))
    rate = 2e-4
    trainer = trainer_of(file, optimizer=SGD(rate), backend=backend)
    start = trainer.get_weights()
    expected = {"w", "b", "w_scale", "x_scale", "x_zero"} | ({"w_zero"} - {symmetric and "w_zero"})
    assert set(start) == expected
    shape = (COLUMNS,) if grain == "channel" else (1,)
    zeros = torch.zeros(shape)
    low, high = LIMITS[kind]
    factors = 1 / np.sqrt(ROWS * COLUMNS * high), 1 / np.sqrt(ROWS * 255)
    for i in range(0, 32, 8):
        # each step begins at the same numbers: a difference of a last bit may round otherwise
        values = {
            name: torch.tensor(array if name in "wb" else array.reshape(-1), requires_grad=True)
            for name, array in trainer.get_weights().items()
        }
        rounded = [values["w"], values["w_scale"], values.get("w_zero", zeros)]
        if grain == "channel":
            quantize, axis = torch._fake_quantize_learnable_per_channel_affine, [1]
        else:
            quantize, axis = torch._fake_quantize_learnable_per_tensor_affine, []
        w = quantize(*rounded, *axis, low, high, factors[0])
        x = torch._fake_quantize_learnable_per_tensor_affine(
            torch.tensor(X[i : i + 8]), values["x_scale"], values["x_zero"], 0, 255, factors[1]
        )
        torch.nn.functional.mse_loss(values["b"] - x @ w, torch.tensor(Y[i : i + 8])).backward()
        torch.optim.SGD(values.values(), lr=rate).step()
        trainer.train_on_batch(X[i : i + 8], Y[i : i + 8])
        weights = trainer.get_weights()
        for name, value in values.items():
            found = weights[name].reshape(value.shape)
            np.testing.assert_allclose(found, value.detach().numpy(), rtol=1e-5, atol=1e-7)
    for name in set(start) - {"x_zero", "w_zero"}:
        assert not np.array_equal(weights[name], start[name]), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_factor_changes_the_gradient_alone(dtype: Any) -> None:
    """Every scale between the bounds keeps its last bit."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
    op = GraphBuilder(graph)
    s = op.input("s", dtype, (5000,))
    scaled = learning._with_gradient(op, s, op.constant(0.25, np.float64))
    op.output("same", scaled)
    total = op.output("total", op.ReduceSum(scaled * scaled, keepdims=0))
    found, _ = gradients(op, {1: op.constant(1, dtype)}, [s.ir])
    op.output("gradient", found[s.ir])
    assert total.shape == ()
    exponents = np.random.default_rng(0).uniform(-60, 40, 5000)
    values = np.exp2(exponents).astype(dtype)
    values[:3] = learning.MIN_SCALE, learning.MAX_SCALE, 1 / 3
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = files.onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    same, slope = session.run(["same", "gradient"], {"s": values})
    np.testing.assert_array_equal(same, values)
    np.testing.assert_allclose(slope, 0.5 * values, rtol=1e-6)


def test_sizes_that_only_a_batch_tells_give_the_same_factor() -> None:
    weights = []
    for batch in ("N, 1, 4, 4", "N, 1, H, W"):
        trainer = trainer_of(layer_file(batch=batch), optimizer=SGD(0.1))
        trainer.train_on_batch(images(), labels())
        weights.append(trainer.get_weights())
        graphs = trainer.save_onnx_graph(bytes)
        assert "x_scale" in {v.name for v in onnx.load_from_string(graphs["train"]).graph.input}
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=1e-5)


def test_zero_points_of_symmetric_numbers_stay() -> None:
    assert "w_zero" not in trainer_of(integer_file(symmetric=True)).get_weights()
    learned = trainer_of(layer_file()).get_weights()
    assert set(learned) == {"w", "b", "v", "w_scale", "x_scale", "h_scale", "v_scale", "x_zero"}
    assert learned["x_zero"] == np.float32(100)


# ---------------------------------------------------------------------- the file


CASES = [
    (kind, grain, symmetric, activations)
    for kind in LIMITS
    for grain in ("tensor", "channel", "block")
    for symmetric in (True, False)
    for activations in (True, False)
    # onnxruntime cannot run 8 bits in blocks behind activations of integers
    if not (grain == "block" and activations and kind in ("int8", "uint8"))
]


@pytest.mark.parametrize(("kind", "grain", "symmetric", "activations"), CASES)
def test_a_file_differs_in_its_numbers_alone(
    kind: str, grain: str, symmetric: bool, activations: bool
) -> None:
    file = integer_file(kind, grain, symmetric, activations=activations)
    trainer = trainer_of(file, optimizer=Adam(0.001))
    assert trainer.export() == file
    fit(trainer, epochs=1)
    exported = trainer.export()
    assert files.stripped(exported) == files.stripped(file)
    onnx.checker.check_model(exported, full_check=True)
    old, new = ({t.name: t for t in m.graph.initializer} for m in (file, exported))
    changed = {name for name in old if old[name] != new[name]}
    expected = {"w_scale", "b", "x_scale"} if activations else {"w_scale", "b"}
    assert expected <= changed <= expected | {"w", "w_zero"}
    assert all(old[n].data_type == new[n].data_type and old[n].dims == new[n].dims for n in old)
    predicted = files.run_file(exported, X)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=len(X)), predicted)
    np.testing.assert_array_equal(trainer.predict_on_batch(X), predicted)


@BOTH_BACKENDS
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_scale_of_a_bias_follows(symmetric: bool, backend: str) -> None:
    file = layer_file(symmetric)
    trainer = trainer_of(file, backend=backend, optimizer=Adam(0.002))
    assert trainer.export() == file
    trainer.fit(images(), labels(), epochs=2, batch_size=8, verbose=0)
    exported = trainer.export()
    assert files.stripped(exported) == files.stripped(file)
    arrays = arrays_of(exported)
    scale = arrays["x_scale"] * arrays["w_scale"]
    assert not np.allclose(scale, arrays_of(file)["b_scale"], rtol=1e-3)
    np.testing.assert_array_equal(arrays["b_scale"], scale)
    bias = trainer.get_weights()["b"]
    np.testing.assert_array_equal(arrays["b"], np.rint(bias / scale))
    np.testing.assert_array_equal(trainer.predict(images()), files.run_file(exported, images()))


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": ["!b", "!w"]},
        {"quantization": Quantization(weights=["!b"], scales="learned")},
        {"weights": ["*_scale", "!b_scale"]},
    ],
    ids=str,
)
def test_what_is_frozen_keeps_its_real_numbers(settings: dict[str, Any]) -> None:
    """Its scale is learned, so that other integers stand for them."""
    file = layer_file()
    if "weights" in settings and "*_scale" in settings["weights"]:
        settings = {"weights": ["x_scale", "w_scale"]}
    trainer = trainer_of(file, optimizer=Adam(0.002), **settings)
    assert "b" not in trainer.get_weights()
    trainer.fit(images(), labels(), epochs=2, batch_size=8, verbose=0)
    old, new = arrays_of(file), arrays_of(trainer.export())
    assert not np.array_equal(old["b"], new["b"])
    np.testing.assert_allclose(
        new["b"] * new["b_scale"], old["b"] * old["b_scale"], atol=new["b_scale"].max()
    )
    if "w" not in trainer.get_weights():
        real = {i: a["w"] * a["w_scale"].reshape(-1, 1, 1, 1) for i, a in enumerate((old, new))}
        error = np.abs(real[0] - real[1]).max()
        assert error < 0.1 * np.abs(real[0]).max()
    np.testing.assert_array_equal(
        trainer.predict(images()), files.run_file(trainer.export(), images())
    )


@without_overflow
@pytest.mark.parametrize("quantization", [LEARNED, Quantization(observe=3)], ids=str)
def test_operators_of_integers_train_as_they_run(quantization: Quantization) -> None:
    """The file computes what the training step computes, with the same bias in other integers."""
    file = operator_file()
    y = np.random.default_rng(3).normal(size=(16, 12)).astype(np.float32)
    trainer = trainer_of(file, optimizer=Adam(0.001), quantization=quantization)
    assert trainer.export() == file
    for _ in range(4):
        trainer.train_on_batch(images(), y)
    evaluated = trainer.evaluate(images(), y)["loss"]
    exported = trainer.export()
    assert trainer.train_on_batch(images(), y)["loss"] == pytest.approx(evaluated, rel=1e-5)
    assert files.stripped(exported) == files.stripped(file)
    old, new = arrays_of(file), arrays_of(exported)
    assert {"x_scale", "h_scale", "b"} <= {n for n in old if not np.array_equal(old[n], new[n])}


def test_numbers_that_are_no_initializers_stay() -> None:
    model = operator_file()
    for tensor in model.graph.initializer:
        if tensor.name == "x_zero":
            tensor.CopyFrom(numpy_helper.from_array(np.full((1, 1), 100, np.uint8), "x_zero"))
    with pytest.raises(ModelError, match="points x_zero/expanded to stay consistent with others"):
        to_fake_quantized(OnnxModel(model), LEARNED)


def test_a_bias_of_its_own_scale_keeps_it() -> None:
    trainer = trainer_of(integer_file())
    fit(trainer)
    assert arrays_of(trainer.export())["b_scale"] == arrays_of(trainer.model)["b_scale"]


def test_one_scale_of_several_quantizers_is_one_weight() -> None:
    file = layer_file()
    trainer = trainer_of(file)
    train = onnx.load_from_string(trainer.save_onnx_graph(bytes)["train"])
    assert sum(value.name == "h_scale" for value in train.graph.input) == 1
    # the factor of the first: 3 channels of 4x4
    factors = [numpy_helper.to_array(t) for t in train.graph.initializer]
    assert any(f.shape == () and np.isclose(f, (48 * 255) ** -0.5, rtol=1e-6) for f in factors)


# ---------------------------------------------------------------------- a whole training


@BOTH_BACKENDS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_goes_on_to_the_last_bit(tmp_path: Path, backend: str, accumulate: int) -> None:
    file = integer_file("int4", "channel", symmetric=False)
    settings = {"accumulate": accumulate, "backend": backend}
    whole = trainer_of(file, **settings)
    fit(whole, epochs=4)
    half = trainer_of(file, **settings)
    fit(half)
    path = half.save(tmp_path / "c")
    for resumed in (Trainer.load(path), trainer_of(file, **settings)):
        resumed.restore(path)
        assert resumed.settings["quantization"] == LEARNED
        assert resumed.export() == half.export()
        resumed.fit(X, Y, epochs=4, initial_epoch=2, batch_size=8, verbose=0)
        for name, array in whole.get_weights().items():
            np.testing.assert_array_equal(resumed.get_weights()[name], array, err_msg=name)
        assert resumed.export(lineage=False) == whole.export(lineage=False)


@BOTH_BACKENDS
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lion", "rmsprop"])
@pytest.mark.parametrize("rate", [1e6, 1e30])
def test_scales_stay_near_those_of_the_file(optimizer: str, rate: float, backend: str) -> None:
    classes = {cls.__name__.lower(): cls for cls in _optimizers()}
    multipliers = {"*_scale": 1.0, "*_zero": 1.0, "*": 1e-37}
    trainer = trainer_of(
        integer_file("int8", "channel", symmetric=False),
        optimizer=classes[optimizer](rate, learning_rate_multipliers=multipliers),
        backend=backend,
    )
    start = trainer.get_weights()
    for seed in range(4):
        trainer.train_on_batch(files.rows(8, seed), -Y[:8])
        weights = trainer.get_weights()
        for name in ("w_scale", "x_scale"):
            ratio = weights[name] / start[name]
            assert (ratio >= 0.999 / learning.MAX_FACTOR).all()
            assert (ratio <= 1.001 * learning.MAX_FACTOR).all()
        assert (np.abs(weights["w_zero"]) <= 128).all()
    ends = [learning.MAX_FACTOR**power * start["x_scale"] for power in (-1, 1)]
    assert np.isclose(weights["x_scale"], ends).any()
    assert np.isfinite(files.run_file(trainer.export(), X)).all()


def _optimizers() -> list[Any]:
    from onnxfit import optimizers

    return [optimizers.SGD, optimizers.Adam, optimizers.Lion, optimizers.RMSprop]


def test_a_scale_leaves_its_bound_again() -> None:
    trainer = trainer_of(
        integer_file(), optimizer=SGD(1e9, learning_rate_multipliers={"x_scale": 1, "*": 1e-30})
    )
    trainer.train_on_batch(X, Y)
    bound = trainer.get_weights()["x_scale"]
    assert bound == pytest.approx(0.03 / 128) or bound == pytest.approx(0.03 * 128)
    trainer.learning_rate = 1e-3
    trainer.train_on_batch(X, Y)
    assert trainer.get_weights()["x_scale"] != bound


def test_the_average_of_scales_is_one_of_clamped_scales() -> None:
    optimizer = SGD(1e6, ema_momentum=0.5, learning_rate_multipliers={"x_scale": 1, "*": 1e-30})
    trainer = trainer_of(integer_file(), optimizer=optimizer)
    for _ in range(3):
        trainer.train_on_batch(X, Y)
    averaged = arrays_of(trainer.export(averaged=True))["x_scale"]
    assert 0.03 / 129 < averaged < 0.03 * 129


def test_nan_is_not_hidden(tmp_path: Path) -> None:
    for name in ("x_scale", "w_zero"):
        trainer = trainer_of(integer_file("int8", "tensor", symmetric=False))
        weights = trainer.get_weights()
        trainer.set_weights({name: np.full_like(weights[name], np.nan)})
        with pytest.raises(DivergenceError, match=f"{name}' contains nan"):
            trainer.export(tmp_path / "m.onnx")
        trainer.train_on_batch(X, Y)
        assert np.isnan(trainer.get_weights()[name]).all()
    assert not list(tmp_path.iterdir())


def test_bounded_weights_are_fused_among_themselves() -> None:
    weights = {name: np.ones(3, np.float32) for name in "abcd"}
    slots = {name: {"m": np.zeros(3, np.float32)} for name in "abcd"}
    bounds = {name: (np.zeros(3), np.ones(3)) for name in "bd"}
    infos = [WeightInfo(name, w.shape, w.dtype) for name, w in weights.items()]
    assert fused_weights(Adam().for_weights(infos), weights, slots, bounds) == [
        ["a", "c"],
        ["b", "d"],
    ]


def test_a_penalty_leaves_scales_alone() -> None:
    trainer = trainer_of(integer_file("int8", "tensor", symmetric=False), penalty=0.1)
    assert list(trainer._training.recipe.penalties) == ["w", "b"]


def test_a_summary_and_an_inspection_name_them() -> None:
    trainer = trainer_of(integer_file())
    text = str(trainer.summary())
    assert "quantization=Quantization(scales='learned')" in text
    assert "x_scale" in text
    assert trainer.inspect().weights == ("w_scale", "x_scale", "w", "b")


# ---------------------------------------------------------------------- bad input


def test_scales_that_cannot_be_learned() -> None:
    biases = Quantization(weights="b", scales="learned")
    model = integer_file(activations=False)
    with pytest.raises(SettingError, match="only biases of 32 bits"):
        trainer_of(model, quantization=biases)
    with pytest.raises(SettingError, match="this file has no such integers"):
        trainer_of(files_of_floats())
    frozen = Quantization(weights="!v", scales="learned")
    with pytest.raises(SettingError, match=r"selects scales of a quantized file, v_scale"):
        trainer_of(layer_file(), weights=["w", "v_scale"], quantization=frozen)


def files_of_floats() -> onnx.ModelProto:
    from tests.graph.graphs import linear

    return linear()


def test_integers_behind_two_scales() -> None:
    model = integer_file()
    node = next(n for n in model.graph.node if n.name == "dequantize_w")
    copy = model.graph.node.add()
    copy.CopyFrom(node)
    copy.output[0], copy.input[1], copy.name = "other", "other_scale", "other"
    scale = next(t for t in model.graph.initializer if t.name == "w_scale")
    tensor = model.graph.initializer.add()
    tensor.CopyFrom(scale)
    tensor.name = "other_scale"
    with pytest.raises(ModelError, match="'w' are read through two scales"):
        to_fake_quantized(OnnxModel(model), LEARNED)
