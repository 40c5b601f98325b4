"""A step happens as a whole or not at all: for signals, for other threads, and after errors."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback, CSVLogger, EarlyStopping, JSONLLogger
from onnxfit.errors import SettingError, StepError
from onnxfit.runtime.backends import BACKENDS
from onnxfit.runtime.session import BoundSession
from tests.helpers import classification
from tests.models import mlp

X, Y = classification(40)
FIT: dict[str, Any] = {"epochs": 2, "batch_size": 8, "verbose": 0}
CASES = [(backend, accumulate) for backend in BACKENDS for accumulate in (1, 2)]
both = pytest.mark.parametrize(("backend", "accumulate"), CASES)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A shell that starts the tests in the background lets them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def new(backend: str = "full", accumulate: int = 1, **settings: Any) -> Trainer:
    settings = {"metrics": ["accuracy", "auc"], **settings}
    return Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer="adam",
        backend=backend,
        accumulate=accumulate,
        threads=1,
        **settings,
    )


def result(trainer: Trainer) -> tuple[Any, ...]:
    return trainer.get_state(), trainer.history.history, trainer.train_losses_


def resumed(trainer: Trainer, path: Path, **settings: Any) -> tuple[Any, ...]:
    """What a fit comes to that goes on from the trainer's checkpoint."""
    trainer.restore(trainer.save(path))
    trainer.fit(X, Y, **{**FIT, **settings})
    return result(trainer)


@contextmanager
def at_line(number: int, act: Callable[[], object], *files: str) -> Iterator[list[int]]:
    """Act before the given line of onnxfit that runs; yield the count of lines so far."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if "onnxfit" not in name or not name.endswith(files or ""):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


# ---------------------------------------------------------------------- signals


@both
def test_a_fit_interrupted_anywhere_resumes_exactly(
    backend: str, accumulate: int, tmp_path: Path
) -> None:
    trainer = new(backend, accumulate)
    beginning = trainer.save(tmp_path / "beginning")
    trainer.fit(X, Y, **FIT)
    expected = result(trainer)
    trainer.restore(beginning)
    with at_line(0, interrupt) as lines:
        trainer.fit(X, Y, **FIT)
    for number in range(1, lines[0] + 1, max(1, lines[0] // 25)):
        trainer.restore(beginning)
        with pytest.raises(KeyboardInterrupt), at_line(number, interrupt):
            trainer.fit(X, Y, **FIT)
        if has_ended(trainer, expected):
            continue  # the last lines of `fit` run after its end, and there is nothing to resume
        np.testing.assert_equal(resumed(trainer, tmp_path / "a"), expected, err_msg=str(number))


def has_ended(trainer: Trainer, expected: tuple[Any, ...]) -> bool:
    """Return whether an interrupted fit had come to its end."""
    try:
        np.testing.assert_equal(result(trainer), expected)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("stateful", [True, False])
def test_every_callback_is_told_each_epoch_once(stateful: bool, tmp_path: Path) -> None:
    """Callbacks that follow the interrupted one are told when training resumes."""

    class Interrupting(Callback):
        is_brief = stateful

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            nonlocal is_first
            if epoch == 1 and is_first:
                is_first = False
                interrupt()

    def fit(trainer: Trainer, folder: Path) -> EarlyStopping:
        stopping = EarlyStopping("loss", patience=9, min_delta=9)
        loggers = [CSVLogger(folder / "a.csv"), JSONLLogger(folder / "b.jsonl")]
        for place in range(3):
            callbacks = [stopping, *loggers]
            callbacks.insert(place, Interrupting())
        trainer.fit(X, Y, callbacks=callbacks, **{**FIT, "epochs": 4})
        return stopping

    is_first = False
    whole = new()
    waited = fit(whole, tmp_path).wait
    texts = [(tmp_path / name).read_text() for name in ("a.csv", "b.jsonl")]
    is_first, trainer = True, new()
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, tmp_path)
    trainer.restore(trainer.save(tmp_path / "c"))
    assert fit(trainer, tmp_path).wait == waited
    np.testing.assert_equal(result(trainer), result(whole))
    assert [(tmp_path / name).read_text() for name in ("a.csv", "b.jsonl")] == texts


def test_a_second_signal_ends_a_step_that_hangs_and_the_step_is_undone() -> None:
    reached = []

    def hanging(y_true: Any, y_pred: Any) -> Any:
        if trainer.global_batch == 3:
            for number in range(3):
                interrupt()
                reached.append(number)
        return (y_pred.argmax(1) == y_true) * 1.0

    trainer = new(metrics=["auc", hanging])
    seen = {}

    class Keep(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            seen[self.trainer.global_batch] = self.trainer.get_state(), dict(logs)

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, callbacks=[Keep()], **FIT)
    assert reached == [0]
    np.testing.assert_equal(trainer.get_state(), seen[3][0])
    assert trainer._training.tracker.state_dict()["rows"] == 24
    assert trainer._training.tracker.results()["auc"] == seen[3][1]["auc"]


@pytest.mark.parametrize("train", ["fit", "train_on_batch"])
def test_handlers_of_the_program_are_called_between_steps_and_come_back(
    train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that saves, as for the end of a job on a cluster, finds whole steps."""
    found = []
    before = signal.signal(
        signal.SIGTERM,
        lambda *_: found.append((trainer._training.guard.in_step, trainer.global_batch)),
    )
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run = BoundSession.run

    def run_and_signal(session: BoundSession, values: Any = None) -> None:
        run(session, values)
        signal.raise_signal(signal.SIGTERM)

    try:
        trainer = new()
        with monkeypatch.context() as patched:
            patched.setattr(BoundSession, "run", run_and_signal)
            if train == "fit":
                trainer.fit(X, Y, batch_size=20, verbose=0)
            else:
                trainer.train_on_batch(X, Y)
                trainer.train_on_batch(X, Y)
        assert found == [(False, 1), (False, 2)]
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_a_hook_sets_stays() -> None:
    received = []

    class Set(Callback):
        def on_train_begin(self, logs: Any) -> None:
            signal.signal(signal.SIGINT, lambda *_: received.append("mine"))

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            interrupt()

    new().fit(X, Y, batch_size=40, verbose=0, callbacks=[Set()])
    assert received == ["mine"]
    interrupt()
    assert received == ["mine", "mine"]


