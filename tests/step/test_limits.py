"""Settings that the element types of a model cannot hold are refused, or have a meaning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import Trainer, losses, optimizers, penalties, schedules
from onnxfit.errors import DataError, OnnxfitError, SettingError
from onnxfit.registry import registry
from tests.models import mlp

NUMBERS = [math.nan, math.inf, -math.inf, 1e39, -1e39, 1e-50, -1.0, 10**400]
# The last feature is 0, so that a gradient is 0 and an eps of 0 would divide 0 by 0.
X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32) * [1, 1, 1, 0]
X = X.astype(np.float32)
Y = np.abs(np.random.default_rng(1).normal(size=(12, 3))).astype(np.float32)
LABELS = [Y / Y.sum(1, keepdims=True), (Y > 0.5).astype(np.float32), np.arange(12) % 3, Y[:, :1]]
REQUIRED = {"learning_rate": 0.1, "max_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5}
REQUIRED |= {"step_size": 2, "total_steps": 5, "schedule": 0.1, "steps": 2, "boundaries": (2,)}
REQUIRED |= {"values": (0.1, 0.2), "base_learning_rate": 0.05, "milestones": (2,)}
REQUIRED |= {"schedules": (0.1, 0.2), "warmup_steps": 1, "stable_steps": 0}
# By default, a rate that no update of `train` reaches.
SHORTENED = {"step_size_up": 1}


def settings_of(module: str, base: type) -> list[Any]:
    """Every class of a registry with each of its fields that holds floats."""
    classes = {cls.__name__: cls for cls in registry(module, base).values()}
    return [
        pytest.param(cls, field, id=f"{name}.{field.name}")
        for name, cls in sorted(classes.items())
        for field in dataclasses.fields(cls)
        if "float" in str(field.type) or "LearningRate" in str(field.type)
    ]


def objects(cls: type, field: dataclasses.Field, width: int) -> Iterator[Any]:
    """The instances with an unusual number in that field that the constructor allows."""
    for number in NUMBERS:
        value: Any = number
        if "tuple" in str(field.type):
            value = (number,) * width
        elif "Mapping" in str(field.type):
            value = {"*": number}
        fields = dataclasses.fields(cls)
        required = {
            f.name: REQUIRED[f.name]
            for f in fields
            if f.default is f.default_factory is dataclasses.MISSING
        }
        required |= {f.name: SHORTENED[f.name] for f in fields if f.name in SHORTENED}
        try:
            yield cls(**(required | {field.name: value}))
        except OnnxfitError:
            continue


def train(**settings: Any) -> None:
    """Take some steps; if all goes through without an error of ours, the weights are finite."""
    try:
        trainer = Trainer(mlp(), **settings)
    except OnnxfitError:
        return
    for labels in LABELS:
        try:
            for _ in range(3):
                trainer.train_on_batch(X, labels)
        except DataError:
            continue
        except OnnxfitError:  # a schedule's number, which only a step asks for
            assert callable(trainer.optimizer.settings.learning_rate), settings
            for name, w in trainer.get_weights().items():
                assert np.isfinite(w).all(), (name, settings)
        break
    for name, w in trainer.get_weights().items():
        assert np.isfinite(w).all(), (name, settings)


@pytest.mark.parametrize(("cls", "field"), settings_of("onnxfit.optimizers", optimizers.Optimizer))
def test_a_number_of_an_optimizer_is_refused_or_trains(cls, field) -> None:
    for optimizer in objects(cls, field, 2):
        train(loss="mse", optimizer=optimizer)


@pytest.mark.parametrize(("cls", "field"), settings_of("onnxfit.losses", losses.Loss))
def test_a_number_of_a_loss_is_refused_or_trains(cls, field) -> None:
    for loss in objects(cls, field, 3):
        train(loss=loss)


@pytest.mark.parametrize(("cls", "field"), settings_of("onnxfit.penalties", penalties.Penalty))
def test_a_number_of_a_penalty_is_refused_or_trains(cls, field) -> None:
    for penalty in objects(cls, field, 2):
        train(loss="mse", penalty=penalty)


@pytest.mark.parametrize(("cls", "field"), settings_of("onnxfit.schedules", schedules.Schedule))
def test_a_number_of_a_schedule_is_refused_or_trains(cls, field) -> None:
    for schedule in objects(cls, field, 2):
        train(loss="mse", optimizer=optimizers.SGD(schedule))


@pytest.mark.parametrize("number", [*NUMBERS, True, "1"])
def test_a_setting_of_the_trainer_is_refused_or_trains(number: Any) -> None:
    train(loss="mse", clip_norm=number)
    train(loss="mse", clip_value=number)
    train(loss={"y": "mse"}, loss_weights={"y": number})
    if not isinstance(number, str):
        train(loss="mse", optimizer=number)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": optimizers.Adam(eps=1e-50)}, "Adam's eps must be .*float32.* got 1e-50"),
        ({"optimizer": optimizers.SGD(1e39)}, "SGD's learning_rate must be .* got 1e\\+39"),
        (
            {"penalty": 1e39},
            "L2's weight must be .*float32 \\(the element type of weight .* got 1e\\+39",
        ),
        ({"loss": losses.Huber(1e39)}, "Huber's delta must be .* of output 'y'\\), got 1e\\+39"),
        (
            {"loss": {"y": "mse"}, "loss_weights": {"y": 1e39}},
            r"loss_weights\['y'\] must be .* got 1e\+39",
        ),
        ({"loss": {"y": "mse"}, "loss_weights": {"y": "a"}}, "must be a finite number, got 'a'"),
        ({"clip_norm": 1e-50}, "clip_norm must be between 1.4e-45 and 3.4e.*float32.* got 1e-50"),
        ({"clip_value": 1e-50}, "clip_value must be .* got 1e-50"),
        ({"clip_norm": "1"}, "clip_norm must be a positive number or None, got '1'"),
        (
            {"optimizer": optimizers.SGD(1e38, learning_rate_multipliers={"*": 10.0})},
            "allow at most 3.4e\\+37",
        ),
    ],
)
def test_the_refusal_names_the_setting_and_the_range(settings, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Trainer(mlp(), **({"loss": "mse"} | settings))


def test_a_penalty_beside_a_loss_is_in_range_too() -> None:
    with pytest.raises(SettingError, match=r"L2's weight must be .* got 1e\+39"):
        onnxfit.add_loss(mlp(), "mse", penalty=1e39)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("bound", [math.inf, 1e39, 1e300])
@pytest.mark.parametrize("setting", ["clip_norm", "clip_value", "clip_adaptive"])
def test_a_bound_that_no_gradient_reaches_clips_nothing(setting, bound, backend, tmp_path) -> None:
    expected, clipped = (
        Trainer(mlp(), loss="mse", optimizer=0.1, backend=backend, **settings)
        for settings in ({}, {setting: bound})
    )
    for trainer in (expected, clipped):
        trainer.fit(X, LABELS[0], epochs=2, verbose=0)
    for name, w in expected.get_weights().items():
        np.testing.assert_array_equal(clipped.get_weights()[name], w)
    assert Trainer.load(clipped.save(tmp_path / "c")).settings[setting] == bound


def test_a_learning_rate_set_later_is_in_range_too() -> None:
    trainer = Trainer(mlp(), loss="mse")
    with pytest.raises(SettingError, match=r"learning rate is 1e\+39.*at most 3.4e\+38"):
        trainer.learning_rate = 1e39
    assert trainer.learning_rate == 0.01
    scheduled = Trainer(
        mlp(), loss="mse", optimizer=optimizers.SGD(lambda step: 10.0 ** (38 + step))
    )
    scheduled._training.state._check_learning_rate(scheduled.learning_rate)
    scheduled.global_step = 1
    with pytest.raises(SettingError, match="at most"):
        scheduled.train_on_batch(X, LABELS[0])


def of_type(dtype: type) -> onnx.ModelProto:
    """y = x @ w, where w has another type; the second feature gets no gradient where x is 0."""
    double = onnx.TensorProto.DOUBLE
    graph = oh.make_graph(
        [
            oh.make_node("Cast", ["w"], ["wide"], to=double),
            oh.make_node("MatMul", ["x", "wide"], ["y"]),
        ],
        "g",
        [oh.make_tensor_value_info("x", double, ["N", 2])],
        [oh.make_tensor_value_info("y", double, ["N", 1])],
        [from_array(np.ones((2, 1), dtype), "w")],
    )
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=8)


def test_the_range_is_that_of_the_element_type() -> None:
    double = of_type(np.float64)
    trainer = Trainer(double, loss="mse", optimizer=optimizers.Adam(eps=1e-50), clip_norm=1e39)
    assert trainer._training.recipe.clip_norm == 1e39
    trainer.train_on_batch(np.array([[1.0, 0.0]]), [[1.0]])
    assert np.isfinite(trainer.get_weights()["w"]).all()
    half = of_type(np.float16)
    with pytest.raises(
        SettingError, match=r"eps must be between 6e-08 and 6.6e\+04.*float16.* got 1e-08"
    ):
        Trainer(half, loss="mse", optimizer="rmsprop")
    with pytest.raises(SettingError, match=r"learning rate|learning_rate"):
        Trainer(half, loss="mse", optimizer=1e5)
    assert Trainer(half, loss="mse", clip_value=1e5)._training.recipe.clip_value is None


def test_a_loss_of_an_output_of_small_integers_is_refused() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 1] x) => (int4[N, 1] y) <float[1, 1] w = {1}> { p = MatMul(x, w) y = Cast<to=22>(p) }"""
    with pytest.raises(OnnxfitError):
        Trainer(onnx.parser.parse_model(text), loss="mse")
