"""The hooks, their order and their logs, and the list that calls them."""

import copy
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import (
    Callback,
    CallbackList,
    EarlyStopping,
    History,
    LambdaCallback,
    Logs,
    ProgressBar,
    StatefulCallback,
    TerminateOnNaN,
)
from onnxfit.callbacks.callback import HOOKS
from onnxfit.errors import SettingError
from tests.callbacks.helpers import Recorder, X, Y, fit, line


def test_the_order_of_hooks():
    recorder = Recorder()
    on = fit(recorder, epochs=2, validation_data=(X, Y))
    batches = ["train_batch_begin0", "train_batch_end0", "train_batch_begin1", "train_batch_end1"]
    tests = [
        "test_begin",
        "test_batch_begin0",
        "test_batch_end0",
        "test_batch_begin1",
        "test_batch_end1",
        "test_end",
    ]
    epochs = [
        call for n in (0, 1) for call in [f"epoch_begin{n}", *batches, *tests, f"epoch_end{n}"]
    ]
    assert recorder.hooks() == ["train_begin", *epochs, "train_end", "close"]
    assert recorder.params == {"epochs": 2, "steps": 2, "verbose": 0}
    assert recorder.trainer is on


def test_prediction_and_evaluation_have_their_hooks():
    recorder, on = Recorder(), line()
    on.predict(X, batch_size=2, callbacks=[recorder])
    expected = ["begin", "batch_begin0", "batch_end0", "batch_begin1", "batch_end1", "end"]
    assert recorder.hooks() == [*(f"predict_{name}" for name in expected), "close"]
    recorder.calls.clear()
    on.evaluate(X, Y, batch_size=2, callbacks=[recorder])
    assert recorder.hooks() == [*(f"test_{name}" for name in expected), "close"]


def test_what_logs_hold():
    x = np.array([[1], [1], [3], [3], [5]], np.float32)
    recorder = Recorder()
    fit(
        recorder,
        on=line(0.0, metrics=["mean_absolute_error"]),
        x=x,
        y=0 * x,
        shuffle=False,
        validation_data=(x, 0 * x),
    )
    logs = {}
    for hook, *arguments in recorder.calls:
        logs.setdefault(hook, []).append(arguments[-1] if arguments else None)
    # means over the rows so far
    assert [entry["loss"] for entry in logs["on_train_batch_end"]] == [1, 5, 9]
    assert [entry["batch_loss"] for entry in logs["on_train_batch_end"]] == [1, 9, 25]
    assert [entry["mean_absolute_error"] for entry in logs["on_train_batch_end"]] == pytest.approx(
        [1, 2, 13 / 5]
    )
    assert logs["on_test_end"] == [{"loss": 9, "mean_absolute_error": pytest.approx(2.6)}]
    (end,) = logs["on_epoch_end"]
    assert set(end) == {
        "loss",
        "mean_absolute_error",
        "val_loss",
        "val_mean_absolute_error",
        "learning_rate",
    }
    assert logs["on_train_end"] == [end]
    assert all(
        type(value) is float
        for entries in logs.values()
        for entry in entries
        if entry
        for value in entry.values()
    )


def test_the_learning_rate_in_logs_is_the_one_the_epoch_used():
    def double(epoch, logs):
        change.trainer.learning_rate *= 2

    change = LambdaCallback(on_epoch_end=double)
    assert fit(change, epochs=3).history.history["learning_rate"] == pytest.approx([0.1, 0.2, 0.4])


def test_phases_come_before_the_order_of_the_list():
    calls = []
    recorders = [Recorder(calls, name) for name in ("a", "b", "c", "d")]
    for recorder, phase in zip(recorders, ("logger", "checkpoint", "monitor", "monitor")):
        recorder.phase = phase
    fit(*recorders)
    assert [name for name, *_ in calls if name.endswith("epoch_end")] == [
        f"{name}on_epoch_end" for name in "cdba"
    ]


def test_what_a_callback_logs_is_seen_by_those_after_it_in_that_event_only():
    seen = []
    first = LambdaCallback(
        on_epoch_end=lambda epoch, logs: first.trainer.log("mine", np.float32(epoch)),
        on_train_batch_end=lambda batch, logs: first.trainer.log("other", 1),
    )
    before, after = (
        LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append("mine" in logs))
        for _ in range(2)
    )
    history = fit(before, first, after, epochs=2).history.history
    assert seen == [False, True] * 2
    assert history["mine"] == [0.0, 1.0]
    assert "other" not in history
    calls = CallbackList(first.trainer, [after])
    calls.on_epoch_end(0, Logs())
    for log in (first.trainer.log, calls.log):
        with pytest.raises(SettingError, match="Call it inside a hook"):
            log("mine", 1.0)


def test_a_stop_within_an_epoch_skips_its_batches_but_not_its_end():
    def stop(batch, logs):
        recorder.trainer.stop_training = True

    recorder = Recorder()
    fit(
        LambdaCallback(on_train_batch_end=stop),
        recorder,
        epochs=3,
        validation_data=(X, Y),
        batch_size=1,
    )
    hooks = [hook for hook in recorder.hooks() if "batch" not in hook]
    assert hooks == [
        "train_begin",
        "epoch_begin0",
        "test_begin",
        "test_end",
        "epoch_end0",
        "train_end",
        "close",
    ]
    assert recorder.hooks().count("train_batch_end0") == 1
    assert "train_batch_end1" not in recorder.hooks()


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_test_end",
        "on_epoch_end",
    ],
)
def test_an_exception_is_told_to_all_that_began_then_they_are_closed_then_it_is_raised(error, hook):
    def fail(*arguments):
        raise error

    calls = []
    first, failing, last = (
        Recorder(calls, "first."),
        Recorder(calls, "failing."),
        Recorder(calls, "last."),
    )
    setattr(failing, hook, fail)
    with pytest.raises(type(error)) as raised:
        fit(first, failing, last, validation_data=(X, Y))
    assert raised.value is error
    began = ["first.", "failing."] if hook == "on_train_begin" else ["first.", "failing.", "last."]
    assert calls[-2 * len(began) :] == [
        *((f"{name}on_exception", error) for name in began),
        *((f"{name}on_close",) for name in began),
    ]


