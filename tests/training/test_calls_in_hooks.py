"""Hooks of a fit that train, evaluate and predict: the epoch's figures are of the fit's own batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.callbacks.callback import HOOKS
from onnxfit.runtime.backends import BACKENDS
from tests.helpers import Recorder, classification
from tests.models import mlp

X, Y = classification(48)
OTHER_X, OTHER_Y = classification(7, seed=1)

CALLS: dict[str, Callable[[Trainer], object]] = {
    "train_on_batch": lambda trainer: trainer.train_on_batch(OTHER_X, OTHER_Y),
    "test_on_batch": lambda trainer: trainer.test_on_batch(OTHER_X, OTHER_Y),
    "evaluate": lambda trainer: trainer.evaluate(OTHER_X, OTHER_Y, batch_size=3),
    "predict": lambda trainer: trainer.predict(OTHER_X, batch_size=3),
    "predict_on_batch": lambda trainer: trainer.predict_on_batch(OTHER_X),
}
# An exception and a prediction end or begin elsewhere; nothing may train inside a step.
CALLING_HOOKS = [
    hook
    for hook in HOOKS
    if hook not in ("on_exception", "on_close", "on_gradients") and "predict" not in hook
]


class Calling(Callback):
    """Calls a function of the trainer in one hook."""

    def __init__(self, hook: str, call: Callable[[Trainer], object]) -> None:
        self.calls = 0
        self._hook = hook
        self._call = call
        setattr(self, hook, self._count_and_call)

    def overrides(self, hook: str) -> bool:
        return hook == self._hook or super().overrides(hook)

    def _count_and_call(self, *_: Any) -> None:
        self.calls += 1
        self._call(self.trainer)


def fitted(backend: str, callbacks: list[Callback]) -> tuple[Any, ...]:
    trainer = Trainer(
        mlp(), loss="cross_entropy", optimizer=0.0, metrics=["accuracy", "auc"], backend=backend
    )
    recorder = Recorder()
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 20, "verbose": 0}
    history = trainer.fit(
        X, Y, callbacks=[*callbacks, recorder], validation_data=(X[:30], Y[:30]), **settings
    )
    return history.history, recorder.events, trainer.train_losses_, list(trainer.last_losses)


@cache
def fitted_alone(backend: str) -> tuple[Any, ...]:
    return fitted(backend, [])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hook", CALLING_HOOKS)
def test_the_logs_of_a_fit_are_those_of_its_own_batches(backend: str, hook: str) -> None:
    """With a learning rate of 0, so that training changes no weights."""
    calling = Calling(hook, lambda trainer: [call(trainer) for call in CALLS.values()])
    np.testing.assert_equal(fitted(backend, [calling]), fitted_alone(backend))
    assert calling.calls


def test_a_hook_that_trains_moves_the_weights() -> None:
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer=0.1)
    alone = Trainer(mlp(), loss="cross_entropy", optimizer=0.1)
    trainer.fit(X, Y, batch_size=48, callbacks=[Calling("on_epoch_end", CALLS["train_on_batch"])])
    alone.fit(X, Y, batch_size=48)
    alone.train_on_batch(OTHER_X, OTHER_Y)
    np.testing.assert_equal(trainer.get_state()["weights"], alone.get_state()["weights"])
    assert trainer.global_step == 2


def test_a_step_after_an_interrupted_fit_leaves_its_figures(tmp_path: Path) -> None:
    """The next fit goes on with the means of the epoch."""

    class Interrupt(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    def resumed(between: Callable[[Trainer], object]) -> Any:
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer=0.0, metrics=["accuracy"])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(X, Y, batch_size=8, verbose=0, callbacks=[Interrupt()])
        between(trainer)
        return Trainer.load(trainer.save(path)).fit(X, Y, batch_size=8, verbose=0).history

    path = tmp_path / "fit"
    assert resumed(CALLS["train_on_batch"]) == resumed(lambda trainer: None)
