"""A run that was interrupted at any batch ends as the uninterrupted one, bit for bit: weights,
slots, history, callbacks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tensorboardX.proto.event_pb2 import Event

from onnxfit import Trainer
from onnxfit.callbacks import Callback, CSVLogger, EarlyStopping, ReduceLROnPlateau, TensorBoard
from onnxfit.errors import SettingError
from onnxfit.losses import CrossEntropy
from onnxfit.metrics import (
    AUC,
    F1,
    SSIM,
    Accuracy,
    CharacterErrorRate,
    ConfusionMatrix,
    MeanAveragePrecision,
    Metric,
    SparseCategoricalAccuracy,
)
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Exponential
from tests.models import convolutional, mlp, two_outputs

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(22, 1, 8, 8)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 22)
X = RNG.normal(size=(22, 4)).astype(np.float32)
Y = RNG.normal(size=(22, 3)).astype(np.float32)
COLUMN = X[:, :1]
BATCHES = 6  # of 4 rows, the last of 2


class Interrupted(BaseException):
    pass


class SavesAndDies(Callback):
    """Saves after a batch or epoch, and ends the process, as far as Python can."""

    phase = "checkpoint"

    def __init__(self, path: Path, at: tuple[int, int | None]) -> None:
        self.path, self.at, self.epoch = path, at, 0

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if (self.epoch, batch) == self.at:
            self.trainer.save(self.path)
            raise Interrupted

    def on_test_batch_end(self, batch: int, logs: Any) -> None:
        if (self.epoch, -1) == self.at:
            self.trainer.save(self.path)
            raise Interrupted

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if (epoch, None) == self.at:
            self.trainer.save(self.path)
            raise Interrupted


SLOW = os.environ.get("ONNXFIT_SLOW") == "1"  # at every batch indeed

# model, data, settings of the trainer, settings of fit
CASES: dict[str, tuple[onnx.ModelProto, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "dropout, momentum, schedule": (
        convolutional(dropout=0.4), (IMAGES, CLASSES),
        {"loss": "cross_entropy", "optimizer": SGD(Exponential(0.05, 5, 0.8), momentum=0.9), "metrics": [Accuracy(), F1(average="macro")]}, {},
    ),
    "accumulation, averages of weights": (
        mlp(), (X, Y), {"loss": "mse", "optimizer": Adam(0.01, ema_momentum=0.9), "accumulate": 4, "metrics": ["mae", "r2"]}, {},
    ),
    "two losses, sample weights": (
        two_outputs(), (COLUMN, {"a": COLUMN, "b": -COLUMN}, np.arange(22.0)), {"loss": {"a": "mse", "b": "huber"}, "metrics": {"b": ["rmse"]}}, {},
    ),
    "masked labels, area under the curve": (
        convolutional(dropout=0.2), (IMAGES, np.where(CLASSES == 2, -100, CLASSES)),
        {"loss": CrossEntropy(ignore_index=-100), "optimizer": "adam", "metrics": [AUC(from_logits=True), ConfusionMatrix()]}, {},
    ),
    "products in bf16": (
        mlp(), (X, Y), {"loss": "mse", "optimizer": "adam", "accumulate": 2, "precision": "bf16"}, {},
    ),
    "products in bf16x3": (
        convolutional(dropout=0.4), (IMAGES, CLASSES),
        {"loss": "cross_entropy", "optimizer": SGD(0.05, momentum=0.9), "precision": "bf16x3"}, {},
    ),
    "epochs of 4 batches from passes of 6": (mlp(), (X, Y), {"loss": "mse", "optimizer": "adam"}, {"steps_per_epoch": 4}),
}  # fmt: skip


def fitted(
    trainer: Trainer,
    data: tuple[Any, ...],
    folder: Path,
    more: list[Callback],
    settings: dict[str, Any],
) -> Trainer:
    monitors: list[Callback] = [
        EarlyStopping("loss", patience=3, restore_best_weights=True),
        CSVLogger(folder / "log.csv", append=True),
        TensorBoard(folder / "runs", update_freq="batch"),
    ]
    if not callable(trainer.optimizer.settings.learning_rate):
        monitors.append(ReduceLROnPlateau("loss", factor=0.5, patience=1))
    trainer.fit(
        *data,
        epochs=3,
        batch_size=4,
        validation_data=data,
        callbacks=[*monitors, *more],
        verbose=0,
        **settings,
    )
    return trainer


def points(folder: Path) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """(run, tag) -> every (step, value) in the files, in their order; but for what a clock decides."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for run in ("train", "validation"):
        for file in sorted((folder / run).iterdir()):
            for event in events(file.read_bytes()):
                for value in event.summary.value:
                    point = (event.step, repr(value.simple_value))
                    found.setdefault((run, value.tag), []).append(point)
    return {
        key: values for key, values in found.items() if key[1] != "speed/epoch_steps_per_second"
    }


