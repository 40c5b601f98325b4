"""ProgressBar."""

import importlib.util
import math
import re
import sys
import types

import pytest

from onnxfit.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    Logs,
    ProgressBar,
    progress,
)
from onnxfit.callbacks.progress import print_line
from onnxfit.callbacks.progress.line import LineFormat
from onnxfit.errors import SettingError
from tests.callbacks.helpers import X, Y, fit, line


def drawn(errors):
    """Return the lines that were drawn over each other or written, as text."""
    return [line.rstrip() for line in errors.replace("\n", "\r").split("\r")]


@pytest.fixture
def width(monkeypatch):
    """Return a function that gives the standard error a number of columns."""
    return lambda columns: monkeypatch.setattr(progress, "stream_width", lambda stream: columns)


@pytest.mark.parametrize("verbose", [1, 2])
def test_a_line_an_epoch(capfd, verbose):
    fit(epochs=2, verbose=verbose, validation_data=(X, Y))
    output, errors = capfd.readouterr()
    first, second = [line for line in drawn(errors) if "val_loss" in line]
    assert output == ""
    assert re.fullmatch(
        r"epoch 1/2  2/2  \d\.\d\ds +[\d.]+ ms/step  loss 0\.8200  val_loss 0\.4096", first
    )
    assert re.sub(r"[\d. ]+", "", first) == re.sub(r"[\d. ]+", "", second)
    assert first.index("loss") == second.index("loss")
    assert first.index("val_loss") == second.index("val_loss")
    if verbose == 2:
        assert errors == f"{first}\n{second}\n"


def test_a_line_that_is_too_wide_goes_on_below(capfd, width):
    width(50)
    fit(epochs=1, verbose=2, validation_data=(X, Y))
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("loss 0.8200")
    assert second == " " * len("epoch 1/1  ") + "val_loss 0.4096"


def test_a_line_has_the_learning_rate_where_it_changes(capfd):
    fit(LearningRateScheduler(lambda epoch: 0.1 if epoch < 2 else 0.05), epochs=4, verbose=2)
    lines = capfd.readouterr().err.splitlines()
    assert [line[-20:] for line in lines if "learning_rate" in line] == ["  learning_rate 0.05"]
    assert "learning_rate" in lines[2]


def test_lines_are_aligned():
    lines = LineFormat()
    for loss, text in ((12.3456, "loss 12.346"), (0.5, "loss 0.5000"), (1e-9, "loss 1.000e-09")):
        assert lines.figures({"loss": loss}) == [text]
    assert lines.figures({"loss": 0.5, "auc": 1.0}) == ["loss    0.5000", "auc 1.0000"]
    assert lines.figures({"loss": math.nan}) == ["loss       nan"]


def test_silence(capfd):
    fit(verbose=0)
    assert capfd.readouterr() == ("", "")


def test_auto_is_a_line_where_there_is_no_terminal_and_a_bar_where_there_is_one(monkeypatch):

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert ProgressBar().verbose == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert ProgressBar().verbose == 1
    with pytest.raises(SettingError, match="0, 1, 2 or 'auto', got 3"):
        ProgressBar(3)


def test_a_bar_shows_epoch_batches_running_figures_time_left_and_time_of_a_step(capfd):
    fit(ProgressBar(1, interval=0.0), epochs=2, validation_data=(X, Y))
    output, errors = capfd.readouterr()
    assert output == ""
    lines = drawn(errors)
    assert any(
        re.fullmatch(r"epoch 1/2  1/2  \|.{10}\|  loss 1\.0000  00:\d\d left  [\d.]+ ms/step", line)
        for line in lines
    )
    assert any(re.fullmatch(r"epoch 2/2  2/2  \|.{10}\|  loss .*  validation", x) for x in lines)
    assert "batch_loss" not in errors
    assert all(re.match("epoch|$", line) for line in lines)
    assert lines[-1] == ""  # the bar is gone


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (100, r"epoch 1/1  1/2  \|.{10}\|  loss 1.0000  long_name 1.0000  00:\d\d left  .*/step"),
        (72, r"epoch 1/1  1/2  \|.{10}\|  loss 1.0000  long_name 1.0000  00:\d\d left"),
        (60, r"epoch 1/1  1/2  \|.{10}\|  loss 1.0000  long_name 1.0000"),
        (50, r"epoch 1/1  1/2  loss 1.0000  long_name 1.0000"),
        (40, r"epoch 1/1  1/2  loss 1.0000"),
    ],
)
def test_figures_come_before_rates_where_a_bar_has_little_room(capfd, width, columns, expected):
    width(columns)
    name = LambdaCallback(on_train_batch_end=lambda batch, logs: on.log("long_name", 1.0))
    on = line()
    fit(name, ProgressBar(1, interval=0.0), on=on)
    assert any(re.fullmatch(expected, x) for x in drawn(capfd.readouterr().err))


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_a_callback_prints_stands_in_a_line_of_its_own(capfd, name):
    def say(batch, logs):
        print("hello", end="" if batch else "\n", file=getattr(sys, name))

    streams = sys.stdout, sys.stderr
    fit(LambdaCallback(on_train_batch_end=say), ProgressBar(1, interval=0.0), epochs=2)
    assert (sys.stdout, sys.stderr) == streams
    written = capfd.readouterr()
    assert getattr(written, name[3:]).count("hello") == 4
    for written_line in drawn(getattr(written, name[3:])):
        assert written_line == "hello" or "hello" not in written_line