def test_a_callback_that_fails_to_close_does_not_keep_the_others_from_closing():
    def fail():
        raise OSError("disk full")

    recorder = Recorder()
    with pytest.raises(OSError, match="disk full"):
        fit(LambdaCallback(on_close=fail), recorder)
    assert recorder.hooks()[-1] == "close"


def test_a_callback_that_fails_to_close_does_not_hide_an_exception():
    def fail_to_close():
        raise OSError("disk full")

    def fail(epoch, logs):
        raise RuntimeError("the cause")

    with (
        pytest.warns(RuntimeWarning, match=r"LambdaCallback.on_close failed with OSError"),
        pytest.raises(RuntimeError, match="the cause"),
    ):
        fit(LambdaCallback(on_epoch_end=fail, on_close=fail_to_close))


class Counts(StatefulCallback):
    state_attributes = ("epochs", "marks")

    def reset(self):
        self.epochs = 0
        self.marks = {"losses": []}

    def on_epoch_end(self, epoch, logs):
        self.epochs += 1
        self.marks["losses"].append(logs["loss"])


def test_every_callback_has_a_dict_of_params_of_its_own():
    one, other, params = Callback(), History(), {"epochs": 3}
    CallbackList(line(), [one, other], params)
    one.params["epochs"] = 5
    assert (other.params, params) == ({"epochs": 3}, {"epochs": 3})


def test_a_copy_of_a_callback_leaves_the_trainer_behind():
    counts = Counts()
    fit(counts)
    for other in (copy.copy(counts), pickle.loads(pickle.dumps(counts))):
        assert other.epochs == 1
        assert not hasattr(other, "trainer")
        assert not hasattr(other, "callbacks")


def test_a_loaded_state_is_for_the_next_fit_alone():
    counts, on = Counts(), line()
    fit(counts, on=on, epochs=2)
    assert counts.epochs == 2
    counts.load_state_dict({"epochs": 5, "marks": {"losses": [1.0]}})
    fit(counts, on=on)
    assert (counts.epochs, len(counts.marks["losses"])) == (6, 2)
    fit(counts, on=on)
    assert (counts.epochs, len(counts.marks["losses"])) == (1, 1)


def test_a_saved_state_does_not_change_with_the_callback():
    counts = Counts()
    fit(counts)
    state = counts.state_dict()
    other = Counts()
    other.load_state_dict(state)
    for callback in (counts, other):
        callback.on_epoch_end(1, {"loss": 0.5})
    assert state["epochs"] == len(state["marks"]["losses"]) == 1
    assert len(counts.marks["losses"]) == len(other.marks["losses"]) == 2


def test_a_hook_that_the_backend_never_calls_is_refused_by_name():
    class Clip(Callback):
        def on_gradients(self, gradients):
            pass

    on = line()
    with pytest.raises(
        SettingError, match=r"Clip overrides on_gradients, but backend='full' never calls"
    ):
        fit(Clip(), on=on)
    assert on.global_step == 0
    assert on.history.epoch == []


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            [EarlyStopping(), EarlyStopping()],
            r"Two callbacks have the same state_key 'EarlyStopping\(val_loss\)'",
        ),
        ([EarlyStopping], r"instances of .*Callback, got <class .*Create an object: EarlyStopping"),
        ([print], "instances of"),
    ],
)
def test_a_list_that_cannot_work_is_refused_before_training(callbacks, message):
    with pytest.raises(SettingError, match=message):
        fit(*callbacks)


def test_only_overridden_hooks_are_listened_to():
    calls = CallbackList(
        line(),
        [
            LambdaCallback(on_epoch_end=lambda epoch, logs: None),
            History(),
            ProgressBar(2),
            TerminateOnNaN(),
        ],
    )
    listened = {hook for hook in HOOKS if len(getattr(calls, hook.removeprefix("on_")))}
    assert listened == {
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_end",
        "on_epoch_end",
        "on_test_begin",
        "on_train_end",
        "on_close",
    }
    assert len(calls.epoch_end) == 3


def test_a_callback_without_batch_hooks_adds_no_call_to_a_batch():
    trainer = line()
    package = str(Path(onnxfit.__file__).parent)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    def calls_of(batches, *callbacks):
        nonlocal calls
        x, y = np.ones((2, batches, 1), np.float32)
        calls = 0
        sys.setprofile(count)
        try:
            trainer.fit(x, y, batch_size=1, verbose=0, callbacks=callbacks)
        finally:
            sys.setprofile(None)
        return calls

    def calls_of_ten_batches(**hooks):
        return calls_of(20, LambdaCallback(**hooks)) - calls_of(10, LambdaCallback(**hooks))

    calls_of(3)  # compiles the step, and binds both sets of weights
    alone = calls_of(20) - calls_of(10)
    assert alone >= 10
    assert calls_of_ten_batches(on_epoch_end=lambda epoch, logs: None) == alone
    assert calls_of_ten_batches(on_train_batch_end=lambda batch, logs: None) > alone
