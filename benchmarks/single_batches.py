"""Time of `train_on_batch` for a step, and of a step of `fit`:

`python benchmarks/single_batches.py [--steps 500] [--repeats 30] [--rows 16]`.

Both train a linear regression of ten features with plain gradient descent, in turns, in the same
order of the same rows. Of the repeats the fastest counts, since other processes only add time.
`predict_on_batch` and `test_on_batch` are measured beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import onnxfit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import models

FEATURES = 10


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--repeats", type=int, default=30)
    arguments.add_argument("--rows", type=int, default=16, help="of a batch")
    options = arguments.parse_args()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.steps * options.rows, FEATURES)).astype(np.float32)
    y = rng.standard_normal((len(x), 1)).astype(np.float32)
    batches = [
        (x[i : i + options.rows], y[i : i + options.rows]) for i in range(0, len(x), options.rows)
    ]
    trainer = onnxfit.Trainer(
        models.dense(FEATURES, 1), loss="mse", optimizer=onnxfit.optimizers.SGD(1e-3), threads=1
    )

    def each(function: Callable[..., object], arrays: int = 2) -> Callable[[], None]:
        def call() -> None:
            for batch in batches:
                function(*batch[:arrays])

        return call

    cases: dict[str, Callable[[], object]] = {
        "fit": lambda: trainer.fit(x, y, batch_size=options.rows, shuffle=False, verbose=0),
        "train_on_batch": each(trainer.train_on_batch),
        "test_on_batch": each(trainer.test_on_batch),
        "predict_on_batch": each(trainer.predict_on_batch, arrays=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if repeat:  # sessions are made in the first one
                seconds[name].append(time.perf_counter() - start)
    steps = {name: min(times) / options.steps for name, times in seconds.items()}
    for name, step in steps.items():
        print(f"{name:18} {1e6 * step:6.1f} µs a batch, {step / steps['fit']:5.2f} steps of fit")


if __name__ == "__main__":
    main()
