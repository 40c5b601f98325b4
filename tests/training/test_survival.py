"""A training that is killed, again and again, at any moment, ends as if it never had been: to the
bit, in memory and on the disk.

`python -m tests.training.test_survival FOLDER BACKEND RATE KILLS SEED` is the training with its
murderer; `ONNXFIT_SLOW=1` lets the tests kill 50 times.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoard,
)
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Exponential
from onnxfit.training import checkpoint
from scripts.faults.calls import ENDS, Fault, FileCalls
from tests.training.test_resume import points

SLOW = os.environ.get("ONNXFIT_SLOW") == "1"
VARIANTS = [
    ("full", "schedule"),
    ("forward_backward", "plateau"),
    ("full", "plateau"),
    ("forward_backward", "schedule"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 4)).astype(np.float32)
Y = RNG.normal(size=(22, 3)).astype(np.float32)
MODEL = """<ir_version: 8, opset_import: ["": 17]>
    net (float[N, 4] x) => (float[N, 3] y) <float ratio = {0.3}>
    { m = MatMul(x, w0)  s = Add(m, b0)  t = Tanh(s)  d, mask = Dropout(t, ratio)  n = MatMul(d, w1)  y = Add(n, b1) }"""


def new(backend: str, rate: str) -> Trainer:
    model = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(1)
    for name, shape in (("w0", (4, 8)), ("b0", (8,)), ("w1", (8, 3)), ("b1", (3,))):
        array = rng.normal(size=shape).astype(np.float32) / 3
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    optimizer = (
        SGD(Exponential(0.05, 5, 0.8), momentum=0.9)
        if rate == "schedule"
        else Adam(0.02, ema_momentum=0.9)
    )
    return Trainer(
        model,
        loss="mse",
        optimizer=optimizer,
        metrics=["mae", "r2"],
        accumulate=2,
        backend=backend,
        threads=1,
    )


def train(backend: str, rate: str, every: int) -> None:
    """The script of a user who has reason to be careful; all that is to come out of it is in the
    folder when it ends.
    """
    trainer = new(backend, rate)
    callbacks: list[Callback] = [
        EarlyStopping("val_loss", patience=4, restore_best_weights=True),
        *(
            [ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05)]
            if rate == "plateau"
            else []
        ),
        ModelCheckpoint("best/{epoch}.onnxfit", top_k=2, save_last=True),
        BackupAndRestore("backup", every_n_steps=every),
        CSVLogger("log.csv"),
        TensorBoard("runs", update_freq="batch"),
    ]
    trainer.fit(
        X, Y, epochs=6, batch_size=4, validation_data=(X, Y), callbacks=callbacks, verbose=0
    )
    states = {
        callback.state_key: callback.state_dict()
        for callback in callbacks
        if callback.phase != "logger"
    }
    end = (
        trainer.get_state(),
        trainer.history.history,
        trainer.history.epoch,
        trainer.train_losses_,
        trainer.stop_reason,
        states,
    )
    Path("end.pickle").write_bytes(pickle.dumps(end))


# ---------------------------------------------------------------- the murderer


def life(
    folder: Path, backend: str, rate: str, every: int, rng: random.Random, longest: float
) -> bool:
    """One process from its beginning to its end; whether it was killed."""
    in_a_save = longest > 0 and rng.random() < 0.6
    delay = rng.uniform(0, longest)
    fault = Fault(rng.randrange(1, 200), rng.choice(ENDS))
    sys.stdout.flush()
    child = os.fork()  # nobody has made a session yet: those do not outlive a fork
    if child == 0:
        try:
            os.chdir(folder)
            with FileCalls(folder, fault if in_a_save else None):
                train(backend, rate, every)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if longest > 0 and not in_a_save:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, (
            f"the process died of signal {os.WTERMSIG(status)}"
        )
        return True
    assert os.WEXITSTATUS(status) == 0, "the training failed"
    return False


def murder(folder: Path, backend: str, rate: str, kills: int, seed: int) -> None:
    """Let the training end undisturbed in `whole`, then in `killed-<n>` until it was killed so
    often.
    """
    rng = random.Random(seed)
    (folder / "whole").mkdir(parents=True)
    began = time.monotonic()
    life(folder / "whole", backend, rate, 1, rng, 0)
    longest = time.monotonic() - began
    killed, deaths, runs = 0, [], 0
    while killed < kills:
        place = folder / f"killed-{runs}"
        place.mkdir()
        in_this_run = 0
        while life(place, backend, rate, 1 + runs % 2, rng, longest if killed < kills else 0):
            killed, in_this_run = killed + 1, in_this_run + 1
        deaths.append(in_this_run)
        runs += 1
    print(json.dumps(deaths))


# ---------------------------------------------------------------- the tests


def same_files(folder: Path) -> dict[str, Any]:
    """The checkpoints there are, by name, and what training they hold."""
    found = {}
    for path in sorted((folder / "best").glob("*.onnxfit")):
        contents = checkpoint.load(path, {})
        found[path.name] = (
            contents.state,
            contents.history,
            contents.train_losses,
            contents.resume,
            contents.missed_event,
        )
    return found


@pytest.mark.parametrize(("backend", "rate"), VARIANTS if SLOW else VARIANTS[:2])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")
def test_killed_again_and_again(backend: str, rate: str, tmp_path: Path) -> None:
    kills, seed = 13 if SLOW else 2, len(backend + rate)
    command = [
        sys.executable,
        "-m",
        "tests.training.test_survival",
        str(tmp_path),
        backend,
        rate,
        str(kills),
        str(seed),
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    deaths = json.loads(done.stdout.splitlines()[-1])
    assert sum(deaths) >= kills
    whole = tmp_path / "whole"
    expected = pickle.loads((whole / "end.pickle").read_bytes())
    assert expected[2] == list(range(len(expected[2])))
    for place in sorted(tmp_path.glob("killed-*")):
        np.testing.assert_equal(
            pickle.loads((place / "end.pickle").read_bytes()), expected, err_msg=place.name
        )
        assert (place / "log.csv").read_text() == (whole / "log.csv").read_text()
        assert points(place / "runs") == points(whole / "runs")
        # a file of the very step where training went on is never deleted
        files, wanted = same_files(place), same_files(whole)
        np.testing.assert_equal({name: files[name] for name in wanted}, wanted)
        # which the next training of another hour removes
        left = {path.name for path in place.iterdir() if path.suffix != ".part"}
        assert left == {"best", "log.csv", "runs", "end.pickle"}


if __name__ == "__main__":
    folder, backend, rate, kills, seed = sys.argv[1:]
    murder(Path(folder), backend, rate, int(kills), int(seed))
