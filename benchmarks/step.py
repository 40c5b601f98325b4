"""Microseconds per training step, and per batch of a whole `fit`: `python benchmarks/step.py [--torch] [--repeats 9]`.

`train_on_batch` hands over one batch and reads the loss; `fit` shuffles, gathers batches, keeps History and runs the default
callbacks, with verbose=0. SGD throughout. Each figure is the median over the repeats, after a warm-up, with the range in which the
middle half of them lies. `--torch` adds the same step in eager PyTorch, in a process of its own: in one process the two thread
pools would spin against each other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class Case:
    """What is trained; `model` names a function of examples/models.py and its arguments."""

    title: str
    model: tuple[str, tuple[int, ...]]
    loss: str
    batch_size: int
    batches: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        name, sizes = self.model
        rows = self.batch_size * self.batches
        shape = (1, 8, 8) if name == "convolutional" else (sizes[0],)
        x = rng.standard_normal((rows, *shape)).astype(np.float32)
        if self.loss == "cross_entropy":
            return x, rng.integers(0, 10, rows)
        return x, rng.standard_normal((rows, 1)).astype(np.float32)


CASES = [
    Case("linear 10-1, batch 64", ("dense", (10, 1)), "mse", 64, 200),
    Case("MLP 784-256-128-10, batch 128", ("dense", (784, 256, 128, 10)), "cross_entropy", 128, 40),
    Case("digits CNN 16-32, batch 32", ("convolutional", ()), "cross_entropy", 32, 45),
]


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median of the repeats, and where their middle half lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:9,.1f}  ({self.low:,.1f} .. {self.high:,.1f})"


def measure(run: Callable[[], object], steps: int, repeats: int) -> Timing:
    run()  # compiles, allocates, warms caches
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) / steps * 1e6)
    low, median, high = np.percentile(times, [25, 50, 75])
    return Timing(float(median), float(low), float(high))


def measure_onnxfit(case: Case, repeats: int) -> dict[str, Timing]:
    sys.path.insert(0, str(EXAMPLES))
    import models

    import onnxfit

    name, sizes = case.model
    x, y = case.data()

    def new_trainer() -> onnxfit.Trainer:
        return onnxfit.Trainer(getattr(models, name)(*sizes), loss=case.loss, optimizer=onnxfit.optimizers.SGD(0.001))

    trainer = new_trainer()
    batches = [(x[i : i + case.batch_size], y[i : i + case.batch_size]) for i in range(0, len(x), case.batch_size)]

    def steps() -> None:
        for batch in batches:
            trainer.train_on_batch(*batch)

    step = measure(steps, case.batches, repeats)
    fitted = new_trainer()
    # several epochs a call, so that what is done once a fit is spread as in real use
    fit = measure(lambda: fitted.fit(x, y, batch_size=case.batch_size, epochs=5, verbose=0), 5 * case.batches, repeats)
    return {"train_on_batch": step, "fit": fit}


def measure_torch(case: Case, repeats: int) -> Timing:
    import torch

    name, sizes = case.model
    if name == "convolutional":
        layers = [torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU()]
        layers += [torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(512, 10)]
    else:
        layers = []
        for size_in, size_out in pairwise(sizes):
            layers += [torch.nn.Linear(size_in, size_out), torch.nn.ReLU()]
        del layers[-1]
    module = torch.nn.Sequential(*layers)
    loss = torch.nn.MSELoss() if case.loss == "mse" else torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(module.parameters(), 0.001)
    x, y = (torch.from_numpy(array) for array in case.data())
    batches = list(zip(x.split(case.batch_size), y.split(case.batch_size)))

    def steps() -> None:
        for inputs, labels in batches:
            optimizer.zero_grad()
            value = loss(module(inputs), labels)
            value.backward()
            optimizer.step()
            value.item()

    return measure(steps, case.batches, repeats)


def header() -> str:
    try:
        model = next(
            line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        )
    except (OSError, StopIteration):
        model = platform.processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = []
    for package in ("onnxfit", "onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime", "onnx", "numpy", "torch"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    machine = f"{platform.machine()} {model}, {cores} cores, {platform.system()}"
    return f"{machine}\nPython {platform.python_version()}, {', '.join(versions)}"


def apart(*arguments: str) -> dict[str, Timing]:
    """Run this file in a process of its own and take its figures."""
    output = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {name: Timing(**timing) for name, timing in json.loads(output.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one training step and one batch of fit.")
    parser.add_argument("--repeats", type=int, default=9, help="how often each figure is measured")
    parser.add_argument("--torch", action="store_true", help="add the same step in eager PyTorch, and the ratio")
    parser.add_argument("--only", choices=["onnxfit", "torch"], help=argparse.SUPPRESS)  # how the file calls itself
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        case = CASES[options.case]
        figures = (
            measure_onnxfit(case, options.repeats) if options.only == "onnxfit" else {"torch": measure_torch(case, options.repeats)}
        )
        print(json.dumps({name: vars(timing) for name, timing in figures.items()}))
        return

    print(header())
    print(f"\n{'µs: median (middle half of ' + str(options.repeats) + ')':<34}{'train_on_batch':<36}{'fit, per batch':<36}", end="")
    print(f"{'torch eager':<36}torch/fit" if options.torch else "")
    for index, case in enumerate(CASES):
        common = ("--repeats", str(options.repeats), "--case", str(index))
        figures = apart("--only", "onnxfit", *common)
        if options.torch:
            figures |= apart("--only", "torch", *common)
        print(f"{case.title:<34}" + "".join(f"{figure!s:<36}" for figure in figures.values()), end="")
        print(f"{figures['torch'].median / figures['fit'].median:.2f}" if options.torch else "", flush=True)


if __name__ == "__main__":
    main()
