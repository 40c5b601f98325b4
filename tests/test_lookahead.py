"""Lookahead: the paper's algorithm in NumPy around updates that torch confirms."""

import json

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.errors import SettingError
from onnxfit.optimizers import SGD, Adam, AdamW, Groups, Lookahead, Muon
from onnxfit.registry import from_config, to_config
from onnxfit.schedules import Constant
from tests.models import mlp
from tests.test_optimizers import Update, pull, start

X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 48)
INNER = [SGD(0.05), SGD(0.05, 0.9, dampening=0.1), AdamW(0.05), Muon(0.05), Adam(0.05)]


@pytest.mark.parametrize("inner", INNER, ids=repr)
@pytest.mark.parametrize(("k", "alpha"), [(5, 0.5), (3, 0.8), (1, 0.5)])
def test_slow_weights_follow_every_k_updates(inner, k, alpha):
    update = Update(Lookahead(inner, k, alpha), start(np.float64))
    fast = Update(inner, start(np.float64))
    slow = start(np.float64)
    for t in range(1, 17):
        g = pull(update.weights)
        update(g, 0.05)
        fast(g, 0.05)
        if t % k == 0:
            slow = {n: slow[n] + alpha * (fast.weights[n] - slow[n]) for n in slow}
            fast.weights = dict(slow)
        for name, w in update.weights.items():
            np.testing.assert_allclose(w, fast.weights[name], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(update.slots[name]["slow"], slow[name], rtol=1e-9)


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_checkpoints_and_backends(backend, tmp_path):
    optimizer = Groups({"fc1.*": Lookahead(SGD(0.1, 0.9), 2)}, default=Lookahead(Adam(0.01), 3))
    settings = {"loss": "cross_entropy", "optimizer": optimizer}
    trainer = Trainer(mlp(), backend=backend, **settings)
    reference = Trainer(mlp(), **settings)
    for one in (trainer, reference):
        one.fit(X, Y, batch_size=12, verbose=0)
    for name, w in reference.get_weights().items():
        np.testing.assert_allclose(trainer.get_weights()[name], w, rtol=1e-5, atol=1e-6)
    trainer.save(tmp_path / "t.ckpt")
    again = Trainer.load(tmp_path / "t.ckpt")
    assert again.optimizer.settings == optimizer
    for one in (trainer, again):
        one.fit(X, Y, batch_size=12, verbose=0)
    np.testing.assert_equal(again.get_state(), trainer.get_state())


def test_json_and_the_learning_rate():
    optimizer = Lookahead(Adam(0.05, ema_momentum=0.9), 3, 0.8)
    assert (
        from_config(json.loads(json.dumps(to_config(optimizer))), "onnxfit.optimizers") == optimizer
    )
    assert optimizer.learning_rate == 0.05
    assert optimizer.with_learning_rate(0.1).inner == Adam(0.1, ema_momentum=0.9)


def test_settings_of_a_group_are_those_of_the_inner_optimizer(tmp_path):
    group = {"weights": "fc1.*", "learning_rate": 0.1, "betas": [0.8, 0.9], "k": 2}
    by_settings = Groups([group], default=Lookahead(Adam(0.01), 3))
    inner = Lookahead(Adam(0.1, betas=(0.8, 0.9)), 2)
    by_optimizer = Groups({"fc1.*": inner}, default=Lookahead(Adam(0.01), 3))
    trained = []
    for optimizer in (by_settings, by_optimizer):
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer=optimizer)
        trainer.fit(X, Y, batch_size=12, verbose=0)
        trained.append(trainer.get_state())
        trainer.save(tmp_path / "t.ckpt")
        np.testing.assert_equal(Trainer.load(tmp_path / "t.ckpt").get_state(), trained[-1])
    np.testing.assert_equal(trained[0], trained[1])
    with pytest.raises(SettingError, match="cautious"):
        Groups([{"weights": "fc1.*", "cautious": True}], default=Lookahead())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lookahead(k=0), "Lookahead needs k to be a whole number >= 1, got 0"),
        (lambda: Lookahead(alpha=0.0), "Lookahead needs alpha > 0 and <= 1"),
        (lambda: Lookahead(Groups([], Adam())), "an optimizer without groups"),
        (lambda: Lookahead(Lookahead()), "an optimizer without groups"),
        (lambda: Lookahead(Adam(cautious=True)), "without groups, cautious"),
        (lambda: Lookahead(SGD(momentum=Constant(0.9))), "schedules of its settings, got SGD"),
    ],
)
def test_impossible_settings(make, message):
    with pytest.raises(SettingError, match=message):
        make()
