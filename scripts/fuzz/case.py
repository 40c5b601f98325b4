"""One case: a mutated file, and the outcome of training with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from onnxfit import Trainer
from onnxfit.errors import OnnxfitError
from scripts.fuzz.batch import TooLarge, random_batch
from scripts.fuzz.checkpoint_mutations import mutated_checkpoint
from scripts.fuzz.model_mutations import mutated_model
from scripts.fuzz.models import MODELS, model_bytes

CHECKPOINT_SHARE = 0.2  # of the cases


class Case:
    """One mutated file. `number` alone determines it, given the same undamaged `checkpoints`."""

    def __init__(self, number: int, checkpoints: dict[str, bytes]) -> None:
        rng = random.Random(number)
        self.number = number
        self.message = ""  # of the onnxfit error, if one was raised
        self.is_checkpoint = rng.random() < CHECKPOINT_SHARE
        self.backend = rng.choice(("full", "full", "forward_backward"))
        self.original = rng.choice(list(checkpoints if self.is_checkpoint else MODELS))
        if self.is_checkpoint:
            self.data = mutated_checkpoint(checkpoints[self.original], rng)
        else:
            self.data = mutated_model(model_bytes(self.original), rng)

    def __str__(self) -> str:
        kind = "checkpoint" if self.is_checkpoint else "model"
        return f"case {self.number} ({kind} {self.original}, {self.backend})"

    def trainer(self, folder: Path) -> Trainer:
        """Return a trainer of the mutated file."""
        if self.is_checkpoint:
            path = folder / "mutated"
            path.write_bytes(self.data)
            return Trainer.load(path)
        loss = MODELS[self.original][1]
        return Trainer(self.data, loss=loss, optimizer=0.01, backend=self.backend, threads=1)

    def run(self, folder: Path, stage: Callable[[str], None]) -> str:
        """Train one batch, and return the outcome: "trained", "ModelError", "StepError in
        training", ...

        Exceptions that are not onnxfit's are let through. `stage` is called with the name of each
        stage as it begins.
        """
        suffix = ""
        try:
            stage("make")
            trainer = self.trainer(folder)
            suffix = " in training"
            stage("batch")
            x, y = random_batch(trainer, random.Random(self.number))
            stage("train")
            trainer.train_on_batch(x, y)
            return "trained"
        except TooLarge:
            return "made, too large to train"
        except OnnxfitError as error:
            self.message = str(error)
            return type(error).__name__ + suffix
