"""Ridge regression by gradient descent, compared with its closed form.

The loss is mean((y - Xw - b)^2) + 0.1 |w|^2, whose minimum is known: w = (X'X/n + 0.1 I)^-1 X'y/n
on centred data.
"""

from __future__ import annotations

import sys

import numpy as np
from models import dense

import onnxfit

L2 = 0.1


def main() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1000, 10)).astype(np.float32)
    y = (X @ rng.standard_normal(10) + 3 + 0.1 * rng.standard_normal(1000)).astype(np.float32)

    trainer = onnxfit.Trainer(
        dense(10, 1), loss="mse", penalty={"fc1.weight": L2}, optimizer=onnxfit.optimizers.SGD(0.2)
    )
    history = trainer.fit(X, y, batch_size=len(X), epochs=100, verbose=0)
    weights = trainer.get_weights()

    x64, y64 = X.astype(np.float64), y.astype(np.float64)
    centred = x64 - x64.mean(axis=0)
    expected = np.linalg.solve(
        centred.T @ centred / len(X) + L2 * np.eye(10), centred.T @ (y64 - y64.mean()) / len(X)
    )
    bias = y64.mean() - x64.mean(axis=0) @ expected
    difference = max(
        np.abs(weights["fc1.weight"][0] - expected).max(), abs(weights["fc1.bias"][0] - bias)
    )

    print(
        f"loss                {history.history['loss'][0]:.4f} -> {history.history['loss'][-1]:.4f}"
    )
    print(f"largest difference  {difference:.1e} from the closed form")
    if not difference < 1e-5:
        sys.exit("linear_regression: gradient descent did not arrive at the closed form")


if __name__ == "__main__":
    main()
