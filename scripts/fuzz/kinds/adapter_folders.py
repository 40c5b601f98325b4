"""Folders of adapters as PEFT writes them, with a pickle in them."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from onnxfit import LoRA, Trainer
from onnxfit.trainable.adapters.peft import FILES, PICKLE, TENSORS
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.batch import train_one_batch
from scripts.fuzz.checkpoint_mutations import mutated_entry
from scripts.fuzz.sandbox import FIFO
from tests.models import mlp

FOLDER = "adapter"
ORIGINALS = ("lora", "dora", "loaded")


class Bomb:
    """An object whose pickle makes a folder when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


class AdapterFolders(Attempt):
    share: ClassVar[int] = 8
    own: ClassVar[tuple[str, ...]] = ("own", "own/*")

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(ORIGINALS)
        self.files = {f"{FOLDER}/{name}": originals[f"{self.original}/{name}"] for name in FILES}
        self.files[f"{FOLDER}/{PICKLE}"] = pickle.dumps(Bomb())
        self.main = f"{FOLDER}/{rng.choice(FILES)}"
        data = self.files[self.main]
        for _ in range(rng.choice((1, 1, 2))):
            data = mutated_entry(self.main, data, rng)
        self.files[self.main] = data
        if rng.random() < 0.05:
            del self.files[f"{FOLDER}/{TENSORS}"]
            if rng.random() < 0.5:
                self.links[f"{FOLDER}/{TENSORS}"] = rng.choice((FIFO, "/dev/zero", "."))

    def run(self, rng: random.Random, stage: Stage) -> str:
        return use_adapters(FOLDER, rng, stage)


def use_adapters(path: str, rng: random.Random, stage: Stage) -> str:
    """Load adapters, train them for a batch, and write them in both formats."""
    stage("load")
    adapters = LoRA.load(path)
    stage("make")
    trainer = Trainer(mlp(), loss="cross_entropy", adapters=adapters, threads=1)
    outcome = train_one_batch(trainer, rng, stage)
    stage("write")
    trainer.export_adapter("own/folder")
    trainer.export("own/merged.onnx")
    trainer.export_adapter("own/file.onnx_adapter")
    return outcome
