"""Damaged Parquet and Arrow files, where pyarrow is installed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

from onnxfit import ParquetLoader
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import mutated_bytes
from scripts.fuzz.data import small_trainer


class Parquet(Attempt):
    share: ClassVar[int] = 6

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(("table.parquet", "table.arrow"))
        if self.original not in originals:
            return
        self.main = f"data/damaged.{self.original.rpartition('.')[2]}"
        self.files[self.main] = mutated_bytes(originals[self.original], rng)
        self.prefetch = rng.choice((0, 2))

    def run(self, rng: random.Random, stage: Stage) -> str:
        if not self.files:
            return "skipped without pyarrow"
        stage("read")
        data = ParquetLoader("data", list("abcd"), labels="y", batch_size=5, prefetch=self.prefetch)
        small_trainer().evaluate(data)
        return "read"
