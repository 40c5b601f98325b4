"""ProgressBar."""

import sys

import pytest

from onnxfit.callbacks import EarlyStopping, LambdaCallback, Logs, ProgressBar
from onnxfit.callbacks.progress import print_line
from onnxfit.errors import SettingError
from tests.callbacks.helpers import X, Y, fit


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


def test_a_line_of_a_callback_stands_above_the_bar(capfd):
    say = LambdaCallback(on_epoch_end=lambda epoch, logs: print_line(f"Epoch {epoch + 1}: hello."))
    fit(ProgressBar(1, interval=0.0), say)
    drawn = capfd.readouterr().err.replace("\r", "\n").split("\n")
    assert "Epoch 1: hello." in drawn
    assert any(
        line.startswith("epoch 1/1: 100%") for line in drawn[drawn.index("Epoch 1: hello.") :]
    )
