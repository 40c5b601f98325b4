"""Train 50 steps for a browser to continue, and 50 more on the state that it returns.

python resume.py begin FOLDER     writes the training folder
python resume.py finish FOLDER    prints how far 150 steps in Python alone differ
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

import onnxfit

sys.path.insert(0, str(Path(__file__).parents[1]))
import make_folders

PART = 50
ROWS = make_folders.ROWS


def trainer() -> onnxfit.Trainer:
    return onnxfit.Trainer(
        make_folders.cnn(), loss="cross_entropy", optimizer="adam", seed=3, threads=1
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    """The rows of 150 batches: the digits, again and again."""
    rows = np.arange(3 * PART * ROWS) % 1797
    return make_folders.digits((1, 8, 8), np.float32, 16)[rows], load_digits().target[rows]


def train(trainer: onnxfit.Trainer, first: int, last: int) -> None:
    x, y = data()
    for step in range(first, last):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        trainer.train_on_batch(x[rows], y[rows])


def main() -> None:
    action, folder = sys.argv[1], Path(sys.argv[2])
    if action == "begin":
        started = trainer()
        train(started, 0, PART)
        started.export_training(folder, target="web")
        x, y = data()
        save_file({"x": x, "y": y}, folder / "data.safetensors")
        return
    alone = trainer()
    train(alone, 0, 3 * PART)
    returned = trainer()
    returned.import_state(folder / "returned.safetensors")
    assert returned.global_step == 2 * PART
    train(returned, 2 * PART, 3 * PART)
    weights = returned.get_weights()
    print(max(float(abs(weights[k] - v).max()) for k, v in alone.get_weights().items()))


if __name__ == "__main__":
    main()
