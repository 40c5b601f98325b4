"""Train for long, and often, in one process: neither memory nor open files nor threads may grow,
nor an epoch slow down.

    python scripts/soak.py [--length 1] [--only fits epochs ...]

- fits: fresh trainers over both backends and several models, with callbacks, validation,
  predictions and exports.
- refits: one trainer that is fitted again and again.
- shapes: one trainer for each backend and two models, and batches of ever other sizes and sequence
  lengths.
- prefetch: data that threads prepare ahead, in epochs that end, stop early, or fail.
- threads: threads that predict while the main thread trains; their predictions are those of whole
  weights.
- epochs: one fit of many epochs.
- ranks: trainings with mpiexec, killed at random moments and run again, on 2 and 3 ranks, and on
  another number of them than before; each ends where a training ends that nobody kills.

After the last repetition, the process holds less than 5 % more memory than after a tenth of them,
and as many files and threads. Of the epochs, the last take no longer than the early ones (median,
within 15 %), and memory grows only by the histories.

Prints a line for each; exit code 1 beyond a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

from onnxfit import DataLoader, Prefetch, Trainer
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
from tests.distributed import survivor
from tests.distributed.threads import on_ranks
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


BACKENDS = ("full", "forward_backward")
Case = tuple[Callable[[], onnx.ModelProto], dict[str, Any], tuple[int, ...], Callable[[int], Any]]
CASES: dict[str, Case] = {
    "line": (lambda: linear(3, 1, 0.1, 0.0), {"loss": "mse", "optimizer": "sgd"}, (3,), lambda n: RNG.normal(size=(n, 1)).astype(np.float32)),
    "mlp": (mlp, {"loss": "cross_entropy", "optimizer": "adam", "metrics": ["accuracy", "auc"]}, (4,), lambda n: RNG.integers(0, 3, n)),
    "network": (lambda: convolutional(dropout=0.2), {"loss": "cross_entropy", "optimizer": "adam"}, (1, 8, 8), lambda n: RNG.integers(0, 3, n)),
}  # fmt: skip


def sequences(operator: str) -> onnx.ModelProto:
    """Return a classifier of sequences of any length: float[N, T, 3] -> float[N, 2]."""
    body = {
        "Tanh": "m = MatMul(x, w)  h = Tanh(m)",
        "LSTM": "t = Transpose<perm = [1, 0, 2]>(x)  s = LSTM<hidden_size = 4>(t, w, r)"
        "  u = Transpose<perm = [2, 0, 1, 3]>(s)"
        "  shape = Constant<value = int64[3] {0, -1, 4}>()  h = Reshape(u, shape)",
    }[operator]
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, T, 3] x) => (float[N, 2] y) {{ {body}  e = ReduceMean<axes = [1], keepdims = 0>(h)  y = MatMul(e, v) }}"""
    )
    sizes = {"Tanh": {"w": (3, 4)}, "LSTM": {"w": (1, 16, 3), "r": (1, 16, 4)}}[operator]
    for name, size in {**sizes, "v": (4, 2)}.items():
        weight = RNG.normal(size=size).astype(np.float32) / 4
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def repeat(what: str, count: int, act: Callable[[int], object]) -> list[str]:
    """Call `act` with the numbers below `count`, and return what the process holds too much of."""
    early = Footprint.now()
    for i in range(count):
        act(i)
        if i + 1 == max(1, count // 10):
            early = Footprint.now()
    return judged(f"{count} {what}", early, Footprint.now())


def fits(count: int, folder: Path) -> list[str]:
    def act(i: int) -> None:
        name = list(CASES)[i % len(CASES)]
        backend = BACKENDS[i // len(CASES) % 2]
        make, settings, shape, labels = CASES[name]
        trainer = Trainer(make(), **settings, backend=backend, threads=1, seed=i)
        x, y = RNG.normal(size=(40, *shape)).astype(np.float32), labels(40)
        work(trainer, x, y, folder / f"{name}{backend}", epochs=3)

    return repeat("fits", count, act)


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

    def act(i: int) -> None:
        work(trainer, x, y, folder / "refits", epochs=trainer.epoch + 3 if i % 2 else 3)

    return repeat("fits of one trainer", count, act)


def shapes(count: int, folder: Path) -> list[str]:
    trainers = [
        Trainer(sequences(operator), loss="cross_entropy", backend=backend, threads=1)
        for operator in ("Tanh", "LSTM")
        for backend in BACKENDS
    ]
    # The graphs of the first shapes are kept, so all trainers get them before memory is compared.
    first = count // 10

    def act(i: int) -> None:
        rows, steps = RNG.integers(1, 9), RNG.integers(1, 60)
        x = RNG.normal(size=(rows, steps, 3)).astype(np.float32)
        y = RNG.integers(0, 2, rows)
        for trainer in trainers:
            trainer.train_on_batch(x, y)
            if i < first or i % 5 == 0:
                trainer.predict(x)
                trainer.evaluate(x, y)

    return repeat("batches of other shapes", count, act)


def prefetch(count: int, folder: Path) -> list[str]:
    trainer = Trainer(mlp(), loss="cross_entropy", threads=1)
    x, y = RNG.normal(size=(64, 4)).astype(np.float32), RNG.integers(0, 3, 64)

    def failing() -> Iterator[tuple[Any, Any]]:
        for start in range(0, 32, 8):
            yield x[start : start + 8], y[start : start + 8]
        raise OSError("the disk is gone")

    def act(i: int) -> None:
        data = DataLoader(x, y, batch_size=8, prefetch=3)
        stop = LambdaCallback(on_train_batch_end=lambda batch, logs: _stop(trainer, batch == i % 8))
        trainer.fit(data, epochs=2, verbose=0, callbacks=[stop], validation_data=data)
        trainer.fit(Prefetch(ragged), epochs=1, verbose=0)
        trainer.predict(data)
        with contextlib.suppress(OSError):
            trainer.fit(Prefetch(failing), epochs=2, verbose=0)
        next(iter(Prefetch(failing, depth=2)))  # an iterator that is given up

    def ragged() -> Iterator[tuple[Any, Any]]:
        for rows in (1, 5, 3, 8, 2):
            yield x[:rows], y[:rows]

    return repeat("rounds of prefetched data", count, act)


def _stop(trainer: Trainer, now: bool) -> None:
    if now:
        trainer.stop_training = True


def threads(count: int, folder: Path) -> list[str]:
    beyond: list[str] = []
    for backend in BACKENDS:
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam", backend=backend, threads=1)
        beyond += _predict_while_training(count, trainer, folder / backend)
    return beyond


def _predict_while_training(count: int, trainer: Trainer, folder: Path) -> list[str]:
    x, y = RNG.normal(size=(40, 4)).astype(np.float32), RNG.integers(0, 3, 40)
    same = np.repeat(x[:1], 64, axis=0)
    ended = threading.Event()
    wrong: list[str] = []

    def predict() -> None:
        while not ended.is_set() and not wrong:
            try:
                rows = trainer.predict(same, batch_size=64)
            except Exception as error:
                wrong.append(f"predict in a thread: {type(error).__name__}: {error}")
            else:
                if not (np.isfinite(rows).all() and (rows == rows[0]).all()):
                    wrong.append("predict in a thread: equal rows have different predictions")

    def act(i: int) -> None:
        predicting = [threading.Thread(target=predict) for _ in range(3)]
        ended.clear()
        for thread in predicting:
            thread.start()
        try:
            work(trainer, x, y, folder, epochs=3)
        finally:
            ended.set()
            for thread in predicting:
                thread.join()

    what = f"fits with threads that predict ({trainer.backend})"
    return [*repeat(what, count, act), *wrong]


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


# The numbers of ranks of the runs that are killed, one after another, and of the last run.
RANKS = ([2] * 5, [3] * 5, [4, 4, 1], [1, 1, 3], [2, 3, 1, 2])


def ranks(count: int, folder: Path) -> list[str]:
    rng = random.Random(0)
    whole: dict[int, dict[str, Any]] = {1: survivor.train(None, folder / "whole1")}
    for size in (2, 3):
        ends = on_ranks(size, lambda c: survivor.train(c, folder / f"whole{c.size}.{c.rank}"))
        whole[size] = ends[0]
    kills = chain = 0
    beyond: list[str] = []
    while kills < count:
        sizes, place = RANKS[chain % len(RANKS)], folder / f"chain{chain}"
        for size in sizes[:-1]:
            fault = {"kind": "kill", "rank": rng.randrange(size), "seconds": rng.uniform(0, 1)}
            status, _ = survivor.run(size, place, **fault)
            kills += status != 0
        status, errors = survivor.run(sizes[-1], place, kind="none")
        what = f"a chain of runs on {sizes} ranks"
        try:
            assert status == 0, errors
            tolerance = 0.0 if len({*sizes}) == 1 else 1e-9
            survivor.require_same_end(place, whole[sizes[-1]], tolerance)
        except (AssertionError, OSError) as error:
            beyond.append(f"{what}: {error}")
        print(f"{what}: {kills} ranks killed so far", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        chain += 1
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


# the repetitions of `--length 1`, together some minutes
COUNTS = {
    "fits": 200,
    "refits": 200,
    "shapes": 2000,
    "prefetch": 300,
    "threads": 60,
    "epochs": 10_000,
    "ranks": 30,
}
MIN_COUNT = 60  # so that a tenth has come to every model and backend
SHORT = ("ranks",)  # which compares no memory
SOAKS = {"fits": fits, "refits": refits, "shapes": shapes, "prefetch": prefetch, "threads": threads, "epochs": epochs, "ranks": ranks}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=float, default=1.0, help="times the usual repetitions")
    parser.add_argument("--only", nargs="+", choices=COUNTS, default=list(COUNTS))
    given = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    beyond: list[str] = []
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            least = 1 if name in SHORT else MIN_COUNT
            count = max(least, round(COUNTS[name] * given.length))
            beyond += SOAKS[name](count, Path(folder))
    for line in beyond:
        print(f"FAILED: {line}")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
