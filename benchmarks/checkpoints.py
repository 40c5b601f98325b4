"""How long a save keeps training waiting, against a plain copy of the same weights in memory.

    python benchmarks/checkpoints.py [--megabytes 500] [--folder .]

The hook is the time that `on_train_batch_end` takes of the loop, between two steps as the plain
copy is; "meanwhile" is what the steps take longer while the file is written, all of them together:
disk, memory and processors are shared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx.helper as oh
from onnx import TensorProto
from onnx.numpy_helper import from_array

from onnxfit import Trainer
from onnxfit.callbacks import Callback, ModelCheckpoint

STEPS, AT = 40, 20
REPEATS = 5


def table(megabytes: int) -> Trainer:
    """A trainer of so many megabytes of weights, in layers of 64 MB and what is left, of which a
    step computes little but the update.
    """
    rows = [2**14] * (megabytes // 64) + [2**8 * (megabytes % 64)] * (megabytes % 64 > 0)
    rng = np.random.default_rng(0)
    weights = [
        from_array(rng.standard_normal((n, 1024), np.float32), f"w{i}") for i, n in enumerate(rows)
    ]
    nodes = [oh.make_node("Gather", [w.name, "x"], [f"e{w.name}"]) for w in weights]
    nodes.append(oh.make_node("Sum", [n.output[0] for n in nodes], ["y"]))
    x = oh.make_tensor_value_info("x", TensorProto.INT64, ["N"])
    y = oh.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1024])
    model = oh.make_model(
        oh.make_graph(nodes, "table", [x], [y], weights),
        opset_imports=[oh.make_opsetid("", 17)],
        ir_version=8,
    )
    return Trainer(model, loss="mse")


class Clock(Callback):
    """The time of every step, and of the hooks after it."""

    phase = "logger"

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        self.steps.append(time.perf_counter() - self.began)


class TimedCheckpoint(ModelCheckpoint):
    """Times its own save, and a plain copy some steps before it."""

    hook = copy = 0.0

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        if batch == AT // 2:
            state, names = self.trainer._training.backend.state, self.trainer.settings["weights"]
            live = [state.buffer(name).array for name in names]
            began = time.perf_counter()
            held = [np.copy(array) for array in live]
            self.copy = time.perf_counter() - began
            del held
        began = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        self.hook = max(self.hook, time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path())
    given = parser.parse_args()
    trainer = table(given.megabytes)
    x, y = np.zeros(STEPS, np.int64), np.ones((STEPS, 1024), np.float32)
    trainer.fit(x[:2], y[:2], batch_size=1, verbose=0)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name, background in (("background", True), ("foreground", False)):
            figures = []
            for _ in range(REPEATS):
                clock = Clock()
                save = TimedCheckpoint(
                    Path(folder) / "c",
                    monitor="loss",
                    every_n_steps=trainer.global_step + AT,
                    background=background,
                )
                trainer.fit(x, y, batch_size=1, callbacks=[save, clock], verbose=0, shuffle=False)
                step = statistics.median(clock.steps[: AT - 1])
                longer = sum(clock.steps) - STEPS * step - save.hook - save.copy
                figures.append((save.hook, save.copy, save.hook / save.copy, step, longer))
            hook, copy, ratio, step, longer = (
                statistics.median(column) for column in zip(*figures)
            )
            print(
                f"{name}: hook {hook:.3f} s, np.copy {copy:.3f} s, ratio {ratio:.2f}; a step"
                f" {step:.3f} s, meanwhile {longer:+.2f} s"
            )


if __name__ == "__main__":
    main()
