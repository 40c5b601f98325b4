"""Checkpoints whose archive or entries are damaged."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from onnxfit import Trainer
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.batch import train_one_batch
from scripts.fuzz.checkpoint_mutations import mutated_checkpoint


class Checkpoints(Attempt):
    share: ClassVar[int] = 12

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(("adam", "network", "scheduled"))
        self.main = "damaged.onnxfit"
        self.files[self.main] = mutated_checkpoint(originals[self.original], rng)

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("make")
        return train_one_batch(Trainer.load(self.main), rng, stage)