def test_a_fit_in_another_thread_leaves_signals_alone() -> None:
    handlers = []
    trainer = new()

    class Look(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=lambda: trainer.fit(X, Y, callbacks=[Look()], **FIT))
    thread.start()
    thread.join()
    assert set(handlers) == {signal.default_int_handler}


def test_ctrl_c_in_on_gradients_takes_effect_at_once() -> None:
    class Interrupt(Callback):
        def on_gradients(self, gradients: Any) -> None:
            interrupt()
            raise AssertionError

    trainer = new("forward_backward")
    before = trainer.get_state()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, callbacks=[Interrupt()], **FIT)
    np.testing.assert_equal(trainer.get_state(), before)


FILES = ("guard.py", "trainer.py", "loop.py", "base.py")


def test_an_error_at_any_line_of_the_beginning_of_fit_blocks_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    trainer = new(metrics=())
    trainer.fit(X, Y, batch_size=40, verbose=0)
    path = trainer.save(tmp_path / "a")
    with at_line(0, fail, *FILES) as lines:
        trainer.fit(X, Y, batch_size=40, verbose=0)
    for number in range(1, lines[0] + 1, max(1, lines[0] // 40)):
        trainer.restore(path)
        try:
            with at_line(number, fail, *FILES):
                trainer.fit(X, Y, batch_size=40, verbose=0)
        except KeyboardInterrupt:  # the frames of the fit are alive here
            trainer.restore(path)
        trainer.train_on_batch(X, Y)
        trainer.fit(X, Y, batch_size=40, verbose=0)


# ---------------------------------------------------------------------- errors


@both
def test_a_run_that_fails_changes_nothing(
    backend: str, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = new(backend, accumulate)
    whole.fit(X, Y, **FIT)
    trainer = new(backend, accumulate)
    beginning = trainer.save(tmp_path / "beginning")
    trainer.fit(X, Y, **FIT)  # compiles
    run, failing = BoundSession.run, 0

    def run_or_fail(session: BoundSession, values: Any = None) -> None:
        nonlocal failing
        failing -= 1
        if failing == 0:
            raise StepError("out of memory")
        run(session, values)

    for number in range(1, 30):
        trainer.restore(beginning)
        failing = number
        with monkeypatch.context() as patched:
            patched.setattr(BoundSession, "run", run_or_fail)
            with contextlib.suppress(StepError):
                trainer.fit(X, Y, **FIT)
        if failing > 0:
            break  # the fit has fewer runs
        np.testing.assert_equal(resumed(trainer, tmp_path / "a"), result(whole))
    assert number > 8


def test_a_metric_that_fails_leaves_the_sums_of_the_others() -> None:
    def failing(y_true: Any, y_pred: Any) -> Any:
        if trainer.global_batch == 2:
            raise ZeroDivisionError
        return np.ones(len(y_pred))

    trainer = new(metrics=["accuracy", "auc", failing])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(X, Y, **FIT)
    found = trainer._training.tracker.state_dict()
    trainer = new(metrics=["accuracy", "auc", lambda y_true, y_pred: np.ones(len(y_pred))])
    for start in (0, 8):
        trainer._training.tracker.reset() if not start else None
        with trainer._training.guard.advancing:
            source = trainer._training.source(X[start:][:8], Y[start:][:8], None, 8, "training")
            (batch,) = source.batches(0)
            trainer._training.step(batch, trainer.learning_rate, trainer._training.tracker)
    assert found["rows"] == 16
    assert len(found["metrics"]["auc"]["_batches"]) == 2


# ---------------------------------------------------------------------- other threads


@pytest.fixture
def threads_that_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class States(Callback):
    """The state after each batch."""

    def __init__(self) -> None:
        self.by_batch: dict[int, Any] = {}

    def on_train_begin(self, logs: Any) -> None:
        self.by_batch[self.trainer.global_batch] = self.trainer.get_state()

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.by_batch[self.trainer.global_batch] = self.trainer.get_state()


@pytest.mark.usefixtures("threads_that_switch_often")
@both
def test_another_thread_sees_the_state_between_two_steps(
    backend: str, accumulate: int, tmp_path: Path
) -> None:
    settings = {**FIT, "epochs": 8}
    whole, states = new(backend, accumulate), States()
    whole.fit(X, Y, callbacks=[states], **settings)
    trainer, ended, seen = new(backend, accumulate), threading.Event(), []
    paths: list[Path] = []

    def look() -> None:
        while not ended.is_set():
            seen.append(trainer.get_state())
            if len(seen) % 5 == 0 and len(paths) < 10:
                paths.append(trainer.save(tmp_path / str(len(paths))))

    thread = threading.Thread(target=look)
    thread.start()
    trainer.fit(X, Y, **settings)
    ended.set()
    thread.join()
    for state in seen:
        counters = state["counters"]
        expected = states.by_batch[counters["global_batch"]]
        # the last window of an epoch is flushed after the last hook of a batch
        if counters["global_step"] == expected["counters"]["global_step"]:
            np.testing.assert_equal(state["weights"], expected["weights"])
            np.testing.assert_equal(state["slots"], expected["slots"])
    assert seen
    for path in paths:
        trainer.restore(path)
        if trainer.global_batch == whole.global_batch:
            continue  # saved after the fit, so another fit would train anew
        trainer.fit(X, Y, **settings)
        np.testing.assert_equal(result(trainer), result(whole))


def test_weights_that_a_thread_sets_during_a_step_stay() -> None:
    """While a metric runs, everyone sees the weights before the step, and sets those after it."""

    def setting(y_true: Any, y_pred: Any) -> Any:
        seen.append(trainer.get_state())
        thread = threading.Thread(target=lambda: trainer.set_weights({"fc0.bias": np.ones(8)}))
        thread.start()
        thread.join()
        return np.ones(len(y_pred))

    seen: list[Any] = []
    trainer = new(metrics=[setting])
    before = trainer.get_state()
    trainer.train_on_batch(X, Y)
    np.testing.assert_equal(seen[0], before)
    after = trainer.get_state()["weights"]
    assert (after["fc0.bias"] == 1).all()
    assert (after["fc0.weight"] != before["weights"]["fc0.weight"]).any()


def test_a_metric_that_saves_is_refused() -> None:
    def saving(y_true: Any, y_pred: Any) -> Any:
        trainer.save("never")
        return np.ones(len(y_pred))

    trainer = new(metrics=[saving])
    with pytest.raises(SettingError, match="save cannot be called inside a metric"):
        trainer.train_on_batch(X, Y)
