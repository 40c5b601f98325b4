"""Trainings whose results do not depend on the number of ranks, run by one process or by ranks.

    mpiexec -n 2 python -m tests.distributed.same_cases FOLDER

Each rank writes the weights and figures of every training into FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

from onnxfit import Trainer, losses
from onnxfit.callbacks import BackupAndRestore, Callback
from onnxfit.distributed.find import world_of

ROWS = 33  # batches of 16: the last one has 1 row, so that other ranks have none
EPOCHS = 2
STOP = 4  # batches after which a training is interrupted, in its second epoch
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, 5)).astype(np.float32)
LABELS = rng.integers(0, 3, ROWS)
ROW_WEIGHTS = rng.random(ROWS).astype(np.float32)

MASKED = losses.CrossEntropy(ignore_index=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": 0.5, "metrics": ["accuracy"], "fit": {"validation_split": 0.3}},
    "clipping and a penalty": {"clip_norm": 0.1, "clip_value": 0.05, "penalty": 1e-2},
    "a mask in windows": {"loss": MASKED, "accumulate": 2},
    "separate graphs": {
        "backend": "forward_backward",
        "clip_norm": 0.1,
        "fit": {"sample_weight": ROW_WEIGHTS},
    },
}
RESUMED = "resumed"


def network() -> onnx.ModelProto:
    """Return a network of two layers in float32."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net (float[N, 5] x) => (float[N, 3] y)'
        "{ p0 = MatMul(x, w0)  s0 = Add(p0, b0)  h = Tanh(s0)  p1 = MatMul(h, w1)  y = Add(p1, b1) }"
    )
    own = np.random.default_rng(1)
    for name, shape in {"w0": (5, 8), "b0": (8,), "w1": (8, 3), "b1": (3,)}.items():
        array = (own.standard_normal(shape) * 0.4).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


class Stop(Callback):
    """Interrupts a training on all ranks at once."""

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self.trainer.global_batch == STOP:
            raise InterruptedError


def trained(
    distribute: Any, *, fit: dict[str, Any] | None = None, **settings: Any
) -> dict[str, np.ndarray]:
    """Return the weights and the figures of a training."""
    settings = {"loss": "cross_entropy", "optimizer": "adam", **settings}
    trainer = Trainer(network(), seed=3, threads=1, distribute=distribute, **settings)
    arguments = {"epochs": EPOCHS, "batch_size": 16, "verbose": 0, **(fit or {})}
    history = trainer.fit(X, LABELS, **arguments).history
    return {**trainer.get_weights(), **{name: np.array(v) for name, v in history.items()}}


def resumed(distribute: Any, folder: Path) -> dict[str, np.ndarray]:
    """Return the results of a training that was interrupted, and goes on from its backup."""
    settings = SETTINGS["SGD"]
    fit = {**settings["fit"], "callbacks": [BackupAndRestore(folder, save_freq=1)]}
    interrupted = {**fit, "callbacks": [*fit["callbacks"], Stop()]}
    try:
        trained(distribute, **{**settings, "fit": interrupted})
    except InterruptedError:
        world_of(distribute).gather("the start of the next job", None)
        return trained(distribute, **{**settings, "fit": fit})
    raise AssertionError("the training was not interrupted")


def results(distribute: Any, folder: Path) -> dict[str, np.ndarray]:
    """Return "case: tensor or figure" -> array."""
    cases = {name: trained(distribute, **settings) for name, settings in SETTINGS.items()}
    cases[RESUMED] = resumed(distribute, folder)
    return {f"{case}: {name}": a for case, arrays in cases.items() for name, a in arrays.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rank = world_of("mpi").rank
    np.savez(folder / f"rank{rank}.npz", **results("auto", folder / "backup"))
