"""Train for long, and often, in one process: neither memory nor open files nor threads may grow,
nor an epoch slow down.

    python scripts/soak.py [--fits 200] [--epochs 10000] [--only fits epochs refits]

- fits: fresh trainers over both backends and several models, with callbacks, validation,
  predictions and exports: after the last fit the process holds less than 5 % more memory than after
  a tenth of them, and as many files and threads.
- epochs: one fit of many epochs: the last take no longer than the early ones (median, within 15 %),
  and memory grows only by the histories.
- refits: one trainer that is fitted again and again: as for fits.

Prints a table; exit code 1 beyond a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfit import Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ProgressBar,
    TensorBoard,
)
from tests.models import convolutional, linear, mlp

MEMORY, SLOWER = 0.05, 0.15  # the bars
# bytes that a number in a history takes: the float, its place in a list that doubles, in two
# histories
RECORDED = 200
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    memory: int  # bytes that are resident
    files: int
    threads: int

    @staticmethod
    def now() -> Footprint:
        gc.collect()
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        memory = int(status["VmRSS"].split()[0]) << 10
        return Footprint(memory, len(os.listdir("/proc/self/fd")), int(status["Threads"]))


Case = tuple[Callable[[], onnx.ModelProto], dict[str, Any], tuple[int, ...], Callable[[int], Any]]
CASES: dict[str, Case] = {
    "line": (lambda: linear(3, 1, 0.1, 0.0), {"loss": "mse", "optimizer": "sgd"}, (3,), lambda n: RNG.normal(size=(n, 1)).astype(np.float32)),
    "mlp": (mlp, {"loss": "cross_entropy", "optimizer": "adam", "metrics": ["accuracy", "auc"]}, (4,), lambda n: RNG.integers(0, 3, n)),
    "network": (lambda: convolutional(dropout=0.2), {"loss": "cross_entropy", "optimizer": "adam"}, (1, 8, 8), lambda n: RNG.integers(0, 3, n)),
}  # fmt: skip


def fits(count: int, folder: Path) -> list[str]:
    early = Footprint.now()
    for i in range(count):
        name, backend = (
            list(CASES)[i % len(CASES)],
            ("full", "forward_backward")[i // len(CASES) % 2],
        )
        make, settings, shape, labels = CASES[name]
        trainer = Trainer(make(), **settings, backend=backend, threads=1, seed=i)
        x, y = RNG.normal(size=(40, *shape)).astype(np.float32), labels(40)
        work(trainer, x, y, folder / f"{name}{backend}", epochs=3)
        if i + 1 == max(1, count // 10):
            early = Footprint.now()
    return judged(f"{count} fits", early, Footprint.now())


def work(trainer: Trainer, x: Any, y: Any, folder: Path, epochs: int) -> None:
    """One fit with everything that a fit may carry, and what comes after it."""
    callbacks: Sequence[Callback] = [
        EarlyStopping(patience=5, restore_best_weights=True),
        ModelCheckpoint(folder / "best", save_best_only=True),
        BackupAndRestore(folder / "backup"),
        CSVLogger(folder / "log.csv"),
        TensorBoard(folder / "board", histogram_freq=1),
        ProgressBar(),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(
            x[:32],
            y[:32],
            epochs=epochs,
            batch_size=16,
            validation_data=(x[32:], y[32:]),
            callbacks=callbacks,
        )
    trainer.evaluate(x, y)
    trainer.predict(x)
    trainer.export(folder / "trained.onnx")


def refits(count: int, folder: Path) -> list[str]:
    trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam", threads=1)
    x, y = RNG.normal(size=(40, 4)).astype(np.float32), RNG.integers(0, 3, 40)
    early = Footprint.now()
    for i in range(count):
        work(trainer, x, y, folder / "refits", epochs=trainer.epoch + 3 if i % 2 else 3)
        if i + 1 == max(1, count // 10):
            early = Footprint.now()
    return judged(f"{count} fits of one trainer", early, Footprint.now())


def epochs(count: int, folder: Path) -> list[str]:
    """Of the epochs the first twentieth warms up; the tenth after it is compared with the last
    tenth.
    """
    began, seconds, seen = 0.0, np.zeros(count), dict[int, Footprint]()

    def begin(epoch: int, logs: object) -> None:
        nonlocal began
        if epoch == count // 20:
            seen[epoch] = Footprint.now()
        began = time.perf_counter()

    def end(epoch: int, logs: object) -> None:
        seconds[epoch] = time.perf_counter() - began

    trainer = Trainer(linear(3, 1, 0.1, 0.0), loss="mse", threads=1)
    x, y = RNG.normal(size=(16, 3)).astype(np.float32), RNG.normal(size=(16, 1)).astype(np.float32)
    told = LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
    callbacks = [told, CSVLogger(folder / "long.csv"), EarlyStopping("loss", patience=count)]
    history = trainer.fit(
        x, y, epochs=count, batch_size=8, validation_data=(x, y), callbacks=callbacks, verbose=0
    )
    early, late = seen[count // 20], Footprint.now()
    first, last = (
        statistics.median(seconds[count // 20 : 3 * count // 20]),
        statistics.median(seconds[-count // 10 :]),
    )
    columns = len(history.history) + 1
    allowed = columns * count * RECORDED
    print(
        f"{count} epochs: {1e6 * first:.0f} us an epoch early, {1e6 * last:.0f} late"
        f" ({last / first:.2f} times);",
        end=" ",
    )
    print(
        f"memory {early.memory / 1e6:.1f} -> {late.memory / 1e6:.1f} MB, of which histories may"
        f" take {allowed / 1e6:.1f}",
        end=" ",
    )
    print(f"MB; files {early.files} -> {late.files}, threads {early.threads} -> {late.threads}")
    beyond = []
    if last > (1 + SLOWER) * first:
        beyond.append(f"an epoch takes {last / first:.2f} times as long after {count} epochs")
    if late.memory - early.memory > allowed + MEMORY * early.memory:
        beyond.append(f"{count} epochs take {(late.memory - early.memory) / 1e6:.1f} MB")
    return beyond


def judged(what: str, early: Footprint, late: Footprint) -> list[str]:
    growth = late.memory / early.memory - 1
    print(
        f"{what}: memory {early.memory / 1e6:.1f} -> {late.memory / 1e6:.1f} MB"
        f" ({100 * growth:+.1f} %), files {early.files} -> {late.files}, threads {early.threads} ->"
        f" {late.threads}",
        flush=True,
    )
    beyond = [f"{what}: {100 * growth:.1f} % more memory"] if growth > MEMORY else []
    beyond += (
        [f"{what}: {late.files - early.files} files stay open"] if late.files > early.files else []
    )
    return beyond + (
        [f"{what}: {late.threads - early.threads} threads stay"]
        if late.threads > early.threads
        else []
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--fits", type=int, default=200)
    arguments.add_argument("--epochs", type=int, default=10_000)
    arguments.add_argument(
        "--only",
        nargs="+",
        choices=("fits", "epochs", "refits"),
        default=("fits", "epochs", "refits"),
    )
    given = arguments.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    beyond: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        if "fits" in given.only:
            beyond += fits(given.fits, Path(name))
        if "epochs" in given.only:
            beyond += epochs(given.epochs, Path(name))
        if "refits" in given.only:
            beyond += refits(given.fits, Path(name))
    for line in beyond:
        print(f"FAILED: {line}")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
