"""Hooks, their order and their logs;

History, the file loggers, TerminateOnNaN, ProgressBar, LambdaCallback.
"""

import csv
import json
import math
import pickle
from copy import deepcopy

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import callbacks as package
from onnxfit.callbacks import (
    Callback,
    CallbackList,
    CSVLogger,
    EarlyStopping,
    History,
    JSONLLogger,
    LambdaCallback,
    Logs,
    ProgressBar,
    TerminateOnNaN,
)
from onnxfit.callbacks.callback import HOOKS
from onnxfit.errors import DivergenceError, SettingError, UnknownNameError
from onnxfit.registry import registry

X, Y = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)


def trainer(learning_rate=0.1, **settings):
    """y = w x with w = 1 at first; on X and Y every update brings w nearer to 0."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> line (float[N, 1] x) => (float[N, 1] y) <float[1,'
        " 1] w = {1}> { y = MatMul(x, w) }"
    )
    return onnxfit.Trainer(model, loss="mse", optimizer=learning_rate, **settings)


def fit(*callbacks, on=None, x=X, y=Y, **settings):
    on = on or trainer()
    on.fit(x, y, **{"batch_size": 2, "verbose": 0, "callbacks": list(callbacks)} | settings)
    return on


class Recorder(Callback):
    """Writes down every call of every hook."""

    def __init__(self, calls=None, name="", leave_out=("on_gradients",)):
        self.calls, self.name = [] if calls is None else calls, name
        for hook in HOOKS:
            if hook not in leave_out:
                setattr(self, hook, lambda *arguments, hook=hook: self._record(hook, *arguments))

    @property
    def state_key(self):
        return f"Recorder({self.name})"

    def _record(self, hook, *arguments):
        self.calls.append(
            (self.name + hook, *(dict(a) if isinstance(a, Logs) else a for a in arguments))
        )

    def hooks(self):
        return [
            call[0].removeprefix("on_")
            + (str(call[1]) if len(call) > 1 and isinstance(call[1], int) else "")
            for call in self.calls
        ]


# ---------------------------------------------------------------- hooks


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
    recorder, on = Recorder(), trainer()
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
        on=trainer(0.0, metrics=["mean_absolute_error"]),
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
        with pytest.raises(SettingError, match="call it inside one"):
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


def test_a_hook_that_the_backend_never_calls_is_refused_by_name():
    class Clip(Callback):
        def on_gradients(self, gradients):
            pass

    on = trainer()
    with pytest.raises(
        SettingError, match=r"Clip overrides on_gradients, which backend='full' never calls"
    ):
        fit(Clip(), on=on)
    assert on.global_step == 0
    assert on.history.epoch == []


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            [EarlyStopping(), EarlyStopping()],
            r"Two callbacks have the state_key 'EarlyStopping\(val_loss\)'",
        ),
        ([EarlyStopping], r"instances of .*Callback, got <class .*; write EarlyStopping\(\.\.\.\)"),
        ([print], "instances of"),
    ],
)
def test_a_list_that_cannot_work_is_refused_before_training(callbacks, message):
    with pytest.raises(SettingError, match=message):
        fit(*callbacks)


def test_only_overridden_hooks_are_listened_to():
    calls = CallbackList(
        trainer(),
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
        "on_train_end",
        "on_close",
    }
    assert len(calls.epoch_end) == 3


def test_the_registry_is_what_the_package_exports():
    assert package.__all__ == sorted(package.__all__)
    assert all(
        issubclass(kind, Callback) and kind.__doc__
        for kind in registry("onnxfit.callbacks", Callback).values()
    )


# ---------------------------------------------------------------- logs


def test_logs_compute_a_figure_at_its_first_reading_and_once():
    calls = []
    logs = Logs({"loss": np.float32(0.5), "auc": lambda: calls.append(1) or 1})
    assert list(logs) == ["loss", "auc"]
    assert "auc" in logs
    assert len(logs) == 2
    assert not calls
    assert logs["auc"] == logs["auc"] == 1.0
    assert type(logs["loss"]) is type(logs["auc"]) is float
    assert len(calls) == 1
    assert repr(logs) == "Logs({'loss': 0.5, 'auc': 1.0})"
    assert dict(logs) == {"loss": 0.5, "auc": 1.0}


def test_logs_are_read_only():
    logs = Logs({"loss": 0.5})
    with pytest.raises(TypeError, match=r"trainer.log\('loss', value\)"):
        logs["loss"] = 1.0
    with pytest.raises(TypeError, match="read-only"):
        del logs["loss"]
    with pytest.raises(KeyError):
        logs["auc"]
    assert dict(logs) == {"loss": 0.5}


def test_what_a_batch_s_logs_no_longer_know_is_an_error_not_another_batch_s_value():
    kept = []
    keep = LambdaCallback(on_train_batch_end=lambda batch, logs: kept.append(logs))
    fit(keep, on=trainer(metrics=["mean_absolute_error"]))
    assert kept[0]["loss"] == 1.0
    with pytest.raises(SettingError, match=r"keep a copy, dict\(logs\)"):
        kept[0]["mean_absolute_error"]


# ---------------------------------------------------------------- History and files


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"epochs": 0}, []),
        ({"epochs": 2, "initial_epoch": 3}, []),
        ({"initial_epoch": 3, "epochs": 5}, [3, 4]),
    ],
)
def test_history_of(settings, epochs):
    on = trainer()
    history = on.fit(X, Y, verbose=0, **settings)
    assert history is on.history
    assert history.epoch == epochs
    assert set(history.history) == ({"loss", "learning_rate"} if epochs else set())
    assert all(len(values) == len(epochs) for values in history.history.values())
    assert all(type(value) is float for values in history.history.values() for value in values)


def test_history_of_a_new_fit_begins_afresh():
    on = trainer()
    first, second = on.fit(X, Y, epochs=2, verbose=0), on.fit(X, Y, epochs=1, verbose=0)
    assert (first.epoch, second.epoch) == ([0, 1], [0])


def test_a_history_can_be_kept_and_sent_elsewhere_without_the_trainer():
    history = trainer().fit(X, Y, epochs=2, verbose=0)
    data = pickle.dumps(history)
    for copy in (pickle.loads(data), deepcopy(history)):
        assert (copy.epoch, copy.history) == (history.epoch, history.history)
        assert not hasattr(copy, "trainer")
    assert len(data) < 1000
    assert history.trainer.epoch == 2


def rows(path, separator=","):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter=separator))


@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize("last", [False, True])
def test_csv_rows_are_the_history_wherever_the_logger_stands(tmp_path, separator, last):
    logger, log = (
        CSVLogger(tmp_path / "new" / "log.csv", separator=separator),
        LambdaCallback(on_epoch_end=lambda e, logs: log.trainer.log("mine", e)),
    )
    on = fit(*([log, logger] if last else [logger, log]), epochs=3, validation_data=(X, Y))
    table = rows(tmp_path / "new" / "log.csv", separator)
    assert list(table[0]) == ["epoch", "loss", "val_loss", "learning_rate", "mine"]
    assert [row["epoch"] for row in table] == ["0", "1", "2"]
    for name, values in on.history.history.items():
        assert [float(row[name]) for row in table] == values


@pytest.mark.parametrize(("freq", "rows_with_validation"), [(3, [2]), ([1, 4], [0, 3])])
def test_csv_figures_that_an_epoch_lacks_are_empty(tmp_path, freq, rows_with_validation):
    fit(
        CSVLogger(tmp_path / "log.csv"),
        JSONLLogger(tmp_path / "log.jsonl"),
        epochs=5,
        validation_data=(X, Y),
        validation_freq=freq,
    )
    table = rows(tmp_path / "log.csv")
    assert [i for i, row in enumerate(table) if row["val_loss"]] == rows_with_validation
    assert len(table) == 5
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [i for i, row in enumerate(lines) if "val_loss" in row] == rows_with_validation
    assert [row["epoch"] for row in lines] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_appending_goes_on_under_one_header_and_beginning_afresh_replaces(tmp_path, kind):
    path = tmp_path / "log"
    fit(kind(path), epochs=2)
    fit(kind(path, append=True), epochs=1, validation_data=(X, Y))
    text = path.read_text()
    assert text.count("epoch") == (1 if kind is CSVLogger else 3)
    assert len(text.splitlines()) == (4 if kind is CSVLogger else 3)
    fit(kind(path), epochs=1)
    assert len(path.read_text().splitlines()) == (2 if kind is CSVLogger else 1)


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])
def test_a_line_cut_off_by_a_kill_is_dropped_and_a_resumed_file_has_no_epoch_twice(tmp_path, kind):
    path = tmp_path / "log"
    logger = kind(path)
    fit(logger, epochs=3)
    whole = path.read_text()
    path.write_text(whole + "3,0.5" if kind is CSVLogger else whole + '{"epoch": 3, "lo')
    resumed = kind(path)
    assert logger.state_dict() == {"rows": 3}
    resumed.load_state_dict({"rows": 2})  # from a checkpoint of the second epoch
    fit(resumed, initial_epoch=2, epochs=4)
    epochs = (
        [row["epoch"] for row in rows(path)]
        if kind is CSVLogger
        else [json.loads(line)["epoch"] for line in path.read_text().splitlines()]
    )
    assert list(map(int, epochs)) == [0, 1, 2, 3]


def test_appending_to_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        SettingError, match=r"was not written by CSVLogger: it has rows without 'epoch'"
    ):
        fit(CSVLogger(tmp_path / "log.csv", append=True))
    with pytest.raises(SettingError, match="one character as separator, got ''"):
        CSVLogger(tmp_path / "log.csv", separator="")


# ---------------------------------------------------------------- TerminateOnNaN


def poisoned():
    """Four batches of one row; the third row's loss is infinite, and its update would make w
    infinite or NaN.
    """
    x = np.ones((4, 1), np.float32)
    x[2] = 3e38
    return x, np.zeros((4, 1), np.float32)


def test_terminate_on_nan_stops_in_that_batch_with_the_weights_before_it(tmp_path):
    x, y = poisoned()
    weights = []
    record = Recorder()
    look = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: weights.append(look.trainer.get_weights()["w"])
    )
    on = fit(
        look,
        TerminateOnNaN(),
        CSVLogger(tmp_path / "log.csv"),
        record,
        x=x,
        y=y,
        batch_size=1,
        shuffle=False,
        epochs=3,
    )
    assert len(weights) == 3
    assert np.array_equal(on.get_weights()["w"], weights[2])
    assert np.isfinite(weights[2])
    assert [row["loss"] for row in rows(tmp_path / "log.csv")] == ["inf"]
    assert record.hooks()[-3:] == ["epoch_end0", "train_end", "close"]
    assert on.stop_reason.startswith("TerminateOnNaN: the loss is inf at step ")


@pytest.mark.parametrize("bad", range(4))
def test_terminate_on_nan_takes_back_what_was_accumulated(bad):
    x = np.ones((4, 1), np.float32)
    x[bad] = 3e38
    weights = []
    look = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: weights.append(look.trainer.get_weights()["w"])
    )
    on = fit(
        look, TerminateOnNaN(), on=trainer(accumulate=2), x=x, y=0 * x, batch_size=1, shuffle=False
    )
    assert len(weights) == bad + 1
    assert np.array_equal(on.get_weights()["w"], weights[-1])


def test_terminate_on_nan_raises_with_step_rate_and_last_losses():
    x, y = poisoned()
    on = trainer()
    with pytest.raises(
        RuntimeError, match=r"step \d.*learning rate 0\.1, last losses 1, 0\.64, inf"
    ) as raised:
        fit(TerminateOnNaN(raise_error=True), on=on, x=x, y=y, batch_size=1, shuffle=False)
    assert type(raised.value) is DivergenceError
    assert np.isfinite(on.get_weights()["w"])


def test_without_it_training_goes_on_with_one_warning(tmp_path):
    x, y = poisoned()
    with pytest.warns(Warning, match=r"(?i)loss") as warned:
        on = fit(
            CSVLogger(tmp_path / "log.csv"),
            JSONLLogger(tmp_path / "log.jsonl"),
            x=x,
            y=y,
            batch_size=1,
            shuffle=False,
            epochs=2,
        )
    assert len(warned) == 1
    assert on.history.epoch == [0, 1]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert not math.isfinite(float(last["loss"]))


# ---------------------------------------------------------------- ProgressBar, LambdaCallback


def test_a_line_an_epoch(capfd):
    fit(epochs=2, verbose=2, validation_data=(X, Y))
    output, errors = capfd.readouterr()
    first, second = errors.splitlines()
    assert output == ""
    assert first.startswith("epoch 1/2  0.")
    assert (
        first.endswith("s  loss 0.8200  val_loss 0.4096  learning_rate 0.1")
        or "s  loss 0.82  val_loss 0.4096  learning_rate 0.1" in first
    )
    assert second.startswith("epoch 2/2  ")


def test_silence(capfd):
    fit(verbose=0)
    assert capfd.readouterr() == ("", "")


def test_auto_is_a_line_where_there_is_no_terminal_and_a_bar_where_there_is_one(monkeypatch):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert ProgressBar().verbose == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert ProgressBar().verbose == 1
    with pytest.raises(SettingError, match="0, 1, 2 or 'auto', got 3"):
        ProgressBar(3)


def test_a_bar_shows_epoch_batches_rate_time_left_and_running_figures(capfd):
    fit(ProgressBar(1, interval=0.0), epochs=2, validation_data=(X, Y))
    output, errors = capfd.readouterr()
    assert output == ""
    drawn = errors.replace("\n", "\r").split("\r")
    assert any(
        line.startswith("epoch 1/2:  50%") and "1/2 [" in line and "loss 1" in line
        for line in drawn
    )
    last = [line for line in drawn if line.startswith("epoch 2/2: 100%")][-1]
    assert "2/2 [" in last
    assert "batch/s" in last
    assert "val_loss" in last
    assert "batch_loss" not in errors


def test_a_bar_reads_no_metric_between_drawings(capfd):
    reads = []
    bar = ProgressBar(1, interval=1e9)
    bar.params = {"epochs": 1, "steps": 9}
    bar.on_epoch_begin(0, Logs())
    for batch in range(9):
        bar.on_train_batch_end(batch, Logs({"auc": lambda: reads.append(1) or 0.5}))
    assert len(reads) == 1
    bar.on_epoch_end(0, Logs({"auc": 0.5}))
    assert "9/9" in capfd.readouterr().err


def test_a_bar_is_ended_when_training_fails(capfd):
    def fail(batch, logs):
        raise RuntimeError("no")

    bar = ProgressBar(1)
    with pytest.raises(RuntimeError, match="no"):
        fit(bar, LambdaCallback(on_train_batch_end=fail))
    assert bar._bar is None
    assert capfd.readouterr().err.endswith("\n")


def test_the_reason_of_a_stop_is_shown(capfd):
    fit(EarlyStopping("loss", mode="max"), epochs=5, verbose=2)
    assert "EarlyStopping: loss is" in capfd.readouterr().err.splitlines()[-1]


def test_lambda_callback_takes_hooks_only():
    with pytest.raises(
        UnknownNameError, match=r"No hook is called 'on_epoch_ends'. Did you mean 'on_epoch_end'\?"
    ):
        LambdaCallback(on_epoch_ends=print)
    calls = []
    fit(
        LambdaCallback(on_train_end=lambda logs: calls.append(1), on_epoch_end=None),
        LambdaCallback(on_train_end=lambda logs: calls.append(2)),
    )
    assert calls == [1, 2]