def events(data: bytes) -> Iterator[Event]:
    """The events in a file of TensorBoard's, each framed by its length and two checksums."""
    offset = 0
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        yield Event.FromString(data[offset + 12 : offset + 12 + length])
        offset += 16 + length


class StopsAt(Callback):
    """Stops in a batch, after what the other monitors saw."""

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.global_batch == 8:
            self.trainer.stop_training, self.trainer.stop_reason = True, "eight batches"


@pytest.mark.parametrize("at", [(1, 1), (1, None)])
def test_a_checkpoint_of_the_batch_or_epoch_in_which_training_stopped(
    at: tuple[int, int | None], tmp_path: Path
) -> None:
    model, data, settings, _ = CASES["dropout, momentum, schedule"]
    for folder in ("whole", "cut"):
        (tmp_path / folder).mkdir()
    whole = fitted(Trainer(model, **settings), data, tmp_path / "whole", [StopsAt()], {})
    with pytest.raises(Interrupted):
        fitted(
            Trainer(model, **settings),
            data,
            tmp_path / "cut",
            [StopsAt(), SavesAndDies(tmp_path / "ckpt", at)],
            {},
        )
    resumed = fitted(Trainer.load(tmp_path / "ckpt"), data, tmp_path / "cut", [StopsAt()], {})
    assert resumed.global_step == whole.global_step == 8
    assert resumed.stop_reason == whole.stop_reason == "eight batches"
    assert resumed.history.history == whole.history.history
    assert (tmp_path / "cut" / "log.csv").read_text() == (
        tmp_path / "whole" / "log.csv"
    ).read_text()
    assert points(tmp_path / "cut" / "runs") == points(tmp_path / "whole" / "runs")


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
@pytest.mark.parametrize("name", CASES)
def test_at_any_batch(name: str, backend: str, tmp_path: Path) -> None:
    model, data, settings, of_fit = CASES[name]
    steps = of_fit.get("steps_per_epoch", BATCHES)
    (tmp_path / "whole").mkdir()
    whole = fitted(
        Trainer(model, backend=backend, **settings), data, tmp_path / "whole", [], of_fit
    )
    # in the middle of a validation, and at the end of the epoch, too
    places = [(epoch, batch) for epoch in range(3) for batch in (*range(steps), -1, None)]
    if not SLOW:  # each of the places with about one case and backend
        places = places[2 * sorted(CASES).index(name) + (backend == "full") :: 2 * len(CASES)]
    for epoch, batch in places:
        folder = tmp_path / f"{epoch} {batch}"
        folder.mkdir()
        with pytest.raises(Interrupted):
            fitted(
                Trainer(model, backend=backend, **settings),
                data,
                folder,
                [SavesAndDies(folder / "ckpt", (epoch, batch))],
                of_fit,
            )
        loaded = Trainer.load(folder / "ckpt")
        if batch == 0:  # twice, without a step in between
            loaded = Trainer.load(loaded.save(folder / "again"))
        resumed = fitted(loaded, data, folder, [], of_fit)
        where = f"{epoch}, {batch}"
        for part, entries in whole.get_state().items():
            for entry, value in entries.items():
                np.testing.assert_array_equal(
                    resumed.get_state()[part][entry], value, err_msg=f"{where}: {part} {entry}"
                )
        assert resumed.history.epoch == whole.history.epoch, where
        for figure, values in whole.history.history.items():
            assert resumed.history.history[figure] == values, f"{where}: {figure}"
        assert resumed.train_losses_ == whole.train_losses_, where
        assert resumed.stop_reason == whole.stop_reason
        assert (folder / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text(), (
            where
        )
        assert points(folder / "runs") == points(tmp_path / "whole" / "runs"), where


def test_every_metric_goes_on_from_its_state() -> None:
    """A law of metrics: the state, through a checkpoint's JSON and arrays, is all that is
    remembered.
    """
    from onnxfit.registry import registry

    for name, kind in registry("onnxfit.metrics", Metric).items():
        metric, copy = kind(), kind()
        one_hot = np.eye(3, dtype=np.float32)[CLASSES]
        labels, outputs = (
            (CLASSES, Y)
            if issubclass(kind, SparseCategoricalAccuracy)
            else (one_hot, np.exp(Y) / np.exp(Y).sum(1, keepdims=True))
        )
        if issubclass(kind, CharacterErrorRate):  # one time step, and the blank is class 0
            labels, outputs = np.where(CLASSES > 0, CLASSES, -1)[:, None], Y[:, None]
        if issubclass(kind, MeanAveragePrecision):
            labels = np.tile([0.0, 0, 1, 1, 0], (len(Y), 1, 1))
            outputs = np.insert(labels, 4, np.linspace(0, 1, len(Y))[:, None], axis=2)
        if issubclass(kind, SSIM):
            labels, outputs = (np.random.default_rng(i).random((len(Y), 11, 11)) for i in (0, 1))
        metric.update(labels[:9].copy(), outputs[:9].copy())
        copy.load_state_dict(metric.state_dict())
        for one in (metric, copy):
            one.update(labels[9:].copy(), outputs[9:].copy())
        np.testing.assert_array_equal(copy.result(), metric.result(), err_msg=name)


def test_a_fit_that_begins_further_on_tells_no_logger_of_what_it_skips(tmp_path: Path) -> None:
    """The callbacks' states stay: they are of no epoch."""

    class Logger(Callback):
        phase = "logger"

        def __init__(self) -> None:
            self.told: list[tuple[str, int]] = []

        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            self.told.append(("batch", batch))

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.told.append(("epoch", epoch))

        def state_dict(self) -> dict[str, Any]:
            return {"told": len(self.told)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.told.append(("told before", state["told"]))

    path = tmp_path / "t.ckpt"
    trainer = Trainer(mlp(), loss="mse")
    with pytest.raises(Interrupted):
        trainer.fit(
            X,
            Y,
            batch_size=11,
            epochs=3,
            verbose=0,
            callbacks=[SavesAndDies(path, (1, None)), Logger()],
        )
    for first, told in ((0, [("epoch", 1)]), (3, [])):
        logger = Logger()
        Trainer.load(path).fit(
            X, Y, batch_size=22, epochs=4, initial_epoch=first, verbose=0, callbacks=[logger]
        )
        epochs = [("batch", 0), ("epoch", 2), ("batch", 0), ("epoch", 3)][first // 3 * 2 :]
        assert logger.told == [("told before", 5), *told, *epochs]


def test_the_rest_of_an_epoch_wants_batches_of_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "t.ckpt"
    with pytest.raises(Interrupted):
        Trainer(mlp(), loss="mse").fit(
            X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[SavesAndDies(path, (1, 2))]
        )
    trainer = Trainer.load(path)
    before = trainer.get_weights()
    with pytest.raises(
        SettingError,
        match=r"after 3 batches of 4 rows.*batch_size=8.*batch_size=4.*initial_epoch=2",
    ):
        trainer.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    np.testing.assert_equal(trainer.get_weights(), before)
    # which goes on all the same
    assert len(trainer.fit(X, Y, batch_size=4, epochs=3, verbose=0).epoch) == 3
    assert trainer.global_batch == 3 * BATCHES
    trainer = Trainer.load(path)
    assert trainer.fit(X, Y, batch_size=8, epochs=3, initial_epoch=2, verbose=0).epoch == [0, 2]
