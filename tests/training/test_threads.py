"""One Trainer in several threads: predictions and evaluations beside each other and beside a fit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.errors import SettingError
from onnxfit.runtime.backends import BACKENDS
from tests.models import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 48)
SIZES = (1, 2, 3, 4, 5, 6, 8)  # rows of a batch; more sizes than graphs for exact shapes
CALLS = 150  # of each thread


@pytest.fixture(autouse=True)
def threads_that_switch_often() -> Iterator[None]:
    """Python changes threads every microsecond, so that a race shows in a short test."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions: Callable[[], object]) -> None:
    """Run functions at the same time, and raise the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


both_backends = pytest.mark.parametrize("backend", BACKENDS)


def make(backend: str, **settings: Any) -> Trainer:
    return Trainer(mlp(), loss="cross_entropy", metrics=["accuracy"], backend=backend, **settings)


QUESTIONS: dict[str, Callable[[Trainer, int, int], Any]] = {
    "predict": lambda trainer, start, size: trainer.predict(X[start:], batch_size=size),
    "predict_on_batch": lambda trainer, start, size: trainer.predict_on_batch(X[start:][:size]),
    "evaluate": lambda trainer, start, size: trainer.evaluate(
        X[start:], Y[start:], batch_size=size
    ),
    "test_on_batch": lambda trainer, start, size: trainer.test_on_batch(
        X[start:][:size], Y[start:][:size]
    ),
}


@both_backends
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_thread_gets_the_answer_of_a_single_one(backend: str, question: str) -> None:
    trainer = make(backend)
    ask = QUESTIONS[question]
    cases = [(start, size) for start in (40, 41, 42) for size in SIZES]
    expected = {case: ask(trainer, *case) for case in cases}

    def ask_often(offset: int) -> None:
        for number in range(CALLS):
            case = cases[(number * 5 + offset) % len(cases)]
            np.testing.assert_equal(ask(trainer, *case), expected[case])

    in_threads(*(partial(ask_often, offset) for offset in range(4)))


def ask_all(trainer: Trainer, answers: list[Any]) -> None:
    answers.append([ask(trainer, 0, 5) for ask in QUESTIONS.values()])


@both_backends
def test_the_first_questions_may_come_from_several_threads(backend: str) -> None:
    """They compile the graphs."""
    expected: list[Any] = []
    ask_all(make(backend), expected)
    for _ in range(3):
        trainer = make(backend)
        answers: list[Any] = []
        in_threads(*[partial(ask_all, trainer, answers)] * 3)
        assert len(answers) == 3
        for answer in answers:
            np.testing.assert_equal(answer, expected[0])


class Predictions(Callback):
    """What the training thread predicts after each step."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def on_train_begin(self, logs: Any) -> None:
        self.on_train_batch_end(0, logs)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.seen.add(self.trainer.predict_on_batch(X[:3]).tobytes())


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}], ids=["", "accumulate"])
@both_backends
def test_predictions_beside_a_fit_use_the_weights_between_two_steps(
    backend: str, settings: dict[str, Any]
) -> None:
    alone = make(backend, optimizer="adam", **settings)
    fit = {"epochs": 12, "batch_size": 8, "verbose": 0}
    alone.fit(X, Y, callbacks=[Predictions()], **fit)
    trainer = make(backend, optimizer="adam", **settings)
    known = Predictions()
    ended = threading.Event()
    asked: list[bytes] = []

    def train() -> None:
        try:
            trainer.fit(X, Y, callbacks=[known], **fit)
        finally:
            ended.set()

    def ask() -> None:
        while not ended.is_set():
            asked.append(trainer.predict_on_batch(X[:3]).tobytes())
            trainer.evaluate(X[:7], Y[:7], batch_size=4)

    in_threads(train, ask, ask)
    assert known.seen.issuperset(asked)
    assert trainer.history.history == alone.history.history
    np.testing.assert_equal(trainer.get_state(), alone.get_state())


def test_all_batches_of_a_prediction_use_the_weights_of_its_beginning() -> None:
    class Train(Callback):
        def on_predict_batch_end(self, batch: int, logs: Any) -> None:
            self.trainer.train_on_batch(X, Y)

    trainer = make("full", optimizer=1.0)
    expected = trainer.predict(X, batch_size=8)
    np.testing.assert_array_equal(trainer.predict(X, batch_size=8, callbacks=[Train()]), expected)
    assert not np.array_equal(trainer.predict(X, batch_size=8), expected)


class Waiting(Callback):
    """Lets a function run in another thread in the first call of a hook, and waits for its end."""

    def __init__(self, hook: str, function: Callable[[], object]) -> None:
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self._function = function
        setattr(self, hook, self._wait)

    def overrides(self, hook: str) -> bool:
        return hook in vars(self) or super().overrides(hook)

    def _wait(self, *_: Any) -> None:
        if self.threads:
            return
        self.threads.append(threading.Thread(target=self._run, daemon=True))
        self.threads[0].start()
        self.threads[0].join(60)
        assert not self.threads[0].is_alive(), "the other thread waits for this one"

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.errors.append(error)


