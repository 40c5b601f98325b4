"""Seconds of `fit` with a source that sleeps as long as a step takes:

`python benchmarks/prefetch.py [--batches 40] [--repeats 3]`.

Three passes over the same batches, in turns: from a source that takes no time; from one that sleeps
before each batch for as long as a step of the first took; and from that one through
`onnxfit.Prefetch`, whose thread sleeps while the step runs. Each is the median of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import onnxfit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import models

SIZES, BATCH = (784, 1024, 512, 10), 256


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--batches", type=int, default=40)
    arguments.add_argument("--repeats", type=int, default=3)
    options = arguments.parse_args()
    rng = np.random.default_rng(0)
    batch = (
        rng.standard_normal((BATCH, SIZES[0])).astype(np.float32),
        rng.integers(0, SIZES[-1], BATCH),
    )
    trainer = onnxfit.Trainer(models.dense(*SIZES), loss="cross_entropy", optimizer="sgd")

    def source(pause: float) -> Any:
        def batches() -> Iterator[Any]:
            for _ in range(options.batches):
                time.sleep(pause)
                yield batch

        return batches

    def seconds(data: Any) -> float:
        """Of an epoch."""
        start = time.perf_counter()
        trainer.fit(data, verbose=0)
        return time.perf_counter() - start

    seconds(source(0))  # sessions are made
    step = statistics.median(seconds(source(0)) for _ in range(options.repeats)) / options.batches
    cases = {
        "a source that takes no time": source(0),
        "a slow source": source(step),
        "a slow source, prefetched": onnxfit.Prefetch(source(step)),
    }
    rounds = [
        {title: seconds(data) for title, data in cases.items()} for _ in range(options.repeats)
    ]  # in turns: machines have moods
    alone, *_ = taken = [statistics.median(times[title] for times in rounds) for title in cases]
    print(
        f"{options.batches} batches of {BATCH} rows, MLP {'-'.join(map(str, SIZES))}; the source"
        f" sleeps {1e3 * step:.1f} ms a batch"
    )
    for title, seconds_taken in zip(cases, taken):
        print(f"  {title:28} {seconds_taken:6.3f} s  {seconds_taken / alone:5.2f} x")


if __name__ == "__main__":
    main()
