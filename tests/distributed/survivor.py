"""A training on several ranks that ends where it would have ended, however often it is killed.

`mpiexec -n 2 python -m tests.distributed.survivor FOLDER FAULT` trains; FAULT is JSON:

- `kind`: "kill" (SIGKILL), "raise" (an exception in a callback), "disk" (a full disk), or "none".
- `rank`: the rank with the fault.
- `batch`: the batch in which it happens, or `seconds`: the time after the beginning of the training.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser

from onnxfit import Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from onnxfit.distributed.launcher import find_mpiexec, ranks_environment
from tests.distributed.ranks import environment, finish

EPOCHS = 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4))
Y = RNG.normal(size=(22, 3))
MODEL = """<ir_version: 8, opset_import: ["": 17]> net (double[N, 4] x) => (double[N, 3] y)
    { m = MatMul(x, w0)  s = Add(m, b0)  t = Tanh(s)  n = MatMul(t, w1)  y = Add(n, b1) }"""


class Fail(Callback):
    """Bring about the fault on its rank."""

    phase = "backup"  # after the backup of a batch has begun
    ranks = "all"

    def __init__(self, kind: str = "none", rank: int = 0, **moment: float) -> None:
        self.kind, self.rank, self.moment = kind, rank, moment

    def on_train_begin(self, logs: Any) -> None:
        if self.trainer.rank == self.rank and "seconds" in self.moment:
            timer = threading.Timer(self.moment["seconds"], self.act)
            timer.daemon = True
            timer.start()

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        moment = self.moment.get("batch")
        if self.trainer.rank == self.rank and self.trainer.global_batch == moment:
            self.act()

    def act(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "raise":
            raise ValueError("a bad row")
        if self.kind == "disk":
            os.fsync = full


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def train(distribute: Any, folder: Path, **fault: Any) -> dict[str, Any]:
    """Train with all that a user may take care with; return where it ends."""
    model = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(1)
    for name, shape in {"w0": (4, 8), "b0": (8,), "w1": (8, 3), "b1": (3,)}.items():
        array = rng.normal(size=shape) / 3
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    trainer = Trainer(
        model,
        loss="mse",
        optimizer="adam",
        metrics=["mae"],
        accumulate=2,
        threads=1,
        distribute=distribute,
    )
    best = ModelCheckpoint(folder / "best" / "{epoch}.onnxfit", top_k=2, save_last=True)
    callbacks: list[Callback] = [
        EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05),
        best,
        BackupAndRestore(folder / "backup", save_freq=1),
        CSVLogger(folder / "log.csv"),
        Fail(**fault),
    ]
    history = trainer.fit(
        X, Y, epochs=EPOCHS, batch_size=4, validation_data=(X, Y), callbacks=callbacks, verbose=0
    )
    kept = json.dumps([Path(path).name for path, _ in best.kept])
    return {**trainer.get_weights(), "history": json.dumps(history.history), "kept": kept}


def run(ranks: int, folder: Path, **fault: Any) -> tuple[int, str]:
    """Run a training with mpiexec; return its status and its errors."""
    process = subprocess.Popen(
        [
            *([find_mpiexec(), "-n", str(ranks)] if ranks > 1 else []),
            *(sys.executable, "-m", __name__, str(folder), json.dumps(fault)),
        ],
        env=ranks_environment(environment()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status, _, errors = finish(process)
    return status, errors


def require_same_end(folder: Path, whole: dict[str, Any], tolerance: float = 0.0) -> None:
    """Compare the end of a training that was killed with that of one that was not."""
    with np.load(folder / "end.npz") as end:
        assert str(end["kept"]) == whole["kept"], (str(end["kept"]), whole["kept"])
        for name in set(whole) - {"history", "kept"}:
            np.testing.assert_allclose(end[name], whole[name], rtol=0, atol=tolerance, err_msg=name)
        history, expected = json.loads(str(end["history"])), json.loads(whole["history"])
    assert list(history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=tolerance, atol=0, err_msg=name)
    rows = (folder / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", *map(str, range(1, EPOCHS + 1))], rows
    # A file from which training went on is never deleted.
    files = {path.name for path in (folder / "best").iterdir()}
    assert files >= {"last.onnxfit", *json.loads(whole["kept"])}, files
    assert not (folder / "backup").exists(), "backups are left"


if __name__ == "__main__":
    end = train("auto", Path(sys.argv[1]), **json.loads(sys.argv[2]))
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")) == "0":
        np.savez(Path(sys.argv[1]) / "end.npz", **end)
