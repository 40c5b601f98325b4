"""Undamaged checkpoints: two of unfinished fits with the states of callbacks, one of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onnxfit import Trainer
from onnxfit.callbacks import CSVLogger, EarlyStopping, LambdaCallback, ReduceLROnPlateau
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Cosine
from tests.models import convolutional, mlp


def _unfinished_fit(trainer: Trainer, rows: int, path: Path, **x: Any) -> bytes:
    """Return a checkpoint from the middle of the second epoch, with the states of callbacks."""

    def save(batch: int, logs: object) -> None:
        if trainer.epoch == 1 and batch == 1:
            trainer.save(path)

    callbacks = [
        EarlyStopping("loss"),
        ReduceLROnPlateau("loss"),
        LambdaCallback(on_train_batch_end=save),
        CSVLogger(path.with_suffix(".csv")),
    ]
    trainer.fit(**x, epochs=2, batch_size=rows // 3, callbacks=callbacks, verbose=0)
    return path.read_bytes()


def checkpoints(folder: Path) -> dict[str, bytes]:
    """Return the checkpoints by name; they are written in `folder`."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    images = rng.normal(size=(12, 1, 8, 8)).astype(np.float32)
    adam = Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=Adam(ema_momentum=0.9),
        metrics=["accuracy"],
        penalty={"fc*": {"l1": 0.1}},
    )
    network = Trainer(
        convolutional(),
        loss="cross_entropy",
        optimizer=SGD(momentum=0.9),
        backend="forward_backward",
        accumulate=2,
        clip_norm=1.0,
    )
    scheduled = Trainer(mlp(), loss="cross_entropy", optimizer=Adam(learning_rate=Cosine(0.1, 10)))
    return {
        "adam": _unfinished_fit(adam, 12, folder / "adam", x=x, y=y),
        "network": _unfinished_fit(network, 12, folder / "network", x=images, y=y),
        "scheduled": scheduled.save(folder / "scheduled").read_bytes(),
    }