ASKING_HOOKS = ("on_gradients", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end")


@pytest.mark.parametrize("hook", ASKING_HOOKS)
def test_a_hook_may_wait_for_another_thread_that_asks(hook: str) -> None:
    trainer = make("forward_backward")
    answers: list[Any] = []

    def ask() -> None:
        answers.extend(question(trainer, 0, 5) for question in QUESTIONS.values())
        trainer.get_weights()
        trainer.export()

    waiting = Waiting(hook, ask)
    trainer.fit(X, Y, verbose=0, callbacks=[waiting])
    assert not waiting.errors
    assert len(answers) == len(QUESTIONS)


TRAINING: dict[str, Callable[[Trainer], object]] = {
    "fit": lambda trainer: trainer.fit(X, Y, verbose=0),
    "train_on_batch": lambda trainer: trainer.train_on_batch(X, Y),
    "apply_gradients": lambda trainer: trainer.apply_gradients(trainer.get_weights()),
    "set_state": lambda trainer: trainer.set_state(trainer.get_state()),
    "revert_step": lambda trainer: trainer.revert_step(),
}


@pytest.mark.parametrize("hook", ["on_gradients", "on_train_begin", "on_train_batch_end"])
@pytest.mark.parametrize("train", TRAINING)
def test_only_one_thread_trains(hook: str, train: str) -> None:
    trainer = make("forward_backward")
    alone = make("forward_backward")
    waiting = Waiting(hook, lambda: TRAINING[train](trainer))
    trainer.fit(X, Y, verbose=0, callbacks=[waiting])
    (error,) = waiting.errors
    assert isinstance(error, SettingError)
    assert "Another thread is training this Trainer" in str(error)
    alone.fit(X, Y, verbose=0)
    np.testing.assert_equal(trainer.get_state(), alone.get_state())
    TRAINING[train](trainer)  # the fit has ended


@pytest.mark.parametrize("train", TRAINING)
def test_nothing_trains_inside_a_step(train: str) -> None:
    class Train(Callback):
        def on_gradients(self, gradients: Any) -> None:
            TRAINING[train](self.trainer)

    trainer = make("forward_backward")
    before = trainer.get_state()
    with pytest.raises(SettingError, match="A training step cannot start inside another step"):
        trainer.fit(X, Y, verbose=0, callbacks=[Train()])
    np.testing.assert_equal(trainer.get_state(), before)
    trainer.fit(X, Y, verbose=0)


def test_a_metric_that_trains_is_refused() -> None:
    def accuracy(y_true: Any, y_pred: Any) -> Any:
        return trainer.train_on_batch(X, Y)["loss"]

    trainer = Trainer(mlp(), loss="cross_entropy", metrics=[accuracy])
    before = trainer.get_state()
    for train in (trainer.fit, trainer.train_on_batch):
        with pytest.raises(SettingError, match="A training step cannot start inside another step"):
            train(X, Y)
        np.testing.assert_equal(trainer.get_state(), before)


def test_a_fit_inside_a_fit_is_refused() -> None:
    class Fit(Callback):
        def __init__(self, hook: str) -> None:
            setattr(self, hook, lambda *_: self.trainer.fit(X, Y, verbose=0))

        def overrides(self, hook: str) -> bool:
            return hook in vars(self)

    class Prepare(Callback):
        def prepare(self, trainer: Trainer) -> None:
            trainer.fit(X, Y, verbose=0, callbacks=[self])

    hooks = ("on_train_begin", "on_train_batch_end", "on_test_batch_end", "on_epoch_end")
    for callback in (Prepare(), *map(Fit, hooks)):
        trainer = make("full")
        with pytest.raises(SettingError, match="fit is already running"):
            trainer.fit(X, Y, verbose=0, callbacks=[callback], validation_data=(X, Y))
        assert len(trainer.fit(X, Y, verbose=0).epoch) == 1


def test_a_hook_of_a_prediction_may_predict_and_keeps_its_outputs() -> None:
    class Predict(Callback):
        def on_predict_batch_end(self, batch: int, logs: Any) -> None:
            np.testing.assert_array_equal(self.trainer.predict(X[:5]), expected[:5])
            np.testing.assert_array_equal(self.trainer.predict_on_batch(X[:5]), on_batch)
            (predicted,) = self.trainer.predicted.values()
            np.testing.assert_array_equal(predicted, expected[8 * batch :][:8])

    trainer = make("full")
    expected = trainer.predict(X, batch_size=8)
    on_batch = trainer.predict_on_batch(X[:5])
    predicted = trainer.predict(X, batch_size=8, callbacks=[Predict()])
    np.testing.assert_array_equal(predicted, expected)
    assert trainer.predicted == {}


def test_the_outputs_and_logs_of_a_hook_are_those_of_its_thread() -> None:
    class Check(Callback):
        def on_predict_batch_end(self, batch: int, logs: Any) -> None:
            (predicted,) = self.trainer.predicted.values()
            np.testing.assert_array_equal(predicted, expected[8 * batch :][:8])

        def on_test_batch_end(self, batch: int, logs: Any) -> None:
            self.trainer.log("mine", batch)
            assert logs["mine"] == batch

    trainer = make("full")
    expected = trainer.predict(X, batch_size=8)

    def predict() -> None:
        for _ in range(CALLS // 5):
            trainer.predict(X, batch_size=8, callbacks=[Check()])

    def evaluate() -> None:
        for _ in range(CALLS // 5):
            trainer.evaluate(X, Y, batch_size=8, callbacks=[Check()])

    in_threads(predict, predict, evaluate, evaluate)
