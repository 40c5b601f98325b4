"""The batches of one epoch after another, and where in the data a resumed fit goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback
from onnxfit.data import Batch, Source
from onnxfit.errors import SettingError
from onnxfit.optimizers import SGD
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.position import Position
from tests.models import mlp


class Numbers(Source):
    """Batches without rows, whose signatures are `epoch.number`."""

    purpose = "training"

    def __init__(self, length: int, re_iterable: bool = True) -> None:
        self.length = self.steps = length
        self.re_iterable = re_iterable
        self.closed = False

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        for number in range(skip, self.length):
            yield Batch(1, f"{epoch}.{number}", (), (), slice(0, 1))

    def with_batch_size(self, batch_size: int, drop_last: bool = False) -> Source:
        return Numbers(self.length // batch_size)

    def close(self) -> None:
        self.closed = True


def epoch(batches: EpochIterator, stop_after: int | None = None) -> list[str]:
    """The numbers and names of the batches of the next epoch."""
    names = []
    for index, batch in batches:
        batches.advance()
        names.append(f"{index}: {batch.signature}")
        if len(names) == stop_after:
            break
    batches.end_epoch()
    return names


def test_an_epoch_is_a_data_epoch() -> None:
    batches = EpochIterator(Numbers(2), None, 5, Position())
    assert batches.steps == 2
    assert batches.data_position == (5, 0)
    assert epoch(batches) == ["0: 5.0", "1: 5.1"]
    assert batches.data_position == (6, 0)
    assert epoch(batches) == ["0: 6.0", "1: 6.1"]


def test_data_epochs_go_on_through_epochs_of_another_length() -> None:
    batches = EpochIterator(Numbers(3), 2, 0, Position())
    assert batches.steps == 2
    assert epoch(batches) == ["0: 0.0", "1: 0.1"]
    assert batches.data_position == (0, 2)
    assert epoch(batches) == ["0: 0.2", "1: 1.0"]
    assert batches.data_position == (1, 1)
    assert epoch(batches) == ["0: 1.1", "1: 1.2"]
    assert epoch(batches) == ["0: 2.0", "1: 2.1"]


def test_after_a_stop_the_next_epoch_is_a_data_epoch_of_its_own() -> None:
    batches = EpochIterator(Numbers(3), None, 0, Position())
    assert epoch(batches, stop_after=1) == ["0: 0.0"]
    assert batches.data_position == (0, 1)
    assert epoch(batches) == ["0: 1.0", "1: 1.1", "2: 1.2"]


@pytest.mark.parametrize("re_iterable", [True, False])
def test_too_few_batches_are_said_once(re_iterable: bool) -> None:
    batches = EpochIterator(Numbers(2, re_iterable), 3, 0, Position())
    assert batches.steps == 2
    with pytest.warns(
        UserWarning, match="the epoch ended after 2 batches, but steps_per_epoch=3"
    ) as caught:
        assert [len(epoch(batches)) for _ in range(2)] == [2, 2]
    assert len(caught) == 1


def test_exactly_enough_batches_are_no_warning() -> None:
    batches = EpochIterator(Numbers(2), 2, 0, Position())
    assert [epoch(batches) for _ in range(2)] == [["0: 0.0", "1: 0.1"], ["0: 1.0", "1: 1.1"]]


def test_an_iterator_is_not_begun_again() -> None:
    batches = EpochIterator(Numbers(3, re_iterable=False), 2, 0, Position())
    assert epoch(batches) == ["0: 0.0", "1: 0.1"]
    with pytest.warns(UserWarning, match="the epoch ended after 1 batches"):
        assert epoch(batches) == ["0: 0.2"]


@pytest.mark.parametrize("steps", [0, -1])
def test_steps_per_epoch_is_at_least_one(steps: int) -> None:
    with pytest.raises(SettingError, match=f"steps_per_epoch must be >= 1, got {steps}"):
        EpochIterator(Numbers(2), steps, 0, Position())


def test_a_batch_that_was_drawn_and_not_trained_comes_again() -> None:
    batches = EpochIterator(Numbers(3), None, 4, Position())
    for index, _ in batches:
        assert batches.data_position == (4, index)
        batches.advance()
        assert batches.data_position == (4, index + 1)


def test_a_resumed_epoch_goes_on_after_the_batches_that_are_done() -> None:
    start = Position(epoch=2, batch=3, data_epoch=7, data_batch=1)
    batches = EpochIterator(Numbers(3), None, 0, start)
    assert batches.data_position == (7, 1)  # before its first batch, too
    assert epoch(batches) == ["3: 7.1", "4: 7.2"]
    assert epoch(batches) == ["0: 8.0", "1: 8.1", "2: 8.2"]


def test_after_its_last_batch_a_resumed_epoch_has_none_left() -> None:
    start = Position(epoch=2, batch=3, data_epoch=7, trained=True)
    batches = EpochIterator(Numbers(3), None, 0, start)
    assert epoch(batches)[0] == "0: 7.0"


def test_another_batch_size_closes_the_data_of_the_old_one() -> None:
    data = Numbers(4)
    batches = EpochIterator(data, None, 0, Position())
    batches.with_batch_size(2)
    assert data.closed
    assert batches.steps == 2
    assert len(epoch(batches)) == 2
    batches.close()
    assert batches.data.closed  # type: ignore[attr-defined]


# ---------------------------------------------------------------- in a fit

RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4)).astype(np.float32)
Y = RNG.normal(size=(10, 3)).astype(np.float32)


class Interrupted(BaseException):
    pass


class SavesBefore(Callback):
    """Saves in a hook that comes before a step, and interrupts the training there."""

    def __init__(self, path: Path, hook: str, index: int, epoch: int = 1) -> None:
        self.path, self.hook, self.at, self.epoch = path, hook, index, -1
        self.in_epoch = epoch

    def on_train_begin(self, logs: Any) -> None:
        if self.hook == "on_train_begin":
            self.save()

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch
        if self.hook == "on_epoch_begin" and epoch == self.in_epoch:
            self.save()

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        at = self.hook == "on_train_batch_begin" and self.epoch == self.in_epoch
        if at and batch == self.at:
            self.save()

    def save(self) -> None:
        self.trainer.save(self.path)
        raise Interrupted


def fit(trainer: Trainer, *callbacks: Callback, **settings: Any) -> Trainer:
    trainer.fit(X, Y, batch_size=4, epochs=3, callbacks=callbacks, verbose=0, **settings)
    return trainer


def new() -> Trainer:
    return Trainer(mlp(), loss="mse", optimizer=SGD(0.1, momentum=0.9))


@pytest.mark.parametrize("settings", [{}, {"steps_per_epoch": 2}], ids=str)
@pytest.mark.parametrize("batch", [0, 1])
def test_a_checkpoint_of_a_batch_before_its_step_resumes_with_it(
    batch: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = fit(new(), **settings)
    saves = SavesBefore(tmp_path / "c", "on_train_batch_begin", batch)
    with pytest.raises(Interrupted):
        fit(new(), saves, **settings)
    resumed = fit(Trainer.load(tmp_path / "c"), **settings)
    np.testing.assert_equal(resumed.get_state(), whole.get_state())
    assert resumed.history.history == whole.history.history


def test_a_fit_that_failed_in_a_step_resumes_with_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, trainer = fit(new()), new()
    step = trainer._training.step

    def fails(*arguments: Any) -> float:
        if trainer.global_batch == 4:
            raise Interrupted
        return step(*arguments)

    monkeypatch.setattr(trainer._training, "step", fails)
    with pytest.raises(Interrupted):
        fit(trainer)
    resumed = fit(Trainer.load(trainer.save(tmp_path / "c")))
    np.testing.assert_equal(resumed.get_state(), whole.get_state())


class Logger(Callback):
    phase = "logger"

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.told.append(batch)


class SavesAfter(Callback):
    """Saves after a batch of epoch 1, before the loggers are told, and interrupts there."""

    phase = "checkpoint"

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if (self.trainer.epoch, batch) == (1, self.batch):
            self.trainer.save(self.path)
            raise Interrupted


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin"])
@pytest.mark.parametrize("first", [SavesAfter, SavesBefore])
def test_a_resumed_fit_that_is_saved_before_its_first_step_resumes_there(
    first: type[Callback], hook: str, tmp_path: Path
) -> None:
    """Its rows, running means, and the event that the loggers have missed are still those."""
    whole, told = fit(new(), everything := Logger()), []
    before = SavesBefore(tmp_path / "a", "on_train_batch_begin", 2)
    saves = before if first is SavesBefore else SavesAfter(tmp_path / "a", 1)
    for path, callback in ((None, saves), ("a", SavesBefore(tmp_path / "b", hook, 0)), ("b", None)):
        trainer = Trainer.load(tmp_path / path) if path else new()
        logger = Logger()
        if callback is None:
            resumed = fit(trainer, logger)
        else:
            with pytest.raises(Interrupted):
                fit(trainer, callback, logger)
        told += logger.told
    np.testing.assert_equal(resumed.get_state(), whole.get_state())
    assert resumed.history.history == whole.history.history
    assert told == everything.told
