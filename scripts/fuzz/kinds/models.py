"""Models whose fields, graphs or bytes are damaged."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from onnxfit import Trainer
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.batch import train_one_batch
from scripts.fuzz.model_mutations import mutated_model
from scripts.fuzz.models import MODELS, model_bytes


class Models(Attempt):
    share: ClassVar[int] = 42

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.backend = rng.choice(("full", "full", "forward_backward"))
        self.original = rng.choice(list(MODELS))
        self.main = "damaged.onnx"
        self.files[self.main] = mutated_model(model_bytes(self.original), rng)

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("make")
        trainer = Trainer(
            self.files[self.main],
            loss=MODELS[self.original][1],
            optimizer=0.01,
            backend=self.backend,
            threads=1,
        )
        return train_one_batch(trainer, rng, stage)
