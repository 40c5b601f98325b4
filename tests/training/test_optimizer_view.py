"""`trainer.optimizer`: its settings, and the learning rate in force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.errors import SettingError, UnsupportedError
from onnxfit.optimizers import SGD, Adam, Optimizer
from onnxfit.schedules import Exponential
from tests.models import linear

X = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]


def new(optimizer: Any) -> Trainer:
    return Trainer(linear(), loss="mse", optimizer=optimizer)


def test_the_settings_are_those_of_the_optimizer() -> None:
    optimizer = Adam(0.01, eps=0.1)
    trainer = new(optimizer)
    assert trainer.optimizer == optimizer
    assert isinstance(trainer.optimizer, Adam)
    assert isinstance(trainer.optimizer, Optimizer)
    assert not isinstance(trainer.optimizer, SGD)
    assert trainer.optimizer.eps == 0.1
    assert repr(trainer.optimizer) == repr(optimizer)
    assert hash(trainer.optimizer) == hash(optimizer)


def test_the_learning_rate_is_the_one_in_force() -> None:
    trainer = new(SGD(0.5))
    trainer.learning_rate = 0.25
    assert trainer.optimizer.learning_rate == trainer.optimizer.lr == 0.25
    assert trainer.optimizer.settings.learning_rate == 0.5
    schedule = Exponential(0.5, decay_steps=1, decay_rate=0.5)
    trainer = new(SGD(schedule))
    trainer.fit(X, X, batch_size=8, verbose=0)
    assert trainer.optimizer.learning_rate == schedule(2) == 0.125
    assert trainer.optimizer.learning_rate.numpy() == 0.125


@pytest.mark.parametrize("way", ["set", "lr", "assign"])
def test_a_callback_for_keras_sets_the_rate_of_the_next_updates(way: str) -> None:
    class Halve(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            optimizer: Any = self.model.optimizer
            rate = float(optimizer.learning_rate) / 2
            if way == "assign":
                optimizer.learning_rate.assign(rate)
            else:
                setattr(optimizer, "learning_rate" if way == "set" else "lr", rate)

    trainer, expected = new(SGD(0.5)), new(SGD(0.5))
    trainer.fit(X, X, epochs=2, batch_size=16, shuffle=False, callbacks=[Halve()], verbose=0)
    for rate in (0.5, 0.25):
        expected.learning_rate = rate
        expected.train_on_batch(X, X)
    assert trainer.learning_rate == 0.125
    np.testing.assert_equal(trainer.get_weights(), expected.get_weights())


def test_what_cannot_be_set_is_refused() -> None:
    trainer = new(Adam(0.5))
    with pytest.raises(SettingError, match=r"eps of the optimizer cannot change.*Adam\(eps"):
        trainer.optimizer.eps = 0.5
    with pytest.raises(SettingError, match="learning_rate must be a finite number >= 0"):
        trainer.optimizer.learning_rate = -1
    assert trainer.learning_rate == 0.5
    scheduled = new(SGD(Exponential(0.5, decay_steps=1, decay_rate=0.5)))
    with pytest.raises(UnsupportedError, match="follows the schedule"):
        scheduled.optimizer.learning_rate.assign(0.1)
