"""Readers of data as users call them, for a small model, and its undamaged data."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from onnxfit import Trainer
from onnxfit.cli import arrays
from tests.models import convolutional, mlp

SMALL: dict[str, Any] = {
    "X": np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32),
    "y": np.arange(12) % 3,
}


@functools.cache
def small_trainer() -> Trainer:
    """Return a trainer for rows of four numbers. Evaluation and prediction leave it as it is."""
    return Trainer(mlp(), loss="cross_entropy", threads=1)


@functools.cache
def image_trainer() -> Trainer:
    """Return a trainer for grey images of 8 x 8 pixels."""
    return Trainer(convolutional(), loss="cross_entropy", threads=1)


def read_as_commands_do(paths: list[str]) -> None:
    """Read files with inputs and labels as `onnxfit fit` does, and evaluate the model on them."""
    trainer = small_trainer()
    request = arrays.DataRequest(arrays.inputs_of(trainer.model), list(trainer.objectives))
    trainer.evaluate(*arrays.read(paths, request), batch_size=5)
