"""Saves in a background thread: their errors are reported once, and later saves are made."""

import threading
import time

import pytest

from onnxfit.callbacks import CallbackList, LambdaCallback, ModelCheckpoint
from onnxfit.callbacks.background import SavingCallback
from onnxfit.errors import CheckpointError
from tests.callbacks.helpers import fit, line


class Saves(SavingCallback):
    @property
    def state_key(self):
        return str(id(self))


def fails():
    raise OSError("the disk is full")


def saving(count=1):
    callbacks = [Saves() for _ in range(count)]
    CallbackList(line(), callbacks)
    return callbacks


@pytest.mark.parametrize("background", [True, False])
def test_an_error_is_raised_once_and_the_next_save_is_made(background):
    (saves,) = saving()
    saves.background = background
    written = []

    def save_two():
        for job in (fails, lambda: written.append("at once")):
            saves.save(job)
            saves.finish_save()

    with pytest.raises(OSError, match="the disk is full"):
        save_two()
    assert not written
    saves.finish_save()  # the error is not raised again
    saves.save(lambda: written.append("later"))
    saves.finish_save()
    assert written == ["later"]


def test_without_a_background_a_save_is_done_when_it_returns():
    (saves,) = saving()
    saves.background = False
    written = []

    def slow():
        time.sleep(0.05)
        written.append(threading.current_thread().name)

    saves.save(slow)
    assert written == ["onnxfit-save"]


def test_saves_of_several_callbacks_come_one_after_another_and_stop_at_a_failure():
    first, second, third = saving(3)
    gate, written = threading.Event(), []

    def slow():
        assert gate.wait(30)
        fails()

    first.save(slow)
    second.save(lambda: written.append("second"))
    third.save(lambda: written.append("third"))
    assert not written
    gate.set()
    with pytest.raises(OSError, match="the disk is full"):
        first.finish_save()
    second.finish_save()
    third.finish_save()
    assert not written  # what would have followed a file that is not there
    second.save(lambda: written.append("second"))
    second.finish_save()
    assert written == ["second"]


def test_a_fit_after_one_whose_save_failed_saves(tmp_path):
    """The failure was raised, and the same callback serves again."""
    folder = tmp_path / "folder"
    folder.mkdir()
    saves = ModelCheckpoint(folder / "{epoch}.ckpt", monitor="loss")

    def spoil(epoch, logs):
        if epoch == 1:
            (folder / "2.ckpt").mkdir()  # a folder cannot be overwritten

    on = line()
    with pytest.raises(CheckpointError, match=r"2\.ckpt.*cannot be written"):
        fit(LambdaCallback(on_epoch_begin=spoil), saves, on=on, epochs=3)
    (folder / "2.ckpt").rmdir()
    fit(saves, on=on, epochs=3)
    assert sorted(path.name for path in folder.iterdir()) == ["1.ckpt", "2.ckpt", "3.ckpt"]
    assert saves.last_model_path == str(folder / "3.ckpt")
