"""What metrics and losses get: arrays that they cannot change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.errors import SettingError
from onnxfit.losses import MeanSquaredError
from onnxfit.metrics import Metric
from onnxfit.runtime.backends import BACKENDS
from tests.models import linear

X = np.arange(8, dtype=np.float32).reshape(4, 2)
Y = np.ones((4, 1), np.float32)
W = np.ones(4, np.float32)


@dataclass
class Writing(Metric):
    """Writes into one of its arguments."""

    argument: int = 0
    way: str = "item"

    def reset(self) -> None:
        pass

    def update(self, *arguments: Any) -> None:
        array = arguments[self.argument]
        if self.way == "item":
            array[0] = 7
        elif self.way == "out":
            np.multiply(array, 2, out=array)
        elif self.way == "sort":
            array.sort(axis=0)
        else:
            array += 1

    def result(self) -> float:
        return 0.0


@pytest.mark.parametrize("way", ["item", "out", "sort", "+="])
@pytest.mark.parametrize("argument", [0, 1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_metric_that_changes_its_arguments_is_named(
    backend: str, argument: int, way: str
) -> None:
    metric = Writing(argument, way, weighted=True, name="scribble")
    trainer = Trainer(linear(2), loss="mse", metrics=["mae", metric], backend=backend)
    before = trainer.get_state()
    given = [array.copy() for array in (X, Y, W)]
    for call in (trainer.train_on_batch, trainer.test_on_batch, trainer.fit, trainer.evaluate):
        with pytest.raises(SettingError, match=r"'scribble' changes its arguments .*copy\(\)"):
            call(*given)
        np.testing.assert_equal(given, [X, Y, W])
        np.testing.assert_equal(trainer.get_state(), before)


def test_other_errors_of_a_metric_are_its_own() -> None:
    def broken(y_true: Any, y_pred: Any) -> Any:
        raise ValueError("three is too many")

    with pytest.raises(ValueError, match="three is too many") as caught:
        Trainer(linear(2), loss="mse", metrics=[broken]).train_on_batch(X, Y)
    assert type(caught.value) is ValueError


def test_a_loss_cannot_change_the_labels_of_the_caller() -> None:
    class Smoothing(MeanSquaredError):
        def prepare(self, y: Any, y_pred: Any) -> Any:
            y *= np.float32(0.9)
            return super().prepare(y, y_pred)

    labels = Y.copy()
    trainer = Trainer(linear(2), loss=Smoothing())
    with pytest.raises(SettingError, match=r"Smoothing\.prepare changes the labels .*copy"):
        trainer.train_on_batch(X, labels)
    np.testing.assert_array_equal(labels, Y)
