"""A random batch of the shapes that a model declares."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from onnxfit import Trainer
from scripts.fuzz.attempt import Stage

MAX_ELEMENTS = 1 << 20  # of one array


class TooLarge(Exception):
    """The model declares a negative size, or an array of more than MAX_ELEMENTS elements."""


def random_batch(trainer: Trainer, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs and targets for one batch; open sizes are 2 or 3."""
    sizes: dict[str, int] = {}
    values = np.random.default_rng(0)

    def array(spec: Any) -> Any:
        shape = [
            d if isinstance(d, int) else sizes.setdefault(str(d), rng.choice((2, 2, 2, 3)))
            for d in spec.shape or (2,)
        ]
        if any(d < 0 for d in shape) or np.prod(np.array(shape, dtype=object)) > MAX_ELEMENTS:
            raise TooLarge
        if spec.dtype.kind in "OUS":
            return np.full(shape, "word", dtype=object)
        if spec.dtype.kind == "f":
            return values.random(shape).astype(spec.dtype)
        return values.integers(0, 2, shape).astype(spec.dtype)

    x = {spec.name: array(spec) for spec in trainer._training.recipe.inputs}
    y = {
        output: array(target.loss.target(target.output))
        for output, target in trainer._training.recipe.targets.items()
    }
    return x, y


def train_one_batch(trainer: Trainer, rng: random.Random, stage: Stage) -> str:
    """Train a random batch, and return the outcome."""
    stage("batch")
    try:
        x, y = random_batch(trainer, rng)
    except TooLarge:
        return "made, too large to train"
    stage("train")
    trainer.train_on_batch(x, y)
    return "trained"
