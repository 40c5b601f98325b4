"""What onnxfit adds to the time of onnxruntime, for each batch and for an import:

`python benchmarks/overhead.py [--network linear|mlp] [--steps 200] [--repeats 50] [--rows 32]`.

It prints a line for each way to go through the same batches: microseconds of processor time for one
batch, that time in steps of `fit`, and the calls of Python functions for one batch. The ways take
turns, and of the repeats the least time counts, since other processes only add time. The number of
calls does not depend on the machine's load.

- `session.run`: the compiled step alone, without new data.
- `fit`: with the rows in their order, as in all the other ways.
- `fit, epoch hook` and `fit, batch hook`: with a callback whose hook does nothing, at the end of an
  epoch or of a batch.
- `train_on_batch`, `evaluate`, `test_on_batch`, `predict_on_batch`.

The last lines are processor seconds of imports, each in a process of its own: NumPy, onnx with
NumPy, `import onnxfit`, which imports only NumPy, and `import onnxfit.trainer`, which imports onnx,
onnx-ir and onnxruntime. They include the start and the end of Python. Python compiles every module
anew, and takes longer, where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import onnxfit
from onnxfit.callbacks import LambdaCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import models

FEATURES = 10
NETWORKS = {"linear": ((FEATURES, 1), "sgd"), "mlp": ((FEATURES, 32, 16, 1), "adam")}
IMPORTS = ("numpy", "onnx", "onnxfit", "onnxfit.trainer")

Way = Callable[[], object]


def ways(network: str, rows: int, steps: int) -> dict[str, Way]:
    """Return name -> a function that goes through `steps` batches of `rows` rows."""
    sizes, optimizer = NETWORKS[network]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * rows, FEATURES)).astype(np.float32)
    y = rng.standard_normal((len(x), 1)).astype(np.float32)
    batches = [(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)]
    trainer = onnxfit.Trainer(models.dense(*sizes), loss="mse", optimizer=optimizer, threads=1)
    trainer.learning_rate = 1e-4

    def fit(**callback: Callable[..., None]) -> None:
        callbacks = [LambdaCallback(**callback)] if callback else []
        trainer.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=callbacks)

    def each(function: Callable[..., object], arrays: int = 2) -> Way:
        return lambda: [function(*batch[:arrays]) for batch in batches]

    fit()
    (session,) = trainer._training.backend.caches["train"].exact.values()
    binding = session._last_binding
    return {
        "session.run": lambda: [session._run(binding, None) for _ in batches],
        "fit": fit,
        "fit, epoch hook": lambda: fit(on_epoch_end=lambda epoch, logs: None),
        "fit, batch hook": lambda: fit(on_train_batch_end=lambda batch, logs: None),
        "train_on_batch": each(trainer.train_on_batch),
        "evaluate": lambda: trainer.evaluate(x, y, batch_size=rows),
        "test_on_batch": each(trainer.test_on_batch),
        "predict_on_batch": each(trainer.predict_on_batch, arrays=1),
    }


def least_times(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the least time of each case, which take turns; a first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, case in cases.items():
            times[name].append(case())
    return {name: min(each[1:]) for name, each in times.items()}


def processor_time(way: Way) -> float:
    """Return the processor seconds of a call."""
    start = time.process_time()
    way()
    return time.process_time() - start


def count_calls(way: Way) -> int:
    """Return how many functions of Python a call calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        way()
    finally:
        sys.setprofile(None)
    return calls


def import_time(module: str) -> float:
    """Return the processor seconds of a process that imports a module."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    after = os.times()
    children = after.children_user - before.children_user
    return children + after.children_system - before.children_system


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--network", choices=NETWORKS, default="linear")
    arguments.add_argument("--steps", type=int, default=200, help="batches of a way")
    arguments.add_argument("--repeats", type=int, default=50)
    arguments.add_argument("--rows", type=int, default=32, help="of a batch")
    options = arguments.parse_args()
    cases = ways(options.network, options.rows, options.steps)
    times = least_times(
        {name: lambda way=way: processor_time(way) for name, way in cases.items()}, options.repeats
    )
    for name, way in cases.items():
        step, calls = times[name] / options.steps, count_calls(way) / options.steps
        ratio = times[name] / times["fit"]
        print(f"{name:16} {1e6 * step:6.1f} µs, {ratio:5.2f} steps of fit, {calls:5.1f} calls")
    modules = {name: lambda name=name: import_time(name) for name in IMPORTS}
    for name, seconds in least_times(modules, 10).items():
        print(f"import {name:16} {seconds:5.2f} s")


if __name__ == "__main__":
    main()
