"""Constraints: Keras's formulas in NumPy, and training with them."""

import dataclasses
import json

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.optimizers import SGD, Adam, Groups, MaxNorm, MinMaxNorm, NonNeg, UnitNorm
from onnxfit.optimizers.constraints import Constraint, get_constraint
from onnxfit.registry import from_config, registry, to_config
from tests.models import mlp
from tests.test_optimizers import Update, pull, start

MODULE = "onnxfit.optimizers"
REGISTRY = registry(MODULE, Constraint)
X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 48)


def norms(w, axis):
    return np.sqrt((w**2).sum(axis, keepdims=True))


# Keras's, whose epsilon is 1e-7
FORMULAS = {
    "MaxNorm": lambda c, w: (
        w * (np.clip(norms(w, c.axis), 0, c.max_value) / (1e-7 + norms(w, c.axis)))
    ),
    "NonNeg": lambda c, w: w * (w >= 0),
    "UnitNorm": lambda c, w: w / (1e-7 + norms(w, c.axis)),
    "MinMaxNorm": lambda c, w: (
        w
        * (
            (
                c.rate * np.clip(norms(w, c.axis), c.min_value, c.max_value)
                + (1 - c.rate) * norms(w, c.axis)
            )
            / (1e-7 + norms(w, c.axis))
        )
    ),
}
CASES = [
    *(cls() for cls in dict.fromkeys(REGISTRY.values())),
    MaxNorm(0.5, axis=1),
    MaxNorm(0.0),
    UnitNorm(axis=(0, 1)),
    UnitNorm(axis=-1),
    MinMaxNorm(0.5, 0.8, 0.3),
    MinMaxNorm(2.0, 3.0, axis=[-1, 0]),
]
every_constraint = pytest.mark.parametrize("constraint", CASES, ids=repr)


def test_every_constraint_has_a_formula():
    assert {cls.__name__ for cls in REGISTRY.values()} == set(FORMULAS)


@every_constraint
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_update_is_projected_by_kerass_formula(constraint, dtype):
    weights = {n: w for n, w in start(dtype).items() if w.ndim >= 2}
    update = Update(Adam(0.05, ema_momentum=0.5, constraints=constraint), weights)
    plain = Update(Adam(0.05), weights)
    average = weights
    for _ in range(12):
        g = pull(update.weights)
        plain.weights = dict(update.weights)
        plain.steps = update.steps
        plain(g)
        update(g)
        average = {n: 0.5 * average[n] + 0.5 * update.weights[n] for n in weights}
        for name, w in update.weights.items():
            expected = FORMULAS[type(constraint).__name__](constraint, plain.weights[name])
            np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(update.slots[name]["ema"], average[name], rtol=1e-5)


@pytest.mark.parametrize("optimizer", [Adam(0.05), SGD(0.5), SGD(0.5, 0.9)], ids=repr)
@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_training_by_patterns_and_checkpoints(backend, optimizer, tmp_path):
    constraints = {"fc0.weight": MaxNorm(0.5), "fc1.*": None, "*": "non_neg"}
    optimizer = dataclasses.replace(optimizer, constraints=constraints)
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizer, backend=backend)
    trainer.fit(X, Y, batch_size=12, epochs=3, verbose=0)
    w = trainer.get_weights()
    assert (norms(w["fc0.weight"], 0) <= 0.5 + 1e-6).all()
    assert (norms(w["fc0.weight"], 0) > 0.49).any()
    assert (w["fc0.bias"] >= 0).all()
    assert (w["fc1.bias"] < 0).any()
    trainer.save(tmp_path / "t.ckpt")
    again = Trainer.load(tmp_path / "t.ckpt")
    assert again.optimizer.settings == optimizer
    for one in (trainer, again):
        one.train_on_batch(X, Y)
    np.testing.assert_equal(again.get_state(), trainer.get_state())


def test_a_group_has_constraints_of_its_own():
    groups = Groups([{"weights": "fc1.*", "constraints": NonNeg()}], default=SGD(0.5))
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=groups)
    trainer.fit(X, Y, epochs=3, verbose=0)
    w = trainer.get_weights()
    assert min(w["fc1.weight"].min(), w["fc1.bias"].min()) >= 0 > w["fc0.bias"].min()


@every_constraint
def test_names_and_json(constraint):
    assert from_config(json.loads(json.dumps(to_config(constraint))), MODULE) == constraint
    optimizer = SGD(constraints={"a": constraint, "b": None})
    assert from_config(json.loads(json.dumps(to_config(optimizer))), MODULE) == optimizer
    assert hash(optimizer) == hash(SGD(constraints={"a": constraint, "b": None}))
    cls = type(constraint)
    assert get_constraint(cls.__name__) == get_constraint(cls) == cls()


def test_nan_stays_nan():
    for constraint in CASES:
        update = Update(SGD(1.0, constraints=constraint), {"w": np.ones((2, 2))})
        update({"w": np.full((2, 2), np.nan)})
        assert np.isnan(update.weights["w"]).all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MaxNorm(-1.0), SettingError, r"MaxNorm needs max_value >= 0, got -1\.0"),
        (lambda: UnitNorm("0"), SettingError, "UnitNorm needs axis to be a whole number"),
        (lambda: UnitNorm([]), SettingError, r"a list of whole numbers, got \[\]"),
        (lambda: MinMaxNorm(2.0, 1.0), SettingError, "needs min_value <= max_value"),
        (lambda: MinMaxNorm(rate=1.5), SettingError, "rate >= 0 and <= 1"),
        (lambda: SGD(constraints="maxnrm"), UnknownNameError, "Did you mean 'max_norm'"),
        (lambda: SGD(constraints=3), SettingError, "must be a Constraint or a name, got 3"),
        (lambda: SGD(constraints={3: NonNeg()}), SettingError, "names of weights and patterns"),
        (
            lambda: Trainer(mlp(), loss="mse", optimizer=SGD(constraints=MaxNorm(axis=1))),
            SettingError,
            r"needs a weight with an axis 1, but 'fc0\.bias' has 1 axes",
        ),
        (
            lambda: Trainer(mlp(), loss="mse", optimizer=SGD(constraints={"conv*": NonNeg()})),
            UnknownNameError,
            r"No trained weight is called 'conv\*'",
        ),
    ],
)
def test_impossible_constraints(make, error, message):
    with pytest.raises(error, match=message):
        make()