def test_streams_that_a_callback_replaces_stay_replaced(capfd, monkeypatch):
    replaced = types.SimpleNamespace(write=sys.stderr.write, flush=sys.stderr.flush)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    replace = LambdaCallback(on_train_batch_end=lambda *_: setattr(sys, "stdout", replaced))
    fit(replace, ProgressBar(1))
    assert sys.stdout is replaced


def test_names_with_braces_are_shown(capfd):
    on = line()
    name = LambdaCallback(on_train_batch_end=lambda batch, logs: on.log("{bar}", 1.0))
    fit(name, ProgressBar(1, interval=0.0), on=on)
    assert "{bar} 1.0000" in capfd.readouterr().err


def test_a_notebook_has_a_bar_and_lines_on_the_standard_output(capfd, monkeypatch):
    shell = types.SimpleNamespace(kernel=None)
    notebook = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    for spec, verbose in ((object(), 1), (None, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", {"ipywidgets": spec}.get)
            assert ProgressBar().verbose == verbose
    fit(ProgressBar(1, interval=0.0), EarlyStopping("loss", mode="max"), epochs=5)
    output, errors = capfd.readouterr()
    assert errors == ""
    assert "epoch 1/5  2/2  |" in output
    assert "EarlyStopping: loss is" in output
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)  # IPython is imported by a script
    assert ProgressBar().verbose == 2


def test_a_bar_reads_no_metric_between_drawings(capfd):
    reads = []
    bar = ProgressBar(1, interval=1e9)
    bar.params = {"epochs": 1, "steps": 9}
    bar.trainer = types.SimpleNamespace(global_batch=0, learning_rate=0.1)
    bar.on_train_begin(Logs())
    bar.on_epoch_begin(0, Logs())
    for batch in range(9):
        bar.on_train_batch_end(batch, Logs({"auc": lambda: reads.append(1) or 0.5}))
    assert len(reads) == 2  # of the first batch and the last
    bar.on_epoch_end(0, Logs({"auc": 0.5}))
    assert "9/9" in capfd.readouterr().err


def test_a_bar_is_ended_when_training_fails(capfd):
    def fail(batch, logs):
        raise RuntimeError("no")

    bar = ProgressBar(1)
    with pytest.raises(RuntimeError, match="no"):
        fit(bar, LambdaCallback(on_train_batch_end=fail))
    assert bar._bar is None
    errors = capfd.readouterr().err
    assert errors.endswith("\n")
    assert drawn(errors)[-2].startswith("epoch 1/1  0/2  |")  # as far as it went


def test_the_reason_of_a_stop_is_shown(capfd):
    fit(EarlyStopping("loss", mode="max"), epochs=5, verbose=2)
    assert "EarlyStopping: loss is" in capfd.readouterr().err.splitlines()[-1]


def test_a_line_of_a_callback_stands_above_the_line_of_the_epoch(capfd):
    say = LambdaCallback(on_epoch_end=lambda epoch, logs: print_line(f"Epoch {epoch + 1}: hello."))
    fit(ProgressBar(1, interval=0.0), say)
    lines = drawn(capfd.readouterr().err)
    at = lines.index("Epoch 1: hello.")
    assert any(re.match(r"epoch 1/1  2/2  \d", line) for line in lines[at:])


def test_an_evaluation_outside_of_fit_shows_nothing(capfd):
    line().evaluate(X, Y, callbacks=ProgressBar(1))
    assert capfd.readouterr() == ("", "")
